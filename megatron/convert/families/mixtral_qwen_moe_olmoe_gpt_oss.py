"""Tables of the families with experts: Mixtral, Qwen2-MoE and Qwen3-MoE, OLMoE and FlexOlmo, Granite MoE, GPT-OSS.

Most store each expert's matrices as tensors of their own; files in transformers 5's own names stack them, and are read
too. Granite MoE stacks them; GPT-OSS stacks them transposed, with the rows of gate and up in turn. Routing is one of
two: the softmax over the chosen experts' logits, or over those of all experts without renormalization
(`norm_topk_prob` false).
"""

from typing import Any

from megatron.convert.families.config_fields import (
    ConfigReader,
    Field,
    count,
    fixed,
    fixed_not_written,
    ignored_keys,
    number,
    repeated,
)
from megatron.convert.families.hf_family_fields_and_param_mappings import (
    LAYER,
    Family,
    ParamMapping,
    bias,
    weight_and_bias,
)
from megatron.convert.families.llama_like import (
    ATTENTION_BIAS,
    EMBEDDING_NORM_AND_HEAD,
    GATED_MLP,
    GRANITE_MULTIPLIERS,
    HEADS_WITHOUT_WIDTH,
    HF_LAYER,
    IGNORED_TENSORS,
    LLAMA_SETTINGS,
    OLMO_SETTINGS,
    POST_NORMS,
    PRE_NORMS,
    attention_mappings,
    llama_fields,
    only_listed,
)
from megatron.convert.families.rope import rope
from megatron.convert.families.sliding_window import windows
from megatron.convert.formats.hf_config_and_safetensors_headers import is_mxfp4

# Keys of training alone: transformers adds its balancing loss only if output_router_logits asks for it.
_ROUTER_TRAINING = ignored_keys("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")
_EXPERTS = f"{LAYER}mlp.experts."
_ROUTER = f"{LAYER}mlp.router."
_BASE = (*EMBEDDING_NORM_AND_HEAD, *PRE_NORMS, *attention_mappings())


def _expert_mappings(router: str, gate: str, up: str, down: str) -> tuple[ParamMapping, ...]:
    """Return the rows of a router and of experts with tensors of their own. {e} in a name is an expert."""
    return (
        ParamMapping(f"{_ROUTER}weight", "copy", (f"{HF_LAYER}{router}.weight",), experts=True),
        ParamMapping(
            f"{_EXPERTS}linear_fc1.weight",
            "experts_gate_up",
            tuple(f"{HF_LAYER}{name}.weight" for name in (gate, up)),
            experts=True,
        ),
        ParamMapping(f"{_EXPERTS}linear_fc2.weight", "experts_down", (f"{HF_LAYER}{down}.weight",), experts=True),
    )


def _stacked_mappings(experts: str, router: str = "") -> tuple[ParamMapping, ...]:
    """Return the rows of experts in one tensor of gates and ups, [experts, 2 f, h], and one of downs, [experts, h, f].

    router: its name in such files, where it differs.
    """
    rows = (
        ParamMapping(
            f"{_EXPERTS}linear_fc1.weight", "stacked_gate_up", (f"{HF_LAYER}{experts}.gate_up_proj",), experts=True
        ),
        ParamMapping(f"{_EXPERTS}linear_fc2.weight", "copy", (f"{HF_LAYER}{experts}.down_proj",), experts=True),
    )
    if not router:
        return rows
    return (*rows, ParamMapping(f"{_ROUTER}weight", "copy", (f"{HF_LAYER}{router}.weight",), experts=True))


def _in_dense_layers(mappings: tuple[ParamMapping, ...]) -> tuple[ParamMapping, ...]:
    return tuple(mapping._replace(experts=False) for mapping in mappings)


# ---------------------------------------------------------------- fields


def _number_of_experts(key: str, other: str, default: int) -> Field:
    """The number of experts under the key of published files, `key`, or its other name in transformers' class."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        value = reader.count(key, None) or reader.count(other, default)
        if reader.get(other, value) != value:
            raise reader.error(other, f"it is another name of {key}, which is {value}; which of them counts?")
        return {"num_experts": value}

    def write(model: Any) -> dict[str, Any]:
        return {key: model.num_experts, other: model.num_experts}

    return Field((key, other), read, write)


_CHOSEN = "num_experts_per_tok"


def _chosen_experts(default: int) -> Field:
    """The experts of a token, where their weights are divided by their sum only if `norm_topk_prob` says so."""
    return count(_CHOSEN, "moe_router_topk", default)


def _chosen_experts_of_sum_1(default: int) -> Field:
    """The experts of a token, in a class that divides their weights by their sum."""
    field = _chosen_experts(default)

    def read(reader: ConfigReader) -> dict[str, Any]:
        settings = field.read(reader)
        _check_router_learns(reader, "this class divides its weight by itself", "")
        return settings

    return field._replace(read=read)


def _check_router_learns(reader: ConfigReader, why: str, also: str) -> None:
    """Refuse one expert for each token whose weight is 1 whatever the router says: the router has no gradient."""
    if reader.count(_CHOSEN) == 1:
        raise reader.error(
            _CHOSEN, f"{why}, which is 1, so the router would not learn; give a model with 2 experts or more{also}"
        )


def _expert_width(key: str, dense_key: str | None = None, *default: int) -> Field:
    """The width of an expert. Without dense_key all layers have experts, and `key` is the width of all MLPs.

    default: the class's own.
    """

    def read(reader: ConfigReader) -> dict[str, Any]:
        width = reader.count(key, *default)
        dense = width if dense_key is None else reader.count(dense_key)
        return {"moe_ffn_hidden_size": width, "ffn_hidden_size": dense}

    def write(model: Any) -> dict[str, Any]:
        values = {key: model.expert_ffn_size}
        if dense_key is not None:
            values[dense_key] = model.ffn_size
        return values

    return Field((key,) if dense_key is None else (key, dense_key), read, write)


def _renormalized() -> Field:
    """Whether the weights of the chosen experts are divided by their sum."""
    key = "norm_topk_prob"

    def read(reader: ConfigReader) -> dict[str, Any]:
        is_renormalized = reader.choice(key, False, (False, True))
        if is_renormalized:
            _check_router_learns(reader, f"{key} true divides its weight by itself", f", or with {key} false")
        return {"moe_router_pre_softmax": not is_renormalized}

    return Field((key,), read, lambda model: {key: not model.router_weights[1]})


def _layers_with_experts() -> Field:
    """Layers with experts: each `decoder_sparse_step`th, without `mlp_only_layers`."""
    step_key, dense_key = "decoder_sparse_step", "mlp_only_layers"

    def read(reader: ConfigReader) -> dict[str, Any]:
        layers = reader.count("num_hidden_layers")
        step = reader.count(step_key, 1)
        dense = reader.get(dense_key, [])
        if not isinstance(dense, list) or not all(type(i) is int and i >= 0 for i in dense):
            raise reader.error(dense_key, "it must be a list of layers, counted from 0")
        flags = [int(i not in dense and (i + 1) % step == 0) for i in range(layers)]
        if not any(flags):
            key, other = (dense_key, f" and {step_key} {step}") if dense else (step_key, "")
            raise reader.error(
                key, f"with {layers} layers{other} none has experts; use the model_type of the dense family"
            )
        if all(flags):
            return {}
        return {"moe_layer_freq": str(flags).replace(" ", "")}

    def write(model: Any) -> dict[str, Any]:
        sparse = [i for i in range(model.num_layers) if model.is_moe_layer(i)]
        # The step that says the same, so that a file with one is written as it was; else a list of the dense layers.
        step = (sparse[0] if sparse else 0) + 1
        if sparse == [i for i in range(model.num_layers) if (i + 1) % step == 0]:
            return {step_key: step, dense_key: []}
        return {step_key: 1, dense_key: [i for i in range(model.num_layers) if i not in sparse]}

    return Field((step_key, dense_key), read, write)


# ---------------------------------------------------------------- Mixtral

MIXTRAL = Family(
    "MixtralForCausalLM",
    LLAMA_SETTINGS | {"moe_router_pre_softmax": False},
    llama_fields(
        rope(None),
        windows(None, lists=False),
        _number_of_experts("num_local_experts", "num_experts", 8),
        _chosen_experts_of_sum_1(2),
        _expert_width("intermediate_size"),
        _ROUTER_TRAINING,
        length=131072,
        epsilon=1e-5,
        groups=8,
    ),
    (
        *_BASE,
        *_expert_mappings(
            "block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{e}}.{x}" for x in ("w1", "w3", "w2"))
        ),
    ),
    IGNORED_TENSORS,
    stacked_mappings=_stacked_mappings("mlp.experts", "mlp.gate"),
)

# ---------------------------------------------------------------- Qwen2-MoE, Qwen3-MoE


def _zero_is_no_window(field: Field) -> Field:
    """Read sliding_window 0, which transformers 5 writes for a switch that is off, as none."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        if reader.get("sliding_window") == 0 and not reader.get("use_sliding_window", False):
            values = {**reader.values, "sliding_window": None}
            inner = ConfigReader(values, reader.source)
            settings = field.read(inner)
            reader.keys_read |= inner.keys_read
            return settings
        return field.read(reader)

    return field._replace(read=read)


_SHARED = f"{LAYER}mlp.shared_experts."
_HF_SHARED = f"{HF_LAYER}mlp.shared_expert."
_QWEN_EXPERTS = _expert_mappings("mlp.gate", *(f"mlp.experts.{{e}}.{x}_proj" for x in ("gate", "up", "down")))
_QWEN_STACKED = _stacked_mappings("mlp.experts")
_QWEN_EXPERT_FIELDS = (_renormalized(), _layers_with_experts(), _ROUTER_TRAINING)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    LLAMA_SETTINGS | {"moe_shared_expert_gate": True},
    llama_fields(
        rope(),
        _zero_is_no_window(
            # transformers 4 gives all layers the window, 5 every second one below max_window_layers
            windows(4096, only_listed, switch="use_sliding_window")
        ),
        bias("qkv_bias", "add_qkv_bias", default=True),
        count("num_experts", "num_experts", 60),
        count("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 5632),
        _chosen_experts(4),
        _expert_width("moe_intermediate_size", "intermediate_size", 1408),
        *_QWEN_EXPERT_FIELDS,
        ignored_keys("use_mrope", "max_window_layers"),
        length=32768,
        groups=16,
    ),
    (
        *_BASE,
        *_in_dense_layers(GATED_MLP),
        *_QWEN_EXPERTS,
        ParamMapping(
            f"{_SHARED}linear_fc1.weight",
            "gate_up",
            (f"{_HF_SHARED}gate_proj.weight", f"{_HF_SHARED}up_proj.weight"),
            experts=True,
        ),
        ParamMapping(f"{_SHARED}linear_fc2.weight", "copy", (f"{_HF_SHARED}down_proj.weight",), experts=True),
        ParamMapping(f"{_SHARED}gate_weight", "copy", (f"{HF_LAYER}mlp.shared_expert_gate.weight",), experts=True),
    ),
    IGNORED_TENSORS,
    stacked_mappings=_QWEN_STACKED,
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    LLAMA_SETTINGS | {"qk_layernorm": True},
    llama_fields(
        rope(),
        windows(4096, switch="use_sliding_window", lists=False),
        ATTENTION_BIAS,
        _number_of_experts("num_experts", "num_local_experts", 128),
        _chosen_experts(8),
        _expert_width("moe_intermediate_size", "intermediate_size", 768),
        *_QWEN_EXPERT_FIELDS,
        ignored_keys("max_window_layers"),  # of Qwen2; this class gives all layers the window
        # Of Qwen3-Coder's files. The class does not read them, and computes what these values say.
        fixed_not_written("qkv_bias", False),
        fixed_not_written("shared_expert_intermediate_size", 0),
        fixed_not_written("use_qk_norm", True),
        length=32768,
        groups=4,
    ),
    (*_BASE, *_in_dense_layers(GATED_MLP), *_QWEN_EXPERTS),
    IGNORED_TENSORS,
    stacked_mappings=_QWEN_STACKED,
)

# ---------------------------------------------------------------- OLMoE, FlexOlmo

OLMOE = Family(
    "OlmoeForCausalLM",
    LLAMA_SETTINGS | {"qk_layernorm": True, "qk_norm_over": "width"},
    llama_fields(
        rope(),
        HEADS_WITHOUT_WIDTH,
        ATTENTION_BIAS,
        _number_of_experts("num_experts", "num_local_experts", 64),
        _chosen_experts(8),
        _expert_width("intermediate_size"),
        _renormalized(),
        number("clip_qkv", "clip_qkv", None),
        _ROUTER_TRAINING,
        length=4096,
        epsilon=1e-5,
    ),
    (*_BASE, *_QWEN_EXPERTS),
    IGNORED_TENSORS,
    stacked_mappings=_QWEN_STACKED,
)

FLEX_OLMO = Family(  # an OLMo 2 whose MLPs are OLMoE's experts
    "FlexOlmoForCausalLM",
    OLMO_SETTINGS,
    llama_fields(
        rope(5e5),
        HEADS_WITHOUT_WIDTH,
        ATTENTION_BIAS,
        _number_of_experts("num_experts", "num_local_experts", 7),
        _chosen_experts(5),
        _expert_width("intermediate_size"),
        _renormalized(),
        _ROUTER_TRAINING,
        length=4096,
    ),
    (*EMBEDDING_NORM_AND_HEAD, *POST_NORMS, *attention_mappings(), *_QWEN_EXPERTS),
    IGNORED_TENSORS,
    stacked_mappings=_QWEN_STACKED,
)

# ---------------------------------------------------------------- Granite MoE


def _shared_expert_width() -> Field:
    """The width of the shared expert; 0: there is none."""
    key = "shared_intermediate_size"

    def read(reader: ConfigReader) -> dict[str, Any]:
        is_absent = type(reader.get(key, 0)) is int and reader.get(key, 0) == 0
        return {"moe_shared_expert_intermediate_size": None if is_absent else reader.count(key)}

    return Field((key,), read, lambda model: {key: model.moe_shared_expert_intermediate_size or 0})


_GRANITE_EXPERTS = f"{HF_LAYER}block_sparse_moe."
_GRANITE_SETTINGS = LLAMA_SETTINGS | {"moe_router_pre_softmax": False}
_GRANITE_FIELDS = (
    rope(),
    HEADS_WITHOUT_WIDTH,
    ATTENTION_BIAS,
    *GRANITE_MULTIPLIERS,
    count("num_local_experts", "num_experts", 8),
    _chosen_experts_of_sum_1(2),
    _expert_width("intermediate_size"),
    _ROUTER_TRAINING,
)
_GRANITE_MAPPINGS = (
    *_BASE,
    ParamMapping(f"{_ROUTER}weight", "copy", (f"{_GRANITE_EXPERTS}router.layer.weight",), experts=True),
    ParamMapping(
        f"{_EXPERTS}linear_fc1.weight", "stacked_gate_up", (f"{_GRANITE_EXPERTS}input_linear.weight",), experts=True
    ),
    ParamMapping(f"{_EXPERTS}linear_fc2.weight", "copy", (f"{_GRANITE_EXPERTS}output_linear.weight",), experts=True),
)
_GRANITE_STACKED = _stacked_mappings("block_sparse_moe.experts", "block_sparse_moe.router")
GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    _GRANITE_SETTINGS,
    llama_fields(*_GRANITE_FIELDS, length=2048),
    _GRANITE_MAPPINGS,
    IGNORED_TENSORS,
    stacked_mappings=_GRANITE_STACKED,
)
GRANITE_MOE_SHARED = Family(
    "GraniteMoeSharedForCausalLM",
    _GRANITE_SETTINGS,
    llama_fields(*_GRANITE_FIELDS, _shared_expert_width(), length=2048),
    (
        *_GRANITE_MAPPINGS,
        ParamMapping(
            f"{_SHARED}linear_fc1.weight", "copy", (f"{HF_LAYER}shared_mlp.input_linear.weight",), experts=True
        ),
        ParamMapping(
            f"{_SHARED}linear_fc2.weight", "copy", (f"{HF_LAYER}shared_mlp.output_linear.weight",), experts=True
        ),
    ),
    IGNORED_TENSORS,
    stacked_mappings=_GRANITE_STACKED,
)

# ---------------------------------------------------------------- GPT-OSS


def _needs_rope(field: Field) -> Field:
    """Refuse a config.json without rotary positions: the class then scales them by YaRN, with numbers of its own."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        if reader.get("rope_parameters") is None and reader.get("rope_scaling") is None:
            raise reader.error("rope_parameters", "this class needs it, or rope_scaling: say default or yarn")
        return field.read(reader)

    return field._replace(read=read)


def _swiglu_limit() -> Field:
    """The clamp of gates and ups; the class multiplies gates by sigmoid(1.702 gate), and adds 1 to ups."""
    key, alpha = "swiglu_limit", "swiglu_alpha"

    def read(reader: ConfigReader) -> dict[str, Any]:
        reader.choice(alpha, 1.702, (1.702,))
        limit = reader.number(key, 7.0)
        if not limit > 0:
            raise reader.error(key, "it must be positive")
        return {"activation_func_clamp_value": limit}

    def write(model: Any) -> dict[str, Any]:
        return {key: model.activation_func_clamp_value, alpha: 1.702}

    return Field((key, alpha), read, write)


def _unpacked_when_read() -> Field:
    """The published weights of the experts are in MXFP4, and are read as bfloat16."""
    key = "quantization_config"

    def read(reader: ConfigReader) -> dict[str, Any]:
        quantization = reader.get(key)
        if quantization is not None and not is_mxfp4(reader.values):
            raise reader.error(key, "only quant_method mxfp4 can be read; give the unquantized model")
        return {}

    return Field((key,), read, lambda model: {})


_HF_EXPERTS = f"{HF_LAYER}mlp.experts."
GPT_OSS = Family(
    "GptOssForCausalLM",
    LLAMA_SETTINGS
    | {"gated": True, "activation": "quick-gelu", "glu_linear_offset": 1.0, "softmax_type": "learnable"}
    | {"add_mlp_bias": True, "moe_router_bias": True, "moe_router_pre_softmax": False},
    llama_fields(
        _needs_rope(rope(1.5e5)),
        windows(128, lambda reader, layer: layer % 2 == 0),
        bias("attention_bias", "add_qkv_bias", "add_attention_output_bias", default=True),
        fixed("hidden_act", "silu"),  # which the class does not read: see _swiglu_limit
        _number_of_experts("num_local_experts", "num_experts", 128),
        _chosen_experts_of_sum_1(4),
        repeated("experts_per_token", "num_experts_per_tok", 4),
        _expert_width("intermediate_size"),
        _swiglu_limit(),
        _unpacked_when_read(),
        ignored_keys("initial_context_length"),  # repeats the scaling's original length; no code reads it
        _ROUTER_TRAINING,
        length=131072,
        epsilon=1e-5,
        width=64,
        groups=8,
    ),
    (
        *_BASE,
        ParamMapping(f"{LAYER}self_attention.core_attention.softmax_offset", "copy", (f"{HF_LAYER}self_attn.sinks",)),
        *(mapping._replace(experts=True) for mapping in weight_and_bias(_ROUTER[:-1], "copy", f"{HF_LAYER}mlp.router")),
        ParamMapping(
            f"{_EXPERTS}linear_fc1.weight", "stacked_gate_up_in_turn", (f"{_HF_EXPERTS}gate_up_proj",), experts=True
        ),
        ParamMapping(
            f"{_EXPERTS}linear_fc1.bias", "stacked_gate_up_bias", (f"{_HF_EXPERTS}gate_up_proj_bias",), experts=True
        ),
        ParamMapping(f"{_EXPERTS}linear_fc2.weight", "stacked_transpose", (f"{_HF_EXPERTS}down_proj",), experts=True),
        ParamMapping(f"{_EXPERTS}linear_fc2.bias", "copy", (f"{_HF_EXPERTS}down_proj_bias",), experts=True),
    ),
    IGNORED_TENSORS,
)
