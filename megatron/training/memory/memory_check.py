"""Refuses, before buffers are made, a run whose state or offload does not fit the devices, machines or disks."""

import json
import math
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.core import parallel_state
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.offload.offload_tiers import FileOffloadStore
from megatron.core.optimizer.param_groups import default_group
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import size_of
from megatron.core.sharding.placement import pieces
from megatron.training.global_vars import Runtime, print_rank_0
from megatron.training.memory.bytes_by_tier import Element, amount, bytes_by_tier
from megatron.training.memory.host_memory import free_on_machine, free_to_process
from megatron.training.memory.memory_advice import less_with, warning_of_room
from megatron.training.memory.peak_along_schedule import ACTIVATIONS, STATE, Forecast

_ALL_THE_SAME = "--no-check-memory starts all the same"
Bytes = dict[str, dict[str, int]]  # by tier and kind

_ADVICE = (
    "more data-parallel ranks with a higher --zero-stage, or a lower --optimizer-offload-fraction "
    "or --cpu-offloading-num-layers"
)


def state_bytes(runtime: Runtime, modules: Iterable[nn.Module]) -> Bytes:
    """The lasting state of this rank in each tier, once these model chunks are trained."""
    config, total = runtime.config, defaultdict(Counter)
    data, offload = config.data_parallel, config.offload
    kept = {
        "splits_masters": config.optimizer.reuse_fp32_param,
        "gradient": 2 if data.main_grads_dtype == "bf16" else None,
    }
    home = {
        "tier": offload.tier,
        "fraction": offload.optimizer_offload_fraction,
        "offload_params": offload.offload_params,
    }
    group_of, optimizer = config.optimizer.grouping(default_group), config.optimizer
    named = [pair for module in modules for pair in module.named_parameters()]
    for name, p in ((name, p) for name, p in named if p.requires_grad):
        axes = runtime.mesh.grad_axes(p.placement.reduce_over, shards=True, divides_outer=data.divides_over_outer)
        moments = optimizer.rule(group_of(name, p.placement).optimizer).states(optimizer)
        element = Element.of(p.element_size(), len(moments), **kept)
        shared = {"stage": data.stage, "shards": axes.shard.size, "outer": axes.outer.size}
        for tier, kinds in bytes_by_tier(p.numel(), element, **shared, **home).items():
            slices = max(kinds.pop("slices", 0), total[tier]["slices"])  # all parameters pass through the same
            total[tier].update(kinds)
            total[tier]["slices"] = slices
    return {tier: dict(+kinds) for tier, kinds in total.items()}


@dataclass(frozen=True)
class Room:
    """Bytes available to a run; None: unknown."""

    machine: int | None  # free
    process: int | None  # below its limit
    device: int | None  # in all

    @classmethod
    def now(cls, runtime: Runtime) -> "Room":
        return cls(free_on_machine(), free_to_process(), runtime.device.memory_bytes)


def check_room(runtime: Runtime, modules: Iterable[nn.Module], room: Room, forecast: Forecast | None = None) -> None:
    """Raise ConfigError, on all ranks, if the state does not fit: the offloaded part on its disk or host, and all of it in
    memory. With --no-check-memory a lack of memory is a warning only. Every rank must call, before it makes the buffers.

    room: as it was before the modules were built; none of the state has been written since, so none of it takes memory.
    """
    modules = list(modules)
    found, parameters = state_bytes(runtime, modules), [p for module in modules for p in module.parameters()]
    lasting = sum(size for kinds in found.values() for kind, size in kinds.items() if kind != "slices")
    frozen, held = sum(p.nbytes for p in parameters if not p.requires_grad), sum(p.numel() for p in parameters)
    padding = held - sum(_true_size(p, runtime.mesh) for p in parameters)
    padded = f" ({padding:,} of them pad the vocabulary)" if padding else ""
    print_rank_0(
        f"building the model: {held:,} parameters on this rank{padded}, {amount(lasting + frozen)} with gradients and optimizer "
        "state"
    )
    needs = {tier: sum(kinds.values()) for tier, kinds in found.items()}
    needs["device"] = needs.get("device", 0) + frozen
    if forecast is not None and runtime.config.transformer.cpu_offloading_num_layers > 0 and forecast.ranks:
        on = forecast.ranks[runtime.mesh["pp"].rank].on
        for tier in ("host", "file"):
            needs[tier] = needs.get(tier, 0) + on.get(tier, {}).get(ACTIVATIONS, 0)
    need = json.dumps(_need_of(runtime, needs, room))
    texts = collectives.all_gather_texts(need, runtime.mesh["world"], runtime.device.torch_device)
    disks, memory = problems_of_needs([json.loads(text) for text in texts])
    if disks or (memory and runtime.config.device.check_memory):
        raise ConfigError(disks + memory)
    for problem in memory:
        print_rank_0(f"WARNING: {problem}")


def _true_size(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Elements of this rank's shard, without padding of the vocabulary."""
    return sum(math.prod(size_of(box)) for box, _ in pieces(parameter.placement, tuple(parameter.shape), mesh))


def warn_of_room(runtime: Runtime, forecast: Forecast) -> None:
    """Warn, on the first rank, if the prediction exceeds its device, or its share of the machine. Every rank must call."""
    if not forecast.ranks:
        return
    shares, room = 0, runtime.device.memory_bytes
    if runtime.device.torch_device.type == "cpu":
        free, shares = free_on_machine(), parallel_state.launched().local_size
        room = None if free is None else free // shares
    for line in warning_of_room(runtime.config, runtime.world_size, forecast.ranks, room, shares=shares):
        print_rank_0(line)


def room_left(runtime: Runtime) -> list[str]:
    """A line with the free bytes of the disk, once this rank's state is on it."""
    if not isinstance(runtime.offload_store, FileOffloadStore):
        return []
    return [
        f"{amount(runtime.offload_store.folder.free_bytes)} are still free below {runtime.config.offload.offload_dir}"
    ]


def _need_of(runtime: Runtime, needs: Mapping[str, int], room: Room) -> dict[str, Any]:
    """The bytes that this rank needs on its disk, machine and device, and the bytes that are free there."""
    config, on_cpu = runtime.config, runtime.device.torch_device.type == "cpu"
    folder = runtime.offload_store.folder if isinstance(runtime.offload_store, FileOffloadStore) else None
    return {
        "disk": folder and folder.disk,
        "disk_free": folder and folder.free_bytes,
        "disk_needs": needs.get("file", 0),
        "host": socket.gethostname(),
        "host_free": room.machine,
        "process_free": room.process,
        "host_needs": needs.get("host", 0) + (needs["device"] if on_cpu else 0),
        "device_has": None if on_cpu else room.device,
        "device_needs": needs["device"],
        "dir": config.offload.offload_dir,
        "offloads": runtime.offload_store is not None or config.transformer.cpu_offloading_num_layers > 0,
        "less_with": less_with(config, runtime.world_size, STATE, shares=int(on_cpu)),
    }


def problems_of_needs(needs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """(problems of disks, problems of memory) from the needs of all ranks. Ranks share a disk or machine of the same
    name."""
    advice = f"less with {needs[0]['less_with']}; {_ALL_THE_SAME}"
    disks = [
        f"what is offloaded does not fit the disk of --offload-dir {first['dir']}: {lack}; free the disk, give an "
        f"--offload-dir on another, {_ADVICE}"
        for first, lack in _overfull(needs, "disk")
    ]
    memory = [
        f"what is offloaded does not fit the memory of {first['host']}: {lack}; give --offload-dir, {_ADVICE}; {_ALL_THE_SAME}"
        if first["offloads"]
        else f"{STATE} do not fit the memory of {first['host']}: {lack}; {advice}"
        for first, lack in _overfull(needs, "host")
    ]
    for rank, need in enumerate(needs):
        if need["process_free"] is not None and need["host_needs"] > need["process_free"]:
            memory.append(
                f"rank {rank} needs {amount(need['host_needs'])} of memory, and its limit (ulimit -d) leaves "
                f"{amount(need['process_free'])}; raise that, or {advice}"
            )
    short = [rank for rank, need in enumerate(needs) if need["device_needs"] > (need["device_has"] or math.inf)]
    if short:
        rank = max(short, key=lambda rank: needs[rank]["device_needs"])
        memory.append(
            f"{STATE} of {len(short)} rank(s) do not fit their devices: rank {rank} needs "
            f"{amount(needs[rank]['device_needs'])}, and its device has {amount(needs[rank]['device_has'])}; {advice}"
        )
    return disks, memory


def _overfull(needs: Sequence[Mapping[str, Any]], place: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """(a rank's need, the lack in words) for each "disk" or "host" with too little room."""
    sharing = defaultdict(list)
    for need in needs:
        if need[place] is not None and need[f"{place}_free"] is not None:
            sharing[need[place]].append(need)
    for ranks in sharing.values():
        total, free = sum(need[f"{place}_needs"] for need in ranks), min(need[f"{place}_free"] for need in ranks)
        if total > free:
            yield ranks[0], f"{len(ranks)} rank(s) need {amount(total)}, and {amount(free)} are free"


_ONE_THREAD = (
    "masters and moments on the host are updated by one thread of each rank (torchrun sets OMP_NUM_THREADS to 1); set it to "
    "the cores that a rank has to itself"
)


def notes_of(runtime_device: str, tier: str, activations: bool = False, threads: int = 2) -> list[str]:
    """Consequences of offload that a user may not expect. activations: they are offloaded too; threads: of this rank."""
    if runtime_device != "cpu":
        return [_ONE_THREAD] if tier != "device" and threads == 1 else []
    in_memory = ["--optimizer-cpu-offload"] if tier == "host" else []
    in_memory += ["--cpu-offloading-num-layers"] if activations and tier != "file" else []
    return [
        f"{flag}: the host's memory is the device's here, so nothing is saved; --offload-dir keeps state in files"
        for flag in in_memory
    ]
