"""Attention kernels, softmax(Q K^T / sqrt(d)) V, and the table behind `--attention-backend`.

A script adds a kernel, which becomes a value of the flag:

    KERNELS["window"] = Kernel(window_attention, computes="softmax over the last 3 keys")

It says what it computes: a run refuses a checkpoint that was trained by a kernel of another function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.registry import Table
from megatron.core.ops.attention.masks import Documents, Mask, Window, hidden_keys, windowed
from megatron.core.ops.attention.sliding_window import attention_in_band
from megatron.core.ops.attention.softcap_and_sinks import Scoring
from megatron.core.ops.attention.tiled_compiled import tiled_attention
from megatron.core.ops.attention.tiled_eager import eager_tiled_attention
from megatron.core.ops.dropout import AttentionDropout


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout, scoring: Scoring | None = None
) -> Tensor:
    """The reference. q: [b, n, s, d]; k, v: [b, groups, s, d] -> [b, n, s, d]. The softmax is in float32 or wider."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    q = q / math.sqrt(q.shape[-1])  # before the product, which would overflow float16
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    hidden = hidden_keys(mask, *scores.shape[-2:], q.device)
    if scoring is None:
        probabilities = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    else:
        capped = scoring.capped(scores)
        capped = (capped if scoring.bias is None else capped + scoring.bias).masked_fill(hidden, float("-inf"))
        probabilities = scoring.softmax(capped, None if scoring.sinks is None else scoring.sinks[:, None, None])
    return dropout(probabilities).to(q.dtype) @ v


def repeats_groups(q: Tensor, k: Tensor, *, is_causal: bool) -> bool:
    """Whether key/value heads must be repeated for the fused kernel of this device. is_causal: there is no other mask."""
    flash = is_causal and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= _WIDEST_FLASH
    return q.shape[1] != k.shape[1] and q.device.type != "cpu" and not flash


_WIDEST_FLASH = 256  # largest head width of the flash kernel


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout) -> Tensor:
    """torch's scaled_dot_product_attention, which never holds the s x s scores. It cannot do our dropout.

    On an accelerator only the flash kernel supports fewer key/value heads than query heads. Otherwise the heads are
    repeated here: torch would silently use the kernel that holds the scores (PyTorch pull request 191085).
    """
    before, mask = (mask.before, mask.within) if isinstance(mask, Window) else (None, mask)
    if isinstance(mask, Documents):
        return attention_by_document(q, k, v, mask, before, dropout)
    if repeats_groups(q, k, is_causal=mask is None and before is None):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if before is not None:
        return attention_in_band(q, k, v, before, mask)
    allowed = None if mask is None else ~mask
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, is_causal=mask is None and q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1]
    )


def attention_by_document(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, before: int | None, dropout: AttentionDropout
) -> Tensor:
    """The fused kernel on each document: less work than on the whole sample, and no mask. before: of a window; None: all."""
    rows = []
    for row, lengths in enumerate(documents.lengths):
        masks = [windowed(None, before, length) for length in lengths]
        parts = zip(*(x[row : row + 1].split(lengths, dim=2) for x in (q, k, v)), masks)
        rows.append(torch.cat([fused_attention(*part, dropout) for part in parts], dim=2))
    return torch.cat(rows)


# ---------------------------------------------------------------- the table


class AttentionCase(NamedTuple):
    """The work of one forward."""

    q: Tensor  # [b, n, s, d]
    k: Tensor  # [b, groups, s, d], longer than q where a cache holds earlier tokens
    mask: Mask
    dropout: float  # 0 in evaluation
    compiled: bool = False  # regions run compiled
    scoring: Scoring | None = None  # None: a plain softmax


@dataclass(frozen=True)
class Kernel:
    """compute(q, k, v, mask, dropout), with the shapes of `plain_attention`; scoring too, if it `takes_scoring`.

    refuses(case): the reason why the kernel cannot compute this case, None if it can. instead: the name of a kernel for
    refused cases, which computes the same function; without it, a refusal ends the run. computes: the function, in words
    that
    are equal for kernels of equal results; default: that of `instead`, else the entry's own.
    """

    compute: Callable[..., Tensor]
    refuses: Callable[[AttentionCase], str | None] = lambda case: None
    instead: str | None = None
    takes_scoring: bool = False
    computes: str | None = None

    def why_not(self, case: AttentionCase) -> str | None:
        if case.scoring is not None and not self.takes_scoring:
            return "has a plain softmax, without a soft cap, sinks or relative positions"
        return self.refuses(case)


def _not_for_tiles(case: AttentionCase) -> str | None:
    if not case.compiled:
        return "is compiled (--compile regions)"
    return None if case.mask is None and case.q.shape[2] == case.k.shape[2] else "is for causal attention"


def _not_for_eager_tiles(case: AttentionCase) -> str | None:
    if case.scoring is not None and case.scoring.bias is not None:
        return "adds nothing to scores, as relative positions do"
    return None if case.q.shape[2] == case.k.shape[2] else "has no cache of keys and values"


def _not_for_fused(case: AttentionCase) -> str | None:
    """torch's backward on a CPU takes blocks of 512 keys whole: half of the scores of 512 causal queries, and they are
    hidden.

    bfloat16, milliseconds of a step's backward with it and with compiled tiles: 8 layers of 512 at 2 x 512 tokens 322
    and 289,
    GPT-2 at 2 x 1024 tokens 1720 and 1860."""
    if case.dropout:
        return "has no dropout by samples"
    half_on_cpu = case.q.device.type == "cpu" and case.q.dtype in (torch.bfloat16, torch.float16)
    tiles = half_on_cpu and case.q.shape[2] <= 512 and _not_for_tiles(case) is None
    return "has a slower backward than compiled tiles for so few queries" if tiles else None


SOFTMAX = "softmax(q k / sqrt(d)) v"  # the function of all kernels here: each scores, masks and drops alike
_PLAIN = Kernel(plain_attention, takes_scoring=True, computes=SOFTMAX)
_TILED = Kernel(tiled_attention, _not_for_tiles, instead="tiled-eager", computes=SOFTMAX)
_EAGER_TILES = Kernel(
    eager_tiled_attention, _not_for_eager_tiles, instead="unfused", takes_scoring=True, computes=SOFTMAX
)
_FUSED = Kernel(fused_attention, _not_for_fused, instead="tiled", computes=SOFTMAX)
_OURS = {
    "auto": _FUSED,
    "fused": _FUSED,
    "flash": _FUSED,
    "tiled": _TILED,
    "tiled-eager": _EAGER_TILES,
    "unfused": _PLAIN,
    "local": _PLAIN,
}
KERNELS: Table[Kernel] = Table("KERNELS", Kernel, _OURS)


def attention_function(name: str) -> str:
    """What the kernel of this value of --attention-backend computes."""
    seen: list[str] = []
    at = name
    while at not in seen:
        kernel = KERNELS[at]
        if kernel.computes is None and any(kernel.compute is ours.compute for ours in _OURS.values()):
            return SOFTMAX  # under a script's conditions
        if kernel.computes is not None or kernel.instead not in KERNELS:
            return KERNELS.function_of(at)
        seen.append(at)
        at = kernel.instead
    return KERNELS.function_of(name)


def kernel_for(name: str, case: AttentionCase) -> Kernel:
    """The kernel that computes the case under this value of --attention-backend. Raises ConfigError if none can."""
    kernel, asked = KERNELS[name], [name]
    reasons = []
    while (why := kernel.why_not(case)) is not None:
        reasons.append(why)
        if kernel.instead in asked or kernel.instead not in KERNELS:  # None, a circle, or no entry
            others = ", ".join(other for other in KERNELS if other not in asked)
            raise ConfigError(f"--attention-backend {name} {why}, and this run needs it; give another of {others}")
        if (theirs := attention_function(kernel.instead)) != (mine := attention_function(name)):
            raise ConfigError(
                f"--attention-backend {name} {why}, and {kernel.instead} in its place computes {theirs!r}, not {mine!r}: change "
                f"`instead` or `computes` of KERNELS[{asked[-1]!r}], or give another backend"
            )
        asked.append(kernel.instead)
        kernel = KERNELS[kernel.instead]
    if reasons and name != "auto":
        _replaced.setdefault((name, asked[-1], reasons[0]), False)
    return kernel


_replaced: dict[tuple[str, str, str], bool] = {}  # (asked for, used, why) -> whether `news_of_attention` has told it


def news_of_attention() -> list[str]:
    """Log lines of kernels that were asked for and have not computed a case, since the last call."""
    untold = [replacement for replacement, is_told in _replaced.items() if not is_told]
    _replaced.update(dict.fromkeys(untold, True))
    return [f"--attention-backend {name} {why}: {used} computes what it cannot" for name, used, why in untold]
