"""The same models in plain PyTorch, as one writes them without a framework: the peer of every work.

GPT-2 with norms before the blocks and a tied embedding; Llama with RMSNorm, rotary positions, SwiGLU and shared
key/value heads; BERT with norms before the blocks, as Megatron trains it. Activations are [b, s, h], attention is
torch's fused kernel.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.benchmarking.work import Work

EPSILON = 1e-5


def make_norm(work: Work) -> nn.Module:
    norm = nn.RMSNorm if work.family == "llama" else nn.LayerNorm
    return norm(work.hidden_size, eps=EPSILON)


def rotation(work: Work) -> Tensor:
    """Return cos and sin of every position and feature, [2, s, d]."""
    d = work.hidden_size // work.num_attention_heads
    angles = torch.arange(work.seq_length)[:, None] * (1 / 10000.0 ** (torch.arange(0, d, 2) / d))
    return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2)


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x [b, n, s, d] by position, in pairs of features i and i + d / 2 (arXiv:2104.09864).

    cos_sin: [2, s, d], of `rotation` -> [b, n, s, d]
    """
    cos, sin = cos_sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Self-attention. fused: queries, keys and values are one matrix; tensor parallelism by DTensor needs three."""

    def __init__(self, work: Work, fused: bool):
        super().__init__()
        h = work.hidden_size
        bias = work.family != "llama"
        self.width = h // work.num_attention_heads  # d
        self.dropout = work.attention_dropout
        kv_width = self.width * work.kv_heads
        self.sizes = [h, kv_width, kv_width]
        parts = [sum(self.sizes)] if fused else self.sizes
        self.qkv = nn.ModuleList(nn.Linear(h, part, bias=bias) for part in parts)
        self.out = nn.Linear(h, h, bias=bias)
        self.causal = work.family != "bert"
        self.heads_per_group = work.num_attention_heads // work.kv_heads

    def forward(self, x: Tensor, mask: Tensor | None, cos_sin: Tensor | None) -> Tensor:
        """x: [b, s, h] -> [b, s, h].

        mask: bool [b, 1, 1, s], True where a key is seen, or None; cos_sin: [2, s, d] or None.
        """
        b, s = x.shape[:2]
        if len(self.qkv) == 1:
            q, k, v = self.qkv[0](x).split(self.sizes, dim=-1)
        else:
            q, k, v = (linear(x) for linear in self.qkv)
        q = q.view(b, s, -1, self.width).transpose(1, 2)  # [b, n, s, d]
        k = k.view(b, s, -1, self.width).transpose(1, 2)  # [b, groups, s, d]
        v = v.view(b, s, -1, self.width).transpose(1, 2)  # [b, groups, s, d]
        if cos_sin is not None:
            q = rotated(q, cos_sin)
            k = rotated(k, cos_sin)
        if self.heads_per_group > 1:
            k = k.repeat_interleave(self.heads_per_group, dim=1)  # [b, n, s, d]
            v = v.repeat_interleave(self.heads_per_group, dim=1)  # [b, n, s, d]
        dropout = self.dropout if self.training else 0.0
        out = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=self.causal)
        return self.out(out.transpose(1, 2).reshape(b, s, -1))  # [b, s, h]


class MLP(nn.Module):
    """W2 gelu(W1 x), or W2 (silu(Wg x) * (Wu x)). fused: Wg and Wu are one matrix."""

    def __init__(self, work: Work, fused: bool):
        super().__init__()
        h = work.hidden_size
        f = work.shape.ffn_size
        self.gated = work.shape.gated
        bias = work.family != "llama"
        parts = [f]
        if self.gated:
            parts = [2 * f] if fused else [f, f]
        self.up = nn.ModuleList(nn.Linear(h, part, bias=bias) for part in parts)
        self.down = nn.Linear(f, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, h] -> [b, s, h]"""
        if not self.gated:
            return self.down(functional.gelu(self.up[0](x), approximate="tanh"))
        if len(self.up) == 1:
            gate, up = self.up[0](x).chunk(2, dim=-1)
        else:
            gate, up = (linear(x) for linear in self.up)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """One transformer layer with norms before attention and MLP."""

    def __init__(self, work: Work, fused: bool):
        super().__init__()
        self.attention_norm = make_norm(work)
        self.mlp_norm = make_norm(work)
        self.attention = Attention(work, fused)
        self.mlp = MLP(work, fused)
        self.dropout = nn.Dropout(work.hidden_dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, cos_sin: Tensor | None = None) -> Tensor:
        """x: [b, s, h]; mask, cos_sin: as of `Attention.forward` -> [b, s, h]"""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, cos_sin))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class BertHeads(nn.Module):
    """A BERT's transform before the output layer, the bias of its logits, and the logits of the sentence order.

    forward(x [b, s, h]) -> (input of the output layer [b, s, h], sentence-order logits [b, 2])
    """

    def __init__(self, work: Work):
        super().__init__()
        h = work.hidden_size
        self.transform = nn.Linear(h, h)
        self.norm = make_norm(work)
        self.word_bias = nn.Parameter(torch.zeros(work.padded_vocab_size))
        self.pooler = nn.Linear(h, h)
        self.order = nn.Linear(h, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [b, s, h] -> (input of the output layer [b, s, h], sentence-order logits [b, 2])"""
        transformed = self.norm(functional.gelu(self.transform(x), approximate="tanh"))  # [b, s, h]
        first_token = x[:, 0]  # [b, h]
        return transformed, self.order(torch.tanh(self.pooler(first_token)))


class PlainModel(nn.Module):
    """A model, or the pipeline stage with `layers` of it.

    forward(tokens [b, s], or hidden states [b, s, h] of the previous stage; types [b, s], mask) -> logits [b, s, v], or
    hidden states [b, s, h] if another stage follows, or a BERT's pair of logits.
    """

    def __init__(self, work: Work, *, fused: bool = True, layers: Iterable[int] | None = None):
        super().__init__()
        layers = range(work.num_layers) if layers is None else layers
        h = work.hidden_size
        v = work.padded_vocab_size
        self.is_first = 0 in layers
        self.is_last = work.num_layers - 1 in layers
        if self.is_first:
            self.words = nn.Embedding(v, h)
            self.dropout = nn.Dropout(work.hidden_dropout)
            self.positions = None if work.family == "llama" else nn.Embedding(work.seq_length, h)
            self.types = nn.Embedding(2, h) if work.family == "bert" else None
        self.blocks = nn.ModuleDict({str(i): Block(work, fused) for i in layers})
        if self.is_last:
            self.norm = make_norm(work)
            self.scores = nn.Linear(h, v, bias=False)
            self.heads = BertHeads(work) if work.family == "bert" else None
        self.tied = work.family != "llama"
        self.tie()
        self.register_buffer("cos_sin", rotation(work) if work.family == "llama" else None, persistent=False)

    def tie(self) -> None:
        """Share the embedding weight with the output layer if this stage has both."""
        if self.tied and self.is_first and self.is_last:
            self.scores.weight = self.words.weight

    def forward(self, x: Tensor, types: Tensor | None = None, mask: Tensor | None = None) -> Tensor | tuple:
        """See the class. types: [b, s]; mask: bool [b, 1, 1, s], True where a key is seen."""
        if self.is_first:
            x = self.words(x)  # [b, s] -> [b, s, h]
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
            return self.scores(x)  # [b, s, v]
        transformed, order = self.heads(x)
        return functional.linear(transformed, self.scores.weight, self.heads.word_bias), order
