"""Megatron's `GPTModel`, built from a `TransformerConfig`, a layer spec and the current mesh."""

from typing import Any

from torch import Tensor

from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.models.common.megatron_core_model_base import MegatronCoreModel
from megatron.core.models.gpt import gpt_stage
from megatron.core.process_groups_config import OWN_GROUPS_BY_NAME

_NOT_BUILT = {  # further arguments of Megatron's GPTModel -> the only value that is accepted
    "seq_len_interpolation_factor": None,
    "rope_scaling": False,
    "scatter_embedding_sequence_parallel": True,
    "mtp_block_spec": None,
}

_WITHOUT_EFFECT = ("rope_scaling_factor",)


def _refuse(others: dict[str, Any]) -> None:
    """Raise TypeError for arguments that are not Megatron's, and for values that are not built."""
    for name, value in others.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _NOT_BUILT or value != _NOT_BUILT[name]:
            raise TypeError(f"GPTModel: {name}={value!r} is not built; leave it out")


class GPTModel(MegatronCoreModel, gpt_stage.GPTModel):
    """One pipeline stage of a GPT with Megatron's arguments.

    pre_process, post_process: whether it is the first, the last stage.

    forward(input_ids [b, s], position_ids [b, s], attention_mask bool [b or 1, 1, s, s], True where masked, labels
    [b, s]) -> hidden states [s, b, h]; on the last stage the loss of each token [b, s], or without labels the logits
    [b, s, padded vocabulary / t]. All ranks of this stage in one replica must call. Building it raises TypeError for
    arguments that are not built, and forward NotImplementedError for decoder_input.
    """

    @accepts_defaults_only(pg_collection=OWN_GROUPS_BY_NAME, model_comm_pgs=OWN_GROUPS_BY_NAME)
    def __init__(
        self,
        config: Any,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        *,
        vp_stage: int | None = None,
        **others: Any,
    ):
        del fp16_lm_cross_entropy  # the loss is taken in float32
        _refuse(others)
        super().__init__(
            config,
            transformer_layer_spec,
            vocab_size,
            max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=parallel_output,
            vp_stage=vp_stage,
            options={
                "position_embedding_type": position_embedding_type,
                "rotary_percent": rotary_percent,
                "rotary_base": float(rotary_base),
                "untie_embeddings_and_output_weights": not share_embeddings_and_output_weights,
            },
        )

    @accepts_defaults_only(
        "labels",
        inference_context=None,
        packed_seq_params=None,
        extra_block_kwargs=None,
        runtime_gather_output=None,
        inference_params=None,
    )
    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        del loss_mask  # the losses of several predicted tokens would need it; the script's loss function applies it
        if decoder_input is not None:
            raise NotImplementedError("decoder_input is not built yet; pass input_ids")
        return super().forward(input_ids, position_ids, attention_mask, labels)
