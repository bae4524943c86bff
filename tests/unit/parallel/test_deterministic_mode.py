"""--deterministic-mode: what torch is told on an accelerator, and the line on a CPU."""

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch
from said import raises_telling, tells

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.accelerator import Device

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def accelerator(monkeypatch) -> Iterator[Device]:
    """A device of this name on a machine that may have none."""
    device = Device("cpu")
    device.name = "cuda"
    monkeypatch.setenv(WORKSPACE, "")  # so that it is unset again after the test
    monkeypatch.delenv(WORKSPACE)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        yield device


def test_a_cpu_is_told_nothing_and_the_log_names_the_flag():
    before = torch.are_deterministic_algorithms_enabled()
    assert tells(Device("cpu").use_deterministic_kernels(), "no effect --deterministic-mode CPU")
    assert torch.are_deterministic_algorithms_enabled() == before


def test_an_accelerator_takes_deterministic_kernels_until_the_run_ends(accelerator: Device):
    note = accelerator.use_deterministic_kernels()
    assert tells(note, "--deterministic-mode NCCL_ALGO")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()  # an operation without such a kernel is an error
    assert os.environ[WORKSPACE] == ":4096:8"
    accelerator.restore()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_end_of_a_run_leaves_what_the_script_had_switched_on(accelerator: Device):
    torch.use_deterministic_algorithms(True)
    accelerator.use_deterministic_kernels()
    accelerator.restore()
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("workspace", [":16:8", ":4096:2"])
def test_a_workspace_that_does_not_repeat_its_sums_is_refused(accelerator: Device, workspace: str, monkeypatch):
    monkeypatch.setenv(WORKSPACE, workspace)
    if workspace == ":16:8":
        accelerator.use_deterministic_kernels()
        return
    with raises_telling(ConfigError, f"--deterministic-mode {WORKSPACE} :4096:8 {workspace}"):
        accelerator.use_deterministic_kernels()
    assert not torch.are_deterministic_algorithms_enabled()
