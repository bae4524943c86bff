"""What a user's own script may do: join torch.distributed itself, wrap the data sets, and call `pretrain` from code.

Prints `rank R read N samples` on every rank at the end. tests/gloo/test_scripts.py runs it.
"""

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import pretrain


class Counted:
    """A data set that counts what is read of it."""

    reads = 0

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int):
        Counted.reads += 1
        return self.dataset[i]


def counted_datasets(num_samples: list[int]) -> tuple:
    datasets = pretrain_gpt.train_valid_test_datasets_provider(num_samples)
    return tuple(dataset and Counted(dataset) for dataset in datasets)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pretrain(counted_datasets, pretrain_gpt.model_provider, ModelType.encoder_or_decoder, pretrain_gpt.forward_step)
    print(f"rank {rank} read {Counted.reads} samples", flush=True)
