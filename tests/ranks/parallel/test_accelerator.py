"""What an accelerator and NCCL ask for that a CPU and gloo forgive, with stand-ins for both."""

import contextlib
import json
import queue
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.ops.attention.kernels import fused_attention
from megatron.core.optimizer import flat_optimizer
from megatron.core.parallel import accelerator as device, collectives
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.parallel.stage_to_rank import StageMap, loop
from megatron.core.pipeline_parallel.stage_transport import Transport
from megatron.core.tensor_parallel import linear_autograd
from megatron.core.tensor_parallel.cross_entropy import sharded_cross_entropy
from megatron.core.tensor_parallel.random import RngTracker, recomputed_with_states
from megatron.training.fault_tolerance import failure_shutdown
from megatron.training.memory.memory_check import offload_notes


class StreamGroup:
    """Of NCCL: `wait` returns at once, and whoever must know that a call has ended reads its result."""

    def __init__(self, seen: list[str]):
        self.seen = seen

    def all_reduce(self, x: Tensor, op: str) -> "StreamGroup":
        return self

    def wait(self) -> None:
        self.seen.append("wait")


def test_a_barrier_holds_up_the_host_and_not_only_the_device(monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(Tensor, "item", lambda x: seen.append("read"))
    collectives.barrier(Axis("world", (0, 1), 0, StreamGroup(seen), collectives.Ledger()))
    assert seen == ["wait", "read"]


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
    with pytest.raises(type(error) if is_own else collectives.LostPeerError) as caught:
        collectives.TorchGroup(None)._start(lambda group: Failing(error)).wait()
    assert isinstance(caught.value, collectives.LostPeerError) is not is_own


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


class Cards:
    """The module of an accelerator with so many devices."""

    def __init__(self, count: int):
        self.count, self.chosen = count, None

    def device_count(self) -> int:
        return self.count

    def set_device(self, number: int) -> None:
        self.chosen = number

    def current_device(self) -> int:
        return self.chosen


@pytest.mark.parametrize(("count", "local_rank", "chosen"), [(8, 3, 3), (1, 3, 0), (4, 9, 1)])
def test_each_rank_of_a_machine_takes_a_device_of_its_own(monkeypatch, count: int, local_rank: int, chosen: int):
    """One in sight is the launcher's choice; a launcher that does not say the rank on the machine leaves that of the job."""
    cards = Cards(count)
    monkeypatch.setattr(torch, "get_device_module", lambda name: cards)
    assert device.Device("xpu", local_rank).torch_device == torch.device("xpu", chosen)


@pytest.mark.parametrize(("count", "processes", "fits"), [(8, 8, True), (1, 8, True), (4, 5, False), (2, 8, False)])
def test_more_processes_than_devices_are_refused(monkeypatch, count: int, processes: int, fits: bool):
    cards = Cards(count)
    monkeypatch.setattr(torch, "get_device_module", lambda name: cards)
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=rf"(?s){processes}.*{count}"):
        device.Device("xpu").check_number(processes)


@pytest.mark.parametrize("text", ["no device here", ""])
def test_ranks_agree_through_the_store_before_they_have_devices(text: str, monkeypatch):
    store, said = torch.distributed.HashStore(), {}

    def work(rank: int) -> None:
        axis = Axis("world", (0, 1, 2), rank, collectives.StoreGroup(store, rank, 3), collectives.Ledger())
        try:
            with collectives.raise_together(axis):
                if rank == 1:
                    raise ConfigError(text)
        except Exception as error:
            said[rank] = f"{type(error).__name__}: {error}"

    monkeypatch.setattr(collectives.StoreGroup, "_calls", repeat_for_each_thread())
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert said == {1: f"ConfigError: {text}"} | dict.fromkeys((0, 2), f"PeerError: rank 1: {text}")


def repeat_for_each_thread():
    """Counts from 0 in each thread, as in each process of a job."""
    local = threading.local()

    class Counter:
        def __next__(self) -> int:
            local.count = getattr(local, "count", -1) + 1
            return local.count

    return Counter()


@pytest.mark.parametrize("own", [False, True])
def test_a_rank_whose_calls_do_not_end_hears_of_the_failure_of_another(own: bool, capfd):
    store, codes = torch.distributed.HashStore(), queue.Queue()
    listener = failure_shutdown.Listener(store, 2, codes.put, every=0.01)
    time.sleep(0.05)
    assert codes.empty()
    store.set(failure_shutdown._FAILED, f"rank {2 if own else 5} failed")
    if own:
        time.sleep(0.05)
        assert codes.empty()
    else:
        assert codes.get(timeout=5) == 1
    listener.stop()
    assert capfd.readouterr().err == ("" if own else "rank 2: stopping, because rank 5 failed\n")


class Rendezvous:
    """Of NCCL: the first transfer of a pair waits, as it is begun, until the other end begins it too."""

    met: ClassVar[dict] = {}

    def __init__(self, rank: int):
        self.rank = rank

    def send(self, x: Tensor, to: int) -> "Rendezvous":
        pair = frozenset((self.rank, to))
        self.met.setdefault(pair, threading.Barrier(2)).wait(5)
        return self

    def recv(self, x: Tensor, source: int) -> "Rendezvous":
        return self.send(x, source)

    def wait(self) -> None: ...


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("chunks", [1, 2, -1])
def test_pairs_of_stages_connect_in_an_order_that_ends(ranks: int, chunks: int, monkeypatch):
    """chunks: in a loop, or -1 for a V of two."""
    monkeypatch.setattr(Rendezvous, "met", {})
    there = tuple(range(ranks))
    stages = StageMap(there + there[::-1]) if chunks < 0 else loop(ranks, chunks)
    pairs = {frozenset((rank, (rank + 1) % ranks)) for rank in range(ranks - (chunks < 2))}

    def work(rank: int) -> None:
        axis = Axis("pp", tuple(range(ranks)), rank, Rendezvous(rank), collectives.Ledger())
        Transport({"pp_forward": axis, "pp_backward": axis}, ()).connect(stages.neighbours)

    with ThreadPoolExecutor(ranks) as pool:
        for done in [pool.submit(work, rank) for rank in range(ranks)]:
            done.result(20)
    assert set(Rendezvous.met) == pairs


class Widened(TorchDispatchMode):
    """The most elements that one operator is asked to make wider, which torch's reductions do in a copy."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (kwargs or {}).get("dtype") is torch.float64 and isinstance(args[0], Tensor):
            self.elements = max(self.elements, args[0].numel())
        return func(*args, **(kwargs or {}))


class Made(TorchDispatchMode):
    """The most elements of one type that one operator makes room for."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.elements = dtype, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is self.dtype:
            self.elements = max(self.elements, result.untyped_storage().nbytes() // self.dtype.itemsize)
        return result


@pytest.mark.full
def test_the_norm_of_an_accelerators_gradients_makes_no_wide_copy_of_all():
    with Widened() as widened:
        flat_optimizer._sum_of_squares(torch.empty(2**26, device="meta"))
    assert 0 < widened.elements <= 2**24


@pytest.mark.full
def test_the_loss_of_an_accelerator_makes_no_wide_copy_of_all_scores():
    scores = torch.empty(4096, 1, 2**16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    target = torch.empty(4096, 1, dtype=torch.int64, device="meta")
    with Made(torch.float32) as made:
        sharded_cross_entropy(scores, target, ALONE).sum().backward()
    assert 0 < made.elements <= 2**25  # of 2**28 scores


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "masked", "width", "shared"),
    [
        (torch.bfloat16, False, 64, True),
        (torch.bfloat16, True, 64, False),
        (torch.float32, False, 64, False),
        (torch.bfloat16, False, 512, False),
    ],
)
def test_only_flash_attention_is_given_shared_key_heads(dtype, masked, width, shared, monkeypatch):
    q, k = (torch.empty(2, heads, 16, width, dtype=dtype, device="meta") for heads in (8, 2))
    mask = torch.zeros(2, 1, 16, 16, dtype=torch.bool, device="meta") if masked else None
    given = {}

    def attention(q, k, v, **options):
        given.update(options, heads=k.shape[1])
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    fused_attention(q, k, k, mask, None)
    assert (given["heads"], given["enable_gqa"]) == ((2, True) if shared else (8, False))


class CountedDraws:
    """The generator of an accelerator, which torch does not find by tensors of the host."""

    state = 0

    def get_rng_state(self) -> int:
        return self.state

    def set_rng_state(self, state: int) -> None:
        self.state = state


def test_a_recomputed_function_draws_from_the_devices_generator_again():
    tracker, drawn = RngTracker(), []
    generator = tracker.generator = CountedDraws()

    def draw(x: Tensor) -> Tensor:
        generator.state += 1
        drawn.append(generator.state)
        return (x * generator.state).sin()  # whose backward needs what was drawn

    first = recomputed_with_states(draw, tracker, torch.ones(2, requires_grad=True))
    recomputed_with_states(draw, tracker, first).sum().backward()
    assert drawn == [1, 2, 2, 1]
    assert generator.state == 2


@pytest.mark.parametrize(
    ("works", "taken"), [("added", "_addmm_out_dtype"), ("product", "_mm_out_dtype"), ("wrong", "_mm_out_dtype")]
)
def test_a_wide_weight_gradient_is_added_by_what_the_device_can_do(works: str, taken: str, monkeypatch):
    """The CPU has neither kernel: stand-ins with torch's signatures."""

    def addmm(total, a, b, *, out_dtype, beta, out):
        if works == "product":
            raise RuntimeError("no such kernel")
        product = a.to(out_dtype) @ b.to(out_dtype)
        out.copy_(total + product if beta or works == "wrong" else product)

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    find = linear_autograd._accumulate_for.__wrapped__
    accumulate = find(torch.device("cpu"), torch.float32, torch.bfloat16)
    assert accumulate.__name__ == taken
    grad, x = torch.randn(6, 3).bfloat16(), torch.randn(6, 5).bfloat16()
    total = torch.ones(3, 5)
    accumulate(total, grad, x, 1)
    torch.testing.assert_close(total, 1 + (grad.double().t() @ x.double()).float())


class CountedMemory(Cards):
    """An allocator whose most bytes are set by hand."""

    most = 0

    def max_memory_allocated(self) -> int:
        return self.most

    def memory_stats(self) -> dict[str, int]:
        return {"allocated_bytes.all.peak": self.most}

    def reset_peak_memory_stats(self) -> None:
        self.most = 0


def test_the_peak_of_a_step_is_not_that_of_building_the_model(monkeypatch):
    memory = CountedMemory(1)
    monkeypatch.setattr(torch, "get_device_module", lambda name: memory)
    card, memory.most = device.Device("xpu"), 900
    card.restart_peak()
    memory.most = 300
    assert card.recent_peak_bytes() == 300
    assert card.peak_memory_bytes() == card.memory_numbers()["mem-max-allocated-bytes"] == 900


# Where the host of a step may wait: for the norm, for the totals, where it updates state itself for the gradients, and in ZeRO stages 2
# and 3, once its last backward is through, to compare the order of layers.
WAITS = {
    "core/pipeline_parallel/schedules.py share_totals: copy npu to cpu",
    "core/optimizer/flat_optimizer.py grad_norm: number read",
}
OF_STATE_ON_HOST = {
    "core/parallel/accelerator.py finish: event",
    "core/offload/tensor_in_memory_or_file.py start_writing: copy npu to cpu",
}
OF_ORDER = {
    f"core/distributed/zero_collective_order_check.py _compare: {what}" for what in ("copy cpu to npu", "number read")
}


@pytest.mark.full
def test_a_step_computes_on_one_device_and_its_host_waits_where_it_must():
    """On a device that is not there, by the command line: `stand_in.py` says how."""
    command = [sys.executable, str(Path(__file__).parents[2] / "campaigns" / "stand_in.py"), "--cases", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == 4
    for _, _, flags, waits in outcomes:
        found = {place: waits.pop(place, 0) for place in WAITS}
        assert found == dict.fromkeys(WAITS, 1), flags
        also = OF_ORDER if re.search("--zero-stage [23]", flags) else set()
        assert waits.keys() <= also | (OF_STATE_ON_HOST if "offload" in flags else set()), flags


@pytest.mark.parametrize(
    ("tier", "threads", "says"), [("host", 1, 1), ("file", 1, 1), ("host", 8, 0), ("device", 1, 0)]
)
def test_one_thread_for_the_hosts_update_is_said(tier: str, threads: int, says: int):
    assert len(offload_notes("xpu", tier, threads=threads)) == says
