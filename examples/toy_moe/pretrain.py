"""pretrain_gpt.py with a toy mixture of experts in every layer, distributed over expert and tensor-parallel ranks.

    torchrun --nproc-per-node 4 examples/toy_moe/pretrain.py --expert-model-parallel-size 2 --tensor-model-parallel-size 2 \\
        --zero-stage 3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 2 --hidden-size 32 \\
        --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 20 --lr 1e-3
"""

import sys
from argparse import ArgumentParser
from dataclasses import fields, replace
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experts import ToyMoEConfig, ToyMoEModel, spec_of

import pretrain_gpt
from megatron.core.base.dataclass_flags import add_flags, build
from megatron.core.enums import ModelType
from megatron.training import get_args, get_runtime, pretrain


def add_own_flags(parser: ArgumentParser) -> ArgumentParser:
    add_flags(parser, ToyMoEConfig)
    return parser


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    runtime, given = get_runtime(), vars(get_args())  # flags that were left out are missing
    own = build(ToyMoEConfig, {f.name: given[f.name] for f in fields(ToyMoEConfig) if f.name in given})
    config, parts = runtime.config.transformer, runtime.model_parts(pre_process, post_process, vp_stage)
    parts["context"].aux_losses.declare("load balance")
    return ToyMoEModel(config, **parts, spec=spec_of(config, own))


RULES = replace(pretrain_gpt.GPTModel.rules, has_experts=True)

if __name__ == "__main__":
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        extra_args_provider=add_own_flags,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        rules=RULES,
    )
