"""A prediction is compared with the memory of a device or machine; flags are named that reduce what takes most."""

from collections.abc import Sequence

from megatron.training.arguments.config import Config
from megatron.training.memory.forecast_memory_along_schedule import ACTIVATIONS, DEVICE, IN_MEMORY, STATE, RankMemory
from megatron.training.memory.zero_state_bytes_by_tier import amount


def capacity_warning(
    config: Config, world_size: int, ranks: Sequence[RankMemory], capacity: int | None, *, shares: int = 0
) -> list[str]:
    """Return one line if a rank needs more than `capacity` bytes, else none. capacity: None if it is unknown.

    shares: ranks that share the machine's memory, which has the host tier too; 0: the device has memory of its own.
    """
    tiers = IN_MEMORY if shares else (DEVICE,)
    most = max(ranks, key=lambda rank: rank.on_tiers(*tiers))
    needed = most.on_tiers(*tiers)
    if capacity is None or needed <= capacity:
        return []
    parts = most.parts_within(*tiers)
    largest = max(parts, key=parts.__getitem__)
    if shares:
        has = f"this machine has {amount(capacity)} free for each of its {shares} rank(s)"
    else:
        has = f"this device has {amount(capacity)}"
    return [
        f"WARNING: predicted {amount(needed)} a rank, {has}: the run may end for lack of memory. {amount(parts[largest])} "
        f"are {largest}; less with {flags_that_reduce(config, world_size, largest, shares=shares)}"
    ]


def flags_that_reduce(config: Config, world_size: int, what: str, *, shares: int) -> str:
    """Return the flags, not given yet, that reduce `what`: STATE, ACTIVATIONS, or communication.

    shares: as in `capacity_warning`.
    """
    model = config.transformer
    parallel = config.parallel
    data_parallel = config.data_parallel
    tier = config.offload.tier
    samples = config.training.micro_batch_size
    tiers = IN_MEMORY if shares else (DEVICE,)
    # With a pipeline, ZeRO 2 and 3 communicate for every microbatch.
    stage = 3 if parallel.pipeline_model_parallel_size == 1 else 1
    shards = config.data_parallel_size(world_size) // data_parallel.num_distributed_optimizer_instances

    # flag -> whether it reduces the memory
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
            f"--zero-stage {stage}": shards > 1 and data_parallel.stage < stage,
            "--offload-dir DIR": tier == "device" or (shares > 0 and tier == "host"),
            "--bf16": _half_has_less_state(config, shards, tiers),
            "a smaller --num-experts or --moe-ffn-hidden-size": model.has_experts,
            "a smaller --num-layers or --hidden-size": True,
        }
    else:
        flags = {"a smaller --ddp-bucket-size": data_parallel.stage == 2}
    useful = [flag for flag, helps in flags.items() if helps]
    sizes = ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"]
    if what == STATE and model.has_experts and parallel.expert_model_parallel_size < model.num_experts:
        sizes.insert(0, "--expert-model-parallel-size")
    more_ranks = f"a higher {', '.join(sizes[:-1])} or {sizes[-1]} on more ranks"
    if shares:  # more ranks on this machine would share the same memory
        more_ranks += " of more machines"
    return ", ".join([*useful, more_ranks])


def _half_has_less_state(config: Config, shards: int, tiers: Sequence[str]) -> bool:
    """Whether --bf16 reduces the state: it saves 2 bytes of a parameter and adds a master of 4 bytes.

    The sum is less only if masters are sharded over more ranks than parameters, or offloaded.
    """
    data_parallel = config.data_parallel
    offload = config.offload
    parameter_ranks = shards if data_parallel.stage == 3 else 1
    replicas = data_parallel.num_distributed_optimizer_instances if data_parallel.divides_over_outer else 1
    master_ranks = shards * replicas if data_parallel.stage else 1
    resident_fraction = 1.0 if offload.tier in tiers else 1 - offload.optimizer_offload_fraction
    saved = 2 / parameter_ranks
    added = 4 * resident_fraction / master_ranks
    return config.transformer.params_dtype.itemsize >= 4 and saved > added
