"""Persistent buffers of a fork's model are state: saved, resumed to the bit, loaded by any layout, refused by name if they differ."""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from documents import names_of_block
from local_ranks import run_ranks
from script_run import trainer_of
from torch import Tensor, nn
from whole_run import TINY

import pretrain_gpt
from megatron.core.dist_checkpointing.save_load_state_dict import load_whole_tensors
from megatron.core.distributed.sync_persistent_module_buffers import BufferSync, ChangesAtStepEnd
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.buffer_placement_and_sync import BufferPlacement
from megatron.core.sharding.placement import Placement
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.training.checkpointing.module_buffers import digest
from tools import checkpoint_inspect

EXPERTS = 4


class RouterBias(ChangesAtStepEnd):
    """A bias that follows the loads of a step, which all data-parallel ranks add up."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("loads", torch.zeros(EXPERTS, dtype=torch.int64))
        self.buffer_placements = {"loads": BufferPlacement("sum")}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.loads += torch.bincount(torch.arange(x.numel()) % 7 % EXPERTS, minlength=EXPERTS)
        return x * (1 + self.bias.mean())

    def end_of_step(self) -> None:
        self.bias += 0.001 * (self.loads.double().mean() - self.loads).sign().float()
        self.loads.zero_()


class WithBuffers(GPTModel):
    """GPT with buffers of every kind, which every forward changes and reads."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.register_buffer("constant", torch.arange(4.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("codes", None)
        self.stage = 2 * self.pre_process + self.post_process
        for layer in self.language_model.decoder.layers:
            layer.norm_of_outputs = nn.BatchNorm1d(3, affine=False)
            layer.router = RouterBias()
            layer.register_buffer("average", torch.zeros(()))
            layer.register_buffer("seed", torch.zeros(2))
            layer.buffer_placements = {"seed": BufferPlacement("own")}
            layer.register_forward_hook(track)

    def forward(self, *given, **named) -> Tensor:
        if self.training:
            self.scratch += 1
            self.codes = torch.full((3,), self.stage, dtype=torch.bool)
            self.constant[0] += self.stage
        return super().forward(*given, **named)


def track(layer: nn.Module, _: object, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    out, context = output
    if layer.training:
        layer.norm_of_outputs(out.detach()[..., :3].float().reshape(-1, 3))
        layer.average = 0.9 * layer.average + 0.1 * out.detach().float().mean()  # another tensor
        layer.seed += out.detach().float().flatten()[:2]
    return layer.router(out) * (1 + 1e-3 * layer.average.to(out.dtype)), context


def script_of(model: type[GPTModel]) -> ModuleType:
    """pretrain_gpt.py with another model."""

    def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
        runtime = pretrain_gpt.get_runtime()
        return model(runtime.config.transformer, **runtime.model_parts(pre_process, post_process, vp_stage))

    script = ModuleType("fork")
    vars(script).update(vars(pretrain_gpt) | {"model_provider": model_provider})
    return script


@pytest.fixture
def train(said) -> Callable[..., str]:
    return lambda model, flags: said(flags, script=script_of(model))


@pytest.fixture
def refuse(refused) -> Callable[..., str]:
    return lambda model, flags: refused(flags, script=script_of(model))


LAYOUTS = {
    "one process": ({}, ""),
    "tp sp": ({"tp": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "vpp": ({"pp": 2}, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "pp dp": ({"pp": 2, "dp": 2}, "--pipeline-model-parallel-size 2"),
    "cp": ({"cp": 2}, "--context-parallel-size 2"),
    "zero 3": ({"dp": 2}, "--zero-stage 3"),
    "recomputed": ({}, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
}
RUN = " --num-layers 4 --hidden-size 8 --num-attention-heads 2 --global-batch-size 4 --micro-batch-size 1 --override-opt_param-scheduler --lr-decay-iters 9 "


def run(layout: str, flags: str) -> list[dict[str, Tensor]]:
    """Train in a layout; each rank's buffers at the end, by name."""
    sizes, of_layout = LAYOUTS[layout]

    def train_rank(mesh: Mesh) -> dict[str, Tensor]:
        with trainer_of(
            script_of(WithBuffers), mesh, " ".join(TINY) + RUN + of_layout + flags, predicts=False
        ) as trainer:
            trainer._train()
            named = {}
            for i, chunk in enumerate(trainer.model):
                named |= {f"{i} {name}": value.clone() for name, value in chunk.module.named_buffers()}
            return named

    return run_ranks(sizes, train_rank)


def saved(folder: Path) -> dict[str, Tensor]:
    return load_whole_tensors(folder)


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.full] * (n not in ("vpp", "zero 3"))) for n in LAYOUTS]
)
def test_a_resume_has_every_bit_and_any_layout_loads_it(layout, tmp_path):
    whole = run(layout, f" --train-iters 3 --save {tmp_path / 'whole'}")
    run(layout, f" --train-iters 2 --save {tmp_path / 'half'}")
    resumed = run(layout, f" --train-iters 3 --save {tmp_path / 'again'} --load {tmp_path / 'half'}")
    for before, after in zip(whole, resumed, strict=True):
        assert before.keys() == after.keys()
        for name in before:
            if not name.endswith("scratch"):
                assert torch.equal(before[name], after[name]), name
    one, other = saved(tmp_path / "whole"), saved(tmp_path / "again")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert any(name.endswith("running_mean") for name in one) and one["buffer/codes"].dtype == torch.bool
    # a load alone, in other layouts, gives each rank the saved values
    for elsewhere in ("pp dp", "one process"):
        loaded = run(elsewhere, f" --train-iters 3 --load {tmp_path / 'whole'}")
        for buffers in loaded:
            for name, value in buffers.items():
                name = name.partition(" ")[2]
                if name.endswith(("running_mean", "bias", "average")):
                    assert torch.equal(value, one[f"buffer/{name}"]), name


def test_the_first_ranks_statistics_are_everyones_and_the_loads_are_added(tmp_path):
    ranks = run("zero 3", " --train-iters 2")
    for name in ranks[0]:
        if name.endswith("seed"):
            assert not torch.equal(ranks[0][name], ranks[1][name])
        elif not name.endswith("scratch"):
            assert torch.equal(ranks[0][name], ranks[1][name]), name
    # counts do not depend on the ranks: those of one process, which sees the samples of both
    (alone,) = run("one process", " --train-iters 1")
    both = run("zero 3", " --train-iters 1")[0]
    assert all(torch.equal(alone[name], both[name]) for name in alone if name.endswith("bias"))


def test_recomputation_sees_the_buffers_of_its_forward_and_changes_none(tmp_path):
    (plain,), (recomputed,) = run("one process", " --train-iters 2"), run("recomputed", " --train-iters 2")
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


class Sharded(WithBuffers):
    """A buffer that each tensor-parallel rank has a part of."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        tp = pretrain_gpt.get_runtime().mesh["tp"]
        self.register_buffer("scales", torch.zeros(8 // tp.size))
        self.buffer_placements = {"scales": BufferPlacement("max", Placement((8,), None, shard={"tp": 0}))}

    def forward(self, *given, **named) -> Tensor:
        if self.training:
            first = pretrain_gpt.get_runtime().mesh["tp"].rank * len(self.scales)
            self.scales = self.scales + torch.arange(first, first + len(self.scales))
        return super().forward(*given, **named)


def test_a_sharded_buffer_reshards(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "WithBuffers", Sharded)
    run("tp sp", f" --train-iters 2 --save {tmp_path}")
    assert saved(tmp_path)["buffer/scales"].tolist() == [8.0 * i for i in range(8)]
    (loaded,) = run("one process", f" --train-iters 2 --load {tmp_path}")
    assert loaded["0 scales"].tolist() == [8.0 * i for i in range(8)]


class WithOneMore(WithBuffers):
    model_name = "WithBuffers of RouterBias"

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.register_buffer("late", torch.zeros(1))


@pytest.mark.full
def test_other_buffers_are_refused_by_name(train, refuse, tmp_path):
    train(WithBuffers, f"--train-iters 1 --save {tmp_path / 'few'}")
    train(WithOneMore, f"--train-iters 1 --save {tmp_path / 'more'}")
    more = "--train-iters 2 --override-opt_param-scheduler --load"
    assert "lacks buffers of this run's model: late" in refuse(WithOneMore, f"{more} {tmp_path / 'few'}")
    assert "contains buffers that this run's model lacks: late" in refuse(WithBuffers, f"{more} {tmp_path / 'more'}")
    lines = list(checkpoint_inspect.summary(checkpoint_inspect.opened(str(tmp_path / "more"), None)))
    assert any("buffer: " in line for line in lines)


@pytest.mark.full
def test_a_checkpoint_from_before_buffers_were_saved_loads_with_a_warning(train, tmp_path):
    train(GPTModel, f"--train-iters 1 --save {tmp_path}")
    manifest = tmp_path / "iter_0000001" / "manifest.json"
    state = json.loads(manifest.read_text())["state"]
    assert state["buffers"] == {} and json.loads(manifest.read_text())["version"] == 1
    forget_buffers(manifest)
    text = train(WithModelName, f"--train-iters 2 --override-opt_param-scheduler --load {tmp_path}")
    (line,) = (line for line in text.splitlines() if "before buffers of models were saved" in line)
    assert line.startswith("WARNING") and "constant" in line and "loaded checkpoint of iteration 1" in text


class WithModelName(WithBuffers):
    model_name = "GPTModel"


def forget_buffers(manifest: Path) -> None:
    """Write a manifest as earlier code did, sealed."""
    import hashlib

    body = manifest.read_text().rpartition(',\n"sha256"')[0].replace(', "buffers": {}', "")
    manifest.write_text(f'{body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n')


@pytest.mark.full
def test_every_way_to_save_holds_them(train, tmp_path):
    train(WithBuffers, f"--train-iters 1 --save {tmp_path / 'now'}")
    train(WithBuffers, f"--train-iters 1 --async-save --save {tmp_path / 'async'}")
    one, other = saved(tmp_path / "now"), saved(tmp_path / "async")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    flags = f"--save {tmp_path / 'copies'} --load {tmp_path / 'copies'} --non-persistent-save-interval 1 "
    flags += f"--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {tmp_path / 'disk'} --train-iters 3"
    with pytest.raises(ZeroDivisionError):
        train(Dying, flags)
    assert "going on from iteration 1" in train(WithBuffers, flags)
    train(WithBuffers, f"--train-iters 3 --save {tmp_path / 'whole'}")
    one, other = saved(tmp_path / "copies"), saved(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)


class Dying(WithBuffers):
    """Ends the run in the second step."""

    model_name = "WithBuffers of RouterBias"
    steps = 0

    def forward(self, *given, **named) -> Tensor:
        if self.training:
            self.steps += 1
            assert self.steps < 2 or 1 / 0
        return super().forward(*given, **named)


class ExtraState(GPTModel):
    """State of torch's other kind, which state_dict holds and no tensor is."""

    steps = 0

    def forward(self, *given, **named) -> Tensor:
        self.steps += 1
        return super().forward(*given, **named)

    def get_extra_state(self) -> dict:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict) -> None:
        self.steps = state["steps"]


@pytest.mark.full
def test_extra_states_are_named_at_the_start_at_a_save_and_at_a_load(train, tmp_path):
    text = train(ExtraState, f"--train-iters 1 --save {tmp_path}")
    assert "has extra states, which checkpoints do not hold: _extra_state" in text
    assert "this save lacks extra states" in text
    text = train(ExtraState, f"--train-iters 2 --override-opt_param-scheduler --load {tmp_path}")
    assert "had changed when it was saved: _extra_state" in text and "loaded checkpoint of iteration 1" in text


def test_a_model_without_persistent_buffers_hears_nothing(said):
    assert "buffers" not in said("--train-iters 1")


def test_a_placement_of_an_unknown_buffer_or_rule_is_refused(refuse):
    class Unknown(WithBuffers):
        model_name = "WithBuffers"

        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.buffer_placements = {"gone": BufferPlacement()}

    assert "names gone; its persistent buffers are codes, constant" in refuse(Unknown, "--train-iters 1")
    with pytest.raises(ValueError, match="sync is one of copy, sum, mean, max, own"):
        BufferPlacement("median")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.zeros(3), torch.zeros(3, 1)),
        (torch.zeros(2, dtype=torch.bool), torch.tensor([False, True])),
        (torch.zeros(2, dtype=torch.complex64), torch.tensor([0, 1j], dtype=torch.complex64)),
        (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float16)),
        ({"scale": torch.ones(1), "steps": 1}, {"scale": torch.ones(1), "steps": 2}),
        ({"scale": torch.ones(1)}, {"scale": torch.zeros(1)}),
        (io.BytesIO(b"1"), io.BytesIO(b"2")),
        (b"1", b"2"),
    ],
)
def test_a_digest_tells_values_apart(one, other):
    assert digest(one) == digest(copy.deepcopy(one)) != digest(other)


def test_an_axis_whose_ranks_are_combined_has_equal_values_afterwards():
    with pytest.raises(ValueError, match="tp is in partial_grad and not in replicated_over"):
        BufferPlacement("max", Placement((), None, partial_grad=("tp",)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_buffers_of_the_page_follow_the_tokens_of_all_ranks(sequence_parallel: bool):
    """docs/adding_a_model.md: tensor-parallel ranks have other tokens under sequence parallelism, and else the same."""
    names = names_of_block("adding_a_model.md", "class BalancedScale")
    tokens = torch.randn(8, 2, 4, dtype=torch.float64)  # [s, b, h]

    def buffers(mesh: Mesh) -> tuple[float, int, float]:
        tp, dp = mesh["tp"], mesh.samples
        context = LayerContext.from_mesh(mesh, torch.float64, sequence_parallel=sequence_parallel and tp.size > 1)
        module = names["BalancedScale"](12, context)  # tokens; there are 16
        sync = BufferSync(module, mesh)
        x = tokens.chunk(dp.size, 1)[dp.rank]
        if context.tp.sequence_parallel:
            x = x.chunk(tp.size)[tp.rank]
        sync.begin_step()
        module(x)
        counted = int(module.tokens)
        sync.end_step()
        return float(module.average), counted, float(module.bias)

    (expected,) = run_ranks({}, buffers)
    found = run_ranks({"tp": 2, "dp": 2}, buffers)
    ranks_of_a_sample = 2 if sequence_parallel else 1
    assert {of_rank[1] for of_rank in found} == {expected[1] // 2 // ranks_of_a_sample}
    for of_rank in found:
        assert of_rank[0] == pytest.approx(expected[0], rel=1e-12) and of_rank[2] == expected[2] < 0
