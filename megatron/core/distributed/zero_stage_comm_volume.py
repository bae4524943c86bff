"""The communication volume of data parallelism in a step, by ZeRO stage, from the size of the buffers. Pure numbers.

A step has m microbatches and P elements, over d ranks, in groups of n that each hold all shards. Collectives are
bandwidth-optimal: they send (k - 1) / k of a tensor from each of k ranks, an all-reduce twice that.

    stage             inside a group (over n)                              between groups (over d / n)
    0                 an all-reduce of P gradients, over all d
    1                 a reduce-scatter of P, an all-gather of P            an all-reduce of P / n gradients
    2                 m reduce-scatters of P, an all-gather of P           the same
    3                 m reduce-scatters of P, 2 m all-gathers of P         the same
    3, outer optim    the same as 3                                        a reduce-scatter and an all-gather of P / n

Frozen parameters send nothing, but in stage 3 m all-gathers for the forwards, and m for the backwards of units through
which a gradient passes. All of them are counted as such: an embedding below the first trained layer is not one.

Sums of partial gradients over tensor-parallel ranks, and of an embedding that two pipeline stages share, are not
counted: they are the same in every stage.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class BufferSizes:
    """The sizes of one buffer. Bytes are of one element."""

    numel: int
    shared_numel: int  # elements that a forward gathers twice, since two units use them
    param_bytes: int
    sum_bytes: int  # of the sum of gradients that a rank stores
    sent_bytes: int  # of a gradient as it is sent
    sums_wide: bool = False  # gradients are sent in `sent_bytes` and added up in `sum_bytes`
    is_frozen: bool = False  # no gradients, and no updates
    # ranks of a group that has all shards, and such groups; None: those of the call. Experts have other ranks.
    ranks: tuple[int, int] | None = None


CommVolume = dict[tuple[str, str], float]  # (collective, field of `GradAxes`) -> bytes that a rank sends in a step


def step_comm_volume(
    sizes: BufferSizes, stage: int, *, inner: int, outer: int = 1, microbatches: int = 1, divides_outer: bool = False
) -> CommVolume:
    """Return the bytes that one rank sends in a step, by collective. Axes of one rank are left out.

    inner: ranks of a group that has all shards; outer: such groups; divides_outer: --outer-dp-sharding-strategy optim.
    """
    gradients = sizes.numel * sizes.sent_bytes
    parameters = sizes.numel * sizes.param_bytes
    if sizes.is_frozen:
        gathered = 2 * parameters + sizes.shared_numel * sizes.param_bytes if stage == 3 else 0
        return _without_zeros({("all_gather", "shard"): _sent_share(inner) * gathered * microbatches})
    if stage == 0:
        return _without_zeros({("all_reduce", "reduce"): 2 * _sent_share(inner * outer) * gradients})

    # inside a group: the gradients to their shards, the parameters from their shards
    reductions = microbatches if stage > 1 else 1
    gathered = parameters
    if stage == 3:  # in each forward and each backward
        gathered = (2 * parameters + sizes.shared_numel * sizes.param_bytes) * microbatches
    # sums in a wider type cannot be a reduce-scatter: the parts are exchanged, and each rank adds up its own
    reduce_op = "all_to_all" if sizes.sums_wide else "reduce_scatter"
    sent: CommVolume = {
        (reduce_op, "shard"): _sent_share(inner) * gradients * reductions,
        ("all_gather", "shard"): _sent_share(inner) * gathered,
    }

    # between groups: the sums of a shard, which are still in the gradients' dtype in stage 1 alone
    is_sent_narrow = stage == 1 and not sizes.sums_wide
    shard = sizes.numel * (sizes.sent_bytes if is_sent_narrow else sizes.sum_bytes) / inner
    if divides_outer:
        sent["reduce_scatter", "outer"] = _sent_share(outer) * shard
        sent["all_gather", "outer"] = _sent_share(outer) * parameters / inner
    else:
        sent["all_reduce", "replica"] = 2 * _sent_share(outer) * shard
    return _without_zeros(sent)


def comm_volume_by_stage_line(
    buffers: Iterable[BufferSizes], stage: int, *, inner: int, outer: int, microbatches: int, divides_outer: bool
) -> str:
    """Return a log line that says what each stage would send in this layout, the chosen one marked."""
    buffers = list(buffers)
    rows = [(str(number), number, False) for number in range(4)]  # (name, stage, divides_outer)
    if outer > 1:
        rows.append(("3 with --outer-dp-sharding-strategy optim", 3, True))
    texts = []
    for name, row_stage, row_divides in rows:
        sent = 0.0
        for sizes in buffers:
            own_inner, own_outer = sizes.ranks or (inner, outer)
            volume = step_comm_volume(
                sizes, row_stage, inner=own_inner, outer=own_outer, microbatches=microbatches, divides_outer=row_divides
            )
            sent += sum(volume.values())
        is_chosen = (row_stage, row_divides) == (stage, divides_outer)
        texts.append(f"{name}: {sent / 2**20:,.1f} MiB{' (chosen)' if is_chosen else ''}")
    groups = f"{outer} groups of {inner} ranks" if outer > 1 else f"{inner} ranks"
    return (
        f"data-parallel traffic that rank 0 sends in a step of {microbatches} microbatches over {groups}, by ZeRO "
        "stage: " + (", ".join(texts))
    )


def _sent_share(ranks: int) -> float:
    """The share of a tensor that each rank sends in a bandwidth-optimal reduce-scatter or all-gather."""
    return (ranks - 1) / ranks


def _without_zeros(sent: CommVolume) -> CommVolume:
    return {call: size for call, size in sent.items() if size}
