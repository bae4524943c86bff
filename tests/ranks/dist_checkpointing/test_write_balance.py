"""What several ranks hold is written by all of them: equal parts, cut between rows, read as if one had written it."""

import pytest
import torch
from local_ranks import run_ranks
from small_checkpoints import one

from megatron.core.dist_checkpointing import (
    LocalTensor,
    load_whole_tensors,
    open_checkpoint,
    placed_tensor,
    save_checkpoint,
)
from megatron.core.dist_checkpointing.write_balance import balance_writes
from megatron.core.sharding.boxes import pieces_in_flat_range, whole
from megatron.core.sharding.placement import Constant, Placement

SHAPES = {"table": (50, 3), "bias": (7,), "scalar": (), "cube": (4, 5, 6), "row": (1, 40), "gate_up": (12, 2)}
LONGEST_ROW = 40 * 4  # bytes


def values(name):
    return torch.arange(float(torch.Size(SHAPES[name]).numel())).view(SHAPES[name]) + len(name)


def held(mesh):
    """Every tensor placed over tp as a layer would, and equal over dp."""
    tensors = {}
    for name, shape in SHAPES.items():
        shard = {"tp": 0} if name in ("table", "gate_up") else {}
        blocks = (6, 6) if name == "gate_up" else ()
        placement = Placement(shape, Constant(0), shard=shard, blocks=blocks, replicated_over=() if shard else ("mp",))
        local = values(name)
        if shard:
            parts = local.chunk(2) if name == "gate_up" else [local]
            local = torch.cat([part.chunk(mesh["tp"].size)[mesh["tp"].rank] for part in parts])
        tensors[name] = placed_tensor(local.clone(), placement, mesh)
    flat, box = values("cube").view(-1), whole(SHAPES["cube"])
    pieces = list(
        pieces_in_flat_range([(box, box)], (3, 115), SHAPES["cube"])
    )  # as a shard of ZeRO lies: partial rows at both ends
    tensors["shard"] = LocalTensor(flat[3:115], SHAPES["cube"], pieces, mesh["dp"].is_first, (), mesh["dp"])
    return {name: local for name, local in tensors.items() if name != "shard"}, tensors


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 3, "tp": 2}, {"dp": 7}])
def test_each_rank_writes_an_equal_part_of_the_bytes_that_it_shares(tmp_path, sizes):
    def work(mesh):
        written, all_held = held(mesh)
        save_checkpoint(tmp_path, 1, written, {}, mesh["world"])
        mine = balance_writes(all_held)
        boxes = [(name, box) for name, local in mine.items() if local.is_writer for box, _ in local.pieces]
        return boxes, sum(
            local.region(piece).nbytes for local in mine.values() for piece in local.pieces if local.is_writer
        )

    by_rank = run_ranks(sizes, work)
    saved = load_whole_tensors(tmp_path)
    assert all(saved[name].equal(values(name)) for name in SHAPES)
    tp = sizes.get("tp", 1)
    for stage in range(tp):
        nbytes = [count for _, count in by_rank[stage::tp]]
        assert max(nbytes) - min(nbytes) <= 2 * LONGEST_ROW, nbytes
    cuts = sum(len(boxes) for boxes, _ in by_rank) - sum(len(boxes) for boxes, _ in run_ranks({"tp": tp}, work))
    assert cuts <= tp * (sizes["dp"] - 1), "a cut for each border between two ranks"


def test_a_flat_run_is_cut_between_rows_of_the_tensor():
    def work(mesh):
        local = balance_writes(held(mesh)[1])["shard"]
        return [(local.region(piece), box) for piece in local.pieces for box in piece[:1]]

    parts = [part for rank in run_ranks({"dp": 4}, work) for part in rank]
    found = torch.full(SHAPES["cube"], -1.0)
    for region, box in parts:
        found[tuple(slice(*span) for span in box)] = region
    assert found.view(-1)[3:115].equal(values("cube").view(-1)[3:115]) and found.ge(0).sum() == 112


def test_a_tensor_of_one_holder_is_written_whole(tmp_path):
    tensors = {"w": one(values("table"))}
    assert balance_writes(tensors)["w"] is tensors["w"]
    save_checkpoint(tmp_path, 1, tensors, {}, run_ranks({"dp": 1}, lambda mesh: mesh["world"])[0])
    assert len(open_checkpoint(tmp_path).manifest.tensors["w"].pieces) == 1
