"""Published models by their names and shapes: every tensor has its place here and every parameter its tensor, at the published count."""

import math
from pathlib import Path

import pytest
from published import CONFIGS, tensors_of
from published_parameters import PARAMETERS

from megatron.convert.families.read_and_write_hf_config import config_of, family_of, settings_of
from megatron.convert.formats.safetensors_header import TensorInFile
from megatron.convert.open_hf_safetensors_folder import tensor_records
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig

MODELS = {model.__name__: model for model in (GPTModel, BertModel, T5Model)}


def parameters_of(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of our model, without the padding of the word table."""
    settings, words = settings_of(CONFIGS[name], name)
    config, model = ModelConfig(**settings), MODELS[family_of(CONFIGS[name], name).model]
    parts = {"decoder_seq_length": 512} if model is T5Model else {}
    context = LayerContext.from_mesh(single_rank_mesh(), config.params_dtype, device="meta", fills=False)
    positions = config.max_position_embeddings or 512
    made = model(
        config, vocab_size=words, positions=positions, layers=range(config.all_layers), context=context, **parts
    )
    return {key: tuple(parameter.placement.shape) for key, parameter in made.named_parameters()}


def placed(name: str, tensors: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of ours that a folder with these tensors gives. Raises CheckpointError for what is left over."""
    settings, words = settings_of(CONFIGS[name], name)
    config = ModelConfig(**settings)
    family = family_of(CONFIGS[name], name)
    files = {key: TensorInFile("model.safetensors", "bfloat16", tuple(shape), 0) for key, shape in tensors.items()}
    return {key: x.shape for key, x in tensor_records(family, config, words, files, Path(name)).items()}


SWEPT = ("Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B")  # with thousands of tensors


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.sweep] * (name in SWEPT)) for name in CONFIGS])
def test_a_published_model_maps_completely(name: str):
    """No tensor left over, none missing, each of the right shape; and the number of all parameters."""
    tensors, ours = tensors_of(name), parameters_of(name)
    assert placed(name, tensors) == ours
    assert sum(map(math.prod, tensors.values())) == sum(map(math.prod, ours.values())) == PARAMETERS[name]
    with pytest.raises(CheckpointError):
        placed(name, tensors | {"model.layers.0.self_attn.unknown": [8]})
    last = list(tensors)[-1]
    assert placed(name, {key: shape for key, shape in tensors.items() if key != last}) != ours


@pytest.mark.parametrize("name", CONFIGS)
def test_its_config_is_written_as_what_it_was(name: str):
    """`config_of` reads what it writes, and refuses a model that would compute something else."""
    settings, words = settings_of(CONFIGS[name], name)
    written = config_of(CONFIGS[name]["model_type"], ModelConfig(**settings), words, "bfloat16")
    sizes = {"hidden_size", "n_embd", "d_model", "num_hidden_layers", "vocab_size", "rope_theta", "sliding_window"}
    for key in sizes & written.keys() & CONFIGS[name].keys():
        off = key == "sliding_window" and not CONFIGS[name].get("use_sliding_window", True)
        assert written[key] == (None if off else CONFIGS[name][key]), key
