"""A function of each token by itself, tile by tile along the sequence: at any time there are the activations of one tile.

The backward computes a tile's activations again, uses them and frees them, before it turns to the next (arXiv:2506.13996).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.core.ops.dropout import DropoutKeys
from megatron.core.transformer.recompute import recomputed


def in_tiles(run: Callable[..., Tensor], tiles: int, keys: DropoutKeys, *inputs: Tensor) -> Tensor:
    """run(*inputs), computed for equal parts of their dimension 0; at most so many as they have rows. One tile is run as
    it is.

    Ranks that communicate in `run` must have as many rows, and as many tiles.
    """
    if tiles == 1:
        return run(*inputs)
    parts = zip(*(x.tensor_split(min(tiles, len(x))) for x in inputs))
    return torch.cat([recomputed(run, keys, *part) for part in parts])


def declare_tiles(weight: nn.Parameter, tiles: int) -> None:
    """Say that one backward of a use of this weight adds its gradient once for each tile."""
    if tiles > 1:
        weight.uses = tiles
