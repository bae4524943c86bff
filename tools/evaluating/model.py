"""The model that tools/evaluate.py asks: this rank's stage, its mesh, and how it scores."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.inference.score import Request, Score, score
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.model_config import ModelConfig
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
