"""The sizes of a run that has begun: of its settings, of the model that its script makes, of one of its ranks."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from megatron.core.mesh import Mesh
from megatron.core.models.bert import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer
from megatron.training.memory.sizes import RunSizes
from megatron.training.runtime import Runtime

MODELS: dict[type, str] = {GPTModel: "gpt", BertModel: "bert"}
_BACKENDS = {"auto", "fused", "flash", "unfused", "local"}  # kernels whose memory is known


def model_of(chunks: Iterable[nn.Module]) -> str | None:
    """Which of our models these are parts of; None: a script's own, or one with a script's own layers or attention kernel."""
    chunks = list(chunks)
    names = {MODELS.get(type(chunk)) for chunk in chunks}
    if len(names) > 1 or None in names:
        return None
    layers = (layer for chunk in chunks for layer in chunk.language_model.decoder.layers.values())
    known = (
        type(layer) is ParallelTransformerLayer and layer.self_attention.core_attention.backend in _BACKENDS
        for layer in layers
    )
    return names.pop() if all(known) else None


def sizes_of(runtime: Runtime, model: str) -> RunSizes:
    """Those of the first data-parallel and tensor-parallel rank, were this the model: one of `sizes.MODELS`."""
    return RunSizes.of(
        runtime.config,
        runtime.vocab_size,
        runtime.world_size,
        accelerator=runtime.device.module is not None,
        threads=torch.get_num_threads(),
        model=model,
        widened=runtime.products.widened,
    )


def of_rank(run: RunSizes, mesh: Mesh) -> RunSizes:
    """The same with the few numbers in which ranks of one stage differ: the part of each bucket that a rank updates, where a share of
    that is offloaded, and the real words of a padded table."""
    layer, part = run.layer, 0
    if run.zero_stage > 0 and 0 < run.offload_fraction < 1:
        axes = mesh.grad_axes(shards=True, divides_outer=run.divides_outer)
        part = axes.shard.rank * axes.outer.size + axes.outer.rank
    rank = mesh["tp"].rank if replace(layer, tensor_rank=mesh["tp"].rank).real_words < layer.real_words else 0
    return replace(run, part=part, layer=replace(layer, tensor_rank=rank))
