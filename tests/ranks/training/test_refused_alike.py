"""What only some ranks can know to be wrong, such as settings that one stage's model refuses: all ranks end alike, before the first step."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from local_ranks import run_ranks
from said import tells
from script_run import settings_of, trainer_of

import pretrain_gpt
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.ops.attention.kernels import KERNELS, Kernel
from megatron.core.optimizer import OPTIMIZERS, UpdateRule
from megatron.core.optimizer.param_groups import default_group
from megatron.training.memory import forecast_memory_along_schedule

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 60 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --device cpu --pipeline-model-parallel-size 2 "
)


def ends_of(flags: str, **more) -> list[Exception]:
    """How each of two ranks ends while its trainer is built."""
    script = SimpleNamespace(**vars(pretrain_gpt) | more)

    def work(mesh) -> Exception:
        try:
            with trainer_of(script, mesh, RUN + flags):
                raise AssertionError("it is not refused")
        except (ConfigError, ConnectionError, RuntimeError) as error:
            return error

    return run_ranks({"pp": 2}, work, stages=settings_of(script, RUN + flags)[0].stages)


@pytest.fixture
def never(monkeypatch):
    monkeypatch.setitem(KERNELS, "never", Kernel(lambda *tensors: tensors[0], lambda case: "has no dropout"))
    monkeypatch.setitem(
        OPTIMIZERS, "matrices", UpdateRule(lambda _: print, lambda _: ("momentum",), needs_full_matrix=True)
    )


def test_a_kernel_that_refuses_is_found_before_the_first_step(never):
    ends = ends_of("--attention-backend never")
    assert [type(end) for end in ends] == [ConfigError, ConfigError] and str(ends[0]) == str(ends[1])
    assert tells(ends[0], "--attention-backend never has no dropout")


@pytest.mark.parametrize("predicted", [True, False])
def test_an_optimizer_that_one_stage_refuses_ends_all(never, monkeypatch, predicted: bool):
    def group_of(name: str, placement):
        group = default_group(name, placement)
        return replace(group, optimizer="matrices") if ".layers.1." in name and len(placement.shape) == 2 else group

    if not predicted:
        monkeypatch.setattr(forecast_memory_along_schedule, "dry_run", None)
    ends = ends_of("--zero-stage 2", group_of=group_of)
    for end in ends:
        assert tells(end, "--optimizer matrices --zero-stage 2 --zero-stage 1")
