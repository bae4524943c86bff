"""The model that tools/evaluate.py asks: this rank's stage, its mesh, and how it scores."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.dist_checkpointing import Checkpoint
from megatron.core.inference import SavedSettings, layout_problems, load_gpt
from megatron.core.inference.score import Request, Score, score
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.parallel_config import ParallelConfig
from megatron.core.transformer.context_parallel_setting_problems import context_parallel_problems
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.training import Script
from tools.generating.script_model import load_script_model
from tools.generating.t5 import is_t5

_SECONDS = 10.0  # between two lines of progress
_PRECISION = {
    "float32": "",
    "float64": "fp64",
    "bfloat16": "bf16",
    "float16": "fp16",
}  # of --dtype, fields of the config


@dataclass(frozen=True)
class EvaluatedModel:
    """A loaded model."""

    stage: nn.Module
    mesh: Mesh
    max_length: int
    batch_tokens: int

    @property
    def dtype(self) -> torch.dtype:
        return self.stage.settings.params_dtype

    def score(self, requests: Sequence[Request], log: Callable[[str], None]) -> list[Score]:
        """Return the scores of requests, on every rank; all must call with equal requests. log: prints progress."""
        said = time.monotonic()

        def progress(done: int, tokens: int) -> None:
            nonlocal said
            if done < tokens and time.monotonic() - said > _SECONDS:
                said = time.monotonic()
                log(f"   evaluated {100 * done // tokens} % of {tokens} tokens")

        return score(
            self.stage,
            requests,
            max_length=self.max_length,
            mesh=self.mesh,
            batch_tokens=self.batch_tokens,
            progress=progress,
        )


def load_evaluated_model(
    settings: Any,
    checkpoint: Checkpoint,
    saved: SavedSettings,
    device: Device,
    max_length: int,
    script: Script | None = None,
) -> EvaluatedModel:
    """Load this rank's stage of the checkpoint's model. Every rank must call. Raises ConfigError, CheckpointError.

    settings: layout, --dtype and --batch-tokens, as fields of an object. script: its model_provider builds the model;
    None: it is one of ours.
    """
    tp_size = settings.tensor_model_parallel_size
    pp_size = settings.pipeline_model_parallel_size
    config = with_dtype(saved.transformer, settings.dtype)

    # check the layout against the saved model
    layout_names = ("cp_comm_type", "hierarchical_context_parallel_sizes")
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    wanted = {*layout_names, *sizes}
    parallel_values = {f.name: getattr(settings, f.name) for f in fields(ParallelConfig) if f.name in wanted}
    parallel = build(ParallelConfig, parallel_values)
    expert_sizes = (settings.expert_model_parallel_size, settings.expert_tensor_parallel_size)
    problems = [
        *layout_problems(config, tp_size, pp_size, *expert_sizes),
        *context_parallel_problems(parallel, config, {}),
    ]
    if problems:
        raise ConfigError(problems)

    # create the process groups, then the stage; replicas share the samples
    mesh = parallel_state.initialize_model_parallel(
        tp_size,
        pp_size,
        context_parallel_size=settings.context_parallel_size,
        expert_model_parallel_size=settings.expert_model_parallel_size,
        expert_tensor_parallel_size=settings.expert_tensor_parallel_size,
        hierarchical_context_parallel_sizes=settings.hierarchical_context_parallel_sizes,
        ranks_per_kv_head=config.ranks_per_kv_head(tp_size),
        distributed_timeout_minutes=settings.distributed_timeout_minutes,
    )
    if script is not None:
        own = load_script_model(script, checkpoint, replace(saved, transformer=config), parallel, mesh, device)
        return EvaluatedModel(own, mesh, max_length, settings.batch_tokens)
    stage = load_gpt(
        checkpoint,
        config,
        vocab_size=saved.vocab_size,
        positions=saved.positions,
        device=device.torch_device,
        mesh=mesh,
        cp_types=tuple(settings.cp_comm_type),
        restarts_positions=settings.context_parallel_size == 1,
    )
    return EvaluatedModel(stage, mesh, max_length, settings.batch_tokens)


def refuse_other_models(state: dict[str, Any], source: str) -> None:
    """Raise ConfigError for a checkpoint of a model that does not predict each next token. source: its name in errors."""
    kind = "a T5" if is_t5(state) else state.get("model", "")
    if kind in ("a T5", "BertModel"):
        raise ConfigError(
            f"{source} holds {kind}, and log-probabilities of text need a model that predicts each next token; give a GPT's "
            "checkpoint"
        )


def with_dtype(config: ModelConfig, dtype: str | None) -> ModelConfig:
    """Return the config in the precision of --dtype; None: as it is."""
    if dtype is None:
        return config
    chosen = {name: name == _PRECISION[dtype] for name in _PRECISION.values() if name}
    if dtype in ("float32", "float64"):
        chosen["fp32_residual_connection"] = False
    return replace(config, **chosen)
