"""Batches, clock and optimizer settings that all contenders share."""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.parallel.accelerator import Device
from tools.benchmarking.work import Work

LR = 1e-4
WEIGHT_DECAY = 0.01
CLIP = 1.0
SEED = 1234  # of the batches, and of the initial weights: the default of --seed
MASKED = 0.15  # share of tokens that a BERT predicts


class Phases:
    """Sums the seconds of the phases of a step. Synchronizes the device before it reads the clock."""

    def __init__(self, device: Device):
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        self.device.synchronize()
        start = time.perf_counter()
        yield
        self.device.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase, and begin again."""
        seconds = self.seconds
        self.seconds = {}
        return seconds


class Batches:
    """Endless random microbatches, the same for every contender; each replica has its own."""

    def __init__(self, work: Work, replica: int = 0):
        self.work = work
        self.make = self._masked if work.family == "bert" else self._causal
        self.generator = torch.Generator().manual_seed(SEED + replica)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        """Return the next microbatch, by name: [b, s] each; is_random of a BERT is [b]."""
        return self.make(self.work.micro_batch_size, self.work.seq_length)

    def _tokens(self, b: int, s: int) -> Tensor:
        """Draw random tokens, int64 [b, s]."""
        return torch.randint(self.work.vocab_size, (b, s), generator=self.generator)

    def _causal(self, b: int, s: int) -> dict[str, Tensor]:
        """Make a batch of a GPT or Llama; all tensors are [b, s]."""
        text = self._tokens(b, s + 1)
        return {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": torch.arange(s).expand(b, -1).contiguous(),
            "loss_mask": torch.ones(b, s),
        }

    def _masked(self, b: int, s: int) -> dict[str, Tensor]:
        """Make a batch of a BERT; tensors are [b, s], is_random is [b]."""
        return {
            "text": self._tokens(b, s),
            "labels": self._tokens(b, s),
            "types": (torch.arange(s) >= s // 2).long().expand(b, -1).contiguous(),
            "loss_mask": (torch.rand((b, s), generator=self.generator) < MASKED).long(),
            "padding_mask": torch.ones(b, s, dtype=torch.int64),
            "is_random": torch.randint(2, (b,), generator=self.generator),
        }
