"""Stacked weights start as their matrices would alone, by the fans of one matrix, in every layout."""

from dataclasses import replace
from functools import partial
from math import sqrt

import pytest
import torch
from local_ranks import run_ranks
from torch import Tensor, nn

from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.initial_values import initialize_parameter
from megatron.core.sharding.placement import InitialValue, Normal, Placement, XavierUniform, owned_pieces
from megatron.core.sharding.stacked_matrices_for_init import stacked_matrices
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear
from megatron.core.transformer.layer_parallel_context import LayerContext

EXPERTS, FFN, WIDTH = 8, 24, 40
HEADS, GROUPS, HEAD = 8, 4, 10  # 2 query heads of each group
QUERIES = HEADS // GROUPS * HEAD

INITS: dict[str, InitialValue] = {
    "normal": Normal(0.02),
    "xavier": XavierUniform(),
    "torch's xavier": nn.init.xavier_normal_,
    "torch's kaiming": partial(nn.init.kaiming_uniform_, a=sqrt(5)),
}
# placement without its init -> (out, in) of each matrix, in order
STACKS: dict[str, tuple[Placement, list[tuple[int, int]]]] = {
    "experts' columns": (Placement((EXPERTS, FFN, WIDTH), None, shard={"tp": 1}), [(FFN, WIDTH)] * EXPERTS),
    "experts' rows": (Placement((EXPERTS, WIDTH, FFN), None, shard={"tp": 2}), [(WIDTH, FFN)] * EXPERTS),
    "whole experts": (Placement((EXPERTS, FFN, WIDTH), None, shard={"tp": 0}), [(FFN, WIDTH)] * EXPERTS),
    "experts' gates": (
        Placement((EXPERTS, 2 * FFN, WIDTH), None, shard={"tp": 1}, blocks=(FFN, FFN)),
        [(FFN, WIDTH)] * (2 * EXPERTS),
    ),
    "gate and up": (Placement((2 * FFN, WIDTH), None, shard={"tp": 0}, blocks=(FFN, FFN)), [(FFN, WIDTH)] * 2),
    "qkv": (
        Placement((GROUPS * (QUERIES + 2 * HEAD), WIDTH), None, shard={"tp": 0}, interleaved=(QUERIES, HEAD, HEAD)),
        [(GROUPS * QUERIES, WIDTH), (GROUPS * HEAD, WIDTH), (GROUPS * HEAD, WIDTH)],
    ),
    "one matrix": (Placement((FFN, WIDTH), None, shard={"tp": 0}), [(FFN, WIDTH)]),
}


def whole_value(placement: Placement, tp: int) -> Tensor:
    """The parameter put together from its shards."""

    def shard(mesh: Mesh) -> list[tuple]:
        shape = list(placement.shape)
        for dim in placement.shard.values():
            shape[dim] //= mesh["tp"].size
        parameter = nn.Parameter(torch.empty(shape, dtype=torch.float64))
        parameter.placement = placement
        initialize_parameter(parameter, 7, "experts.weight", mesh)
        return [(box, parameter[slices(own)].detach()) for box, own in owned_pieces(placement, tuple(shape), mesh)]

    whole = torch.full(placement.shape, torch.nan, dtype=torch.float64)
    for pieces in run_ranks({"tp": tp}, shard):
        for box, value in pieces:
            whole[slices(box)] = value
    assert not whole.isnan().any()
    return whole


def by_hand(name: str, whole: Tensor) -> list[Tensor]:
    """The matrices of a stack, cut out as the layer's forward reads them."""
    if name == "qkv":
        groups = whole.unflatten(0, (GROUPS, -1)).split([QUERIES, HEAD, HEAD], dim=1)
        return [part.flatten(0, 1) for part in groups]
    if name == "gate and up":
        return list(whole.chunk(2))
    if name == "one matrix":
        return [whole]
    return [part for expert in whole for part in expert.chunk(2 if name == "experts' gates" else 1)]


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("name", STACKS)
def test_each_matrix_has_its_own_fans_in_every_layout(name: str, init: str):
    placement, shapes = STACKS[name]
    placement = replace(placement, init=INITS[init], init_per_matrix=True)
    whole = whole_value(placement, 1)
    for tp in (2, 4):
        assert torch.equal(whole_value(placement, tp), whole), tp

    matrices = by_hand(name, whole)
    assert [tuple(matrix.shape) for matrix in matrices] == shapes == [m.shape for m in stacked_matrices(placement)]
    expected = {  # standard deviations
        "normal": lambda out, inputs: 0.02,
        "xavier": lambda out, inputs: sqrt(2 / (out + inputs)),
        "torch's xavier": lambda out, inputs: sqrt(2 / (out + inputs)),
        "torch's kaiming": lambda out, inputs: sqrt(1 / (3 * inputs)),
    }[init]
    for matrix, shape in zip(matrices, shapes):
        assert matrix.std().item() == pytest.approx(expected(*shape), rel=0.12)
        if init == "xavier":
            assert matrix.abs().max() <= sqrt(6 / sum(shape))
    assert len({matrix[0, 0].item() for matrix in matrices}) == len(matrices), "no two matrices are equal"


def test_a_function_is_called_with_one_matrix_and_only_where_a_rank_has_a_part():
    shapes = []

    def init(matrix: Tensor) -> None:
        shapes.append(tuple(matrix.shape))
        nn.init.ones_(matrix)

    placement = replace(STACKS["whole experts"][0], init=init, init_per_matrix=True)
    assert bool((whole_value(placement, 4) == 1).all())
    assert shapes == [(FFN, WIDTH)] * EXPERTS, "each of 4 ranks drew its two experts"


@pytest.mark.parametrize("name", ["gate and up", "qkv", "one matrix"])
def test_without_the_property_a_fused_weight_is_one_matrix_as_before(name: str):
    """Megatron's rule for fused weights; a matrix by itself is the same bits with the property and without, but for its seed."""
    placement = replace(STACKS[name][0], init=XavierUniform())
    out, inputs = placement.shape
    whole = whole_value(placement, 1)
    assert whole.std().item() == pytest.approx(sqrt(2 / (out + inputs)), rel=0.1)
    assert torch.equal(whole, whole_value(placement, 2))


def test_a_column_parallel_linear_declares_it():
    def weight(mesh: Mesh) -> Tensor:
        torch.manual_seed(3)
        tp = LayerContext.from_mesh(mesh, torch.float64).tp
        options = {"tp": tp, "init": XavierUniform(), "bias": False, "blocks": (FFN, FFN)}
        linear = ColumnParallelLinear(WIDTH, 2 * FFN, init_per_matrix=True, **options)
        return linear.weight.detach()

    (whole,) = run_ranks({}, weight)
    first, second = run_ranks({"tp": 2}, weight)
    (gate0, up0), (gate1, up1) = first.chunk(2), second.chunk(2)
    assert torch.equal(torch.cat((gate0, gate1, up0, up1)), whole)
    assert sqrt(6 / (2 * FFN + WIDTH)) < whole.abs().max() <= sqrt(6 / (FFN + WIDTH))
