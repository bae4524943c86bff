"""Attention kernels, softmax(Q K^T / sqrt(d)) V, and the table behind `--attention-backend`.

A script adds a kernel, which becomes a value of the flag:

    KERNELS["window"] = Kernel(window_attention, computes="softmax over the last 3 keys")

`computes` names the function: a run refuses a checkpoint that was trained by a kernel of another function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.registry_with_checked_entries import Registry
from megatron.core.ops.attention.attention_backend_names import OUR_KERNELS
from megatron.core.ops.attention.document_and_window_masks import (
    Documents,
    Mask,
    PrefixTrees,
    QueriesOfTrees,
    Window,
    hidden_keys,
    with_window,
)
from megatron.core.ops.attention.query_tiled_causal_compiled import tiled_causal_attention
from megatron.core.ops.attention.query_tiled_eager import eager_tiled_attention
from megatron.core.ops.attention.sliding_window_sdpa import attention_in_band
from megatron.core.ops.attention.softcap_and_sinks import SoftmaxOptions
from megatron.core.ops.layout_invariant_dropout import AttentionDropout


def unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout, options: SoftmaxOptions | None = None
) -> Tensor:
    """Attention by plain operations, the reference of all kernels.

    q: [b, n, s, d]; k, v: [b, groups, keys, d] -> [b, n, s, d]. The softmax is in float32 or wider.
    """
    queries_per_group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(queries_per_group, dim=1)  # [b, n, keys, d]
    v = v.repeat_interleave(queries_per_group, dim=1)
    q = q / math.sqrt(q.shape[-1])  # before the product, which would overflow float16
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))  # [b, n, s, keys]
    hidden = hidden_keys(mask, *scores.shape[-2:], q.device)
    if options is None:
        probabilities = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    else:
        capped = options.softcap(scores)
        if options.bias is not None:
            capped = capped + options.bias
        capped = capped.masked_fill(hidden, float("-inf"))
        sinks = None if options.sinks is None else options.sinks[:, None, None]
        probabilities = options.softmax(capped, sinks)
    return dropout(probabilities).to(q.dtype) @ v


def repeats_groups(q: Tensor, k: Tensor, *, is_causal: bool) -> bool:
    """Return whether key/value heads must be repeated for the fused kernel of this device.

    q: [b, n, s, d]; k: [b, groups, keys, d]. is_causal: there is no other mask.
    """
    takes_flash = is_causal and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= _WIDEST_FLASH
    return q.shape[1] != k.shape[1] and q.device.type != "cpu" and not takes_flash


_WIDEST_FLASH = 256  # largest head width of the flash kernel


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout) -> Tensor:
    """Attention by torch's scaled_dot_product_attention, which never holds the s x s scores. It cannot do our dropout.

    q: [b, n, s, d]; k, v: [b, groups, keys, d] -> [b, n, s, d].

    On an accelerator only the flash kernel supports fewer key/value heads than query heads. Otherwise the heads are
    repeated here: torch would silently use the kernel that holds the scores (PyTorch pull request 191085).
    """
    window_left = None
    if isinstance(mask, Window):
        window_left = mask.left
        mask = mask.within
    if isinstance(mask, Documents):
        return attention_by_document(q, k, v, mask, window_left, dropout)
    if repeats_groups(q, k, is_causal=mask is None and window_left is None):
        queries_per_group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(queries_per_group, dim=1)  # [b, n, keys, d]
        v = v.repeat_interleave(queries_per_group, dim=1)
    if window_left is not None:
        return attention_in_band(q, k, v, window_left, mask)
    visible = None if mask is None else ~mask
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible,
        is_causal=mask is None and q.shape[2] > 1,  # one query of a cache sees all keys
        enable_gqa=q.shape[1] != k.shape[1],
    )


def attention_by_document(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, window_left: int | None, dropout: AttentionDropout
) -> Tensor:
    """Run the fused kernel on each document: less work than on the full sample, and no mask.

    q: [b, n, s, d], of `QueriesOfTrees` its queries alone; k, v: [b, groups, s, d] -> the shape of q. window_left: of a
    window; None: no window.
    """
    # Splits, since the backward of a slice sets zeros and adds for all samples; and the results of documents are joined with the
    # tokens first, as the layer reads them.
    samples = []
    of_samples = zip(q.split(1), k.split(1), v.split(1), documents.lengths, strict=True)
    for i, (q_sample, k_sample, v_sample, lengths) in enumerate(of_samples):
        query_counts = lengths
        if isinstance(documents, QueriesOfTrees):
            query_counts = [len(columns) for columns in documents.columns_by_document]
        qs = q_sample.split(query_counts, dim=2)  # by document
        ks = k_sample.split(lengths, dim=2)
        vs = v_sample.split(lengths, dim=2)
        outs = []
        trees = documents.hidden_by_document[i] if isinstance(documents, PrefixTrees) else [None] * len(lengths)
        for q_document, k_document, v_document, length, hidden in zip(qs, ks, vs, lengths, trees):
            mask = with_window(hidden, window_left, length)
            out = fused_attention(q_document, k_document, v_document, mask, dropout)  # [1, n, queries, d]
            outs.append(out.permute(2, 0, 1, 3))
        samples.append(torch.cat(outs))  # [queries, 1, n, d]
    return torch.cat(samples, dim=1).permute(1, 2, 0, 3)


# ---------------------------------------------------------------- the table


class AttentionCase(NamedTuple):
    """The inputs of one forward by which a kernel is chosen."""

    q: Tensor  # [b, n, s, d]
    k: Tensor  # [b, groups, keys, d], longer than q where a cache holds earlier tokens
    mask: Mask
    dropout: float  # 0 in evaluation
    compiled: bool = False  # regions run compiled
    softmax_options: SoftmaxOptions | None = None  # None: a plain softmax


@dataclass(frozen=True)
class Kernel:
    """A value of --attention-backend.

    compute(q, k, v, mask, dropout): with the shapes of `unfused_attention`; softmax options follow if the kernel
    `takes_softmax_options`. refuses(case): the reason why the kernel cannot compute this case, None if it can.
    instead: the name of a kernel for refused cases, which computes the same function; without it, a refusal ends the
    run. computes: the function, in words that are equal for kernels of equal results; default: that of `instead`, else
    the entry's own.
    """

    compute: Callable[..., Tensor]
    refuses: Callable[[AttentionCase], str | None] = lambda case: None
    instead: str | None = None
    takes_softmax_options: bool = False
    computes: str | None = None

    def why_not(self, case: AttentionCase) -> str | None:
        """Return the reason why the kernel cannot compute the case, None if it can."""
        if case.softmax_options is not None and not self.takes_softmax_options:
            return "has a plain softmax, without a soft cap, sinks or relative positions"
        return self.refuses(case)


def _not_for_tiles(case: AttentionCase) -> str | None:
    if not case.compiled:
        return "is compiled (--compile regions)"
    is_causal = case.mask is None and case.q.shape[2] == case.k.shape[2]
    return None if is_causal else "is for causal attention"


def _not_for_eager_tiles(case: AttentionCase) -> str | None:
    if case.softmax_options is not None and case.softmax_options.bias is not None:
        return "adds nothing to scores, as relative positions do"
    return None if case.q.shape[2] == case.k.shape[2] else "has no cache of keys and values"


def _not_for_fused(case: AttentionCase) -> str | None:
    """Refuse dropout, and few queries in half precision on a CPU.

    There torch's backward takes blocks of 512 keys at once, and half of the scores of 512 causal queries are hidden.

    bfloat16, milliseconds of a step's backward with it and with compiled tiles: 8 layers of 512 at 2 x 512 tokens 322
    and 289, GPT-2 at 2 x 1024 tokens 1720 and 1860.
    """
    if case.dropout:
        return "has no dropout by samples"
    is_half_on_cpu = case.q.device.type == "cpu" and case.q.dtype in (torch.bfloat16, torch.float16)
    tiles_are_faster = is_half_on_cpu and case.q.shape[2] <= 512 and _not_for_tiles(case) is None
    return "has a slower backward than compiled tiles for so few queries" if tiles_are_faster else None


SOFTMAX = "softmax(q k / sqrt(d)) v"  # the function of all kernels here: each scores, masks and drops alike
_PLAIN = Kernel(unfused_attention, takes_softmax_options=True, computes=SOFTMAX)
_TILED = Kernel(tiled_causal_attention, _not_for_tiles, instead="tiled-eager", computes=SOFTMAX)
_EAGER_TILES = Kernel(
    eager_tiled_attention, _not_for_eager_tiles, instead="unfused", takes_softmax_options=True, computes=SOFTMAX
)
_FUSED = Kernel(fused_attention, _not_for_fused, instead="tiled", computes=SOFTMAX)
_OURS = dict(zip(OUR_KERNELS, (_FUSED, _FUSED, _FUSED, _TILED, _EAGER_TILES, _PLAIN, _PLAIN), strict=True))
KERNELS: Registry[Kernel] = Registry("KERNELS", Kernel, _OURS)


def takes_fewer_queries(name: str) -> bool:
    """Return whether the kernel of this value of --attention-backend reads `QueriesOfTrees`: torch's fused one does."""
    return name in KERNELS and KERNELS[name].compute is fused_attention


def attention_function(name: str) -> str:
    """Return the function that the kernel of this value of --attention-backend computes, in words."""
    seen: list[str] = []
    entry = name
    while entry not in seen:  # follow `instead`, which may lead round in a circle
        kernel = KERNELS[entry]
        if kernel.computes is None and any(kernel.compute is ours.compute for ours in _OURS.values()):
            return SOFTMAX  # a kernel of ours under a script's conditions
        if kernel.computes is not None or kernel.instead not in KERNELS:
            return KERNELS.function_of(entry)
        seen.append(entry)
        entry = kernel.instead
    return KERNELS.function_of(name)


def kernel_or_fallback(name: str, case: AttentionCase) -> Kernel:
    """Return the kernel that computes the case under this value of --attention-backend. ConfigError if none can."""
    kernel = KERNELS[name]
    tried = [name]
    reasons = []
    while (why := kernel.why_not(case)) is not None:
        reasons.append(why)
        if kernel.instead in tried or kernel.instead not in KERNELS:  # None, a circle, or no entry
            others = ", ".join(other for other in KERNELS if other not in tried)
            raise ConfigError(f"--attention-backend {name} cannot be used in this run: it {why}; give one of {others}")
        function = attention_function(name)
        function_instead = attention_function(kernel.instead)
        if function_instead != function:
            raise ConfigError(
                f"--attention-backend {name} {why}. {kernel.instead} cannot replace it, because it computes "
                f"{function_instead!r}, not {function!r}; give another backend, or correct `instead` or `computes` of "
                f"KERNELS[{tried[-1]!r}]"
            )
        tried.append(kernel.instead)
        kernel = KERNELS[kernel.instead]
    if reasons and name != "auto":
        _replaced.setdefault((name, tried[-1], reasons[0]), False)
    return kernel


_replaced: dict[tuple[str, str, str], bool] = {}  # (asked for, used, why) -> whether `news_of_attention` has told it


def news_of_attention() -> list[str]:
    """Log lines of kernels that were asked for and have not computed a case, since the last call."""
    untold = [replacement for replacement, is_told in _replaced.items() if not is_told]
    _replaced.update(dict.fromkeys(untold, True))
    return [f"--attention-backend {name} {why}: {used} computes what it cannot" for name, used, why in untold]
