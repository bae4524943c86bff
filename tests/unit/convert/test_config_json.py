"""What a config.json leaves out, or says by null, means what transformers makes of it, or is refused."""

import json
import re
from pathlib import Path

import pytest
from published import CONFIGS

from megatron.convert.families.read_and_write_hf_config import config_of, settings_of
from megatron.convert.families.registry import FAMILIES
from megatron.convert.open_hf_safetensors_folder import settings_by_component
from megatron.convert.peft_folder import has_conv1d
from megatron.convert.plan_hf_folder import plan_folder
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


GPT2_KEYS = {
    **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1},
    **{"bos_token_id": 50256, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05},
    **{"model_type": "gpt2", "n_ctx": 1024, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None},
    **{"summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index"},
    **{"summary_use_proj": True, "vocab_size": 50257},
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}
# Whole files as they were published, or as transformers 2 saved them, with keys that say nothing of the computation.
WHOLE_FILES = {
    "gpt2-medium": GPT2_KEYS
    | {"n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True},
    "gpt2-xl": GPT2_KEYS | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
    "distilgpt2": GPT2_KEYS
    | {"n_embd": 768, "n_head": 12, "n_layer": 6, "_num_labels": 1, "id2label": {"0": "LABEL_0"}},
    "starcoder2-3b": {
        **{"architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "attention_softmax_in_fp32": True},
        **{"bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh"},
        **{"hidden_size": 3072, "initializer_range": 0.018042, "intermediate_size": 12288, "mlp_type": "default"},
        **{"layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "model_type": "starcoder2"},
        **{"norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30},
        **{"num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813, "use_bias": True},
        **{"scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 4096},
        **{"torch_dtype": "float32", "transformers_version": "4.37.0.dev0", "use_cache": True, "vocab_size": 49152},
    },
    "phi-2": {
        **{"_name_or_path": "microsoft/phi-2", "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0},
        **{"bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "hidden_act": "gelu_new"},
        **{"hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 10240, "layer_norm_eps": 1e-05},
        **{"max_position_embeddings": 2048, "model_type": "phi", "num_attention_heads": 32, "num_hidden_layers": 32},
        **{"num_key_value_heads": 32, "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1},
        **{"rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16"},
        **{"transformers_version": "4.37.0", "use_cache": True, "vocab_size": 51200},
    },
    "vicuna-7b-v1.3": {
        **{"_name_or_path": "vicuna-7b-v1.3", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1},
        **{"eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02},
        **{"intermediate_size": 11008, "max_position_embeddings": 2048, "max_sequence_length": 2048},
        **{"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": 0},
        **{"rms_norm_eps": 1e-06, "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 32000},
    },
    "dolly-v2-3b": {
        **{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu"},
        "custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.InstructionTextGenerationPipeline"}},
        **{"hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 10240, "layer_norm_eps": 1e-05},
        **{"max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 32, "rotary_pct": 0.25},
        **{"num_hidden_layers": 32, "rotary_emb_base": 10000, "tie_word_embeddings": False, "vocab_size": 50280},
        **{"torch_dtype": "bfloat16", "use_cache": True, "use_parallel_residual": True},
    },
    "a BERT saved by transformers 2": {
        **{"_num_labels": 5, "architectures": ["BertForSequenceClassification"], "bos_token_id": None},
        **{"attention_probs_dropout_prob": 0.1, "directionality": "bidi", "do_sample": False, "eos_token_ids": None},
        **{"finetuning_task": "sentiment-analysis", "hidden_act": "gelu", "hidden_dropout_prob": 0.1},
        **{"hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "is_decoder": False},
        **{"layer_norm_eps": 1e-12, "length_penalty": 1.0, "max_length": 20, "max_position_embeddings": 512},
        **{"model_type": "bert", "num_attention_heads": 12, "num_beams": 1, "num_hidden_layers": 12},
        **{"num_return_sequences": 1, "output_past": True, "output_attentions": False, "pooler_fc_size": 768},
        **{"pruned_heads": {}, "repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
        **{"torchscript": False, "type_vocab_size": 2, "use_bfloat16": False, "vocab_size": 105879},
    },
    "flan-t5-small": {
        **{"architectures": ["T5ForConditionalGeneration"], "classifier_dropout": 0.0, "d_ff": 1024, "d_kv": 64},
        **{"d_model": 512, "decoder_start_token_id": 0, "dense_act_fn": "gelu_new", "dropout_rate": 0.1},
        **{"eos_token_id": 1, "feed_forward_proj": "gated-gelu", "initializer_factor": 1.0, "is_gated_act": True},
        **{"is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512},
        **{"num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "output_past": True, "pad_token_id": 0},
        **{"relative_attention_max_distance": 128, "relative_attention_num_buckets": 32, "use_cache": True},
        **{"tie_word_embeddings": False, "vocab_size": 32128, "num_return_sequences": 1, "max_length": 20},
    },
}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_whole_published_files_are_read(name: str):
    read, words = settings_of(WHOLE_FILES[name], name)
    ModelConfig(**read)
    assert words == WHOLE_FILES[name]["vocab_size"]


# Attributes of transformers' base class (4.41, 4.57 and 5.24) that say nothing of the computation, by example.
OF_THE_BASE_CLASS = {
    **{"_commit_hash": "8c2f", "_name_or_path": "x", "name_or_path": "x", "attn_implementation": "sdpa"},
    **{"experts_implementation": "eager", "transformers_version": "5.24.0", "architectures": None, "xla_device": True},
    **{"return_dict": False, "output_hidden_states": True, "output_attentions": True, "torchscript": True},
    **{"tf_legacy_loss": True, "chunk_size_feed_forward": 2, "gradient_checkpointing": True, "num_labels": 3},
    **{"finetuning_task": "mrpc", "id2label": {"0": "no"}, "label2id": {"no": 0}, "problem_type": "regression"},
    **{"task_specific_params": {}, "tokenizer_class": "T", "prefix": "say: ", "cross_attention_hidden_size": 7},
    **{"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": -1, "sep_token_id": 3, "decoder_start_token_id": 0},
    **{"max_length": 50, "min_length": 1, "do_sample": True, "early_stopping": "never", "num_beams": 4},
    **{"num_beam_groups": 2, "diversity_penalty": 0.5, "temperature": 0.6, "top_k": 5, "top_p": 0.9},
    **{"typical_p": 0.9, "repetition_penalty": 1.1, "length_penalty": 2.0, "no_repeat_ngram_size": 3},
    **{"encoder_no_repeat_ngram_size": 3, "bad_words_ids": [[1]], "num_return_sequences": 2, "output_scores": True},
    **{"return_dict_in_generate": True, "forced_bos_token_id": 1, "forced_eos_token_id": 2},
    **{"remove_invalid_values": True, "exponential_decay_length_penalty": [1, 1.1], "suppress_tokens": [1]},
    **{"begin_suppress_tokens": [1], "tie_last_hidden_states": True, "_private": 1, "of_a_later_version": None},
    **{"unsloth_version": "2025.1", "epsilon_cutoff": 0.1, "per_layer_config": None, "use_bfloat16": False},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_keys_of_the_base_class_are_without_effect_in_every_family(kind: str):
    published = {config["model_type"]: config for config in CONFIGS.values()}
    plain = published.get(kind, SIZES | {"model_type": kind})
    expected = settings_of(plain, "config.json")
    assert settings_of(plain | OF_THE_BASE_CLASS, "config.json") == expected


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("vicuna-7b-v1.3", "quantization_config", {"bits": 4}),
        ("vicuna-7b-v1.3", "quantization", {"group_size": 64, "bits": 4}),
        ("dolly-v2-3b", "per_layer_config", {"0": {"hidden_act": "relu"}}),
        ("phi-2", "pruned_heads", {"1": [0]}),
        ("gpt2-xl", "alibi", True),
        ("gpt2-xl", "num_hidden_layers", 12),
        ("flan-t5-small", "hidden_size", 768),
        ("flan-t5-small", "tie_encoder_decoder", True),
        ("starcoder2-3b", "scale_attn_weights", False),
    ],
)
def test_a_key_that_may_change_the_computation_is_refused_by_its_name(name: str, key: str, value: object):
    with pytest.raises(ConfigError, match=key):
        settings_of(WHOLE_FILES[name] | {key: value}, name)


def test_of_these_families_only_gpt2_has_linears_that_peft_reads_transposed():
    kinds = {"gpt2", "llama", "mixtral", "gpt_oss"}
    models = {
        c["model_type"]: ModelConfig(**settings_of(c, "x")[0]) for c in CONFIGS.values() if c["model_type"] in kinds
    }
    assert models.keys() == kinds
    assert [kind for kind, model in models.items() if has_conv1d(FAMILIES[kind], model)] == ["gpt2"]


def test_the_keys_that_qwen3_coder_adds_say_what_the_class_computes():
    config = CONFIGS["Qwen3-30B-A3B"]
    coder = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert settings_of(config | coder, "config.json") == settings_of(config, "config.json")
    for key, value in {"qkv_bias": True, "shared_expert_intermediate_size": 512, "use_qk_norm": False}.items():
        with pytest.raises(ConfigError, match=key):
            settings_of(config | coder | {key: value}, "config.json")


def test_experts_that_are_taken_in_turn_are_written_as_no_folder():
    """A measure of speed: its model has the weights, and not the choice, of the folder's."""
    settings, words = settings_of(CONFIGS["Mixtral-8x7B-v0.1"], "config.json")
    state = {"config": {"transformer": settings | {"moe_router_force_load_balancing": True}}, "vocab_size": words}
    with pytest.raises(ConfigError, match="this run has --moe-router-force-load-balancing"):
        plan_folder(state, {}, "this run")


def test_a_second_name_of_a_key_may_repeat_its_value():
    config = WHOLE_FILES["gpt2-xl"]
    assert settings_of(config | {"hidden_size": 1600}, "config.json") == settings_of(config, "config.json")
    config = WHOLE_FILES["flan-t5-small"]
    assert settings_of(config | {"head_dim": 64}, "config.json") == settings_of(config, "config.json")


@pytest.mark.parametrize(
    ("kind", "length"),  # max_position_embeddings of transformers 5.24's classes
    [("llama", 2048), ("mixtral", 131072), ("qwen2_moe", 32768), ("qwen3_moe", 32768)]
    + [("olmoe", 4096), ("granitemoe", 2048), ("gpt_oss", 131072)],
)
def test_a_scaling_of_positions_without_a_length_begins_at_the_classes_own(kind: str, length: int):
    experts = {"moe_intermediate_size": 12} if kind.startswith("qwen") else {}
    for scaling in ({"type": "yarn", "factor": 4.0}, {"type": "dynamic", "factor": 2.0}):
        given = {"rope_scaling": scaling, **experts}
        found = settings(kind, max_position_embeddings="absent", **given)
        assert found == settings(kind, max_position_embeddings=length, **given)
        assert f'"original_max_position_embeddings": {length}' in found["rope_scaling"]


_OF_ITSELF = ("mixtral", "granitemoe", "granitemoeshared", "gpt_oss")  # classes that divide weights by their sum


@pytest.mark.parametrize("kind", [*_OF_ITSELF, "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo"])
def test_one_expert_of_weight_1_is_refused_by_the_key_of_the_file(kind: str):
    given = {"num_experts_per_tok": 1, "norm_topk_prob": True, "moe_intermediate_size": 12}
    given |= {"experts_per_token": 1} if kind == "gpt_oss" else {}
    given |= {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}} if kind == "gpt_oss" else {}
    for key in ("norm_topk_prob", "moe_intermediate_size") if kind in _OF_ITSELF else ():
        given.pop(key)
    if kind in ("olmoe", "flex_olmo"):
        given.pop("moe_intermediate_size")
    with pytest.raises(
        ConfigError, match=r"^config\.json: num_experts_per_tok is 1; .* by itself, .* 2 experts"
    ) as told:
        settings(kind, **given)
    assert "--" not in str(told.value) and "\n" not in str(told.value)
    if kind not in _OF_ITSELF:
        found = settings(kind, **given | {"norm_topk_prob": False})
        assert found["moe_router_topk"] == 1 and found["moe_router_pre_softmax"]


@pytest.mark.parametrize(
    ("kind", "more"), [("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}), ("llama", {"hidden_size": 130})]
)
def test_a_model_that_cannot_be_built_is_refused_with_the_name_of_the_file(kind: str, more: dict):
    with pytest.raises(ConfigError, match=r"^config\.json: the model that it describes cannot be built: "):
        settings_by_component(SIZES | {"model_type": kind} | more, Path("config.json"), None)
