"""Auxiliary losses: terms of the objective that layers add in their forward, on whatever pipeline stage they are.

    context.aux_losses.declare("activation penalty")                         the model provider, on every rank

    penalty = context.sum_over_sample((x * x).sum(dim=(0, 2)))               a layer's forward; [b]
    context.aux_losses.add("activation penalty", layer_number, penalty, 1e-3)

The loop collects what a forward adds and differentiates it together with the loss or the stage's output, in one backward:
two would compute recomputed layers twice. It collects in forwards of training alone, so that what a recomputation adds
in the backward is not counted again.

The objective of a step is  mean of the loss over tokens + sum over layers of coefficient x mean of the value over samples.

A layer written for Megatron adds its term to the graph itself, by `MoEAuxLossAutoScaler`; the loop only tells it the weight.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class AuxLoss(NamedTuple):
    """One layer's term in one forward. value: [], the mean over this rank's samples of the microbatch."""

    name: str
    layer_number: int  # from 1, over the whole model
    value: Tensor
    coefficient: float


class AuxLosses:
    """The auxiliary losses of one model chunk, in the `LayerContext` of its layers.

    names: of all layers of the whole model, equal on every rank and in one order, since ranks sum them by their place;
    a rank whose layers have none needs them too. num_layers: of the whole model.
    """

    def __init__(self, *names: str, num_layers: int = 0):
        self.names = names
        self.num_layers = num_layers
        self._collected: list[AuxLoss] | None = None  # None: outside a forward of training, where nothing is collected

    def declare(self, *names: str) -> None:
        """Add names to `names`. Called before the loop is built: by the model, or by the script that builds it."""
        self.names += tuple(name for name in names if name not in self.names)

    def add(self, name: str, layer_number: int, value: Tensor, coefficient: float) -> None:
        """Add coefficient x value to the objective, for a layer of a number from 1 to `num_layers`.

        value: [b], of each sample of the microbatch, or [], their mean. It must be complete: a rank that has a part of
        each sample sums over the others first (`LayerContext.sum_over_sample`), and every such rank adds the whole
        value. Outside a forward of training nothing happens. Raises ValueError for a
        name that is not declared, a number out of range, or another shape.
        """
        if self._collected is None:
            return
        if name not in self.names:
            raise ValueError(
                f"the auxiliary loss {name!r} is not declared; declared are {list(self.names)}. Call "
                f"aux_losses.declare({name!r}) where the model is built, on every rank: all must know all names"
            )
        if not 1 <= layer_number <= self.num_layers:
            raise ValueError(
                f"the auxiliary loss {name!r} is added for layer number {layer_number}; layers are numbered from 1 to "
                f"{self.num_layers} over the whole model"
            )
        if value.dim() > 1:
            raise ValueError(
                f"the auxiliary loss {name!r} has shape {tuple(value.shape)}; give [b], one number for each sample, or "
                "[], their mean"
            )
        # A sum over many samples and layers would lose digits in half precision.
        value = (value.float() if value.dtype.itemsize < 4 else value).mean()  # []
        self._collected.append(AuxLoss(name, layer_number, value, coefficient))

    @property
    def collected(self) -> tuple[AuxLoss, ...]:
        """What has been added so far in the present forward of training."""
        return tuple(self._collected or ())

    @contextmanager
    def collecting(self) -> Iterator[list[AuxLoss]]:
        """Collect what is added inside the block, into the list that the block receives."""
        outer = self._collected
        collected: list[AuxLoss] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = outer


class AuxLossTotals:
    """The sums of a step's auxiliary losses on this rank.

    sums: float64 [layers, names, 2], sum and count of the values. It has one shape on all ranks.
    """

    def __init__(self, declared: AuxLosses, device: torch.device | str):
        self.names = declared.names
        self.sums = torch.zeros((declared.num_layers, len(declared.names), 2), dtype=torch.float64, device=device)

    def add(self, collected: Sequence[AuxLoss]) -> None:
        """Add the values of one forward."""
        for name, layer_number, value, _ in collected:
            entry = self.sums[layer_number - 1, self.names.index(name)]  # [2]
            entry[0] += value.detach()
            entry[1] += 1


class AuxLossMeans(NamedTuple):
    """Means over the samples of a step.

    means: by name, over the layers that added it. by_layer: name -> layer number -> mean.
    """

    means: dict[str, float]
    by_layer: dict[str, dict[int, float]]

    @classmethod
    def from_sums(cls, names: Sequence[str], sums: Sequence[float]) -> "AuxLossMeans":
        """sums: those of `AuxLossTotals`, summed over ranks, as numbers in row-major order."""
        by_layer: dict[str, dict[int, float]] = {name: {} for name in names}
        for i, (total, count) in enumerate(zip(sums[::2], sums[1::2], strict=True)):
            if count:
                by_layer[names[i % len(names)]][i // len(names) + 1] = total / count
        means = {name: sum(layers.values()) / len(layers) for name, layers in by_layer.items() if layers}
        return cls(means, by_layer)


def objective_of(collected: Iterable[AuxLoss]) -> Tensor | None:
    """Return the sum of coefficient x value, []. None if no term has a gradient."""
    terms = [loss.coefficient * loss.value for loss in collected if loss.coefficient and loss.value.requires_grad]
    return sum(terms[1:], terms[0]) if terms else None


def own_aux_losses(module: nn.Module) -> AuxLosses | None:
    """Return the attribute `aux_losses` of a module, ours or a script's; None: it has none."""
    aux_losses = getattr(module, "aux_losses", None)
    return aux_losses if isinstance(aux_losses, AuxLosses) else None


def aux_losses_in(module: nn.Module) -> list[AuxLosses]:
    """Return the auxiliary losses of a module and of its submodules, each once."""
    found: dict[int, AuxLosses] = {}
    for submodule in module.modules():
        aux_losses = own_aux_losses(submodule)
        if aux_losses is not None:
            found[id(aux_losses)] = aux_losses
    return list(found.values())


def declared_aux_losses(chunks: Iterable[nn.Module]) -> list[AuxLosses]:
    """Return the auxiliary losses of the chunks' modules, each once; without names, none.

    Raises ValueError if two of them declare different ones.
    """
    found = list({id(aux_losses): aux_losses for chunk in chunks for aux_losses in aux_losses_in(chunk)}.values())
    declared = {(aux_losses.names, aux_losses.num_layers) for aux_losses in found}
    if len(declared) > 1:
        said = " and ".join(f"{list(names)} of {layers} layers" for names, layers in sorted(declared))
        raise ValueError(
            f"the model's parts declare different auxiliary losses: {said}; declare the same names, in one order, for "
            "every chunk of the model and every layer"
        )
    return [aux_losses for aux_losses in found if aux_losses.names]


def adds_terms_to_graph(model: Any) -> bool:
    """Return whether layers of a model may add terms by `MoEAuxLossAutoScaler`, which declares nothing.

    All ranks must know it before the first forward, which may have layers of another stage. A model says so by its
    attribute `adds_terms_to_graph`, or as one of Megatron's by experts in its config.
    """
    if getattr(model, "adds_terms_to_graph", False):
        return True
    return bool(getattr(getattr(model, "config", None), "num_moe_experts", None))


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Megatron's way to add an auxiliary loss: y = apply(x, aux_loss) is x, and its backward begins that of aux_loss too.

    aux_loss: [] or any shape, of one microbatch, with its coefficient in it. Its gradient is `main_loss_backward_scale`,
    which the loop sets in each step so that the objective has the mean of aux_loss over microbatches and
    data-parallel ranks, and its sum over ranks that share samples, each with the term of its own tokens. Under
    `calculate_per_token_loss` it has the sum of all aux_loss / tokens, as in Megatron: the layer multiplies by its tokens.
    A loop that calls `backward` itself sets the scale itself; 1 before it is set.
    Megatron's file: megatron/core/transformer/moe/moe_utils.py.
    """

    main_loss_backward_scale: Tensor | None = None

    @staticmethod
    def forward(ctx: Any, output: Tensor, aux_loss: Tensor) -> Tensor:
        ctx.shape = aux_loss.shape
        ctx.options = {"dtype": aux_loss.dtype, "device": aux_loss.device}
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        grad_aux_loss = torch.ones(ctx.shape, **ctx.options)
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        if scale is not None:
            grad_aux_loss *= scale.reshape(())  # a script's may be [1]
        return grad_output, grad_aux_loss

    @staticmethod
    def set_loss_scale(scale: Tensor) -> None:
        """Set the gradient of each aux_loss. scale: one number, [] or [1]."""
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale
