"""A whole training run on an accelerator that is not there: shapes and devices only, and what would wait for the device.

    python tests/campaigns/stand_in.py --ranks 4 --rank 1 -- flags of pretrain_gpt.py

torch is given a device "npu" that computes nothing: its tensors have shapes, types and a device (`FakeTensorMode`), and an operator
whose inputs lie on two devices is an error, as on a GPU. The other ranks of a job are silent (torch's "fake" back end). Every
tensor handed to a collective must lie on the device and be contiguous, as NCCL asks. Printed are the places where the host
waits for the device (a number read, a copy that is not asynchronous), with how often in a step: a process of its own, since
a device cannot be taken back.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

import numpy as np
import torch
import torch.distributed as dist
import whole_run
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from megatron.core import parallel_state
from megatron.core.offload import host_and_file_stores
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE
from megatron.training import trainer, training

ROOT = Path(__file__).resolve().parents[2]
NAME, STEPS = "npu", 2


class _Event:
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None:
        note_wait("event")

    def query(self) -> bool:
        return True


class _Stream:
    """Nothing runs, so nothing waits; that the host does not is what counts."""

    def __init__(self, device: Any = None):
        self.device = device

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        note_wait("stream")


class Accelerator(_DummyBackendModule):
    """The module `torch.npu`."""

    Stream, Event = _Stream, _Event

    def set_device(self, device: Any) -> None: ...
    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def synchronize(self, device: Any = None) -> None:
        note_wait("device")

    def get_device_name(self, device: Any = None) -> str:
        return "stand-in"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=2**40)

    def manual_seed(self, seed: int) -> None: ...
    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...
    def max_memory_allocated(self, device: Any = None) -> int:
        return 0

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: Any = None) -> None: ...


waits: Counter[str] = Counter()
steps = 0


def note_wait(what: str) -> None:
    """Remember where in our code the host waits, if that is inside a step and not in its report."""
    if steps < 2:  # the first one makes things
        return
    for frame in reversed(traceback.extract_stack()):
        name = frame.filename
        if name.startswith(str(ROOT / "megatron")):
            place = f"{Path(name).relative_to(ROOT / 'megatron')} {frame.name}: {what}"
            if not place.startswith("training/memory/log_measured_beside_predicted_memory.py"):
                waits[place] += 1
            return


class Waits(TorchDispatchMode):
    """Gives numbers to who reads them, and notes that; and copies between host and device that are not asynchronous, as those are
    only that say so and whose memory on the host is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].device.type == NAME:
                note_wait("number read")
            return {torch.bool: True, torch.int64: 0}.get(args[0].dtype, 1.0)
        if func is torch.ops.aten._pin_memory.default:
            return args[0] if self._is_pinned(args[0]) else self._pin(torch.empty_like(args[0]))
        if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
            assert args[5].is_contiguous(), "CUDA's flash backward reads log sums without their strides"
        result = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._pin(result)
        if func is torch.ops.aten._to_copy.default:
            self._copied(args[0], result, kwargs.get("non_blocking", False))
        elif func is torch.ops.aten.copy_.default:
            self._copied(args[1], args[0], len(args) > 2 and args[2])
        return result

    def _pin(self, x: torch.Tensor) -> torch.Tensor:
        self.pinned.append(x.untyped_storage())
        return x

    def _copied(self, source: torch.Tensor, target: torch.Tensor, says_so: bool) -> None:
        there = [x for x in (source, target) if x.device.type == "cpu"]
        if len(there) != 1 or not source.numel():
            return
        if not (says_so and self._is_pinned(there[0])):
            note_wait(f"copy {source.device.type} to {target.device.type}")

    def _is_pinned(self, x: torch.Tensor) -> bool:
        return any(x.untyped_storage()._cdata == one._cdata for one in self.pinned)


def strict(method: Any) -> Any:
    """A method of `TorchGroup` that checks what NCCL checks."""

    def checked(self: Any, *args: Any, **options: Any) -> Any:
        for x in args:
            if isinstance(x, torch.Tensor):
                assert x.device.type == NAME, f"{method.__name__} of a tensor on {x.device}"
                assert x.is_contiguous(), f"{method.__name__} of a tensor with strides {x.stride()}"
                assert x.dtype is not torch.int16, f"{method.__name__} of int16, which NCCL has not"
        return method(self, *args, **options)

    return checked


class AtOnce:
    """In place of a thread of its own, where the modes of this one would not be."""

    def __init__(self, *_: Any, **__: Any): ...
    def submit(self, call: Any, *args: Any) -> Future:
        done: Future = Future()
        done.set_result(call(*args))
        return done

    def shutdown(self, **_: Any) -> None: ...


def reraise(error: BaseException, farewell: str | None = None) -> None:
    raise error


def count_steps(step: Any) -> Any:
    def counted(*args: Any, **options: Any) -> Any:
        global steps
        steps += 1
        return step(*args, **options)

    return counted


def then_moved(make: Any) -> Any:
    """`torch.tensor` in two steps, as it would ask the device for memory behind the modes' backs."""

    def made(data: Any, device: Any = None, **how: Any) -> torch.Tensor:
        return make(data, **how) if device is None else make(data, **how).to(device)

    return made


class Case(NamedTuple):
    """A run of one rank; the last words are flags of pretrain_gpt.py."""

    ranks: int
    rank: int
    flags: str


# A test runs the first four; all take a quarter of a minute.
CASES = [
    Case(
        4,
        1,
        "--bf16 --zero-stage 3 --overlap-grad-reduce --overlap-param-gather --hidden-dropout 0.1 --attention-dropout 0.1",
    ),
    Case(
        4,
        0,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --global-batch-size 8 --fp16",
    ),
    Case(
        4,
        1,
        "--bf16 --zero-stage 3 --offload-params --optimizer-cpu-offload --num-distributed-optimizer-instances 2 "
        "--outer-dp-sharding-strategy optim --cpu-offloading-num-layers 2 --min-offloaded-tensor-size 1",
    ),
    Case(2, 1, "--bf16 --context-parallel-size 2 --cp-comm-type all_gather"),
    Case(
        1,
        0,
        "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --position-embedding-type rope",
    ),
    Case(4, 0, "--bf16 --zero-stage 1 --overlap-grad-reduce --overlap-param-gather --grad-reduce-in-bf16"),
    Case(4, 3, "--bf16 --zero-stage 2 --main-grads-dtype bf16 --reduce-scatter-with-fp32-accumulation --optimizer sgd"),
    Case(
        4,
        2,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 --bf16 --reuse-fp32-param",
    ),
    Case(
        2,
        1,
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4",
    ),
    Case(
        4, 3, "--pipeline-model-parallel-size 4 --num-layers 4 --pipeline-schedule zb-h1 --global-batch-size 16 --bf16"
    ),
    Case(
        4,
        1,
        "--bf16 --zero-stage 3 --offload-params --offload-dir DIR --overlap-param-gather --cpu-offloading-num-layers 1",
    ),
]
COMMON = (
    f"--device {NAME} --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    f"--seq-length 64 --micro-batch-size 2 --lr 1e-3 --train-iters {STEPS} --num-workers 0 --eval-iters 0 --log-interval 1000 "
    "--hidden-dropout 0 --attention-dropout 0"
)


def run(case: Case) -> Counter[str]:
    """The waits of a step, by where in our code."""
    global steps
    waits.clear()
    steps = 0
    if case.ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.ranks)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), FAKE, Waits():
            whole_run.run([*COMMON.split(), *case.flags.replace("DIR", folder).split()], tiny=[])
    finally:
        if case.ranks > 1:
            dist.destroy_process_group()
    assert steps == STEPS, f"{steps} steps were counted"
    return Counter({place: count / (steps - 1) for place, count in waits.items()})


def stand_in() -> None:
    """Make the device, and let everything that would look at values do without."""
    global FAKE
    _setup_privateuseone_for_python_backend(NAME, backend_module=Accelerator())
    FAKE = FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensor.constant = property(lambda self: None, lambda self, value: None)
    FakeTensorConverter.add_constant_storage_mapping = lambda self, x: None
    FakeTensor.numpy = lambda self: np.zeros(tuple(self.shape), str(self.dtype).removeprefix("torch."))
    FakeTensor.data_ptr = lambda self: id(self)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"):
        setattr(collectives.TorchGroup, name, strict(getattr(collectives.TorchGroup, name)))
    parallel_state.agreement_axis = lambda: ALONE
    collectives.broadcast_text = lambda text, axis, device="cpu", source=0: text or "null"
    collectives.all_gather_texts = lambda text, axis, device="cpu": [
        text if axis.name != "pp" or i == axis.rank else "{}" for i in range(axis.size)
    ]
    torch.tensor = then_moved(torch.tensor)
    torch.from_numpy = lambda array: torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)))
    torch.frombuffer = lambda data, dtype: torch.empty(len(data), dtype=dtype)
    torch.Generator = lambda device=None, make=torch.Generator: make()
    torch.Event = lambda device=None: _Event()
    host_and_file_stores.ThreadPoolExecutor = AtOnce
    training.failure_shutdown.report = reraise
    trainer.train_step = count_steps(trainer.train_step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--cases", type=int, default=None, help="how many of the cases to run (default: all)")
    parser.add_argument("flags", nargs="*", help="of one run, behind --; without any, the cases of this file")
    own = parser.parse_args()
    stand_in()
    for case in [Case(own.ranks, own.rank, " ".join(own.flags))] if own.flags else CASES[: own.cases]:
        print(json.dumps([*case, run(case)]), flush=True)


if __name__ == "__main__":
    main()
