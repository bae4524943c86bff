"""Buffers of a fork's model: what training changes in them is no part of a checkpoint, and each run says so."""

import copy
import io
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from local_ranks import run_ranks
from script_run import trainer_of
from torch import Tensor, nn
from whole_run import TINY

import pretrain_gpt
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.parallel.mesh import Mesh
from megatron.training.checkpointing.unsaved_buffers import digest
from tools import checkpoint_inspect


class WithBuffers(GPTModel):
    """GPT with buffers, of which `changes` does something in each forward."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.register_buffer("constant", torch.arange(4.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.steps = 0

    def changes(self) -> None:
        self.scratch += 1

    def forward(self, *given, **named) -> Tensor:
        if self.training:
            self.changes()
        return super().forward(*given, **named)


class RunningMean(WithBuffers):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.norm = nn.BatchNorm1d(4, affine=False)

    def changes(self) -> None:
        super().changes()
        self.norm(torch.randn(3, 4))


class ReplacedBuffer(WithBuffers):
    """By another tensor, of the same name."""

    def changes(self) -> None:
        self.constant = self.constant.flip(0)


class LaterBuffer(WithBuffers):
    """Nothing when the model is built, a tensor after the first forward."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.register_buffer("codes", None)

    def changes(self) -> None:
        self.codes = torch.ones(3, dtype=torch.bool)


class ExtraState(WithBuffers):
    """State of torch's other kind, which state_dict holds and no tensor is."""

    def changes(self) -> None:
        self.steps += 1

    def get_extra_state(self) -> dict:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict) -> None:
        self.steps = state["steps"]


class OfOneRank(WithBuffers):
    """A count of the second stage's own, which the first rank does not see."""

    def changes(self) -> None:
        if not self.pre_process:
            self.constant[0] += 1


MODELS = {
    RunningMean: ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"],
    ReplacedBuffer: ["constant"],
    LaterBuffer: ["codes"],
    ExtraState: ["_extra_state"],
}


def script_of(model: type[GPTModel]) -> ModuleType:
    """pretrain_gpt.py with another model."""

    def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
        runtime = pretrain_gpt.get_runtime()
        return model(runtime.config.transformer, **runtime.model_parts(pre_process, post_process, vp_stage))

    script = ModuleType("fork")
    vars(script).update(vars(pretrain_gpt) | {"model_provider": model_provider})
    return script


@pytest.fixture
def train(said):
    def run_script(model: type[GPTModel], flags: str) -> str:
        return said(flags, script=script_of(model))

    return run_script


@pytest.fixture
def refuse(refused):
    return lambda model, flags: refused(flags, script=script_of(model))


def lost_in(folder: Path) -> list[str] | None:
    return json.loads((folder / "manifest.json").read_text())["state"].get("lost_buffers")


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_buffers_that_change_are_named_at_a_save_and_refuse_a_resume(model, train, refuse, tmp_path):
    text = train(model, f"--train-iters 1 --save {tmp_path}")
    (start,) = (line for line in text.splitlines() if "buffers that checkpoints do not hold" in line)
    assert start.startswith("WARNING") and "constant" in start and "scratch" not in start
    (at_save,) = (line for line in text.splitlines() if "this save lacks" in line)
    assert at_save.startswith("WARNING") and all(name in at_save for name in MODELS[model])
    assert lost_in(tmp_path / "iter_0000001") == MODELS[model]
    more = f"--train-iters 2 --override-opt_param-scheduler --load {tmp_path}"
    for flags in (more, f"{more} --finetune", more.replace("--load", "--pretrained-checkpoint")):
        message = refuse(model, flags)
        assert "--allow-lost-buffers" in message and all(name in message for name in MODELS[model])
    text = train(model, f"{more} --allow-lost-buffers")
    assert (
        "loaded checkpoint of iteration 1" in text
        and MODELS[model][0] in text.split("start at their initial values")[0]
    )
    assert any(
        MODELS[model][0] in line for line in checkpoint_inspect.summary(checkpoint_inspect.opened(str(tmp_path), None))
    )


def test_buffers_that_stay_as_the_constructor_makes_them_are_lost_to_nobody(train, tmp_path):
    text = train(WithBuffers, f"--train-iters 1 --save {tmp_path}")
    assert text.count("WARNING") == 1 and "this save lacks" not in text
    assert lost_in(tmp_path / "iter_0000001") is None
    text = train(WithBuffers, f"--train-iters 2 --override-opt_param-scheduler --load {tmp_path}")
    assert "loaded checkpoint of iteration 1" in text


class Drawn(WithBuffers):
    """By the constructor, at random."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.register_buffer("projection", torch.randn(4))
        self.register_buffer("order", torch.randperm(64))
        self.register_buffer("of_layout", torch.zeros(4 if self.pre_process and self.post_process else 2))


def test_buffers_that_begin_otherwise_than_in_the_checkpoint_s_run_are_named(train, tmp_path):
    train(Drawn, f"--train-iters 1 --save {tmp_path}")
    more = f"--train-iters 2 --override-opt_param-scheduler --load {tmp_path}"
    assert "do not begin" not in train(Drawn, more)
    (line,) = (line for line in train(Drawn, f"{more} --seed 5").splitlines() if "do not begin" in line)
    assert line.startswith("WARNING") and "order, projection." in line and "--seed" in line


def test_buffers_of_the_layout_are_not_compared_over_layouts(train, tmp_path, capsys):
    """A shape of this rank's own, and values in which ranks differ."""
    flags = "--num-layers 2 --override-opt_param-scheduler"
    train(Drawn, f"{flags} --train-iters 1 --save {tmp_path}")
    flags = " ".join(TINY) + f" {flags} --train-iters 2 --load {tmp_path} --pipeline-model-parallel-size 2"

    def train_rank(mesh: Mesh) -> None:
        with trainer_of(script_of(Drawn), mesh, flags, predicts=False) as trainer:
            trainer._train()

    run_ranks({"pp": 2}, train_rank)
    text = capsys.readouterr().out
    assert "loaded checkpoint of iteration 1" in text and "do not begin" not in text


def test_a_model_without_persistent_buffers_hears_nothing(said):
    assert "buffers" not in said("--train-iters 1")


@pytest.mark.full
def test_every_way_to_save_names_them(train, refuse, tmp_path):
    train(RunningMean, f"--train-iters 1 --async-save --save {tmp_path / 'async'}")
    assert lost_in(tmp_path / "async" / "iter_0000001") == MODELS[RunningMean]
    flags = f"--save {tmp_path / 'copies'} --load {tmp_path / 'copies'} --non-persistent-save-interval 1 "
    flags += f"--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {tmp_path / 'disk'} --train-iters 3"
    with pytest.raises(ZeroDivisionError):
        train(Dying, flags)
    (folder,) = (tmp_path / "disk").glob("*/rank_00000/slot_*/iter_0000001")
    assert lost_in(folder) == MODELS[RunningMean]
    assert "--allow-lost-buffers" in refuse(RunningMean, flags)
    assert "going on from iteration 1" in train(RunningMean, f"{flags} --allow-lost-buffers")


class Dying(RunningMean):
    """Ends the run in the second step."""

    model_name = "RunningMean"

    def changes(self) -> None:
        super().changes()
        self.steps += 1
        assert self.steps < 2 or 1 / 0


def test_a_buffer_of_one_rank_alone_is_named_by_all(tmp_path, capsys):
    flags = " ".join(TINY) + f" --num-layers 2 --train-iters 1 --save {tmp_path} --pipeline-model-parallel-size 2"

    def train_rank(mesh: Mesh) -> None:
        with trainer_of(script_of(OfOneRank), mesh, flags, predicts=False) as trainer:
            trainer._train()

    run_ranks({"pp": 2}, train_rank)
    assert lost_in(tmp_path / "iter_0000001") == ["constant"]


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
