"""Dropout masks by a counter-based random function, as Philox.

Each element follows from 64 key bits of its line and a word of its column.

    sample  -> 64 bits, a cryptographic hash of (seed, sample)          once a microbatch, in Python
    place   -> 64 bits, a cryptographic hash of (site, layer)           once
    key     =  mixed(place, by the sample's bits)                       64 bits a sample
    head    =  mixed(number of the head, by key)                        64 bits a sample and head, for attention
    line    =  mixed(number of the row, by head, or by key)             64 bits a row of the mask
    column  =  mixed(number of the column, by the place's bits)         32 bits a column
    element =  mixed(column, by line) >= the threshold of p             dropped with probability round(p 2^32) / 2^32

`mixed` is two rounds of xor-shift and multiplication, those of lowbias32 with the constants of least known bias (C.
Wellons, "Prospecting for hash functions", 2018), between words of a key, as in an iterated Even-Mansour cipher. A key
is never added to a counter, which would shift one sequence of masks. All operations are of 32-bit integers that wrap,
equal on every device, in eager and in compiled code. Any part of a mask is drawn by itself: a rank draws its part, and
the backward draws it again.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.ops.decisions_overridable_for_memory_prediction import blocks_to_compute

MASKS_VERSION = 2  # of the masks of a key, kept in checkpoints; 1: torch's generators, one for each sample and head
# Elements drawn at once on a CPU: their two int32 buffers, input and output fill an L2 cache of 2 MiB.
_BLOCK_PER_THREAD = 2**17
_BLOCK_ELSEWHERE = 2**22  # keeps a large device busy; its buffers take 32 MiB
_MULTIPLIERS = 0x21F0AAAD, 0xD35A2D97 - 2**32  # as signed words


class MaskWords(NamedTuple):
    """The int32 words from which a mask [*lines, width] is drawn."""

    lines: Tensor  # [*lines, 2]
    columns: Tensor  # [width]


def pairs_of_words(keys: Iterable[int]) -> Tensor:
    """Split 64-bit keys into int32 words: [keys, 2], on the CPU."""
    halves = [[key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF] for key in keys]
    return torch.tensor(halves, dtype=torch.int64, device="cpu").to(torch.int32).view(-1, 2)  # the conversion wraps


def mixed(counter: Tensor, keys: Tensor) -> Tensor:
    """Return a word for each counter [..], by keys [.., 2]: int32 of their broadcast shape [..].

    It is a bijection of the counter for each key, and of each key word.
    """
    return _shifted(_draws(counter, keys[..., 0], keys[..., 1]), 16)


def _draws(counter: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return `mixed` but for its last shift, which matters for low bits only: uniform for uniform keys."""
    x = counter ^ first
    x = _shifted(x, 16)
    x *= _MULTIPLIERS[0]
    x ^= second
    x = _shifted(x, 15)
    x *= _MULTIPLIERS[1]
    # Before a comparison C++ may take (x * c >= 0) for (x >= 0), since it leaves the overflow of signed products undefined.
    x ^= first
    return x


def _shifted(x: Tensor, by: int) -> Tensor:
    """Set x to x ^ (x >> by) of unsigned words, in place.

    The shift of signed words brings in copies of the sign, which are cut off.
    """
    high = x >> by
    high &= (1 << (32 - by)) - 1
    x ^= high
    return x


def _numbered(first: int, count: int, device: torch.device) -> Tensor:
    """Return the counters of the two words of keys number `first` and up: [count, 2]."""
    return torch.arange(2 * first, 2 * (first + count), dtype=torch.int32, device=device).view(count, 2)


def keys_at(samples: Tensor, place: Tensor) -> Tensor:
    """Return the keys of the samples' masks at a site and layer: [b, 2]. samples: [b, 2]. place: [2]."""
    return mixed(place, samples[:, None])


def numbered_keys(keys: Tensor, first: int, count: int) -> Tensor:
    """Return keys [.., count, 2], numbered from `first` under each of the keys [.., 2].

    They are those of heads under samples, of rows under heads. All words are int32.
    """
    return mixed(_numbered(first, count, keys.device), keys[..., None, None, :])


def column_words(width: int, place: Tensor, first: int = 0) -> Tensor:
    """Return the words of the columns numbered from `first`: int32 [width]. place: [2], of `KeyedDropout.place_on`."""
    return mixed(torch.arange(first, first + width, dtype=torch.int32, device=place.device), place)


def threshold_of(probability: float) -> int:
    """Return the least signed word that is kept.

    Words are uniform, so the others are dropped with probability round(p 2^32) / 2^32.
    """
    return min(round(probability * 2**32), 2**32 - 1) - 2**31


def keep_mask(words: MaskWords, probability: float) -> Tensor:
    """Return the mask, bool [*lines, width], True where an element is kept.

    Takes several words of memory an element unless it is compiled.
    """
    return _draws(words.columns, words.lines[..., :1], words.lines[..., 1:]) >= threshold_of(probability)


def ones_where_kept(words: MaskWords, probability: float) -> Tensor:
    """Return the mask for `clear_dropped`, int32 [*lines, width], made in place: two words of memory an element."""
    return _draws(words.columns, words.lines[..., :1], words.lines[..., 1:]).ge_(threshold_of(probability))


def clear_dropped(x: Tensor, ones: Tensor) -> None:
    """Set dropped numbers of x to 0, in place. x: [*lines, width], contiguous; ones: int32 [*lines, width].

    By a product of their bits as integers: a bool mask takes longer than its draw on a CPU.
    """
    bits = x.view(_INTEGERS[x.element_size()])
    bits *= ones.to(bits.dtype)


def dropped(x: Tensor, words: MaskWords, probability: float) -> Tensor:
    """Return x [*lines, width] / (1 - p) where the mask keeps it, 0 elsewhere: [*lines, width], in the dtype of x.

    words: lines [*lines, 2], columns [width]. The backward draws the mask again.
    """
    if torch.compiler.is_compiling():  # one expression, to be fused with its neighbours
        # Contiguous as x is: else the mask decides, and a product with the result would be one a sample.
        return torch.where(keep_mask(words, probability), x * (1 / (1 - probability)), 0).contiguous()
    return _Dropped.apply(x, words.lines, words.columns, probability)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lines: Tensor, columns: Tensor, probability: float) -> Tensor:
        """x: [*lines, width], lines: int32 [*lines, 2], columns: int32 [width] -> [*lines, width]."""
        ctx.save_for_backward(lines, columns)
        ctx.probability = probability
        return _dropped_by_blocks(x, lines, columns, probability)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [*lines, width] -> the gradient of x [*lines, width].

        Saved: the words of lines and columns, from which the mask is drawn again: fewer bytes than a mask. The gradient
        does not depend on x.
        """
        lines, columns = ctx.saved_tensors
        return _dropped_by_blocks(grad, lines, columns, ctx.probability), None, None, None


def _dropped_by_blocks(x: Tensor, lines: Tensor, columns: Tensor, probability: float) -> Tensor:
    """Compute `dropped` by blocks of lines, so that all words of a block stay in the cache."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)  # [all lines, width]
    lines = lines.reshape(-1, 2)  # [all lines, 2]
    out = torch.empty_like(flat)
    lines_at_once = max(1, _block_on(x.device) // max(1, width))
    starts = range(0, len(flat), lines_at_once)
    blocks = [slice(start, min(start + lines_at_once, len(flat))) for start in starts]
    for block in blocks_to_compute(blocks, lambda block: (block.stop - block.start) * width):
        torch.mul(flat[block], 1 / (1 - probability), out=out[block])
        clear_dropped(out[block], ones_where_kept(MaskWords(lines[block], columns), probability))
    return out.view(x.shape)


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def _block_on(device: torch.device) -> int:
    return _BLOCK_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else _BLOCK_ELSEWHERE
