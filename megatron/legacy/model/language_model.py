"""Share between the older constructors of models: the arguments of a stage, and the settings of the run."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.parallel.init_and_destroy_distributed import join_alone
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.transformer_config import model_config
from megatron.training.global_vars import get_runtime


def parts_of_stage(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> dict[str, Any]:
    """Return the arguments of a model's stage that follow from the run.

    vp_stage: default: the chunk that is being built.
    """
    join_alone()
    if vp_stage is None:
        vp_stage = parallel_state.get_virtual_pipeline_model_parallel_rank()
    return get_runtime().model_parts(pre_process, post_process, vp_stage)


def settings_of(config: Any) -> ModelConfig:
    """Return the run's settings of a model, changed by those of `config`, if it is not None."""
    run_settings = get_runtime().config.transformer
    if config is None:
        return run_settings
    return model_config(config, run_settings)


def check_token_types(model: str, num_tokentypes: int, expected: int) -> None:
    """Raise ValueError for another number of token types than the model has."""
    if num_tokentypes != expected:
        raise ValueError(f"{model}: num_tokentypes is {num_tokentypes}; for this model it must be {expected}")


def get_num_layers(args: Any, is_encoder_and_decoder_model: bool = False, is_decoder: bool = False) -> int:
    """Return the number of layers of this rank's stage, or of the chunk that is being built.

    The arguments are Megatron's; the layers follow from the run.
    """
    del args, is_encoder_and_decoder_model, is_decoder
    runtime = get_runtime()
    stages = runtime.mesh.stages.of_rank(runtime.mesh["pp"].rank)  # by chunk
    chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    return len(runtime.config.layer_split[stages[chunk]])


__getattr__ = names_of_megatron(__name__)
