"""Megatron core's functions that give a rank its part of a batch: broadcast over tp, then cut over cp."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.ops.attention.document_and_window_masks import Documents
from megatron.core.ops.shard_sequence import shard_sequence
from megatron.core.parallel.global_state import get_global_state, get_mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.tensor_parallel.broadcast_batch_over_tp import GeneratedBatch, broadcast_tensors

# The entries of a batch, in the order in which scripts unpack them. None of the metadata of packed sequences and of
# context-parallel groups of several sizes is built.
_METADATA = ("cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "local_cp_size", "max_seqlen")
_INTEGERS = ("labels", "position_ids", "tokens")


@accepts_defaults_only(is_hybrid_cp=False, mtp_on_this_rank=False)
def get_batch_on_this_tp_rank(
    batch: dict[str, Any],
    *,
    broadcast_src_rank: int | None = None,
    broadcast_group: Any = None,
    create_attention_mask_in_dataloader: bool = True,
    cp_size: int = 1,
    tp_rank: int = 0,
    micro_batch_size: int | None = None,
    seq_length: int | None = None,
    pipeline_model_parallel_size: int = 1,
    is_pipeline_first_stage: bool = False,
    is_pipeline_last_stage: bool = False,
    has_cu_seqlens: bool = False,
    is_sft: bool = False,
) -> dict[str, Any]:
    """Broadcast a batch that the first tensor-parallel rank has read. Every tensor-parallel rank of the stage must call.

    batch: on the first rank tokens, labels, loss_mask, position_ids, [b, s] each, and in a run whose attention stays
    within documents document_ids [b, s]; on the others its content does not matter. The result has Megatron's
    entries by name, in alphabetical order. In a run attention_mask is `Documents`, or None where attention is causal
    over the whole sample, which is faster than a mask; outside of one it is the batch's, bool [b, 1, s, s]. is_sft,
    has_cu_seqlens: in a run with --sft the mask has the borders of examples, and cu_seqlens is None; otherwise they raise
    NotImplementedError. The other arguments are Megatron's; groups and sizes are those of the process.
    """
    del broadcast_src_rank, broadcast_group, cp_size, tp_rank
    del micro_batch_size, seq_length, pipeline_model_parallel_size, is_pipeline_first_stage, is_pipeline_last_stage
    tp = get_mesh()["tp"]
    device = get_global_state().device

    # integers and floats apart
    integers = list(_INTEGERS)
    run = get_global_state().run
    if (is_sft or has_cu_seqlens) and not (run is not None and run.config.data.sft):
        raise NotImplementedError(
            "get_batch_on_this_tp_rank: is_sft and has_cu_seqlens are built for a run with --sft alone, where documents are "
            "masked; leave them at False, and give --reset-attention-mask to mask the documents of other data"
        )
    if run is not None and run.config.data.masks_documents:
        check_document_ids(batch, tp)
        integers.append("document_ids")
    shared: dict[str, Any] = dict(broadcast_tensors(integers, batch, torch.int64, tp, device))  # [b, s] each
    shared |= broadcast_tensors(["loss_mask"], batch, torch.float32, tp, device)  # [b, s]

    # the mask: of documents in a run; that of the data set in a loop of a script's own
    documents = shared.pop("document_ids", None)
    shared["attention_mask"] = None if documents is None else Documents(documents)
    if run is None and create_attention_mask_in_dataloader:
        shared |= broadcast_tensors(["attention_mask"], batch, torch.bool, tp, device)  # [b, 1, s, s]
    shared |= dict.fromkeys(_METADATA)
    return {name: shared[name] for name in sorted(shared)}


def check_document_ids(batch: dict[str, Any] | None, tp: Axis) -> None:
    """Raise ValueError if a batch that is broadcast has no document_ids, in a run whose attention stays within documents."""
    if tp.is_first and "document_ids" not in batch and not isinstance(batch, GeneratedBatch):
        raise ValueError(
            "--reset-attention-mask and --dataloader-inter-document-masking keep attention within documents, but the batch "
            f"has no document_ids, only {', '.join(batch)}: its data set was built without the flag. Give its config "
            "reset_attention_mask=args.reset_attention_mask (of Megatron's names), or leave the flag out"
        )


@accepts_defaults_only(is_hybrid_cp=False)
def get_batch_on_this_cp_rank(
    batch: dict[str, Any],
    *,
    cp_group: Any = None,
    hybrid_cp_group_func: Any = None,
    use_per_sequence_balancing: bool = False,
) -> dict[str, Any]:
    """Return this context-parallel rank's part of each sample: [b, s] -> [b, s / c].

    Of an attention mask it is that of the queries: [b, 1, s, s] -> [b, 1, s / c, s]. `Documents` stay whole,
    since a query sees keys of other ranks. Labels must have been shifted before. Raises ConfigError if the ranks
    do not divide s. The arguments behind the batch are Megatron's; the group is that of the process.
    """
    del cp_group, hybrid_cp_group_func, use_per_sequence_balancing
    sequence = get_mesh().sequence
    shards = {}
    for name, x in batch.items():
        if isinstance(x, Tensor):
            dim = 2 if name == "attention_mask" else 1
            x = shard_sequence(x, sequence, dim=dim)  # [b, s / cp]; a mask [b, 1, s / cp, s]
        shards[name] = x
    return shards


def flatten_batch_for_packed_sequences(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch as it is: a batch of packed sequences (cu_seqlens) raises NotImplementedError."""
    if batch.get("cu_seqlens") is not None:
        raise NotImplementedError(
            "cu_seqlens: packed sequences are not built; leave out --sft and --dataloader-inter-document-masking"
        )
    return batch
