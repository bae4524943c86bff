"""Megatron's `BertModel`, built from a `TransformerConfig`, a layer spec and the current mesh."""

from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import takes
from megatron.core.models.bert import bert_stage
from megatron.core.models.common.megatron_model import ModelOfMegatron


class BertModel(ModelOfMegatron, bert_stage.BertModel):
    """One stage of a BERT.

    forward(input_ids, attention_mask, tokentype_ids=None, lm_labels=None) as `megatron.model.BertModel`'s.
    """

    @takes(pg_collection=None)
    def __init__(
        self,
        config: Any,
        num_tokentypes: int,
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
        seq_len_interpolation_factor: None = None,
        add_binary_head: bool = True,
        return_embeddings: bool = False,
        vp_stage: int | None = None,
    ):
        del fp16_lm_cross_entropy
        if return_embeddings or seq_len_interpolation_factor:
            raise NotImplementedError(
                "return_embeddings (a BERT as an encoder of texts) and seq_len_interpolation_factor are not built yet; "
                "leave them out"
            )
        options = {"position_embedding_type": position_embedding_type, "rotary_percent": rotary_percent}
        options |= {"tied": share_embeddings_and_output_weights}
        heads = {"num_tokentypes": num_tokentypes, "add_binary_head": add_binary_head}
        sizes, ends = (vocab_size, max_sequence_length), (pre_process, post_process)
        super().__init__(config, transformer_layer_spec, *sizes, ends, parallel_output, vp_stage, options, **heads)


__getattr__ = names_of_megatron(__name__)
