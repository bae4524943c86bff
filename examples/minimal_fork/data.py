"""A data set of one's own: random phrases, each said again and again, which a model learns by looking back.

A data set is anything with a length and items that are dictionaries of arrays. Item i must depend on i alone, so that every
rank can read any of them and a resumed run needs no more than a count.
"""

from dataclasses import dataclass

import numpy as np

from megatron.core.config import ConfigError, knob

WORDS = 100  # in the vocabulary, unless --vocab-size says another number


@dataclass(frozen=True)
class PhraseConfig:
    """Phrases."""

    phrase_length: int = knob(8, "tokens until a text repeats itself")

    def __post_init__(self) -> None:
        if self.phrase_length < 1:
            raise ConfigError(f"--phrase-length is {self.phrase_length}; it must be at least 1")


class Phrases:
    """`size` texts of `seq_length` tokens, made up from (seed, split, number)."""

    def __init__(self, config: PhraseConfig, size: int, seq_length: int, vocab_size: int, seed: tuple[int, int]):
        self.config, self.size, self.seq_length = config, size, seq_length
        self.vocab_size, self.seed = vocab_size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """tokens, labels, and restarts: whether the label begins the phrase anew; int64 [seq_length]."""
        phrase = np.random.default_rng([*self.seed, i]).integers(self.vocab_size, size=self.config.phrase_length)
        text = np.resize(phrase, self.seq_length + 1)
        restarts = np.arange(1, self.seq_length + 1) % self.config.phrase_length == 0
        return {"tokens": text[:-1], "labels": text[1:], "restarts": restarts.astype(np.int64)}
