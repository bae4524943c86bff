"""The layers of one pipeline stage."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.offload.activation_offload import HoldsActivations, StageActivations
from megatron.core.ops.attention.kv_cache import AttentionCache
from megatron.core.ops.attention.masks import Mask, tensors_of
from megatron.core.ops.shard_sequence import positions_of
from megatron.core.transformer.layer_build_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.recompute import recompute_in_backward
from megatron.core.transformer.rotary_angles import angles_of_ropes
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer


class ParallelTransformer(HoldsActivations):
    """Run the layers numbered `layers` (from 0, over the whole model) and, with `post_process`, the final norm.

    With `--norm-placement post` there is no final norm. Layers are named by their number in the whole model, so a
    parameter has one name in every layout. `make_layer(config, i, context)` builds layer i; a fork passes its own.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, cache, position_ids [b, s]) -> the same shape.
    mask: a `Mask`; a tensor is bool [b or 1, 1, s, s], True where masked. position_ids: the positions of rotary angles,
    needed if `context.restarts_positions`. With a cache, x holds the tokens after the cached ones; the cache gives
    their positions and mask. All ranks of this stage in one replica must call. Raises ValueError for a cache of another
    part of the sequence, for missing position_ids, and for samples that are too long.
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
        self.config = config  # TransformerBlock overwrites it with Megatron's TransformerConfig
        self.settings = config
        self.keys = context.keys
        self.shard_saved_inputs_over = tp.axis if config.distribute_saved_activations else None
        self.activations = StageActivations(
            config.cpu_offloading_num_layers,
            smallest=config.min_offloaded_tensor_size,
            contiguous=config.contiguous_checkpointing,
            offload_store=context.offload_store,
        )
        self.ropes = config.ropes
        self.restarts_positions = context.restarts_positions
        self.rows = context.rows
        self.check_length = context.check_length
        self.layers = nn.ModuleDict({str(layer): make_layer(config, layer, context) for layer in layers})
        has_final_norm = post_process and config.norm_placement != "post"
        self.final_layernorm = make_norm(config, context) if has_final_norm else None

    def forward(
        self, x: Tensor, mask: Mask = None, cache: AttentionCache | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        config = self.settings
        length = x.shape[0] * self.rows.sp.size  # rows inside a layer, where sequence parallelism has gathered them
        sample_length = self.rows.within_layers.global_length(length)  # over all ranks that share a sample
        self.check_length(sample_length)
        if cache is not None:
            if self.rows.global_length(1) != cache.sharing.size:
                raise ValueError(
                    "a key/value cache needs all tokens of the sequence on every rank, or, if it was made for several "
                    "ranks, one part of the sequence on each of them; build the model without "
                    "sequence parallelism, and make the cache by model.context.cache(...)"
                )
            mask = cache.mask(length)

        # rotary angles of this rank's tokens, shared by all layers
        angles = None
        if self.ropes:
            positions = self._positions(length, cache, position_ids, x.device)  # [s, b or 1]
            # keys in a cache are not rotated again, so their scaling is that of the longest text from the start
            text_length = sample_length if cache is None else cache.capacity
            angles = angles_of_ropes(self.ropes, positions, config.rotary_width, text_length, like=x)

        # the layers, in groups that are recomputed or offloaded together
        for group in self._groups():
            x = self._run_group(group, x, mask, angles, cache)
        if torch.is_grad_enabled():
            self.activations.finish_forward(x)
        if cache is not None:
            cache.advance(length)

        if self.final_layernorm is not None:
            x = self.final_layernorm(x)
        return x

    def _positions(
        self, length: int, cache: AttentionCache | None, position_ids: Tensor | None, device: torch.device
    ) -> Tensor:
        """Return the positions of this rank's rows inside a layer: [s, b], or [s, 1] if all texts share them."""
        if cache is not None:
            return cache.positions(length).t()
        if not self.restarts_positions:
            return positions_of(self.rows.within_layers, length, device)[:, None]
        if position_ids is None or position_ids.shape[1] != length:
            shape = "none" if position_ids is None else f"position_ids of shape {tuple(position_ids.shape)}"
            raise ValueError(
                "--reset-position-ids restarts rotary angles, so each pipeline stage needs the position_ids of its "
                f"{length} tokens, but the model was given {shape}; read the batch on every stage, as forward_step "
                "of pretrain_gpt.py does"
            )
        return position_ids.t()

    def _run_group(
        self, group: "LayerGroup", x: Tensor, mask: Mask, angles: Tensor | None, cache: AttentionCache | None
    ) -> Tensor:
        """Run a group of layers: x [s, b, h] ([s/t, b, h] under sequence parallelism) -> the same shape."""
        run = partial(_run_layers, group.layers, cache)

        # no backward: nothing to save
        if not torch.is_grad_enabled():
            return run(x, mask, angles)

        # save the group's input alone, where `activations` says
        if group.recompute:
            return recompute_in_backward(
                run,
                self.keys,
                x,
                mask,
                angles,
                shard_over=self.shard_saved_inputs_over,
                keep=self.activations.input_saver(group.first),
                modules=group.layers,
            )

        # save all activations, on the device
        if group.first >= self.activations.offloaded:
            return run(x, mask, angles)

        # offload all activations, but not the tensors that live longer than the layer
        parameters = [parameter for layer in group.layers for parameter in layer.parameters()]
        with self.activations.saving(group.first, x, (*tensors_of(mask), angles, *parameters)):
            return run(x, mask, angles)

    def _groups(self) -> "list[LayerGroup]":
        """Return the layers in order, in groups that are recomputed or offloaded together."""
        config = self.settings
        layers = list(self.layers.values())
        size = config.recompute_num_layers or 1
        if config.recompute_granularity == "full" and config.recompute_method == "uniform":
            return [LayerGroup(i, True, layers[i : i + size]) for i in range(0, len(layers), size)]

        # "block", or no full recomputation: the first layers form groups of one, the others one group
        recomputed_layers = size if config.recompute_granularity == "full" else 0
        single_layers = max(recomputed_layers, config.cpu_offloading_num_layers)
        groups = [LayerGroup(i, i < recomputed_layers, [layer]) for i, layer in enumerate(layers[:single_layers])]
        if layers[single_layers:]:
            groups.append(LayerGroup(single_layers, False, layers[single_layers:]))
        return groups

    def reserve(self, microbatches: int) -> None:
        """Allocate slots for the saved inputs of exactly `microbatches` microbatches in flight."""
        groups = [group for group in self._groups() if group.recompute and group.first >= self.activations.offloaded]
        self.activations.slots.reserve(len(groups) * microbatches)


class LayerGroup(NamedTuple):
    """Consecutive layers of a stage that are recomputed, offloaded or neither."""

    first: int  # index of the first layer in the stage
    recompute: bool  # the backward recomputes the group
    layers: Sequence[nn.Module]


def _run_layers(
    layers: Sequence[nn.Module], cache: AttentionCache | None, x: Tensor, mask: Mask, angles: Tensor | None
) -> Tensor:
    """Run layers one after the other: x [s, b, h] ([s/t, b, h] under sequence parallelism) -> the same shape."""
    options = () if cache is None else (cache,)  # a fork's layer without generation need not take a cache
    for layer in layers:
        x = layer(x, mask, angles, *options)
    return x
