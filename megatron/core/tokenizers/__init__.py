"""Text to token ids and back: `build_tokenizer(TokenizerConfig(...))`. A new type is a line in `tokenizers.TOKENIZERS`.

Names load on first use. Third-party packages are imported only when a tokenizer that needs them is built.
"""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".tokenizer_config": "TokenizerConfig build_tokenizer",
        ".tokenizers": "TOKENIZERS Tokenizer TokenizerType NullTokenizer",
    },
)
