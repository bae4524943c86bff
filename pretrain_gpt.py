"""Pretrain GPT: the model, data and loss for the shared training loop.

torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core import mpu
from megatron.core.datasets.gpt_samples import build_gpt_datasets
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.training import get_runtime, get_timers, get_tokenizer, pretrain
from megatron.training.batch_utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank, loss_report


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """This pipeline stage's part of the model."""
    runtime = get_runtime()
    return GPTModel(runtime.config.transformer, **runtime.model_parts(pre_process, post_process, vp_stage))


def train_valid_test_datasets_provider(num_samples: list[int]) -> tuple[Any, Any, Any]:
    """The data sets. The first rank builds their indices; the others wait. Every rank must call."""
    runtime = get_runtime()
    return build_gpt_datasets(
        runtime.config.data,
        get_tokenizer(),
        num_samples,
        runtime.config.training.seed,
        fim=runtime.config.fim,
        **runtime.building,
    )


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of losses over unmasked tokens, number of unmasked tokens, report). Both inputs are [b, s]."""
    loss_mask = loss_mask.to(losses.dtype)
    loss_sum, num_tokens = (losses * loss_mask).sum(), loss_mask.sum()
    return loss_sum, num_tokens, loss_report(losses, loss_mask, loss_sum, num_tokens)


def forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Tensor, Any]:
    """One microbatch through this stage. Middle stages need no batch, unless --reset-attention-mask needs its documents, or
    --reset-position-ids its positions, from which rotary angles restart."""
    is_end = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    config = get_runtime().config
    if not is_end and not (config.data.reset_attention_mask or config.restarts_angles):
        return model(None, None), None
    with get_timers()("batch-generator", log_level=2):
        batch = get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator))
        tokens, labels, loss_mask, documents, position_ids = batch.values()
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
