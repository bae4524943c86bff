"""What a run's state, and offloading, ask of devices, machines and disks: refused where it does not fit. `memory/`
says at the start how
much that is."""

import json
import math
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.core import comm, parallel_state
from megatron.core.boxes import size_of
from megatron.core.config import ConfigError
from megatron.core.mesh import Mesh
from megatron.core.placement import pieces
from megatron.core.tiers.tier import FileTier
from megatron.training.memory.host_memory import free_on_machine, free_to_process
from megatron.training.memory.room import STATE, less_with, warning_of_room
from megatron.training.memory.tier_bytes import Element, bytes_by_tier, show_bytes
from megatron.training.memory.timeline import Forecast
from megatron.training.runtime import Runtime, print_rank_0

_ALL_THE_SAME = "--no-check-memory starts all the same"
Bytes = dict[str, dict[str, int]]  # by tier and kind

_ADVICE = (
    "more data-parallel ranks with a higher --zero-stage, or a lower --optimizer-offload-fraction "
    "or --cpu-offloading-num-layers"
)


def state_bytes(runtime: Runtime, modules: Iterable[nn.Module]) -> Bytes:
    """What lasts of this rank's state in each tier, once these model chunks are trained."""
    config, total = runtime.config, {}
    divides_outer = config.data_parallel.divides_over_outer
    for parameter in (p for module in modules for p in module.parameters() if p.requires_grad):
        axes = runtime.mesh.grad_axes(parameter.placement.reduce_over, shards=True, divides_outer=divides_outer)
        found = bytes_by_tier(
            parameter.numel(),
            Element.of(
                parameter.element_size(),
                len(config.optimizer.moments),
                splits_masters=config.optimizer.reuse_fp32_param,
                gradient=2 if config.data_parallel.main_grads_dtype == "bf16" else None,
            ),
            stage=config.data_parallel.stage,
            shards=axes.shard.size,
            outer=axes.outer.size,
            tier=config.offload.tier,
            fraction=config.offload.optimizer_offload_fraction,
            offload_params=config.offload.offload_params,
        )
        _add(total, found)
    return total


@dataclass(frozen=True)
class Room:
    """Bytes that there are for a run: free on its machine and to this process, and of its device; None: not known."""

    machine: int | None
    process: int | None
    device: int | None  # of its own

    @classmethod
    def now(cls, runtime: Runtime) -> "Room":
        return cls(free_on_machine(), free_to_process(), runtime.device.memory_bytes)


def check_room(runtime: Runtime, modules: Iterable[nn.Module], room: Room, forecast: Forecast | None = None) -> None:
    """Raise ConfigError, on all ranks, where what lasts of a run does not fit: on a disk or a host the offloaded
    bytes that will live
    there, and wherever it lives the state alone. --no-check-memory turns what is only about memory into a warning.

    Nothing of the state has been written yet, so that it takes no memory on a host; room: as it was before the
    modules were made. Every
    rank must call, before it makes the buffers.
    """
    modules, world = list(modules), runtime.mesh["world"]
    found = state_bytes(runtime, modules)
    frozen = sum(p.nbytes for module in modules for p in module.parameters() if not p.requires_grad)
    _add(found, {"device": {"parameters": frozen}})
    lasting = sum(size for kinds in found.values() for kind, size in kinds.items() if kind != "slices")
    parameters = [p for module in modules for p in module.parameters()]
    held = sum(p.numel() for p in parameters)
    padding = held - sum(_true_size(p, runtime.mesh) for p in parameters)
    padded = f" ({padding:,} of them pad the vocabulary)" if padding else ""
    print_rank_0(
        f"building the model: {held:,} parameters on this rank{padded}, {show_bytes(lasting)} with gradients and optimizer state"
    )
    if forecast is not None and runtime.config.transformer.cpu_offloading_num_layers > 0 and forecast.ranks:
        kinds = forecast.ranks[runtime.mesh["pp"].rank].on
        _add(found, {tier: {"activations": kinds.get(tier, {}).get("activations", 0)} for tier in ("host", "file")})
    texts = comm.all_gather_texts(json.dumps(_need_of(runtime, found, room)), world, runtime.device.torch_device)
    disks, memory = problems_of_needs([json.loads(text) for text in texts])
    if disks or (memory and runtime.config.device.check_memory):
        raise ConfigError(disks + memory)
    for problem in memory:
        print_rank_0(f"WARNING: {problem}")


def _true_size(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Elements of a rank's part of a parameter, without those that are there to make it divisible."""
    parts = pieces(parameter.placement, tuple(parameter.shape), mesh)
    return sum(math.prod(size_of(box)) for box, _ in parts)


def warn_of_room(runtime: Runtime, forecast: Forecast) -> None:
    """Say on the first rank, before the buffers are made, that a prediction is more than its device, or its share of
    a machine, has.
    Every rank must call."""
    if not forecast.ranks:
        return
    shares, room = 0, runtime.device.memory_bytes
    if runtime.device.torch_device.type == "cpu":
        free, shares = free_on_machine(), parallel_state.launched().local_size
        room = None if free is None else free // shares
    for line in warning_of_room(runtime.config, runtime.world_size, forecast.ranks, room, shares=shares):
        print_rank_0(line)


def _add(total: Bytes, found: Bytes) -> None:
    """All pass through the same slices."""
    for tier, kinds in found.items():
        held = total.setdefault(tier, {})
        for kind, nbytes in kinds.items():
            held[kind] = max(held.get(kind, 0), nbytes) if kind == "slices" else held.get(kind, 0) + nbytes


def room_left(runtime: Runtime) -> list[str]:
    """A line about the disk, once the state of this rank has its room there."""
    if not isinstance(runtime.tier, FileTier):
        return []
    return [f"{show_bytes(runtime.tier.folder.free_bytes)} are still free below {runtime.config.offload.offload_dir}"]


def _need_of(runtime: Runtime, found: Bytes, room: Room) -> dict[str, Any]:
    """What this rank asks of its disk, its machine and its device, and what these have."""
    tier, on_cpu = runtime.tier, runtime.device.torch_device.type == "cpu"
    on_host, on_device = (sum(found.get(name, {}).values()) for name in ("host", "device"))
    in_file = isinstance(tier, FileTier)
    flags = less_with(runtime.config, runtime.world_size, STATE, shares=int(on_cpu))
    return {
        "disk": tier.folder.disk if in_file else None,
        "disk_free": tier.folder.free_bytes if in_file else None,
        "disk_needs": sum(found.get("file", {}).values()),
        "host": socket.gethostname(),
        "host_free": room.machine,
        "process_free": room.process,
        "host_needs": on_host + (on_device if on_cpu else 0),
        "device_has": None if on_cpu else room.device,
        "device_needs": on_device,
        "dir": runtime.config.offload.offload_dir,
        "offloads": tier is not None or runtime.config.transformer.cpu_offloading_num_layers > 0,
        "less_with": flags,
    }


def problems_of_needs(needs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """(what does not fit a disk, what does not fit memory), of the needs of all ranks: each disk and each machine is
    shared by those who
    name it alike."""
    disks = []
    for _, sharing, total, free in _overfull(needs, "disk"):
        disks.append(
            f"what is offloaded does not fit the disk of --offload-dir {sharing[0]['dir']}: {len(sharing)} rank(s) need "
            f"{show_bytes(total)}, and {show_bytes(free)} are free; free the disk, give an --offload-dir on another, {_ADVICE}"
        )
    memory, advice = [], f"less with {needs[0]['less_with']}; {_ALL_THE_SAME}"
    for name, sharing, total, free in _overfull(needs, "host"):
        what = "what is offloaded does" if sharing[0]["offloads"] else f"{STATE} do"
        memory.append(
            f"{what} not fit the memory of {name}: {len(sharing)} rank(s) need "
            f"{show_bytes(total)}, and {show_bytes(free)} are free; "
            + (f"give --offload-dir, {_ADVICE}; {_ALL_THE_SAME}" if sharing[0]["offloads"] else advice)
        )
    for rank, need in enumerate(needs):
        if need["process_free"] is not None and need["host_needs"] > need["process_free"]:
            memory.append(
                f"rank {rank} needs {show_bytes(need['host_needs'])} of memory, and its limit (ulimit -d) leaves "
                f"{show_bytes(need['process_free'])}; raise that, or {advice}"
            )
    on_device = [rank for rank, need in enumerate(needs) if need["device_needs"] > (need["device_has"] or math.inf)]
    if on_device:
        rank = max(on_device, key=lambda rank: needs[rank]["device_needs"])
        memory.append(
            f"{STATE} of {len(on_device)} rank(s) do not fit their devices: rank {rank} "
            f"needs {show_bytes(needs[rank]['device_needs'])}, "
            f"and its device has {show_bytes(needs[rank]['device_has'])}; {advice}"
        )
    return disks, memory


def _overfull(needs: Sequence[Mapping[str, Any]], what: str) -> Iterator[tuple[str, list[Mapping[str, Any]], int, int]]:
    """(its name, those who share it, what they need, what is free) of each "disk" or "host" that has too little."""
    ranks_of = defaultdict(list)
    for need in needs:
        if need[what] is not None and need[f"{what}_free"] is not None:
            ranks_of[need[what]].append(need)
    for name, sharing in ranks_of.items():
        total, free = sum(need[f"{what}_needs"] for need in sharing), min(need[f"{what}_free"] for need in sharing)
        if total > free:
            yield name, sharing, total, free


_ONE_THREAD = (
    "masters and moments on the host are updated by one thread of each rank (torchrun sets "
    "OMP_NUM_THREADS to 1); set it to the cores that a "
    "rank has to itself"
)


def notes_of(runtime_device: str, tier: str, activations: bool = False, threads: int = 2) -> list[str]:
    """What a user of offloading may not expect. activations: whether these are offloaded too; threads: of this rank."""
    if runtime_device != "cpu":
        return [_ONE_THREAD] if tier != "device" and threads == 1 else []
    in_memory = ["--optimizer-cpu-offload"] if tier == "host" else []
    in_memory += ["--cpu-offloading-num-layers"] if activations and tier != "file" else []
    return [
        f"{flag}: the host's memory is the device's here, so nothing is saved; --offload-dir keeps state in files"
        for flag in in_memory
    ]
