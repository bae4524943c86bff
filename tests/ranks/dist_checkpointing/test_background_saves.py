"""A save beside training: the same files, whatever happens to it told, and nothing of it left when it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from failing_files import failing
from local_ranks import run_ranks
from said import tells
from small_checkpoints import one
from thread_writers import thread_writers
from whole_run import run

from megatron.core.dist_checkpointing import CheckpointError, LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.dist_checkpointing.async_snapshot_to_writer_process import AsyncSaver
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.sharding.boxes import whole

STATE = {"step": 3}


def parts_of(world, value=0.0):
    """Rows of a matrix, a column of one that is not contiguous, a tensor that the first rank writes, one without elements."""
    rows = torch.arange(6.0).view(2, 3) + 10 * world.rank + value
    box = ((2 * world.rank, 2 * world.rank + 2), (0, 3))
    shape = (2 * world.size, 3)
    return {
        "rows": LocalTensor(rows, shape, [(box, whole((2, 3)))], True),
        "half": LocalTensor(rows.t().contiguous().t().bfloat16(), shape, [(box, whole((2, 3)))], True),
        "alike": LocalTensor(torch.ones(5, dtype=torch.int64), (5,), [(whole((5,)), whole((5,)))], world.is_first),
        "nothing": LocalTensor(torch.ones(0, 4), (0, 4), [], world.is_first),
    }


def files_below(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def saved_beside(world, root, *values):
    """Each of `values` saved as an iteration of its own, from 1 up."""
    saves = AsyncSaver(world)
    try:
        for iteration, value in enumerate(values, 1):
            tensors = parts_of(world, value)
            saves.start(root, iteration, tensors, STATE)
            tensors["rows"].tensor.zero_()  # training goes on
            collectives.barrier(world)
            assert saves.finish().iteration == iteration and saves.poll() is None
    finally:
        saves.close()


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_save_beside_training_writes_the_files_of_one_in_its_way(tmp_path, ranks):
    def work(mesh):
        world = mesh["world"]
        for iteration, value in enumerate((0.0, 0.5), 1):
            save_checkpoint(tmp_path / "in its way", iteration, parts_of(world, value), STATE, world)
        saved_beside(world, tmp_path / "beside", 0.0, 0.5)

    run_ranks({"dp": ranks}, work)
    assert files_below(tmp_path / "beside") == files_below(tmp_path / "in its way") != {}


@pytest.mark.full
@pytest.mark.parametrize(
    "how, said", [("ENOSPC", "iter_0000002.partial rank_00001.bin 28"), ("killed", "rank 1 has ended")]
)
def test_a_failed_save_is_told_on_every_rank_and_loses_nothing(tmp_path, how, said):
    """The disk of rank 1 is full, or its writer dies."""
    only = lambda call: call.kind == "sync" and call.name == "iter_0000002.partial/rank_00001.bin"  # noqa: E731

    def work(mesh):
        world = mesh["world"]
        saves = AsyncSaver(world)
        saves.start(tmp_path, 1, parts_of(world), STATE)
        collectives.barrier(world)
        saves.finish()
        saves.start(tmp_path, 2, parts_of(world, 1.0), STATE)
        collectives.barrier(world)
        while True:
            try:
                assert saves.poll() is None
            except (CheckpointError, collectives.PeerError) as error:
                saves.close()
                return str(error)

    with thread_writers(), failing(1, how, only=only, alone=True) as calls:
        told = run_ranks({"dp": 2}, work)
    assert calls.hit
    assert all(any(tells(text, word) for text in told) for word in said.split()), told
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.iteration == 1
    if how == "ENOSPC":
        assert all("iteration 1" in text for text in told)
        assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "latest_checkpointed_iteration.txt"}


def test_a_writer_that_is_killed_is_told_of(tmp_path):
    saves = AsyncSaver(ALONE)
    saves._process.kill()
    saves.start(tmp_path, 1, {"w": one(torch.ones(3))}, {})
    with pytest.raises(CheckpointError, match="-9"):
        saves.finish()
    saves.close()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("sent", [(signal.SIGTERM, signal.SIGINT), (signal.SIGSTOP,)], ids=["signalled", "stopped"])
def test_the_writer_of_a_killed_rank_ends(sent):
    """With all its files open elsewhere: a child of the rank may hold the other end of the socket."""
    script = (
        "import socket, sys, time; from megatron.core.dist_checkpointing.writer_process import start_process\n"
        "from megatron.core.dist_checkpointing.sockets_between_writers import MessageSocket\n"
        "mine, its = socket.socketpair(); writer = start_process(its); line = MessageSocket(mine)\n"
        "line.send({'rank': 0, 'ranks': 1}); line.receive(); print(writer.pid, flush=True); time.sleep(60)"
    )
    rank = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    writer = int(rank.stdout.readline())
    for number in sent:
        os.kill(writer, number)
    assert Path(f"/proc/{writer}").exists()
    rank.kill()
    rank.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{writer}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{writer}").exists()


RUN = "--train-iters 5 --save-interval 2 --save {} --load {}"


def said_by(capsys, flags):
    run(flags)
    return capsys.readouterr().out


@pytest.mark.full
def test_a_run_that_saves_beside_training_goes_on_as_one_that_waits(tmp_path, capsys):
    """To the byte, but for the settings in the manifests; and the lines of its log."""
    for folder, more in (("beside", "--async-save"), ("in its way", "")):
        flags = RUN.format(*[f"'{tmp_path / folder}'"] * 2) + " " + more
        said = said_by(capsys, flags + " --exit-interval 3") + said_by(capsys, flags)
        for iteration in (2, 3, 4, 5):
            assert f"saved checkpoint at iteration {iteration} to {tmp_path / folder}" in said
            assert (f"saving checkpoint of iteration {iteration} beside training, which waited" in said) == bool(more)
    beside, waited = (files_below(tmp_path / folder) for folder in ("beside", "in its way"))
    assert {path: data for path, data in beside.items() if path.suffix != ".json"} == {
        path: data for path, data in waited.items() if path.suffix != ".json"
    }
    assert len(beside) == 9


def test_a_run_whose_save_fails_ends_at_the_next_step(tmp_path, capsys):
    only = lambda call: call.kind == "write" and call.name.startswith("iter_0000004")  # noqa: E731
    with thread_writers(), failing(1, "ENOSPC", only=only), pytest.raises(SystemExit) as stop:
        run(RUN.format(tmp_path, tmp_path).replace("-iters 5", "-iters 500") + " --async-save")
    assert stop.value.code == 1
    assert tells(capsys.readouterr().err, "No space left on device 28 iteration 2")
    assert open_checkpoint(tmp_path).iteration == 2
