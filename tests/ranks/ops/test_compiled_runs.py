"""Runs with --compile regions beside the same runs without: one setting of each kind.

What is compiled in a run is called as it is written here: test_compiled.py compiles it, and tests/campaigns/parity_sweep.py --compile
regions compiles it in the product of layouts.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from compiled_cases import GELU, RUNS, as_written
from local_ranks import run_ranks
from measured_memory import SMALL, check
from said import tells
from tiny_run import Layout, TinyTrainer, assert_equal, run

from megatron.core.ops.compile import compiled_region
from megatron.core.ops.compile.compile_config import CompileConfig
from megatron.core.ops.compile.compiled_region import compile_cost, compile_if_all_ranks_can, compiles, why_not
from megatron.core.optimizer.loss_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh
from megatron.training.step import StepResult
from tools.estimating.measure import measure

# Adam divides a gradient as small as its epsilon by little more than that epsilon: at 1e-8 an element whose gradients differ by 4e-19 has
# weights that differ by 6e-14. A larger one keeps the weights as close as the gradients.
OPTIMIZER = OptimizerConfig(clip_grad=0.5, weight_decay=0.1, adam_eps=1e-4)


@pytest.mark.usefixtures(as_written.__name__)
@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_regions_is_the_eager_run(name: str):
    model, layout, subject = RUNS[name]
    eager, got = (
        run(replace(model, compile=choice), layout, steps=1, global_batch=8, optimizer=OPTIMIZER, subject=subject)
        for choice in ("off", "regions")
    )
    assert_equal(got, eager, 1e-12)


@pytest.mark.usefixtures(as_written.__name__)
@pytest.mark.full
def test_a_loss_scale_is_lowered_alike():
    """float16: the first step overflows and is skipped, later ones agree as far as float16 does."""

    def steps(mesh: Mesh, choice: str) -> list[StepResult]:
        scaler = DynamicGradScaler(2.0**20, minimum=1.0, window=1000, hysteresis=1)
        model = replace(GELU, fp64=False, fp16=True, compile=choice)
        tiny = TinyTrainer(mesh, model, Layout(), global_batch=4, scaler=scaler)
        return [tiny.step(i, check_finite=False) for i in range(12)]

    eager, got = (run_ranks({}, lambda mesh, choice=choice: steps(mesh, choice))[0] for choice in ("off", "regions"))
    assert [(x.skipped, x.loss_scale) for x in got] == [(x.skipped, x.loss_scale) for x in eager]
    assert eager[0].skipped and not eager[-1].skipped
    taken = [i for i, step in enumerate(eager) if not step.skipped]
    assert [got[i].grad_norm for i in taken] == pytest.approx([eager[i].grad_norm for i in taken], rel=5e-3)
    assert [got[i].losses["lm loss"] for i in taken] == pytest.approx(
        [eager[i].losses["lm loss"] for i in taken], rel=2e-3
    )


@pytest.mark.usefixtures(as_written.__name__)
# ---------------------------------------------------------------- memory
@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16 --attention-dropout 0 --recompute-granularity selective --recompute-modules mlp layernorm",
        "--world-size 4 --rank 1 --tensor-model-parallel-size 2 --sequence-parallel --bf16 --zero-stage 3 --swiglu "
        "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention --num-query-groups 2",
        "--model bert --bf16 --attention-dropout 0",
    ],
)
def test_memory_with_regions_is_predicted(flags: str):
    """What a region saves is the same for every backend, since it is declared."""
    got = measure(f"{SMALL} {flags} --compile regions".split())
    check(got.predicted, got.bytes, got.total, got.in_file)


# ---------------------------------------------------------------- no compiler
@pytest.fixture
def none_decided(monkeypatch: pytest.MonkeyPatch):
    """Nothing is known of compilers, before and after."""
    monkeypatch.setattr(compiled_region, "_lacking", set())
    why_not.cache_clear()
    yield
    why_not.cache_clear()


@pytest.mark.parametrize("lacks", ["CXX", "PATH"])
def test_without_a_compiler_a_run_says_so_and_goes_on_eager(
    lacks: str, none_decided, said, monkeypatch, tmp_path: Path
):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(lacks, str(tmp_path / "not-there"))
    before = compile_cost().programs
    lines = said("--compile regions --train-iters 2").splitlines()
    named = {"CXX": tmp_path / "not-there", "PATH": "g++ or clang++"}[lacks]
    reason = f"there is no C++ compiler {named}; CXX may name another"
    assert sum(line.strip() == f"--compile regions is off: {reason}" for line in lines) == 1
    assert sum("iteration" in line and "lm loss" in line for line in lines) == 2
    assert compile_cost().programs == before


@pytest.fixture
def unusable(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A folder below a file; the temporary folder is one of the test's."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    yield tmp_path / "file" / "cache"


def no_home(*_):
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("how", ["TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "no home", "noexec"])
def test_a_cache_folder_that_cannot_be_used_is_replaced_at_the_start(
    how: str, unusable: Path, tmp_path: Path, monkeypatch
):
    if how == "no home":
        monkeypatch.setattr(Path, "home", no_home)
    elif how == "noexec":
        flags = SimpleNamespace(f_flag=os.ST_NOEXEC)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "noexec"))
        monkeypatch.setattr(
            os, "statvfs", lambda path: flags if Path(path).name == "noexec" else SimpleNamespace(f_flag=0)
        )
    else:
        monkeypatch.setenv(how, str(unusable))
    config = CompileConfig("regions")
    monkeypatch.setattr(compiled_region, "why_not", lambda kind: None)
    (line,) = run_ranks({}, lambda mesh: compile_if_all_ranks_can(config, "cpu", mesh["world"]))[0]
    instead = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert instead.is_dir() and instead.is_relative_to(tmp_path / "tmp") and str(instead) in line
    assert instead.parent.stat().st_mode & 0o077 == 0 or how == "no home"
    if how != "no home":
        assert "cannot be used" in line and "TORCHINDUCTOR_CACHE_DIR" in line


def test_a_temporary_folder_of_somebody_else_is_not_taken(unusable: Path, tmp_path: Path, monkeypatch):
    """Code is loaded from it: neither one that others may write to, nor a link."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(unusable))
    name = f"megatron-anywhere-{os.getuid()}"
    for kind in ("open to all", "a link"):
        place = tmp_path / kind
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        if kind == "a link":
            (place / name).symlink_to(tmp_path / "tmp")
        else:
            (place / name).mkdir()
            (place / name).chmod(0o777)
        taken = compiled_region.own_temporary_folder()
        assert taken.parent == place and taken.name != name and taken.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_any_folder_for_compiled_code_all_stay_eager(ranks: int, unusable: Path, none_decided, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(unusable))
    monkeypatch.setattr(compiled_region, "why_no_cache", lambda folder: "no space left on device")
    monkeypatch.setattr(compiled_region, "why_not", lambda kind: None)
    config = CompileConfig("regions")
    said = run_ranks({"dp": ranks}, lambda mesh: compile_if_all_ranks_can(config, "cpu", mesh["world"]))
    for (line,) in said:
        assert tells(line, f"--compile regions is off: {unusable} no space left on device TORCHINDUCTOR_CACHE_DIR")
    assert not compiles(config, "cpu")


def test_what_one_rank_lacks_keeps_all_eager(none_decided, monkeypatch):
    config = CompileConfig("regions")
    asked = iter(["Python's headers are not installed (python3-dev)", None, None])
    monkeypatch.setattr(compiled_region, "why_not", lambda kind: next(asked))
    said = run_ranks({"dp": 3}, lambda mesh: compile_if_all_ranks_can(config, "cpu", mesh["world"]))
    assert sorted(line.partition(": ")[2] for (line,) in said) == [
        "Python's headers are not installed (python3-dev)",
        *["another rank lacks what it needs"] * 2,
    ]
    monkeypatch.setattr(compiled_region, "why_not", lambda kind: None)
    assert not compiles(config, "cpu")
