"""One of two processes of DeepSpeed: a Llama in plain torch under Hugging Face's names, two steps, a checkpoint, its scores.

    RANK=r WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python deepspeed_writer.py OUT STAGE

Beside OUT: OUT.config.json, OUT.npy (scores of `IDS`, float32). DeepSpeed reads the ranks' variables.
"""

import json
import sys
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, HEADS, GROUPS, WIDTH, FFN, LAYERS, WORDS = 24, 6, 2, 4, 40, 2, 31
IDS = torch.arange(8)[None] * 3 % WORDS
CONFIG = {
    **{"model_type": "llama", "vocab_size": WORDS, "hidden_size": HIDDEN, "intermediate_size": FFN},
    **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": WIDTH},
    **{"max_position_embeddings": 32, "rms_norm_eps": 1e-6},
}


def rotated(x: Tensor) -> Tensor:
    """x: [b, n, s, d], pairs (i, i + d / 2)."""
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)  # [s, d / 2]
    u, v = x.chunk(2, -1)
    return torch.cat([u * angles.cos() - v * angles.sin(), v * angles.cos() + u * angles.sin()], -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = {"q": HEADS, "k": GROUPS, "v": GROUPS}
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, n * WIDTH, bias=False) for n in rows.values())
        self.o_proj = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        split = lambda y: y.unflatten(-1, (-1, WIDTH)).transpose(1, 2)  # noqa: E731  # [b, n, s, d]
        q, k, v = (split(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (y.repeat_interleave(HEADS // GROUPS, dim=1) for y in (rotated(k), v))
        return self.o_proj(F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), MLP()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(WORDS, HIDDEN)
        self.model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.model.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def main(out: str, stage: int) -> None:
    torch.manual_seed(0)
    model = Llama()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        ids = torch.randint(0, WORDS, (2, 9), generator=draw)
        engine.backward(F.cross_entropy(engine(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))
        engine.step()
    engine.save_checkpoint(out, tag="global_step2")
    scores = engine(IDS).detach()
    if dist.get_rank() == 0:
        np.save(f"{out}.npy", scores.numpy())
        Path(f"{out}.config.json").write_text(json.dumps(CONFIG))
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
