"""What an accelerator and NCCL ask for that a CPU and gloo forgive, with stand-ins for both."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core import comm, device
from megatron.core.grid import Axis


class Recorder(TorchDispatchMode):
    """The operators that were called, by name, among what else is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


class StreamGroup:
    """Of NCCL: `wait` returns at once, and whoever must know that a call has ended reads its result."""

    def __init__(self, seen: list[str]):
        self.seen = seen

    def all_reduce(self, x: Tensor, op: str) -> "StreamGroup":
        return self

    def wait(self) -> None:
        self.seen.append("wait")


def test_a_barrier_holds_up_the_host_and_not_only_the_device():
    with Recorder() as recorder:
        comm.barrier(Axis("world", (0, 1), 0, StreamGroup(recorder.seen), comm.Ledger()))
    assert recorder.seen[recorder.seen.index("wait") :] == ["wait", "aten::_local_scalar_dense"]


class Failing:
    def __init__(self, error: Exception):
        self.error = error

    def wait(self) -> None:
        raise self.error


DUPLICATE = "NCCL error in: NCCLUtils.cpp:94, invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0"
GONE = "NCCL error in: NCCLUtils.cpp:94, remote process exited\nncclRemoteError: A call failed"


@pytest.mark.parametrize(
    ("error", "is_own"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),
        (torch.distributed.DistBackendError(DUPLICATE), True),
        (torch.distributed.DistBackendError(GONE), False),
        (RuntimeError("[pair.cc:598] Connection closed by peer"), False),
    ],
)
def test_an_error_of_the_own_device_is_not_taken_for_a_lost_rank(error: Exception, is_own: bool):
    with pytest.raises(type(error) if is_own else comm.LostPeerError) as caught:
        comm.TorchWork(Failing(error)).wait()
    assert isinstance(caught.value, comm.LostPeerError) is not is_own


@pytest.mark.parametrize(
    ("said", "holds"),
    [
        ("", "pinned_max_round_threshold_mb:16"),
        ("expandable_segments:True", "expandable_segments:True,pinned_max_round_threshold_mb:16"),
        ("pinned_max_round_threshold_mb:1", "pinned_max_round_threshold_mb:1"),
    ],
)
def test_large_pinned_memory_is_not_rounded_up(said: str, holds: str):
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings(said)
        device.round_no_large_pinned_memory()
        assert torch._C._accelerator_getAllocatorSettings() == holds
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
