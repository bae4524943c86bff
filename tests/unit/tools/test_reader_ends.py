"""Tools whose reader ends first, as with `| head`: exit code 141 and not a word, as of programs that SIGPIPE ends."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import generate
from tools.trained_model import run_on_ranks

ROOT = Path(__file__).parents[3]
TOOLS = sorted(path for path in (ROOT / "tools").glob("*.py") if 'if __name__ == "__main__"' in path.read_text())
HOSTS = ["-m", "megatron.core.parallel.hostfile_to_torchrun", "hosts"]
SCHEDULE = ["tools/plot_schedule.py"]


def ended(words: list[str], out: int, folder: Path) -> tuple[int, str]:
    """(exit code, standard error) of a program that prints to `out`, which it is given alone."""
    (folder / "hosts").write_text("a slots=2\nb slots=2\n")
    words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *words], stdout=out, stderr=subprocess.PIPE, cwd=folder, env=environment, text=True
    )
    os.close(out)
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        SCHEDULE,
        [*SCHEDULE, "--help"],
        HOSTS,
        ["tools/inspect_dataset.py", "--help"],
        pytest.param(["examples/walkthrough.py", "zero"], marks=pytest.mark.full),
        pytest.param(["-m", "megatron.report"], marks=pytest.mark.full),
        pytest.param(["tools/estimate_memory.py", "--help"], marks=pytest.mark.full),
        pytest.param(["pretrain_gpt.py", "--help"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_a_reader_that_ends_first_ends_a_tool_without_a_word(words: list[str], tmp_path):
    ear, mouth = os.pipe()
    os.close(ear)
    assert ended(words, mouth, tmp_path) == (141, "")


@pytest.mark.full
@pytest.mark.parametrize("words", [SCHEDULE, HOSTS, [*SCHEDULE, "--help"]], ids=" ".join)
def test_an_answer_that_cannot_be_written_for_another_reason_is_an_error_of_one_line(words: list[str], tmp_path):
    full = os.open("/dev/full", os.O_WRONLY)
    assert ended(words, full, tmp_path) == (1, "standard output cannot be written: No space left on device\n")


def test_texts_that_cannot_be_written_are_told_as_such(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def run(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settings = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(distributed_timeout_minutes=1)))
    monkeypatch.setattr(generate, "read_settings", lambda _: settings)
    monkeypatch.setattr(run_on_ranks, "answers_failed", lambda: True)
    monkeypatch.setattr(generate, "run", run)
    assert generate.main([]) == 1
    assert capsys.readouterr().err == "generate: standard output cannot be written: No space left on device\n"


def test_an_error_of_a_tool_keeps_its_exit_code_where_standard_error_is_lost(tmp_path):
    full = os.open("/dev/full", os.O_WRONLY)
    words = [sys.executable, str(ROOT / "tools/plot_schedule.py"), "--schedule", "none"]
    assert subprocess.run(words, stdout=subprocess.DEVNULL, stderr=full, cwd=tmp_path, timeout=60).returncode == 2
    os.close(full)


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.stem)
def test_every_tool_ends_by_one_of_the_ways_that_know_of_a_reader(path: Path):
    text = path.read_text()
    assert any(way in text for way in ("run_tool(", "exit_status(", "until_reader_ends(main)"))
