"""Groups of ranks against Megatron's published example, and against its formula for the rank of a point."""

from itertools import product

import pytest
from said import tells, tells_each

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.mesh import build_mesh
from megatron.core.parallel.parallel_config import ORDER, ParallelConfig
from megatron.core.parallel.rank_grid import Axis, AxisSizes, Grid

PP_BEFORE_DP = "tp-cp-ep-pp-dp"

# 16 ranks, tensor size 2, pipeline size 4, hence data-parallel size 2.
SIXTEEN = {
    ORDER: {
        ("tp",): "0,1 2,3 4,5 6,7 8,9 10,11 12,13 14,15",
        ("dp_outer", "dp_inner"): "0,2 1,3 4,6 5,7 8,10 9,11 12,14 13,15",
        ("pp",): "0,4,8,12 1,5,9,13 2,6,10,14 3,7,11,15",
        ("pp", "tp"): "0,1,4,5,8,9,12,13 2,3,6,7,10,11,14,15",
        ("tp", "dp_inner"): "0,1,2,3 4,5,6,7 8,9,10,11 12,13,14,15",
    },
    PP_BEFORE_DP: {
        ("tp",): "0,1 2,3 4,5 6,7 8,9 10,11 12,13 14,15",
        ("dp_outer", "dp_inner"): "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15",
        ("pp",): "0,2,4,6 1,3,5,7 8,10,12,14 9,11,13,15",
        ("pp", "tp"): "0,1,2,3,4,5,6,7 8,9,10,11,12,13,14,15",
        ("tp", "dp_inner"): "0,1,8,9 2,3,10,11 4,5,12,13 6,7,14,15",
    },
}


def parse(groups: str) -> set[tuple[int, ...]]:
    return {tuple(map(int, group.split(","))) for group in groups.split()}


@pytest.mark.parametrize("order", SIXTEEN)
def test_sixteen_ranks_meet_as_in_the_example(order: str):
    grid = AxisSizes(tp=2, pp=4, dp=2, order=order).dense()
    assert grid.world_size == 16
    for axes, expected in SIXTEEN[order].items():
        assert set(grid.groups(*axes)) == parse(expected), axes


def test_replicas_divide_the_data_parallel_axis():
    grid = AxisSizes(pp=2, dp=4, replicas=2).dense()
    assert set(grid.groups("dp_inner")) == parse("0,1 2,3 4,5 6,7")
    assert set(grid.groups("dp_outer")) == parse("0,2 1,3 4,6 5,7")
    assert set(grid.groups("dp_outer", "dp_inner")) == parse("0,1,2,3 4,5,6,7")


# Sizes -> groups of the dense and of the expert grid, by Megatron's generators of ranks.
EXPERTS = [
    (
        {"tp": 2, "dp": 4, "ep": 4, "etp": 1},
        {("ep",): "0,1,2,3 4,5,6,7", ("edp_outer", "edp_inner"): "0,4 1,5 2,6 3,7", ("etp",): "0 1 2 3 4 5 6 7"},
    ),
    (
        {"tp": 2, "pp": 2, "dp": 2, "ep": 2},
        {
            ("etp",): "0,1 2,3 4,5 6,7",
            ("ep",): "0,2 1,3 4,6 5,7",
            ("ep", "etp"): "0,1,2,3 4,5,6,7",
            ("pp", "ep", "etp"): "0,1,2,3,4,5,6,7",
            ("edp_outer", "edp_inner"): "0 1 2 3 4 5 6 7",
        },
    ),
    (
        {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "ep": 4, "etp": 1},
        {
            ("ep",): "0,1,2,3 4,5,6,7 8,9,10,11 12,13,14,15",
            ("edp_outer", "edp_inner"): "0,4 1,5 2,6 3,7 8,12 9,13 10,14 11,15",
            ("cp",): "0,2 1,3 4,6 5,7 8,10 9,11 12,14 13,15",
            ("dp_outer", "dp_inner", "cp"): "0,2,4,6 1,3,5,7 8,10,12,14 9,11,13,15",
            ("cp", "tp"): "0,1,2,3 4,5,6,7 8,9,10,11 12,13,14,15",
            ("pp",): "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15",
        },
    ),
    (
        {"cp": 2, "dp": 4, "ep": 4, "etp": 1, "replicas": 2},
        {("ep",): "0,1,2,3 4,5,6,7", ("edp_outer",): "0,4 1,5 2,6 3,7", ("edp_inner",): "0 1 2 3 4 5 6 7"},
    ),
    (
        {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "etp": 1, "order": PP_BEFORE_DP},
        {
            ("ep",): "0,1 2,3 4,5 6,7",
            ("pp",): "0,2 1,3 4,6 5,7",
            ("edp_outer", "edp_inner"): "0,4 1,5 2,6 3,7",
            ("dp_outer", "dp_inner"): "0,4 1,5 2,6 3,7",
        },
    ),
]


@pytest.mark.parametrize(("sizes", "groups"), EXPERTS)
def test_experts_lie_on_a_grid_of_their_own(sizes: dict, groups: dict):
    dense, expert = AxisSizes(**sizes).dense(), AxisSizes(**sizes).expert()
    assert set(expert.groups("pp")) == set(dense.groups("pp"))
    for axes, expected in groups.items():
        grid = expert if set(axes) <= set(expert.sizes) and axes != ("pp",) else dense
        assert set(grid.groups(*axes)) == parse(expected), axes


SIZES_AND_SAID = [
    ({"tp": 2, "dp": 4, "ep": 3}, "8 6 expert-tensor-parallel-size (2) expert-model-parallel-size (3)"),
    (
        {"tp": 2, "dp": 4, "ep": 2, "replicas": 4},
        "8 16 expert-model-parallel-size (2) num-distributed-optimizer-instances (4)",
    ),
    ({"ep": 2}, "world size 1 2 expert-model-parallel-size (2) torchrun --nproc-per-node"),
    ({"etp": 2}, "world size 1 2 expert-tensor-parallel-size (2) torchrun --nproc-per-node"),
    ({"dp": 2, "pp": 3, "ep": 4}, "world size 6 / pipeline-model-parallel-size 3 = 2 4 expert-model-parallel-size (4)"),
    (
        {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "order": PP_BEFORE_DP},
        "expert-tensor-parallel-size (2) expert-model-parallel-size (2) --use-tp-pp-dp-mapping",
    ),
]


@pytest.mark.parametrize(("sizes", "said"), SIZES_AND_SAID)
def test_experts_that_do_not_fit_a_stage_are_refused(sizes: dict, said: str):
    with pytest.raises(ConfigError) as error:
        AxisSizes(**sizes).expert()
    assert tells(error.value, said)


SIZES = [
    {"tp": t, "pp": p, "dp": o * i, "replicas": o, "cp": c}
    for t, p, o, i, c in product((1, 2, 3), (1, 4), (1, 2), (1, 2), (1, 2))
]


@pytest.mark.parametrize("order", [ORDER, PP_BEFORE_DP, "pp-tp-dp-cp", "dp-cp-pp-tp"])
def test_the_leftmost_axis_of_the_order_varies_fastest(order: str):
    """rank = tp + TP * (cp + CP * (dp + DP * pp)) in the default order; within dp the inner axis is the faster one."""
    for sizes in SIZES:
        grid = AxisSizes(**sizes, order=order).dense()
        fast_to_slow = [part for n in order.split("-") for part in (("dp_inner", "dp_outer") if n == "dp" else (n,))]
        for rank in range(grid.world_size):
            at, expected, stride = grid.coordinates(rank), 0, 1
            for name in (n for n in fast_to_slow if n != "ep"):
                expected += at[name] * stride
                stride *= grid.sizes[name]
            assert expected == rank


@pytest.mark.parametrize("order", [ORDER, PP_BEFORE_DP, "pp-tp-dp-cp"])
def test_every_rank_is_in_exactly_one_group_of_each_axis(order: str):
    combinations = [("tp",), ("pp",), ("cp",), ("dp_inner",), ("dp_outer",), ("pp", "tp"), ("dp_outer", "dp_inner")]
    for sizes in SIZES:
        grid = AxisSizes(**sizes, order=order).dense()
        for axes in combinations:
            groups = grid.groups(*axes)
            assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
            for group in groups:
                assert list(group) == sorted(group)
                fixed = {tuple(v for n, v in grid.coordinates(r).items() if n not in axes) for r in group}
                assert len(fixed) == 1, "members differ in the named axes only"


def test_axes_of_size_one_may_be_left_out_of_the_order():
    short = AxisSizes(tp=2, pp=2, order="tp-pp").dense()
    assert short.groups("tp") == AxisSizes(tp=2, pp=2).dense().groups("tp") == [(0, 1), (2, 3)]
    assert short.groups("dp_outer", "dp_inner") == [(0,), (1,), (2,), (3,)]


def test_an_axis_knows_its_ends():
    first, last = (Axis("pp", (3, 7, 11), rank) for rank in (0, 2))
    assert (first.size, first.is_first, first.is_last) == (3, True, False)
    assert (last.size, last.is_first, last.is_last) == (3, False, True)
    alone = Axis("tp", (5,), 0)
    assert (alone.size, alone.is_first, alone.is_last) == (1, True, True)


def test_a_grid_numbers_its_points_from_the_last_axis():
    grid = Grid({"pp": 2, "dp": 2, "tp": 2})
    assert [tuple(grid.coordinates(rank).values()) for rank in range(8)] == list(product((0, 1), repeat=3))


# ---------------------------------------------------------------- the mesh of each rank


@pytest.mark.parametrize(("order", "pairs"), [(ORDER, "0,12 1,13 2,14 3,15"), (PP_BEFORE_DP, "0,6 1,7 8,14 9,15")])
def test_first_and_last_stage_share_an_embedding_group(order: str, pairs: str):
    sizes = AxisSizes(tp=2, pp=4, dp=2, order=order)
    got = {build_mesh(sizes, rank, lambda name, ranks: (name, ranks))["embd"].ranks for rank in range(16)}
    assert {ranks for ranks in got if len(ranks) > 1} == parse(pairs)
    in_pairs = {rank for group in parse(pairs) for rank in group}
    assert {ranks for ranks in got if len(ranks) == 1} == {(rank,) for rank in range(16) if rank not in in_pairs}


def test_axes_of_equal_ranks_share_a_communicator_but_the_pipeline_directions_have_their_own():
    made = []

    def make_group(name, ranks):
        made.append(name)
        return name, ranks

    mesh = build_mesh(AxisSizes(pp=4), 0, make_group)
    assert made == ["pp", "pp_forward", "pp_backward", "embd"]
    assert mesh["mp"].group is mesh["world"].group is mesh["pp"].group
    assert mesh["tp"].group is None, "an axis of one rank needs no communicator"
    made.clear()
    mesh = build_mesh(AxisSizes(dp=2), 0, make_group)
    assert made == ["dp"]
    assert mesh.grad_axes().reduce.group is mesh["dp"].group and mesh.grad_axes().reduce.name == "dp"


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("world_size", "replicas", "message"),
    [(6, 1, "6 4 2 --nproc-per-node"), (8, 4, "8 16 2 num-distributed-optimizer-instances (4)")],
)
def test_a_world_that_the_sizes_do_not_divide_is_an_error(world_size: int, replicas: int, message: str):
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert parallel.sizes(8).dp == 2
    with pytest.raises(ConfigError) as error:
        parallel.sizes(world_size, replicas)
    assert tells(error.value, message)


def test_an_unknown_axis_in_the_order_is_an_error():
    with pytest.raises(ValueError) as error:
        AxisSizes(tp=2, order="tp-xp-dp-pp")
    assert tells(error.value, "tp-xp-dp-pp")


@pytest.mark.parametrize(
    ("order", "sizes", "missing"),
    [
        ("tp-dp", {"tp": 2, "pp": 4}, "['pp']"),
        ("pp-dp", {"tp": 2, "pp": 4}, "['tp']"),
        ("tp-pp", {"tp": 2, "dp": 2, "replicas": 2}, "['dp']"),
        ("tp-pp", {"tp": 2, "dp": 2}, "['dp']"),
        ("tp-dp-pp", {"tp": 2, "cp": 2}, "['cp']"),
        ("tp-dp-pp", {"dp": 2, "ep": 2}, "['ep']"),
        ("dp", {"tp": 2, "pp": 2}, "['tp', 'pp']"),
    ],
)
def test_an_axis_above_one_may_not_be_left_out_of_the_order(order: str, sizes: dict, missing: str):
    with pytest.raises(ValueError) as error:
        AxisSizes(**sizes, order=order)
    assert tells(error.value, f"{order!r} {missing}")


SETTINGS_AND_PROBLEMS = [
    (
        {"tensor_model_parallel_size": 0, "pipeline_model_parallel_size": -1},
        "--tensor-model-parallel-size 0 1|--pipeline-model-parallel-size -1 1",
    ),
    (
        {"context_parallel_size": 0, "expert_model_parallel_size": 0, "num_layers_per_virtual_pipeline_stage": 0},
        "--context-parallel-size 0 1|--expert-model-parallel-size 0 1|--num-layers-per-virtual-pipeline-stage 0 1",
    ),
]


@pytest.mark.parametrize(("settings", "problems"), SETTINGS_AND_PROBLEMS)
def test_sizes_that_cannot_be_are_named_all_at_once(settings: dict, problems: str):
    with pytest.raises(ConfigError) as error:
        ParallelConfig(**settings)
    assert tells_each(error.value.problems, problems)


def test_the_mapping_flag_puts_pipeline_ranks_next_to_tensor_ranks():
    assert ParallelConfig().order == ORDER
    assert ParallelConfig(use_tp_pp_dp_mapping=True).order == PP_BEFORE_DP
    assert ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=3).ranks_per_sample == 6
    assert not ParallelConfig(sequence_parallel=True).sequence_parallel_on, "one rank has nothing to divide"
    assert ParallelConfig(sequence_parallel=True, tensor_model_parallel_size=2).sequence_parallel_on
