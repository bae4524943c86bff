"""Tiled computation along the sequence: at any time the activations of one tile of tokens exist (arXiv:2506.13996).

It is for functions of each token by itself, as the MLP and the loss. The backward takes the tiles one after the other:
it computes a tile's activations again, uses them and frees them.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.transformer.recompute_without_rng_state import recompute_in_backward


def run_tiled(run: Callable[..., Tensor], tiles: int, keys: SampleDropoutKeys, *inputs: Tensor) -> Tensor:
    """Return run(*inputs), computed for `tiles` parts of dimension 0 of all inputs, or fewer if there are fewer rows.

    inputs: [rows, ..] each; run returns [rows, ..] for the rows of a tile. One tile is run without recomputation. Ranks
    that communicate in `run` must all call, with equally many rows and tiles.
    """
    if tiles == 1:
        return run(*inputs)
    split_inputs = [x.tensor_split(min(tiles, len(x))) for x in inputs]
    return torch.cat([recompute_in_backward(run, keys, *tile) for tile in zip(*split_inputs)])


def declare_tiled_use(weight: nn.Parameter, tiles: int) -> None:
    """Declare that the backward of one use of this weight, of any shape, adds to its gradient once for each tile."""
    if tiles > 1:
        weight.num_grads_per_backward = tiles
