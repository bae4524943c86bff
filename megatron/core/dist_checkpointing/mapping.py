"""Megatron's `ShardedTensor` and `ShardedObject`, and the functions that make them.

Megatron: core/dist_checkpointing/mapping.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.dist_checkpointing.local_tensor import LocalTensor, global_shape_offset_and_parts, tensor_at
from megatron.core.dist_checkpointing.save_load_state_dict import TensorWithOwnKey
from megatron.core.parallel.global_state import get_global_state


@dataclass
class ShardedTensor(TensorWithOwnKey):
    """A rank's part of a tensor, given by its offset: for modules whose parameters have no placement.

    data: [local_shape]. replica_id: the rank whose id is 0, or all zeros, writes. Loading refuses a padded part whose
    padding differs.
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
        """This rank's part, [1, .., 1, *local_shape] with as many leading ones as `prepend_axis_num`.

        Raises NotImplementedError for a part without data, or of a flattened range.
        """
        if self.data is None or self.flattened_range is not None:
            raise NotImplementedError(
                f"{self.key}: a ShardedTensor without data or with a flattened_range is not supported"
            )
        data = self.data.detach()[(None,) * self.prepend_axis_num]  # [1, ..., 1, *local_shape]
        replica_id = self.replica_id if isinstance(self.replica_id, tuple) else (self.replica_id,)
        return tensor_at(data, self.global_offset, self.global_shape, is_writer=not any(replica_id))

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
        """Return the part of a tensor that is divided evenly along some axes.

        data: [local shape]; along a divided axis the global shape is as many times as large as there are parts.
        rank_offsets: (axis, number of this part along it, parts along it) of each divided axis. prepend_axis_num:
        leading axes that the global tensor has and `data` has not, such as one of layers.
        """
        shape = (1,) * prepend_axis_num + tuple(data.shape)
        divided = {axis: part for axis, *part in rank_offsets}
        global_shape, global_offset, axis_fragmentations = global_shape_offset_and_parts(shape, divided)
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            global_shape,
            global_offset,
            axis_fragmentations,
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )


@dataclass
class ShardedObject:
    """A value that is not a tensor: plain JSON, equal on all ranks."""

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        if any(size != 1 for size in self.global_shape):
            raise NotImplementedError(
                f"{self.key}: a ShardedObject of {self.global_shape} parts is not supported; save tensors"
            )


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: tuple[int, ...] | None = None,
    prepend_offsets: Sequence[tuple[int, int, int]] = (),
    **kwargs: Any,
) -> ShardedTensor:
    """Return a part of a tensor whose axis `tp_axis` is divided over the tensor-parallel ranks.

    tensor: [.., size / t, ..] at `tp_axis`. Nothing is communicated. prepend_offsets: `rank_offsets` of leading axes
    that the global tensor has and `tensor` has not.
    """
    mesh = get_global_state().mesh
    tp = mesh["tp"]
    divided = (tp_axis + len(prepend_offsets), tp.rank, tp.size)
    return _part(tensor, key, prepend_offsets, [divided], replica_id or (0, 0, mesh.tokens.rank), **kwargs)


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: Sequence[tuple[int, int, int]] = (),
    replica_id: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> ShardedTensor:
    """Return a tensor, of any shape, of which all tensor- and data-parallel ranks hold equal copies.

    prepend_offsets: as of `make_tp_sharded_tensor_for_checkpoint`. Nothing is communicated.
    """
    mesh = get_global_state().mesh
    return _part(tensor, key, prepend_offsets, [], replica_id or (0, mesh["tp"].rank, mesh.tokens.rank), **kwargs)


def _part(
    tensor: Tensor, key: str, leading: Any, divided: Any, replica_id: Any, tp_group: Any = None, dp_cp_group: Any = None
) -> ShardedTensor:
    del tp_group, dp_cp_group  # the mesh knows the groups
    rank_offsets = [*leading, *divided]
    return ShardedTensor.from_rank_offsets(
        key, tensor, *rank_offsets, replica_id=replica_id, prepend_axis_num=len(leading)
    )


def make_sharded_tensors_for_checkpoint(
    state_dict: dict[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: dict[str, int] | None = None,
    sharded_offsets: Sequence[tuple[int, int, int]] = (),
    extra_state_suffix: str = "_extra_state",
) -> dict[str, Any]:
    """Return the sharded state dict of a module's state dict.

    The map gives the axis along which a tensor is divided over the tensor-parallel ranks; all other tensors are equal
    on these ranks. Tensors have their shapes on this rank; a value of another kind, the extra state, becomes a
    `ShardedObject`.
    """
    tp_axes = tensor_parallel_layers_axis_map or {}
    sharded_state_dict = {}
    for name, value in state_dict.items():
        key = f"{prefix}{name}"
        if name.endswith(extra_state_suffix):
            sharded = ShardedObject(key, value, (1,), (0,))
        elif name in tp_axes:
            sharded = make_tp_sharded_tensor_for_checkpoint(value, key, tp_axes[name], prepend_offsets=sharded_offsets)
        else:
            sharded = make_sharded_tensor_for_checkpoint(value, key, prepend_offsets=sharded_offsets)
        sharded_state_dict[key] = sharded
    return sharded_state_dict


__getattr__ = names_of_megatron(__name__)
