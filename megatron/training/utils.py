"""Functions that Megatron's top-level scripts import from `megatron.training.utils`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core import comm, parallel_state
from megatron.core.classic.utils import unwrap_model
from megatron.training.runtime import is_last_rank, print_rank_0, print_rank_last

__all__ = [
    "average_losses_across_data_parallel_group",
    "get_ltor_masks_and_position_ids",
    "is_last_rank",
    "print_rank_0",
    "print_rank_last",
    "unwrap_model",
]


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Mean of each loss over the data-parallel ranks: [len(losses)], detached. Every rank of the stage must call."""
    tokens = parallel_state.get_mesh().tokens
    mine = torch.cat([loss.detach().clone().view(1) for loss in losses])
    return comm.all_reduce(mine, tokens) / tokens.size


def get_ltor_masks_and_position_ids(
    data: Tensor, eod_token: int, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(attention_mask, loss_mask, position_ids) of the tokens `data` [b, s] for a left-to-right model.

    attention_mask: bool [1, 1, s, s], True where attention is forbidden; with `reset_attention_mask` [b, 1, s, s], and earlier
        documents are forbidden too
    loss_mask: float [b, s]; with `eod_mask_loss` 0 at end-of-document tokens
    position_ids: [b, s]; with `reset_position_ids` they restart at 0 after each end-of-document token

        tokens  a b E c d       positions  0 1 2 0 1        documents  0 0 0 1 1
    """
    b, s = data.shape
    ends = data == eod_token
    documents = ends.cumsum(dim=1) - ends.long()  # an end token belongs to its document
    positions = torch.arange(s, device=data.device).expand(b, s)
    future = positions[0][None, :] > positions[0][:, None]
    attention_mask = future[None, None]
    if reset_attention_mask:
        attention_mask = attention_mask | (documents[:, None, :] != documents[:, :, None])[:, None]
    loss_mask = torch.ones(b, s, dtype=torch.float32, device=data.device)
    if eod_mask_loss:
        loss_mask[ends] = 0.0
    if reset_position_ids:
        begins = torch.where(documents != documents.roll(1, dims=1), positions, 0)
        begins[:, 0] = 0
        positions = positions - begins.cummax(dim=1).values
    return attention_mask, loss_mask, positions.clone()
