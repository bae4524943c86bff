"""pretrain_gpt.py with 8-bit factors in every matrix product of the linear layers and the output layer.

torchrun --nproc-per-node 2 examples/fake_fp8/pretrain.py --tensor-model-parallel-size 2 ... --save DIR
"""

import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fake_fp8 import FakeFp8GPTModel

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import get_runtime, pretrain


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    runtime = get_runtime()
    parts = runtime.model_parts(pre_process, post_process, vp_stage)
    return FakeFp8GPTModel(runtime.config.transformer, **parts)


if __name__ == "__main__":
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        rules=FakeFp8GPTModel.rules,
    )
