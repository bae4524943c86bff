"""Megatron's `BertModel`, built from a `TransformerConfig`, a layer spec and the current mesh."""

from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.models.bert import bert_stage
from megatron.core.models.common.megatron_core_model_base import MegatronCoreModel
from megatron.core.process_groups_config import OWN_GROUPS, OWN_GROUPS_BY_NAME


class BertModel(MegatronCoreModel, bert_stage.BertModel):
    """One pipeline stage of a BERT with Megatron's arguments.

    forward(input_ids, attention_mask (1 for a token, 0 for padding), tokentype_ids, lm_labels, all [b, s]) -> hidden
    states [s, b, h]; on the last stage a pair: the loss of each token [b, s], or without labels the logits
    [b, s, padded vocabulary / t]; the logits of sentence order [b, 2] or None. All ranks of this stage in one replica
    must call. Building it raises NotImplementedError for arguments that are not built.
    """

    @accepts_defaults_only(pg_collection=OWN_GROUPS, model_comm_pgs=OWN_GROUPS_BY_NAME)
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
        del fp16_lm_cross_entropy  # the loss is taken in float32
        if return_embeddings or seq_len_interpolation_factor:
            raise NotImplementedError(
                "return_embeddings and seq_len_interpolation_factor are not built yet; leave them out"
            )
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
                "untie_embeddings_and_output_weights": not share_embeddings_and_output_weights,
            },
            num_tokentypes=num_tokentypes,
            add_binary_head=add_binary_head,
        )


__getattr__ = names_of_megatron(__name__)
