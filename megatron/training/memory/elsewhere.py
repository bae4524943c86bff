"""Activations that wait for their backward elsewhere: in a tier, or in slots of one buffer on the device. Pure.

What `core/tiers/activations.py` and `slots.py` do with memory. Of a stage's first N layers, with two microbatches under way:

    device   between forward and backward: what is too small to move, and, of the stage's last forward, what two layers have on their way
    tier     the pieces of all microbatches alive; a room stays, and is used again by a piece of its size
    back     on a host's side stream a layer's pieces have their room on the device while the layer behind it is still in its backward;
             on a CPU, or from a file, a piece is there when an operation reads it, and gone when that has run

A file is read in whole blocks of the host's memory, a layer ahead.
"""

from collections.abc import Iterable, Sequence

from megatron.core.pipeline_parallel.schedule import Action
from megatron.core.pipeline_parallel.simulate import peak_inputs
from megatron.core.tiers.block_file import BLOCK
from megatron.training.memory.sizes import LayerSizes, RunSizes
from megatron.training.memory.tape import Away, Saved, Segment, Step, Tape

_ALIGN = 512  # bytes, of a slot
_AT_A_TIME = 2  # layers that may be leaving


def placed(sizes: LayerSizes, layer: int, segments: Tape) -> Tape:
    """The segments of the layer, or recomputed group, that begins with this layer of the stage, where their bytes are kept."""
    is_input = sizes.recompute in ("uniform", "block") and segments[0].kept_input is not None
    if layer < sizes.offloaded_layers:
        return tuple(_sent(sizes, layer, segment, is_input) for segment in segments)
    return tuple(map(_in_slot, segments)) if sizes.contiguous and is_input else segments


def _sent(sizes: LayerSizes, group: int, segment: Segment, is_input: bool) -> Segment:
    """With what leaves: an input always, of what autograd saves the larger memories."""
    least = 0 if is_input else sizes.smallest_offloaded
    pieces = tuple(size for size, _ in _moving(segment.saves, least))
    # A part is a view of the whole, which it keeps.
    source = sizes.stream * sizes.residual_bytes if is_input else sum(pieces)
    return segment._replace(part=0, away=Away(group, least, sum(pieces), source, pieces))


def _in_slot(segment: Segment) -> Segment:
    """A backward computes with what lies in the slot, or puts parts together beside it."""
    is_whole = segment.part == 0
    first = segment.steps[0]
    reads_it = bool(first.saves) and first.saves[0] == segment.inputs[0]  # and not a copy in another precision
    part = -segment.kept_input if is_whole and reads_it else 0
    return segment._replace(kept_input=0, part=part, inputs=(), slot=-(-segment.kept_input // _ALIGN) * _ALIGN)


def _moving(saves: Iterable[Saved], least: int) -> list[Saved]:
    return [(size, width) for size, width in saves if size >= max(least * width, 1)]


# ---------------------------------------------------------------- a backward


def leaving(tape: Tape) -> dict[int, int]:
    """Bytes that are on their way out after a forward, by group."""
    sources: dict[int, int] = {}
    for segment in tape:
        if segment.away is not None:
            sources[segment.away.group] = sources.get(segment.away.group, 0) + segment.away.source
    return dict(list(sources.items())[-_AT_A_TIME:])


class Passing:
    """What of a microbatch is on its way out, or back, while its backward runs. `enter` each segment from the last on; `held`: bytes.

    is_last: no forward of the stage has come since; ahead: a piece has its room when it is sent for; block: what is read is a
    multiple of so many bytes.
    """

    def __init__(self, tape: Tape, *, is_last: bool, ahead: bool, block: int = 1):
        self._ahead, self._block = ahead, block
        self._leaving = leaving(tape) if is_last else {}
        self._to_come: dict[int, int] = {}
        for one in (segment.away for segment in tape if segment.away is not None):
            self._to_come[one.group] = self._to_come.get(one.group, 0) + sum(one.pieces)
        self._order = list(self._to_come)
        self._here: dict[int, int] = {}
        self._of_segment = 0

    @property
    def held(self) -> int:
        return sum(self._leaving.values()) + sum(self._here.values()) + self._of_segment

    def enter(self, segment: Segment) -> None:
        self._of_segment = 0
        if segment.steps and segment.steps[-1].name != "loss" and self._order:  # the layers' gradient has come
            self._start(self._order[-1])
        if (away := segment.away) is None:
            return
        at = self._order.index(away.group)
        for group in self._order[max(at - 1, 0) : at + 1]:
            self._start(group)
        if self._ahead:
            self._here[away.group] -= sum(away.pieces)  # which the steps count from here on
        elif segment.kept_input is not None and not _is_part(away):
            read = _moving(segment.inputs if segment.reads is None else segment.reads, away.least)
            self._of_segment = sum(self._read(size) - size for size, _ in read)
            self._of_segment += sum(self._read(size) for size, _ in _moving(segment.lent, away.least))

    def gathered(self, segment: Segment) -> int:
        """Bytes of a part that has come back and of the whole, while that is put together."""
        away = segment.away
        return sum(map(self._read, away.pieces)) + away.source if away is not None and _is_part(away) else 0

    def kept(self, segment: Segment, step: Step) -> int:
        """Bytes of what a step keeps that are there before the backward is at it."""
        return step.keeps - (sum(size for size, _ in self._lazy(segment, step.saves)))

    def read(self, segment: Segment, step: Step) -> int:
        """Bytes that come for a step and go with it."""
        own = sorted((self._read(size) for size, _ in self._lazy(segment, step.saves)), reverse=True)
        return sum(own[: step.at_once]) + sum(self._read(size) for size, _ in self._lazy(segment, step.reads))

    def rounded(self, segment: Segment, step: Step) -> int:
        """Bytes that a put off weight gradient keeps of its factor's blocks, above the factor."""
        if not step.deferred or segment.away is None:
            return 0
        factors = _moving(step.reads or step.saves, segment.away.least)
        return sum(self._read(size) - size for size, _ in factors)

    def _lazy(self, segment: Segment, saves: Sequence[Saved]) -> list[Saved]:
        if segment.away is None or segment.kept_input is not None or self._ahead:
            return []
        return _moving(saves, segment.away.least)

    def _start(self, group: int) -> None:
        self._leaving.pop(group, None)
        if self._ahead and group in self._to_come:
            self._here[group] = self._to_come.pop(group)

    def _read(self, size: int) -> int:
        return -(-size // self._block) * self._block


def _is_part(away: Away) -> bool:
    return away.source > away.moved


# ---------------------------------------------------------------- a rank


def reads_ahead(run: RunSizes) -> bool:
    """Whether what comes back has its room on the device when it is sent for."""
    return run.layer.accelerator and run.tier != "file"


def block_of(run: RunSizes) -> int:
    """Bytes of which what is read into the device's memory is a multiple."""
    return BLOCK if run.tier == "file" and not run.layer.accelerator else 1


def bytes_elsewhere(run: RunSizes, tapes: dict[int, Tape], actions: Sequence[Action]) -> dict[str, dict[str, int]]:
    """By tier and kind, what a pipeline rank's stages have there for the length of the run."""
    on: dict[str, dict[str, int]] = {}

    def add(tier: str, kind: str, size: int) -> None:
        if size:
            held = on.setdefault(tier, {})
            held[kind] = max(held.get(kind, 0), size) if kind == "slices" else held.get(kind, 0) + size

    tier = "file" if run.tier == "file" else "host"
    for stage, tape in tapes.items():
        alive = peak_inputs([list(actions)], stage)
        add("device", "activations", alive * sum(segment.slot for segment in tape))
        of_group: dict[int, list[int]] = {}
        for away in (segment.away for segment in tape if segment.away is not None):
            of_group.setdefault(away.group, []).extend(away.pieces)
        add(tier, "activations", alive * sum(map(sum, of_group.values())))
        if tier == "file":  # two layers' pieces on their way back
            blocks = [sum(-(-size // BLOCK) * BLOCK for size in pieces) for pieces in of_group.values()]
            add("host", "slices", max(map(sum, zip(blocks, [*blocks[1:], 0])), default=0))
    return on
