"""Each family computes what transformers does: scores of tiny models in float64, against tests/support/oracles/families.json.

Flipping any option of a family is seen: its scores leave the record, or its parameters have other names or shapes.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles.families import FAMILIES, LENGTH, TOKENS, VOCAB, settings_of, value_of
from tiny_run import GPT, Layout, build_chunks
from torch import Tensor

from megatron.core.base.dataclass_flags import default_of, option_fields
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.transformer.model_config import ModelConfig

RECORD = json.loads((Path(__file__).parents[2] / "support" / "oracles" / "families.json").read_text())
DEFAULTS = {field.name: default_of(field) for field in option_fields(ModelConfig)}
SUBJECT = replace(GPT, make=lambda config, **parts: GPTModel(config, positions=LENGTH, **parts))


def model_of(settings: dict, plus: bool) -> torch.nn.Module:
    """plus: weights of norms are of a model that adds 1 to them."""
    (chunk,) = build_chunks(single_rank_mesh(), ModelConfig(**settings), Layout(), VOCAB, SUBJECT)[0].values()
    model = chunk.module.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(value_of(name, tuple(parameter.shape), plus=plus)))
    return model


def scores_of(model: torch.nn.Module) -> Tensor:
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        return model(tokens, torch.arange(LENGTH).expand_as(tokens))


def difference(scores: Tensor, name: str) -> float:
    weights = 1 / torch.arange(1, VOCAB + 1, dtype=torch.float64)
    made = {"last": scores[:, -1], "sums": (scores * weights).sum(-1)}
    return max((made[key] - torch.tensor(RECORD[name][key], dtype=torch.float64)).abs().max().item() for key in made)


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_transformers(name: str):
    settings = settings_of(FAMILIES[name])
    assert difference(scores_of(model_of(settings, settings.get("apply_layernorm_1p", False))), name) < 1e-10


# Options that cannot stay where another is set back, and are set back with it.
RESTS_ON_IT = {
    "group_query_attention": {"num_query_groups"},
    "position_embedding_type": {
        *("rope_scaling", "rotary_base_of_windows", "rotary_interleaved", "rotary_seq_len_interpolation_factor"),
        "no_rope_freq",
    },
    "window_size": {"window_attn_skip_freq", "rotary_base_of_windows"},
    "qk_layernorm": {"qk_norm_over"},
    "normalization": {"qk_norm_over"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_every_option_of_a_family_is_seen(name: str):
    settings = settings_of(FAMILIES[name])
    plus = settings.get("apply_layernorm_1p", False)
    shapes = {key: p.shape for key, p in model_of(settings, plus).named_parameters()}
    for option in (option for option, value in FAMILIES[name].ours.items() if value != DEFAULTS[option]):
        back = {option, *(RESTS_ON_IT.get(option, set()) & settings.keys())}
        model = model_of(settings | {key: DEFAULTS[key] for key in back}, plus)
        if {key: p.shape for key, p in model.named_parameters()} == shapes:
            assert difference(scores_of(model), name) > 1e-6, f"{option} is not seen"
