"""Search the layouts of a job that fit in memory, by the prediction of tools/estimate_memory.py, fastest first."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.memory.flags_that_reduce_memory import flags_that_reduce
from megatron.training.memory.forecast_memory_along_schedule import RankMemory, forecast, worst
from megatron.training.memory.predicted_memory_table import amount, table
from tools.configuring.layouts import FLOPS_A_BYTE, Layout, Loss, Work, layouts, least_memory, loss, ranked
from tools.configuring.sizes import words
from tools.estimating.job import read


class Prediction(NamedTuple):
    """A layout with its predicted memory."""

    layout: Layout
    loss: Loss
    memory: RankMemory  # of the rank that needs most
    fits: bool


FlagsOf = Callable[[Layout], list[str]]


def predicted(work: Work, flags: Sequence[str]) -> RankMemory:
    """Predict the memory of the rank that needs most. Raises ConfigError for flags that a run refuses."""
    return worst(forecast(read([*estimate_words(work), *flags]).job))


def estimate_words(work: Work) -> list[str]:
    """Return the flags that tools/estimate_memory.py needs beside those of a run."""
    family = "bert" if work.model.family == "bert" else None
    return words({"world_size": work.ranks, "model": family})


def search(
    work: Work, flags_of: FlagsOf, capacity: float, num_wanted: int, say: Callable[[str], None]
) -> list[Prediction]:
    """Predict layouts until `num_wanted` of them fit, each with other sizes of TP and PP. Return all predictions.

    capacity: usable bytes of a rank. Skipped are layouts whose `least_memory` exceeds it, and layouts that a run
    refuses. Raises ConfigError if nothing is left.
    """
    ordered = ranked(work)
    if not ordered:
        raise ConfigError(_no_layout(work))
    predictions: list[Prediction] = []
    last_refusal = ConfigError([])  # the run's further flags exclude a layout
    for layout in ordered:
        fitting_sizes = {(p.layout.tp, p.layout.pp) for p in predictions if p.fits}
        if len(fitting_sizes) == num_wanted:
            break
        if (layout.tp, layout.pp) in fitting_sizes or least_memory(work, layout) > capacity:
            continue
        say(f"predicting {layout}")
        try:
            memory = predicted(work, flags_of(layout))
        except ConfigError as error:
            last_refusal = error
            continue
        predictions.append(Prediction(layout, loss(work, layout), memory, memory.total <= capacity))
    if last_refusal.problems and not predictions:
        raise last_refusal
    if not any(prediction.fits for prediction in predictions):
        raise ConfigError(_nothing_fits(work, flags_of, capacity, predictions, ordered))
    return predictions


def _no_layout(work: Work) -> str:
    """Return the error for a job that no layout divides, with batch sizes that would do."""
    step = min(work.micro_batches) * work.ranks
    near = max(step, work.global_batch // step * step)
    return (
        f"no layout of {work.ranks} ranks divides {work.model.size.layers} layers of {work.model.size.heads} heads and a "
        f"--global-batch-size of {work.global_batch}: data-parallel size x --micro-batch-size must divide it; {near} and "
        f"{near + step} suit every layout"
    )


def _nothing_fits(
    work: Work, flags_of: FlagsOf, capacity: float, predictions: Sequence[Prediction], ordered: Sequence[Layout]
) -> list[str]:
    """Return the error if no layout fits: what the smallest one lacks, and what would help."""
    # the layout that needs least memory
    if predictions:
        smallest = min(predictions, key=lambda prediction: prediction.memory.total)
        layout = smallest.layout
        memory = smallest.memory
    else:
        layout = min(ordered, key=lambda layout: least_memory(work, layout))
        memory = predicted(work, flags_of(layout))

    # its largest part is what to reduce
    parts = memory.parts_within("device")
    largest_part = max(parts, key=parts.__getitem__)
    parts_as_text = ", ".join(f"{name} {amount(size)}" for name, size in parts.items())
    config = read([*estimate_words(work), *flags_of(layout)]).job.runtime.config
    return [
        f"no layout fits {amount(capacity)} a rank; {layout} needs least, {amount(memory.total)} ({parts_as_text}): "
        f"{amount(memory.total - capacity)} too much",
        f"less with {flags_that_reduce(config, work.ranks, largest_part, shares=0)}",
        *_more_machines(work, capacity),
    ]


def _more_machines(work: Work, capacity: float) -> list[str]:
    """Say on how many machines the closed forms fit, if they do for a power of two times these machines."""
    for factor in (2**n for n in range(1, 11)):
        larger = replace(work, machines=work.machines * factor)
        if any(least_memory(larger, layout) <= capacity for layout in layouts(larger)):
            return [f"by its state and saved tensors alone it fits no fewer than {larger.machines} machines of these"]
    return []


def as_text(work: Work, predictions: Sequence[Prediction], capacity: float) -> list[str]:
    """Return the lines of a table of the layouts. Those that fit are numbered."""
    inside, between = FLOPS_A_BYTE[work.device]
    fields = [name for name in Layout._fields if name != "ep" or work.model.size.experts]
    head = [*fields, "idle", "repeated", "sent", "lost", "inside", "between", "memory"]
    rows = [["", *head, ""]]
    number = 0
    for layout, lost, memory, fits in predictions:
        number += fits
        shares = (f"{100 * share:.1f}%" for share in (lost.idle, lost.repeated, lost.sent, lost.total))
        sizes = (amount(int(size)) for size in (lost.inside, lost.between))
        excess = "" if fits else f"{amount(memory.total - capacity)} too much"
        rows.append(
            [
                str(number) if fits else "-",
                *map(str, layout[: len(fields)]),
                *shares,
                *sizes,
                amount(memory.total),
                excess,
            ]
        )
    return [
        f"{work.model.family} of about {_in_words(work.model.parameters)} parameters, "
        f"{work.ranks} rank(s), {amount(capacity)} usable on each",
        "in % of the model's own FLOPs of a step: idle in the pipeline, repeated by recompute, sent (a byte counts as",
        f"{inside:,} FLOPs inside a machine, {between:,} between machines); bytes that a rank sends in a step; predicted memory",
        *table(rows),
    ]


def _in_words(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
