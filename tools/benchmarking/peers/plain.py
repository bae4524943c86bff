"""The same models in plain PyTorch, as one writes them without a framework: the peer of every work.

GPT-2 with norms before the blocks and a tied table; Llama with RMSNorm, rotary positions, SwiGLU and shared key/value heads;
BERT with norms before the blocks, as Megatron trains it. Activations are [b, s, h], attention is torch's fused kernel.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.benchmarking.work import Work

EPSILON = 1e-5


def make_norm(work: Work) -> nn.Module:
    return (nn.RMSNorm if work.family == "llama" else nn.LayerNorm)(work.hidden_size, eps=EPSILON)


def rotation(work: Work) -> Tensor:
    """cos and sin of every position and feature, [2, s, d]."""
    d = work.hidden_size // work.num_attention_heads
    angles = torch.arange(work.seq_length)[:, None] * (1 / 10000.0 ** (torch.arange(0, d, 2) / d))
    return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2)


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [b, n, s, d], feature i paired with i + d / 2."""
    cos, sin = cos_sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """fused: queries, keys and values by one product; tensor parallelism by DTensor needs three."""

    def __init__(self, work: Work, fused: bool):
        super().__init__()
        h, bias = work.hidden_size, work.family != "llama"
        self.width, self.dropout = h // work.num_attention_heads, work.attention_dropout
        keys = self.width * work.kv_heads
        self.sizes = [h, keys, keys]
        parts = [sum(self.sizes)] if fused else self.sizes
        self.qkv = nn.ModuleList(nn.Linear(h, part, bias=bias) for part in parts)
        self.out = nn.Linear(h, h, bias=bias)
        self.causal, self.shared = work.family != "bert", work.num_attention_heads // work.kv_heads

    def forward(self, x: Tensor, mask: Tensor | None, cos_sin: Tensor | None) -> Tensor:
        b, s = x.shape[:2]
        parts = self.qkv[0](x).split(self.sizes, dim=-1) if len(self.qkv) == 1 else [part(x) for part in self.qkv]
        q, *kv = (part.view(b, s, -1, self.width).transpose(1, 2) for part in parts)  # [b, n, s, d]
        if cos_sin is not None:
            q, kv[0] = rotated(q, cos_sin), rotated(kv[0], cos_sin)
        if self.shared > 1:
            kv = [part.repeat_interleave(self.shared, dim=1) for part in kv]
        dropout = self.dropout if self.training else 0.0
        out = functional.scaled_dot_product_attention(q, *kv, mask, dropout, is_causal=self.causal)
        return self.out(out.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    """W2 gelu(W1 x), or W2 (silu(Wg x) * (Wu x)), with Wg and Wu in one product if `fused`."""

    def __init__(self, work: Work, fused: bool):
        super().__init__()
        h, f = work.hidden_size, work.shape.ffn_size
        self.gated, bias = work.shape.gated, work.family != "llama"
        parts = ([2 * f] if fused else [f, f]) if self.gated else [f]
        self.up = nn.ModuleList(nn.Linear(h, part, bias=bias) for part in parts)
        self.down = nn.Linear(f, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(functional.gelu(self.up[0](x), approximate="tanh"))
        gate, up = self.up[0](x).chunk(2, dim=-1) if len(self.up) == 1 else [part(x) for part in self.up]
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, work: Work, fused: bool):
        super().__init__()
        self.attention_norm, self.mlp_norm = make_norm(work), make_norm(work)
        self.attention, self.mlp = Attention(work, fused), MLP(work, fused)
        self.dropout = nn.Dropout(work.hidden_dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, cos_sin: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, cos_sin))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class BertHeads(nn.Module):
    """The transform before the output layer with a bias a word, and the two scores of the order of sentences."""

    def __init__(self, work: Work):
        super().__init__()
        h = work.hidden_size
        self.transform, self.norm = nn.Linear(h, h), make_norm(work)
        self.word_bias = nn.Parameter(torch.zeros(work.padded_vocab_size))
        self.pooler, self.order = nn.Linear(h, h), nn.Linear(h, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        words = self.norm(functional.gelu(self.transform(x), approximate="tanh"))
        return words, self.order(torch.tanh(self.pooler(x[:, 0])))


class PlainModel(nn.Module):
    """A model, or the pipeline stage with `layers` of it. forward(words [b, s], or hidden states [b, s, h] of the stage before;
    types, mask) -> scores [b, s, v], hidden states if another stage follows, or a BERT's pair of scores."""

    def __init__(self, work: Work, *, fused: bool = True, layers: Iterable[int] | None = None):
        super().__init__()
        layers = range(work.num_layers) if layers is None else layers
        h, rows = work.hidden_size, work.padded_vocab_size
        self.is_first, self.is_last = 0 in layers, work.num_layers - 1 in layers
        if self.is_first:
            self.words, self.dropout = nn.Embedding(rows, h), nn.Dropout(work.hidden_dropout)
            self.positions = None if work.family == "llama" else nn.Embedding(work.seq_length, h)
            self.types = nn.Embedding(2, h) if work.family == "bert" else None
        self.blocks = nn.ModuleDict({str(i): Block(work, fused) for i in layers})
        if self.is_last:
            self.norm, self.scores = make_norm(work), nn.Linear(h, rows, bias=False)
            self.heads = BertHeads(work) if work.family == "bert" else None
        self.tied = work.family != "llama"
        self.tie()
        self.register_buffer("cos_sin", rotation(work) if work.family == "llama" else None, persistent=False)

    def tie(self) -> None:
        """One table for words and scores, where this stage has both."""
        if self.tied and self.is_first and self.is_last:
            self.scores.weight = self.words.weight

    def forward(self, x: Tensor, types: Tensor | None = None, mask: Tensor | None = None) -> Tensor | tuple:
        if self.is_first:
            x = self.words(x)
            if self.positions is not None:
                x = x + self.positions.weight
            if self.types is not None:
                x = x + self.types(types)
            x = self.dropout(x)
        for block in self.blocks.values():
            x = block(x, mask, self.cos_sin)
        if not self.is_last:
            return x
        x = self.norm(x)
        if self.heads is None:
            return self.scores(x)
        words, order = self.heads(x)
        return functional.linear(words, self.scores.weight, self.heads.word_bias), order
