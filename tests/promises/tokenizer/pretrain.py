"""A tokenizer of one's own under GPT: each letter is a token; and texts that it reads as they are asked for."""

import string

import numpy as np

from megatron.core.enums import ModelType
from megatron.core.tokenizers import TOKENIZERS, TokenizerConfig, TokenizerType
from megatron.training import get_runtime, get_tokenizer, pretrain
from pretrain_gpt import forward_step, model_provider

LETTERS = string.ascii_letters + " .,"
TEXT = "The quick brown fox jumps over the lazy dog, and then it runs all the way home again. "


class Letters:
    """One id for each letter, and the end of a document."""

    name, pad = "Letters", None
    vocab_size, eod = len(LETTERS) + 1, len(LETTERS)

    def tokenize(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(LETTERS[i] for i in ids)


def build(config: TokenizerConfig) -> Letters:
    return Letters()


TOKENIZERS["Letters"] = TokenizerType(build)


class Windows:
    """Sample i begins at letter i of the text."""

    def __init__(self, size: int, seq_length: int):
        self.size, self.seq_length = size, seq_length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        first = i % (len(TEXT) - self.seq_length - 1)
        ids = np.array(get_tokenizer().tokenize(TEXT[first : first + self.seq_length + 1]))
        counts, places = np.ones(self.seq_length, np.float32), np.arange(self.seq_length)
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": counts, "position_ids": places}


def datasets_provider(num_samples: list[int]) -> tuple[Windows, ...]:
    """Of training, validation and test."""
    runtime = get_runtime()
    assert runtime.vocab_size == Letters.vocab_size
    return tuple(Windows(size, runtime.config.data.seq_length) for size in num_samples)


if __name__ == "__main__":
    pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
