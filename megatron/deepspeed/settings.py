"""What a ds_config asks for, in this project's settings."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.supported_config_keys import ConfigKeyPolicy
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.offload.state_offload_config import OffloadConfig
from megatron.core.optimizer.loss_scaler import LossScaleConfig
from megatron.deepspeed.config_keys import NO_EFFECT, REFUSED, WORKS
from megatron.training.zero_engine import EngineConfig

KEYS = ConfigKeyPolicy(WORKS, NO_EFFECT, REFUSED, "ds_config", "docs/deepspeed.md")


@dataclass(frozen=True)
class Settings(EngineConfig):
    """A ds_config, read. notes: its keys without effect, and why."""

    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    drop_last: bool = False
    steps_per_print: int | None = None
    notes: tuple[str, ...] = ()


def load_ds_config(given: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The file, or the dict itself. Raises ConfigError if it is no JSON object, or names a key twice."""
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, str | Path):
        raise ConfigError(f"config is a {type(given).__name__}; it must be a dict, or the path of a JSON file")
    try:
        read = json.loads(Path(given).read_text(), object_pairs_hook=_without_repeats)
    except (OSError, ValueError) as error:
        raise ConfigError(f"ds_config {given}: {error}; it must be a JSON file") from error
    if not isinstance(read, dict):
        raise ConfigError(f"ds_config {given} holds a {type(read).__name__}; it must be an object in braces")
    return read


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} is there twice")
    return dict(pairs)


def read_settings(given: Mapping[str, Any], ranks: int) -> Settings:
    """The settings for this many data-parallel ranks. Raises ConfigError with what is refused, unknown or inconsistent."""
    if given.get("zero_optimization") is True:  # the short form
        given = {**given, "zero_optimization": {"stage": 1}}
    notes = KEYS.check(given)
    zero, half = (given.get(name) or {} for name in ("zero_optimization", "fp16"))
    wide = given.get("bf16") or {}
    micro_batch, accumulation = _batches(given, ranks)
    if half.get("enabled") and wide.get("enabled"):
        raise ConfigError("ds_config: fp16 and bf16 are both enabled; enable one")
    stage = int(zero.get("stage") or 0)
    offloads = [_offload(zero, name) for name in ("offload_optimizer", "offload_param")]
    if offloads[1].tier != "device" and (stage != 3 or offloads[0].tier == "device"):
        raise ConfigError("ds_config: offload_param needs stage 3, and offload_optimizer with a device; give both")
    overlaps = bool(zero.get("overlap_comm"))
    bucket = zero.get("reduce_bucket_size")
    return Settings(
        micro_batch=micro_batch,
        accumulation=accumulation,
        precision="float16" if half.get("enabled") else "bfloat16" if wide.get("enabled") else "",
        clipping=float(given.get("gradient_clipping") or 0),
        takes_mean=given.get("gradient_allreduce_op") != "sum",
        data_parallel=DataParallelConfig(
            zero_stage=stage,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps and stage == 3,
            ddp_bucket_size=None if bucket is None else int(bucket),
        ),
        loss_scale=LossScaleConfig(
            loss_scale=float(half.get("loss_scale") or 0),
            initial_loss_scale=2.0 ** int(half.get("initial_scale_power", 16)),
            min_loss_scale=float(half.get("min_loss_scale", 1)),
            loss_scale_window=int(half.get("loss_scale_window", 1000)),
            hysteresis=int(half.get("hysteresis", 2)),
        ),
        restores_hysteresis=bool(half.get("consecutive_hysteresis")),
        casts_inputs=bool(half.get("enabled") and half.get("auto_cast")),
        offload_optimizer=offloads[0],
        offload_param=offloads[1],
        optimizer=given.get("optimizer") or None,
        scheduler=given.get("scheduler") or None,
        drop_last=bool(given.get("dataloader_drop_last")),
        steps_per_print=given.get("steps_per_print"),
        notes=tuple(notes),
    )


def _batches(given: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """(micro batch, accumulation steps): of the three sizes two are given, or the first two by themselves."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro = (int(given.get(name) or 0) or None for name in names[:2])
    steps = int(given.get(names[2]) or 0)
    if total is None and micro is None:
        raise ConfigError(f"ds_config: give {names[0]} or {names[1]}")
    if micro is None:
        micro = total // (ranks * (steps or 1))
    steps = steps or (1 if total is None else total // (micro * ranks) if micro else 0)
    if total not in (None, micro * steps * ranks) or not micro * steps:
        raise ConfigError(
            f"ds_config: {names[0]} is {total}, but {names[1]} ({micro}) x {names[2]} ({steps}) x ranks ({ranks}) is "
            f"{micro * steps * ranks}; change one, or leave one out"
        )
    return micro, steps


def _offload(zero: Mapping[str, Any], name: str) -> OffloadConfig:
    asked = zero.get(name) or {}
    device, folder = asked.get("device") or "none", asked.get("nvme_path")
    if device == "nvme" and not folder:
        raise ConfigError(f"ds_config: zero_optimization.{name} with device nvme needs nvme_path, a folder")
    share, where = float(asked.get("ratio", 1)), folder if device == "nvme" else None
    return OffloadConfig(optimizer_cpu_offload=device == "cpu", optimizer_offload_fraction=share, offload_dir=where)
