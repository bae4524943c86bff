"""What a model is called, in a checkpoint and in messages: two models may have parameters of equal names and sizes."""

import json
from collections.abc import Iterable

import torch
from torch import nn

from megatron.core import comm
from megatron.core.grid import Axis
from megatron.core.transformer.transformer import ParallelTransformer
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer


def model_name(chunks: Iterable[nn.Module], pp: Axis, device: torch.device | str) -> str:
    """The same in every layout: `GPTModel`, or `GPTModel of SideBySideLayer` with layers of another class.

    A class may say it itself, `model_name = "GPTModel"`, where it computes the same from the same parameters; and has to, where the
    stages of a pipeline are of different classes. Every rank of `pp` must call.
    """
    chunks = list(chunks)
    named = {getattr(chunk, "model_name", None) for chunk in chunks}
    mine = {
        "said": sorted(name for name in named if isinstance(name, str)),
        "models": sorted({type(chunk).__name__ for chunk in chunks}),
        "layers": sorted({type(layer).__name__ for chunk in chunks for layer in _layers_of(chunk)}),
    }
    stages = [json.loads(text) for text in comm.all_gather_texts(json.dumps(mine), pp, device)]
    said, models, layers = (sorted({n for stage in stages for n in stage[kind]}) for kind in mine)
    if said:
        return " + ".join(said)
    other_layers = layers and layers != [ParallelTransformerLayer.__name__]
    return " + ".join(models) + (f" of {', '.join(layers)}" if other_layers else "")


def _layers_of(chunk: nn.Module) -> list[nn.Module]:
    return [
        layer for part in chunk.modules() if isinstance(part, ParallelTransformer) for layer in part.layers.values()
    ]
