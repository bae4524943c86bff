"""What the older constructors of models share: the stage's parts, and the settings of the run."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.parallel.initialize_distributed import join_alone
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.transformer_config import model_config
from megatron.training.global_vars import get_runtime


def parts_of_stage(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> dict[str, Any]:
    """The arguments of a model's stage that follow from the run. vp_stage: the chunk; None: the one that is being built."""
    join_alone()
    if vp_stage is None:
        vp_stage = parallel_state.get_virtual_pipeline_model_parallel_rank()
    return get_runtime().model_parts(pre_process, post_process, vp_stage)


def settings_of(config: Any) -> ModelConfig:
    """The run's settings of a model, with what `config` says instead; None: nothing."""
    ours = get_runtime().config.transformer
    return ours if config is None else model_config(config, ours)


def check_token_types(name: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise ValueError(f"{name}: num_tokentypes is {given}; this model has {wanted}")


__getattr__ = names_of_megatron(__name__)
