"""What offloading asks of disks and machines, refused where it does not fit. `memory/` says at the start how much that is."""

import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from megatron.core import comm, parallel_state
from megatron.core.config import ConfigError
from megatron.core.offload.host_memory import free_on_machine, free_to_process
from megatron.core.offload.plan import Element, bytes_by_tier, show_bytes
from megatron.core.offload.tier import FileTier
from megatron.training.memory.estimate import activations_elsewhere, estimate
from megatron.training.memory.of_run import model_of, of_rank, sizes_of
from megatron.training.memory.room import warning_of_room
from megatron.training.runtime import Runtime, print_rank_0

Bytes = dict[str, dict[str, int]]  # by tier and kind

_ADVICE = "more data-parallel ranks with a higher --zero-stage, or a lower --optimizer-offload-fraction or --cpu-offloading-num-layers"


def state_bytes(runtime: Runtime, modules: Iterable[nn.Module]) -> Bytes:
    """What lasts of this rank's state in each tier, once these model chunks are trained."""
    config, shards = runtime.config, runtime.mesh["dp_inner"].size
    outer = runtime.mesh["dp_outer"].size if config.data_parallel.outer_dp_sharding_strategy == "optim" else 1
    total: Bytes = {}
    for parameter in (p for module in modules for p in module.parameters() if p.requires_grad):
        found = bytes_by_tier(
            parameter.numel(),
            Element.of(
                parameter.element_size(),
                len(config.optimizer.moments),
                splits_masters=config.optimizer.reuse_fp32_param,
                gradient=2 if config.data_parallel.main_grads_dtype == "bf16" else None,
            ),
            stage=config.data_parallel.stage,
            shards=shards,
            outer=outer,
            tier=config.offload.tier,
            fraction=config.offload.optimizer_offload_fraction,
            offload_params=config.offload.offload_params,
        )
        _add(total, found)
    return total


def check_room(runtime: Runtime, modules: Iterable[nn.Module]) -> None:
    """Raise ConfigError, on all ranks, where a disk or a host has no room for the bytes that will live there.

    Does nothing where nothing is offloaded. Every rank must call, before it makes the buffers.
    """
    moves_activations = runtime.config.transformer.cpu_offloading_num_layers > 0
    if runtime.tier is None and not moves_activations:
        return
    modules, world = list(modules), runtime.mesh["world"]
    found = state_bytes(runtime, modules)
    if moves_activations and (model := model_of(modules)) is not None:  # of a script's own, they are not known
        run = of_rank(sizes_of(runtime, model), runtime.mesh)
        _add(found, activations_elsewhere(run, runtime.mesh["pp"].rank))
    need = _need_of(runtime, found, sum(p.nbytes for module in modules for p in module.parameters() if p.requires_grad))
    texts = comm.all_gather_texts(json.dumps(need), world, runtime.device.torch_device)
    if problems := problems_of_needs([json.loads(text) for text in texts]):
        raise ConfigError(problems)


def warn_of_room(runtime: Runtime, modules: Iterable[nn.Module]) -> None:
    """Say on the first rank, before the buffers are made, that a prediction is more than its device, or its share of a machine, has."""
    model = model_of(modules) if runtime.mesh["world"].is_first else None
    if model is None:  # of a script's own, it is not known
        return
    run, shares = sizes_of(runtime, model), 0
    room = runtime.device.memory_bytes
    if runtime.device.torch_device.type == "cpu":
        free, shares = free_on_machine(), parallel_state.launched().local_size
        room = None if free is None else free // shares
    for line in warning_of_room(run, estimate(run), room, shares=shares):
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


def _need_of(runtime: Runtime, found: Bytes, present: int) -> dict[str, Any]:
    """What this rank asks of its disk and of its machine, and what these have. present: bytes of the parameters, which are there."""
    tier = runtime.tier
    on_host = sum(found.get("host", {}).values())
    if runtime.device.torch_device.type == "cpu":  # whose memory is the host's
        on_host = max(on_host + sum(found.get("device", {}).values()) - present, 0)
    in_file = isinstance(tier, FileTier)
    return {
        "disk": tier.folder.disk if in_file else None,
        "disk_free": tier.folder.free_bytes if in_file else None,
        "disk_needs": sum(found.get("file", {}).values()),
        "host": socket.gethostname(),
        "host_free": free_on_machine(),
        "process_free": free_to_process(),
        "host_needs": on_host,
        "dir": runtime.config.offload.offload_dir,
    }


def problems_of_needs(needs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What does not fit, of the needs of all ranks: each disk and each machine is shared by those who name it alike."""
    problems = []
    for what, advice in (
        ("disk", f"free the disk, give an --offload-dir on another, {_ADVICE}"),
        ("host", f"give --offload-dir, {_ADVICE}"),
    ):
        ranks_of = defaultdict(list)
        for need in needs:
            if need[what] is not None and need[f"{what}_free"] is not None:
                ranks_of[need[what]].append(need)
        for name, sharing in ranks_of.items():
            total, free = sum(need[f"{what}_needs"] for need in sharing), min(need[f"{what}_free"] for need in sharing)
            if total > free:
                where = f"the disk of --offload-dir {sharing[0]['dir']}" if what == "disk" else f"the memory of {name}"
                problems.append(
                    f"what is offloaded does not fit {where}: {len(sharing)} rank(s) need {show_bytes(total)}, and {show_bytes(free)} are "
                    f"free; {advice}"
                )
    for rank, need in enumerate(needs):
        if need["process_free"] is not None and need["host_needs"] > need["process_free"]:
            problems.append(
                f"rank {rank} needs {show_bytes(need['host_needs'])} of memory, and its limit (ulimit -d) leaves "
                f"{show_bytes(need['process_free'])}; raise that, or {_ADVICE}"
            )
    return problems


_ONE_THREAD = (
    "masters and moments on the host are updated by one thread of each rank (torchrun sets OMP_NUM_THREADS to 1); set it to the cores that a "
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
