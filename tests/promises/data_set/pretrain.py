"""A data set of one's own under GPT: `size` texts of which each counts up from its own number."""

import numpy as np

from megatron.core.enums import ModelType
from megatron.training import get_runtime, pretrain
from pretrain_gpt import forward_step, model_provider


class Counting:
    """Sample i depends on i alone, so that any rank can read it and a resumed run needs no more than a count."""

    def __init__(self, size: int, seq_length: int, vocab_size: int):
        self.size, self.seq_length, self.vocab_size = size, seq_length, vocab_size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        text = np.arange(i, i + self.seq_length + 1) % self.vocab_size
        counts = (text[1:] % 3 != 0).astype(np.float32)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": counts,
            "position_ids": np.arange(self.seq_length),
        }


def datasets_provider(num_samples: list[int]) -> tuple[Counting, ...]:
    """Of training, validation and test."""
    runtime = get_runtime()
    return tuple(Counting(size, runtime.config.data.seq_length, runtime.vocab_size) for size in num_samples)


if __name__ == "__main__":
    pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
