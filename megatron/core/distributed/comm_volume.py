"""What data parallelism sends in a step, by ZeRO stage, from the size of the buffers. Pure numbers.

Of P elements in m microbatches over d ranks, in groups of n that each hold all shards, with bandwidth-optimal
collectives, which send (k - 1) / k of a tensor from each of k ranks, an all-reduce twice that:

    stage             inside a group (over n)                              between groups (over d / n)
    0                 an all-reduce of P gradients, over all d
    1                 a reduce-scatter of P, an all-gather of P            an all-reduce of P / n gradients
    2                 m reduce-scatters of P, an all-gather of P           the same
    3                 m reduce-scatters of P, 2 m all-gathers of P         the same
    3, outer optim    the same as 3                                        a reduce-scatter and an all-gather of P / n

Sums of what tensor-parallel ranks hold parts of, and of a table that two stages share, are not counted: no stage
changes them.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Flat:
    """A buffer by its numbers: elements, those fetched once more in a forward since two units use them, bytes of an
    element, and whether what is sent is summed in the type of the sums."""

    numel: int
    lent: int
    param_bytes: int
    sum_bytes: int  # of the sum of gradients that a rank keeps
    sent_bytes: int  # of a gradient on its way
    sums_wide: bool = False


Traffic = dict[tuple[str, str], float]  # (call, field of `GradAxes`) -> bytes that a rank sends in a step


def step_traffic(
    flat: Flat, stage: int, *, inner: int, outer: int = 1, microbatches: int = 1, divides_outer: bool = False
) -> Traffic:
    """Bytes that one rank sends in a step; without what an axis of one rank leaves out."""
    gradients, parameters = flat.numel * flat.sent_bytes, flat.numel * flat.param_bytes
    if stage == 0:
        return _some({("all_reduce", "reduce"): 2 * _share(inner * outer) * gradients})
    fetched = 2 * parameters + flat.lent * flat.param_bytes
    reductions, op = microbatches if stage > 1 else 1, "all_to_all" if flat.sums_wide else "reduce_scatter"
    sent = {
        (op, "shard"): _share(inner) * gradients * reductions,
        ("all_gather", "shard"): _share(inner) * (fetched * microbatches if stage == 3 else parameters),
    }
    rounds_between = stage == 1 and not flat.sums_wide
    part = flat.numel * (flat.sent_bytes if rounds_between else flat.sum_bytes) / inner
    if divides_outer:
        sent["reduce_scatter", "outer"] = _share(outer) * part
        sent["all_gather", "outer"] = _share(outer) * parameters / inner
    else:
        sent["all_reduce", "replica"] = 2 * _share(outer) * part
    return _some(sent)


def traffic_line(
    flats: Iterable[Flat], stage: int, *, inner: int, outer: int, microbatches: int, divides_outer: bool
) -> str:
    """What each stage would send in this layout, the chosen one marked."""
    held = list(flats)
    rows = [(str(number), number, False) for number in range(4)]
    rows += [("3 with --outer-dp-sharding-strategy optim", 3, True)] * (outer > 1)
    words = []
    for name, number, divides in rows:
        sizes = {"inner": inner, "outer": outer, "microbatches": microbatches, "divides_outer": divides}
        sent = sum(sum(step_traffic(flat, number, **sizes).values()) for flat in held)
        chosen = (number, divides) == (stage, divides_outer)
        words.append(f"{name}: {sent / 2**20:,.1f} MiB{' (chosen)' if chosen else ''}")
    groups = f"{outer} groups of {inner} ranks" if outer > 1 else f"{inner} ranks"
    return (
        f"data-parallel traffic that rank 0 sends in a step of {microbatches} microbatches over {groups}, by ZeRO "
        "stage: " + (", ".join(words))
    )


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _some(sent: Traffic) -> Traffic:
    return {call: size for call, size in sent.items() if size}
