"""`zero.Init`: parameters in shards from the moment they are made; `zero.GatheredParameters`: whole again inside a block.

with zero.Init(dtype=torch.bfloat16):
    model = Model()
engine, *_ = initialize(model=model, config=...)
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.gathered_parameters import FullParameters
from megatron.core.distributed.zero_init import ShardedInit
from megatron.core.parallel.global_state import get_mesh, model_parallel_is_initialized
from megatron.core.parallel.initialize_model_parallel import initialize_model_parallel
from megatron.deepspeed.comm import init_distributed


class Init:
    """A block in which parameters are made in shards over the data-parallel ranks. Every rank must enter, and make the same
    model; the first rank's values count.

    module: one whose parameters are sharded at once, without a block. dtype: of floating parameters; default: as made.
    enabled: False: nothing happens. The rest of DeepSpeed's arguments (config_dict_or_path, remote_device, ...) has no
    effect: `initialize` reads the file, and puts the shards where it says.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *_: Any,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **without_effect: Any,
    ):
        self._enabled, self._dtype = enabled, dtype
        if enabled and module is not None:
            self._making().take(module)

    def _making(self) -> ShardedInit:
        join()
        return ShardedInit(get_mesh().samples, self._dtype)

    def __enter__(self) -> "Init":
        self._block = self._making().__enter__() if self._enabled else None
        return self

    def __exit__(self, *error: Any) -> None:
        if self._block is not None:
            self._block.__exit__(*error)


def join(dist_init_required: bool | None = None, distributed_port: int | None = None) -> None:
    """Make the mesh of data-parallel ranks, unless the script has made one. Every rank must call."""
    if not model_parallel_is_initialized():
        init_distributed(dist_init_required=dist_init_required, distributed_port=distributed_port)
        initialize_model_parallel()


class GatheredParameters(FullParameters):
    """A block in which these parameters are whole. Every rank must enter.

    params: one or several. modifier_rank: the global rank whose changes count; None: changes are lost, or where the
    parameter is whole anyway (stages 0 to 2), each rank keeps its own. After `initialize`, parameters that are rounded
    copies of float32 masters cannot be changed: ValueError.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ):
        listed = [params] if isinstance(params, Tensor) else list(params) if enabled else []
        changed_on = None
        if modifier_rank is not None and enabled:
            samples = get_mesh().samples
            changed_on = samples, samples.ranks.index(modifier_rank)
        super().__init__([p for p in listed if isinstance(p, Tensor) and enabled], changed_on)
