"""Pretrain BERT: the model, data and losses for the shared training loop.

torchrun --nproc-per-node 4 pretrain_bert.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.tensor_parallel.broadcast_batch import broadcast_batch
from megatron.training import get_runtime, get_timers, get_tokenizer, pretrain
from megatron.training.batch_utils import get_batch_on_this_cp_rank, loss_report, mean_over_shared_samples


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """This pipeline stage's part of the model. Without the binary head there are no token types."""
    runtime = get_runtime()
    binary_head = runtime.config.masked_data.bert_binary_head
    return BertModel(
        runtime.config.transformer,
        num_tokentypes=2 if binary_head else 0,
        add_binary_head=binary_head,
        **runtime.model_parts(pre_process, post_process, vp_stage),
    )


def train_valid_test_datasets_provider(num_samples: list[int]) -> tuple[Any, Any, Any]:
    """The data sets. The first rank builds their sample maps; the others wait. Every rank must call."""
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
    """The batch: is_random [b], padding_mask [b, s], all other entries [b, s] of this rank's tokens. Read on the first
    tensor-parallel rank, broadcast to the others."""
    runtime = get_runtime()
    b, s = runtime.config.training.micro_batch_size, runtime.config.data.seq_length
    data = next(data_iterator) if data_iterator is not None else None
    where = (runtime.mesh["tp"], runtime.device.torch_device)
    keys = ["text", "types", "labels", "loss_mask", "padding_mask"]
    whole = dict(zip(keys, broadcast_batch(keys, data, torch.int64, (b, s), *where)))
    batch = get_batch_on_this_cp_rank(whole) | {"padding_mask": whole["padding_mask"]}  # of keys, which all are seen
    (batch["is_random"],) = broadcast_batch(["is_random"], data, torch.int64, (b,), *where)
    return batch


def loss_func(
    batch: dict[str, Tensor], is_training: bool, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, report). The loss is the mean over a microbatch's masked words, plus the mean over its sentence pairs.

    output: losses of all words [b, s], and scores of the two sentence orders [b, 2] or None. A step's loss is the mean over its
    microbatches, as in Megatron; the report holds means over all words and all pairs.
    """
    losses, order = output
    mask = batch["loss_mask"].to(losses.dtype)
    words = (losses * mask).sum(), mask.sum()
    loss, report = mean_over_shared_samples(*words), loss_report(losses, mask, *words)
    if order is None:
        return loss, report
    scores = order.to(torch.promote_types(order.dtype, torch.float32))
    order_loss = functional.cross_entropy(scores, batch["is_random"])
    pairs = torch.full_like(order_loss, len(scores))
    report["sop loss"] = torch.stack((order_loss.detach() * pairs, pairs))
    if not is_training:
        report["sop accuracy"] = torch.stack(((scores.argmax(dim=1) == batch["is_random"]).sum(), pairs))
    return loss + order_loss, report


def forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Any, Any]:
    """One microbatch through this stage. Every stage needs the padding mask."""
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
        args_defaults={"tokenizer_type": "BertWordPieceLowerCase"},
        rules=BertModel.rules,
    )
