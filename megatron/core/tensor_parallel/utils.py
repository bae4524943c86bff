"""Megatron's arithmetic for sharded tensors and vocabularies."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.parallel import collectives
from megatron.core.process_groups_config import OWN_TP_GROUP
from megatron.core.tensor_parallel.mappings import axis_of
from megatron.core.utils import divide


@accepts_defaults_only(tp_group=OWN_TP_GROUP)
def split_tensor_into_1d_equal_chunks(tensor: Tensor, new_buffer: bool = False) -> Tensor:
    """Return this tensor-parallel rank's part of a tensor, of any shape, that all ranks have: [numel / t].

    It is a view, or a copy with `new_buffer`. Raises ValueError if the ranks do not divide the elements.
    """
    part = tensor.reshape(-1)[collectives.local_slice(tensor.numel(), axis_of())]
    return part.clone() if new_buffer else part


@accepts_defaults_only(tp_group=OWN_TP_GROUP)
def gather_split_1d_tensor(tensor: Tensor) -> Tensor:
    """All-gather the ranks' parts, flattened: [numel / t] -> [numel]. Every tensor-parallel rank must call."""
    return collectives.all_gather(tensor.reshape(-1), axis_of())


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """Split the last dimension into equal parts, [.., n] -> [.., n / num_partitions] each: views, or contiguous copies.

    Raises ValueError if it does not divide.
    """
    parts = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    if contiguous_split_chunks:
        return tuple(part.contiguous() for part in parts)
    return parts


class VocabUtility:
    """The rows [first, last) of the vocabulary on a rank."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        del world_size  # in Megatron's signature
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        per_rank = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(per_rank, rank, world_size)


__getattr__ = names_of_megatron(__name__)
