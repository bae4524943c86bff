"""Pretrain GPT: the model, data and loss for the shared training loop.

torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron.training.arguments.parser import answer_help

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
if __name__ == "__main__":
    answer_help(DEFAULTS)

from torch import Tensor, nn

from megatron.core import mpu
from megatron.core.datasets.gpt_dataset_and_builder import build_gpt_datasets
from megatron.core.datasets.sft_dataset import build_sft_datasets
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.training import get_runtime, get_timers, get_tokenizer, pretrain
from megatron.training.batch_utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank, lm_loss_and_objective


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """Build this pipeline stage's part of the model.

    pre_process: the part contains the embedding. post_process: it contains the output layer and the loss. vp_stage:
    index of the model chunk on this rank, with virtual pipeline stages.
    """
    runtime = get_runtime()
    return GPTModel(runtime.config.transformer, **runtime.model_parts(pre_process, post_process, vp_stage))


def train_valid_test_datasets_provider(num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Build the training, validation and test sets.

    num_samples: samples to provide of each of the three. The first rank builds the indices and the others wait, so
    every rank must call.
    """
    runtime = get_runtime()
    if runtime.config.data.sft:
        seed = runtime.config.training.seed
        return build_sft_datasets(runtime.config.data, get_tokenizer(), num_samples, seed, **runtime.building)
    return build_gpt_datasets(
        runtime.config.data,
        get_tokenizer(),
        num_samples,
        runtime.config.training.seed,
        fim=runtime.config.fim,
        **runtime.building,
    )


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (sum of the losses of unmasked tokens, number of unmasked tokens, values to log).

    loss_mask, losses: [b, s], this rank's tokens of one microbatch. The training step divides the sum over all
    microbatches and data-parallel ranks by the number of tokens.
    """
    loss_mask = loss_mask.to(losses.dtype)
    loss_sum = (losses * loss_mask).sum()  # []
    num_tokens = loss_mask.sum()  # []
    return loss_sum, num_tokens, lm_loss_and_objective(losses, loss_mask, loss_sum, num_tokens)


def forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Tensor, Any]:
    """Run one microbatch through this pipeline stage; return its output and the loss function to apply to it.

    The output is losses [b, s] on the last stage, hidden states [s, b, h] on the others.
    """
    # A middle stage receives hidden states and needs no batch, with two exceptions: attention within documents needs the
    # document of each token, and --reset-position-ids the positions from which rotary angles restart.
    config = get_runtime().config
    is_end_stage = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    needs_batch = is_end_stage or config.data.masks_documents or config.restarts_angles
    if not needs_batch:
        return model(None, None), None

    with get_timers()("batch-generator", log_level=2):
        batch = get_batch_on_this_tp_rank(
            data_iterator
        )  # read on the first tensor-parallel rank, broadcast to the others
        batch = get_batch_on_this_cp_rank(batch)  # [b, s] -> this context-parallel rank's tokens
        tokens, labels, loss_mask, documents, position_ids = batch.values()

    output = model(tokens, position_ids, documents, labels=labels)
    return output, partial(loss_func, loss_mask)


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults=DEFAULTS,
        rules=GPTModel.rules,
    )
