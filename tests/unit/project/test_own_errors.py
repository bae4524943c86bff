"""Errors of our own are never told as the user's: they keep their type and their traceback."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from said import tells

from megatron.core.base import user_error_and_torchrun_error_file as errors
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.index_map import parse_split
from megatron.core.optimizer.loss_scaler import problems_of_scaler
from megatron.core.optimizer.lr_wd_schedule_by_samples import LearningRateSchedule, WeightDecaySchedule, read_schedule
from megatron.core.pipeline_parallel import loss_func_results
from megatron.core.pipeline_parallel.schedule import registry, simulate
from megatron.deepspeed import ds_config_scheduler
from megatron.training.arguments import validation
from megatron.training.initialize import as_config_error
from tools.errors import exit_status


def _unpack() -> tuple[int, int]:
    first, second = [1]
    return first, second


BUGS = {
    "unpacking": _unpack,
    "max of nothing": lambda: max([]),
    "no number": lambda: int("x"),
    "not in a list": lambda: [1].index(2),
    "zip": lambda: list(zip([1], [], strict=True)),
    "a root": lambda: math.sqrt(-1),
    "shapes": lambda: np.zeros(2) + np.zeros(3),
    "torch": lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=-1.0),
    "json": lambda: json.loads("{"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_value_error_of_python_or_a_library_is_not_one_of_the_settings(bug: str):
    with pytest.raises(ValueError) as error, as_config_error():
        BUGS[bug]()
    assert not isinstance(error.value, ConfigError)
    with pytest.raises(ValueError):
        exit_status("a_tool", BUGS[bug], "nothing was written")


def _told() -> None:
    raise ValueError("--flag is 1; give 2")


def _told_in_other_words() -> None:
    try:
        _unpack()
    except ValueError as error:
        raise ValueError("--flag is 1; give 2") from error


@pytest.mark.parametrize("tell", [_told, _told_in_other_words])
def test_what_is_raised_for_the_user_is_told_in_a_line(tell, capsys):
    with pytest.raises(ConfigError, match="--flag is 1; give 2"), as_config_error():
        tell()
    assert exit_status("a_tool", tell, "nothing was written") == 1
    assert capsys.readouterr().err == "a_tool: --flag is 1; give 2\n"
    with pytest.raises(ConfigError), as_config_error():
        parse_split("969,x")  # one of the package's own
    assert errors.is_user_error(ValueError("never raised"))


def test_the_package_is_known_also_where_it_lies_among_the_libraries(tmp_path: Path):
    """As after `pip install`: its `raise` is for the user still, and that of a neighbour is not."""
    for name in ("megatron", "neighbour"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "part.py").write_text("def fail():\n    raise ValueError('told')\n")
    base = tmp_path / "megatron" / "core" / "base"
    base.mkdir(parents=True)
    for folder in (base.parent, base):
        (folder / "__init__.py").write_text("")
    (base / "user_error_and_torchrun_error_file.py").write_text(Path(errors.__file__).read_text())
    code = (
        "import sysconfig; sysconfig.get_path = lambda name: {path!r}\n"
        "import importlib; from megatron.core.base.user_error_and_torchrun_error_file import is_user_error\n"
        "for name in ('megatron', 'neighbour'):\n"
        "    try: importlib.import_module(name + '.part').fail()\n"
        "    except ValueError as error: print(is_user_error(error))\n"
    )
    command = [sys.executable, "-c", code.format(path=str(tmp_path))]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env={"PYTHONPATH": "."})
    assert said.stdout.split() == ["True", "False"]


# ---------------------------------------------------------------- what computes with what a user gave


def test_a_bug_in_a_rule_is_no_problem_of_the_settings(monkeypatch):
    class Broken:
        layer_split = property(lambda self: [].index(1))

    with pytest.raises(ValueError, match="not in list"):
        list(validation._layer_problems(Broken()))


def test_a_bug_in_the_check_of_schedules_is_none_of_the_schedule(monkeypatch):
    monkeypatch.setattr(registry, "missing_or_surplus_actions", lambda *sizes: None + 1)
    with pytest.raises(TypeError):
        registry.make_step("1f1b", 2, 4)
    monkeypatch.undo()
    monkeypatch.setattr(simulate, "simulate", lambda schedule: max([]))
    with pytest.raises(ValueError, match=r"^max\("):
        simulate.make_schedule("1f1b", 2, 4)


def test_a_bug_in_a_schedule_of_rates_is_none_of_the_file(monkeypatch):
    optimizer = SimpleNamespace(param_groups=[{"lr": 1.0}])
    asked = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    monkeypatch.setitem(ds_config_scheduler.STEP_SCHEDULES, "WarmupLR", lambda optimizer, warmup_num_steps=1: None + 1)
    with pytest.raises(TypeError):
        ds_config_scheduler.make_schedule(asked, optimizer)
    monkeypatch.undo()
    for params in ({"warmup_num_steps": None}, {"warmup_num_steps": [4]}, {"warmup_max_lr": {}}, {"warmup": 4}):
        with pytest.raises(ConfigError) as error:
            ds_config_scheduler.make_schedule(asked | {"params": params}, optimizer)
        assert tells(error.value, f"WarmupLR {next(iter(params))}")


def test_a_device_that_fails_is_no_loss_of_another_type():
    class Lost:  # a device that fails as values are copied to it
        pass

    with pytest.raises(TypeError, match=r"to\(\)|device"):
        loss_func_results._numbers("num_tokens", torch.ones(1), Lost())
    with pytest.raises(TypeError, match="must be a number or a tensor, not object"):
        loss_func_results._numbers("num_tokens", object(), torch.device("cpu"))


# ---------------------------------------------------------------- what a checkpoint says

RATE = {"lr": 1.0, "min_lr": 0.0, "warmup_init": 0.0, "warmup": 2, "decay": 8, "style": "linear"}
DECAY = {"start": 0.1, "end": 0.1, "style": "linear", "samples": 5}


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        (LearningRateSchedule, {"lr": "x"}, "lr 'x'"),
        (LearningRateSchedule, {"style": "steep"}, "style 'steep'"),
        (LearningRateSchedule, {"decay": 2}, "warmup 2 decay 2"),
        (LearningRateSchedule, {"style": "WSD"}, "wsd_decay None"),
        (LearningRateSchedule, {"warmup_style": "log", "warmup_unit": 0}, "warmup_unit 0"),
        (LearningRateSchedule, {"lr": 1 << 70}, f"lr {1 << 70}"),
        (LearningRateSchedule, {"pace": 1}, "pace unknown"),
        (WeightDecaySchedule, {"samples": 0}, "samples 0"),
        (WeightDecaySchedule, {"start": None}, "start None"),
        (WeightDecaySchedule, {"end": ...}, "end missing"),
    ],
    ids=str,
)
def test_a_schedule_that_no_run_saves_is_refused_before_it_is_asked(kind: type, change: dict, named: str):
    saved = {LearningRateSchedule: RATE, WeightDecaySchedule: DECAY}[kind]
    assert read_schedule(kind, saved, what="rate").at(1) is not None
    changed = {name: value for name, value in (saved | change).items() if value is not ...}
    with pytest.raises(ConfigError) as error:
        read_schedule(kind, changed, what="rate")
    assert tells(error.value, f"checkpoint rate {named}")


def test_a_loss_scale_that_no_run_saves_is_named():
    good = {"scale": 16.0, "growth_tracker": 1, "hysteresis_tracker": -2}
    assert not [*problems_of_scaler(good), *problems_of_scaler({})]
    for name, value in {"scale": 0, "growth_tracker": "1", "hysteresis_tracker": None}.items():
        (problem,) = problems_of_scaler(good | {name: value})
        assert tells(problem, f"grad_scaler/{name} {value}")
