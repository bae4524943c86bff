"""A research fork's script, as one is written against Megatron: own model, batch, loss, data sets and flags, around `pretrain`.

Prints `rank R read N samples` on every rank at the end. tests/processes/test_scripts.py runs it, over TP 2 x PP 2 and in one process.
"""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from megatron.core import mpu, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.common.vocab_parallel_lm_head import LanguageModelHead
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.tensor_parallel.layers import tensor_parallel_of
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.utils import init_method_normal
from megatron.training import get_args, get_runtime, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import average_losses_across_data_parallel_group, get_ltor_masks_and_position_ids


class Mixer(nn.Module):
    """What the fork is about: x + W2 relu(W1 norm(mean of the tokens so far))^2."""

    def __init__(self, config, power: int):
        super().__init__()
        init, self.power = init_method_normal(config.init_method_std), power
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.up = tensor_parallel.ColumnParallelLinear(
            config.hidden_size,
            config.ffn_hidden_size,
            config=config,
            init_method=init,
            gather_output=False,
            skip_bias_add=True,
        )
        self.down = tensor_parallel.RowParallelLinear(
            config.ffn_hidden_size,
            config.hidden_size,
            config=config,
            init_method=init,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def forward(self, x, counts):
        y, bias = self.up(self.norm(x.cumsum(dim=0) / counts))
        y, bias = self.down(torch.relu(y + bias) ** self.power)
        return x + y + bias


class MixerModel(nn.Module):
    """One pipeline stage: embedding on the first, output layer and loss on the last."""

    def __init__(self, config, args, pre_process: bool, post_process: bool):
        super().__init__()
        self.config, self.pre_process, self.post_process = config, pre_process, post_process
        if pre_process:
            self.embedding = tensor_parallel.VocabParallelEmbedding(
                args.padded_vocab_size, config.hidden_size, config=config, init_method=config.init_method
            )
        ranks, rank = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
        per_stage = config.num_layers // ranks
        layers = range(rank * per_stage, (rank + 1) * per_stage)
        self.layers = nn.ModuleDict({str(i): Mixer(config, args.activation_power) for i in layers})
        if post_process:
            context = LayerContext(tensor_parallel_of(config), SampleDropoutKeys(args.seed))
            self.head = LanguageModelHead(get_runtime().config.transformer, args.padded_vocab_size, context)
        self.input_tensor = None

    def set_input_tensor(self, input_tensor):
        self.input_tensor = input_tensor

    def forward(self, tokens, position_ids, labels):
        x = self.embedding(tokens.t()) if self.pre_process else self.input_tensor  # [s, b, h]
        counts = position_ids.t().unsqueeze(-1) + 1
        for layer in self.layers.values():
            x = layer(x, counts)
        if not self.post_process:
            return x
        return tensor_parallel.vocab_parallel_cross_entropy(self.head(x), labels.t().contiguous()).t()


def model_provider(pre_process=True, post_process=True):
    print_rank_0("building a mixer ...")
    args = get_args()
    return MixerModel(core_transformer_config_from_args(args), args, pre_process, post_process)


def get_batch(data_iterator):
    """As in Megatron 2 and 3: every stage reads, on its first tensor-parallel rank, and sends to the others."""
    data = next(data_iterator) if data_iterator is not None else None
    text = tensor_parallel.broadcast_data(["text"], data, torch.int64)["text"].long()
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    _, loss_mask, position_ids = get_ltor_masks_and_position_ids(tokens, get_tokenizer().eod, False, False, False)
    return tokens, labels, loss_mask, position_ids


def loss_func(loss_mask, output_tensor):
    losses, loss_mask = output_tensor.float().reshape(-1), loss_mask.reshape(-1)
    loss = torch.sum(losses * loss_mask) / loss_mask.sum()
    return loss, {"lm loss": average_losses_across_data_parallel_group([loss])[0]}


def forward_step(data_iterator, model):
    tokens, labels, loss_mask, position_ids = get_batch(data_iterator)
    return model(tokens, position_ids, labels), partial(loss_func, loss_mask)


class Progressions:
    """Sample i counts up by 1 + i mod 7, modulo the vocabulary. Counts what is read of it."""

    reads = 0

    def __init__(self, size: int, seq_length: int, vocab_size: int):
        self.size, self.seq_length, self.vocab_size = size, seq_length, vocab_size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        Progressions.reads += 1
        return {"text": (i + (1 + i % 7) * np.arange(self.seq_length + 1, dtype=np.int64)) % self.vocab_size}


def train_valid_test_datasets_provider(train_val_test_num_samples):
    args = get_args()
    return tuple(Progressions(n, args.seq_length, args.vocab_size) for n in train_val_test_num_samples)


def add_mixer_args(parser):
    group = parser.add_argument_group(title="mixer")
    group.add_argument("--activation-power", type=int, default=None, help="power of the rectified activation")
    return parser


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_mixer_args,
        args_defaults={"tokenizer_type": "NullTokenizer", "activation_power": 2},
    )
    print(f"rank {rank} read {Progressions.reads} samples", flush=True)
