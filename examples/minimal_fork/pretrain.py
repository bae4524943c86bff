"""A fork in one folder: its own layer, loss, schedule, data and flags, on an unchanged megatron.

    torchrun --nproc-per-node 2 examples/minimal_fork/pretrain.py --pipeline-model-parallel-size 2 \\
        --pipeline-schedule rounds --branch-scale 0.7 --phrase-length 8 --seq-length 64 --num-layers 2 --hidden-size 64 \\
        --num-attention-heads 4 --micro-batch-size 4 --global-batch-size 16 --train-iters 50 --lr 3e-3 --log-interval 10
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from data import WORDS, PhraseConfig, Phrases
from model import SideBySideConfig, SideBySideLayer, SideBySideModel
from schedule import rounds
from torch import Tensor, nn

from megatron.core import mpu
from megatron.core.base.dataclass_flags import add_flags, build
from megatron.core.enums import ModelType
from megatron.core.optimizer.param_groups import ParamGroup, default_group
from megatron.core.pipeline_parallel import SCHEDULES
from megatron.core.sharding.placement import Placement
from megatron.core.tensor_parallel.broadcast_batch_over_tp import broadcast_batch
from megatron.training import get_args, get_runtime, pretrain
from megatron.training.batch_utils import get_batch_on_this_cp_rank

SCHEDULES["rounds"] = rounds


def add_own_flags(parser: ArgumentParser) -> None:
    for config_class in (SideBySideConfig, PhraseConfig):
        add_flags(parser, config_class)


def own(config_class: type) -> Any:
    """A config of this fork, from the command line."""
    return build(config_class, vars(get_args()))


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """This pipeline stage's part of the model, with the fork's layers."""
    config, parts = get_runtime().config.transformer, get_runtime().model_parts(pre_process, post_process, vp_stage)
    make_layer = partial(SideBySideLayer, own=own(SideBySideConfig))
    return SideBySideModel(config, **parts, make_layer=make_layer)


def datasets_provider(num_samples: list[int]) -> tuple[Phrases, ...]:
    config, words, phrases = get_runtime().config, get_runtime().vocab_size, own(PhraseConfig)
    return tuple(
        Phrases(phrases, size, config.data.seq_length, words, (config.training.seed, split))
        for split, size in enumerate(num_samples)
    )


def group_of(name: str, placement: Placement) -> ParamGroup:
    """The default groups, but the restart head has twice the learning rate."""
    group = default_group(name, placement)
    return replace(group, lr_multiplier=2.0) if name == "restart_head" else group


def loss_func(weight: float, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of both losses over tokens, number of tokens, report). output: word and restart losses, [b, s] each."""
    words, restarts = (losses.sum() for losses in output)
    count = torch.tensor(output[0].numel(), dtype=words.dtype, device=words.device)
    report = {"lm loss": words, "restart loss": restarts}
    return words + weight * restarts, count, {name: torch.stack((x.detach(), count)) for name, x in report.items()}


def forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Tensor, Any]:
    """One microbatch through this stage."""
    if not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return model(None, None), None
    runtime = get_runtime()
    shape = (runtime.config.training.micro_batch_size, runtime.config.data.seq_length)
    where = (shape, runtime.mesh["tp"], runtime.device.torch_device)
    data = next(data_iterator) if data_iterator is not None else None
    names = ["tokens", "labels", "restarts"]
    batch = dict(zip(names, broadcast_batch(names, data, torch.int64, *where)))
    batch["positions"] = torch.arange(shape[1], device=batch["tokens"].device).expand(shape)
    batch = get_batch_on_this_cp_rank(batch)  # [b, s] -> this context-parallel rank's tokens of each sample
    output = model(batch["tokens"], batch["positions"], labels=batch["labels"], restarts=batch["restarts"])
    return output, partial(loss_func, own(SideBySideConfig).restart_weight)


if __name__ == "__main__":
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_own_flags,
        args_defaults={"vocab_size": WORDS},
        group_of=group_of,
    )
