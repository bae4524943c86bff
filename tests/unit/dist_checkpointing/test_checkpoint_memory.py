"""What a save and a load take beside the tensors: one bounded buffer, and one box, or none where boxes are read in place."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_checkpoints import one

from megatron.core.dist_checkpointing import open_checkpoint, save_sharded
from megatron.core.parallel.rank_grid import ALONE

MIB = 1 << 20
BOX, BOXES, CHUNK = 8 * MIB, 4, MIB
MARGIN = 3 * MIB  # of the interpreter: the manifest, a thread's stack


def grown(work):
    """Bytes by which this process has grown at most while it worked: the least of three times, as its other threads grow too."""
    return min(_grown(work) for _ in range(3))


def _grown(work):
    ctypes.CDLL(None).malloc_trim(0)  # a heap that is free would hide what it takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def resident(field):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


@pytest.mark.full
def test_a_save_takes_a_bounded_buffer_and_a_load_one_box(tmp_path):
    """In a process of its own: what other tests leave in the heap is taken anew after it was given back, and would count."""
    paths = os.pathsep.join(
        str(Path(__file__).parents[3] / folder) for folder in ("", "tests/support", "tests/campaigns")
    )
    ran = subprocess.run(
        [sys.executable, __file__, tmp_path], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def measure(folder: Path) -> None:
    os.fsync, save_sharded._CHUNK = (lambda handle: None), CHUNK
    values = torch.arange(BOX // 4, dtype=torch.float32).view(1024, -1)
    # Of columns that lie apart, so that no view of the tensor will do.
    tensors = {f"x{n}": one((values + n).t()) for n in range(BOXES)}
    save_sharded.save_checkpoint(folder, 0, {"x0": tensors["x0"]}, {}, ALONE)  # the code itself is memory too
    open_checkpoint(folder).read_into({"x0": one(torch.zeros(tensors["x0"].tensor.shape))})
    assert grown(lambda: save_sharded.save_checkpoint(folder, 1, tensors, {}, ALONE)) < CHUNK + MARGIN
    for turned, in_place, most in ((False, False, BOX), (False, True, 0), (True, True, BOX)):
        shape = tensors["x0"].tensor.shape
        targets = {name: one(torch.zeros(shape[::-1]).t() if turned else torch.zeros(shape)) for name in tensors}
        assert most // 2 <= grown(lambda now=(targets, in_place): load(folder, *now)) < most + MARGIN
        assert all(targets[name].tensor.equal(tensors[name].tensor) for name in tensors)


def load(folder, targets, in_place):
    open_checkpoint(folder).read_into(targets, in_place=in_place)


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
