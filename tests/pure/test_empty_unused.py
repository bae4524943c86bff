"""--empty-unused-memory-level: what the C library is told, and when an accelerator is asked."""

import pytest
import torch

from megatron.core import device
from megatron.core.device import Device


@pytest.mark.parametrize(("level", "threshold"), [(0, 2**31 - 1), (1, 2**20), (2, 2**17)])
def test_a_cpu_keeps_freed_blocks_below_a_size(level: int, threshold: int, monkeypatch):
    told = []
    monkeypatch.setattr(device, "set_malloc", told.append)
    Device("cpu").prepare(bf16=False, empty_level=level)
    assert told == [threshold]


def test_what_stays_for_the_run_goes_back_when_freed_also_after_an_error(monkeypatch):
    told = []
    monkeypatch.setattr(device, "set_malloc", told.append)
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
