"""Index caches that Megatron-LM left: found by what their descriptions say, taken only if the arrays fit the data.

    FOLDER/{md5}-GPTDataset-{split}-description.txt          JSON whose md5 is in the name
    FOLDER/{md5}-GPTDataset-{split}-{document,sample,shuffle}_index.npy
    FOLDER/{md5}-BlendedDataset-{split}-{dataset,dataset_sample}_index.npy
    PREFIX_{split}_indexmap_{n}ns_{s}sl_{seed}s_{doc,sample,shuffle}_idx.npy     versions before 2023

The names say nothing of the content of the data, and nothing protects the arrays, so every number in them is checked: the
documents are those of the split, each as often as there are epochs; the samples begin where they must, given that order; the
shuffle holds each sample once. Only that the orders were drawn from the seed is taken on trust. What passes is written
into the cache of ours (`index_cache`), which later runs read.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.blend import BlendIndices, number_within, weighted_indices
from megatron.core.datasets.index_cache import open_array
from megatron.core.datasets.index_map import (
    IndexRequest,
    Indices,
    build_sample_index,
    num_epochs,
    samples_before_final_epoch,
    samples_in,
    separate_final_epoch,
    split_tokens,
)

_OLD_PARTS = ("doc_idx", "sample_idx", "shuffle_idx")
_CHOICES_COMPARED = 10_000  # of a blend, which are made again


class FoundCaches:
    """The Megatron caches of some folders, each of which is listed once, at the first question."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._listed: dict[tuple[Path, str], dict[str, list[tuple[Path, dict[str, Any]]]]] = {}

    def indices(
        self, folder: Path, prefix: str, split: str, request: IndexRequest, lengths: np.ndarray
    ) -> tuple[Indices, str] | None:
        """The arrays for `request`, and where they were found. lengths: of every sequence of the file."""
        if request.epoch_stable:
            return None  # an order that Megatron does not have
        stems = self._index_stems(folder, prefix, split, request)
        return self._first_sound(stems, lambda arrays: index_problem(Indices(*arrays), lengths, request), Indices)

    def blend(self, folder: Path, split: str, fields: dict[str, Any], sets: int) -> tuple[BlendIndices, str] | None:
        """Likewise for a blend of so many data sets. fields: `shares`, and its `size` or else the `sizes` of all."""
        weights = fields["shares"] if fields["size"] is not None else fields["sizes"]
        wanted = {"weights": weights, "size": fields["size"]}
        stems = (
            (stem, tuple(f"-{name}.npy" for name in BlendIndices._fields))
            for stem, described in self._described(folder, "BlendedDataset", split)
            if _has(described, wanted) and len(described.get("datasets", [])) == sets
        )
        return self._first_sound(stems, lambda arrays: blend_problem(BlendIndices(*arrays), fields), BlendIndices)

    def _first_sound(
        self, stems: Iterable[tuple[Path, tuple[str, ...]]], problem_of: Callable[[list], str | None], kind: type
    ) -> tuple[Any, str] | None:
        """The arrays of the first of `stems` (path, endings) that can be read and have no problem, and where they are."""
        for stem, endings in stems:
            try:
                arrays = [open_array(f"{stem}{ending}") for ending in endings]
                problem = problem_of(arrays)
            except (OSError, ValueError) as error:
                problem = f"it cannot be read ({error})"
            if problem is None:
                return kind(*arrays), f"{stem}*"
            self._say(f"{stem}* is not taken: {problem}")
        return None

    def _index_stems(
        self, folder: Path, prefix: str, split: str, request: IndexRequest
    ) -> Iterator[tuple[Path, tuple[str, ...]]]:
        wanted = {
            "num_samples": request.num_samples,
            "random_seed": request.seed,
            "sequence_length": request.seq_length,
        }
        for stem, described in self._described(folder, "GPTDataset", split):
            same_file = Path(str(described.get("dataset_path"))).name == Path(prefix).name
            if same_file and _has(described, wanted):
                yield stem, tuple(f"-{name}.npy" for name in Indices._fields)
        old = f"{prefix}_{split}_indexmap_{request.num_samples}ns_{request.seq_length}sl_{request.seed}s"
        if Path(f"{old}_{_OLD_PARTS[0]}.npy").is_file():
            yield Path(old), tuple(f"_{name}.npy" for name in _OLD_PARTS)

    def _described(self, folder: Path, kind: str, split: str) -> list[tuple[Path, dict[str, Any]]]:
        """(path without its ending, description) of each cache of one kind and split."""
        if (folder, kind) not in self._listed:
            self._listed[folder, kind] = _descriptions(folder, kind)
        return self._listed[folder, kind].get(split, [])


def _descriptions(folder: Path, kind: str) -> dict[str, list[tuple[Path, dict[str, Any]]]]:
    """By split. A file whose md5 is not in its name is none of Megatron's, or damaged."""
    found = defaultdict(list)
    for path in sorted(folder.glob(f"*-{kind}-*-description.txt")):
        try:
            text = path.read_bytes()
            described = json.loads(text)
        except (OSError, ValueError, RecursionError):
            continue
        stem = path.name.removesuffix("-description.txt")
        if stem.split("-")[0] == hashlib.md5(text, usedforsecurity=False).hexdigest() and isinstance(described, dict):
            found[stem.removeprefix(f"{stem.split('-')[0]}-{kind}-")].append((folder / stem, described))
    return found


def _has(described: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return {name: described.get(name) for name in wanted} == wanted


def shape_problem(indices: Indices, lengths: np.ndarray, request: IndexRequest) -> str | None:
    """Why these arrays are not as long as those of `request` are; None if they are. Their numbers are not read."""
    tokens = split_tokens(lengths, request)
    epochs = num_epochs(tokens, request)
    total = samples_in(epochs * tokens, request)
    documents = epochs * (request.ids_range[1] - request.ids_range[0])
    shapes = {"document_index": (documents,), "sample_index": (total + 1, 2), "shuffle_index": (total,)}
    for name, shape in shapes.items():
        array = getattr(indices, name)
        if array.dtype.kind not in "iu" or array.shape != shape:
            return f"its {name} is {array.dtype} {array.shape}, these data give whole numbers {shape}"
    return None


def index_problem(indices: Indices, lengths: np.ndarray, request: IndexRequest) -> str | None:
    """Why these arrays cannot be those of `request` for sequences of these lengths; None if they can."""
    if problem := shape_problem(indices, lengths, request):
        return problem
    tokens, count = split_tokens(lengths, request), request.ids_range[1] - request.ids_range[0]
    epochs, total = num_epochs(tokens, request), len(indices.shuffle_index)
    separate = separate_final_epoch(tokens, epochs, request)
    border = (epochs - 1) * count if separate else epochs * count
    documents = indices.document_index
    for part, copies in ((documents[:border], border // count), (documents[border:], 1)):
        if not _holds_each(part, *request.ids_range, copies if len(part) else 0):
            return "its document_index does not hold each document of the split once an epoch"
    samples = build_sample_index(lengths, documents, total, request.seq_length, request.extra_token)
    if not np.array_equal(samples, indices.sample_index):
        return "its sample_index is that of other data"
    before = samples_before_final_epoch(tokens, epochs, request) if separate else total
    for part, first in ((indices.shuffle_index[:before], 0), (indices.shuffle_index[before:], before)):
        if not _holds_each(part, first, first + len(part), 1):
            return "its shuffle_index does not hold each sample once"
    return None


def _holds_each(array: np.ndarray, first: int, past: int, copies: int) -> bool:
    """Whether `array` is made of the numbers [first, past), each so many times; none and no number is right too."""
    if len(array) != copies * (past - first):
        return False
    if not len(array):
        return True
    if array.min() < first or array.max() >= past:
        return False
    return bool((np.bincount(array - array.dtype.type(first), minlength=past - first) == copies).all())


def blend_problem(indices: BlendIndices, fields: dict[str, Any]) -> str | None:
    """Why these arrays cannot be those of a blend; None if they can. fields: as `FoundCaches.blend`."""
    shares, size = fields["shares"], fields["size"]
    chosen, total = indices.dataset_index, sum(fields["sizes"]) if size is None else size
    if any(array.dtype.kind != "i" or array.shape != (total,) for array in indices):
        return f"its arrays are not {total} whole numbers each"
    if total and not 0 <= chosen.min() <= chosen.max() < len(shares):
        return f"it chooses others than {len(shares)} data sets"
    counts = np.bincount(chosen, minlength=len(shares))
    even = [total * share for share in shares] if size is not None else fields["sizes"]
    if np.abs(counts - even).max() > (len(shares) if size is not None else 0):
        return "it does not keep the shares"
    if size is not None:
        again = weighted_indices(shares, min(total, _CHOICES_COMPARED)).dataset_index
        if not np.array_equal(chosen[:_CHOICES_COMPARED], again):
            return "its first choices are those of another blend"
    if not np.array_equal(number_within(chosen, len(shares)), indices.dataset_sample_index):
        return "its dataset_sample_index does not count the samples of each data set"
    return None
