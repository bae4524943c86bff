"""The name of a model in checkpoints and messages.

It tells apart models whose parameters have equal names and sizes.
"""

import json
from collections.abc import Iterable

import torch
from torch import nn

from megatron.core import models
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis


def model_name(chunks: Iterable[nn.Module], pp: Axis, device: torch.device | str) -> str:
    """Return `GPTModel`, or `GPTModel of SideBySideLayer` if it contains a script's modules; the same in every layout.

    A class may set its name, `model_name = "GPTModel"`, if it computes the same from the same parameters; it must, if
    pipeline stages have different classes. Every rank of `pp` must call.
    """
    chunks = list(chunks)
    declared = {_declared_name(chunk) for chunk in chunks}
    names = {
        "declared": sorted(name for name in declared if isinstance(name, str)),
        "models": sorted({_class_name(type(chunk)) for chunk in chunks}),
        "parts": sorted({name for chunk in chunks for name in _names_of_parts(chunk)}),
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


def _names_of_parts(chunk: nn.Module) -> set[str]:
    """Return the class names of the script's own modules in a chunk: the model's name says nothing about them."""
    return {type(part).__name__ for part in chunk.modules() if part is not chunk and not _is_known(type(part))}


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
