"""Inspect a checkpoint: what is in it, a check of every hash, a comparison with another one.

    python tools/checkpoint_inspect.py --load checkpoints/books
    python tools/checkpoint_inspect.py --load checkpoints/books --ckpt-step 100 --verify
    python tools/checkpoint_inspect.py --load s3://bucket/books --verify
    python tools/checkpoint_inspect.py --load checkpoints/books --compare checkpoints/again --png differ.png

A folder is that of all iterations or of one, on this machine or in an object store. Checkpoints of any layout are compared:
tensors are put together from their pieces. Exit code 1 if there is damage or a difference.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import ConfigError, Count, FlagConfig, WholeNumber, option
from megatron.core.dist_checkpointing import Checkpoint, CheckpointError, LocalTensor, open_checkpoint
from megatron.core.dist_checkpointing.checkpoint_folder import saved_iterations
from megatron.core.dist_checkpointing.format import TensorRecord, item_bytes_of, iteration_of, show_box
from megatron.core.dist_checkpointing.lost_buffers import note_of_lost_buffers
from megatron.core.sharding.boxes import size_of, whole
from megatron.core.storage.paths import path_of
from tools.errors import missing, run_tool

_ROWS, _COLUMNS = 12, 64  # of a picture, in characters
_SHADES = " .:-=+*#%@"  # from no element that differs to all
_SHOWN = 20  # differences of the state, and tensors in a PNG


@dataclass(frozen=True)
class CheckpointInspectConfig(FlagConfig):
    """Checkpoints to look at."""

    load: str | None = option(None, "checkpoint folder, of all iterations or of one", metavar="DIR")
    ckpt_step: WholeNumber | None = option(None, "iteration (default: the latest)")
    verify: bool = option(False, "read every byte and check every hash")
    tensors: str | None = option(
        None, "list, or compare, only the tensors whose names match this regular expression", metavar="REGEX"
    )
    compare: str | None = option(None, "another checkpoint folder, to compare tensor by tensor", metavar="DIR")
    compare_step: WholeNumber | None = option(None, "iteration of --compare (default: the latest)")
    png: str | None = option(None, "draw where the tensors differ into this file", metavar="FILE")
    max_pictures: Count = option(4, "pictures printed of tensors that differ")

    def problems(self) -> Iterator[str]:
        yield from missing(self, "load")
        if self.compare is None and (self.png is not None or self.compare_step is not None):
            yield "--png and --compare-step need --compare, the checkpoint to compare with"
        try:
            re.compile(self.tensors or "")
        except re.error as error:
            yield f"--tensors {self.tensors} is not a regular expression: {error}"


def opened(folder: str, step: int | None) -> Checkpoint:
    """The checkpoint of a folder of iterations, or of one iteration."""
    path = path_of(folder)
    number = iteration_of(path.absolute().name)
    if number is None:
        return open_checkpoint(path, step)
    if step not in (None, number):
        raise ConfigError(f"{folder} is iteration {number}, and not {step}; give the folder above it")
    return open_checkpoint(path.absolute().parent, number)


# ---------------------------------------------------------------- what is in it


def summary(checkpoint: Checkpoint) -> Iterator[str]:
    """Counts and sizes by kind of tensor, and the state's main entries."""
    manifest, state = checkpoint.manifest, checkpoint.state
    size = sum(manifest.files.values())
    yield f"{checkpoint.folder}: iteration {checkpoint.iteration}, {size:,} bytes in {len(manifest.files)} file(s)"
    if checkpoint.warning:
        yield f"WARNING: {checkpoint.warning}"
    if note := note_of_lost_buffers(state):
        yield note
    kinds: dict[tuple[str, str], list[TensorRecord]] = {}
    for name, record in manifest.tensors.items():
        kind = "/".join(name.split("/")[:-1]) or name
        kinds.setdefault((kind, record.dtype), []).append(record)
    for (kind, dtype), records in kinds.items():
        elements = sum(torch.Size(record.shape).numel() for record in records)
        pieces = sum(len(record.pieces) for record in records)
        bytes_in = sum(item_bytes_of(record.shape, dtype) for record in records)
        yield f"  {kind}: {len(records)} tensors of {dtype}, {elements:,} elements, {bytes_in:,} bytes, {pieces} piece(s)"
    for key in ("model", "origin", "vocab_size", "global_batch_size", "optimizer_steps", "checkpoints"):
        if key in state:
            yield f"  {key}: {shortened(state[key])}"
    train = state.get("train")
    for key, value in train.items() if isinstance(train, dict) else ():
        if not isinstance(value, dict):
            yield f"  train/{key}: {shortened(value)}"
    others = [str(number) for number in saved_iterations(checkpoint.folder.parent) if number != checkpoint.iteration]
    yield f"  other iterations beside it: {', '.join(others) or 'none'}"


def listing(checkpoint: Checkpoint, pattern: str) -> Iterator[str]:
    """One line for each tensor, and one for each of its pieces where it has several."""
    for name, record in checkpoint.manifest.tensors.items():
        if re.search(pattern, name):
            yield f"  {name}: {record.dtype} {tuple(record.shape)}"
            for piece in record.pieces:
                yield f"    {show_box(piece.box)} in {piece.file}, bytes {piece.offset} to {piece.offset + piece.nbytes}"


def shortened(value: Any) -> str:
    return f"{value if isinstance(value, str) else json.dumps(value)!s:.100}"


# ---------------------------------------------------------------- every hash


def damages(checkpoint: Checkpoint) -> Iterator[str]:
    """Reads every piece, with the zeros before it, and compares its hash; one line for each that is damaged."""
    for name, record in checkpoint.manifest.tensors.items():
        for piece in record.pieces:
            try:
                room = torch.empty(size_of(piece.box), dtype=getattr(torch, record.dtype))
                checkpoint.read_into({name: LocalTensor(room, record.shape, [(piece.box, whole(room.shape))], False)})
            except CheckpointError as error:
                yield f"  DAMAGED {error.file}: {error.wrong}"


# ---------------------------------------------------------------- two of them


class Difference(NamedTuple):
    """Where two tensors of one shape and dtype differ."""

    name: str
    count: int
    where: Tensor  # bool [rows, columns], the tensor as a matrix
    largest: float  # of |a - b|, of those that are numbers

    def __str__(self) -> str:
        total = self.where.numel()
        first = int(self.where.flatten().int().argmax())
        at = f"first in row {first // self.where.shape[1]}, column {first % self.where.shape[1]}"
        return f"  {self.name}: {self.count:,} of {total:,} elements differ, by at most {self.largest:.6g}; {at}"


def tensor_of(checkpoint: Checkpoint, name: str) -> Tensor:
    """A whole tensor on the host; its hashes are checked."""
    record = checkpoint.manifest.tensors[name]
    tensor, box = torch.empty(record.shape, dtype=getattr(torch, record.dtype)), whole(record.shape)
    checkpoint.read_into({name: LocalTensor(tensor, record.shape, [(box, box)], is_writer=False)})
    return tensor


def difference(name: str, a: Tensor, b: Tensor) -> Difference | None:
    """None if every bit is equal. Bits are compared: 0.0 and -0.0 differ, equal NaNs do not."""
    matrix = (1, -1) if a.dim() < 2 else (a.shape[0], -1)
    if not a.numel():
        return None
    size = a.element_size()
    differs = (a.flatten().view(torch.uint8) != b.flatten().view(torch.uint8)).view(-1, size).any(dim=1)
    if not bool(differs.any()):
        return None
    gaps = (a.double() - b.double()).abs().flatten()[differs]
    largest = float(gaps[gaps.isfinite()].max()) if bool(gaps.isfinite().any()) else float("nan")
    return Difference(name, int(differs.sum()), differs.view(matrix), largest)


def picture(where: Tensor) -> list[str]:
    """The matrix in at most 12 lines of 64 characters, each the share of its elements that differ: ' ' is none, '@' all."""
    cells = shares(where, _ROWS, _COLUMNS)
    steps = (cells * (len(_SHADES) - 1)).ceil().int().tolist()  # one element is seen
    frame = f"    +{'-' * cells.shape[1]}+"
    return [frame, *(f"    |{''.join(_SHADES[step] for step in row)}|" for row in steps), frame]


def shares(where: Tensor, most_rows: int, most_columns: int) -> Tensor:
    """[rows, columns]: of each cell of a matrix the share that is true; a cell is no smaller than an element."""
    counts = where.double()
    for dim, most in ((0, most_rows), (1, most_columns)):
        parts = counts.tensor_split(min(most, counts.shape[dim]), dim)
        counts = torch.cat([part.mean(dim, keepdim=True) for part in parts], dim)
    return counts


def compared(a: Checkpoint, b: Checkpoint, pattern: str) -> Iterator[str | Difference]:
    """A line for each tensor that only one has, or of another shape; a `Difference` for each whose bits differ."""
    mine, theirs = a.manifest.tensors, b.manifest.tensors
    for name in filter(re.compile(pattern).search, dict.fromkeys([*mine, *theirs])):
        if name not in theirs or name not in mine:
            yield f"  {name}: only in {(a if name in mine else b).folder}"
        elif (mine[name].dtype, mine[name].shape) != (theirs[name].dtype, theirs[name].shape):
            kinds = (f"{record.dtype} {tuple(record.shape)}" for record in (mine[name], theirs[name]))
            yield f"  {name}: {' and '.join(kinds)}"
        elif _pieces_of(mine[name]) == _pieces_of(theirs[name]):
            continue  # equal hashes of equal boxes: equal bits, unread
        elif found := difference(name, tensor_of(a, name), tensor_of(b, name)):
            yield found


def _pieces_of(record: TensorRecord) -> dict[Any, str]:
    return {piece.box: piece.sha256 for piece in record.pieces}


def state_differences(a: Any, b: Any, at: str = "") -> Iterator[str]:
    """Entries of two states that differ, by their path."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from state_differences(a.get(key, "(nothing)"), b.get(key, "(nothing)"), f"{at}/{key}".lstrip("/"))
    elif a != b:
        yield f"  {at}: {shortened(a)} and {shortened(b)}"


def draw(found: list[Difference], path: str) -> None:
    """The pictures of the first tensors that differ, side by side, in one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = found[:_SHOWN]
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, one in zip(axes.flat, found):
        axis.imshow(
            shares(one.where, 256, 256).numpy(), cmap="magma", vmin=0, vmax=1, aspect="auto", interpolation="nearest"
        )
        axis.set_title(one.name.replace("/", "/\n"), fontsize=6)
        axis.tick_params(labelsize=5)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def compare(a: Checkpoint, b: Checkpoint, config: CheckpointInspectConfig) -> bool:
    """Prints what differs; whether the tensors are equal."""
    lines, found = [], []
    for one in compared(a, b, config.tensors or ""):
        (found if isinstance(one, Difference) else lines).append(one)
    print(
        f"compared with {b.folder}:",
        "no tensor differs" if not (lines or found) else f"{len(lines) + len(found)} tensor(s) differ",
    )
    print("\n".join(lines), end="\n" if lines else "")
    for number, one in enumerate(found):
        print(one)
        if number < config.max_pictures:
            print("\n".join(picture(one.where)))
    states = list(state_differences(a.state, b.state))
    print("the states are equal" if not states else f"{len(states)} entries of the states differ:")
    print("\n".join(states[:_SHOWN] + ["  ..."] * (len(states) > _SHOWN)), end="\n" if states else "")
    if config.png and found:
        draw(found, config.png)
        print(f"wrote {config.png}")
    return not (lines or found)


def run(config: CheckpointInspectConfig) -> None:
    checkpoint = opened(config.load, config.ckpt_step)
    print("\n".join(summary(checkpoint)))
    if config.tensors is not None and config.compare is None:
        print("\n".join(listing(checkpoint, config.tensors)))
    problems = []
    if config.verify:
        found = list(damages(checkpoint))
        print("\n".join(found) or "  verified: every hash and every alignment byte is right")
        problems += [f"{len(found)} piece(s) of {checkpoint.folder} are damaged"] if found else []
    if config.compare is not None:
        other = opened(config.compare, config.compare_step)
        problems += [] if compare(checkpoint, other, config) else [f"{checkpoint.folder} and {other.folder} differ"]
    if problems:
        raise ValueError("; ".join(problems))


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [CheckpointInspectConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())
