"""Parameters, FLOPs and bytes of each layer of a model, as it is built: the table of `tools/estimate_memory.py --by-layer`.

A row is a module that has parameters, FLOPs or activations of its own, without those of rows below it. Modules are those
that ZeRO stage 3 gathers one after the other: a layer of a list of layers with all its parts, else each module.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megatron.core.distributed.zero3_param_fetcher import units_of_modules
from megatron.core.ops.count_flops_by_module import Flops, FlopsRecord, stage_flops
from megatron.training.global_vars import Runtime
from megatron.training.memory.dry_run_of_one_rank import Job, Profile, built_without_values, mesh_of
from megatron.training.memory.memory_check import parameter_state_bytes
from megatron.training.memory.zero_state_bytes_by_tier import amount

STATE_KINDS = {"parameters": "parameters", "gradients": "gradients", "masters": "optimizer", "moments": "optimizer"}


@dataclass(frozen=True)
class LayerCost:
    """What a module costs, without the modules below it that have a row of their own."""

    stage: int  # of the model
    name: str  # of the module; "": the model itself
    kind: str  # its class
    parameters: int  # elements, on all tensor-parallel ranks
    flops: Flops  # of a sample, on all ranks
    bytes: dict[str, int]  # on a rank, by kind; activations: left by the forward of a microbatch
    is_counted: bool = True  # False: it has matrices whose products no count_flops counts


def layer_costs(job: Job, profiles: Sequence[Profile]) -> list[LayerCost]:
    """Return the rows of all pipeline stages, in the order of the stages. profiles: of each pipeline rank, by module."""
    costs: list[LayerCost] = []
    for rank, profile in zip(mesh_of(job.runtime.config, job.runtime.world_size, 0)["pp"].ranks, profiles):
        with built_without_values(job, rank) as (runtime, chunks):
            for (stage, chunk), left in zip(chunks.items(), profile.left_by_module):
                costs += _chunk_costs(job, runtime, stage, chunk, left)
    return sorted(costs, key=lambda cost: cost.stage)


def _chunk_costs(job: Job, runtime: Runtime, stage: int, chunk: nn.Module, left: Mapping[str, int]) -> list[LayerCost]:
    record = FlopsRecord()
    stage_flops(chunk, job.runtime.config.data.seq_length, is_first=stage == 0, record=record)

    # the parameters of each module; a tied embedding counts on the first stage
    unit_of = units_of_modules(chunk)
    names = list(dict.fromkeys(unit_of.values()))  # in an order that is the same in all stages with the same layers
    parameters: dict[str, dict[str, nn.Parameter]] = {name: {} for name in names}
    for owner, module in chunk.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            parameters[unit_of[owner]][f"{owner}.{name}"] = parameter

    # activations of stages with the same layers are those of the first of them, in the same order
    own_left = dict(zip(names, left.values(), strict=True))
    all_flops = {name: record.by_module.get(chunk.get_submodule(name)) for name in names}
    costs = []
    for name, module in chunk.named_modules():
        if name not in parameters:
            continue
        own = parameters[name]
        elements = 0
        for parameter in own.values():
            if stage == 0 or "embd" not in parameter.placement.partial_grad:
                elements += math.prod(parameter.placement.shape)
        sizes = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
        for kinds in parameter_state_bytes(runtime, own.items(), job.group_of).values():
            for kind, size in kinds.items():
                if kind in STATE_KINDS:
                    sizes[STATE_KINDS[kind]] += size
        sizes["activations"] = own_left.get(name, 0)
        flops = _own_flops(name, all_flops)
        is_counted = not any(unit_of[owner] == name for owner in record.uncounted_in(chunk))
        cost = LayerCost(stage, name, type(module).__name__, elements, flops, sizes, is_counted)
        if elements or flops.model or any(sizes.values()):
            costs.append(cost)
    return costs


def _below(name: str, names: Sequence[str]) -> list[str]:
    """Return the names of the modules below a module, without those that are below one of these."""
    prefix = f"{name}." if name else ""
    inside = [one for one in names if one != name and one.startswith(prefix)]
    return [one for one in inside if not any(one.startswith(f"{other}.") for other in inside)]


def _own_flops(name: str, all_flops: Mapping[str, Flops | None]) -> Flops:
    """Return the FLOPs of a module without those of the modules below it. None: nobody has asked that module."""
    own = all_flops[name]
    if own is None:
        return Flops()
    asked = [one for one, flops in all_flops.items() if flops is not None]
    for one in _below(name, asked):
        own = own - all_flops[one]
    return own


def by_layer_report(job: Job, costs: Sequence[LayerCost]) -> list[str]:
    """Return the lines of a table of the layers, where consecutive equal layers share a line, and of the sums."""
    rows = [["stage", "layer", "", "elements", "forward", "backward", "recompute", *_BYTES]]
    for group in _equal_neighbours(costs):
        rows.append(_row(group))
    total = sum((cost.flops for cost in costs), Flops())
    samples = max(job.runtime.batch_sizes.sizes)
    lines = [
        "each layer: elements of its parameters on all tensor-parallel ranks; FLOPs of a sample on all ranks; bytes of a "
        "rank, activations of one microbatch",
        *_aligned(rows),
        f"FLOPs of a sample: {total.model:,} of the model, {total.hardware:,} with recomputation; of a step of {samples:,} "
        f"samples: {in_flops(total.model * samples)}, {in_flops(total.hardware * samples)}",
    ]
    uncounted = sorted({cost.kind for cost in costs if not cost.is_counted})
    if uncounted:
        lines.append(f"not among the FLOPs: the products of {', '.join(uncounted)}; define count_flops")
    return lines


_BYTES = ("parameters", "gradients", "optimizer", "activations")


def _equal_neighbours(costs: Sequence[LayerCost]) -> list[list[LayerCost]]:
    """Return the layers in groups of consecutive ones whose numbers are equal; activations to half a percent."""
    groups: list[list[LayerCost]] = []
    for cost in costs:
        if groups and _are_alike(groups[-1][0], cost):
            groups[-1].append(cost)
        else:
            groups.append([cost])
    return groups


def _are_alike(one: LayerCost, other: LayerCost) -> bool:
    """Return whether two layers may share a line. The last of a block may hold a few bytes that the others have freed."""
    activations = [cost.bytes["activations"] for cost in (one, other)]
    as_other = replace(one, name=other.name, bytes=one.bytes | {"activations": activations[1]})
    return as_other == other and math.isclose(*activations, rel_tol=0.005)


def _row(group: Sequence[LayerCost]) -> list[str]:
    cost = group[0]
    name = cost.name or "(the model itself)"
    if len(group) > 1:
        name = f"{name} to {group[-1].name.rpartition('.')[2]}"
    backward = cost.flops.dgrad + cost.flops.wgrad
    flops = [in_flops(number) for number in (cost.flops.forward, backward, cost.flops.recompute)]
    sizes = [amount(cost.bytes[kind]) for kind in _BYTES]
    return [str(cost.stage), name, f"{len(group)} x", f"{cost.parameters:,}", *flops, *sizes]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines: the first two columns on the left, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1]), *map(str.rjust, row[2:], widths[2:])]
        lines.append("  ".join(cells).rstrip())
    return lines


def in_flops(number: float) -> str:
    """Return a number of FLOPs in words: 51500000000 -> 51.5 GFLOP."""
    for power, unit in ((5, "PFLOP"), (4, "TFLOP"), (3, "GFLOP"), (2, "MFLOP"), (1, "kFLOP")):
        if number >= 1000**power:
            return f"{number / 1000**power:.4g} {unit}"
    return f"{number:.0f} FLOP"


def costs_as_json(costs: Sequence[LayerCost]) -> list[dict[str, Any]]:
    """Return the rows for `tools/estimate_memory.py --by-layer --json`, one for each layer."""
    rows = []
    for cost in costs:
        flops = {name: getattr(cost.flops, name) for name in ("forward", "dgrad", "wgrad", "recompute")}
        rows.append(
            {
                "stage": cost.stage,
                "layer": cost.name,
                "class": cost.kind,
                "parameters": cost.parameters,
                "flops": flops,
                "flops_counted": cost.is_counted,
                "bytes": cost.bytes,
            }
        )
    return rows
