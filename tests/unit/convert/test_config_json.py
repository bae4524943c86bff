"""What a config.json leaves out, or says by null, means what transformers makes of it, or is refused."""

import json
import re

import pytest

from megatron.convert.families.config_json import config_of, settings_of
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.transformer.model_config import ModelConfig

SIZES = {
    "vocab_size": 61,
    "hidden_size": 128,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 64,
    "rope_theta": 777.0,
}
LISTS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}  # for 4 rotated features of a head


def settings(kind: str, **more) -> dict:
    given = SIZES | {"model_type": kind} | more
    return settings_of({key: value for key, value in given.items() if value != "absent"}, "config.json")[0]


@pytest.mark.parametrize(
    ("kind", "groups"),
    [("llama", 32), ("mistral", 8), ("qwen2", 32), ("gemma", 16), ("gemma2", 4), ("gemma3_text", 4), ("smollm3", 4)]
    + [("starcoder2", 2)],
)
def test_key_value_heads_that_are_not_said_are_the_classes_own(kind: str, groups: int):
    model = ModelConfig(**settings(kind))
    assert model.query_groups == groups
    assert ModelConfig(**settings(kind, num_key_value_heads=None)).query_groups == 32


def test_a_head_of_cohere2_that_is_not_said_is_hidden_size_over_heads():
    assert ModelConfig(**settings("cohere2")).head_width == 4


@pytest.mark.parametrize(
    ("kind", "more", "wrong"),
    [
        ("gemma", {"tie_word_embeddings": None}, "tie_word_embeddings is None; null says nothing"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is None; null says nothing"),
        ("gpt_neox", {"use_parallel_residual": None, "rope_theta": "absent"}, "use_parallel_residual is None"),
        ("qwen3", {"head_dim": None}, "head_dim is None; null says nothing"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers is '2'"),
        ("cohere", {"rope_theta": "absent"}, "rope_theta is missing"),
        ("olmo3", {"rope_theta": "absent"}, "rope_theta is missing"),
        ("llama", {"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ("llama", {"rope_parameters": {"rope_theta": 777.0, "partial_rotary_factor": 0.5}}, "rotates whole heads"),
        ("gpt_neox", {"rope_theta": 777.0}, "rotary_emb_base and rotary_pct say 10000.0"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": "absent"},
            "max_position_embeddings is missing",
        ),
        (
            "llama",
            {
                "original_max_position_embeddings": 16,
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
            },
            "original_max_position_embeddings is 16; the scaling says 32",
        ),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "what is read is default or longrope"),
        (
            "gemma3_text",
            {
                "rope_theta": "absent",
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                },
            },
            "partial_rotary_factor of layers with a window is not supported",
        ),
        (
            "smollm3",
            {"use_sliding_window": False, "sliding_window": 7, "layer_types": ["sliding_attention"] * 4},
            "use_sliding_window is False; layer_types has layers with a window",
        ),
        ("smollm3", {"sliding_window": 7, "layer_types": 5}, "layer_types is 5; it must have"),
        ("gemma", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; write gelu_pytorch_tanh"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        (
            "gemma3_text",
            {"rope_local_base_freq": 5.0, "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
            "rope_local_base_freq says 5.0",
        ),
    ],
)
def test_what_would_have_to_be_guessed_is_refused(kind: str, more: dict, wrong: str):
    with pytest.raises(ConfigError, match=re.escape(wrong)):
        settings(kind, **more)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3_has_one_scaling_under_three_names_and_its_own_old_length(name: str):
    given = {"max_position_embeddings": 8192, "rope_scaling": {"type": name} | LISTS}
    (rope,) = ModelConfig(**settings("phi3", **given)).ropes
    assert (rope.scaling.rope_type, rope.scaling.original_max_position_embeddings) == ("longrope", 4096)
    assert rope.scaling.factor == 2


@pytest.mark.parametrize(
    "more", [{"factor": 6.0}, {"attention_factor": 1.37}, {"factor": 6.0, "attention_factor": 1.37}]
)
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_longrope_leaves_with_its_amplitude_in_both_spellings(kind: str, more: dict):
    given = {"original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope"} | LISTS | more}
    model = ModelConfig(**settings(kind, **given))
    written = config_of(kind, model, 61, "float32")
    for other in ("rope_scaling", "rope_parameters"):
        alone = json.loads(json.dumps(written)) | {other: None}
        assert ModelConfig(**settings_of(alone, "config.json")[0]).ropes[0].amplitude == model.ropes[0].amplitude


def test_a_share_of_rotated_features_is_not_written_for_a_class_that_rotates_whole_heads():
    half = ModelConfig(**settings("llama") | {"rotary_percent": 0.5})
    with pytest.raises(ConfigError, match=r"rotary_percent 0\.5"):
        config_of("llama", half, 61, "float32")
    assert config_of("phi3", half, 61, "float32")["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
def test_a_model_whose_layers_have_no_window_needs_no_base_of_windows(kind: str):
    model = ModelConfig(**settings(kind, layer_types=["full_attention"] * 4))
    assert [rope.base for rope in model.ropes] == [777.0]
    assert config_of(kind, model, 61, "float32")["layer_types"] == ["full_attention"] * 4


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize(("theirs", "ours"), [("gelu", "gated_gelu"), ("gelu_pytorch_tanh", "gated_gelu-tanh")])
def test_gemma_computes_the_activation_of_the_key_that_its_class_reads(kind: str, theirs: str, ours: str):
    assert (
        ModelConfig(**settings("gemma", hidden_activation="gelu_pytorch_tanh")).activation_region == "gated_gelu-tanh"
    )
    model = ModelConfig(**settings(kind, hidden_activation=theirs, hidden_act="gelu"))
    assert model.activation_region == ours
    assert config_of(kind, model, 61, "float32")["hidden_activation"] == theirs


@pytest.mark.parametrize("more", [{"layer_types": ["full_attention"] * 4}, {"sliding_window": None}])
def test_layers_of_cohere2_without_a_window_do_not_rotate(more: dict):
    model = ModelConfig(**settings("cohere2", **more))
    written = config_of("cohere2", model, 61, "float32")
    assert model.ropes == () and written["layer_types"] == ["full_attention"] * 4
    assert written["sliding_window"] == 4096, "transformers makes no masks without a width"


R7B = {"use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True, "layer_switch": 4}
R7B |= {"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0}
PHI_4 = {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1}
PUBLISHED = {  # keys of published files that transformers does not read
    "llama": {"rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {"dtype": "q4"}},
    "starcoder2": {"mlp_type": "default", "norm_type": "layer_norm", "rms_norm_eps": 1e-5},
    "phi3": PHI_4,
    "cohere": {"model_max_length": 131072},
    "cohere2": R7B | {"use_parallel_embedding": True, "cache_implementation": "hybrid"},
    "gpt_neox": {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "rope_theta": "absent"},
    "bert": {"directionality": "bidi", "pooler_type": "first_token_transform", "rope_theta": "absent"},
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_keys_of_published_files_are_known(kind: str):
    plain = {key: value for key, value in PUBLISHED[kind].items() if value == "absent"}
    assert settings(kind, **PUBLISHED[kind]) == settings(kind, **plain)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("llama", "rope_interleaved", True), ("starcoder2", "norm_type", "rms_norm"), ("phi3", "full_attn_mod", 2)]
    + [("cohere2", "rotary_pct", 0.5), ("phi3", "lm_head_bias", True)],
)
def test_a_published_key_with_another_value_is_refused(kind: str, key: str, value: object):
    with pytest.raises(ConfigError, match=key):
        settings(kind, **{key: value})


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"attention_dropout": 0.25}),
        ("qwen3", {"attention_dropout": 0.25}),
        ("gpt_neox", {"hidden_dropout": 0.05, "attention_dropout": 0.25}),
        ("starcoder2", {"residual_dropout": 0.05, "attention_dropout": 0.25}),
    ],
)
def test_the_dropout_of_a_run_is_written_for_whoever_trains_on(kind: str, keys: dict):
    more = {"rope_theta": "absent", "rotary_emb_base": 777.0, "rotary_pct": 1.0} if kind == "gpt_neox" else {}
    run = ModelConfig(**settings(kind, **more) | {"hidden_dropout": 0.05, "attention_dropout": 0.25})
    written = config_of(kind, run, 61, "float32")
    assert {key: written[key] for key in keys} == keys
    read, _ = settings_of(written, "config.json")
    assert read["attention_dropout"] == 0.25
