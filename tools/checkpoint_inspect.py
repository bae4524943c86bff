"""Inspect a checkpoint: list its content, check every hash, compare it with another one.

    python tools/checkpoint_inspect.py --load checkpoints/books
    python tools/checkpoint_inspect.py --load checkpoints/books --ckpt-step 100 --verify
    python tools/checkpoint_inspect.py --load s3://bucket/books --verify
    python tools/checkpoint_inspect.py --load checkpoints/books --compare checkpoints/again --png differ.png

A folder contains all iterations or one, on this machine or in an object store. Checkpoints of any layouts can be compared,
because tensors are assembled from their shards. Exit code 1 if there is damage or a difference.
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import ConfigError, Count, FlagConfig, WholeNumber, option
from tools.errors import answer_help, missing, naming_flag, run_tool, tool_parser


@dataclass(frozen=True)
class CheckpointInspectConfig(FlagConfig):
    """Checkpoints to look at."""

    load: str | None = option(
        None, "checkpoint folder: a --save folder, or the folder of one iteration in it", metavar="DIR"
    )
    ckpt_step: WholeNumber | None = option(None, "iteration to inspect; default: the latest")
    verify: bool = option(False, "read every byte and check every hash")
    tensors: str | None = option(
        None, "list or compare only tensors whose names match this regular expression", metavar="REGEX"
    )
    compare: str | None = option(None, "another checkpoint folder, to compare tensor by tensor", metavar="DIR")
    tolerance: float = option(0.0, "--compare: largest difference of two elements that count as equal")
    compare_step: WholeNumber | None = option(None, "iteration of --compare; default: the latest")
    png: str | None = option(None, "PNG file: draw how much of the tensors differs, and where", metavar="FILE")
    max_pictures: Count = option(4, "most pictures of differing tensors to print")

    def problems(self) -> Iterator[str]:
        yield from missing(self, "load")
        if self.compare is None and (self.png is not None or self.compare_step is not None):
            yield "--png and --compare-step need --compare, the checkpoint to compare with"
        if self.tolerance and self.compare is None:
            yield "--tolerance needs --compare, the checkpoint to compare with"
        if not self.tolerance >= 0:
            yield f"--tolerance is {self.tolerance}; it must be at least 0, where every bit counts"
        if self.png is not None and Path(self.png).suffix.lower() != ".png":
            yield f"--png ({self.png}) must end in .png: the tool writes a PNG"
        try:
            re.compile(self.tensors or "")
        except re.error as error:
            yield f"--tensors {self.tensors} is not a regular expression: {error}"


if __name__ == "__main__":
    answer_help(lambda: tool_parser(__doc__, [CheckpointInspectConfig]))

import torch
from torch import Tensor

from megatron.convert import is_foreign, open_any
from megatron.convert.strided_reads_of_foreign_files import StridedCheckpoint
from megatron.core.dist_checkpointing import Checkpoint, CheckpointError, LocalTensor, open_checkpoint
from megatron.core.dist_checkpointing.checkpoint_folder import saved_iterations
from megatron.core.dist_checkpointing.manifest_format import TensorRecord, item_bytes_of, iteration_of, show_box
from megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint import note_of_lost_buffers
from megatron.core.sharding.boxes import size_of, whole
from megatron.core.storage.path_or_url import path_of

_ROWS = 12  # of a picture, in characters
_COLUMNS = 64
_SHADES = " .:-=+*#%@"  # by the share of elements that differ
_SHOWN = 20  # number of differences of the state, and of tensors in a PNG
_SQUARES = 8  # tensors of a picture
_DOTS = 256  # most rows and columns of a tensor's square
_NEARLY_ALL = 0.99  # share of the elements from which on it says nothing where a tensor differs


def opened(folder: str, step: int | None) -> Checkpoint:
    """Open the checkpoint of a folder of iterations, or of one iteration, or the model in another project's folder.

    step: default: the latest.
    """
    path = path_of(folder)
    number = iteration_of(path.absolute().name)
    if number is None or is_foreign(path):
        return open_any(path, step)
    if step not in (None, number):
        raise ConfigError(f"{folder} is iteration {number}, and not {step}; give the folder above it")
    return open_checkpoint(path.absolute().parent, number)


# ---------------------------------------------------------------- content


def summary(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield lines with counts and sizes by kind of tensor, and the main entries of the state."""
    manifest = checkpoint.manifest
    state = checkpoint.state
    num_bytes = sum(manifest.files.values())
    yield f"{checkpoint.folder}: iteration {checkpoint.iteration}, {num_bytes:,} bytes in {len(manifest.files)} file(s)"
    if checkpoint.warning:
        yield f"WARNING: {checkpoint.warning}"
    if note := note_of_lost_buffers(state):
        yield note

    # the tensors: model/... and optimizer/master/... are kinds
    records_of_kind: dict[tuple[str, str], list[TensorRecord]] = {}
    for name, record in manifest.tensors.items():
        kind = "/".join(name.split("/")[:-1]) or name
        records_of_kind.setdefault((kind, record.dtype), []).append(record)
    for (kind, dtype), records in records_of_kind.items():
        elements = sum(torch.Size(record.shape).numel() for record in records)
        pieces = sum(len(record.pieces) for record in records)
        bytes_in = sum(item_bytes_of(record.shape, dtype) for record in records)
        yield f"  {kind}: {len(records)} tensors of {dtype}, {elements:,} elements, {bytes_in:,} bytes, {pieces} piece(s)"

    # the state
    for key in ("model", "origin", "vocab_size", "global_batch_size", "optimizer_steps", "checkpoints"):
        if key in state:
            yield f"  {key}: {shortened(state[key])}"
    train = state.get("train")
    if isinstance(train, dict):
        for key, value in train.items():
            if not isinstance(value, dict):
                yield f"  train/{key}: {shortened(value)}"
    others = [str(number) for number in saved_iterations(checkpoint.folder.parent) if number != checkpoint.iteration]
    yield f"  other iterations beside it: {', '.join(others) or 'none'}"


def listing(checkpoint: Checkpoint, pattern: str) -> Iterator[str]:
    """Yield one line for each tensor whose name matches, and one for each of its pieces."""
    for name, record in checkpoint.manifest.tensors.items():
        if re.search(pattern, name):
            yield f"  {name}: {record.dtype} {tuple(record.shape)}"
            for piece in record.pieces:
                yield f"    {show_box(piece.box)} in {piece.file}, bytes {piece.offset} to {piece.offset + piece.nbytes}"


def shortened(value: Any) -> str:
    """Return the first 100 characters of a text, or of the JSON of another value."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:100]


# ---------------------------------------------------------------- every hash


def damages(checkpoint: Checkpoint) -> Iterator[str]:
    """Read every piece, with the alignment zeros before it, and check its hash; yield a line for each damaged one."""
    for name, record in checkpoint.manifest.tensors.items():
        for piece in record.pieces:
            try:
                tensor = torch.empty(size_of(piece.box), dtype=getattr(torch, record.dtype))
                boxes = [(piece.box, whole(tensor.shape))]
                checkpoint.read_into({name: LocalTensor(tensor, record.shape, boxes, is_writer=False)})
            except CheckpointError as error:
                yield f"  DAMAGED {error.file}: {error.wrong}"


# ---------------------------------------------------------------- comparison of two checkpoints


class Difference(NamedTuple):
    """The elements in which two tensors of one shape and dtype differ."""

    name: str
    count: int
    mask: Tensor  # bool [rows, columns]: True where the tensors, as matrices, differ
    largest: float  # maximum of |a - b| over the finite differences
    scale: float = 1.0  # maximum of |a| over its finite elements
    gaps: Tensor | None = None  # [at most 256, at most 256]: the same maximum for each cell of a coarse grid

    @property
    def relative(self) -> float:
        """The largest difference as a part of the tensor's largest element."""
        return self.largest / self.scale if self.scale else float("inf")

    @property
    def is_in_parts(self) -> bool:
        """Whether some of the elements are equal, so that the places of the others say something."""
        return self.count < _NEARLY_ALL * self.mask.numel()

    def __str__(self) -> str:
        total = self.mask.numel()
        num_columns = self.mask.shape[1]
        first = int(self.mask.flatten().int().argmax())
        position = f"first in row {first // num_columns}, column {first % num_columns}"
        return f"  {self.name}: {self.count:,} of {total:,} elements differ, by at most {self.largest:.6g}; {position}"


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read a full tensor, [global shape], into CPU memory and check its hashes. Raises CheckpointError."""
    record = checkpoint.manifest.tensors[name]
    tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
    box = whole(record.shape)
    checkpoint.read_into({name: LocalTensor(tensor, record.shape, [(box, box)], is_writer=False)})
    return tensor


def difference(name: str, a: Tensor, b: Tensor, tolerance: float = 0.0) -> Difference | None:
    """Compare two tensors a and b of one shape and dtype; return None if no element differs by more than `tolerance`.

    They may have any shape; as matrices, the rows are those of the first dimension, or one row below two dimensions.
    With tolerance 0 bits are compared: 0.0 and -0.0 differ. NaNs with the same bits do not differ, and a NaN differs from
    any number.
    """
    if not a.numel():
        return None
    differs_in_byte = a.flatten().view(torch.uint8) != b.flatten().view(torch.uint8)  # [elements * bytes]
    differs = differs_in_byte.view(-1, a.element_size()).any(dim=1)  # [elements]
    gaps = (a.double() - b.double()).abs().flatten()  # [elements]
    if tolerance:
        differs &= ~(gaps <= tolerance)  # so that a NaN counts
    if not bool(differs.any()):
        return None
    finite_gaps = gaps[differs & gaps.isfinite()]
    largest = float(finite_gaps.max()) if finite_gaps.numel() else float("nan")
    num_rows = 1 if a.dim() < 2 else a.shape[0]
    finite = a.double().abs().nan_to_num(0, 0, 0)
    gap_cells = coarse(gaps.nan_to_num(0, 0, 0).view(num_rows, -1), _DOTS, _DOTS, torch.amax)
    return Difference(name, int(differs.sum()), differs.view(num_rows, -1), largest, float(finite.max()), gap_cells)


def picture(mask: Tensor) -> list[str]:
    """Draw a mask, bool [rows, columns], in at most 12 lines of 64 characters.

    A character is the share of True elements in its cell: ' ' is none, '@' is all.
    """
    cells = shares(mask, _ROWS, _COLUMNS)  # [at most 12, at most 64]
    shades = (cells * (len(_SHADES) - 1)).ceil().int().tolist()  # rounded up, so that a single element is visible
    frame = f"    +{'-' * cells.shape[1]}+"
    lines = [f"    |{''.join(_SHADES[shade] for shade in row)}|" for row in shades]
    return [frame, *lines, frame]


def shares(mask: Tensor, max_rows: int, max_columns: int) -> Tensor:
    """Return the share of True elements in each cell of a coarse grid over a mask.

    mask: bool [rows, columns] -> float64 [at most max_rows, at most max_columns]
    """
    return coarse(mask.double(), max_rows, max_columns, torch.mean)


def coarse(x: Tensor, max_rows: int, max_columns: int, of_cell: Callable[..., Tensor]) -> Tensor:
    """Return one number for each cell of a coarse grid over a matrix: [at most max_rows, at most max_columns].

    of_cell: torch.mean, torch.amax.
    """
    for dim, max_size in ((0, max_rows), (1, max_columns)):
        parts = x.tensor_split(min(max_size, x.shape[dim]), dim)
        x = torch.cat([of_cell(part, dim, keepdim=True) for part in parts], dim)
    return x


def compare_tensors(a: Checkpoint, b: Checkpoint, pattern: str, tolerance: float = 0.0) -> Iterator[str | Difference]:
    """Yield the differences of the tensors whose names match.

    A line for each tensor that only one checkpoint has, or that has another shape or dtype; a `Difference` for each
    that differs by more than `tolerance`.
    """
    records_a = a.manifest.tensors
    records_b = b.manifest.tensors
    for name in filter(re.compile(pattern).search, dict.fromkeys([*records_a, *records_b])):
        if name not in records_b:
            yield f"  {name}: only in {a.folder}"
            continue
        if name not in records_a:
            yield f"  {name}: only in {b.folder}"
            continue
        record_a = records_a[name]
        record_b = records_b[name]
        if (record_a.dtype, record_a.shape) != (record_b.dtype, record_b.shape):
            kinds = (f"{record.dtype} {tuple(record.shape)}" for record in (record_a, record_b))
            yield f"  {name}: {' and '.join(kinds)}"
        elif not _have_equal_hashes(record_a, record_b):  # else they need not be read: the bits are equal
            found_difference = difference(name, read_tensor(a, name), read_tensor(b, name), tolerance)
            if found_difference is not None:
                yield found_difference


def _have_equal_hashes(a: TensorRecord, b: TensorRecord) -> bool:
    """Return whether two records have the same hash for each box. Files of other projects have no hashes."""
    hash_of_box = {piece.box: piece.sha256 for piece in a.pieces}
    return all(hash_of_box.values()) and hash_of_box == {piece.box: piece.sha256 for piece in b.pieces}


def state_differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each entry in which two states differ, with its path."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            entry_a = a.get(key, "(nothing)")
            entry_b = b.get(key, "(nothing)")
            yield from state_differences(entry_a, entry_b, f"{path}/{key}".lstrip("/"))
    elif a != b:
        yield f"  {path}: {shortened(a)} and {shortened(b)}"


def draw(differences: list[Difference], path: str) -> None:
    """Draw into one PNG how much of each tensor differs, by how much, and where.

    20 tensors have bars, in the order of the model: those that differ in parts, then those of the largest relative
    difference, the model's before the optimizer's. A square shows where a tensor differs, if that is in parts; where all
    differ almost everywhere, squares show by how much.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    def weight(item: Difference) -> tuple[bool, bool, float]:
        relative = item.relative if isfinite(item.relative) else -inf
        return item.is_in_parts, item.name.startswith("model/"), relative

    largest = sorted(differences, key=weight, reverse=True)[:_SHOWN]
    shown = [item for item in differences if any(item is one for one in largest)]
    squares = [item for item in differences if item.is_in_parts][:_SQUARES]
    shows_places = bool(squares)
    if not shows_places:
        squares = [item for item in largest if item.mask.shape[0] > 1 and item.largest > 0][:_SQUARES]
    columns = min(4, len(squares))
    rows = -(-len(squares) // columns) if squares else 0
    bars_height = 1 + 0.25 * len(shown)
    figure = pyplot.figure(figsize=(max(12, 4 * columns), bars_height + 3.2 * rows), layout="constrained")
    parts = figure.subfigures(
        2 if rows else 1, 1, height_ratios=[bars_height, 3.2 * rows] if rows else None, squeeze=False
    )

    # two bars for each tensor: how many of its elements differ, and by how much
    how_many, by_how_much = parts[0, 0].subplots(1, 2, sharey=True)
    places = range(len(shown), 0, -1)  # bars are drawn from below
    how_many.barh(places, [100 * item.count / item.mask.numel() for item in shown])
    how_many.set_yticks(places, [item.name for item in shown], fontsize=7)
    more = f"\n{len(differences) - len(shown)} more differ" if len(differences) > len(shown) else ""
    how_many.set(xlim=(0, 100), xlabel=f"elements that differ, in % of the tensor{more}")
    relative = [item.relative if isfinite(item.relative) else 0 for item in shown]
    drawn = by_how_much.barh(places, relative, color="tab:orange")
    by_how_much.bar_label(drawn, [f"{item.largest:.3g}" for item in shown], fontsize=7, padding=3)
    by_how_much.set(xlabel="largest difference / largest element of the tensor\nbeside each bar: the difference")
    if any(relative):
        least = min(filter(None, relative))
        by_how_much.set_xscale("log")
        by_how_much.set_xlim(least / 3, max(relative) * 10)

    # a square for each tensor that differs in parts, or else the sizes of its differences
    if rows:
        grid = parts[1, 0].subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(squares) :]:
            axes.set_visible(False)
        values = [
            100 * shares(item.mask, _DOTS, _DOTS) if shows_places else item.gaps / (item.scale or 1) for item in squares
        ]
        scale: dict[str, Any] = {"vmin": 0, "vmax": 100}
        label = "elements that differ, in % of a dot"
        if not shows_places:
            top = max(float(cells.max()) for cells in values)
            scale = {"norm": LogNorm(top / 1000, top, clip=True)}
            label = "largest difference of a dot,\nas a part of the tensor's largest element"
        for axes, item, cells in zip(grid.flat, squares, values, strict=False):
            num_rows, num_columns = item.mask.shape
            image = axes.imshow(
                cells.numpy(),
                cmap="viridis",
                aspect="auto",
                interpolation="nearest",
                extent=(0, num_columns, num_rows, 0),
                **scale,
            )
            axes.set_title(item.name.replace("/", "/\n"), fontsize=7)
            axes.set_xlabel("column", fontsize=7)
            axes.set_ylabel("row", fontsize=7)
            axes.tick_params(labelsize=6)
        parts[1, 0].colorbar(image, ax=grid, label=label, shrink=0.8)
    with naming_flag("--png", path, "choose a file that can be written"):
        figure.savefig(path, dpi=100, format="png")
    pyplot.close(figure)


def compare(a: Checkpoint, b: Checkpoint, config: CheckpointInspectConfig) -> bool:
    """Print how two checkpoints differ; return whether their tensors are equal."""
    # tensors
    lines = []
    differences = []
    for item in compare_tensors(a, b, config.tensors or "", config.tolerance):
        if isinstance(item, Difference):
            differences.append(item)
        else:
            lines.append(item)
    num_different = len(lines) + len(differences)
    beyond = f" by more than {config.tolerance:g}" if config.tolerance else ""
    verdict = f"{num_different} tensor(s) differ" if num_different else "no tensor differs"
    print(f"compared with {b.folder}: {verdict}{beyond}")
    for line in lines:
        print(line)
    pictures = 0
    for item in differences:
        print(item)
        if item.is_in_parts and pictures < config.max_pictures:  # else every character would be the same
            print("\n".join(picture(item.mask)))
            pictures += 1

    # states
    state_lines = list(state_differences(a.state, b.state))
    print(f"{len(state_lines)} entries of the states differ:" if state_lines else "the states are equal")
    for line in state_lines[:_SHOWN]:
        print(line)
    if len(state_lines) > _SHOWN:
        print("  ...")

    if config.png and differences:
        draw(differences, config.png)
        print(f"wrote {config.png}")
    return num_different == 0


def run(config: CheckpointInspectConfig) -> None:
    """Print what was asked for. Raises ValueError if there is damage or a difference."""
    checkpoint = opened(config.load, config.ckpt_step)
    print("\n".join(summary(checkpoint)))
    if config.tensors is not None and config.compare is None:
        print("\n".join(listing(checkpoint, config.tensors)))
    problems = []
    if config.verify:
        damaged = list(damages(checkpoint))
        verified = "  verified: every hash and every alignment byte is right"
        if isinstance(checkpoint, StridedCheckpoint):
            verified = "  every byte was read; files of another project hold no hashes to compare"
        print("\n".join(damaged) or verified)
        if damaged:
            problems.append(f"{len(damaged)} piece(s) of {checkpoint.folder} are damaged")
    if config.compare is not None:
        other = opened(config.compare, config.compare_step)
        if not compare(checkpoint, other, config):
            problems.append(f"{checkpoint.folder} and {other.folder} differ")
    if problems:
        raise ValueError("; ".join(problems))


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [CheckpointInspectConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())
