"""Whether a run's prediction fits what its device has, what takes most of it, and which flags make that less."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.training.memory.dry_run import Job
from megatron.training.memory.report import amount
from megatron.training.memory.timeline import DEVICE, IN_MEMORY, RankMemory, forecast, worst
from megatron.training.settings.config import Config

STATE, ACTIVATIONS = "parameters, gradients and optimizer state", "activations"


def warning_of_room(
    config: Config, world_size: int, ranks: Sequence[RankMemory], room: int | None, *, shares: int = 0
) -> list[str]:
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
        f"WARNING: predicted {amount(_needed(most, tiers))} a rank, {has}: the run may end "
        f"for lack of memory. {amount(size)} are {what}; "
        f"less with {less_with(config, world_size, what, shares=shares)}"
    ]


def hint_of_fused(job: Job, ranks: Sequence[RankMemory]) -> list[str]:
    """A line where the dropout of attention weights alone keeps them from a fused kernel, and that halves the
    activations or better."""
    config = job.runtime.config
    if not _is_unfused_by_dropout(config):
        return []
    fused = replace(config, transformer=replace(config.transformer, attention_dropout=0.0))
    then = worst(forecast(job._replace(runtime=replace(job.runtime, config=fused)))).bytes["activations"]
    now = worst(list(ranks)).bytes["activations"]
    if now < 2 * then:
        return []
    return [f"--attention-dropout 0 uses the fused kernel: activations {amount(then)} instead of {amount(now)}"]


def _is_unfused_by_dropout(config: Config) -> bool:
    """For nothing but the dropout of attention weights."""
    model = config.transformer
    return model.attention_dropout > 0 and model.attention_backend not in ("unfused", "local")


def _needed(one: RankMemory, tiers: Sequence[str]) -> int:
    return sum(one.tiers.get(tier, 0) for tier in tiers)


def _largest(one: RankMemory, tiers: Sequence[str]) -> tuple[str, int]:
    """(what takes most, its bytes)."""
    held = one.within(*tiers)
    parts = {STATE: one.state_within(*tiers), ACTIVATIONS: held["activations"], "communication": held["communication"]}
    return max(parts.items(), key=lambda part: part[1])


def less_with(config: Config, world_size: int, what: str, *, shares: int) -> str:
    """The flags that make this (`STATE`, `ACTIVATIONS`, else what travels) less and are not given yet; shares: as
    `warning_of_room`."""
    model, parallel = config.transformer, config.parallel
    sent = config.data_parallel
    stage = (
        3 if parallel.pipeline_model_parallel_size == 1 else 1
    )  # with pipelines the higher ones send for every microbatch
    shards = config.data_parallel_size(world_size) // sent.num_distributed_optimizer_instances
    tier, samples = config.offload.tier, config.training.micro_batch_size
    if what == ACTIVATIONS:
        flags = {
            "--attention-dropout 0 (its kernel keeps no attention weights)": _is_unfused_by_dropout(config),
            "--recompute-granularity full --recompute-method uniform": model.recompute_granularity != "full",
            f"a --micro-batch-size below {samples}": samples > 1,
            "--sequence-parallel": parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel_on,
            "--bf16": model.params_dtype.itemsize >= 4,
            f"a --seq-length below {config.data.seq_length}": True,
        }
    elif what == STATE:
        flags = {
            f"--zero-stage {stage}": shards > 1 and sent.stage < stage,
            "--offload-dir DIR": tier == "device" or (shares > 0 and tier == "host"),
            "--bf16": _half_has_less_state(config, shards, IN_MEMORY if shares else (DEVICE,)),
            "a smaller --num-layers or --hidden-size": True,
        }
    else:
        flags = {"a smaller --ddp-bucket-size": sent.stage == 2}
    found = [flag for flag, helps in flags.items() if helps]
    spread = "a higher --tensor-model-parallel-size or --pipeline-model-parallel-size on more ranks"
    return ", ".join([*found, f"{spread} of more machines" if shares else spread])


def _half_has_less_state(config: Config, shards: int, tiers: Sequence[str]) -> bool:
    """Whether --bf16 makes the state less: a parameter is two bytes shorter, and its master of four is new. That is
    less only where
    masters are divided further than parameters, or lie elsewhere."""
    sent, offload = config.data_parallel, config.offload
    parameters_over = shards if sent.stage == 3 else 1
    replicas = sent.num_distributed_optimizer_instances if sent.divides_over_outer else 1
    masters_over = shards * replicas if sent.stage else 1
    masters_here = 1.0 if offload.tier in tiers else 1 - offload.optimizer_offload_fraction
    return config.transformer.params_dtype.itemsize >= 4 and 2 / parameters_over > 4 * masters_here / masters_over
