"""Samples of one's own from token files: each is one document, cut or padded. Which document is kept in a cache and blended."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.build_datasets import BuildContext, FileSplit, SampleKind, Say, build_datasets
from megatron.core.enums import ModelType
from megatron.core.parallel import collectives
from megatron.training import get_runtime, pretrain, print_rank_0
from pretrain_gpt import forward_step, model_provider

HERE = Path(__file__).parent


def write(name: str, first: int) -> str:
    """30 documents of 5 to 10 tokens that count up from `first`."""
    with IndexedDatasetWriter(HERE / name, np.uint16) as writer:
        for d in range(30):
            writer.add_document(np.arange(first + d % 9, first + d % 9 + 5 + d % 6))
    return str(HERE / name)


@dataclass(frozen=True)
class Request:
    """What the order depends on."""

    ids: tuple[int, int]
    num_samples: int
    seed: int


class Documents(SampleKind):
    name, arrays = "Documents", ("order",)

    def __init__(self, seq_length: int, seed: int):
        self.seq_length, self.seed = seq_length, seed

    def request(self, ids: tuple[int, int], num_samples: int | None) -> Request:
        return Request(ids, num_samples, self.seed)

    def build(self, file_split: FileSplit, say: Say) -> tuple[np.ndarray]:
        request = file_split.request
        return (np.random.RandomState(request.seed).randint(*request.ids, size=request.num_samples),)

    def dataset(self, file_split: FileSplit, arrays: tuple[np.ndarray, ...]) -> "OneDocumentEach":
        return OneDocumentEach(file_split.indexed, arrays[0], self.seq_length)


@dataclass
class OneDocumentEach:
    indexed: IndexedDataset
    order: np.ndarray
    seq_length: int

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        text = self.indexed[int(self.order[i])][: self.seq_length + 1].astype(np.int64)
        padding = self.seq_length + 1 - len(text)
        padded, places = np.pad(text, (0, padding)), np.arange(self.seq_length)
        counts = (places < len(text) - 1).astype(np.float32)
        return {"tokens": padded[:-1], "labels": padded[1:], "loss_mask": counts, "position_ids": places}


def datasets_provider(num_samples: list[int]) -> tuple[Any, ...]:
    """Of training, validation and test: seven parts of one file and three of another. The first rank builds, the others wait."""
    runtime = get_runtime()
    world, device = runtime.mesh["world"], runtime.device.torch_device
    blend = ["0.7", str(HERE / "low"), "0.3", str(HERE / "high")]
    config = replace(runtime.config.data, data_path=blend, split="8,1,1")
    build_context = BuildContext(world.is_first, lambda: collectives.barrier(world, device), print_rank_0, print_rank_0)
    kind = Documents(config.seq_length, runtime.config.training.seed)
    return build_datasets(config, kind, num_samples, build_context)


if __name__ == "__main__":
    write("low", 3), write("high", 30)
    pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
