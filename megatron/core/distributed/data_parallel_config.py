"""The settings of data parallelism: the ZeRO stage, and how gradients and parameters are communicated. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from megatron.core.base.dataclass_flags import Count, FlagConfig, option


class Zero(NamedTuple):
    """The tensors that a ZeRO stage shards; only here are stages numbers.

    Gradients and parameters that are sharded are whole for one bucket at a time.
    """

    shards_state: bool
    shards_grads: bool
    shards_params: bool


_STAGE_OF = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


@dataclass(frozen=True)
class DataParallelConfig(FlagConfig):
    """Data parallelism."""

    overlap_grad_reduce: bool = option(False, "overlap gradient reduction with the last backward, bucket by bucket")
    ddp_bucket_size: Count | None = option(
        None, "elements per gradient bucket; default: max(40,000,000, 1,000,000 x data-parallel size)"
    )
    use_distributed_optimizer: bool = option(False, "shard optimizer state over data-parallel ranks: ZeRO stage 1")
    zero_stage: Literal[0, 1, 2, 3] | None = option(
        None, "shard over data-parallel ranks: 1: optimizer state; 2: also gradients; 3: also parameters"
    )
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = option(
        None, "the ZeRO stage, by Megatron-FSDP's names: no_shard: 0; optim: 1; optim_grads: 2; optim_grads_params: 3"
    )
    use_megatron_fsdp: bool = option(
        False,
        "fully sharded data parallelism: ZeRO stage 3, or the stage of --data-parallel-sharding-strategy",
        flags=("--use-megatron-fsdp", "--use-custom-fsdp"),
    )
    use_torch_fsdp2: bool = option(False, "fully sharded data parallelism by its name in PyTorch: ZeRO stage 3")
    num_distributed_optimizer_instances: Count = option(
        1, "number of groups of data-parallel ranks; each group has a full set of shards (hybrid sharding)"
    )
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = option(
        "no_shard",
        "optim: shard optimizer state also over the groups of --num-distributed-optimizer-instances (ZeRO stage 3)",
    )
    overlap_param_gather: bool = option(
        False, "overlap the all-gather of updated parameters with the next forward; needs sharded optimizer state"
    )
    grad_reduce_in_bf16: bool = option(
        False,
        "communicate gradients in bfloat16: half the bytes, with sums rounded to 8 significant bits; "
        "gradients are still accumulated in fp32",
    )
    reduce_scatter_with_fp32_accumulation: bool = option(
        False,
        "with --grad-reduce-in-bf16: sum the bfloat16 gradients of the ranks in fp32; needs sharded optimizer state",
        flags=("--reduce-scatter-with-fp32-accumulation", "--ddp-reduce-scatter-with-fp32-accumulation"),
    )
    main_grads_dtype: Literal["fp32", "bf16"] = option(
        "fp32",
        "dtype in which gradients are accumulated and reduced; bf16 needs --bf16 and sharded optimizer state. Each "
        "rank's shard of the reduced gradients stays in fp32",
    )
    fixed_order_grad_reduce: bool = option(
        False,
        "sum gradients in the same order for any data- and pipeline-parallel size, so that layouts agree bit for "
        "bit; keeps the gradients of every microbatch in memory (debugging)",
    )
    poison_released_buffers: bool = option(
        False,
        "fill released parameters, gradients and receive buffers with NaN, and check that all ranks issue the "
        "same ZeRO 2 and "
        "3 collectives (debugging)",
    )

    def problems(self) -> Iterator[str]:
        requested = self._requested_stages()
        shards = self.zero.shards_state
        bf16 = self.main_grads_dtype == "bf16"
        instances = self.num_distributed_optimizer_instances
        if len(set(requested.values())) > 1:
            yield (
                f"{' and '.join(requested)} give different ZeRO stages: "
                f"{', '.join(map(str, requested.values()))}; give only one of them"
            )
        elif self.use_distributed_optimizer and 0 in requested.values():
            yield (
                f"--use-distributed-optimizer means ZeRO stage 1, but {next(iter(requested))} means that nothing "
                "is sharded; leave one of them out"
            )
        if instances > 1 and not shards:
            yield f"--num-distributed-optimizer-instances {instances} needs --use-distributed-optimizer"
        if self.overlap_param_gather and not shards:
            yield "--overlap-param-gather needs sharded optimizer state; give --use-distributed-optimizer too"
        if bf16 and not shards:
            yield (
                "--main-grads-dtype bf16 needs sharded optimizer state, where sums are kept in float32; give "
                "--use-distributed-optimizer or --zero-stage 1 to 3"
            )
        if self.reduce_scatter_with_fp32_accumulation and not (shards and (bf16 or self.grad_reduce_in_bf16)):
            yield (
                "--reduce-scatter-with-fp32-accumulation needs gradients sent in bfloat16 and sharded; give "
                "--grad-reduce-in-bf16 and --use-distributed-optimizer (or --zero-stage 1 to 3) too, or leave it out"
            )
        if self.outer_dp_sharding_strategy == "optim" and (not self.zero.shards_params or instances < 2):
            yield "--outer-dp-sharding-strategy optim needs --zero-stage 3 and --num-distributed-optimizer-instances 2 or more"
        if self.fixed_order_grad_reduce:
            excluded = dict.fromkeys(requested, self.zero.shards_grads) | {
                "--overlap-grad-reduce": self.overlap_grad_reduce,
                "--grad-reduce-in-bf16": self.grad_reduce_in_bf16,
                "--main-grads-dtype bf16": bf16,
            }  # flag -> whether it is set to a value that is excluded
            for flag, is_set in excluded.items():
                if is_set:
                    yield (
                        "--fixed-order-grad-reduce needs fp32 gradients, ZeRO stage 0 or 1, and one reduction at "
                        f"the end of each step; leave out {flag}"
                    )

    def _requested_stages(self) -> dict[str, int]:
        """Return the stages that --zero-stage, --data-parallel-sharding-strategy and FSDP name, by flag with value."""
        requested = {}
        if self.zero_stage is not None:
            requested[f"--zero-stage {self.zero_stage}"] = self.zero_stage
        strategy = self.data_parallel_sharding_strategy
        if strategy in _STAGE_OF:
            requested[f"--data-parallel-sharding-strategy {strategy}"] = _STAGE_OF[strategy]
        elif self.use_megatron_fsdp:
            requested["--use-megatron-fsdp"] = 3
        if self.use_torch_fsdp2:
            requested["--use-torch-fsdp2"] = 3
        return requested

    @cached_property
    def stage(self) -> int:
        """The ZeRO stage (arXiv:1910.02054).

        0 shards nothing, 1 masters and moments, 2 also gradients, 3 also parameters.
        """
        return max([int(self.use_distributed_optimizer), *self._requested_stages().values()])

    @cached_property
    def zero(self) -> "Zero":
        """The tensors that the stage shards."""
        return Zero(shards_state=self.stage > 0, shards_grads=self.stage > 1, shards_params=self.stage > 2)

    @property
    def divides_over_outer(self) -> bool:
        """Whether optimizer state is sharded over the outer axis too (ZeRO stage 3 inside, stage 1 outside)."""
        return self.outer_dp_sharding_strategy == "optim"

    def bucket_numel(self, ranks: int) -> int | None:
        """Return the elements per bucket for `ranks` data-parallel ranks.

        None: one bucket per buffer, where nothing overlaps.
        """
        if not (self.cuts_by_size or self.zero.shards_params):
            return None
        return self.ddp_bucket_size or max(40_000_000, 1_000_000 * ranks)

    @property
    def cuts_by_size(self) -> bool:
        """Whether buckets are cut by size, not by layer."""
        if self.zero.shards_params:
            return False
        return self.overlap_grad_reduce or self.overlap_param_gather or self.zero.shards_grads
