"""Megatron's `T5Model`, built from two `TransformerConfig`s, the specs of both stacks and the current mesh."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.models.common.megatron_core_model_base import MegatronCoreModel
from megatron.core.models.T5 import t5_stage
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec
from megatron.core.parallel.global_state import get_global_state
from megatron.core.process_groups_config import OWN_GROUPS, OWN_GROUPS_BY_NAME
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, without_block
from megatron.core.transformer.transformer_layer import CROSS_ATTENTION, TransformerLayer, layers_of_stage

_OURS = {
    "encoder": get_t5_encoder_with_local_block_spec(1).layer_specs[0],
    "decoder": get_t5_decoder_with_local_block_spec(1).layer_specs[0],
}


def _specs_of_stack(stack: str, spec: Any) -> Any:
    """Return the spec of a stack's layers as our block takes it: None if all of them are ours.

    The cross-attention of our decoder spec is ours in a script's own layers, too: it is numbered behind all layers, so
    its dropout masks differ from those of the layer's self-attention. Raises NotImplementedError for a layer that is no
    `TransformerLayer`.
    """
    spec = without_block(spec)
    is_list = isinstance(spec, TransformerBlockSubmodules)
    layers = spec.layer_specs if is_list else [spec]
    if all(layer == _OURS[stack] for layer in layers):
        return None
    specs = []
    for layer in layers:
        kind = get_module(layer)
        if not isinstance(kind, type) or not issubclass(kind, TransformerLayer):
            raise NotImplementedError(
                f"T5Model: {kind.__name__} is not supported as a layer of the {stack}, as it is no TransformerLayer; "
                f"give get_t5_{stack}_with_local_block_spec(n), whose layers may have other parts or be of a subclass"
            )
        parts = layer.submodules
        if parts.cross_attention == _OURS["decoder"].submodules.cross_attention:
            parts = replace(parts, cross_attention=CROSS_ATTENTION)
        specs.append(ModuleSpec(layer.module, layer.params, parts, layer.metainfo))
    return TransformerBlockSubmodules(specs) if is_list else specs[0]


def _with_layers_of(config: Any, spec: Any) -> Any:
    """Return a copy of the config with as many layers as a block spec has; the config itself for a layer's spec."""
    if not isinstance(spec, TransformerBlockSubmodules):
        return config
    changed = copy.copy(config)
    changed.num_layers = len(spec.layer_specs)
    return changed


class T5Model(MegatronCoreModel, t5_stage.T5Model):
    """One stage of a T5: `config` is the decoder's, `encoder_config` the encoder's.

    forward(encoder_input_ids [b, s], decoder_input_ids [b, m], encoder_attn_mask bool [b, 1, s or 1, s],
    decoder_attn_mask, encoder_decoder_attn_mask, lm_labels [b, m]) -> the tensors of `boundary`; on the last stage the
    loss of each token [b, m], or without labels the logits [b, m, padded vocabulary / t]. All ranks of this stage in
    one replica must call.

    Masks are True where attention is masked. The first one says which of the encoder's tokens are padding; the decoder
    is causal and attends to all others, so the other two are not read. As in Megatron, with tied weights the logits
    have a bias, and hidden states are not divided by the root of their width. Layers of a script's own are a
    `TransformerLayer` of other parts, or of a subclass. Building it raises NotImplementedError for rotary positions and
    other layers, and ValueError for layers that do not fit the run.
    """

    @accepts_defaults_only(pg_collection=OWN_GROUPS, model_comm_pgs=OWN_GROUPS_BY_NAME)
    def __init__(
        self,
        config: Any,
        encoder_config: Any = None,
        transformer_encoder_layer_spec: Any = None,
        transformer_decoder_layer_spec: Any = None,
        vocab_size: int = 0,
        max_sequence_length: int = 0,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: None = None,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        add_encoder: bool = True,
        add_decoder: bool = True,
    ):
        del fp16_lm_cross_entropy, rotary_percent  # the loss is taken in float32; there are no rotary positions
        if position_embedding_type == "rope" or seq_len_interpolation_factor is not None:
            raise NotImplementedError(
                "T5Model: rotary positions are not supported in a T5; use relative or learned_absolute"
            )
        if transformer_encoder_layer_spec is None or transformer_decoder_layer_spec is None:
            raise TypeError("T5Model needs transformer_encoder_layer_spec and transformer_decoder_layer_spec")
        if encoder_config is None:  # Megatron's earlier signature: the block specs say how many layers a stack has
            encoder_config = _with_layers_of(config, transformer_encoder_layer_spec)
            config = _with_layers_of(config, transformer_decoder_layer_spec)
        self._stacks = {
            "encoder_spec": _specs_of_stack("encoder", transformer_encoder_layer_spec),
            "decoder_spec": _specs_of_stack("decoder", transformer_decoder_layer_spec),
            "encoder_config": encoder_config,
            "decoder_config": config,
        }
        run = get_global_state().run
        data = None if run is None else run.config.data
        options = {
            "num_layers": encoder_config.num_layers,
            "decoder_num_layers": config.num_layers,
            "position_embedding_type": position_embedding_type,
            "untie_embeddings_and_output_weights": not share_embeddings_and_output_weights,
            "add_output_bias": share_embeddings_and_output_weights,
            "scale_decoder_outputs": False,
        }
        if position_embedding_type == "relative":
            options["relative_attention_num_buckets"] = relative_attention_num_buckets
            options["relative_attention_max_distance"] = relative_attention_max_distance
        self.encoder_layers = encoder_config.num_layers
        super().__init__(
            config,
            None,
            vocab_size,
            max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=parallel_output,
            vp_stage=None,
            options=options,
            decoder_seq_length=(data and data.decoder_seq_length) or max_sequence_length,
        )
        self.encoder_config = encoder_config
        self.add_encoder = add_encoder
        self.add_decoder = add_decoder
        for stack, requested, layers in (
            ("encoder", add_encoder, self.encoder),
            ("decoder", add_decoder, self.decoder),
        ):
            if layers is not None and not requested:
                raise ValueError(
                    f"T5Model: add_{stack}=False for a stage that has layers of the {stack}; pass on the arguments "
                    "of model_provider, and set the decoder's first rank by --pipeline-model-parallel-split-rank"
                )

    def _layers(self, spec: None, config: Any) -> dict[str, Any]:
        state = get_global_state()
        encoder_layers = self.encoder_layers
        decoder_layers = config.num_layers
        if state.run is None:
            return self._stacks | {"layers": layers_of_stage(config, encoder_layers + decoder_layers)}
        of_run = state.run.config.transformer
        if (encoder_layers, decoder_layers) != (of_run.num_layers, of_run.decoder_layers):
            raise ValueError(
                f"T5Model: the configs have {encoder_layers} encoder and {decoder_layers} decoder layers, but the "
                f"flags of this run give {of_run.num_layers} and {of_run.decoder_layers}; set --encoder-num-layers "
                "and --decoder-num-layers to the configs' numbers"
            )
        stages_of_rank = state.mesh.stages.of_rank(state.mesh["pp"].rank)  # one for each virtual stage
        stage = stages_of_rank[state.virtual_rank or 0]
        return self._stacks | {"layers": state.run.config.layer_split[stage]}

    @property
    def encoder(self) -> nn.Module | None:
        return self.language_model.encoder

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the tensors of the previous stage, from which the next forward starts: those of `boundary`."""
        self.language_model.set_input_tensor(input_tensor)

    @accepts_defaults_only(
        encoder_hidden_states=None,
        output_encoder_hidden_only=False,
        inference_context=None,
        packed_seq_params=None,
        inference_params=None,
    )
    def forward(
        self,
        encoder_input_ids: Tensor | None,
        decoder_input_ids: Tensor | None,
        encoder_attn_mask: Tensor,
        decoder_attn_mask: Tensor | None,
        encoder_decoder_attn_mask: Tensor | None,
        lm_labels: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        # not read: padding is at a text's end, and no token attends to later ones
        del decoder_attn_mask, encoder_decoder_attn_mask
        is_padding = encoder_attn_mask  # [b, s], or a mask of pairs
        if is_padding.dim() > 2:
            is_padding = is_padding.flatten(1, -2).all(dim=1)  # [b, s]: keys that no query attends to
        is_token = ~is_padding
        return super().forward(encoder_input_ids, decoder_input_ids, is_token.to(torch.int64), lm_labels)


__getattr__ = names_of_megatron(__name__)
