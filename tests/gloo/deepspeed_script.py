"""A script of DeepSpeed's that has initialised torch.distributed itself. Its weights must be those of one process."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from megatron import deepspeed
from megatron.deepspeed import comm


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours = dist.group.WORLD
    deepspeed.init_distributed()
    assert dist.group.WORLD is ours and comm.cdb.was_adopted and comm.cdb.name == "gloo"
    data = torch.randn(3, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    start = {name: value.clone() for name, value in alone.state_dict().items()}
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, weight_decay=0.1)
    for x in data:
        optimizer.zero_grad()
        alone(x).square().mean().backward()
        optimizer.step()
    for stage in (0, 3):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        model.load_state_dict(start)
        config = {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage, "overlap_comm": True},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        for x in data:
            for part in x.chunk(2)[engine.global_rank].chunk(2):
                engine.backward(engine(part).square().mean())
                engine.step()
        engine.save_checkpoint(f"{folder}/{stage}")
        for name, value in engine.module_state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=1e-10)
    print("deepspeed agrees", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
