"""Megatron's `TransformerBlock`: the layers of one pipeline stage."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache as cached, partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.offload.activation_offload import HoldsActivations, StageActivations
from megatron.core.ops.attention.document_and_window_masks import Documents, Mask, tensors_of
from megatron.core.ops.attention.kv_cache import AttentionCache, DecoderCache
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, flops_of, further_flops
from megatron.core.ops.shard_sequence import positions_of
from megatron.core.process_groups_config import OWN_GROUPS, OWN_GROUPS_BY_NAME
from megatron.core.transformer.cross_attention import CrossAttentionState
from megatron.core.transformer.gpt_and_bert_local_layer_specs import bert_layer_local_spec, get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_parallel_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import MegatronModule, of_process
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.numbered_layers import NumberedLayers
from megatron.core.transformer.recompute_without_rng_state import recompute_in_backward
from megatron.core.transformer.rotary_angles_and_frequency_scaling import angles_of_ropes
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, context_arguments, get_module
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    layers_of_stage,
    no_cache_in_custom_layer,
    to_rotary_pos_emb,
)


@accepts_defaults_only(layer_norm=None)
@dataclass
class TransformerBlockSubmodules:
    """The parts of a `TransformerBlock`: a spec for each layer of the stage."""

    layer_specs: list[ModuleSpec] | None = None


class TransformerBlock(HoldsActivations, MegatronModule):
    """Run the layers of one pipeline stage and, on the last one, the final norm.

    With `--norm-placement post` there is no final norm. Layers are named by their number in the whole model, so a
    parameter has one name in every layout; `layers` is indexed by place in the stage (`NumberedLayers`).

    config: a `TransformerConfig`, or our `ModelConfig`. spec: a layer's, or `TransformerBlockSubmodules` with one for
    each layer of the stage; default: our own layer. pre_process: forward starts from hidden_states; False: from the
    tensor of `set_input_tensor`. post_layer_norm, post_process: both: with the final norm. vp_stage: index of the stage
    on this rank; default: the one that is being built. By keyword alone:

    - layers: their numbers from 0 over the whole model; default: those of the stage that is being built.
    - layer_context: the place in the layout; default: that of the process, which is asked once, here.
    - settings: our form of `config`; default: what follows from it.
    - numbered_from: added to the number that a layer is built with, as a T5's decoder counts behind its encoder.
    - make_layer: builds layer i as make_layer(settings, i, layer_context), in the place of `spec`. Such a layer has the
      contract of `ParallelTransformerLayer`: forward(x, mask, angles, cache) -> the shape of x.

    forward(hidden_states [s, b, h] ([s/t, b, h] under sequence parallelism), attention_mask, context [m, b, h],
    context_mask [.., s or 1, m], True where masked) -> the shape of hidden_states. attention_mask: a `Mask`; a tensor
    is bool [b or 1, 1, s, s], True where masked. By keyword alone: inference_context, a key/value cache: hidden_states
    are the tokens after the cached ones, and the cache gives their positions and mask; position_ids [b, s], the
    positions of rotary angles, needed if `layer_context.restarts_positions`.

    All ranks of this stage in one replica must call. Raises ValueError for a cache of another part of the sequence, for
    missing position_ids, and for samples that are too long; NotImplementedError for other arguments of Megatron's.
    """

    @accepts_defaults_only("post_process", pg_collection=OWN_GROUPS, model_comm_pgs=OWN_GROUPS_BY_NAME)
    def __init__(
        self,
        config: Any,
        spec: Any = None,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        *,
        layers: Iterable[int] | None = None,
        layer_context: LayerContext | None = None,
        settings: ModelConfig | None = None,
        numbered_from: int = 0,
        make_layer: MakePart | None = None,
    ):
        super().__init__(config)
        own_settings, place = of_process(config, layer_context, settings)
        tp = place.tp
        self.settings = own_settings
        self.pre_process = pre_process
        self.post_process = post_process
        self.input_tensor: Tensor | None = None
        self.keys = place.keys
        # under sequence parallelism a rank's inputs are of tokens of its own, and nothing is saved twice
        has_copies = not tp.sequence_parallel
        self.shard_saved_inputs_over = tp.axis if own_settings.distribute_saved_activations and has_copies else None
        self.activations = StageActivations(
            own_settings.cpu_offloading_num_layers,
            smallest=own_settings.min_offloaded_tensor_size,
            contiguous=own_settings.contiguous_checkpointing,
            offload_store=place.offload_store,
        )
        self.ropes = own_settings.ropes
        self.restarts_positions = place.restarts_positions
        self.rows = place.rows
        self.check_length = place.check_length

        # the layers
        numbers = list(layers_of_stage(config, vp_stage=vp_stage) if layers is None else layers)
        self.run_layer = _run_megatron_layer if make_layer is None else _run_classic_layer
        built = {}
        for position, number in enumerate(numbers):
            layer = numbered_from + number
            if make_layer is not None:
                built[number] = make_layer(own_settings, layer, place)
            else:
                layer_spec = _spec_of_layer(spec, position)
                built[number] = _build_layer(layer_spec, config, own_settings, layer, position, place)
            if not isinstance(built[number], (TransformerLayer, IdentityOp)):  # ours checks its attention itself
                place.check_attends_over_whole_samples(built[number], layer, whole_layer=True)
        self.layers = NumberedLayers(built)
        has_final_norm = post_layer_norm and post_process and own_settings.norm_placement != "post"
        self.final_layernorm = make_norm(own_settings, place) if has_final_norm else None

        # Megatron's attributes
        self.num_layers_per_pipeline_rank = len(self.layers)
        self.checkpoint_core_attention = own_settings.recompute_granularity == "selective"

    def _get_layer(self, layer_number: int) -> nn.Module:
        return self.layers[layer_number]

    def set_input_tensor(self, input_tensor: Tensor) -> None:
        """Set the hidden states [s, b, h] that forward starts from, on every stage but the first."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Any = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        *,
        inference_context: AttentionCache | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if not_built := [name for name, value in others.items() if value is not None]:
            raise NotImplementedError(f"TransformerBlock: {', '.join(not_built)} is not built yet; leave it out")
        config = self.settings
        x = hidden_states if self.pre_process else self.input_tensor
        mask = attention_mask
        cache = inference_context
        of_decoder = None  # the cache of a decoder with cross-attention, which its model advances
        if isinstance(cache, DecoderCache):
            of_decoder = cache
            cache = None
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
            x, context = self._run_group(group, x, mask, angles, context, context_mask, of_decoder or cache)
        if torch.is_grad_enabled():
            self.activations.finish_forward(x)
        if cache is not None:
            cache.advance(length)

        if self.final_layernorm is not None:
            x = self.final_layernorm(x)
        return x

    def count_flops(self, x: LayerInput) -> Flops:
        flops = Flops()
        for group in self._groups():
            for layer in group.layers:
                flops += flops_of(layer, x, recompute=group.recompute)
                x = x.after(layer)
        return flops + further_flops(self, x, (self.layers,))

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
        self,
        group: "LayerGroup",
        x: Tensor,
        mask: Mask,
        angles: Tensor | None,
        context: Tensor | None,
        context_mask: Tensor | None,
        cache: AttentionCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a group of layers: x [s, b, h] ([s/t, b, h] under sequence parallelism) -> the same shape, context."""
        run = partial(_run_layers, self.run_layer, group.layers, cache)
        inputs = (x, mask, angles, context, context_mask)

        # no backward: nothing to save
        if not torch.is_grad_enabled():
            return run(*inputs)

        # save the group's inputs alone; x where `activations` says
        if group.recompute:
            return recompute_in_backward(
                run,
                self.keys,
                *inputs,
                shard_over=self.shard_saved_inputs_over,
                keep=self.activations.input_saver(group.first),
                modules=group.layers,
            )

        # save all activations, on the device
        if group.first >= self.activations.offloaded:
            return run(*inputs)

        # offload all activations, but not the tensors that live longer than the layer
        parameters = [parameter for layer in group.layers for parameter in layer.parameters()]
        shared = (*tensors_of(mask), angles, context, context_mask)
        with self.activations.saving(group.first, x, (*shared, *parameters)):
            return run(*inputs)

    def _groups(self) -> "list[LayerGroup]":
        """Return the layers in order, in groups that are recomputed or offloaded together."""
        config = self.settings
        layers = list(self.layers)
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

    @property
    def parts_without_cache(self) -> list[nn.Module]:
        """The layers, and attentions in them, of a script's own that cannot generate text."""
        parts = []
        for layer in self.layers:
            takes_cache = _takes_cache if self.run_layer is _run_classic_layer else _takes_angles
            if not takes_cache(type(layer)):
                parts.append(layer)
            elif isinstance(layer, TransformerLayer):
                parts += layer.attentions_without_cache
        return parts

    @property
    def weight_grads_read_inputs(self) -> bool:
        """Whether a linear layer may read a saved input itself, as attention does without a norm before it.

        A rank that saves its shard alone gathers a copy for the backward.
        """
        if self.shard_saved_inputs_over is not None and self.shard_saved_inputs_over.size > 1:
            return False
        first_layers = [group.layers[0] for group in self._groups() if group.recompute]
        return not all(isinstance(layer, TransformerLayer) and layer.norms_its_input for layer in first_layers)

    def reserve(self, microbatches: int) -> None:
        """Allocate slots for the saved inputs of exactly `microbatches` microbatches in flight."""
        groups = [group for group in self._groups() if group.recompute and group.first >= self.activations.offloaded]
        if groups:
            self.activations.slots.reserve(len(groups) * microbatches)


class LayerGroup(NamedTuple):
    """Consecutive layers of a stage that are recomputed, offloaded or neither."""

    first: int  # index of the first layer in the stage
    recompute: bool  # the backward recomputes the group
    layers: Sequence[nn.Module]


def without_block(spec: Any) -> Any:
    """Return the `TransformerBlockSubmodules` of a block's spec; a layer's spec, or these submodules, as they are."""
    submodules = getattr(spec, "submodules", None)
    return submodules if isinstance(submodules, TransformerBlockSubmodules) else spec


def _spec_of_layer(spec: Any, position: int) -> Any:
    """Return the spec of the stage's layer at this position; None: of our own layer."""
    spec = without_block(spec)
    return spec.layer_specs[position] if isinstance(spec, TransformerBlockSubmodules) else spec


def _build_layer(
    spec: Any, config: Any, settings: ModelConfig, layer: int, position: int, layer_context: LayerContext
) -> nn.Module:
    """Build a layer: our own, if the spec is None or one of our local specs.

    layer: from 0 over the whole model; position: from 0 in the stage. settings: our form of `config`; it may have more.
    """
    counts = (None, settings.num_experts)  # also without num_experts the config says which layers have experts
    has_qk_norm = spec in [get_gpt_layer_local_spec(count, qk_layernorm=True) for count in counts]
    ours = [bert_layer_local_spec, *(get_gpt_layer_local_spec(count) for count in counts)]
    if spec is None or has_qk_norm or spec in ours:
        own_settings = replace(settings, qk_layernorm=True) if has_qk_norm else settings
        return TransformerLayer(config, None, layer + 1, layer_context=layer_context, settings=own_settings)
    # a layer that is given its place in the layout counts over the whole model
    arguments = context_arguments(get_module(spec), settings, layer_context)
    number = layer + 1 if arguments else position + 1
    built = build_module(spec, config=config, layer_number=number, **arguments)
    built.gives_hidden_states = True  # for --inspect
    return built


# ---------------------------------------------------------------- how a layer is called


def _run_layers(
    run_layer: Callable[..., tuple[Tensor, Tensor | None]],
    layers: Sequence[nn.Module],
    cache: AttentionCache | None,
    x: Tensor,
    mask: Mask,
    angles: Tensor | None,
    context: Tensor | None,
    context_mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run layers one after the other: x [s, b, h] ([s/t, b, h] under sequence parallelism) -> its shape, context."""
    for layer in layers:
        x, context = run_layer(layer, x, mask, angles, context, context_mask, cache)
    return x, context


def _run_megatron_layer(
    layer: nn.Module,
    x: Tensor,
    mask: Any,
    angles: Tensor | None,
    context: Tensor | None,
    context_mask: Tensor | None,
    cache: AttentionCache | None,
) -> tuple[Tensor, Tensor | None]:
    """Run a layer with Megatron's contract, a script's own or ours, which also takes `angles` and a cache."""
    options: dict[str, Any] = {}
    if context is not None or context_mask is not None:
        options = {"context": context, "context_mask": context_mask}
    if _takes_angles(type(layer)):
        options |= {"angles": angles, "inference_context": cache}
    else:
        if cache is not None:
            raise no_cache_in_custom_layer(layer)
        if angles is not None:
            options["rotary_pos_emb"] = to_rotary_pos_emb(angles)  # [s, b or 1, 1, width]
        if isinstance(mask, Documents):
            mask = mask.mask  # [b, 1, s, s]
    output = layer(x, mask, **options)
    return output if isinstance(output, tuple) else (output, context)


@cached
def _takes_angles(layer: type[nn.Module]) -> bool:
    """Return whether a layer is called as our `TransformerLayer` is. A script's subclass may leave out what is ours."""
    return {"angles", "inference_context"} <= signature(layer.forward).parameters.keys()


@cached
def _takes_cache(layer: type[nn.Module]) -> bool:
    """Return whether a layer that `make_layer` builds takes a cache behind x, mask and angles."""
    parameters = list(signature(layer.forward).parameters.values())[1:]  # without self
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return True
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters) >= 4


def _run_classic_layer(
    layer: nn.Module,
    x: Tensor,
    mask: Any,
    angles: Tensor | None,
    context: Tensor | None,
    context_mask: Tensor | None,
    cache: AttentionCache | None,
) -> tuple[Tensor, Tensor | None]:
    """Run a layer with the contract of `ParallelTransformerLayer`: (x, mask, angles, cache) -> the shape of x."""
    if context is not None or context_mask is not None:
        mask = CrossAttentionState(mask, context, context_mask, cache)
        cache = None
    if cache is not None and not _takes_cache(type(layer)):
        raise no_cache_in_custom_layer(layer)
    options = () if cache is None else (cache,)  # a layer without generation need not take a cache
    return layer(x, mask, angles, *options), context


__getattr__ = names_of_megatron(__name__)
