"""pretrain_gpt.py with low-rank adapters on every linear; everything else keeps the values of --pretrained-checkpoint.

    torchrun --nproc-per-node 2 examples/lora/pretrain.py --lora-rank 8 --tensor-model-parallel-size 2 \\
        --pretrained-checkpoint DIR --allow-missing-tensors --use-checkpoint-args ... --save ADAPTED
"""

import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lora import add_lora

import pretrain_gpt
from megatron.core.base.dataclass_flags import add_flags, build, option
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain


@dataclass(frozen=True)
class LoRAConfig:
    """low-rank adapters"""

    lora_rank: int = option(8, "rank of each adapter", of_model=True)
    lora_alpha: float = option(16.0, "adapters are multiplied by alpha / rank", of_model=True)


def add_own_flags(parser: ArgumentParser) -> ArgumentParser:
    add_flags(parser, LoRAConfig)
    return parser


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    model = pretrain_gpt.model_provider(pre_process, post_process, vp_stage)
    config = build(LoRAConfig, vars(get_args()))
    add_lora(model, config.lora_rank, config.lora_alpha)
    return model


if __name__ == "__main__":
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        extra_args_provider=add_own_flags,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        rules=pretrain_gpt.GPTModel.rules,
    )
