"""Fine-tune GPT on conversations, or on prompts with answers: --sft over the shared loop, all weights or LoRA adapters.

python finetune_gpt.py --pretrained-checkpoint FOLDER --data-path chats.jsonl --seq-length 2048 --train-iters 100 --save-hf OUT ...

FOLDER is a published model's as it is, or a checkpoint. With --lora-rank N only adapters are trained and saved.
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

from argparse import ArgumentParser

from megatron.core.base.dataclass_flags import add_flags, build
from megatron.core.peft.lora_config import LoRAConfig
from megatron.training.arguments.parser import answer_help

# Without flags: a run that fine-tunes. The learning rate has no default here either: 1e-5 suits all weights, 1e-4 adapters.
DEFAULTS = {"sft": True, "eval_iters": 0, "use_checkpoint_args": True, "micro_batch_size": 1}


def add_own_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags of adapters."""
    add_flags(parser, LoRAConfig)
    return parser


if __name__ == "__main__":
    answer_help(DEFAULTS, extra_args_provider=add_own_flags)

from torch import nn

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.peft.lora import add_lora
from megatron.training import get_args, pretrain

train_valid_test_datasets_provider = pretrain_gpt.train_valid_test_datasets_provider
forward_step = pretrain_gpt.forward_step


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """Build this pipeline stage's part of the model, as pretrain_gpt.py does, with its adapters if --lora-rank is given."""
    model = pretrain_gpt.model_provider(pre_process, post_process, vp_stage)
    lora = build(LoRAConfig, vars(get_args()))
    if lora.is_on:
        add_lora(model, lora)
    return model


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_own_flags,
        args_defaults=DEFAULTS,
        rules=GPTModel.rules,
    )
