"""Whether a run's prediction fits what its device has, what takes most of it, and which flags make that less. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.training.memory.estimate import DEVICE, IN_MEMORY, RankMemory, estimate, worst
from megatron.training.memory.report import amount
from megatron.training.memory.sizes import RunSizes

STATE, ACTIVATIONS = "parameters, gradients and optimizer state", "activations"


def warning_of_room(run: RunSizes, ranks: Sequence[RankMemory], room: int | None, *, shares: int = 0) -> list[str]:
    """A line where a rank is predicted to need more than the `room` bytes that its device has; None: it is not known.

    shares: ranks that divide the memory of a machine, whose tiers it holds too; 0: the device has memory of its own.
    """
    tiers = IN_MEMORY if shares else (DEVICE,)
    most = max(ranks, key=lambda one: _needed(one, tiers))
    if room is None or _needed(most, tiers) <= room:
        return []
    has = (
        f"this machine has {amount(room)} free for each of its {shares} rank(s)"
        if shares
        else f"this device has {amount(room)}"
    )
    what, size = _largest(most, tiers)
    return [
        f"WARNING: predicted {amount(_needed(most, tiers))} a rank, {has}: the run may end for lack of memory. {amount(size)} are {what}; "
        f"less with {less_with(run, what, shares=shares)}"
    ]


def hint_of_fused(run: RunSizes, ranks: Sequence[RankMemory]) -> list[str]:
    """A line where the dropout of attention weights alone keeps them from a fused kernel, and that halves the activations or better."""
    if not run.layer.unfused_by_dropout:
        return []
    fused = replace(run.layer, attention_dropout=False, fused_attention=True, unfused_by_dropout=False)
    rank = worst(list(ranks)).rank
    now, then = (of[rank].bytes["activations"] for of in (ranks, estimate(replace(run, layer=fused))))
    if now < 2 * then:
        return []
    return [f"--attention-dropout 0 uses the fused kernel: activations {amount(then)} instead of {amount(now)}"]


def _needed(one: RankMemory, tiers: Sequence[str]) -> int:
    return sum(one.tiers.get(tier, 0) for tier in tiers)


def _largest(one: RankMemory, tiers: Sequence[str]) -> tuple[str, int]:
    """(what takes most, its bytes)."""
    held = one.within(*tiers)
    parts = {STATE: one.state_within(*tiers), ACTIVATIONS: held["activations"], "communication": held["communication"]}
    return max(parts.items(), key=lambda part: part[1])


def less_with(run: RunSizes, what: str, *, shares: int) -> str:
    """The flags that make this (`STATE`, `ACTIVATIONS`, else what travels) less and are not given yet; shares: as `warning_of_room`."""
    sizes = run.layer
    stage = 3 if run.p == 1 else 1  # with pipelines the higher ones send for every microbatch
    if what == ACTIVATIONS:
        flags = {
            "--attention-dropout 0 (its kernel keeps no attention weights)": sizes.unfused_by_dropout,
            "--recompute-granularity full --recompute-method uniform": sizes.recompute not in ("uniform", "block"),
            f"a --micro-batch-size below {sizes.b}": sizes.b > 1,
            "--sequence-parallel": sizes.t > 1 and not sizes.sequence_parallel,
            "--bf16": not sizes.is_half,
            f"a --seq-length below {sizes.s}": True,
        }
    elif what == STATE:
        flags = {
            f"--zero-stage {stage}": run.shards > 1 and run.zero_stage < stage,
            "--offload-dir DIR": run.tier == "device" or (shares > 0 and run.tier == "host"),
            "--bf16": _half_has_less_state(run, IN_MEMORY if shares else (DEVICE,)),
            "a smaller --num-layers or --hidden-size": True,
        }
    else:
        flags = {"a smaller --ddp-bucket-size": run.zero_stage == 2}
    found = [flag for flag, helps in flags.items() if helps]
    spread = "a higher --tensor-model-parallel-size or --pipeline-model-parallel-size on more ranks"
    return ", ".join([*found, f"{spread} of more machines" if shares else spread])


def _half_has_less_state(run: RunSizes, tiers: Sequence[str]) -> bool:
    """Whether --bf16 makes the state less: a parameter is two bytes shorter, and its master of four is new. That is less only where
    masters are divided further than parameters, or lie elsewhere."""
    parameters_over = run.shards if run.zero_stage == 3 else 1
    masters_over = run.shards * (run.replicas if run.divides_outer else 1) if run.zero_stage else 1
    masters_here = 1.0 if run.tier in tiers else 1 - run.offload_fraction
    return not run.layer.is_half and 2 / parameters_over > 4 * masters_here / masters_over
