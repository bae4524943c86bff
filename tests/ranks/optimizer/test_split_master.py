"""A master as a weight and a residual: weights are those of masters held whole, and so are masters, but for one kind of tie."""

from dataclasses import replace
from functools import partial

import pytest
import tiny_run
import torch
from local_ranks import run_ranks
from offload_runs import MODELS, STAGES, offload, tiny_trainer, trained
from tiny_run import Layout, TinyTrainer, assert_same_bits, run
from torch import Tensor

from megatron.core.dist_checkpointing import open_checkpoint
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.offload.host_and_file_stores import FileTensor
from megatron.core.offload.tensor_in_memory_or_file import start_reading, start_writing
from megatron.core.optimizer.cpu_offloading.sliced_update import SlicedUpdater
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.optimizer.split_master import SplitMaster, join_master, split_master
from megatron.core.parallel.mesh import Mesh
from megatron.training.checkpointing import save_and_load_run_state
from megatron.training.memory.zero_state_bytes_by_tier import Element, predicted_bytes_by_tier

MODEL = replace(MODELS["tied"], fp64=False, bf16=True, num_layers=2)
SPLIT = OptimizerConfig(clip_grad=0.5, weight_decay=0.1, reuse_fp32_param=True)


@pytest.fixture(autouse=True)
def slices_are_short(monkeypatch):
    """Several a segment."""
    monkeypatch.setattr(SlicedUpdater.__init__, "__defaults__", (200,))


def kept(masters: Tensor) -> Tensor:
    """What comes back: of a tie whose upper half is even the float32 before it, in plain integers."""
    bits = masters.view(torch.int32).to(torch.int64)
    return (bits - (bits % 2**17 == 0x8000).long()).to(torch.int32).view(torch.float32)


class Whole(FlatOptimizer):
    """Masters whole, as without the flag, with the ties of the test."""

    def __init__(self, buffers, config: OptimizerConfig, mesh: Mesh, **options):
        super().__init__(buffers, replace(config, reuse_fp32_param=False), mesh, **options)

    def step(self, *rates, **options) -> None:
        super().step(*rates, **options)  # rounds masters to nearest even, as torch does
        for stored in (tensor for masters in self.masters for tensor in masters.tensors):
            start_writing(stored, kept(start_reading(stored).wait())).wait()


# ---------------------------------------------------------------- one number


def patterns() -> Tensor:
    """Every upper half (sign, exponent, 7 bits) with each lower half at which a rounding or a borrow could go wrong, and with one drawn:
    all ties, denormals, zeros, the largest, infinities, NaNs; of both signs."""
    lower = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    drawn = torch.randint(0, 2**16, (2**16, 1), generator=torch.Generator().manual_seed(1))
    upper = torch.arange(-(2**15), 2**15)[:, None] * 2**16
    return (upper + torch.cat([lower.expand(2**16, -1), drawn], dim=1)).flatten().to(torch.int32).view(torch.float32)


def test_weights_are_masters_rounded_to_nearest_even_and_masters_come_back_but_for_half_of_the_ties():
    masters = patterns()
    weights, residuals = split_master(masters)
    back, is_nan = join_master(weights, residuals), masters.isnan()
    assert torch.equal(weights.isnan(), is_nan) and torch.equal(back.isnan(), is_nan)
    masters, back, weights = masters[~is_nan], back[~is_nan], weights[~is_nan]
    assert torch.equal(weights.view(torch.int16), masters.bfloat16().view(torch.int16))
    assert torch.equal(back.view(torch.int32), kept(masters).view(torch.int32))
    bits = masters.view(torch.int32)
    is_changed, is_tie = back.view(torch.int32) != bits, bits % 2**16 == 0x8000
    assert bool(is_tie[is_changed].all()) and is_changed.sum() == (bits % 2**17 == 0x8000).sum()
    assert bool((back.abs() <= masters.abs()).all()) and torch.equal(back.bfloat16(), weights)
    again = join_master(*split_master(back))
    assert torch.equal(again.view(torch.int32), back.view(torch.int32)), "what was broken is broken again"
    assert weights.isinf().sum() > masters.isinf().sum()  # what is finite and too large is loud


def test_what_is_no_number_stays_none():
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF])
    masters = torch.cat([bits, bits - 2**31]).to(torch.int32).view(torch.float32)
    weights, residuals = split_master(masters)
    assert bool(weights.isnan().all()) and bool(join_master(weights, residuals).isnan().all())


def test_a_split_master_is_used_like_a_tensor():
    weight, residual = torch.ones(12, dtype=torch.bfloat16), torch.zeros(12, dtype=torch.int16)
    master = SplitMaster(weight, residual)
    assert start_reading(master).wait().tolist() == [1.0] * 12
    new = torch.randn(12, generator=torch.Generator().manual_seed(1))
    master[2:8].start_writing(new[2:8]).wait()
    master.view((3, 4)).put(((2, 3), (1, 3)), new[9:11].view(1, 2))
    expected = torch.ones(12)
    expected[2:8], expected[9:11] = new[2:8], new[9:11]
    assert torch.equal(start_reading(master).wait(), expected)
    assert torch.equal(weight, expected.bfloat16())
    assert [part.numel() for part in master.parts(20)] == [5, 5, 2]
    assert master[3:3].start_reading().wait().numel() == 0


# ---------------------------------------------------------------- a run


def both(layout: Layout, monkeypatch, model=MODEL) -> None:
    got = run(model, layout, steps=3, global_batch=8, optimizer=SPLIT)
    monkeypatch.setattr(tiny_run, "FlatOptimizer", Whole)
    assert_same_bits(got, run(model, layout, steps=3, global_batch=8, optimizer=SPLIT))


CASES = {
    "plain": {"dp": 2},
    "1 tp": {"dp": 2, "tp": 2, "sp": True, "stage": "1"},
    "1 overlap": {"dp": 2, "stage": "1", "overlap": True},
    "2 pp": {"dp": 2, "pp": 2, "m": 2, "stage": "2"},
    "3": {"dp": 2, "m": 2, "stage": "3"},
    "hybrid": {"dp": 4, "stage": "hybrid"},
    "outer": {"dp": 4, "stage": "outer"},
    "0 host": {"tier": "host"},
    "1 file": {"dp": 2, "stage": "1", "tier": "file"},
    "2 half": {"dp": 2, "stage": "2", "tier": "half"},
    "3 params": {"dp": 2, "stage": "3", "tier": "params", "overlap": True},
    "outer params": {"dp": 4, "stage": "outer", "tier": "params"},
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full]) for case in CASES])
def test_a_run_has_the_bits_of_whole_masters(case: str, monkeypatch, tmp_path):
    options = dict(CASES[case])
    stage, tier, overlap = options.pop("stage", "0"), options.pop("tier", "none"), options.pop("overlap", False)
    passing = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1500} if overlap else {}
    config = DataParallelConfig(**STAGES[stage], **passing)
    both(Layout(**options, data_parallel=config, offload=offload(tier, tmp_path)), monkeypatch)


@pytest.mark.full
def test_stages_agree_to_the_bit():
    """With a microbatch a rank, and no limit to the norm, whose sum each stage groups otherwise."""
    unclipped = replace(SPLIT, clip_grad=0.0)

    def under(stage: str):
        layout = Layout(dp=2, data_parallel=DataParallelConfig(**STAGES[stage]))
        return replace(run(MODEL, layout, steps=3, global_batch=8, optimizer=unclipped), norms=[])

    expected = under("0")
    for stage in ("1", "2", "3"):
        assert_same_bits(under(stage), expected)


CORNERS = {
    "groups": lambda: {"of_step": {"decoupled_lr": 3e-3, "weight_decay": 0.3}, "optimizer": SPLIT},
    "frozen": lambda: {"frozen": "mlp", "optimizer": SPLIT},
    "sgd": lambda: {"optimizer": replace(SPLIT, optimizer="sgd")},
    "sgd without momentum": lambda: {"optimizer": replace(SPLIT, optimizer="sgd", sgd_momentum=0.0)},
}


@pytest.mark.parametrize("corner", [pytest.param(c, marks=[pytest.mark.full] * (c != "groups")) for c in CORNERS])
def test_corners_of_a_step(corner: str):
    """Parameters, masters and moments."""
    layout = Layout(data_parallel=DataParallelConfig(zero_stage=1))
    ((got, *_),), ((expected, *_),) = (
        run_ranks({}, partial(trained, model=MODEL, layout=layout, kind=kind, **CORNERS[corner]()))
        for kind in (FlatOptimizer, Whole)
    )
    assert [x.tolist() for x in got] == [x.tolist() for x in expected]


# ---------------------------------------------------------------- save and load


RESUMED = {  # before: split?, layout; after: the same
    "with to without": (True, {"dp": 2, "stage": "1"}, False, {"tp": 2, "stage": "0"}),
    "without to with": (False, {"tp": 2, "stage": "0"}, True, {"dp": 2, "stage": "1"}),
    "without to with in shards": (False, {"dp": 2, "stage": "2"}, True, {"dp": 2, "stage": "3", "tier": "params"}),
    "with to with": (True, {"dp": 2, "stage": "3", "tier": "half"}, True, {"dp": 2, "pp": 1, "stage": "0"}),
    "float32 to with": (None, {"dp": 2, "stage": "0"}, True, {"dp": 2, "stage": "1"}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", RESUMED)
def test_a_checkpoint_holds_whole_masters(case: str, tmp_path):
    """Every rank's weights are those that were saved, and masters too but for the ties that cannot be kept, which all that are saved without
    the flag are made here."""
    before, first, after, second = RESUMED[case]

    def made(mesh: Mesh, splits: bool | None, options: dict) -> TinyTrainer:
        options = dict(options)
        config = DataParallelConfig(**STAGES[options.pop("stage")])
        away = offload(options.pop("tier", "none"), tmp_path / "tiers")
        model = replace(MODEL, bf16=splits is not None)
        settings = replace(SPLIT, reuse_fp32_param=bool(splits))
        return tiny_trainer(mesh, model, Layout(**options, data_parallel=config, offload=away), optimizer=settings)

    def save(mesh: Mesh) -> None:
        tiny = made(mesh, before, first)
        for number in range(2):
            tiny.step(number)
        for master in (x for masters in tiny.adam.masters for x in masters.tensors):
            ties = start_reading(master).wait().view(torch.int32) & ~0xFFFF | 0x8000
            start_writing(master, ties.view(torch.float32)).wait()
        tiny.adam.publish_masters()
        for chunk in tiny.model:
            chunk.gather_params()
        tiny.save(tmp_path / "save", 2)
        tiny.close()

    def load(mesh: Mesh) -> None:
        tiny = made(mesh, after, second)
        tiny.load(tmp_path / "save")
        whole = open_checkpoint(tmp_path / "save")
        weights = save_and_load_run_state.sharded_model_state(tiny.model, mesh)
        state = save_and_load_run_state.sharded_optimizer_state(tiny.adam, mesh)
        source = "model" if before is None else "optimizer/master"
        for name in (name.removeprefix("model/") for name in weights):
            saved = full_tensor(whole, f"{source}/{name}")
            assert not torch.equal(saved, saved.bfloat16().float())
            compare(state[f"optimizer/master/{name}"], kept(saved) if after else saved)
            if after:
                compare(weights[f"model/{name}"], saved.bfloat16())
            if before is not None:
                compare(weights[f"model/{name}"], full_tensor(whole, f"model/{name}"))
        tiny.step(2)
        tiny.close()

    def full_tensor(checkpoint, name: str) -> Tensor:
        record = checkpoint.manifest.tensors[name]
        values = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        box = tuple((0, n) for n in record.shape)
        checkpoint.read_into({name: save_and_load_run_state.LocalTensor(values, record.shape, [(box, box)], False)})
        return values

    def compare(local, whole: Tensor) -> None:
        for box, inside in (*local.pieces, *local.copies):
            values = start_reading(local.region((box, inside))).wait()
            assert torch.equal(values, whole[tuple(slice(a, b) for a, b in box)])

    for options, work in ((first, save), (second, load)):
        run_ranks({axis: n for axis, n in options.items() if axis in ("dp", "tp", "pp")}, work)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (3, "none"), (1, "file")])
def test_two_bytes_a_parameter_are_saved(stage: int, tier: str, tmp_path):
    """Of everything that is held, each memory counted once."""
    layout = Layout(dp=2, data_parallel=DataParallelConfig(zero_stage=stage), offload=offload(tier, tmp_path))

    def work(mesh: Mesh, splits: bool) -> tuple[int, int]:
        tiny = tiny_trainer(mesh, MODEL, layout, optimizer=replace(SPLIT, reuse_fp32_param=splits))
        tensors = [
            x for shards in (tiny.adam.masters, *tiny.adam.moments.values()) for shard in shards for x in shard.tensors
        ]
        tensors = [part for x in tensors for part in ((x.weight, x.residual) if isinstance(x, SplitMaster) else (x,))]
        tensors += [x for buffer in tiny.adam.buffers for x in buffer.param_shard.tensors]
        memory = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if isinstance(x, Tensor)
        }
        in_files = sum(x.nbytes for x in tensors if isinstance(x, FileTensor))
        owned = sum(stop - start for buffer in tiny.adam.buffers for start, stop in buffer.owned_runs)
        tiny.close()
        return owned, sum(memory.values()) + in_files

    for (owned, less), (_, more) in zip(*(run_ranks({"dp": 2}, partial(work, splits=s)) for s in (True, False))):
        assert more - less == 2 * owned


def test_the_plan_counts_what_a_split_master_keeps():
    element = Element.of(2, 2, splits_masters=True)
    assert (element.parameter, element.gradient, element.master, element.moments) == (2, 4, 2, 8)
    assert Element.of(4, 2, splits_masters=True).master == 0
    assert predicted_bytes_by_tier(1000, element, stage=1, shards=2)["device"]["masters"] == 1000
