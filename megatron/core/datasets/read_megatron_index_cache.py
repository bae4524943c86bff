"""Index caches that Megatron-LM left: found by their descriptions, taken if every number fits the data.

    FOLDER/{md5}-GPTDataset-{split}-description.txt          JSON whose md5 is in the name
    FOLDER/{md5}-GPTDataset-{split}-{document,sample,shuffle}_index.npy
    FOLDER/{md5}-BlendedDataset-{split}-{dataset,dataset_sample}_index.npy
    PREFIX_{split}_indexmap_{n}ns_{s}sl_{seed}s_{doc,sample,shuffle}_idx.npy     versions before 2023: no description

Neither names nor descriptions depend on the content of the data, and nothing protects the arrays. Therefore every number is
checked; only that the shuffled orders were drawn from the seed is taken on trust. A cache that passes is copied into an
`IndexCache`, which later runs read.
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
    passes_over,
    shape_problem,
    shuffled_first,
)

Described = Callable[[Path, str], list[tuple[Path, dict[str, Any]]]]  # `descriptions`, cached while a run builds


def descriptions(folder: Path, name: str) -> list[tuple[Path, dict[str, Any]]]:
    """(path without its ending, description) of each cache of Megatron's in `folder`. name: of the class and split.

    A path to the data is cut to its last part, since data move. A file is passed over if its name lacks the md5 of its text.
    """
    found = []
    for path in sorted(folder.glob(f"*-{name}-description.txt")):
        try:
            text = path.read_bytes()
            fields = json.loads(text)
        except (OSError, ValueError, RecursionError):
            continue
        if path.name.split("-")[0] == hashlib.md5(text, usedforsecurity=False).hexdigest() and isinstance(fields, dict):
            fields["dataset_path"] = Path(str(fields.get("dataset_path"))).name
            found.append((path.with_name(path.name.removesuffix("-description.txt")), fields))
    return found


@dataclass(frozen=True)
class Wanted:
    """A cache that Megatron-LM may have left.

    name: of the class and split; fields: entries of its description; arrays: their names. problem(arrays) says why arrays
    do not fit, None if they do. older: path of files from before 2023, without {doc,sample,shuffle}_idx.npy.
    """

    folder: Path
    name: str
    fields: dict[str, Any]
    arrays: tuple[str, ...]
    problem: Callable[[list[np.ndarray]], str | None]
    older: str = ""

    def find(self, described: Described, say: Callable[[str], None]) -> tuple[str, tuple[np.ndarray, ...]] | None:
        """Where the first cache that fits is, and its arrays. `say` hears why others do not fit."""
        stems = [stem for stem, fields in described(self.folder, self.name) if fields | self.fields == fields]
        caches = [(f"{stem}*", [f"{stem}-{name}.npy" for name in self.arrays]) for stem in stems]
        older = [f"{self.older}_{name}_idx.npy" for name in ("doc", "sample", "shuffle")]
        if Path(older[0]).is_file():
            caches.append((f"{self.older}*", older))
        for place, paths in caches:
            try:
                arrays = [np.lib.format.open_memmap(path, mode="r") for path in paths]
            except Exception as error:  # of many types: numpy reads the header as if it were a line of Python
                problem = f"it cannot be read ({error})"
            else:
                problem = self.problem(arrays)
            if problem is None:
                return place, tuple(arrays)
            say(f"index cache {place} is not taken: {problem}")
        return None


def index_problem(arrays: Sequence[np.ndarray], lengths: np.ndarray, request: IndexRequest) -> str | None:
    """Why these arrays cannot be those of `request`, for sequences of these lengths; None if they can."""
    indices = Indices(*arrays)
    if problem := shape_problem(indices, lengths, request):
        return problem
    documents, order = indices.document_index, indices.shuffle_index
    borders = shuffled_first(request, passes_over(lengths, request))
    if not all(_holds_each(part, *request.ids_range) for part in np.split(documents, borders[:1])):
        return "its document_index does not hold each document of the split once an epoch"
    samples = build_sample_index(lengths, documents, len(order), request.seq_length, request.extra_token)
    if not np.array_equal(samples, indices.sample_index):
        return "its sample_index is that of other data"
    parts = zip((0, borders[1]), np.split(order, borders[1:]))
    if not all(_holds_each(part, first, first + len(part)) for first, part in parts):
        return "its shuffle_index does not hold each sample once"
    return None


def _holds_each(array: np.ndarray, first: int, past: int) -> bool:
    """Whether `array` holds the numbers [first, past) and no other, all equally often."""
    if not len(array):
        return True
    if not first <= array.min() <= array.max() < past:
        return False
    counts = np.bincount(np.subtract(array, first, dtype=np.int64), minlength=past - first)
    return bool((counts == counts[0]).all())


def order_problem(arrays: list[np.ndarray], right: tuple[np.ndarray, ...]) -> str | None:
    """Why `arrays` are not the order of a blend, which follows from its weights alone; None if they are `right`."""
    same = all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(arrays, right, strict=True))
    return None if same else "its order is that of another blend"
