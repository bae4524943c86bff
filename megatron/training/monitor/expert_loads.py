"""The loads of experts: curves of each layer, and a warning of experts that have had no token for long."""

import json
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.ops.expert_load_interface import ReportsExpertLoads
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis

STEPS = 100  # without a token, before the log says so


class ExpertLoad(NamedTuple):
    """One layer's experts in the last step, over all ranks."""

    layer: int  # from 0, over the whole model
    tokens: list[int]  # of each expert
    idle: list[int]  # steps since each expert had a token


def expert_loads(chunks: Iterable[nn.Module], pp: Axis, device: torch.device | str) -> list[ExpertLoad]:
    """Return the loads of all layers of the model, on every rank. Every rank of pp must call."""
    own = []
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, ReportsExpertLoads) and module.tokens_of_last_step is not None:
                own.append([module.layer_number - 1, module.tokens_of_last_step.tolist(), module.idle_steps.tolist()])
    texts = collectives.all_gather_texts(json.dumps(own), pp, device)
    return sorted(ExpertLoad(*load) for text in texts for load in json.loads(text))


def load_curves(loads: Iterable[ExpertLoad]) -> dict[str, float]:
    """Return for each layer the largest and the smallest share of an expert, as multiples of an equal share."""
    curves = {}
    for load in loads:
        mean = sum(load.tokens) / len(load.tokens)
        if mean:
            curves[f"moe/max_load_layer_{load.layer}"] = max(load.tokens) / mean
            curves[f"moe/min_load_layer_{load.layer}"] = min(load.tokens) / mean
    return curves


class IdleExperts:
    """Which experts the log has named."""

    def __init__(self) -> None:
        self._named: set[tuple[int, int]] = set()

    def notes(self, loads: Iterable[ExpertLoad]) -> list[str]:
        """Return a line for each layer with experts that have newly had no token in STEPS steps."""
        lines = []
        for load in loads:
            idle = {(load.layer, expert) for expert, steps in enumerate(load.idle) if steps >= STEPS}
            new = sorted(expert for _, expert in idle - self._named)
            self._named = {pair for pair in self._named if pair[0] != load.layer} | idle
            if new:
                which = ", ".join(map(str, new[:8])) + (f" and {len(new) - 8} more" if len(new) > 8 else "")
                lines.append(
                    f"WARNING: layer {load.layer}: no token has gone to expert {which} of {len(load.tokens)} in the last {STEPS} "
                    "iterations; a larger --moe-aux-loss-coeff or --moe-router-bias-update-rate spreads tokens more evenly"
                )
        return lines
