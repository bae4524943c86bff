"""A script of DeepSpeed's that has initialised torch.distributed itself. Its weights must be those of one process."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron import deepspeed
from megatron.deepspeed import comm
from megatron.deepspeed.ds_config_scheduler import make_schedule

ZERO_2 = {"stage": 2, "contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True}
ZERO_2 |= {"reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}
OFFLOAD = {"device": "cpu", "pin_memory": True}
ZERO_3 = {"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD, "stage3_max_live_parameters": 1e9}
WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 2}
CYCLE = {
    "cycle_first_step_size": 2,
    "cycle_first_stair_count": 500,
    "cycle_second_step_size": 1000,
    "decay_step_size": 1000,
}
CYCLE |= {
    "cycle_min_lr": 1e-4,
    "cycle_max_lr": 1e-3,
    "decay_lr_rate": 1e-3,
    "cycle_min_mom": 0.85,
    "cycle_max_mom": 0.99,
}
RANGE = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 200, "lr_range_test_step_rate": 5}
EXAMPLES = [  # of DeepSpeed's documentation: its first steps, ZeRO, offload, precision and schedules
    {"optimizer": {"type": "Adam", "params": {"lr": 0.00015}}, "fp16": {"enabled": True}, "zero_optimization": True},
    {"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}},
    {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}},
    {"zero_optimization": ZERO_2 | {"offload_optimizer": OFFLOAD}},
    {"zero_optimization": ZERO_3, "fp16": {"enabled": True}},
    {"zero_optimization": ZERO_3, "scheduler": {"type": "WarmupLR", "params": WARMUP}},
    {"scheduler": {"type": "WarmupDecayLR", "params": WARMUP | {"total_num_steps": 10}}},
    {"scheduler": {"type": "OneCycle", "params": CYCLE}, "zero_optimization": {"stage": 1}},
    {"scheduler": {"type": "LRRangeTest", "params": RANGE}, "zero_optimization": {"stage": 2}},
]


def made(start: dict[str, torch.Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model.load_state_dict(start)
    return model


def trained(config: dict[str, Any], start: dict[str, torch.Tensor], data: torch.Tensor) -> deepspeed.DeepSpeedEngine:
    """An engine after a step of each batch."""
    engine, *_ = deepspeed.initialize(model=made(start), config=config)
    half = next(engine.module.parameters()).dtype
    for x in data:
        for part in x.chunk(2)[engine.global_rank].chunk(2):
            engine.backward(engine(part.to(half)).square().mean())
            engine.step()
    return engine


def in_one_process(config: dict[str, Any], start: dict[str, torch.Tensor], data: torch.Tensor) -> nn.Module:
    """Plain torch in float64, whose decay is AdamW's, as in DeepSpeed."""
    model = made(start)
    optimizer = torch.optim.AdamW(model.parameters(), **({"weight_decay": 0.0} | config["optimizer"]["params"]))
    schedule = make_schedule(config["scheduler"], optimizer) if "scheduler" in config else None
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return model


def assert_near(engine: deepspeed.DeepSpeedEngine, alone: nn.Module, tolerance: float) -> None:
    wanted = alone.state_dict()
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=0, atol=tolerance)


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
        config = {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage, "overlap_comm": True},
        }
        engine = trained(config, start, data)
        engine.save_checkpoint(f"{folder}/{stage}")
        assert_near(engine, alone, 1e-10)
    for example in EXAMPLES:
        is_half = "fp16" in example or "bf16" in example
        config = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0} | example
        if "optimizer" not in config:
            config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "weight_decay": 3e-7}}
        assert_near(
            trained(config, start, data.float() if is_half else data),
            in_one_process(config, start, data),
            2e-3 if is_half else 1e-10,
        )
    print("deepspeed agrees", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
