"""Text to token ids and back: `build_tokenizer(TokenizerConfig(...))`.

Names load on first use. Third-party packages are imported only when a tokenizer that needs them is built.
"""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {".tokenizer_config": "TokenizerConfig", ".tokenizers": "Tokenizer NullTokenizer build_tokenizer tokenize_packed"},
)
