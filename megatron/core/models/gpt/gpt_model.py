"""Megatron's `GPTModel`, built from a `TransformerConfig`, a layer spec and the current mesh."""

from typing import Any

from torch import Tensor

from megatron.core.models.common.megatron_model import ModelOfMegatron
from megatron.core.models.gpt import gpt_stage

_NOT_BUILT = {  # Megatron's other arguments of a GPT -> the value that changes nothing here
    "seq_len_interpolation_factor": None,
    "rope_scaling": False,
    "scatter_embedding_sequence_parallel": True,
    "mtp_block_spec": None,
}


_WITHOUT_EFFECT = ("rope_scaling_factor", "pg_collection", "model_comm_pgs")


def _refuse(others: dict[str, Any]) -> None:
    """Raises for arguments that are not Megatron's, and for values that are not built."""
    for name, value in others.items():
        if name not in _WITHOUT_EFFECT and (name not in _NOT_BUILT or value != _NOT_BUILT[name]):
            raise TypeError(f"GPTModel: {name}={value!r} is not built; leave it out")


class GPTModel(ModelOfMegatron, gpt_stage.GPTModel):
    """One stage of a GPT; `pre_process` and `post_process` say whether it is the first and the last.

    forward(input_ids, position_ids, attention_mask, labels=None) as `megatron.model.GPTModel`'s.
    """

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
        options = {"position_embedding_type": position_embedding_type, "rotary_percent": rotary_percent}
        options |= {"tied": share_embeddings_and_output_weights, "rotary_base": float(rotary_base)}
        sizes, ends = (vocab_size, max_sequence_length), (pre_process, post_process)
        super().__init__(config, transformer_layer_spec, *sizes, ends, parallel_output, vp_stage, options)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        if decoder_input is not None:
            raise NotImplementedError(
                "decoder_input: hidden states in place of tokens are not built yet; pass input_ids"
            )
        return super().forward(input_ids, position_ids, attention_mask, labels)
