"""A small T5 trained inside `run_ranks`, as tests/support/tiny_run.py trains a GPT."""

from dataclasses import replace
from functools import partial

import torch
from tiny_run import SEQ, Subject, Texts
from torch import Tensor

from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.transformer.model_config import ModelConfig

DECODER = 4  # tokens
PLAIN = ModelConfig(
    num_layers=4,
    decoder_num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    kv_channels=6,
    ffn_hidden_size=24,
    make_vocab_size_divisible_by=8,
    fp64=True,
    position_embedding_type="relative",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=6,
    normalization="RMSNorm",
    add_bias_linear=False,
    activation="relu",
    softmax_scale=1.0,
    init_method_std=0.1,
)
CONFIGS = {
    "t5": PLAIN,
    "gated": replace(
        PLAIN,
        gated=True,
        activation="gelu-tanh",
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "learned": replace(
        PLAIN,
        position_embedding_type="learned_absolute",
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        add_bias_linear=True,
        normalization="LayerNorm",
        num_layers=6,
        decoder_num_layers=2,
    ),
}


def sample(number: int, texts: Texts) -> dict[str, Tensor]:
    """A text with padding, and a shorter one to be said, with padding too."""
    generator = torch.Generator().manual_seed(3000 + number)
    length, asked = (int(torch.randint(n // 2, n + 1, (), generator=generator)) for n in (SEQ, DECODER))
    said = torch.randint(0, texts.vocab, (DECODER + 1,), generator=generator)
    return {
        "text": torch.randint(0, texts.vocab, (SEQ,), generator=generator),
        "seen": (torch.arange(SEQ) < length).long(),
        "decoder": said[:-1],
        "labels": torch.where(torch.arange(DECODER) < asked, said[1:], -1),
    }


def loss_func(labels: Tensor, losses: Tensor):
    mask = (labels >= 0).to(losses.dtype)
    total, count = (losses * mask).sum(), mask.sum()
    return total, count, {"lm loss": torch.stack((total.detach().double(), count))}


def forward_step(data, model):
    batch = next(data)
    output = model(batch["text"], batch["decoder"], batch["seen"], batch["labels"])
    return output, partial(loss_func, batch["labels"])


T5 = Subject(
    lambda config, **parts: T5Model(config, positions=SEQ, decoder_seq_length=DECODER, **parts),
    forward_step,
    sample,
    ("seen",),
)
