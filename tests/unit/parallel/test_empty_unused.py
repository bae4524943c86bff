"""--empty-unused-memory-level: what the C library is told, and when an accelerator is asked."""

import gc
import mmap
import os
import subprocess
import sys

import pytest
import torch

from megatron.core.parallel import accelerator as device
from megatron.core.parallel.accelerator import Device


@pytest.mark.parametrize(("level", "threshold"), [(0, 2**31 - 1), (1, 2**20), (2, 2**17)])
def test_a_cpu_keeps_freed_blocks_below_a_size(level: int, threshold: int, monkeypatch):
    told = []
    monkeypatch.setattr(device, "let_malloc_keep_freed_blocks", told.append)
    Device("cpu").prepare(bf16=False, empty_level=level)
    assert told == [threshold]


def test_what_stays_for_the_run_goes_back_when_freed_also_after_an_error(monkeypatch):
    told = []
    monkeypatch.setattr(device, "let_malloc_keep_freed_blocks", told.append)
    cpu = Device("cpu")
    with cpu.memory_that_stays():
        pass
    assert not told  # nothing was prepared
    cpu.prepare(bf16=False, empty_level=1)
    with pytest.raises(MemoryError), cpu.memory_that_stays():
        raise MemoryError
    assert told == [2**20, 2**17, 2**20]


def test_an_accelerator_is_asked_and_a_cpu_is_not():
    class Module:
        emptied = 0

        def empty_cache(self) -> None:
            self.emptied += 1

    cpu = Device("cpu")
    cpu.empty_unused()
    cpu.module = module = Module()  # as if it had one
    cpu.empty_unused()
    assert module.emptied == 1 and torch.device("cpu") == cpu.torch_device


def test_memory_goes_back_once_steps_hold_a_twelfth_more_than_the_first_one(monkeypatch):
    """After a return the next step says anew what is usual: what steps need more of is not given back again and again."""
    returned, held = [], iter([100, 108, 107, 109, 140, 150, 151, 152])
    monkeypatch.setattr(device, "_anonymous_bytes", lambda: next(held))
    monkeypatch.setattr(
        device, "_glibc", lambda: type("C", (), {"malloc_trim": lambda self, pad: returned.append(pad)})()
    )
    cpu, seen = Device("cpu"), []
    for _ in range(8):
        cpu.return_freed_if_grown()
        seen.append(len(returned))
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2]


def test_anonymous_memory_is_no_files(tmp_path):
    (tmp_path / "file").write_bytes(bytes(2**24))
    mapped = torch.from_file(str(tmp_path / "file"), size=2**24, dtype=torch.uint8, shared=True)
    gc.collect()
    before = device._anonymous_bytes()
    if before is None:
        pytest.skip("no /proc/self/statm")
    # the largest, not the sum: that is of int64 copies, whose memory an earlier test may have told the C library to keep
    assert mapped.max() == 0 and device._anonymous_bytes() - before < 2**23
    with mmap.mmap(
        -1, 2**24, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as own:  # a tensor may have pages that are there
        for page in range(0, len(own), 4096):
            own[page] = 1
        assert device._anonymous_bytes() - before > 2**23


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="torch aligns so on Linux alone")
def test_large_tensors_of_one_of_several_ranks_begin_with_a_page():
    """In a process of its own, since torch asks once. A user's choice stays."""
    code = (
        "import sys, torch; from megatron.core.parallel.accelerator import Device; Device('cpu').prepare(bf16=False, ranks=2); "
        "sys.exit(any(torch.empty(2**19 + 1000 * i).data_ptr() % 4096 for i in range(9)))"
    )
    choices = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    codes = [
        subprocess.run([sys.executable, "-c", code], env=choices | more, check=False).returncode for more in ({}, OFF)
    ]
    assert codes == [0, 1]


OFF = {"THP_MEM_ALLOC_ENABLE": "0"}
