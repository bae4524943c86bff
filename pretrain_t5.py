"""Pretrain T5: the model, data and loss for the shared training loop.

torchrun --nproc-per-node 4 pretrain_t5.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron.training.arguments.parser import answer_help

# The architecture of the published T5 1.0. Version 1.1 has --gated --activation gelu-tanh and an untied output layer.
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
    answer_help({"decoder_num_layers": 0, **DEFAULTS})

import torch
from torch import Tensor, nn

from megatron.core.datasets.t5_dataset_builder import build_t5_datasets
from megatron.core.enums import ModelType
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.tensor_parallel.broadcast_batch_over_tp import broadcast_batch
from megatron.training import get_runtime, get_timers, get_tokenizer, pretrain
from megatron.training.batch_utils import get_batch_on_this_cp_rank, lm_loss_and_objective


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """Build this pipeline stage's part of the model.

    pre_process: the part contains the embedding. post_process: it contains the output layer and the loss. vp_stage:
    index of the model chunk on this rank, with virtual pipeline stages.
    """
    runtime = get_runtime()
    return T5Model(
        runtime.config.transformer,
        decoder_seq_length=runtime.config.data.decoder_seq_length,
        **runtime.model_parts(pre_process, post_process, vp_stage),
    )


def train_valid_test_datasets_provider(num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Build the training, validation and test sets.

    num_samples: samples to provide of each of the three. The first rank builds the sample maps and the others wait, so
    every rank must call.
    """
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
    """Read one microbatch on the first tensor-parallel rank and broadcast it to the others.

    s, t: sequence length of the encoder and of the decoder. Returns int64 tensors: enc_mask [b, s]; text_enc [b, s /
    cp] and text_dec, labels, loss_mask [b, t / cp], this context-parallel rank's tokens. Every tensor-parallel rank of
    the stage must call.
    """
    runtime = get_runtime()
    b = runtime.micro_batch_size
    s = runtime.config.data.seq_length
    t = runtime.config.data.decoder_seq_length
    tp = runtime.mesh["tp"]
    device = runtime.device.torch_device

    data = next(data_iterator) if data_iterator is not None else None
    full_batch = {}
    for keys, length in ((["text_enc", "enc_mask"], s), (["text_dec", "labels", "loss_mask"], t)):
        tensors = broadcast_batch(keys, data, torch.int64, (b, length), tp, device)  # each [b, length]
        full_batch |= dict(zip(keys, tensors))

    batch = get_batch_on_this_cp_rank(full_batch)  # each [b, length / cp]
    # The encoder's mask stays unsharded: it masks keys, and queries attend to the keys of every context-parallel rank.
    batch["enc_mask"] = full_batch["enc_mask"]
    return batch


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (sum of the losses of the spans' tokens, number of these tokens, values to log).

    loss_mask, losses: [b, t], this rank's tokens of one microbatch. The training step divides the sum over all
    microbatches and data-parallel ranks by the number of tokens.
    """
    loss_mask = loss_mask.to(losses.dtype)
    loss_sum = (losses * loss_mask).sum()  # []
    num_tokens = loss_mask.sum()  # []
    return loss_sum, num_tokens, lm_loss_and_objective(losses, loss_mask, loss_sum, num_tokens)


def forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Any, Any]:
    """Run one microbatch through this pipeline stage; return its output and the loss function to apply to it.

    The output is losses [b, t] on the last stage, hidden states on the others. Every stage reads the batch, because
    attention needs the encoder's padding mask.
    """
    with get_timers()("batch-generator", log_level=2):
        batch = get_batch(data_iterator)
    output = model(batch["text_enc"], batch["text_dec"], batch["enc_mask"], batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_and_decoder,
        forward_step,
        args_defaults=DEFAULTS,
        rules=T5Model.rules,
    )
