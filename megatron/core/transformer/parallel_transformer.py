"""The layers of one pipeline stage."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.offload.activation_offload import HoldsActivations, StageActivations
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.ops.attention.masks import Mask, tensors_of
from megatron.core.ops.shard_sequence import positions_of
from megatron.core.transformer.layer_build_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.rotary_angles import angles_of
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer


class ParallelTransformer(HoldsActivations):
    """The layers numbered `layers` (from 0, over the whole model) and, with `post_process`, the final norm if there is one.

    Layers are named by their number in the whole model, so a parameter has one name in every layout.
    `make_layer(config, i, context)` builds layer i; a fork passes its own.
    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, cache, position_ids [b, s]) -> the same shape.
    position_ids: the positions of rotary angles, where the context says that they restart.
    With a cache, x holds the tokens after the cached ones; the cache gives their positions and mask.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int],
        context: LayerContext,
        *,
        post_process: bool = True,
        make_layer: MakePart = ParallelTransformerLayer,
    ):
        super().__init__()
        tp = context.tp
        self.config, self.keys = config, context.keys  # a form of Megatron shows another config, of Megatron's names
        self.settings = config
        self.parts_over = tp.axis if config.distribute_saved_activations else None
        self.activations = StageActivations(
            config.cpu_offloading_num_layers,
            smallest=config.min_offloaded_tensor_size,
            contiguous=config.contiguous_checkpointing,
            tier=context.tier,
        )
        self.ropes, self.restarts_positions = config.ropes, context.restarts_positions
        self.rows, self.check_length = context.rows, context.check_length
        self.layers = nn.ModuleDict({str(layer): make_layer(config, layer, context) for layer in layers})
        self.final_layernorm = make_norm(config, context) if post_process and config.norm_placement != "post" else None

    def forward(
        self, x: Tensor, mask: Mask = None, cache: KeyValueCache | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        config, rows = self.settings, self.rows.within_layers
        length = x.shape[0] * self.rows.sp.size
        self.check_length(rows.length_of(length))
        angles = None
        if cache is not None:
            if self.rows.length_of(1) != cache.sharing.size:
                raise ValueError(
                    "a cache needs the whole sequence on every rank, or a part for each rank of its `sharing`; "
                    "build the model "
                    "without sequence parallelism, and make the cache by its context: model.context.cache(...)"
                )
            mask = cache.mask(length)
        if self.ropes:
            positions = self._positions(length, cache, position_ids, x.device)  # [s, b or 1]
            # One scaling for the whole text: keys in a cache are not rotated again.
            tokens = rows.length_of(length) if cache is None else cache.capacity
            angles = angles_of(self.ropes, positions, config.rotary_width, tokens, like=x)
        for group in self._groups():
            x = self._run_group(group, x, mask, angles, cache)
        if torch.is_grad_enabled():
            self.activations.end(x)
        if cache is not None:
            cache.advance(length)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def _positions(
        self, length: int, cache: KeyValueCache | None, position_ids: Tensor | None, device: torch.device
    ) -> Tensor:
        """[s, b], or [s, 1] if all texts share them: of the rows that this rank holds inside a layer."""
        if cache is not None:
            return cache.positions(length).t()
        if not self.restarts_positions:
            return positions_of(self.rows.within_layers, length, device)[:, None]
        if position_ids is None or position_ids.shape[1] != length:
            given = "none" if position_ids is None else f"position_ids of shape {tuple(position_ids.shape)}"
            raise ValueError(
                f"--reset-position-ids restarts rotary angles, for which each pipeline stage needs the position_ids of its "
                f"{length} tokens, and the model was given {given}; read the batch on every stage, as forward_step of "
                "pretrain_gpt.py does"
            )
        return position_ids.t()

    def _run_group(
        self, group: "LayerGroup", x: Tensor, mask: Mask, angles: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        run = partial(_run_layers, group.layers, cache)
        kept, first = self.activations, group.first
        if torch.is_grad_enabled() and group.recompute:
            return recomputed(run, self.keys, x, mask, angles, parts_over=self.parts_over, keep=kept.keeper(first))
        if not torch.is_grad_enabled() or first >= kept.offloaded:
            return run(x, mask, angles)
        beside = (*tensors_of(mask), angles, *(p for layer in group.layers for p in layer.parameters()))
        with kept.saving(first, x, beside):
            return run(x, mask, angles)

    def _groups(self) -> "list[LayerGroup]":
        """The layers in order, in groups that are recomputed or offloaded together."""
        layers, config = list(self.layers.values()), self.settings
        size = config.recompute_num_layers or 1
        if config.recompute_granularity == "full" and config.recompute_method == "uniform":
            return [LayerGroup(i, True, layers[i : i + size]) for i in range(0, len(layers), size)]
        again = size if config.recompute_granularity == "full" else 0
        alone = max(again, config.cpu_offloading_num_layers)  # these are recomputed or offloaded one by one
        groups = [LayerGroup(i, i < again, [layer]) for i, layer in enumerate(layers[:alone])]
        return [*groups, LayerGroup(alone, False, layers[alone:])] if layers[alone:] else groups

    def reserve(self, microbatches: int) -> None:
        """Allocate slots for saved inputs of `microbatches` microbatches in flight, and no more."""
        groups = sum(group.recompute and group.first >= self.activations.offloaded for group in self._groups())
        self.activations.slots.reserve(groups * microbatches)


class LayerGroup(NamedTuple):
    """Consecutive layers."""

    first: int  # index of the first layer in the stage
    recompute: bool  # the backward recomputes the group
    layers: Sequence[nn.Module]


def _run_layers(
    layers: Sequence[nn.Module], cache: KeyValueCache | None, x: Tensor, mask: Mask, angles: Tensor | None
) -> Tensor:
    more = () if cache is None else (cache,)  # a fork's layer without generation need not take a cache
    for layer in layers:
        x = layer(x, mask, angles, *more)
    return x
