"""FLOPs are counted by layer: each module says those of its own products, and a model's are the sum.

    forward      Y  = X W^T      2 x tokens x elements of W, for a multiplication and an addition
    dgrad        dX = dY W       as many, if the gradient of X is needed
    wgrad        dW = dY^T X     as many, if W is trained
    recompute    of the forward, where the backward computes it again: all of it, although a recomputation ends once the
                 backward has what it needs, which may leave out a last product

A module with products of its own defines `count_flops(x: LayerInput) -> Flops`. A module without that method counts what
its children count, in the order of their registration; `nn.Linear` is known. Lookups, norms, activations and dropout are no
products and count nothing.

Counted is one sample on all ranks that share it, by the whole tensors of placements: no padding of a vocabulary, and the
same in every layout. Of causal attention half of the scores count, s / 2 keys for each query of s tokens: `attention_flops`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from megatron.core.sharding.placement import placement_of


@dataclass(frozen=True)
class Flops:
    """FLOPs of one sample, by kind of product."""

    forward: int = 0
    dgrad: int = 0  # gradients of inputs, and of the factors of attention
    wgrad: int = 0  # gradients of weights
    recompute: int = 0  # of the forward, in the backward

    @property
    def model(self) -> int:
        """Those of the mathematics, without recomputation, by which a model's TFLOP/s and its MFU are told."""
        return self.forward + self.dgrad + self.wgrad

    @property
    def hardware(self) -> int:
        """Those that a device computes, with recomputation."""
        return self.model + self.recompute

    def recomputed(self) -> "Flops":
        """Return the same with a forward that the backward runs again, and then what the backward of that one repeats."""
        return replace(self, recompute=self.recompute + self.forward)

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.forward + other.forward,
            self.dgrad + other.dgrad,
            self.wgrad + other.wgrad,
            self.recompute + other.recompute,
        )

    def __sub__(self, other: "Flops") -> "Flops":
        return self + Flops(-other.forward, -other.dgrad, -other.wgrad, -other.recompute)


@dataclass(frozen=True)
class LayerInput:
    """What a layer is asked about: the tokens of one sample that it reads, and what its products depend on.

    A layer passes it on by `dataclasses.replace`, and by `after` to a layer that reads what others have computed.
    """

    tokens: int  # of a sample, on all ranks that share it
    requires_grad: bool = True  # the backward computes the gradient of the layer's input
    causal: bool = True  # a query of self-attention sees no later keys
    window_left: int | None = None  # how many keys before its own a query sees; None: all
    memory: "LayerInput | None" = None  # the other sequence, to which cross-attention attends
    full_attention: bool = False  # count the keys after a query, too, as some projects do
    record: "FlopsRecord | None" = field(default=None, compare=False)  # takes the FLOPs of every module

    def after(self, *parts: nn.Module | Tensor | None) -> "LayerInput":
        """Return the input of what reads results of these modules and weights: it requires a gradient if one is trained."""
        for part in parts:
            weights = part.parameters() if isinstance(part, nn.Module) else [part]
            if any(weight is not None and weight.requires_grad for weight in weights):
                return replace(self, requires_grad=True)
        return self


@dataclass
class FlopsRecord:
    """The FLOPs of every module that was asked, and the modules whose products nobody counts."""

    by_module: dict[nn.Module, Flops] = field(default_factory=dict)
    uncounted: set[nn.Module] = field(default_factory=set)

    def add(self, module: nn.Module, flops: Flops) -> None:
        """Add what a module has answered. One that runs several times is asked as often."""
        self.by_module[module] = self.by_module.get(module, Flops()) + flops

    def uncounted_in(self, model: nn.Module) -> list[str]:
        """Return the names of these modules in a model."""
        return [name for name, module in model.named_modules() if module in self.uncounted]


@runtime_checkable
class CountsFlops(Protocol):
    """A module that counts its products itself."""

    def count_flops(self, x: LayerInput) -> Flops:
        """Return the FLOPs of one sample for this input: those of all ranks that share the layer together."""
        ...


def flops_of(module: nn.Module | None, x: LayerInput, *, recompute: bool = False, **options: Any) -> Flops:
    """Return the FLOPs of a module for one sample: what its `count_flops` says, or its children count.

    module: None: there is none. recompute: the backward runs its forward again. options: further arguments of its
    `count_flops`.
    """
    if module is None:
        return Flops()
    if isinstance(module, CountsFlops):
        flops = module.count_flops(x, **options)
    elif isinstance(module, nn.Linear):
        flops = weight_flops(x, module.weight)
    else:
        flops = children_flops(module, x)
        if x.record is not None and _has_matrix(module):
            x.record.uncounted.add(module)
    if recompute:
        flops = flops.recomputed()
    if x.record is not None:
        x.record.add(module, flops)
    return flops


def stage_flops(model: nn.Module, tokens: int, *, is_first: bool = True, **convention: Any) -> Flops:
    """Return the FLOPs of one sample of `tokens` tokens on a pipeline stage: its module, as its constructor built it.

    is_first: it begins with token ids; else with hidden states, whose gradient it sends back. convention: further fields of
    `LayerInput`, such as `full_attention` or `record`.
    """
    return flops_of(model, LayerInput(tokens, requires_grad=not is_first, **convention))


def children_flops(module: nn.Module, x: LayerInput) -> Flops:
    """Return the sum of what a module's children count, as if each read the result of the one registered before it."""
    total = Flops()
    for child in module.children():
        total += flops_of(child, x)
        x = x.after(child)
    return total


def further_flops(module: nn.Module, x: LayerInput, counted: Iterable[nn.Module | None]) -> Flops:
    """Return the FLOPs of the children that are not among those that a module has counted itself, each reading x.

    A `count_flops` of a class that scripts inherit from ends with it, since a subclass may have more children.
    """
    others = [child for child in module.children() if all(child is not one for one in counted)]
    return sum((flops_of(child, x) for child in others), Flops())


def weight_flops(x: LayerInput, weight: Tensor, *, per_token: int | None = None) -> Flops:
    """Return the FLOPs of the products of x's tokens with a weight.

    per_token: multiplications for each token; default: one with each element of the whole weight, as in a linear layer
    and in a convolution. A mixture that sends a token to k of its experts, stacked in [experts, out, in], has k x out x in.
    """
    if per_token is None:
        placement = placement_of(weight)
        per_token = math.prod(weight.shape if placement is None else placement.shape)
    product = 2 * x.tokens * per_token
    return Flops(product, product if x.requires_grad else 0, product if weight.requires_grad else 0)


def attention_flops(x: LayerInput, width: int, *, value_width: int | None = None) -> Flops:
    """Return the FLOPs of the scores of attention and of their product with the values, with the backward's four products.

    width: of all query heads together; value_width: of their values, if it is another. Scores that a fused kernel's
    backward computes again do not count. For s tokens a sample has these pairs of a query and a key:

    - s^2, or s m with the m tokens of x.memory, if all keys are seen;
    - s^2 / 2 in causal attention;
    - w s - w^2 / 2 with a window of w keys, a query's own among them, that is shorter than s;
    - s^2 and w s of these with x.full_attention.
    """
    s = x.tokens
    if x.memory is not None:
        twice_the_pairs = 2 * s * x.memory.tokens
    elif not x.causal:
        twice_the_pairs = 2 * s * s
    else:
        keys = s if x.window_left is None else min(x.window_left + 1, s)
        twice_the_pairs = keys * (2 * s if x.full_attention else 2 * s - keys)
    products = (width + (value_width or width)) * twice_the_pairs  # 2 FLOPs x (width + value width) x pairs
    return Flops(products, 2 * products if x.requires_grad else 0)


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module has a parameter of two or more dimensions of its own, which is not a lookup's."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False
    return any(p.dim() > 1 for p in module.parameters(recurse=False))
