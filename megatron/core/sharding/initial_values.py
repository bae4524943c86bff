"""Initial weights, seeded by names and positions, never by ranks: the same in every layout."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import Box, intersect, relative_to, size_of, slices, whole
from megatron.core.sharding.placement import Constant, InitialValue, Normal, XavierUniform, pieces
from megatron.core.sharding.stacked_matrices_for_init import StackedMatrix, stacked_matrices

TILE = 256  # rows and columns; 65,536 draws take about 0.2 ms, their seeding 2 us


def seed_of(*key: int | str) -> int:
    """Return a 63-bit generator seed: a hash of the key."""
    return collectives.fingerprint("\0".join(str(part) for part in key))


# ---------------------------------------------------------------- initial weights


class InitializesFromWeights(nn.Module):
    """A module with parameters whose first values follow from other weights: a norm of them, their singular vectors."""

    def initialize_from_weights(self) -> None:
        """Set values of this module's parameters, in place; called once, without gradients.

        All parameters of the module are whole (in any ZeRO stage) and have values: drawn ones, or those of the checkpoint that
        the run begins from. It is called if at least one of them has a drawn value, so never where a checkpoint has all of
        them, as in a resume. Every tensor-parallel rank calls, each with its parts of the parameters; ranks of other pipeline
        stages have other modules. The data-parallel ranks take the first one's values. It must give the same values in every
        layout: `whole_tensors` gathers and divides.
        """
        raise NotImplementedError


def initialize_parameters(model: nn.Module, seed: int, mesh: Mapping[str, Axis]) -> None:
    """Fill each parameter of a model chunk with its shard of the global initial value. Padding becomes zero.

    Parameter names seed the draws, so they must be global: layers numbered over the whole model. A parameter is
    [shape on this rank]. Nothing is communicated.
    """
    for name, parameter in model.named_parameters():
        initialize_parameter(parameter, seed, name, mesh)


@torch.no_grad()
def initialize_parameter(parameter: nn.Parameter, seed: int, name: str, mesh: Mapping[str, Axis]) -> None:
    """Fill one parameter, [shape on this rank], as `initialize_parameters` does. mesh: the axes that shard it."""
    placement = parameter.placement
    init = placement.init
    if init is None or parameter.is_meta:  # a model made on the meta device has no values
        return
    parameter.zero_()
    own_pieces = pieces(placement, tuple(parameter.shape), mesh)
    if placement.init_per_matrix and not isinstance(init, Constant):
        for number, matrix in enumerate(stacked_matrices(placement)):
            _initialize_matrix(parameter, matrix, own_pieces, init, (seed, name, number))
        return

    values: Tensor | None = None  # of the global tensor, where a function makes them
    if not isinstance(init, Normal | XavierUniform | Constant):
        values = _call_init(init, placement.shape, seed, name)
    for box, local in own_pieces:
        if isinstance(init, Constant):
            parameter[slices(local)].fill_(init.value)
        elif isinstance(init, Normal):
            parameter[slices(local)].copy_(normal_box(placement.shape, box, init.std, seed, name))
        elif isinstance(init, XavierUniform):
            parameter[slices(local)].copy_(xavier_box(placement.shape, box, seed, name))
        else:
            parameter[slices(local)].copy_(values[slices(box)])


def _initialize_matrix(
    parameter: Tensor,
    matrix: StackedMatrix,
    own_pieces: list[tuple[Box, Box]],
    init: InitialValue,
    key: tuple[int, str, int],
) -> None:
    """Fill what a rank has of one of the matrices that a parameter stacks, as if the matrix were a parameter of its own.

    key: it seeds the draws. A rank draws only matrices of which it has a part.
    """
    values: Tensor | None = None  # of the matrix, where a function makes them
    for in_tensor, in_matrix in matrix.parts:
        for box, local in own_pieces:
            shared = intersect(in_tensor, box)
            if shared is None:
                continue
            within = relative_to(shared, in_tensor)
            drawn = tuple((zero + start, zero + stop) for (zero, _), (start, stop) in zip(in_matrix, within))
            drawn = drawn[-len(matrix.shape) :]  # without the leading dimensions
            if isinstance(init, Normal):
                drawn_values = normal_box(matrix.shape, drawn, init.std, *key)
            elif isinstance(init, XavierUniform):
                drawn_values = xavier_box(matrix.shape, drawn, *key)
            else:
                values = _call_init(init, matrix.shape, *key) if values is None else values
                drawn_values = values[slices(drawn)]
            offset = relative_to(shared, box)
            target = tuple((zero + start, zero + stop) for (zero, _), (start, stop) in zip(local, offset))
            parameter[slices(target)].copy_(drawn_values.view(size_of(target)))


def draw_parameter_seed() -> int:
    """Draw a seed from torch's generator, whose own seed must be equal on all ranks of a model."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _call_init(init: Callable[[Tensor], Any], shape: tuple[int, ...], *key: int | str) -> Tensor:
    """Return the global float32 tensor filled by `init`: in place, like `torch.nn.init.xavier_normal_`, or returned.

    Every rank makes the whole tensor on the CPU, since a function need not work on a shard: t ranks take t times the
    time and memory. The function draws from torch's generator, which is seeded for the call and restored.
    """
    values = torch.full(shape, torch.nan, dtype=torch.float32, device="cpu")  # NaN: not set
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed_of(*key))
    try:
        with torch.device("cpu"):
            returned = init(values)
    finally:
        generator.set_state(state)
    if isinstance(returned, Tensor) and returned.shape == values.shape and bool(values.isnan().all()):
        values = returned.detach().cpu()
    if bool(values.isnan().any()):
        raise ValueError(
            f"init_method {getattr(init, '__name__', init)!r} leaves {int(values.isnan().sum())} of {values.numel()} "
            f"elements of a tensor of shape {shape} uninitialized; it must set all of them in place, like "
            "torch.nn.init.xavier_normal_, or return a tensor of that shape"
        )
    return values


def normal_box(shape: tuple[int, ...], box: Box, std: float, *key: int | str) -> Tensor:
    """Return the box of a global tensor, drawn from N(0, std^2): float32, on the CPU, [shape of the box].

    shape: of the global tensor. key: the seed and the tensor's name, which seed the draws.
    """
    return _drawn_box(torch.randn, shape, box, *key).mul_(std)


def xavier_box(shape: tuple[int, ...], box: Box, *key: int | str) -> Tensor:
    """Return the box drawn by Xavier's rule for the whole matrix, float32, on the CPU: [shape of the box].

    Of more than two dimensions the last two are the matrices. Arguments as of `normal_box`.
    """
    bound = (6 / sum(shape[-2:])) ** 0.5
    return _drawn_box(torch.rand, shape, box, *key).mul_(2 * bound).sub_(bound)


def _drawn_box(draw: Callable[..., Tensor], shape: tuple[int, ...], box: Box, *key: int | str) -> Tensor:
    """Draw the box tile by tile.

    Each tile of the global tensor has a seed of its own, so any layout draws the same values and only the tiles that
    its box overlaps.
    """
    out = torch.empty(size_of(box), dtype=torch.float32)
    generator = torch.Generator()
    for tile in _tiles_overlapping(shape, box):
        generator.manual_seed(seed_of(*key, *(start for start, _ in tile)))
        values = draw(size_of(tile), generator=generator, dtype=torch.float32)
        shared = intersect(tile, box)
        out[slices(relative_to(shared, box))] = values[slices(relative_to(shared, tile))]
    return out


def _tiles_overlapping(shape: tuple[int, ...], box: Box) -> list[Box]:
    """Return the tiles of `shape` that share an element with `box`.

    A tile of stacked matrices, as of experts, is in one matrix: a rank that has some of them draws no others.
    """
    sizes = [1] * max(0, len(shape) - 2) + [TILE] * min(2, len(shape))
    starts = [range(start - start % size, stop, size) for (start, stop), size in zip(box, sizes)]
    tiles = []
    for corner in product(*starts):
        tile = tuple((start, start + size) for start, size in zip(corner, sizes))
        tiles.append(intersect(tile, whole(shape)))
    return tiles
