"""A state dict of a loop of one's own, saved in one layout, is what one process has in every other."""

from functools import partial

import fsspec
import pytest
import torch
from local_ranks import run_ranks
from said import raises_telling
from tiny_run import LLAMA, TINY_GPT2, Layout, build_chunks

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, load_state_dict, load_whole_tensors, save_state_dict
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.buffer_placement_and_sync import BufferPlacement
from megatron.core.sharding.placement import Placement, pieces
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

ONE, VPP = Layout(), Layout(pp=2, v=2, schedule="interleaved")
SHARDED = Layout(tp=2, pp=2, dp=2, sp=True)


def parameters(mesh, layout, config):
    chunks, _, _ = build_chunks(mesh, config, layout)
    return {name: p for chunk in chunks.values() for name, p in chunk.module.named_parameters()}


@pytest.mark.parametrize(
    "saved, loaded, config",
    [
        pytest.param(SHARDED, ONE, TINY_GPT2, id="tp pp dp to one"),
        pytest.param(VPP, Layout(tp=4, sp=True), LLAMA, id="vpp to tp", marks=pytest.mark.full),
    ],
)
def test_a_state_dict_is_saved_in_one_layout_and_loaded_in_another(saved, loaded, config, tmp_path):
    """First values are those of one process in every layout, so that they are the oracle of both."""

    def save(mesh):
        state = {
            "model": parameters(mesh, saved, config),
            "step": 7,
            "options": {"count": torch.tensor(5), "kind": "x"},
        }
        save_state_dict(tmp_path, state, mesh)

    def load(mesh):
        mine = parameters(mesh, loaded, config)
        expected = {name: p.detach().clone() for name, p in mine.items()}
        for parameter in mine.values():
            parameter.data.zero_()
        state = load_state_dict(tmp_path, {"model": mine, "options": {"count": torch.tensor(0)}}, mesh)
        for name, parameter in mine.items():  # filled in place, but for padding
            for _, box in pieces(parameter.placement, tuple(parameter.shape), mesh):
                assert torch.equal(parameter.detach()[slices(box)], expected[name][slices(box)]), name
            assert state["model"][name].data_ptr() == parameter.data_ptr()
        assert state["step"] == 7 and state["options"] == {"count": torch.tensor(5), "kind": "x"}

    run_ranks(saved.sizes, save)
    run_ranks(loaded.sizes, load)
    whole = load_whole_tensors(tmp_path)
    assert whole["options/count"] == 5 and any(name.startswith("model/") for name in whole)


@pytest.mark.parametrize("place", ["a folder", "memory://bucket/run"])
def test_megatrons_names_save_and_load(place, tmp_path):
    tmp_path = place if "://" in place else tmp_path
    fsspec.filesystem("memory").store.clear()

    def work(mesh):
        mine = parameters(mesh, Layout(tp=2), TINY_GPT2)
        expected = {name: p.detach().clone() for name, p in mine.items()}
        assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
        dist_checkpointing.save({**mine, "iteration": 3}, str(tmp_path), content_metadata={"format": "own"})
        for parameter in mine.values():
            parameter.data.zero_()
        loaded = dist_checkpointing.load(dict(mine), str(tmp_path))
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
        assert loaded["iteration"] == dist_checkpointing.load_common_state_dict(tmp_path)["iteration"] == 3
        assert dist_checkpointing.load_content_metadata(tmp_path) == {"format": "own"}

    run_ranks({"tp": 2}, work)
    assert dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    assert dist_checkpointing.load_plain_tensors(tmp_path)


def test_parameters_in_shards_are_refused(tmp_path):
    layout = Layout(dp=2, data_parallel=DataParallelConfig(zero_stage=3))

    def work(mesh):
        with raises_telling(RuntimeError, "ZeRO 3 released"):
            save_state_dict(tmp_path, parameters(mesh, layout, TINY_GPT2), mesh)

    run_ranks(layout.sizes, work)


def test_an_object_is_a_value_beside_tensors(tmp_path):
    def work(mesh):
        state = {"inner": {"extra": ShardedObject("inner.extra", {"a": [1, 2]}, (1,), (0,))}}
        dist_checkpointing.save(state, str(tmp_path))
        return dist_checkpointing.load(state, str(tmp_path))

    assert run_ranks({"tp": 2}, work) == [{"inner": {"extra": {"a": [1, 2]}}}] * 2
    with pytest.raises(NotImplementedError, match="save tensors"):
        ShardedObject("extra", 1, (2,), (0,))


def test_parts_say_their_own_place(tmp_path):
    """`ShardedTensor` of modules without placements: rows over tp 2, one slice of a leading axis a pipeline rank."""
    whole = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)

    def part(mesh, values):
        tp, pp = mesh["tp"], mesh["pp"]
        return ShardedTensor.from_rank_offsets(
            "layers.weight",
            values,
            (0, pp.rank, pp.size),
            (1, tp.rank, tp.size),
            replica_id=mesh["dp"].rank,
            prepend_axis_num=1,
        )

    def mine(mesh):
        size = 4 // mesh["tp"].size
        return whole[mesh["pp"].rank, mesh["tp"].rank * size : (mesh["tp"].rank + 1) * size]

    def save(mesh):
        dist_checkpointing.save({"model": {"weight": part(mesh, mine(mesh).clone())}, "step": 3}, str(tmp_path))

    def load(mesh):
        values = torch.zeros_like(mine(mesh))
        loaded = dist_checkpointing.load({"model": {"weight": part(mesh, values)}}, str(tmp_path))
        assert loaded["model"]["weight"] is values and torch.equal(values, mine(mesh)) and loaded["step"] == 3

    run_ranks({"tp": 2, "pp": 2, "dp": 2}, save)
    run_ranks({"tp": 4, "pp": 2}, load)
    assert torch.equal(dist_checkpointing.load_plain_tensors(str(tmp_path))["layers.weight"], whole)


def test_a_modules_state_dict_becomes_parts(tmp_path):
    """As a fork's `sharded_state_dict` makes them, with a leading axis of layers that pipeline ranks divide."""
    whole = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)

    def state(mesh, values, bias):
        module = {"weight": values, "bias": bias}
        layers = [(0, mesh["pp"].rank, mesh["pp"].size)]
        return make_sharded_tensors_for_checkpoint(module, "layers.", {"weight": 1}, layers)

    def save(mesh):
        columns = whole[mesh["pp"].rank].chunk(mesh["tp"].size, dim=1)[mesh["tp"].rank]
        state_dict = state(mesh, columns.clone(), torch.full((2,), float(mesh["pp"].rank)))
        dist_checkpointing.save(state_dict, str(tmp_path))

    def load(mesh):
        values, bias = torch.zeros(4, 3), torch.ones(2)
        dist_checkpointing.load(state(mesh, values, bias), str(tmp_path))
        return torch.equal(values, whole[mesh["pp"].rank]) and bias.tolist() == [mesh["pp"].rank] * 2

    run_ranks({"tp": 3, "pp": 2, "dp": 2}, save)
    assert all(run_ranks({"pp": 2}, load))


class Averaging(MegatronModule):
    """A module of a loop of one's own, with a buffer on every rank, a rank's part of one, and a rank's own."""

    def __init__(self, mesh, *, has_own=True):
        super().__init__(config=None)
        tp, value = mesh["tp"], 1.0 + mesh["world"].rank
        self.register_buffer("average", torch.tensor(3.0))
        self.register_buffer("rows", torch.arange(4.0).chunk(tp.size)[tp.rank].clone())
        self.buffer_placements = {"rows": BufferPlacement(placement=Placement((4,), None, shard={"tp": 0}))}
        if has_own:
            self.register_buffer("own", torch.tensor([value]))
            self.buffer_placements["own"] = BufferPlacement("own")


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 3}, {}], ids=str)
def test_buffers_of_a_loop_of_ones_own_load_in_another_layout(sizes, tmp_path):
    def save(mesh):
        save_state_dict(tmp_path, {"model": Averaging(mesh).sharded_state_dict(prefix="m.")}, mesh)

    def load(mesh, *, has_own=False):
        module = Averaging(mesh, has_own=has_own)
        expected = module.rows.clone()
        for buffer in module.buffers():
            buffer.zero_()
        load_state_dict(tmp_path, {"model": module.sharded_state_dict(prefix="m.")}, mesh)
        assert module.average == 3 and torch.equal(module.rows, expected)
        return module.own.item() if has_own else None

    run_ranks({"tp": 2, "dp": 2}, save)
    assert run_ranks({"tp": 2, "dp": 2}, partial(load, has_own=True)) == [1, 2, 3, 4]
    whole = load_whole_tensors(tmp_path)
    assert whole["model/m.rows"].tolist() == [0, 1, 2, 3] and whole["model/m.own"].shape == (4, 1)
    run_ranks(sizes, load)
