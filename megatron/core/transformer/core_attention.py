"""softmax(Q K^T / sqrt(d)) V: the part of attention without parameters, and the kernels that compute it.

The plain kernel is the reference; a faster one is used where it can do the work. To add one, add a row to `_KERNELS`.
"""

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.core.products import Way
from megatron.core.random import AttentionDropout


class Documents:
    """In place of a mask: samples made of several documents, which do not see each other.

        tokens      a b c | d e | f g h         numbers     0 0 0 1 1 2 2 2

    A kernel that takes documents one by one never holds an s x s mask; one that cannot asks for `mask`.
    """

    def __init__(self, numbers: Tensor):
        """numbers: [b, s], which document of its sample each token belongs to; they never fall."""
        self.numbers = numbers

    @cached_property
    def lengths(self) -> list[list[int]]:
        """Tokens of each document of each sample. The first call waits for the device, once."""
        return [row.unique_consecutive(return_counts=True)[1].tolist() for row in self.numbers.cpu()]

    @cached_property
    def mask(self) -> Tensor:
        """[b, 1, s, s], True where a query may not look: at what comes later, and at other documents."""
        other = self.numbers[:, :, None] != self.numbers[:, None, :]
        return (other | torch.ones_like(other[0]).triu(1))[:, None]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: AttentionDropout) -> Tensor:
    """The reference. q: [b, n, s, d]; k, v: [b, groups, s, d]; mask: [.., s, s], True where a query may not look, None for
    causal -> [b, n, s, d]. The softmax is taken in float32 or better."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    q = q / math.sqrt(q.shape[-1])  # before the product, which would overflow float16
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    if mask is None:
        queries, keys = scores.shape[-2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1 + keys - queries)
    probabilities = scores.masked_fill(mask, float("-inf")).softmax(dim=-1)
    return dropout(probabilities).to(q.dtype) @ v


def repeats_groups(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Whether key/value heads are shared by query heads and the kernel of this device must not know."""
    flash = mask is None and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= _WIDEST_FLASH
    return q.shape[1] != k.shape[1] and q.device.type != "cpu" and not flash


_WIDEST_FLASH = 256  # of a head


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: AttentionDropout) -> Tensor:
    """torch's scaled_dot_product_attention; it never holds the s x s scores. Cannot do our dropout.

    Of its kernels on an accelerator only flash attention takes fewer key/value heads than query heads. Where that cannot run, they are
    repeated: torch would silently take the kernel that holds the scores (PyTorch pull request 191085).
    """
    if repeats_groups(q, k, mask):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    grouped = q.shape[1] != k.shape[1]
    allowed = None if mask is None else ~mask
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, is_causal=mask is None and q.shape[2] > 1, enable_gqa=grouped
    )


def attention_by_document(q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout: AttentionDropout) -> Tensor:
    """The fused kernel on every document alone: less work than on the whole sample, and no mask."""
    rows = []
    for row, lengths in enumerate(documents.lengths):
        parts = zip(*(x[row : row + 1].split(lengths, dim=2) for x in (q, k, v)))
        rows.append(torch.cat([fused_attention(*part, None, dropout) for part in parts], dim=2))
    return torch.cat(rows)


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionDropout], Tensor]
_KERNELS: dict[str, Kernel] = {"fused": fused_attention, "unfused": plain_attention}


_PLAIN = ("unfused", "local")  # --attention-backend; the other names ask for the fused kernel


class CoreAttention(nn.Module):
    """forward(q [s, b, n, d], k, v [s, b, groups, d], mask) -> [s, b, n * d], causal when the mask is None.

    mask: as the kernels take it, or `Documents`. way: "widened" takes all of it in float32, and rounds what comes out.
    """

    def __init__(self, backend: str, dropout: AttentionDropout, way: Way = "native"):
        super().__init__()
        self.backend, self.dropout, self.way = backend, dropout, way

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Documents | None = None) -> Tensor:
        drops, dtype = self.training and self.dropout.probability > 0, q.dtype
        name = "unfused" if drops or self.backend in _PLAIN else "fused"
        if self.way == "widened":
            q, k, v = q.float(), k.float(), v.float()
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n, s, d]
        if isinstance(mask, Documents) and name == "fused":
            out = attention_by_document(q, k, v, mask, self.dropout)
        else:
            out = _KERNELS[name](q, k, v, mask.mask if isinstance(mask, Documents) else mask, self.dropout)
        return out.permute(2, 0, 1, 3).flatten(2).to(dtype)  # [s, b, n * d]
