"""Search the layouts of a job that fit in memory, by the prediction of tools/estimate_memory.py, fastest first."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.arguments.config import Config
from megatron.training.memory.flags_that_reduce_memory import flags_that_reduce
from megatron.training.memory.forecast_memory_along_schedule import RankMemory, forecast, worst
from megatron.training.memory.predicted_memory_table import amount, table
from megatron.training.monitor.long_task_progress import heartbeat
from tools.configuring.layouts import (
    FLOPS_A_BYTE,
    Layout,
    Loss,
    Work,
    layer_memory,
    layouts,
    least_memory,
    live_microbatches,
    loss,
    ranked,
)
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


_SECONDS = 15.0  # between two lines about the same layout
_FEW_LAYERS = 2  # of each pipeline rank, in a prediction that is a bound


def bound_from_few_layers(work: Work, layout: Layout, flags: Sequence[str]) -> float:
    """Return a lower bound of `predicted` that is near it, in a fraction of its time; 0 for a layout with few layers.

    It is the prediction for the same run with two layers on each pipeline rank, which has all that is there once, such as
    tables, logits and communication, and for each layer that is left out the bounds of `layer_memory`. Raises ConfigError
    for flags that a run refuses.
    """
    left_out = work.model.size.layers // layout.pp - _FEW_LAYERS
    if left_out < _FEW_LAYERS:
        return 0.0
    few = ["--num-layers", str(_FEW_LAYERS * layout.pp)]  # the last of a flag's values counts
    layer = layer_memory(work, layout)
    bounds = []
    for rank in forecast(read([*estimate_words(work), *flags, *few]).job):
        live = live_microbatches(work, layout, rank.rank)
        bounds.append(rank.total + left_out * (layer.state + live * layer.saved))
    return max(bounds)


def bounds_hold(config: Config) -> bool:
    """Return whether the bounds of layouts.py hold with the flags that were added to the run: for Adam, on the device."""
    model = config.transformer
    return (
        config.optimizer.optimizer == "adam"
        and not config.optimizer.reuse_fp32_param
        and config.data_parallel.main_grads_dtype == "fp32"
        and config.offload.tier == "device"
        and not model.cpu_offloading_num_layers
        and model.moe_expert_capacity_factor is None
    )


def estimate_words(work: Work) -> list[str]:
    """Return the flags that tools/estimate_memory.py needs beside those of a run."""
    family = "bert" if work.model.family == "bert" else None
    return words({"world_size": work.ranks, "model": family})


def search(
    work: Work, flags_of: FlagsOf, capacity: float, num_wanted: int, say: Callable[[str], None]
) -> list[Prediction]:
    """Predict layouts until `num_wanted` of them fit, each with other sizes of TP and PP. Return all predictions.

    capacity: usable bytes of a rank. Skipped are layouts whose bounds exceed it (`least_memory`, `bound_from_few_layers`),
    and layouts that a run refuses. say: takes a line about the progress; a second thread calls it too. Raises ConfigError
    if nothing is left.
    """
    ordered = ranked(work)
    if not ordered:
        raise ConfigError(_no_layout(work))
    predictions: list[Prediction] = []
    too_large: list[tuple[float, Layout]] = []  # with a lower bound of their memory
    last_refusal = ConfigError([])  # the run's further flags exclude a layout
    has_bounds = None  # until a layout is accepted, whose flags tell
    for number, layout in enumerate(ordered, 1):
        fitting_sizes = {(p.layout.tp, p.layout.pp) for p in predictions if p.fits}
        if len(fitting_sizes) == num_wanted:
            break
        if (layout.tp, layout.pp) in fitting_sizes:
            continue
        flags = flags_of(layout)
        try:
            if has_bounds is None:
                has_bounds = bounds_hold(read([*estimate_words(work), *flags]).job.runtime.config)
            bound = least_memory(work, layout) if has_bounds else 0.0
            if bound > capacity:
                too_large.append((bound, layout))
                continue
            place = f"layout {number} of {len(ordered)}: {layout}"
            with heartbeat(place, say, every=_SECONDS):
                bound = bound_from_few_layers(work, layout, flags) if has_bounds else 0.0
            if bound > capacity:
                say(f"{place}: at least {amount(int(bound - capacity))} too much")
                too_large.append((bound, layout))
                continue
            say(f"predicting {place}")
            with heartbeat(place, say, every=_SECONDS):
                memory = predicted(work, flags)
        except ConfigError as error:
            last_refusal = error
            continue
        predictions.append(Prediction(layout, loss(work, layout), memory, memory.total <= capacity))
    if last_refusal.problems and not predictions and not too_large:
        raise last_refusal
    if not any(prediction.fits for prediction in predictions):
        raise ConfigError(_nothing_fits(work, flags_of, capacity, predictions, too_large))
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
    work: Work,
    flags_of: FlagsOf,
    capacity: float,
    predictions: Sequence[Prediction],
    too_large: Sequence[tuple[float, Layout]],
) -> list[str]:
    """Return the error if no layout fits: what the smallest one lacks, and what would help.

    too_large: layouts without a prediction, with a lower bound of their memory.
    """
    # the layout that needs least memory: of those predicted, and of the others the one with the smallest bound
    candidates = {prediction.layout: prediction.memory for prediction in predictions}
    refusal = None
    for _, layout in sorted(too_large):
        try:
            candidates[layout] = predicted(work, flags_of(layout))
            break
        except ConfigError as error:
            refusal = error
    if refusal is not None and not candidates:  # a run refuses them all
        raise refusal
    layout = min(candidates, key=lambda layout: candidates[layout].total)
    memory = candidates[layout]

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
