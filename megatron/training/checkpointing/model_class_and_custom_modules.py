"""The name of a model in checkpoints and messages.

It tells apart models whose parameters have equal names and sizes.
"""

import json
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from megatron.core import models
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.tensor_parallel.exchange_parallel_linears_for_adapters import modules_of_linear


def model_name(chunks: Iterable[nn.Module], pp: Axis, device: torch.device | str, *, of_base: bool = False) -> str:
    """Return `GPTModel`, or `GPTModel of SideBySideLayer` if it contains a script's modules; the same in every layout.

    A class may set its name, `model_name = "GPTModel"`, if it computes the same from the same parameters; it must, if
    pipeline stages have different classes. of_base: the name of the model before `replace_linears`, whose weights mean
    the same: adapters then do not count. Every rank of `pp` must call.
    """
    chunks = list(chunks)
    declared = {_declared_name(chunk) for chunk in chunks}
    names = {
        "declared": sorted(name for name in declared if isinstance(name, str)),
        "models": sorted({_class_name(type(chunk)) for chunk in chunks}),
        "parts": sorted({type(part).__name__ for chunk in chunks for part in _own_parts(chunk, of_base)}),
    }

    # the names of all stages
    stages = [json.loads(text) for text in collectives.all_gather_texts(json.dumps(names), pp, device)]
    all_names = {kind: sorted({name for stage in stages for name in stage[kind]}) for kind in names}

    if all_names["declared"]:
        return " + ".join(all_names["declared"])
    name = " + ".join(all_names["models"])
    if all_names["parts"]:
        name += f" of {', '.join(all_names['parts'])}"
    return name


def _declared_name(chunk: nn.Module) -> object:
    """Return the name that a class sets; None if it sets none."""
    return getattr(chunk, "model_name", None)


def _own_parts(module: nn.Module, of_base: bool) -> Iterator[nn.Module]:
    """Yield the script's own modules inside a module, of which the name of the model's class says nothing.

    of_base: without what `replace_linears` has put in, except for what that keeps of the linear.
    """
    for part in module.children():
        kept = modules_of_linear(part) if of_base else None
        if kept is None:
            yield from _part_and_inside(part, of_base)
        else:
            for inside in kept:
                yield from _part_and_inside(inside, of_base)


def _part_and_inside(part: nn.Module, of_base: bool) -> Iterator[nn.Module]:
    if not _is_known(type(part)):
        yield part
    yield from _own_parts(part, of_base)


def _class_name(model: type) -> str:
    """Return the name of a model's class.

    A class of the script's that has the name of one of ours is marked as the script's.
    """
    if model.__name__ in dir(models) and not _is_known(model):
        return f"script's {model.__name__}"
    return model.__name__


def _is_known(kind: type) -> bool:
    """Return whether a class is this project's or torch's own."""
    return kind.__module__.startswith(("megatron.", "torch."))
