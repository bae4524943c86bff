"""Read a ds_config as settings of this project."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.optimizer.loss_scaler import LossScaleConfig
from megatron.deepspeed.config_keys import HARMLESS, NO_EFFECT, REFUSED, WORKS
from megatron.deepspeed.refuse_unsupported_config_keys import ConfigKeyPolicy
from megatron.training.zero_engine_for_any_module import EngineConfig

KEYS = ConfigKeyPolicy(WORKS, NO_EFFECT, REFUSED, HARMLESS, name="ds_config", page="docs/deepspeed.md")


@dataclass(frozen=True)
class Settings(EngineConfig):
    """The settings of a ds_config. notes: its keys without effect, and why, and values that are rounded."""

    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    drop_last: bool = False
    steps_per_print: int | None = None
    notes: tuple[str, ...] = ()


def load_ds_config(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file, or the dict itself.

    Raises ConfigError if it is no JSON object, or repeats a key.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | Path):
        raise ConfigError(f"config is a {type(config).__name__}; it must be a dict, or the path of a JSON file")
    try:
        content = json.loads(Path(config).read_text(), object_pairs_hook=_without_repeats)
    except (OSError, ValueError) as error:
        raise ConfigError(f"ds_config {config} cannot be read as JSON: {error}; give a JSON file") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"ds_config {config} contains a {type(content).__name__}; it must contain an object in braces"
        )
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} is there twice")
    return dict(pairs)


def read_settings(config: Mapping[str, Any], ranks: int) -> Settings:
    """Return the settings for this many data-parallel ranks.

    Raises ConfigError with all keys that are refused or unknown, and for settings that contradict each other.
    """
    if config.get("zero_optimization") is True:  # the short form
        config = {**config, "zero_optimization": {"stage": 1}}
    notes = [f"without effect: {note}" for note in KEYS.check(config)]
    zero = config.get("zero_optimization") or {}
    fp16 = config.get("fp16") or {}
    bf16 = config.get("bf16") or {}

    # batch and precision
    micro_batch, accumulation = _batch_sizes(config, ranks)
    if fp16.get("enabled") and bf16.get("enabled"):
        raise ConfigError("ds_config: fp16 and bf16 are both enabled; enable one")
    precision = ""
    if fp16.get("enabled"):
        precision = "float16"
    elif bf16.get("enabled"):
        precision = "bfloat16"

    loss_scale, rounded = _loss_scale(fp16)
    steps_per_print = config.get("steps_per_print")
    if steps_per_print is not None:
        steps_per_print = None if steps_per_print == math.inf else int(steps_per_print)
    clipping = float(config.get("gradient_clipping") or 0)
    if clipping == math.inf:
        clipping = 0.0

    # ZeRO
    stage = int(zero.get("stage") or 0)
    offload_optimizer = _offload(zero, "offload_optimizer")
    offload_param = _offload(zero, "offload_param")
    if offload_param.tier != "device" and (stage != 3 or offload_optimizer.tier == "device"):
        raise ConfigError(
            "ds_config: offload_param needs two things: stage 3, and an offload_optimizer that has a device; give both"
        )
    overlap_comm = bool(zero.get("overlap_comm"))
    bucket_size = zero.get("reduce_bucket_size")

    return Settings(
        micro_batch=micro_batch,
        accumulation=accumulation,
        precision=precision,
        clipping=clipping,
        takes_mean=config.get("gradient_allreduce_op") != "sum",
        data_parallel=DataParallelConfig(
            zero_stage=stage,
            overlap_grad_reduce=overlap_comm,
            overlap_param_gather=overlap_comm and stage == 3,
            ddp_bucket_size=None if bucket_size is None else int(bucket_size),
        ),
        loss_scale=loss_scale,
        restores_hysteresis=bool(fp16.get("enabled") and fp16.get("consecutive_hysteresis")),
        casts_inputs=bool(fp16.get("enabled") and fp16.get("auto_cast")),
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        optimizer=config.get("optimizer") or None,
        scheduler=config.get("scheduler") or None,
        drop_last=bool(config.get("dataloader_drop_last")),
        steps_per_print=steps_per_print,
        notes=(*notes, *rounded),
    )


_LEAST_SCALE = 2.0**-126  # the smallest power of two that float32 holds with full precision


def _loss_scale(fp16: Mapping[str, Any]) -> tuple[LossScaleConfig, list[str]]:
    """Return (the loss scale of a section, lines about values that are rounded); the defaults if it is off.

    A scale is a power of two, so that scaling rounds no gradient. A floor that is none is rounded up.
    """
    if not fp16.get("enabled"):
        return LossScaleConfig(), []

    def value_of(key: str, default: float) -> float:
        value = fp16.get(key)
        return default if value is None else float(value)

    power = int(value_of("initial_scale_power", 16))
    least = value_of("min_loss_scale", 1)
    floor = _LEAST_SCALE
    if least > floor:
        floor = 2.0 ** math.ceil(math.log2(least))
    rounded = []
    if floor != least:
        rounded.append(f"fp16.min_loss_scale {least:g} is rounded up to {floor:g}, a power of two")
    is_static = bool(value_of("loss_scale", 0))
    if floor > 2.0**power and not is_static:
        raise ConfigError(
            f"ds_config: fp16.min_loss_scale is {least:g}; it must be at most the scale at the start, 2 to "
            f"fp16.initial_scale_power ({power})"
        )
    scales = LossScaleConfig(
        loss_scale=value_of("loss_scale", 0),
        initial_loss_scale=max(floor, 2.0**power),
        min_loss_scale=floor,
        loss_scale_window=int(value_of("loss_scale_window", 1000)),
        hysteresis=int(value_of("hysteresis", 2)),
    )
    return scales, rounded


def _batch_sizes(config: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """Return (micro batch, accumulation steps).

    train batch = micro batch x accumulation steps x ranks. Any two of the three are given, or one of the first two
    alone.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (int(config.get(name) or 0) or None for name in names)
    if total is None and micro is None:
        raise ConfigError(f"ds_config: give {names[0]} or {names[1]}")
    if micro is None:
        micro = total // (ranks * (steps or 1))
    if steps is None and total is None:
        steps = 1
    elif steps is None:
        steps = total // (micro * ranks) if micro else 0
    if total not in (None, micro * steps * ranks) or not micro * steps:
        raise ConfigError(
            f"ds_config: {names[0]} is {total}, but {names[1]} ({micro}) x {names[2]} ({steps}) x ranks ({ranks}) is "
            f"{micro * steps * ranks}; change one of them, or leave one out"
        )
    return micro, steps


def _offload(zero: Mapping[str, Any], name: str) -> OffloadConfig:
    """Return the settings of a section of zero_optimization."""
    section = zero.get(name) or {}
    device = section.get("device") or "none"
    folder = section.get("nvme_path")
    if device == "nvme" and not folder:
        raise ConfigError(f"ds_config: zero_optimization.{name} with device nvme needs nvme_path, a folder")
    return OffloadConfig(
        optimizer_cpu_offload=device == "cpu",
        optimizer_offload_fraction=float(section.get("ratio", 1)),
        offload_dir=folder if device == "nvme" else None,
    )
