"""A tokenizer of the Hugging Face library whose tokens are bytes."""

from pathlib import Path


def byte_tokenizer(path: Path) -> None:
    """A tokenizer whose ids are the 256 bytes, and one that ends documents: characters beyond ASCII take several."""
    import tokenizers  # of an optional package

    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
