"""The process of one contender: builds it, then answers each line of stdin with a line of JSON: a step, or a profile.

python -m tools.benchmarking.worker NAME DEVICE WORK_AS_JSON
"""

import json
import resource
import sys
import time
from typing import Any

import torch

from megatron.core.device import Device
from tools.benchmarking.ceilings import measure_ceilings
from tools.benchmarking.contenders import CONTENDERS
from tools.benchmarking.work import Work


def peak_memory_bytes(device: Device) -> int:
    """The device's peak allocation, or without such a count the process's peak resident memory."""
    counted = device.peak_memory_bytes()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if counted is None else counted


def one_step(contender: Any, device: Device) -> dict[str, Any]:
    device.synchronize()
    start, busy = time.perf_counter(), time.process_time()
    phases = contender.step()
    device.synchronize()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - busy
    phases["other"] = seconds - sum(phases.values())
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "phases": phases, "peak_bytes": peak_memory_bytes(device)}


def top_operators(contender: Any, limit: int = 12) -> list[dict[str, Any]]:
    """The operators with the largest share of a step's time, by torch's profiler, without their callees."""
    with torch.profiler.profile() as profile:
        contender.step()
    events = profile.key_averages()
    on_device = any(event.self_device_time_total for event in events)
    spent = {e.key: e.self_device_time_total if on_device else e.self_cpu_time_total for e in events}
    calls, total = {e.key: e.count for e in events}, sum(spent.values())
    largest = sorted(spent, key=spent.__getitem__, reverse=True)[:limit]
    return [{"operator": name, "share": spent[name] / total, "calls": calls[name]} for name in largest]


def main() -> None:
    name, device_name = sys.argv[1:3]
    work = Work(**json.loads(sys.argv[3]))
    answers, sys.stdout = sys.stdout, sys.stderr  # other prints must not look like answers

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    device = Device.select(device_name)
    if name == "ceilings":
        answer(measure_ceilings(device))
        return
    contender = CONTENDERS[name](work, device_name)
    answer({"device": device.name, "threads": torch.get_num_threads(), "torch": torch.__version__})
    for line in sys.stdin:
        answer(top_operators(contender) if line.strip() == "profile" else one_step(contender, device))


if __name__ == "__main__":
    main()
