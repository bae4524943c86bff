"""A run whose state or offload does not fit the devices, machines or disks is refused before buffers are built."""

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
from megatron.core.offload.host_and_file_stores import FileOffloadStore
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import size_of
from megatron.core.sharding.placement import pieces
from megatron.training.global_vars import Runtime, print_rank_0
from megatron.training.memory.flags_that_reduce_memory import capacity_warning, flags_that_reduce
from megatron.training.memory.forecast_memory_along_schedule import ACTIVATIONS, STATE, Forecast
from megatron.training.memory.read_free_host_memory import free_below_rlimit_data, free_on_machine
from megatron.training.memory.zero_state_bytes_by_tier import Element, amount, predicted_bytes_by_tier

_ALL_THE_SAME = "--no-check-memory starts all the same"
Bytes = dict[str, dict[str, int]]  # by tier and kind

_ADVICE = (
    "more data-parallel ranks with a higher --zero-stage, or a lower --optimizer-offload-fraction "
    "or --cpu-offloading-num-layers"
)


def state_bytes(runtime: Runtime, modules: Iterable[nn.Module]) -> Bytes:
    """Return the bytes of this rank's resident state, by tier and kind, once these model chunks are trained.

    Frozen parameters are a part of it, and have no gradients and no optimizer state.
    """
    return parameter_state_bytes(runtime, (named for module in modules for named in module.named_parameters()))


def parameter_state_bytes(
    runtime: Runtime, parameters: Iterable[tuple[str, nn.Parameter]], group_of: GroupRule = default_group
) -> Bytes:
    """Return the bytes of `state_bytes` for these parameters, by name."""
    config = runtime.config
    data_parallel = config.data_parallel
    optimizer = config.optimizer
    offload = config.offload
    group_of = optimizer.grouping(group_of)
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for name, parameter in parameters:
        is_trained = parameter.requires_grad
        divides_outer = is_trained and data_parallel.divides_over_outer
        axes = runtime.mesh.grad_axes(parameter.placement.reduce_over, shards=True, divides_outer=divides_outer)
        element = Element.frozen(parameter.element_size())
        if is_trained:
            moments = optimizer.rule(group_of(name, parameter.placement).optimizer).states(optimizer)
            element = Element.of(
                parameter.element_size(),
                len(moments),
                gradient=2 if data_parallel.main_grads_dtype == "bf16" else None,
                splits_masters=optimizer.reuse_fp32_param,
            )
        by_tier = predicted_bytes_by_tier(
            parameter.numel(),
            element,
            stage=data_parallel.stage,
            shards=axes.shard.size,
            outer=axes.outer.size,
            tier=offload.tier,
            fraction=offload.optimizer_offload_fraction,
            offload_params=offload.offload_params,
        )
        for tier, kinds in by_tier.items():
            # all parameters pass through the same host buffers, so these do not add up
            slices = max(kinds.pop("slices", 0), total[tier]["slices"])
            total[tier].update(kinds)
            total[tier]["slices"] = slices
    return {tier: dict(+kinds) for tier, kinds in total.items()}


@dataclass(frozen=True)
class MemoryCapacity:
    """Bytes of memory that a run can use; None: unknown."""

    machine: int | None  # free on this machine
    process: int | None  # that the process may still allocate below its limit
    device: int | None  # of the device, in all

    @classmethod
    def now(cls, runtime: Runtime) -> "MemoryCapacity":
        return cls(free_on_machine(), free_below_rlimit_data(), runtime.device.memory_bytes)


def check_capacity(
    runtime: Runtime, modules: Iterable[nn.Module], capacity: MemoryCapacity, forecast: Forecast | None = None
) -> None:
    """Raise ConfigError, on all ranks, if the state does not fit: what is offloaded on disk or host, and all in memory.

    Every rank must call, before it builds the buffers. With --no-check-memory a lack of memory is a warning only.
    capacity: as it was before the modules were built. None of the state has been written since, so it takes no memory.
    """
    # parameters and state of this rank
    modules = list(modules)
    state = state_bytes(runtime, modules)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    state_total = 0
    for kinds in state.values():
        state_total += sum(size for kind, size in kinds.items() if kind != "slices")
    elements = sum(parameter.numel() for parameter in parameters)
    padding = elements - sum(_true_size(parameter, runtime.mesh) for parameter in parameters)
    padded = f" ({padding:,} of them pad the vocabulary)" if padding else ""
    print_rank_0(
        f"building the model: {elements:,} parameters on this rank{padded}, {amount(state_total)} with gradients "
        "and optimizer state"
    )

    # bytes needed in each tier, with offloaded activations
    needs = {tier: sum(kinds.values()) for tier, kinds in state.items()}
    needs.setdefault("device", 0)
    if forecast is not None and runtime.config.transformer.cpu_offloading_num_layers > 0 and forecast.ranks:
        predicted = forecast.ranks[runtime.mesh["pp"].rank]
        for tier in ("host", "file"):
            needs[tier] = needs.get(tier, 0) + predicted.by_tier.get(tier, {}).get(ACTIVATIONS, 0)

    # compare the needs of all ranks with what they share
    need = json.dumps(_need_of(runtime, needs, capacity))
    texts = collectives.all_gather_texts(need, runtime.mesh["world"], runtime.device.torch_device)
    disk_problems, memory_problems = disk_and_memory_problems([json.loads(text) for text in texts])
    if disk_problems or (memory_problems and runtime.config.device.check_memory):
        raise ConfigError(disk_problems + memory_problems)
    for problem in memory_problems:
        print_rank_0(f"WARNING: {problem}")


def _true_size(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Return the elements of this rank's shard, without padding of the vocabulary."""
    total = 0
    for box, _ in pieces(parameter.placement, tuple(parameter.shape), mesh):
        total += math.prod(size_of(box))
    return total


def warn_if_over_capacity(runtime: Runtime, forecast: Forecast) -> None:
    """Warn, on the first rank, if the prediction exceeds its device, or its share of the machine.

    Every rank must call.
    """
    if not forecast.ranks:
        return
    if runtime.device.torch_device.type == "cpu":
        free = free_on_machine()
        ranks_on_machine = parallel_state.launched().local_size
        capacity = None if free is None else free // ranks_on_machine
    else:
        ranks_on_machine = 0  # the device has memory of its own
        capacity = runtime.device.memory_bytes
    warnings = capacity_warning(runtime.config, runtime.world_size, forecast.ranks, capacity, shares=ranks_on_machine)
    for line in warnings:
        print_rank_0(line)


def offload_disk_free_note(runtime: Runtime) -> list[str]:
    """Return a line with the free bytes of the offload disk, once this rank's state is on it.

    There is none without such a disk.
    """
    if not isinstance(runtime.offload_store, FileOffloadStore):
        return []
    free = amount(runtime.offload_store.folder.free_bytes)
    return [f"{free} are still free below {runtime.config.offload.offload_dir}"]


def _need_of(runtime: Runtime, needs: Mapping[str, int], capacity: MemoryCapacity) -> dict[str, Any]:
    """Return the bytes that this rank needs on its disk, machine and device, and the bytes that are free there."""
    config = runtime.config
    on_cpu = runtime.device.torch_device.type == "cpu"
    folder = runtime.offload_store.folder if isinstance(runtime.offload_store, FileOffloadStore) else None
    return {
        "disk": folder and folder.disk,
        "disk_free": folder and folder.free_bytes,
        "disk_needs": needs.get("file", 0),
        "host": socket.gethostname(),
        "host_free": capacity.machine,
        "process_free": capacity.process,
        "host_needs": needs.get("host", 0) + (needs["device"] if on_cpu else 0),
        "device_has": None if on_cpu else capacity.device,
        "device_needs": needs["device"],
        "dir": config.offload.offload_dir,
        "offloads": runtime.offload_store is not None or config.transformer.cpu_offloading_num_layers > 0,
        "flags_that_reduce": flags_that_reduce(config, runtime.world_size, STATE, shares=int(on_cpu)),
    }


def disk_and_memory_problems(needs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return (problems of disks, problems of memory), from what `_need_of` says on each rank.

    Ranks share the disk, and the machine, of the same name.
    """
    advice = f"less with {needs[0]['flags_that_reduce']}; {_ALL_THE_SAME}"

    # disks
    disk_problems = []
    for first, lack in _overfull(needs, "disk"):
        disk_problems.append(
            f"what is offloaded does not fit the disk of --offload-dir {first['dir']}: {lack}; free the disk, give an "
            f"--offload-dir on another, {_ADVICE}"
        )

    # machines
    memory_problems = []
    for first, lack in _overfull(needs, "host"):
        if first["offloads"]:
            memory_problems.append(
                f"what is offloaded does not fit the memory of {first['host']}: {lack}; give --offload-dir, {_ADVICE}; "
                f"{_ALL_THE_SAME}"
            )
        else:
            memory_problems.append(f"{STATE} do not fit the memory of {first['host']}: {lack}; {advice}")

    # limits of processes
    for rank, need in enumerate(needs):
        if need["process_free"] is not None and need["host_needs"] > need["process_free"]:
            memory_problems.append(
                f"rank {rank} needs {amount(need['host_needs'])} of memory, and its limit (ulimit -d) leaves "
                f"{amount(need['process_free'])}; raise that, or {advice}"
            )

    # devices
    short = [rank for rank, need in enumerate(needs) if need["device_needs"] > (need["device_has"] or math.inf)]
    if short:
        rank = max(short, key=lambda rank: needs[rank]["device_needs"])
        memory_problems.append(
            f"{STATE} of {len(short)} rank(s) do not fit their devices: rank {rank} needs "
            f"{amount(needs[rank]['device_needs'])}, and its device has {amount(needs[rank]['device_has'])}; {advice}"
        )
    return disk_problems, memory_problems


def _overfull(needs: Sequence[Mapping[str, Any]], place: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield (need of the first rank there, the lack in words) for each "disk" or "host" that is too small."""
    needs_by_name = defaultdict(list)
    for need in needs:
        if need[place] is not None and need[f"{place}_free"] is not None:
            needs_by_name[need[place]].append(need)
    for ranks in needs_by_name.values():
        total = sum(need[f"{place}_needs"] for need in ranks)
        free = min(need[f"{place}_free"] for need in ranks)
        if total > free:
            yield ranks[0], f"{len(ranks)} rank(s) need {amount(total)}, and {amount(free)} are free"


_ONE_THREAD = (
    "masters and moments on the host are updated by one thread of each rank (torchrun sets OMP_NUM_THREADS to 1); set it to "
    "the cores that a rank has to itself"
)


def offload_notes(runtime_device: str, tier: str, activations: bool = False, threads: int = 2) -> list[str]:
    """Return consequences of offload that a user may not expect.

    activations: they are offloaded too. threads: of this rank.
    """
    if runtime_device != "cpu":
        return [_ONE_THREAD] if tier != "device" and threads == 1 else []
    useless_flags = []
    if tier == "host":
        useless_flags.append("--optimizer-cpu-offload")
    if activations and tier != "file":
        useless_flags.append("--cpu-offloading-num-layers")
    return [
        f"{flag}: the host's memory is the device's here, so nothing is saved; --offload-dir keeps state in files"
        for flag in useless_flags
    ]
