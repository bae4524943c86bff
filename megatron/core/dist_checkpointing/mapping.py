"""Megatron's `ShardedTensor` and `ShardedObject`, and the helpers that make them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.dist_checkpointing.local_tensor import LocalTensor, part_of_whole, tensor_at
from megatron.core.dist_checkpointing.state_dict_io import KeyedTensor
from megatron.core.parallel.global_state import get_global_state


@dataclass
class ShardedTensor(KeyedTensor):
    """A rank's part of a tensor, by its place: for modules whose parameters have no placement.

    replica_id: the rank whose number is 0, or all zeros, writes. A padded part is refused on loading if its padding differs.
    """

    key: str
    data: Tensor
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    @property
    def local(self) -> LocalTensor:
        if self.data is None or self.flattened_range is not None:
            raise NotImplementedError(f"{self.key}: a part without data, or of a flattened range, is not built")
        data = self.data.detach()[(None,) * self.prepend_axis_num]
        writes = not any(self.replica_id if isinstance(self.replica_id, tuple) else (self.replica_id,))
        return tensor_at(data, self.global_offset, self.global_shape, is_writer=writes)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: int | tuple[int, ...] = 0,
        prepend_axis_num: int = 0,
        **init_kwargs: Any,
    ) -> "ShardedTensor":
        """rank_offsets: (axis, number of this part along it, parts along it) of each divided axis. prepend_axis_num:
        leading axes
        that the whole tensor has and `data` has not, such as one of layers."""
        shape, placed = (1,) * prepend_axis_num + tuple(data.shape), {axis: part for axis, *part in rank_offsets}
        place = (data.dtype, tuple(data.shape), *part_of_whole(shape, placed))
        return cls(key, data, *place, replica_id, prepend_axis_num, **init_kwargs)


@dataclass
class ShardedObject:
    """A value that is no tensor, but plain JSON, equal on all ranks."""

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        if any(size != 1 for size in self.global_shape):
            raise NotImplementedError(f"{self.key}: an object of {self.global_shape} parts is not built; save tensors")


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: tuple[int, ...] | None = None,
    prepend_offsets: Sequence[tuple[int, int, int]] = (),
    **kwargs: Any,
) -> ShardedTensor:
    """A part whose axis `tp_axis` is divided over the tensor-parallel ranks. prepend_offsets: of leading axes that the whole
    tensor has and `tensor` has not."""
    tp = get_global_state().mesh["tp"]
    divided = (tp_axis + len(prepend_offsets), tp.rank, tp.size)
    return _part(
        tensor, key, prepend_offsets, [divided], replica_id or (0, 0, get_global_state().mesh.tokens.rank), **kwargs
    )


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: Sequence[tuple[int, int, int]] = (),
    replica_id: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> ShardedTensor:
    """A part that all tensor- and data-parallel ranks hold alike."""
    mesh = get_global_state().mesh
    return _part(tensor, key, prepend_offsets, [], replica_id or (0, mesh["tp"].rank, mesh.tokens.rank), **kwargs)


def _part(
    tensor: Tensor, key: str, leading: Any, divided: Any, replica: Any, tp_group: Any = None, dp_cp_group: Any = None
) -> ShardedTensor:
    del tp_group, dp_cp_group  # the mesh knows the groups
    places = [*leading, *divided]
    return ShardedTensor.from_rank_offsets(key, tensor, *places, replica_id=replica, prepend_axis_num=len(leading))


def make_sharded_tensors_for_checkpoint(
    state_dict: dict[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: dict[str, int] | None = None,
    sharded_offsets: Sequence[tuple[int, int, int]] = (),
    extra_state_suffix: str = "_extra_state",
) -> dict[str, Any]:
    """The parts of a module's state dict: over tensor-parallel ranks along the axis that the map names, the others alike."""
    axes, made = tensor_parallel_layers_axis_map or {}, {}
    for name, value in state_dict.items():
        key, of_leading = f"{prefix}{name}", {"prepend_offsets": sharded_offsets}
        if name.endswith(extra_state_suffix):
            made[key] = ShardedObject(key, value, (1,), (0,))
        elif name in axes:
            made[key] = make_tp_sharded_tensor_for_checkpoint(value, key, axes[name], **of_leading)
        else:
            made[key] = make_sharded_tensor_for_checkpoint(value, key, **of_leading)
    return made


__getattr__ = names_of_megatron(__name__)
