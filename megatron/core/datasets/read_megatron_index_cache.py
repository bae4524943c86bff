"""Find index caches that Megatron-LM left, by their descriptions, and take them if every number fits the data.

    FOLDER/{md5}-GPTDataset-{split}-description.txt          JSON whose md5 is in the name
    FOLDER/{md5}-GPTDataset-{split}-{document,sample,shuffle}_index.npy
    FOLDER/{md5}-BlendedDataset-{split}-{dataset,dataset_sample}_index.npy
    PREFIX_{split}_indexmap_{n}ns_{s}sl_{seed}s_{doc,sample,shuffle}_idx.npy     versions before 2023: no description

Neither names nor descriptions depend on the content of the data, and no hash protects the arrays. Therefore every
number is checked; only that the shuffled orders were drawn from the seed is taken on trust. A cache that passes is
copied into an `IndexCache`, which later runs read.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.index_map import (
    IndexRequest,
    Indices,
    build_sample_index,
    shape_problem,
    shuffled_docs_and_samples,
    split_size,
)

# The function `caches_with_descriptions`, whose results are cached while a run builds.
Described = Callable[[Path, str], list[tuple[Path, dict[str, Any]]]]


def caches_with_descriptions(folder: Path, name: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return (path without its ending, description) of each cache of Megatron's in `folder`.

    name: of the class and split. A path to the data in a description is cut to its last part, since data move. A file
    is ignored if its name lacks the md5 of its text.
    """
    result = []
    for path in sorted(folder.glob(f"*-{name}-description.txt")):
        try:
            text = path.read_bytes()
            fields = json.loads(text)
        except (OSError, ValueError, RecursionError):
            continue
        md5 = hashlib.md5(text, usedforsecurity=False).hexdigest()
        if path.name.split("-")[0] == md5 and isinstance(fields, dict):
            fields["dataset_path"] = Path(str(fields.get("dataset_path"))).name
            result.append((path.with_name(path.name.removesuffix("-description.txt")), fields))
    return result


@dataclass(frozen=True)
class MegatronCache:
    """A cache that Megatron-LM may have left.

    name: of the class and split; fields: entries of its description; arrays: their names. problem(arrays) says why
    arrays do not fit, None if they do. older: path of files from before 2023, without {doc,sample,shuffle}_idx.npy.
    """

    folder: Path
    name: str
    fields: dict[str, Any]
    arrays: tuple[str, ...]
    problem: Callable[[list[np.ndarray]], str | None]
    older: str = ""

    def find(self, described: Described, say: Callable[[str], None]) -> tuple[str, tuple[np.ndarray, ...]] | None:
        """Return the path of the first cache that fits, and its arrays, memory-mapped, in the order of `arrays`.

        Their shapes are those of `Indices` or `BlendIndices`. `say` takes the reasons why others do not fit.
        """
        # caches whose description has all our fields, with our values
        caches = []
        for stem, fields in described(self.folder, self.name):
            if fields | self.fields == fields:
                caches.append((f"{stem}*", [f"{stem}-{name}.npy" for name in self.arrays]))
        # files from before 2023, which have no description
        older = [f"{self.older}_{name}_idx.npy" for name in ("doc", "sample", "shuffle")]
        if Path(older[0]).is_file():
            caches.append((f"{self.older}*", older))

        for pattern, paths in caches:
            try:
                arrays = [np.lib.format.open_memmap(path, mode="r") for path in paths]
            except Exception as error:  # can have many types: numpy reads the header as if it were a line of Python
                problem = f"it cannot be read ({error})"
            else:
                problem = self.problem(arrays)
            if problem is None:
                return pattern, tuple(arrays)
            say(f"index cache {pattern} is not taken: {problem}")
        return None


def index_problem(arrays: Sequence[np.ndarray], lengths: np.ndarray, request: IndexRequest) -> str | None:
    """Say why these arrays cannot be those of `request`, for sequences of these lengths; None if they can.

    arrays: the three of `Indices`. lengths: [sequences], tokens of each.
    """
    indices = Indices(*arrays)
    problem = shape_problem(indices, lengths, request)
    if problem is not None:
        return problem
    num_documents_together, num_samples_together = shuffled_docs_and_samples(request, split_size(lengths, request))

    # each of the two parts that are shuffled by themselves holds each document equally often
    for documents in np.split(indices.document_index, [num_documents_together]):
        if not _holds_each(documents, *request.ids_range):
            return "its document_index does not hold each document of the split once an epoch"

    # the sample index follows from the document index
    samples = build_sample_index(
        lengths, indices.document_index, len(indices.shuffle_index), request.seq_length, request.extra_token
    )
    if not np.array_equal(samples, indices.sample_index):
        return "its sample_index is that of other data"

    # each of the two parts of the shuffle holds its own samples once
    first, rest = np.split(indices.shuffle_index, [num_samples_together])
    first_holds_each = _holds_each(first, 0, len(first))
    if not first_holds_each or not _holds_each(rest, num_samples_together, num_samples_together + len(rest)):
        return "its shuffle_index does not hold each sample once"
    return None


def _holds_each(array: np.ndarray, first: int, past: int) -> bool:
    """Return whether `array` holds the numbers [first, past) and no other, all equally often."""
    if not len(array):
        return True
    if not first <= array.min() <= array.max() < past:
        return False
    counts = np.bincount(np.subtract(array, first, dtype=np.int64), minlength=past - first)
    return bool((counts == counts[0]).all())


def blend_order_problem(arrays: list[np.ndarray], expected: tuple[np.ndarray, ...]) -> str | None:
    """Say why `arrays` are not the order of a blend, which follows from its weights alone.

    Both are the two arrays of `BlendIndices`, [samples] each. None if they are equal to `expected`.
    """
    for array, expected_array in zip(arrays, expected, strict=True):
        if array.dtype != expected_array.dtype or not np.array_equal(array, expected_array):
            return "its order is that of another blend"
    return None
