"""Pretrain BERT: the model, data and losses for the shared training loop.

torchrun --nproc-per-node 4 pretrain_bert.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron.training.arguments.parser import answer_help

DEFAULTS = {"tokenizer_type": "BertWordPieceLowerCase"}
if __name__ == "__main__":
    answer_help(DEFAULTS)

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.tensor_parallel.broadcast_batch_over_tp import broadcast_batch
from megatron.training import get_runtime, get_timers, get_tokenizer, pretrain
from megatron.training.batch_utils import get_batch_on_this_cp_rank, lm_loss_and_objective, rank_part_of_mean_loss


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """Build this pipeline stage's part of the model.

    pre_process: the part contains the embedding. post_process: it contains the heads and the losses. vp_stage: index of
    the model chunk on this rank, with virtual pipeline stages. Without the binary head there are no token types.
    """
    runtime = get_runtime()
    binary_head = runtime.config.masked_data.bert_binary_head
    return BertModel(
        runtime.config.transformer,
        num_tokentypes=2 if binary_head else 0,
        add_binary_head=binary_head,
        **runtime.model_parts(pre_process, post_process, vp_stage),
    )


def train_valid_test_datasets_provider(num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Build the training, validation and test sets.

    num_samples: samples to provide of each of the three. The first rank builds the sample maps and the others wait, so
    every rank must call.
    """
    runtime = get_runtime()
    return build_bert_datasets(
        runtime.config.data,
        runtime.config.masked_data,
        get_tokenizer(),
        num_samples,
        runtime.config.training.seed,
        **runtime.building,
    )


def get_batch(data_iterator: Iterator | None) -> dict[str, Tensor]:
    """Read one microbatch on the first tensor-parallel rank and broadcast it to the others.

    Returns int64 tensors: is_random [b]; padding_mask [b, s]; text, types, labels, loss_mask [b, s / cp], this
    context-parallel rank's tokens. Every tensor-parallel rank of the stage must call.
    """
    runtime = get_runtime()
    b = runtime.micro_batch_size
    s = runtime.config.data.seq_length
    tp = runtime.mesh["tp"]
    device = runtime.device.torch_device

    data = next(data_iterator) if data_iterator is not None else None
    keys = ["text", "types", "labels", "loss_mask", "padding_mask"]
    full_batch = dict(zip(keys, broadcast_batch(keys, data, torch.int64, (b, s), tp, device)))  # each [b, s]

    batch = get_batch_on_this_cp_rank(full_batch)  # each [b, s / cp]
    # The padding mask stays unsharded: it masks keys, and queries attend to the keys of every context-parallel rank.
    batch["padding_mask"] = full_batch["padding_mask"]
    (batch["is_random"],) = broadcast_batch(["is_random"], data, torch.int64, (b,), tp, device)
    return batch


def loss_func(
    batch: dict[str, Tensor], is_training: bool, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss of the microbatch, values to log).

    output: the losses of all tokens [b, s] and the sentence-order logits [b, 2]; None instead of them without the
    binary head. The loss is the mean over the microbatch's masked tokens, plus the mean over its sentence pairs. A
    step's loss is the mean over its microbatches, as in Megatron; the logged values are means over all masked tokens
    and all pairs of the step.
    """
    losses, binary_logits = output

    # the masked language model's loss
    loss_mask = batch["loss_mask"].to(losses.dtype)
    loss_sum = (losses * loss_mask).sum()  # []
    num_tokens = loss_mask.sum()  # []
    loss = rank_part_of_mean_loss(loss_sum, num_tokens)
    report = lm_loss_and_objective(losses, loss_mask, loss_sum, num_tokens)
    if binary_logits is None:
        return loss, report

    # the loss of the sentence order (sop), in float32 or wider
    binary_logits = binary_logits.to(torch.promote_types(binary_logits.dtype, torch.float32))
    sop_loss = functional.cross_entropy(binary_logits, batch["is_random"])
    num_pairs = torch.full_like(sop_loss, len(binary_logits))
    report["sop loss"] = torch.stack((sop_loss.detach() * num_pairs, num_pairs))
    if not is_training:
        num_correct = (binary_logits.argmax(dim=1) == batch["is_random"]).sum()
        report["sop accuracy"] = torch.stack((num_correct, num_pairs))
    return loss + sop_loss, report


def forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Any, Any]:
    """Run one microbatch through this pipeline stage; return its output and the loss function to apply to it.

    The output is (losses [b, s], sentence-order logits [b, 2] or None) on the last stage, hidden states [s, b, h] on
    the others. Every stage reads the batch, because attention needs its padding mask.
    """
    with get_timers()("batch-generator", log_level=2):
        batch = get_batch(data_iterator)
    types = batch["types"] if get_runtime().config.masked_data.bert_binary_head else None
    output = model(batch["text"], batch["padding_mask"], types, batch["labels"])
    return output, partial(loss_func, batch, model.training)


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults=DEFAULTS,
        rules=BertModel.rules,
    )
