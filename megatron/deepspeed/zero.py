"""Shard parameters when they are created: `zero.Init`; gather them inside a block: `zero.GatheredParameters`.

with zero.Init(dtype=torch.bfloat16):
    model = Model()
engine, *_ = initialize(model=model, config=...)
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.sync_and_gather_params import FullParameters
from megatron.core.distributed.zero_init import ShardedInit
from megatron.core.parallel.global_state import get_mesh, model_parallel_is_initialized
from megatron.core.parallel.initialize_model_parallel import initialize_model_parallel
from megatron.deepspeed.comm import init_distributed


class Init:
    """A context manager that shards new parameters over the data-parallel ranks.

    Every rank must enter, and build the same model; the first rank's values are kept. module: shard its parameters at
    once, without a block. dtype: of floating parameters; default: unchanged. enabled: False: nothing happens.
    DeepSpeed's other arguments (config_dict_or_path, remote_device, ...) have no effect: `initialize` reads the config,
    and moves the shards to where it says.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *_: Any,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **without_effect: Any,
    ):
        self._enabled = enabled
        self._dtype = dtype
        if enabled and module is not None:
            self._sharded_init().take(module)

    def _sharded_init(self) -> ShardedInit:
        ensure_data_parallel_groups()
        return ShardedInit(get_mesh().samples, self._dtype)

    def __enter__(self) -> "Init":
        self._block = self._sharded_init().__enter__() if self._enabled else None
        return self

    def __exit__(self, *error: Any) -> None:
        if self._block is not None:
            self._block.__exit__(*error)


def ensure_data_parallel_groups(dist_init_required: bool | None = None, distributed_port: int | None = None) -> None:
    """Initialize the data-parallel process groups, unless the script has done so. Every rank must call."""
    if not model_parallel_is_initialized():
        init_distributed(dist_init_required=dist_init_required, distributed_port=distributed_port)
        initialize_model_parallel()


class GatheredParameters(FullParameters):
    """A context manager that gathers sharded parameters. Every rank must enter.

    params: one or several. modifier_rank: the global rank whose changes are kept, on all ranks; None: changes are lost,
    or where parameters are not sharded (stages 0 to 2), each rank keeps its own. After `initialize`, parameters that
    are rounded copies of float32 masters cannot be changed: ValueError. In the block every parameter is full, in the
    shape that the module gave it.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ):
        tensors: list[Tensor] = []
        modifier = None  # (axis, position of the modifier rank on it)
        if enabled:
            candidates = [params] if isinstance(params, Tensor) else list(params)
            tensors = [p for p in candidates if isinstance(p, Tensor)]
            if modifier_rank is not None:
                samples = get_mesh().samples
                modifier = samples, samples.ranks.index(modifier_rank)
        super().__init__(tensors, modifier)
