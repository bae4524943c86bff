"""Pretrain T5: the model, data and loss for the shared training loop.

torchrun --nproc-per-node 4 pretrain_t5.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.datasets.t5_dataset_builder import build_t5_datasets
from megatron.core.enums import ModelType
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.tensor_parallel.broadcast_batch import broadcast_batch
from megatron.training import get_runtime, get_timers, get_tokenizer, pretrain
from megatron.training.batch_utils import get_batch_on_this_cp_rank, loss_report


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """This pipeline stage's part of the model."""
    runtime = get_runtime()
    length, parts = runtime.config.data.decoder_seq_length, runtime.model_parts(pre_process, post_process, vp_stage)
    return T5Model(runtime.config.transformer, decoder_seq_length=length, **parts)


def train_valid_test_datasets_provider(num_samples: list[int]) -> tuple[Any, Any, Any]:
    """The data sets. The first rank builds their sample maps; the others wait. Every rank must call."""
    runtime = get_runtime()
    return build_t5_datasets(
        runtime.config.data,
        runtime.config.masked_data,
        get_tokenizer(),
        num_samples,
        runtime.config.training.seed,
        **runtime.building,
    )


def get_batch(data_iterator: Iterator | None) -> dict[str, Tensor]:
    """The batch: enc_mask [b, s]; text_enc [b, s] and text_dec, labels, loss_mask [b, t] of this rank's tokens. Read on the first
    tensor-parallel rank, broadcast to the others."""
    runtime = get_runtime()
    b, lengths = runtime.config.training.micro_batch_size, runtime.config.data
    data = next(data_iterator) if data_iterator is not None else None
    where = (runtime.mesh["tp"], runtime.device.torch_device)
    whole = {}
    for length, keys in (
        (lengths.seq_length, ["text_enc", "enc_mask"]),
        (lengths.decoder_seq_length, ["text_dec", "labels", "loss_mask"]),
    ):
        whole |= dict(zip(keys, broadcast_batch(keys, data, torch.int64, (b, length), *where)))
    return get_batch_on_this_cp_rank(whole) | {"enc_mask": whole["enc_mask"]}  # of keys, which all are seen


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of losses over the spans' tokens, their number, report). Both inputs are [b, t]."""
    loss_mask = loss_mask.to(losses.dtype)
    loss_sum, num_tokens = (losses * loss_mask).sum(), loss_mask.sum()
    return loss_sum, num_tokens, loss_report(losses, loss_mask, loss_sum, num_tokens)


def forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Any, Any]:
    """One microbatch through this stage. Every stage needs the encoder's padding."""
    with get_timers()("batch-generator", log_level=2):
        batch = get_batch(data_iterator)
    output = model(batch["text_enc"], batch["text_dec"], batch["enc_mask"], batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


# What the published models of version 1.0 compute; version 1.1: --gated --activation gelu-tanh and an output layer of its own.
DEFAULTS = {
    "tokenizer_type": "BertWordPieceLowerCase",
    "position_embedding_type": "relative",
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "add_bias_linear": False,
    "activation": "relu",
    "softmax_scale": 1.0,
}

if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_and_decoder,
        forward_step,
        args_defaults=DEFAULTS,
        rules=T5Model.rules,
    )
