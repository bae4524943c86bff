"""Megatron's `DistributedDataParallel(config, ddp_config, module)` over our wrapper of a model chunk."""

from typing import Any

from torch import nn

from megatron.core.base.from_megatron_config import settings_from
from megatron.core.distributed import data_parallel
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.distributed_data_parallel_config import NOT_BUILT, DistributedDataParallelConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_global_state
from megatron.core.process_groups_config import check_groups


class DistributedDataParallel(data_parallel.DistributedDataParallel):
    """Wraps a model chunk of the current mesh. forward(inputs of any shapes) -> the chunk's outputs.

    Every rank of the chunk's groups must wrap its own. In ZeRO stage 0 an optimizer of torch.optim trains it, else that
    of `get_megatron_optimizer`.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
    ):
        check_groups(pg_collection, "DistributedDataParallel: pg_collection")
        shards = ddp_config.use_megatron_fsdp or ddp_config.use_custom_fsdp
        ours = settings_from(
            ddp_config,
            DistributedDataParallelConfig,
            DataParallelConfig,
            NOT_BUILT,
            overlap_grad_reduce=ddp_config.overlap_grad_reduce and not disable_bucketing,
            ddp_bucket_size=ddp_config.bucket_size,
            data_parallel_sharding_strategy=ddp_config.data_parallel_sharding_strategy if shards else None,
            reduce_scatter_with_fp32_accumulation=False,  # nothing is reduced in bfloat16
        )
        super().__init__(module, get_global_state().mesh, ours, fills_grad=not ours.zero.shards_state)
        self.config = config
        self.ddp_config = ddp_config

    def finish_grad_reduce(self) -> None:
        super().finish_grad_reduce()
        tensors = [tensor for buffer in self.buffers for tensor in buffer.sums.tensors]
        if self.ddp_config.check_for_nan_in_grad and not all(tensor.isfinite().all() for tensor in tensors):
            raise RuntimeError(
                "check_for_nan_in_grad: a gradient is NaN or infinite; lower the learning rate, or check the data"
            )

    def start_param_sync(self, *_: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """All-gather what the other ranks have updated. After `MegatronOptimizer.step` nothing is left to gather."""
        self.gather_params()
        if force_sync:
            self.finish_param_gather()

    def broadcast_params(self) -> None:
        """Copy the first data-parallel rank's parameters to the others. Every rank must call.

        Call it before the optimizer is made, and not in ZeRO stage 3.
        """
        for parameter in self.module.parameters():
            collectives.broadcast(parameter.data, self.mesh.samples)

    def state_dict(self, prefix: str = "", keep_vars: bool = False, destination: Any = None) -> dict[str, Any]:
        """Return the module's `state_dict`, by the module's own names."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars, destination=destination)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict)
