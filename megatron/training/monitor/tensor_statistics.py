"""Statistics of whole tensors for --inspect: every element counts once, in any layout.

Parameters and gradients are those of `core/distributed/params_norm_and_zeros.py`. Activations are divided over
data-parallel ranks and microbatches; tensor-parallel ranks have copies of a layer's output, or parts with
sequence parallelism.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core.base.label_allocations_by_memory_kind import memory_kind
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.params_norm_and_zeros import owned_elements
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh


@dataclass(frozen=True)
class Statistics:
    """Statistics of a set of elements. Mean, distances and largest are those of the finite elements."""

    finite: int = 0  # elements
    mean: float = 0.0
    distances: float = 0.0  # sum of squared distances from the mean
    largest: float = 0.0  # magnitude
    zeros: int = 0  # elements
    not_finite: int = 0  # elements

    def __add__(self, other: "Statistics") -> "Statistics":
        """Return the statistics of both sets together (Chan, Golub, LeVeque 1979: stable for a large mean)."""
        finite = self.finite + other.finite
        between = other.mean - self.mean
        share = other.finite / max(finite, 1)
        return Statistics(
            finite,
            self.mean + between * share,
            self.distances + other.distances + between * between * self.finite * share,
            max(self.largest, other.largest),
            self.zeros + other.zeros,
            self.not_finite + other.not_finite,
        )

    def values(self) -> dict[str, float]:
        """Return the reported numbers: mean, std, max magnitude, and the shares of zeros and of non-finite elements."""
        elements = max(self.finite + self.not_finite, 1)
        return {
            "mean": self.mean,
            "std": math.sqrt(self.distances / max(self.finite, 1)),
            "max": self.largest,
            "zeros": self.zeros / elements,
            "not-finite": self.not_finite / elements,
        }


@torch.no_grad()
@memory_kind("other")
def statistics_of(x: Tensor) -> Statistics:
    """Return the statistics of the elements of `x`, of any shape, computed in float64."""
    elements = x.detach().double().reshape(-1)  # [elements]
    finite = elements[elements.isfinite()]  # [finite elements]
    if finite.numel() == 0:
        return Statistics(not_finite=elements.numel())
    mean = finite.mean()
    distances = (finite - mean).square().sum()
    numbers = torch.stack([mean, distances, finite.abs().max(), (finite == 0).sum()])  # one copy from the device
    mean, distances, largest, zeros = numbers.tolist()
    return Statistics(
        finite.numel(), mean, distances, largest, zeros=int(zeros), not_finite=elements.numel() - finite.numel()
    )


# ---------------------------------------------------------------- --inspect

TensorKey = tuple[str, str]  # ("parameter" | "gradient" | "activation", name in the model)


def _gives_hidden_states(module: nn.Module) -> bool:
    """Whether a module's class, ours or a script's, says that its forward returns hidden states."""
    return getattr(module, "gives_hidden_states", False)


class Inspector:
    """Compute statistics of one step: create before the step, `finish` after it. Other steps have no hooks."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], mesh: Mesh, *, sequence_parallel: bool):
        self._chunks = chunks
        self._mesh = mesh
        self._statistics: dict[TensorKey, Statistics] = {}  # of this rank
        self._handles: list[RemovableHandle] = []
        if sequence_parallel or mesh["tp"].is_first:  # other tensor-parallel ranks have copies
            for chunk in chunks:
                self._watch_outputs(chunk.module)

    def _watch_outputs(self, model: nn.Module) -> None:
        """Add a hook to every module that returns hidden states."""
        for name, module in model.named_modules():
            if _gives_hidden_states(module) or name.endswith("final_layernorm"):

                def note(module: nn.Module, inputs: object, output: Any, name: str = name) -> None:
                    # A recomputed layer is counted twice with all its elements, so means and shares stay the same.
                    # A layer returns (hidden states, context).
                    self._add(("activation", name), output[0] if isinstance(output, tuple) else output)

                self._handles.append(module.register_forward_hook(note))

    def _add(self, key: TensorKey, x: Tensor) -> None:
        self._statistics[key] = self._statistics.get(key, Statistics()) + statistics_of(x)

    def finish(self, device: torch.device | str) -> dict[TensorKey, Statistics]:
        """Return the statistics of the whole model, the same on every rank. Every rank must call.

        Gradients are those after clipping.
        """
        for handle in self._handles:
            handle.remove()
        for name, values in owned_elements(self._chunks, self._mesh, grads=False):
            self._add(("parameter", name), values)
        for name, values in owned_elements(self._chunks, self._mesh, grads=True):
            self._add(("gradient", name), values)

        # add up the statistics of all ranks
        local = [[*key, asdict(statistics)] for key, statistics in self._statistics.items()]
        total: dict[TensorKey, Statistics] = {}
        for text in collectives.all_gather_texts(json.dumps(local), self._mesh["world"], device):
            for what, name, numbers in json.loads(text):
                total[what, name] = total.get((what, name), Statistics()) + Statistics(**numbers)
        return total
