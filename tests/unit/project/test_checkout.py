"""A checkout that is not installed works from any folder, and wherever in it a file of the package lies."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=[False, True], ids=["as it is", "moved"])
def name_of(request, tmp_path) -> Callable[[str], str]:
    """Makes a copy of the checkout. The function returns a module's name there, once it has moved it into a deeper folder."""
    checkout = tmp_path / "checkout"
    for folder in ("megatron", "tools"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pretrain_gpt.py", checkout)

    def moved(name: str) -> str:
        source = (checkout / name.replace(".", "/")).with_suffix(".py")
        target = source.parent / "deeper" / "still" / source.name
        target.parent.mkdir(parents=True)
        source.rename(target)
        return ".".join(target.relative_to(checkout).with_suffix("").parts)

    return moved if request.param else lambda name: name


@pytest.fixture
def run(tmp_path) -> Callable[[str], str]:
    """Runs code in another folder with a Python that finds only the checkout's copy, as do the processes that it starts: what
    is installed in editable form is found by a file that Python reads as it starts, unless it starts with -S."""
    python, elsewhere = tmp_path / "python", tmp_path / "elsewhere"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    elsewhere.mkdir()
    libraries = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(libraries)}

    def code_run(code: str, finds_checkout: bool = True) -> str:
        start = f"import sys; sys.executable = {str(python)!r}\n"
        start += f"sys.path.insert(0, {str(tmp_path / 'checkout')!r})\n" if finds_checkout else ""
        command = [python, "-c", start + code]
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with pytest.raises(AssertionError, match="No module named 'megatron'"):
        code_run("import megatron", finds_checkout=False)
    return code_run


@pytest.mark.full
def test_the_process_that_writes_checkpoints_finds_the_package(run, name_of):
    code = f"""
import socket
from {name_of("megatron.core.dist_checkpointing.writer_process")} import start_process
from megatron.core.dist_checkpointing.sockets_between_writers import MessageSocket
mine, its = socket.socketpair()
writer = start_process(its)
its.close()
line = MessageSocket(mine)
line.send({{"rank": 0, "ranks": 1}})
line.receive()
print(line.receive())
line.close()
writer.wait(30)
"""
    assert run(code) == "{'ready': True}\n"


@pytest.mark.full
def test_the_report_names_the_package(run, name_of, tmp_path):
    code = f"from {name_of('megatron.report')} import _system; print(_system()['package'])"
    assert run(code) == f"{tmp_path / 'checkout' / 'megatron'}\n"


def test_a_command_runs_its_program(run, name_of):
    code = f"from {name_of('megatron.console_scripts')} import main; sys.argv[0] = 'bin/megatron-plot-schedule'; main()"
    assert "bubble" in run(code)


@pytest.mark.full
def test_a_tool_finds_the_scripts_of_models(run, name_of):
    code = f"from {name_of('tools.script')} import script_at; print(type(script_at('gpt')).__name__)"
    assert run(code) == "Script\n"
