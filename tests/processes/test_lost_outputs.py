"""Whole runs whose outputs are lost on the way: they save what they would have saved. Processes, because a test has one standard output."""

import json
import os
import pty
import signal
import time
from pathlib import Path
from shlex import split

import pytest
from nursery import born
from processes import PRETRAIN_GPT, _environment

HANGING = str(Path(__file__).with_name("hanging_script.py"))
RUN = split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --make-vocab-size-divisible-by 8 --mock-data --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 31 --micro-batch-size 1 --global-batch-size 2 --device cpu "
    "--log-interval 1 --eval-interval 3 --eval-iters 1 --save-interval 2"
)


def start(folder: Path, flags: str, outs: list[tuple[str, str]], script: str = PRETRAIN_GPT, hang: str = "") -> list:
    """A process a rank. outs: of each, where its standard output and its standard error lead."""
    words = [script, *RUN, *flags.split(), "--save", str(folder / "saved")]
    children = []
    for rank, (out, err) in enumerate(outs):
        environment = _environment(rank, len(outs), 29500 + os.getpid() % 1000, "torchrun")
        environment |= {"HANG": hang} if hang else {}
        children.append(born(words, environment, str(folder), Path(out), Path(err)))
    return children


def codes_of(children: list, seconds: float = 60.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    for child in children:
        child.send_signal(signal.SIGKILL)
    return [child.wait() for child in children]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "saved").glob("iter_*"))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_whose_reader_ends_goes_on_to_its_end(ranks: int, tmp_path):
    """`2>&1 | head -1`: both streams of all ranks lead to one pipe."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    keep = os.open(pipe, os.O_RDWR)  # so that nobody waits in open
    flags = f"--train-iters 6 --heartbeat-file {tmp_path}/heartbeat --metrics-file {tmp_path}/metrics --log-progress"
    children = start(tmp_path, flags, [(pipe, pipe)] * ranks)
    with open(pipe, "rb") as reader:
        assert reader.readline()
        os.close(keep)
    assert codes_of(children) == [0] * ranks
    assert saved(tmp_path) == [2, 4, 6]
    told = json.loads((tmp_path / "heartbeat").read_text())["lost_outputs"]
    assert [text.split(" cannot")[0] for text in told] == ["standard output", "standard error"], told
    records = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [one["why"] for one in records if one["kind"] == "lost output"] == ["Broken pipe"] * 2
    assert [one["iteration"] for one in records if one["kind"] == "interval"] == [1, 2, 3, 4, 5, 6]
    assert ranks > 1 or (tmp_path / "saved" / "progress.txt").read_text().count("Broken pipe") == 2


@pytest.mark.parametrize(
    "flags, hung_up, code, left",
    [
        ("--exit-signal-handler", True, 0, [2, 3]),
        pytest.param("", True, -1, [2], marks=pytest.mark.full),
        pytest.param("", False, 0, [2, 4, 6], marks=pytest.mark.full),  # as under nohup
    ],
)
def test_a_run_whose_terminal_is_lost_saves(flags: str, hung_up: bool, code: int, left: list[int], tmp_path):
    """Every write fails from then on. hung_up: whether SIGHUP comes too, as to the processes whose terminal it is."""
    keeper, terminal = pty.openpty()
    name = os.ttyname(terminal)
    children = start(tmp_path, f"--train-iters 6 {flags}", [(name, name)], HANGING, "0 pause training 3")
    text = b""
    while b"pausing" not in text:
        text += os.read(keeper, 4096)
    os.close(terminal)
    os.close(keeper)
    if hung_up:
        children[0].send_signal(signal.SIGHUP)
    assert codes_of(children) == [code]
    assert saved(tmp_path) == left


@pytest.mark.full
@pytest.mark.parametrize("save", ["", "--async-save"])
def test_a_run_on_a_full_device_goes_on_to_its_end(save: str, tmp_path):
    children = start(tmp_path, f"--train-iters 6 {save}", [("/dev/full", "/dev/full")])
    assert codes_of(children) == [0]
    assert saved(tmp_path) == [2, 4, 6]
