"""--inspect statistics of whole tensors: every element counts once, in any layout (`core/distributed/params_norm_and_zeros.py`).

Activations are divided over data-parallel ranks and microbatches; tensor-parallel ranks hold copies of a layer's output,
or parts
under sequence parallelism.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core.base.memory_category import memory_kind
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.params_norm_and_zeros import owned_elements
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh


@dataclass(frozen=True)
class Statistics:
    """Statistics of a set of elements. mean, distances (sum of squared distances from the mean), largest: of the
    finite ones."""

    finite: int = 0
    mean: float = 0.0
    distances: float = 0.0
    largest: float = 0.0
    zeros: int = 0
    not_finite: int = 0

    def __add__(self, other: "Statistics") -> "Statistics":
        """Statistics of both sets together (Chan, Golub, LeVeque 1979: stable for a large mean)."""
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
        """The reported numbers: mean, std, max magnitude, and the shares of zeros and of non-finite elements."""
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
    """Statistics of the elements of `x`, computed in float64."""
    wide = x.detach().double().reshape(-1)
    finite = wide[wide.isfinite()]
    if finite.numel() == 0:
        return Statistics(not_finite=wide.numel())
    mean = finite.mean()
    numbers = torch.stack([mean, (finite - mean).square().sum(), finite.abs().max(), (finite == 0).sum()]).tolist()
    return Statistics(finite.numel(), *numbers[:3], int(numbers[3]), wide.numel() - finite.numel())


# ---------------------------------------------------------------- --inspect

TensorKey = tuple[str, str]  # ("parameter" | "gradient" | "activation", name in the model)


def _gives_hidden_states(module: nn.Module) -> bool:
    """Whether a module's class, ours or a script's, says that its forward returns hidden states."""
    return getattr(module, "gives_hidden_states", False)


class Inspector:
    """Statistics of one step: create before the step, `finish` after it. Steps without --inspect have no hook and no
    cost."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], mesh: Mesh, *, sequence_parallel: bool):
        self._chunks, self._mesh = chunks, mesh
        self._found: dict[TensorKey, Statistics] = {}
        self._handles: list[RemovableHandle] = []
        if sequence_parallel or mesh["tp"].is_first:  # other tensor-parallel ranks hold copies
            for chunk in chunks:
                self._watch_outputs(chunk.module)

    def _watch_outputs(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if _gives_hidden_states(module) or name.endswith("final_layernorm"):

                def note(module: nn.Module, inputs: object, output: Tensor, name: str = name) -> None:
                    # A recomputed layer is counted twice with all its elements, so means and shares stay the same.
                    self._add(("activation", name), output)

                self._handles.append(module.register_forward_hook(note))

    def _add(self, key: TensorKey, x: Tensor) -> None:
        self._found[key] = self._found.get(key, Statistics()) + statistics_of(x)

    def finish(self, device: torch.device | str) -> dict[TensorKey, Statistics]:
        """Statistics of the whole model, the same on every rank. Gradients are clipped already. Every rank must call."""
        for handle in self._handles:
            handle.remove()
        for what, grads in (("parameter", False), ("gradient", True)):
            for name, part in owned_elements(self._chunks, self._mesh, grads=grads):
                self._add((what, name), part)
        mine = [[*key, asdict(statistics)] for key, statistics in self._found.items()]
        whole: dict[TensorKey, Statistics] = {}
        for text in collectives.all_gather_texts(json.dumps(mine), self._mesh["world"], device):
            for what, name, numbers in json.loads(text):
                whole[what, name] = whole.get((what, name), Statistics()) + Statistics(**numbers)
        return whole
