"""Parameters sharded from the moment they are created, so that a model that fits only in shards can be built (stage 3).

    with ShardedInit(axis, dtype):     at any time the parameters of one module are whole
        model = Model()                any use of another, as by its initialization, gathers it again

Every rank of the axis must create the same model: gathering is a collective. The first rank's values are kept.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from megatron.core.distributed.released_params_and_grads_guards import BeforeUseHookTensor
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.storage.resize_storage import resize_and_notify


class ParamShard:
    """This rank's shard of one parameter, of any shape, whose memory is released and allocated again.

    values: flat [numel / axis.size, rounded up].
    """

    def __init__(self, parameter: nn.Parameter, axis: Axis):
        self.parameter = parameter
        self.axis = axis
        self.values: Tensor | None = None  # flat [numel / axis.size, rounded up]; None while the parameter is whole
        self.parameter.shard = self

    @property
    def is_whole(self) -> bool:
        return self.values is None

    @torch.no_grad()
    def release(self) -> None:
        """Release the parameter's memory and keep this rank's shard of the first rank's values.

        Every rank of the axis must call.
        """
        if not self.is_whole or type(self.parameter) is not nn.Parameter or not self.parameter.is_contiguous():
            return
        flat = collectives.broadcast(self.parameter.data, self.axis).view(-1)  # [numel]
        length = -(-flat.numel() // self.axis.size)
        start = self.axis.rank * length
        self.values = flat.new_zeros(length)
        # the last ranks' shards may be shorter, or empty: the rest is padding
        self.values[: max(0, min(length, flat.numel() - start))] = flat[start : start + length]
        resize_and_notify(flat.untyped_storage(), 0)
        self.parameter.__class__ = GatherOnUseParameter

    @torch.no_grad()
    def gather(self) -> None:
        """Make the parameter whole. Every rank of the axis must call."""
        if self.is_whole:
            return
        self.parameter.__class__ = nn.Parameter
        data = self.parameter.data
        resize_and_notify(data.untyped_storage(), (data.storage_offset() + data.numel()) * data.element_size())
        data.view(-1).copy_(collectives.all_gather(self.values, self.axis)[: data.numel()])
        self.values = None


def shard_of(tensor: Tensor) -> ParamShard | None:
    """Return the shard of a parameter, of any shape, created under `ShardedInit`; None for any other tensor."""
    return getattr(tensor, "shard", None)


class GatherOnUseParameter(BeforeUseHookTensor, nn.Parameter):
    """A parameter of which each rank has a shard, until it moves into buffers. Every use of its values gathers it."""

    @staticmethod
    def before_use(function: str, tensors: list[Any]) -> None:
        """Gather these parameters, of any shapes. Every rank of the axis must call."""
        for parameter in tensors:
            parameter.shard.gather()

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        self.shard.gather()
        return nn.Parameter.__deepcopy__(self, memo)


class ShardedInit:
    """A block that shards every parameter of the modules built inside, by torch's registration hooks.

    Only modules of the thread that entered the block count. dtype: of floating parameters; default: that of their
    creation. Every rank of the axis must enter, and build the same model.
    """

    def __init__(self, axis: Axis, dtype: torch.dtype | None = None):
        self._axis = axis
        self._dtype = dtype
        self._shards: dict[int, ParamShard] = {}
        self._handles: list[Any] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> "ShardedInit":
        self._handles = [
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(self._on_module),
        ]
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is None:  # after an error the ranks may not be at the same point, and release is a collective
            for shard in self._shards.values():
                shard.release()

    def take(self, module: nn.Module) -> None:
        """Shard the parameters of a module that is complete."""
        for parameter in module.parameters():
            self._on_parameter(module, "", parameter)
        for shard in self._shards.values():
            shard.release()

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if threading.get_ident() != self._thread or type(parameter) is not nn.Parameter or not parameter.numel():
            return
        if self._dtype is not None and parameter.is_floating_point() and parameter.dtype != self._dtype:
            parameter.data = parameter.data.to(self._dtype)
        if id(parameter) not in self._shards:
            self._shards[id(parameter)] = ParamShard(parameter, self._axis)

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Shard a module, which is complete when its parent registers it.

        Parameters of a copied module were never registered.
        """
        if child is not None and threading.get_ident() == self._thread:
            self.take(child)
