"""Pretrain GPT: the model, data and loss for the shared training loop.

torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm, mpu
from megatron.core.datasets.gpt import build_gpt_datasets
from megatron.core.enums import ModelType
from megatron.core.models.gpt_model import GPTModel
from megatron.core.tensor_parallel.broadcast import broadcast_batch
from megatron.core.transformer.masks import Documents
from megatron.training import get_runtime, get_timers, get_tokenizer, pretrain, print_rank_0


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """This pipeline stage's part of the model."""
    runtime = get_runtime()
    return GPTModel(runtime.config.transformer, **runtime.model_parts(pre_process, post_process, vp_stage))


def train_valid_test_datasets_provider(num_samples: list[int]) -> tuple[Any, Any, Any]:
    """The data sets. The first rank builds their indices; the others wait. Every rank must call."""
    runtime = get_runtime()
    world, device = runtime.mesh["world"], runtime.device.torch_device
    return build_gpt_datasets(
        runtime.config.data,
        get_tokenizer(),
        num_samples,
        runtime.config.training.seed,
        is_builder=world.is_first,
        wait=lambda: comm.barrier(world, device),
        say=print_rank_0,
        progress=print_rank_0,
        fim=runtime.config.fim,
    )


def get_batch(data_iterator: Iterator | None) -> tuple[Tensor, Tensor, Tensor, Documents | None, Tensor]:
    """(tokens, labels, loss_mask, documents, position_ids), read on the first tensor-parallel rank and broadcast to the others.

    All are [b, s]. documents is None without --reset-attention-mask, which keeps attention within documents.
    """
    runtime = get_runtime()
    shape = (runtime.config.training.micro_batch_size, runtime.config.data.seq_length)
    data = next(data_iterator) if data_iterator is not None else None
    where = (shape, runtime.mesh["tp"], runtime.device.torch_device)
    keys = ["tokens", "labels", "position_ids"] + ["document_ids"] * runtime.config.data.reset_attention_mask
    tokens, labels, position_ids, *document_ids = broadcast_batch(keys, data, torch.int64, *where)
    (loss_mask,) = broadcast_batch(["loss_mask"], data, torch.float32, *where)
    return tokens, labels, loss_mask, Documents(*document_ids) if document_ids else None, position_ids


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of losses over unmasked tokens, number of unmasked tokens, report). Both inputs are [b, s]."""
    loss_mask = loss_mask.to(losses.dtype)
    loss_sum, num_tokens = (losses * loss_mask).sum(), loss_mask.sum()
    return loss_sum, num_tokens, {"lm loss": torch.stack((loss_sum.detach(), num_tokens))}


def forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Tensor, Any]:
    """One microbatch through this stage. Middle stages need no batch, unless --reset-attention-mask needs its documents."""
    is_end = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    if not is_end and not get_runtime().config.data.reset_attention_mask:
        return model(None, None), None
    with get_timers()("batch-generator", log_level=2):
        tokens, labels, loss_mask, documents, position_ids = get_batch(data_iterator)
    return model(tokens, position_ids, documents, labels=labels), partial(loss_func, loss_mask)


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        rules=GPTModel.rules,
    )
