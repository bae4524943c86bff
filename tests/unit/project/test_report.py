"""`python -m megatron.report` tells what it finds, and never fails."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from said import tells

from megatron import report

ROOT = Path(report.__file__).parent.parent
DISTRIBUTIONS = {"yaml": "PyYAML"}  # module -> what is installed to have it, where the names differ


@pytest.mark.full
def test_it_runs_as_a_module_and_its_json_is_read_back():
    """In a process, as a user runs it, and with a launcher's variables that are wrong."""
    environment = dict(os.environ, RANK="3", PYTHONPATH=str(ROOT))
    environment.pop("WORLD_SIZE", None)
    done = subprocess.run(
        [sys.executable, "-m", "megatron.report", "--json"], env=environment, capture_output=True, text=True, check=True
    )
    parts = json.loads(done.stdout)
    assert list(parts) == ["system", "packages", "devices", "launcher", "threads", "memory", "disk"]
    assert parts["packages"]["torch"] == importlib.metadata.version("torch")
    assert tells(parts["launcher"]["launcher"], "RANK WORLD_SIZE")
    assert parts["launcher"]["RANK"] == "3"
    assert "gloo" in parts["devices"]["back ends"]
    assert "writable" in parts["disk"]["temporary"]


def test_the_text_names_every_part(capsys):
    assert report.main([]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and sys.executable in printed
    assert re.search(rf"threads of torch +{torch.get_num_threads()}\n", printed)


def test_another_package_of_the_same_name_is_listed(monkeypatch, tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    system = report.collect()["system"]
    assert system["package"] == str(ROOT / "megatron") and system["hidden by it"] == str(tmp_path / "megatron")


def test_a_missing_package_says_what_it_is_for(monkeypatch):
    monkeypatch.setitem(report.PACKAGES, "no-such-package", "nothing at all")
    assert report.collect()["packages"]["no-such-package"] == "missing; for nothing at all"


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_nothing_that_is_broken_makes_it_fail(monkeypatch, capsys, json_flag):
    def broken(*_, **__):
        raise RuntimeError("broken for the test")

    for module, name in (
        (report.importlib, "import_module"),
        (report.shutil, "disk_usage"),
        (report.platform, "platform"),
        (report.importlib.metadata, "version"),
        (report.os, "cpu_count"),
    ):
        monkeypatch.setattr(module, name, broken)
    assert report.main(json_flag) == 0
    assert capsys.readouterr().out.count("RuntimeError: broken for the test") >= 4


def test_every_package_that_the_code_imports_is_reported():
    own = {path.stem for path in (*ROOT.glob("*.py"), *(ROOT / "tools").rglob("*"), *(ROOT / "tests").rglob("*"))}
    imported = {"tensorboard"}  # which torch.utils.tensorboard imports
    for folder in ("megatron", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            imported |= set(re.findall(r"^ *(?:import|from(?= [\w.]+ import)) (\w+)", text, re.M))
            imported |= set(re.findall(r"""(?:import_module|find_spec|optional_package)\(["'](\w+)""", text))
    outside = imported - own - {"megatron", "tools", "tests"} - set(sys.stdlib_module_names)
    assert {"torch", "sentencepiece", "wandb", "yaml"} <= outside
    assert {DISTRIBUTIONS.get(name, name) for name in outside} <= set(report.PACKAGES)
