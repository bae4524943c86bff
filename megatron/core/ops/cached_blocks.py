"""Blocks of rows that stay in a CPU's caches between one operation and the next."""

import torch

_CACHED_ELEMENTS = 2**18  # per thread: 1 MB in float32


def rows_in_cache(width: int) -> int:
    """Return how many rows of `width` elements a block has that fits the caches of all threads; at least 1."""
    return max(1, _CACHED_ELEMENTS * torch.get_num_threads() // max(1, width))
