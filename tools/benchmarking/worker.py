"""The process of one contender: builds it, then answers each line of stdin with a line of JSON.

python -m tools.benchmarking.worker CONTENDER DEVICE WORK        CONTENDER and WORK as JSON, or "ceilings" as the contender

    loss        of the first batch without dropout
    step N      N training steps, all measured together
    measure     begin the peak of memory anew; an error if a part that should be compiled ran eager
    profile     the operators with the largest share of a step
"""

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron.core.parallel.accelerator import Device
from tools.benchmarking.ceilings import measure_ceilings
from tools.benchmarking.work import Contender, Work

# A process imports its own contender alone, which takes memory.
_KINDS = {
    "ours": ("tools.benchmarking.ours", "Ours"),
    "plain": ("tools.benchmarking.peers.loop", "Plain"),
    "pipelined": ("tools.benchmarking.peers.pipelined", "Pipelined"),
    "transformers": ("tools.benchmarking.peers.transformers_models", "Transformers"),
}


def make_contender(contender: Contender, work: Work, device_name: str) -> Any:
    module, kind = _KINDS["pipelined" if work.parallel == "pp" and not contender.is_ours else contender.library]
    return getattr(importlib.import_module(module), kind)(contender, work, device_name)


def peak_memory_bytes(device: Device) -> int:
    """The device's peak allocation, or without such a count the process's peak resident memory."""
    counted = device.peak_memory_bytes()
    if counted is not None:
        return counted
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Let Linux begin the peak of resident memory anew: compilation takes more than a step."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc
    except OSError:
        return


def steps(contender: Any, device: Device, number: int) -> dict[str, Any]:
    """Means over `number` steps. process_seconds: processor time of the process since its start."""
    contender.meet()
    device.synchronize()
    start, busy = time.perf_counter(), time.process_time()
    for _ in range(number):
        contender.step()
    device.synchronize()
    seconds, so_far = time.perf_counter() - start, time.process_time()
    phases = contender.take_phases()
    phases["other"] = seconds - sum(phases.values())
    return {
        "seconds": seconds / number,
        "cpu_seconds": (so_far - busy) / number,
        "process_seconds": so_far,
        "phases": {name: spent / number for name, spent in phases.items()},
        "peak_bytes": peak_memory_bytes(device),
    }


def top_operators(contender: Any, limit: int = 12) -> list[dict[str, Any]]:
    """The operators with the largest share of a step's time, by torch's profiler, without their callees."""
    with torch.profiler.profile() as profile:
        contender.step()
    contender.take_phases()
    events = profile.key_averages()
    on_device = any(event.self_device_time_total for event in events)
    spent = {e.key: e.self_device_time_total if on_device else e.self_cpu_time_total for e in events}
    calls, total = {e.key: e.count for e in events}, sum(spent.values())
    largest = sorted(spent, key=spent.__getitem__, reverse=True)[:limit]
    return [{"operator": name, "share": spent[name] / total, "calls": calls[name]} for name in largest]


def answer_to(line: str, contender: Any, device: Device) -> Any:
    what, *numbers = line.split()
    if what == "loss":
        return contender.loss()
    if what == "profile":
        return top_operators(contender)
    if what == "measure":
        contender.check_compiled()
        return forget_peak()
    return steps(contender, device, int(numbers[0]) if numbers else 1)


def main() -> None:
    name, device_name = sys.argv[1:3]
    work = Work(**json.loads(sys.argv[3]))
    answers, sys.stdout = sys.stdout, sys.stderr  # other prints must not look like answers

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    device = Device.select(device_name, local_rank=int(os.environ.get("LOCAL_RANK", 0)))
    if name == "ceilings":
        answer(measure_ceilings(device))
        return
    contender = make_contender(Contender(**json.loads(name)), work, device_name)
    answer({"device": device.name, "threads": torch.get_num_threads(), "torch": torch.__version__})
    for line in sys.stdin:
        answer(answer_to(line, contender, device))
    sys.stdout.flush()
    os._exit(0)  # destroying process groups may wait for ranks that have ended


if __name__ == "__main__":
    main()
