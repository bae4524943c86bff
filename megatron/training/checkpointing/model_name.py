"""The name of a model in checkpoints and messages: tells models apart whose parameters have equal names and sizes."""

import json
from collections.abc import Iterable

import torch
from torch import nn

from megatron.core import models
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis


def model_name(chunks: Iterable[nn.Module], pp: Axis, device: torch.device | str) -> str:
    """`GPTModel`, or `GPTModel of SideBySideLayer` if it contains a script's modules; the same in every layout.

    A class may set its name, `model_name = "GPTModel"`, if it computes the same from the same parameters; it must, if
    pipeline
    stages have different classes. Every rank of `pp` must call.
    """
    chunks = list(chunks)
    named = {_declared_name(chunk) for chunk in chunks}
    mine = {
        "said": sorted(name for name in named if isinstance(name, str)),
        "models": sorted({_name_of(type(chunk)) for chunk in chunks}),
        "parts": sorted({name for chunk in chunks for name in _names_of_parts(chunk)}),
    }
    stages = [json.loads(text) for text in collectives.all_gather_texts(json.dumps(mine), pp, device)]
    found = {kind: sorted({name for stage in stages for name in stage[kind]}) for kind in mine}
    if found["said"]:
        return " + ".join(found["said"])
    return " + ".join(found["models"]) + (f" of {', '.join(found['parts'])}" if found["parts"] else "")


def _declared_name(chunk: nn.Module) -> object:
    """The name that a class sets."""
    return getattr(chunk, "model_name", None)


def _names_of_parts(chunk: nn.Module) -> set[str]:
    """Class names of the script's own modules in a chunk: the model's name says nothing about them."""
    return {type(part).__name__ for part in chunk.modules() if part is not chunk and not _is_known(type(part))}


def _name_of(model: type) -> str:
    """The name of a model's class; a script's class with the name of one of ours is marked as the script's."""
    borrows = model.__name__ in dir(models) and not _is_known(model)
    return f"script's {model.__name__}" if borrows else model.__name__


def _is_known(kind: type) -> bool:
    """Whether a class is this project's or torch's own."""
    return kind.__module__.startswith(("megatron.", "torch."))
