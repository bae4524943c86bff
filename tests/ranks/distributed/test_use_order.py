"""Data-parallel ranks whose forwards part: an error that says who is where, and no wait for ever, nor wrong numbers without a word."""

from collections import Counter
from functools import partial

import pytest
import torch
from local_ranks import run_ranks
from said import tells
from torch import Tensor, nn

from megatron.core.distributed.data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.distributed.zero_collective_order_check import difference
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis


class Branching(nn.Module):
    """Layers a, b and c of one size, of which a forward uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abc"})

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = self.layers[name](x)
        return x


def train(mesh: Mesh, paths: list[str], config: DataParallelConfig) -> None:
    """A step in which all use all layers, and one in which each rank has a path of its own."""
    chunk = DistributedDataParallel(Branching(), mesh, config)
    for path in ("abc", paths[mesh["dp"].rank]):
        chunk.zero_grad_buffer(1)
        chunk.begin_microbatch(0, backward=False)
        loss = chunk(torch.ones(2, 4), path).sum()
        chunk.begin_microbatch(0, backward=True)
        loss.backward()
        chunk.start_grad_reduce()
        chunk.finish_grad_reduce()


CASES = {  # paths of ranks 0 and 1, ZeRO stage, compared at once -> what is said of each
    "another layer": (["ac", "bc"], 3, True, "0 layers.a.weight|1 layers.b"),
    "another layer in a backward": (["ab", "cb"], 2, True, "0 layers.a|1 layers.c"),
    "one layer more": (["abc", "bc"], 2, True, "0 layers.a.weight|1"),
    "another order": (["abc", "acb"], 3, True, "0 layers.b|1 layers.c"),
    "seen at the end": (["ac", "bc"], 3, False, "0 layers.a|1 layers.b"),
    "seen at the end of stage 2": (["ab", "cb"], 2, False, "0 layers.a|1 layers.c"),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_use_other_layers_are_told(case: str):
    paths, stage, at_once, told = CASES[case]
    config = DataParallelConfig(
        zero_stage=stage, ddp_bucket_size=10, overlap_grad_reduce=stage == 3, poison_released_buffers=at_once
    )
    with pytest.raises(RuntimeError) as error:
        run_ranks({"dp": 2}, partial(train, paths=paths, config=config))
    assert all(tells(error.value, facts) for facts in (*told.split("|"), "--zero-stage 1"))


@pytest.mark.parametrize(("paths", "stage"), [(["ab", "cb"], 1), (["ba", "ba"], 2), (["ba", "ba"], 3)])
def test_a_branch_that_all_take_or_that_stage_1_takes_is_none(paths: list[str], stage: int):
    run_ranks({"dp": 2}, partial(train, paths=paths, config=DataParallelConfig(zero_stage=stage)))


@pytest.mark.parametrize(("stage", "at_once", "times"), [(2, True, 3 + 1), (3, True, 3 * 3 + 1), (3, False, 1)])
def test_a_step_compares_as_often_as_the_pages_say(stage: int, at_once: bool, times: int, monkeypatch):
    """16 bytes once at the end; with poison, of three layers before each sum too, in stage 3 before both gathers of each. In no ledger of the
    mesh."""
    compared, plain = [], collectives.all_reduce

    def counting(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
        if axis.name.endswith("(order)"):
            compared.append((axis.rank, x.nbytes))
        return plain(x, axis, op)

    monkeypatch.setattr(collectives, "all_reduce", counting)
    config = DataParallelConfig(zero_stage=stage, ddp_bucket_size=10, poison_released_buffers=at_once)

    def noted(mesh: Mesh) -> list[int]:
        with mesh.ledger.record() as calls:
            train(mesh, ["abc", "abc"], config)
        return [call.bytes for call in calls if call.op == "all_reduce"]

    assert 16 not in [size for sizes in run_ranks({"dp": 2}, noted) for size in sizes]
    assert Counter(compared) == {(rank, 16): 2 * times for rank in range(2)}, "two steps"


def test_ranks_that_are_together_are_named_together():
    message = difference([["x", "end"], ["x", "y", "end"], ["x", "end"]], ranks=(1, 3, 5))
    assert "rank 1, 5 end; rank 3 y" in message
