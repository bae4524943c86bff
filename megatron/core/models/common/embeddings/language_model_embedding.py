"""Import path of Megatron core."""

from megatron.core.classic.modules import LanguageModelEmbedding as LanguageModelEmbedding
