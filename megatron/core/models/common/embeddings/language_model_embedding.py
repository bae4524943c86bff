"""Megatron's `LanguageModelEmbedding` over our embedding."""

from typing import Any

from megatron.core.base.unsupported_arguments import takes
from megatron.core.models.common.embeddings.embedding import Embedding
from megatron.core.transformer.module import context_of, settings_of


class LanguageModelEmbedding(Embedding):
    """Words and positions. forward(input_ids [b, s], position_ids, tokentype_ids) -> [s, b, h]"""

    @takes(scatter_to_sequence_parallel=True, tp_group=None)
    def __init__(
        self,
        config: Any,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        num_tokentypes: int = 0,
    ):
        options = {"position_embedding_type": position_embedding_type, "make_vocab_size_divisible_by": 1}
        ours = settings_of(config, untie_embeddings_and_output_weights=True, **options)
        super().__init__(ours, vocab_size, max_sequence_length, context_of(ours, config), num_tokentypes=num_tokentypes)
        self.config, self.max_sequence_length = config, max_sequence_length

    def zero_parameters(self) -> None:
        for parameter in self.parameters():
            parameter.data.zero_()
