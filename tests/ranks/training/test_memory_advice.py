"""Memory that is not there: a state that cannot fit is refused before it is made, and an allocation that failed ends in advice."""

import resource
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from local_ranks import run_ranks
from script_run import trainer_of
from whole_run import run

import pretrain_bert
import pretrain_gpt
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.parallel.mesh import Mesh
from megatron.training import build_model_optimizer_and_data
from megatron.training.global_vars import get_runtime
from megatron.training.memory import memory_check, oom_advice

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --vocab-size 60 --mock-data "
    "--tokenizer-type NullTokenizer --train-iters 1 --lr 0.001 --eval-iters 0 --device cpu "
)


class Fork(GPTModel):
    """A script's own model."""


def fork_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
    return Fork(get_runtime().config.transformer, **get_runtime().model_parts(pre_process, post_process, vp_stage))


def of_fork() -> SimpleNamespace:
    return SimpleNamespace(**vars(pretrain_gpt) | {"model_provider": fork_provider})


SCRIPTS = {"gpt": pretrain_gpt, "bert": pretrain_bert, "fork": of_fork()}


def build_all(mesh: Mesh, name: str, flags: str) -> None:
    with trainer_of(SCRIPTS[name], mesh, TINY + flags):
        pass


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("sizes", "flags"), [({}, ""), ({"tp": 2, "pp": 2}, "")], ids=["one", "tp2-pp2"])
def test_a_state_that_cannot_fit_is_refused_before_it_is_made(name, sizes, flags, monkeypatch):
    """Of all ranks of the machine together: each of four has a quarter, and what they need is what one would."""
    monkeypatch.setattr(memory_check, "free_on_machine", lambda: 300_000)
    monkeypatch.setattr(build_model_optimizer_and_data, "initialize_parameters", None)  # nothing is written
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2" if sizes else ""
    with pytest.raises(Exception, match=r"need .* KiB, and 292.97 KiB are free") as refused:
        run_ranks(sizes, partial(build_all, name=name, flags=f"{layout} {flags}"))
    said = str(refused.value)
    assert f"{4 if sizes else 1} rank(s) need" in said
    assert (
        all(flag in said for flag in ("--offload-dir", "--hidden-size", "--no-check-memory")) and "--bf16" not in said
    )


def test_it_starts_all_the_same_where_that_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(memory_check, "free_on_machine", lambda: 300_000)
    run_ranks({}, partial(build_all, name="gpt", flags="--no-check-memory"))
    assert "WARNING: parameters, gradients and optimizer state do not fit the memory of" in capsys.readouterr().out


def test_a_model_of_175_billion_is_refused_without_being_made(monkeypatch, capsys):
    """Its 2.5 TiB are counted and never touched."""
    monkeypatch.setattr(memory_check, "free_on_machine", lambda: 23 * 2**30)
    monkeypatch.setattr(build_model_optimizer_and_data, "initialize_parameters", None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gpt3 = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51199"
    with pytest.raises(Exception, match=r"need 2\.\d\d TiB, and 23\.00 GiB are free"):
        run_ranks({}, partial(build_all, name="gpt", flags=gpt3))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kB"
    assert "building the model: 174,6" in capsys.readouterr().out


# ---------------------------------------------------------------- an allocation that failed


def test_a_run_that_is_short_of_memory_ends_in_a_few_lines_of_advice(capsys):
    def forward_step(data_iterator, model):
        return pretrain_gpt.forward_step(data_iterator, model), torch.empty(2**60)

    with pytest.raises(SystemExit) as ended:
        run(TINY.split(), tiny=[], forward_step=forward_step)
    said = capsys.readouterr().err
    assert ended.value.code == 1 and len(said.splitlines()) < 8 and "Traceback" not in said
    assert "4194304.00 TiB were asked for at once in forward_step" in said and "test_memory_advice.py" in said
    assert "F0.0" in said and "activations" in said
    assert all(
        flag in said for flag in ("--micro-batch-size below 2", "--seq-length below 16", "--recompute-granularity full")
    )
    assert "--attention" not in said  # its kernel keeps no scores, with dropout or without


def raised(error: BaseException) -> BaseException:
    """As it would come from a step."""
    try:
        raise RuntimeError("a stage failed") from error
    except RuntimeError as wrapped:
        return wrapped


@pytest.mark.full
@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), "memory was asked for"),
        (RuntimeError("std::bad_alloc"), "memory was asked for"),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
            "4.00 KiB were asked",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"), "20.00 GiB were asked"),
    ],
)
def test_every_kind_of_shortage_is_told_of(error: BaseException, asked: str):
    """Of a script's own model too, and before there is one."""

    def tell(mesh: Mesh) -> tuple[str, str]:
        with trainer_of(of_fork(), mesh, TINY) as trainer:
            found = [
                oom_advice.in_words(raised(error), trainer.runtime, model) for model in (trainer.memory.predicted, None)
            ]
            assert all(isinstance(one, oom_advice.OutOfMemory) for one in found)
            return tuple(map(str, found))

    ((built, before),) = run_ranks({}, tell)
    assert asked in built and "--micro-batch-size below 2" in built
    assert asked in before and "--num-layers" in before


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("shape"), ConfigError("no")])
def test_other_errors_stay_what_they_are(error: Exception):
    assert oom_advice.in_words(error, SimpleNamespace()) is error
