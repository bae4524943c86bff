"""The layouts of a job in the order of what they lose, with the memory that tools/estimate_memory.py predicts for their flags."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.memory.memory_advice import less_with
from megatron.training.memory.peak_along_schedule import RankMemory, forecast, worst
from megatron.training.memory.report import amount, table
from tools.configuring.layouts import FLOPS_A_BYTE, Layout, Loss, Work, layouts, least_memory, loss, ranked
from tools.configuring.sizes import words
from tools.estimating.job import read


class Tried(NamedTuple):
    """A layout, and the rank of it that needs most."""

    layout: Layout
    loss: Loss
    memory: RankMemory
    fits: bool


FlagsOf = Callable[[Layout], list[str]]


def predicted(work: Work, flags: Sequence[str]) -> RankMemory:
    """The rank that needs most, as `tools/estimate_memory.py` says. Raises ConfigError for flags that it refuses."""
    return worst(forecast(read([*estimate_words(work), *flags]).job))


def estimate_words(work: Work) -> list[str]:
    """What tools/estimate_memory.py needs beside the flags of a run."""
    family = "bert" if work.model.family == "bert" else None
    return words({"world_size": work.ranks, "model": family})


def search(work: Work, flags_of: FlagsOf, room: float, wanted: int, say: Callable[[str], None]) -> list[Tried]:
    """Predict layouts until `wanted` of them fit, each with other sizes of TP and PP. Returns all that were predicted.

    A layout whose `least_memory` exceeds the room is passed over, and so is one that a run refuses. Raises ConfigError if
    nothing is left.
    """
    ordered = ranked(work)
    if not ordered:
        raise ConfigError(_no_layout(work))
    found: list[Tried] = []
    refused = ConfigError([])  # of a layout that the run's further flags exclude
    for layout in ordered:
        sizes = {(one.layout.tp, one.layout.pp) for one in found if one.fits}
        if len(sizes) == wanted:
            break
        if (layout.tp, layout.pp) not in sizes and least_memory(work, layout) <= room:
            say(f"predicting {layout}")
            try:
                memory = predicted(work, flags_of(layout))
            except ConfigError as error:
                refused = error
                continue
            found.append(Tried(layout, loss(work, layout), memory, memory.total <= room))
    if refused.problems and not found:
        raise refused
    if not any(one.fits for one in found):
        raise ConfigError(_nothing_fits(work, flags_of, room, found, ordered))
    return found


def _no_layout(work: Work) -> str:
    step = min(work.micro_batches) * work.ranks
    near = max(step, work.global_batch // step * step)
    return (
        f"no layout of {work.ranks} ranks divides {work.model.size.layers} layers of {work.model.size.heads} heads and a "
        f"--global-batch-size of {work.global_batch}: data-parallel size x --micro-batch-size must divide it; {near} and "
        f"{near + step} suit every layout"
    )


def _nothing_fits(
    work: Work, flags_of: FlagsOf, room: float, found: Sequence[Tried], ordered: Sequence[Layout]
) -> list[str]:
    """What is missing in the layout that needs least, and what would change that."""
    layout = min(ordered, key=lambda layout: least_memory(work, layout))
    flags = flags_of(layout)
    tried = [(one.memory, one.layout) for one in found] or [(predicted(work, flags), layout)]
    memory, layout = min(tried, key=lambda pair: pair[0].total)
    parts = memory.parts_within("device")
    what = max(parts, key=parts.__getitem__)
    config = read([*estimate_words(work), *flags_of(layout)]).job.runtime.config
    held = ", ".join(f"{name} {amount(size)}" for name, size in parts.items())
    return [
        f"no layout fits {amount(room)} a rank; {layout} needs least, {amount(memory.total)} ({held}): "
        f"{amount(memory.total - room)} too much",
        f"less with {less_with(config, work.ranks, what, shares=0)}",
        *_more_machines(work, room),
    ]


def _more_machines(work: Work, room: float) -> list[str]:
    """How many machines have room by the closed forms, if some power of two of these do."""
    for times in (2**n for n in range(1, 11)):
        more = replace(work, machines=work.machines * times)
        if any(least_memory(more, layout) <= room for layout in layouts(more)):
            return [f"by its state and saved tensors alone it fits no fewer than {more.machines} machines of these"]
    return []


def as_text(work: Work, found: Sequence[Tried], room: float) -> list[str]:
    """The layouts, those that fit with a number."""
    inside, between = FLOPS_A_BYTE[work.device]
    head = [*Layout._fields, "idle", "repeated", "sent", "lost", "inside", "between", "memory"]
    rows, number = [["", *head, ""]], 0
    for layout, lost, memory, fits in found:
        number += fits
        shares = (f"{100 * share:.1f}%" for share in (lost.idle, lost.repeated, lost.sent, lost.total))
        sent = (amount(int(size)) for size in (lost.inside, lost.between))
        over = "" if fits else f"{amount(memory.total - room)} too much"
        rows.append([str(number) if fits else "-", *map(str, layout), *shares, *sent, amount(memory.total), over])
    return [
        f"{work.model.family} of about {_in_words(work.model.parameters)} parameters, "
        f"{work.ranks} rank(s), {amount(room)} usable on each",
        "in % of the model's own FLOPs of a step: idle in the pipeline, repeated by recompute, sent (a byte counts as",
        f"{inside:,} FLOPs inside a machine, {between:,} between machines); bytes that a rank sends in a step; predicted memory",
        *table(rows),
    ]


def _in_words(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
