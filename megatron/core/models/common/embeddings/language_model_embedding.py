"""Megatron's `LanguageModelEmbedding`, over our embedding."""

from typing import Any

from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.models.common.embeddings.embedding import Embedding
from megatron.core.process_groups_config import OWN_TP_GROUP
from megatron.core.transformer.module import of_process


class LanguageModelEmbedding(Embedding):
    """The embedding with Megatron's arguments.

    forward(input_ids, position_ids, tokentype_ids, all [b, s]) -> [s, b, h], or [s/t, b, h] under sequence parallelism.
    Every tensor-parallel rank must call.
    """

    @accepts_defaults_only(scatter_to_sequence_parallel=True, tp_group=OWN_TP_GROUP)
    def __init__(
        self,
        config: Any,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        num_tokentypes: int = 0,
    ):
        model_config, layer_context = of_process(
            config,
            untie_embeddings_and_output_weights=True,
            position_embedding_type=position_embedding_type,
            make_vocab_size_divisible_by=1,
        )
        super().__init__(model_config, vocab_size, max_sequence_length, layer_context, num_tokentypes=num_tokentypes)
        self.config = config
        self.max_sequence_length = max_sequence_length

    def zero_parameters(self) -> None:
        """Set all parameters to zero."""
        for parameter in self.parameters():
            parameter.data.zero_()
