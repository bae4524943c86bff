"""Whether a prediction fits the memory of a device or machine, which kind takes most, and the flags that reduce it."""

from collections.abc import Sequence

from megatron.training.arguments.config import Config
from megatron.training.memory.bytes_by_tier import amount
from megatron.training.memory.peak_along_schedule import ACTIVATIONS, DEVICE, IN_MEMORY, STATE, RankMemory


def warning_of_room(
    config: Config, world_size: int, ranks: Sequence[RankMemory], room: int | None, *, shares: int = 0
) -> list[str]:
    """One line if a rank needs more than `room` bytes (None: unknown). shares: ranks that share the machine's memory, which
    holds the host tier too; 0: the device has its own memory."""
    tiers = IN_MEMORY if shares else (DEVICE,)
    needed, most = max(((one.on_tiers(*tiers), one) for one in ranks), key=lambda pair: pair[0])
    if room is None or needed <= room:
        return []
    parts = most.parts_within(*tiers)
    what = max(parts, key=parts.__getitem__)
    has = f"this machine has {amount(room)} free for each of its {shares} rank(s)"
    has = has if shares else f"this device has {amount(room)}"
    return [
        f"WARNING: predicted {amount(needed)} a rank, {has}: the run may end for lack of memory. {amount(parts[what])} are "
        f"{what}; less with {less_with(config, world_size, what, shares=shares)}"
    ]


def less_with(config: Config, world_size: int, what: str, *, shares: int) -> str:
    """The flags not given yet that reduce `what`: STATE, ACTIVATIONS, or communication. shares: as in `warning_of_room`."""
    model, parallel = config.transformer, config.parallel
    sent, tiers = config.data_parallel, IN_MEMORY if shares else (DEVICE,)
    # With a pipeline, the higher stages communicate for every microbatch.
    stage = 3 if parallel.pipeline_model_parallel_size == 1 else 1
    shards = config.data_parallel_size(world_size) // sent.num_distributed_optimizer_instances
    tier, samples = config.offload.tier, config.training.micro_batch_size
    if what == ACTIVATIONS:
        flags = {
            "--attention-backend auto": model.attention_backend in ("unfused", "local"),  # others keep no scores
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
            "--bf16": _half_has_less_state(config, shards, tiers),
            "a smaller --num-layers or --hidden-size": True,
        }
    else:
        flags = {"a smaller --ddp-bucket-size": sent.stage == 2}
    spread = "a higher --tensor-model-parallel-size or --pipeline-model-parallel-size on more ranks"
    found = [*(flag for flag, helps in flags.items() if helps), f"{spread} of more machines" if shares else spread]
    return ", ".join(found)


def _half_has_less_state(config: Config, shards: int, tiers: Sequence[str]) -> bool:
    """Whether --bf16 reduces the state: it saves 2 bytes of a parameter and adds a master of 4. The sum is less only if
    masters are sharded further than parameters, or offloaded."""
    sent, offload = config.data_parallel, config.offload
    parameters_over = shards if sent.stage == 3 else 1
    replicas = sent.num_distributed_optimizer_instances if sent.divides_over_outer else 1
    masters_over = shards * replicas if sent.stage else 1
    masters_here = 1.0 if offload.tier in tiers else 1 - offload.optimizer_offload_fraction
    return config.transformer.params_dtype.itemsize >= 4 and 2 / parameters_over > 4 * masters_here / masters_over
