"""Each option of a model computes what its formula says: scores and every gradient equal those of plain torch, in float64.

And each is seen: without the option the formulas give other scores.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from plain_model import plain_scores
from tiny_run import LLAMA, SEQ, VOCAB, Layout, build_chunks
from torch import Tensor

from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.transformer.activation_norm_placement_multiplier_config import NORM_PLACEMENTS
from megatron.core.transformer.model_config import ModelConfig

BASE = replace(LLAMA, num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=12)
BASE = replace(BASE, kv_channels=8, init_method_std=0.3, make_vocab_size_divisible_by=1)

_YARN = '{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": 3, "beta_slow": 0.4'
OPTIONS: dict[str, dict] = {
    "exact gelu": {"swiglu": False, "activation": "gelu"},
    "relu": {"swiglu": False, "activation": "relu"},
    "squared relu": {"swiglu": False, "activation": "squared-relu"},
    "quick gelu": {"swiglu": False, "activation": "quick-gelu"},
    "silu, not gated": {"swiglu": False, "activation": "silu"},
    "gated tanh gelu": {"swiglu": False, "gated": True},
    "gated exact gelu": {"swiglu": False, "gated": True, "activation": "gelu"},
    "bounded and shifted gates": {
        "swiglu": False,
        "gated": True,
        "activation": "quick-gelu",
        "activation_func_clamp_value": 0.7,
        "glu_linear_offset": 1.0,
    },
    "bounded silu": {"activation_func_clamp_value": 0.4},
    "1 + w": {"apply_layernorm_1p": True, "qk_layernorm": True},
    "1 + w, with a bias": {"apply_layernorm_1p": True, "normalization": "LayerNorm"},
    "LayerNorm without a bias": {"normalization": "LayerNorm", "norm_bias": False, "qk_layernorm": True},
    **{
        f"norms {placement}": {"norm_placement": placement, "residual_multiplier": 0.4}
        for placement in NORM_PLACEMENTS
        if placement != "pre"
    },
    "residual from the norm": {"apply_residual_connection_post_layernorm": True},
    "multipliers": {"embedding_multiplier": 3.0, "logit_multiplier": 0.3, "residual_multiplier": 0.22},
    "capped scores": {"final_logit_softcapping": 1.5, "logit_multiplier": 2.0, "add_output_bias": True},
    "a scale": {"softmax_scale": 0.2, "scale_attn_by_inverse_layer_idx": True},
    "capped attention": {"attn_logit_softcapping": 0.5},
    "capped attention in a window": {"attn_logit_softcapping": 0.5, "window_size": "2,0", "softmax_scale": 0.9},
    "clipped heads": {"clip_qkv": 0.05},
    "clipped heads after norms": {"clip_qkv": 0.5, "qk_layernorm": True, "qk_norm_over": "width"},
    "one more in the denominator": {"softmax_type": "off-by-one"},
    "sinks": {"softmax_type": "learnable", "attn_logit_softcapping": 0.8},
    "sinks, unfused": {"softmax_type": "learnable", "attn_logit_softcapping": 0.8, "attention_backend": "unfused"},
    "norms of each head": {"qk_layernorm": True, "qk_norm_over": "each-head", "normalization": "LayerNorm"},
    "norms of each head, 1 + w": {"qk_layernorm": True, "qk_norm_over": "each-head", "apply_layernorm_1p": True},
    "norms over the width": {"qk_layernorm": True, "qk_norm_over": "width"},
    "a bias of queries, keys and values": {"add_qkv_bias": True},
    "a bias of attention's output": {"add_attention_output_bias": True},
    "biases of the MLP": {"add_mlp_bias": True},
    "a bias of the words": {"add_output_bias": True},
    "a bias of the words, tied": {"add_output_bias": True, "untie_embeddings_and_output_weights": False},
    "interleaved": {"rotary_interleaved": True, "rotary_percent": 0.5},
    "interpolated": {"rotary_seq_len_interpolation_factor": 4.0},
    "llama 3": {"use_rope_scaling": True, "rope_scaling_factor": 16.0},
    "llama 3, of a short context": {
        "rope_scaling": '{"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4, '
        '"original_max_position_embeddings": 16}'
    },
    "dynamic": {"rope_scaling": '{"rope_type": "dynamic", "factor": 3, "original_max_position_embeddings": 5}'},
    "yarn": {"rope_scaling": _YARN + "}"},
    "yarn, not truncated": {"rope_scaling": _YARN + ', "truncate": false, "mscale": 2, "mscale_all_dim": 0.5}'},
    "yarn, its factor given": {"rope_scaling": _YARN + ', "attention_factor": 1.5}'},
    "long": {
        "rope_scaling": '{"rope_type": "longrope", "factor": 8, "original_max_position_embeddings": 5, '
        '"short_factor": [1, 1.1, 1.2, 1.3], "long_factor": [1.5, 2, 3, 4]}'
    },
    "long, still short": {
        "rope_scaling": '{"rope_type": "longrope", "factor": 8, "original_max_position_embeddings": 50, '
        '"short_factor": [1, 1.1, 1.2, 1.3], "long_factor": [1.5, 2, 3, 4]}'
    },
    "some layers do not rotate": {"no_rope_freq": "[0,1,0]"},
    "each second does not": {"no_rope_freq": "2"},
    "windows rotate by another base": {
        "window_size": "2,0",
        "window_attn_skip_freq": "[0,1,1]",
        "rotary_base_of_windows": 50.0,
        "rotary_seq_len_interpolation_factor": 2.0,
    },
}
TOKENS = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(5))


@cache
def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    """Values of every parameter; norms' weights and biases away from where they start."""
    module, made = module_of(config), {}
    generator = torch.Generator().manual_seed(7)
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        made[name] = drawn + parameter.detach().mean().round() if name.endswith("norm.weight") else drawn
    return made


def module_of(config: ModelConfig) -> torch.nn.Module:
    (chunk,) = build_chunks(single_rank_mesh(), config, Layout())[0].values()
    return chunk.module.eval()


def ours(config: ModelConfig, probe: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores [b, s, v], and the gradients of their sum with the probe."""
    module = module_of(config)
    with torch.no_grad():
        for name, value in weights_of(config).items():
            module.get_parameter(name).copy_(value)
    scores = module(TOKENS, torch.arange(SEQ).expand_as(TOKENS), None)
    (scores * probe).sum().backward()
    grads = {name: p.main_grad if p.grad is None else p.grad for name, p in module.named_parameters()}
    return scores.detach(), grads


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module_of(config).named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("option", OPTIONS)
def test_scores_and_gradients_are_those_of_the_formulas(option: str):
    config = replace(BASE, **OPTIONS[option])
    given = {name: value.clone().requires_grad_() for name, value in weights_of(config).items()}
    torch.set_default_dtype(torch.float64)
    try:
        expected = plain_scores(given, config, TOKENS)
        probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
        (expected * probe).sum().backward()
        for name in OPTIONS[option]:
            try:
                less = replace(config, **{name: getattr(BASE, name)})
            except ValueError:  # another option needs it
                continue
            if name != "attention_backend" and shapes_of(less) == shapes_of(
                config
            ):  # or else it is seen by the parameters
                without = plain_scores(weights_of(config), less, TOKENS)
                assert (without - expected).abs().max() > 1e-4, f"{name} is not seen"
    finally:
        torch.set_default_dtype(torch.float32)
    scores, grads = ours(config, probe)
    assert (scores - expected).abs().max() <= 1e-12 * expected.abs().max()
    for name, value in given.items():
        worst = (grads[name] - value.grad).abs().max()
        assert worst <= 1e-11 * value.grad.abs().max(), f"{name}: its gradient differs by {worst}"
