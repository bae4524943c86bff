"""Recomputable tensors: a consumer saves what the tensor is computed from, and recomputes it in its backward.

    y = gelu(x)         saves x for its own backward, and marks y: computed by its compiled formula from x
    z = y W^T           saves x instead of y; its backward recomputes y, with the same program and so to the same bits

That saves memory only where something else saves the inputs of y anyway, so only the producer of y may mark it.

The producer's backward reads the inputs of y anyway. A consumer whose weight gradient can wait for that backward
requests y from it (`request_from_producer`): recomputing y then costs no pass of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Restore = Callable[..., Tensor]


class _RecomputeRecipe(NamedTuple):
    version: int  # of the marked tensor: torch counts its changes in place
    formula: Callable[..., tuple[Tensor | None, ...]]
    inputs: tuple[Any, ...]


def mark_recomputable(
    output: Tensor, formula: Callable[..., tuple[Tensor | None, ...]], inputs: tuple[Any, ...]
) -> None:
    """Say that formula(*inputs)[0] has the values of `output`, now and in the backward.

    output: of any shape, which is also that of the formula's first result. inputs: tensors of any shapes, and numbers.
    """
    output.recompute_recipe = _RecomputeRecipe(output._version, formula, inputs)


def _mark_of(x: Tensor) -> _RecomputeRecipe | None:
    """Return the recipe of a marked tensor, also of one that was changed in place since it was marked."""
    return getattr(x, "recompute_recipe", None)


def _valid_recipe_of(x: Tensor) -> _RecomputeRecipe | None:
    recipe = _mark_of(x)
    was_changed = recipe is not None and recipe.version != x._version
    return None if was_changed else recipe


def unmark_recomputable(output: Tensor) -> Tensor:
    """Return the same tensor, of any shape, without its mark: its consumers save it.

    For outputs of consumers whose backward runs where ZeRO stage 3 may have released a parameter that the formula
    needs.
    """
    if _mark_of(output) is not None:
        del output.recompute_recipe
    return output


def save_or_recompute(x: Tensor) -> tuple[Restore, tuple[Tensor | None, ...]]:
    """Return (restore, saved): restore(*saved) has the values of x, in its shape.

    x: of any shape. saved: what to save for a backward: x itself if it is not marked, else the tensors among the inputs
    of its formula, and None in the places of numbers.
    """
    recipe = _valid_recipe_of(x)
    if recipe is None:
        return _as_saved, (x,)
    # Tensors are saved for the backward, where hooks and checkpointing see them; numbers are kept in the function.
    tensors = tuple(value if isinstance(value, Tensor) else None for value in recipe.inputs)
    numbers = tuple(None if isinstance(value, Tensor) else value for value in recipe.inputs)
    return partial(_recompute, recipe.formula, numbers), tensors


def producer_of(x: Tensor) -> "ProducerNode | None":
    """Return the node from which to request x in the backward.

    x: of any shape. None: x is not marked, or its node takes no requests.
    """
    if _valid_recipe_of(x) is None or not hasattr(x.grad_fn, "requests"):
        return None
    return x.grad_fn


def request_from_producer(producer: "ProducerNode | None", use: Callable[[Tensor], Any]) -> bool:
    """Ask the producer's backward to call use(x), with x in its own shape.

    Returns False if the running backward will not reach the producer: then nobody calls.
    """
    if producer is None or not torch._C._will_engine_execute_node(producer):
        return False
    producer.requests.append(use)
    return True


class ProducerNode(Protocol):
    """A node of autograd's graph that hands its recomputed output to those who requested it."""

    requests: list[Callable[[Tensor], Any]]


def _as_saved(x: Tensor) -> Tensor:
    return x


def _recompute(formula: Callable[..., tuple[Tensor, ...]], numbers: tuple[Any, ...], *tensors: Tensor | None) -> Tensor:
    inputs = [number if x is None else x for x, number in zip(tensors, numbers)]
    return formula(*inputs)[0]
