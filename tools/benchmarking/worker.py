"""Process of one contender: it builds the contender, then answers each line of stdin with a line of JSON.

python -m tools.benchmarking.worker CONTENDER DEVICE WORK     CONTENDER and WORK as JSON, or "ceilings" as the contender

    loss        return the loss of the first batch without dropout
    step N      train N steps; return their measurements
    measure     reset the peak of memory; an error if a part that should be compiled ran eager
    profile     return the operators with the largest share of a step
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

# kind -> (module, class). A process imports its own contender alone, since imports take memory.
_CONTENDERS = {
    "ours": ("tools.benchmarking.ours", "Ours"),
    "plain": ("tools.benchmarking.peers.loop", "Plain"),
    "pipelined": ("tools.benchmarking.peers.pipelined", "Pipelined"),
    "transformers": ("tools.benchmarking.peers.transformers_models", "Transformers"),
}


def make_contender(contender: Contender, work: Work, device_name: str) -> Any:
    """Build a contender."""
    kind = contender.library
    if work.parallel == "pp" and not contender.is_ours:
        kind = "pipelined"
    module_name, class_name = _CONTENDERS[kind]
    contender_class = getattr(importlib.import_module(module_name), class_name)
    return contender_class(contender, work, device_name)


def peak_memory_bytes(device: Device) -> int:
    """Return the device's peak allocation; on a CPU the process's peak resident memory."""
    allocated = device.peak_memory_bytes()
    if allocated is not None:
        return allocated
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Reset Linux's peak of resident memory, since compilation takes more than a step."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc
    except OSError:
        return


def steps(contender: Any, device: Device, number: int) -> dict[str, Any]:
    """Train `number` steps; return means over them. process_seconds: CPU time of the process since its start."""
    contender.meet()
    device.synchronize()
    start = time.perf_counter()
    cpu_start = time.process_time()
    for _ in range(number):
        contender.step()
    device.synchronize()
    seconds = time.perf_counter() - start
    cpu_end = time.process_time()
    phases = contender.take_phases()
    phases["other"] = seconds - sum(phases.values())
    return {
        "seconds": seconds / number,
        "cpu_seconds": (cpu_end - cpu_start) / number,
        "process_seconds": cpu_end,
        "phases": {name: phase_seconds / number for name, phase_seconds in phases.items()},
        "peak_bytes": peak_memory_bytes(device),
    }


def top_operators(contender: Any, limit: int = 12) -> list[dict[str, Any]]:
    """Return the operators with the largest share of a step's time, by torch's profiler, without their callees."""
    with torch.profiler.profile() as profile:
        contender.step()
    contender.take_phases()
    events = profile.key_averages()
    on_device = any(event.self_device_time_total for event in events)
    times = {e.key: e.self_device_time_total if on_device else e.self_cpu_time_total for e in events}
    calls = {e.key: e.count for e in events}
    total = sum(times.values())
    slowest = sorted(times, key=times.__getitem__, reverse=True)[:limit]
    return [{"operator": name, "share": times[name] / total, "calls": calls[name]} for name in slowest]


def answer_to(line: str, contender: Any, device: Device) -> Any:
    """Do what a line of the protocol asks for; return the answer."""
    request, *numbers = line.split()
    if request == "loss":
        return contender.loss()
    if request == "profile":
        return top_operators(contender)
    if request == "measure":
        contender.check_compiled()
        reset_peak()
        return None
    return steps(contender, device, int(numbers[0]) if numbers else 1)


def main() -> None:
    """Run the process. sys.argv: contender, device, work."""
    name, device_name = sys.argv[1:3]
    work = Work(**json.loads(sys.argv[3]))
    answers = sys.stdout
    sys.stdout = sys.stderr  # other prints must not look like answers

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
