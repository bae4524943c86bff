"""Batches, masks and averaged losses of a script's forward step have the names that Megatron's scripts call them by."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.ops.attention.document_and_window_masks import Documents
from megatron.core.parallel import collectives
from megatron.core.process_groups_config import OWN_CP_GROUP
from megatron.core.tensor_parallel import batch_on_this_rank
from megatron.core.tensor_parallel.broadcast_batch_over_tp import broadcast_batch
from megatron.core.tensor_parallel.cross_entropy import plain_cross_entropy_of
from megatron.training.global_vars import get_runtime

SPLITS = ("train", "valid", "test")
NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")  # in the order in which scripts unpack them


def get_blend_and_blend_per_split(args: Any) -> tuple[Any, Any]:
    """Return the data files of `args`: (prefixes, weights or None) or None, and one such for each split, or None.

    They are those of --data-path or --data-args-path, or of --train-data-path and its relatives or
    --per-split-data-args-path. Raises ValueError if both kinds of a choice are given.
    """
    paths = args.data_path
    if args.data_args_path is not None:
        if paths is not None:
            raise ValueError("--data-path and --data-args-path both name the data; give one of them")
        paths = Path(args.data_args_path).read_text().split()
    if paths is not None:
        return get_blend_from_list(paths), None

    by_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if args.per_split_data_args_path is not None:
        of_file = json.loads(Path(args.per_split_data_args_path).read_text())
        by_split = [of_file[split].split() if isinstance(of_file[split], str) else of_file[split] for split in SPLITS]
    if not any(by_split):
        return None, None
    return None, [get_blend_from_list(words) for words in by_split]


def is_first_or_last_pipeline_stage(vp_stage: int | None) -> bool:
    """Return whether this rank, or its chunk `vp_stage`, has the first or the last stage: those that read batches."""
    ignores_virtual = vp_stage is None
    return parallel_state.is_pipeline_first_stage(ignores_virtual, vp_stage) or parallel_state.is_pipeline_last_stage(
        ignores_virtual, vp_stage
    )


@accepts_defaults_only(mtp_on_this_rank=False)
def get_batch_on_this_tp_rank(data_iterator: Iterator | None) -> dict[str, Any]:
    """Read a batch on the first tensor-parallel rank and broadcast it.

    Every tensor-parallel rank of the stage must call.

    tokens, labels, position_ids: int64 [b, s]; loss_mask: float32 [b, s]; attention_mask: None where attention is
    causal over the whole sample, which is faster than a mask, else `Documents`.
    """
    runtime = get_runtime()
    config = runtime.config
    tp = runtime.mesh["tp"]
    device = runtime.device.torch_device
    shape = (runtime.micro_batch_size, config.data.seq_length)

    # read
    data = None
    if data_iterator is not None:
        data = next(data_iterator)

    # broadcast, integers and floats apart
    keys = ["tokens", "labels", "position_ids"]
    if config.data.masks_documents:
        batch_on_this_rank.check_document_ids(data, tp)
        keys.append("document_ids")
    batch: dict[str, Any] = dict(zip(keys, broadcast_batch(keys, data, torch.int64, shape, tp, device)))  # [b, s] each
    (batch["loss_mask"],) = broadcast_batch(["loss_mask"], data, torch.float32, shape, tp, device)  # [b, s]

    # the mask follows from the document of each token
    documents = batch.pop("document_ids", None)
    batch["attention_mask"] = None if documents is None else Documents(documents)
    return {name: batch[name] for name in NAMES}


@accepts_defaults_only(cp_group=OWN_CP_GROUP)
def get_batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Return this context-parallel rank's part of each sample, as core's function of this name does."""
    return batch_on_this_rank.get_batch_on_this_cp_rank(batch)


def rank_part_of_mean_loss(total: Tensor, count: Tensor) -> Tensor:
    """Return the mean over the tokens of a microbatch, for Megatron's older form of `loss_func`, (loss, report).

    total, count: scalars [], sums over this rank's tokens; so is the result. The ranks that share the samples each get
    a number, of which the step takes the mean; all of them must call.
    """
    sequence = parallel_state.get_mesh().sequence
    if sequence.size > 1:
        total = total * sequence.size  # the step divides by it when it takes the mean over the ranks
        count = collectives.all_reduce(count.clone(), sequence)
    return total / count.clamp(min=1)


def lm_loss_and_objective(losses: Tensor, loss_mask: Tensor, loss_sum: Tensor, num_tokens: Tensor) -> dict[str, Tensor]:
    """Return the report of a loss function: tensors [2] of (sum, count) over the tokens that the mask counts.

    lm loss: the cross entropy. lm objective: the trained loss, where it has more terms: with label smoothing or z-loss.
    losses, loss_mask: [b, s]. loss_sum, num_tokens: scalars [], the masked sum of `losses` and the number of tokens.
    Nothing is communicated.
    """
    loss_sum = loss_sum.detach()
    cross_entropy = plain_cross_entropy_of(losses)  # [b, s]; None if the losses are the cross entropy
    if cross_entropy is None:
        return {"lm loss": torch.stack((loss_sum, num_tokens))}
    cross_entropy_sum = (cross_entropy * loss_mask).sum()
    return {
        "lm loss": torch.stack((cross_entropy_sum, num_tokens)),
        "lm objective": torch.stack((loss_sum, num_tokens)),
    }


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of each loss over the data-parallel ranks: [len(losses)], detached.

    losses: a scalar [] or [1] each. Every rank of the stage must call.
    """
    tokens = parallel_state.get_mesh().tokens
    rank_losses = torch.cat([loss.detach().clone().view(1) for loss in losses])  # [losses]
    return collectives.all_reduce(rank_losses, tokens) / tokens.size


def get_ltor_masks_and_position_ids(
    data: Tensor, eod_token: int, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (attention_mask, loss_mask, position_ids) of the tokens `data` [b, s] for a left-to-right model.

    attention_mask: bool [1, 1, s, s], True where attention is forbidden; with `reset_attention_mask` [b, 1, s, s], and
        earlier documents are forbidden too
    loss_mask: float [b, s]; with `eod_mask_loss` 0 at end-of-document tokens
    position_ids: [b, s]; with `reset_position_ids` they restart at 0 after each end-of-document token

        tokens  a b E c d       positions  0 1 2 0 1        documents  0 0 0 1 1
    """
    b, s = data.shape
    ends = data == eod_token
    documents = ends.cumsum(dim=1) - ends.long()  # [b, s]; an end token belongs to its document
    positions = torch.arange(s, device=data.device).expand(b, s)  # [b, s]

    # attention to later tokens is forbidden, and to other documents
    future = positions[0][None, :] > positions[0][:, None]  # [s, s]: query, key
    attention_mask = future[None, None]  # [1, 1, s, s]
    if reset_attention_mask:
        other_document = documents[:, None, :] != documents[:, :, None]  # [b, s, s]
        attention_mask = attention_mask | other_document[:, None]  # [b, 1, s, s]

    # end tokens may count nothing
    loss_mask = torch.ones(b, s, dtype=torch.float32, device=data.device)
    if eod_mask_loss:
        loss_mask[ends] = 0.0

    # positions may count from the first token of the document
    if reset_position_ids:
        is_begin = documents != documents.roll(1, dims=1)  # [b, s]
        begins = torch.where(is_begin, positions, 0)  # [b, s]: the position of a document's first token, else 0
        begins[:, 0] = 0  # roll compared the first token with the last
        positions = positions - begins.cummax(dim=1).values  # [b, s]
    return attention_mask, loss_mask, positions.clone()
