"""The shapes of a model's parameters, from their names and the model's settings, as a checkpoint of any layout has them.

No tensors. tests/ranks/convert/test_absent_tensors.py compares them with the parameters of built models.
"""

from megatron.core.transformer.model_config import ModelConfig


def parameter_shape(config: ModelConfig, name: str, vocab_size: int, positions: int | None) -> tuple[int, ...] | None:
    """Return the shape of a parameter of GPTModel, BertModel or T5Model; None for a name that is of none of them.

    positions: rows of the table of positions, if the model has one.
    """
    module, part = ["", *name.split(".")][-2:]
    if part == "softmax_offset":
        return (config.num_attention_heads,)
    if part == "gate_weight":
        return (1, config.hidden_size)
    shape = _norm_shape(config, module) if "norm" in module else _weight_shape(config, name, vocab_size, positions)
    if shape is None or part == "weight":
        return shape
    return shape[:-1] if len(shape) > 1 else shape  # a bias has no inputs, and a norm's is as its weight


def _norm_shape(config: ModelConfig, module: str) -> tuple[int, ...]:
    heads = {"q_layernorm": config.num_attention_heads, "k_layernorm": config.query_groups}.get(module)
    if module == "norm" or heads is None:
        return (config.hidden_size,)
    return (config.head_width if config.qk_norm_over == "head" else heads * config.head_width,)


def _weight_shape(config: ModelConfig, name: str, vocab_size: int, positions: int | None) -> tuple[int, ...] | None:
    """Return the shape of the weight of a table or of a linear unit: [outputs, inputs], of experts [experts, ..]."""
    module = name.split(".")[-2]
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_width
    keys = config.query_groups * config.head_width
    halves = 2 if config.is_gated else 1
    if ".mlp.experts." in name:
        width, experts = config.expert_ffn_size, config.num_experts
        return (experts, halves, width, hidden) if module == "linear_fc1" else (experts, hidden, width)
    width = config.moe_shared_expert_intermediate_size if ".shared_experts." in name else config.ffn_size
    if module == "position_embeddings" and positions is None:
        return None
    shapes = {
        "word_embeddings": (vocab_size, hidden),
        "position_embeddings": (positions, hidden),
        "tokentype_embeddings": (2, hidden),
        "encoder_relative_pos_emb": (config.relative_attention_num_buckets, config.num_attention_heads),
        "decoder_relative_pos_emb": (config.relative_attention_num_buckets, config.num_attention_heads),
        "linear_qkv": (queries + 2 * keys, hidden),
        "linear_q": (queries, hidden),
        "linear_kv": (2 * keys, hidden),
        "linear_proj": (hidden, queries),
        "linear_fc1": (halves * width, hidden),
        "linear_fc2": (hidden, width),
        "router": (config.num_experts, hidden),
        "output_layer": (vocab_size, hidden),
        "dense": (hidden, hidden),  # of BERT's heads
        "binary_head": (2, hidden),
    }
    if module == "word_bias":
        return (vocab_size, 1)
    return shapes.get(module)
