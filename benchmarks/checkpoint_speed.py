"""Measure how fast a checkpoint is saved and loaded, against the disk and the hash alone, in one run.

    python benchmarks/checkpoint_speed.py                         one process, 512 MiB
    python benchmarks/checkpoint_speed.py --processes 2 --mib 256 --folder /scratch

    save     `save_checkpoint`                     against   writing the same bytes to a file, hashed as they pass, with fsync
    load     `open_checkpoint`, `read_into`        against   reading a file of as many bytes and hashing them
    stall    what `AsyncSaver.start` takes    against   copying the tensors within memory

Both sides use as many processes, each for its own part. They take turns, `--rounds` times, and a turn lasts until the last
process is done. Prints the median of both sides in seconds, and ours relative to the other: speeds for save and load (1 is as
fast), times for the stall. Reads come from the system's cache on both sides. Also prints the peak memory of a save and of a
load, without the tensors.
"""

import argparse
import hashlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.dist_checkpointing.async_snapshot_to_writer_process import AsyncSaver
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import whole

CHUNK = 16 << 20  # bytes that pass at a time on the plain side, as on ours
TENSORS = 8


def parts(world: Axis, mib: int) -> dict[str, LocalTensor]:
    """Make this process's rows of each tensor: `mib` MiB in all."""
    columns = 1024
    rows = (mib << 20) // (TENSORS * 4 * columns)
    generator = torch.Generator().manual_seed(world.rank)
    tensors = {}
    for number in range(TENSORS):
        x = torch.rand((rows, columns), generator=generator)
        box = ((world.rank * rows, (world.rank + 1) * rows), (0, columns))
        tensors[f"x{number}"] = LocalTensor(x, (rows * world.size, columns), [(box, whole(x.shape))], True)
    return tensors


def write_plainly(path: Path, tensors: dict[str, LocalTensor]) -> None:
    """Write and hash the bytes of the tensors, with fsync."""
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        for local in tensors.values():
            data = memoryview(local.tensor.view(-1).view(torch.uint8).numpy())
            for start in range(0, len(data), CHUNK):
                digest.update(data[start : start + CHUNK])
                file.write(data[start : start + CHUNK])
        os.fsync(file.fileno())


def read_plainly(path: Path, buffer: memoryview) -> None:
    """Read and hash a file."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])


def timed(world: Axis, work: Callable[[], object]) -> float:
    """Return the seconds until the last process is done. Every rank must call."""
    collectives.barrier(world)
    start = time.perf_counter()
    work()
    collectives.barrier(world)
    return time.perf_counter() - start


def peak_memory(work: Callable[[], object]) -> float:
    """Return the peak MiB by which this process grows during the work."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = _resident("VmRSS")
    work()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    """Return a field of the process's status, in KiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0])


def measure(options: argparse.Namespace, world: Axis) -> dict[str, list[tuple[float, float]]]:
    """Return (ours, the other's) seconds of each round, for save, load and stall. Every rank must call."""
    tensors = parts(world, options.mib)
    folder = Path(options.folder)
    plain = folder / f"plain_{world.rank}"
    root = folder / "ours"
    copies = [torch.empty_like(local.tensor) for local in tensors.values()]
    buffer = memoryview(bytearray(CHUNK))
    background = AsyncSaver(world)
    background.reserve(tensors)
    results: dict[str, list[tuple[float, float]]] = {"save": [], "load": [], "stall": []}

    def load() -> None:
        open_checkpoint(root, world=world).read_into(tensors, world)

    def copy() -> None:
        for target, local in zip(copies, tensors.values()):
            target.copy_(local.tensor)

    def save() -> None:
        save_checkpoint(root, 1, tensors, {}, world)

    # Memory is measured first: a heap that has grown hides what a later call takes.
    save_mib = peak_memory(save)
    load_mib = peak_memory(load)
    if world.is_first:
        box = options.mib / TENSORS
        print(f"memory beside the tensors: save {save_mib:.0f} MiB, load {load_mib:.0f} MiB; a box has {box:.0f} MiB")
    for _ in range(options.rounds):
        write_seconds = timed(world, lambda: write_plainly(plain, tensors))
        save_seconds = timed(world, save)
        results["save"].append((save_seconds, write_seconds))
        load_seconds = timed(world, load)
        read_seconds = timed(world, lambda: read_plainly(plain, buffer))
        results["load"].append((load_seconds, read_seconds))
        copy_seconds = timed(world, copy)
        stall_seconds = timed(world, lambda: background.start(folder / "beside", 1, tensors, {}))
        results["stall"].append((stall_seconds, copy_seconds))
        background.finish()
        collectives.barrier(world)
        if world.is_first:
            for old in (root, folder / "beside"):
                shutil.rmtree(old)
        collectives.barrier(world)
    background.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--mib", type=int, default=512, help="of each process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="/tmp/checkpoint_speed", help="on the disk to measure")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(launch(options.processes, options.folder))
    torch.set_num_threads(1)
    parallel_state.start_distributed("gloo", 2)
    world = parallel_state.initialize_model_parallel()["world"]
    results = measure(options, world)
    if world.is_first:
        for name, pairs in results.items():
            ours, other = (statistics.median(side) for side in zip(*pairs))
            ratio = ours / other if name == "stall" else other / ours
            print(f"{name:5}  ours {ours:6.3f} s   other {other:6.3f} s   ratio {ratio:.2f}")
    parallel_state.stop_distributed()


def launch(processes: int, folder: str) -> int:
    """Start the ranks; return the largest exit code."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    command = [sys.executable, *sys.argv]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    code = max(rank.wait() for rank in ranks)
    shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    main()
