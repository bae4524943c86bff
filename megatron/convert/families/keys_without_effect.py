"""List keys of a config.json that do not change what a model computes, each with the reason. No torch.

They are keys of transformers' base class (versions 2 to 5), which it writes for every model, and of tools that
write a config.json. Keys of a single family stand in the family's table. A key that neither names is refused.
"""

from typing import Any

_OF_TRAINING = "initial values, dropout or memory of further training"
_OF_GENERATION = "a default of generate(); generation_config.json has it today"
_OF_RESULTS = "what a call returns beside the logits"
_OF_TOKENS = "an id of a special token, or the tokenizer's class"
_OF_A_TASK = "a classifier, which is not read"
_OF_THE_LIBRARY = "which code reads the file, and how it computes the same function"
_OF_CROSS_ATTENTION = "cross-attention to another model, which is_decoder and add_cross_attention switch on"

KEYS_WITHOUT_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            *("initializer_range", "gradient_checkpointing", "hidden_dropout", "resid_pdrop", "embd_pdrop"),
            *("residual_dropout", "embedding_dropout", "classifier_dropout", "output_router_logits"),
        ),
        _OF_TRAINING,
    ),
    **dict.fromkeys(
        (
            *("use_cache", "cache_implementation", "max_length", "max_new_tokens", "min_length", "min_new_tokens"),
            *("do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature"),
            *("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"),
            *("encoder_repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
            *("bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id"),
            *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
            *("begin_suppress_tokens", "num_assistant_tokens", "num_assistant_tokens_schedule"),
            *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "prefix"),
        ),
        _OF_GENERATION,
    ),
    **dict.fromkeys(
        (
            *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate"),
            *("output_past", "tie_last_hidden_states", "keys_to_ignore_at_inference"),
        ),
        _OF_RESULTS,
    ),
    **dict.fromkeys(
        (
            *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
            *("eos_token_ids", "tokenizer_class"),
        ),
        _OF_TOKENS,
    ),
    **dict.fromkeys(
        ("id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "problem_type"), _OF_A_TASK
    ),
    **dict.fromkeys(
        (
            *("model_type", "architectures", "transformers_version", "name_or_path", "auto_map", "custom_pipelines"),
            *("attn_implementation", "experts_implementation", "torchscript", "tf_legacy_loss", "xla_device"),
            *("pretraining_tp", "chunk_size_feed_forward"),
        ),
        _OF_THE_LIBRARY,
    ),
    **dict.fromkeys(("cross_attention_hidden_size", "tie_encoder_decoder"), _OF_CROSS_ATTENTION),
    # tools and conversion scripts
    "transformers.js_config": "how transformers.js loads the model in a browser",
    **dict.fromkeys(("unsloth_version", "unsloth_fixed"), "Unsloth's mark on a folder that it has written"),
    "end_token_id": "DeepSpeed-Chat's name for eos_token_id",
    "max_sequence_length": "written by early conversions of Llama; transformers reads max_position_embeddings",
}

# Keys of other classes, with the value that switches a part off. A class that does not read a key computes the same
# whatever it says; any other value is refused, since whoever wrote it expects the part.
_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "lm_head_bias"), False),
    **dict.fromkeys(("use_sliding_window", "use_mrope"), False),
    **dict.fromkeys(("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"), 0),
}


def reason_without_effect(key: str, value: Any) -> str | None:
    """Return why a key changes nothing that a model computes; None for a key of which that is not known."""
    if key in KEYS_WITHOUT_EFFECT:
        return KEYS_WITHOUT_EFFECT[key]
    if key.startswith("_"):
        return "private to the library that wrote the file"
    if value is None:
        return "null: nothing is set"
    if key in _NOTHING and value == _NOTHING[key] and type(value) is type(_NOTHING[key]):
        return "a part of another class, switched off"
    if key == "layer_types" and isinstance(value, list) and all(kind == "full_attention" for kind in value):
        return "no layer of the class has a window"
    return None
