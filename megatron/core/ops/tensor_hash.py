"""Hashes of a tensor's bits: sums of 32-bit words, each times an odd 64-bit weight of its position, modulo 2^64.

    word      w0 w1 w2 ...                block of 16,384 words (64 KiB)
    weight    a0 a1 a2 ...   odd, fixed   hash of block r = sum(w[i] * a[i])      hash of a tensor = sum(b[r] * block r)

A block's hash always changes with any one word, since odd weights are invertible, and with any two flipped bits: no two
weights of the table give +-2^j a +-2^k b = 0. Another change is missed with a chance of 2^-32 at most. A hash is a sum
over positions, so the hashes of a tensor's shards add up to that of the full tensor.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

BLOCK_WORDS = 2**14  # words
_ROWS_AT_ONCE = 8  # blocks on a CPU: 1 MiB of products stays in the cache
_ROWS_ON_DEVICE = 512


@torch.no_grad()
def block_hashes(x: Tensor) -> Tensor:
    """Return the hash of each 64 KiB of `x`, in row-major order: int64 [blocks], on x's device.

    x: of any shape and dtype. The host does not wait.
    """
    return _sums(_words(x), 0)


@torch.no_grad()
def tensor_hash(x: Tensor, first: int = 0) -> Tensor:
    """Return the hash of `x`, of any shape and dtype: an int64 scalar [] on x's device.

    first: where the shard x begins in the full tensor, in elements; must be at a word of 32 bits.
    """
    skipped_bytes = first * x.element_size()
    assert skipped_bytes % 4 == 0, f"element {first} of {x.dtype} begins inside a word"
    first_word = skipped_bytes // 4
    blocks = _sums(_words(x), first_word % BLOCK_WORDS)
    block_numbers = torch.arange(len(blocks), device=x.device) + first_word // BLOCK_WORDS
    return ((2 * block_numbers + 1) * _GOLDEN * blocks).sum()


def _words(x: Tensor) -> Tensor:
    """Return the bits of `x` as a flat tensor of int32; the last word is filled up with zeros."""
    data = x.detach().contiguous().view(-1)
    ends_inside_word = data.numel() * data.element_size() % 4
    begins_inside_word = data.storage_offset() * data.element_size() % 4
    if ends_inside_word or begins_inside_word:
        raw = data.view(torch.uint8)
        data = torch.zeros(-(-raw.numel() // 4) * 4, dtype=torch.uint8, device=x.device)
        data[: raw.numel()] = raw
    return data.view(torch.int32)


def _sums(words: Tensor, offset: int) -> Tensor:
    """Return the hash of each block, of words that begin at word `offset` of a block."""
    weights = _weights(words.device)
    hashes = []

    # the rest of a block that began before
    head = min(BLOCK_WORDS - offset, len(words)) if offset else 0
    if head:
        hashes.append((words[:head].long() * weights[offset : offset + head]).sum()[None])

    # full blocks
    body = (len(words) - head) // BLOCK_WORDS
    blocks = words[head : head + body * BLOCK_WORDS].view(body, BLOCK_WORDS)
    blocks_at_once = min(_ROWS_AT_ONCE if words.device.type == "cpu" else _ROWS_ON_DEVICE, body)
    products = torch.empty(blocks_at_once, BLOCK_WORDS, dtype=torch.int64, device=words.device)
    if body:
        for part in blocks.split(blocks_at_once):
            hashes.append(torch.mul(part, weights, out=products[: len(part)]).sum(1))

    # the beginning of the last block
    tail = words[head + body * BLOCK_WORDS :]
    if len(tail):
        hashes.append((tail.long() * weights[: len(tail)]).sum()[None])
    return torch.cat(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=words.device)


_GOLDEN = -7046029254386353131  # 2^64 / the golden ratio, odd: far-spread multiples


@cache
def _weights(device: torch.device) -> Tensor:
    """Return the odd weights of a block's words (SplitMix64: Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        z = np.arange(1, BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)
