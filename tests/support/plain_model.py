"""A decoder with every option, in plain torch and float64: formulas on named weights, for one process. Nothing of ours computes.

It reads the fields of a config, and neither its derived values nor our layers. Rotations are complex numbers, windows are lists
of keys, and a softmax is written out, so that a fault of ours is not repeated.
"""

import json
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def plain_scores(w: dict[str, Tensor], config: Any, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """The scores of the words, [b, s, v]. w: the model's parameters by their names. positions: [b, s], by which queries and keys
    are rotated; default: the place in the sample."""
    w = {name.removeprefix("language_model."): value for name, value in w.items()}
    table = w["embedding.word_embeddings.weight"]
    x = table[tokens] * config.embedding_multiplier
    if config.position_embedding_type == "learned_absolute":
        x = x + w["embedding.position_embeddings.weight"][: tokens.shape[1]]
    if config.norm_placement == "post":
        x = _norm(x, w, "embedding.norm", config)
    for i in range(config.num_layers):
        x = _layer(x, w, i, config, positions)
    if config.norm_placement != "post":
        x = _norm(x, w, "decoder.final_layernorm", config)
    z = x @ w.get("output_layer.weight", table).t() + w.get("output_layer.bias", 0.0)
    z = z * config.logit_multiplier
    return z if (c := config.final_logit_softcapping) is None else c * torch.tanh(z / c)


def _affine(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _norm(x: Tensor, w: dict[str, Tensor], name: str, config: Any) -> Tensor:
    weight, bias = w[f"{name}.weight"] + config.apply_layernorm_1p, w.get(f"{name}.bias", 0.0)
    if config.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * weight + bias


def _layer(x: Tensor, w: dict[str, Tensor], i: int, config: Any, positions: Tensor | None) -> Tensor:
    name, r = f"decoder.layers.{i}.", config.residual_multiplier

    def norm(which: str, x: Tensor) -> Tensor:
        return _norm(x, w, f"{name}{which}_layernorm", config)

    def attend(x: Tensor) -> Tensor:
        return r * _attention(x, w, i, config, positions)

    def mlp(x: Tensor) -> Tensor:
        return r * _mlp(x, w, name + "mlp.", config)

    match config.norm_placement:
        case "pre" if config.apply_residual_connection_post_layernorm:
            y = norm("input", x)
            x = y + attend(y)
            y = norm("pre_mlp", x)
            return y + mlp(y)
        case "pre":
            x = x + attend(norm("input", x))
            return x + mlp(norm("pre_mlp", x))
        case "branch":
            x = x + norm("post_self_attn", attend(x) / r) * r
            return x + norm("post_mlp", mlp(x) / r) * r
        case "sandwich":
            x = x + norm("post_self_attn", attend(norm("input", x)) / r) * r
            return x + norm("post_mlp", mlp(norm("pre_mlp", x)) / r) * r
        case "post":
            x = norm("post_self_attn", x + attend(x))
            return norm("post_mlp", x + mlp(x))
        case "parallel":
            return x + attend(norm("input", x)) + mlp(norm("pre_mlp", x))
    return x + attend(norm("input", x)) + mlp(norm("input", x))


def _mlp(x: Tensor, w: dict[str, Tensor], name: str, config: Any) -> Tensor:
    inner = _affine(x, w, name + "linear_fc1")
    f = _ACTIVATIONS["silu" if config.swiglu else config.activation]
    if config.swiglu or config.gated:
        gate, up = inner.chunk(2, -1)
        if (bound := config.activation_func_clamp_value) is not None:
            gate, up = gate.minimum(torch.tensor(bound)), up.minimum(torch.tensor(bound)).maximum(torch.tensor(-bound))
        inner = f(gate) * (up + config.glu_linear_offset)
    else:
        inner = f(inner)
    return _affine(inner, w, name + "linear_fc2")


_ACTIVATIONS = {
    "gelu-tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "quick-gelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "relu": lambda x: x * (x > 0),
    "squared-relu": lambda x: x * x * (x > 0),
    "silu": lambda x: x / (1 + (-x).exp()),
}


def _attention(x: Tensor, w: dict[str, Tensor], i: int, config: Any, positions: Tensor | None) -> Tensor:
    name, (b, s, h) = f"decoder.layers.{i}.self_attention.", x.shape
    n = config.num_attention_heads
    groups = config.num_query_groups if config.group_query_attention else n
    d = config.kv_channels or h // n
    fused = _affine(x, w, name + "linear_qkv").view(b, s, groups, n // groups + 2, d)
    results = []
    for head in range(n):
        group, place = divmod(head, n // groups)
        q, k, v = fused[:, :, group, place], fused[:, :, group, -2], fused[:, :, group, -1]
        if config.qk_layernorm:
            q, k = (
                _head_norm(q, w, name + "q", fused[:, :, :, :-2], head, config),
                _head_norm(k, w, name + "k", fused[:, :, :, -2:-1], group, config),
            )
        if (bound := config.clip_qkv) is not None:
            q, k, v = (x.minimum(torch.tensor(bound)).maximum(torch.tensor(-bound)) for x in (q, k, v))
        if config.position_embedding_type == "rope":
            q, k = _rotated(q, i, config, positions), _rotated(k, i, config, positions)
        rows = []
        for position in range(s):
            seen = slice(max(0, position - _keys_before(i, config)), position + 1)
            z = torch.einsum("bd,bkd->bk", q[:, position], k[:, seen]) * (config.softmax_scale or d**-0.5)
            z = z / (i + 1) if config.scale_attn_by_inverse_layer_idx else z
            z = z if (c := config.attn_logit_softcapping) is None else c * torch.tanh(z / c)
            sink = {"vanilla": 0.0, "off-by-one": 1.0}.get(config.softmax_type)
            sink = w[name + "core_attention.softmax_offset"][head].exp() if sink is None else sink
            rows.append(torch.einsum("bk,bkd->bd", z.exp() / (z.exp().sum(-1, keepdim=True) + sink), v[:, seen]))
        results.append(torch.stack(rows, 1))
    return _affine(torch.cat(results, -1), w, name + "linear_proj")


def _head_norm(x: Tensor, w: dict[str, Tensor], name: str, of_all: Tensor, head: int, config: Any) -> Tensor:
    """A head x [b, s, d]; of_all: the heads that are normalized together."""
    if config.qk_norm_over == "head":
        return _norm(x, w, name + "_layernorm", config)
    d = x.shape[-1]
    mine = {key: value[head * d : head * d + d] for key, value in w.items() if key.startswith(name + "_layernorm")}
    if config.qk_norm_over == "each-head":
        return _norm(x, mine, name + "_layernorm", config)
    factor = mine[f"{name}_layernorm.weight"] + config.apply_layernorm_1p
    return x / (of_all.flatten(2).square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * factor


def _every(pattern: str | None, i: int, marked: int) -> bool:
    """Whether layer i is an exception: each Nth, or the marked ones of a list."""
    if pattern is None:
        return False
    parsed = eval(pattern)  # a number or a list, written in a test
    return (i + 1) % parsed == 0 if isinstance(parsed, int) else parsed[i] == marked


def _keys_before(i: int, config: Any) -> int:
    if config.window_size is None or _every(config.window_attn_skip_freq, i, 0):
        return 10**9
    return eval(f"({config.window_size})")[0]


# ---------------------------------------------------------------- rotary positions


def _rotated(x: Tensor, i: int, config: Any, positions: Tensor | None) -> Tensor:
    """x: [b, s, d]"""
    if _every(config.no_rope_freq, i, 1):
        return x
    width = int(x.shape[-1] * config.rotary_percent)
    frequencies, amplitude = _frequencies(width, x.shape[1], i, config)
    places = torch.arange(x.shape[1]) if positions is None else positions
    angle = places[..., None] * torch.tensor(frequencies)
    turn = torch.polar(torch.full((), amplitude), angle)
    if config.rotary_interleaved:
        turned = torch.view_as_complex(x[..., :width].reshape(*x.shape[:2], -1, 2).contiguous()) * turn
        return torch.cat((torch.view_as_real(turned).flatten(2), x[..., width:]), -1)
    turned = torch.complex(x[..., : width // 2], x[..., width // 2 : width]) * turn
    return torch.cat((turned.real, turned.imag, x[..., width:]), -1)


def _frequencies(width: int, tokens: int, i: int, config: Any) -> tuple[list[float], float]:
    base, given = config.rotary_base, json.loads(config.rope_scaling or "{}")
    if config.use_rope_scaling:
        given = {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
        }
        given["original_max_position_embeddings"] = 8192
    if config.rotary_seq_len_interpolation_factor:
        given = {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    if config.rotary_base_of_windows and _keys_before(i, config) < 10**9:
        base, given = config.rotary_base_of_windows, {}
    kind, factor = given.get("rope_type"), given.get("factor")
    old = given.get("original_max_position_embeddings")
    if kind == "dynamic":
        base *= (factor * max(tokens, old) / old - (factor - 1)) ** (width / (width - 2))
    plain = [base ** (-2 * j / width) for j in range(width // 2)]
    if kind in (None, "dynamic"):
        return plain, 1.0
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    if kind == "llama3":
        return [_llama3(f, factor, old, given["low_freq_factor"], given["high_freq_factor"]) for f in plain], 1.0
    if kind == "longrope":
        divisors = given["long_factor" if tokens > old else "short_factor"]
        amplitude = given.get("attention_factor") or math.sqrt(1 + math.log(factor) / math.log(old))
        return [f / divisor for f, divisor in zip(plain, divisors)], amplitude
    return _yarn(plain, base, width, given)


def _llama3(f: float, factor: float, old: int, low: float, high: float) -> float:
    wavelength = 2 * math.pi / f
    if wavelength < old / high:
        return f
    if wavelength > old / low:
        return f / factor
    smooth = (old / wavelength - low) / (high - low)
    return (1 - smooth) * f / factor + smooth * f


def _yarn(plain: list[float], base: float, width: int, given: dict) -> tuple[list[float], float]:
    old, factor = given["original_max_position_embeddings"], given["factor"]
    at = [
        width * math.log(old / (2 * math.pi * turns)) / (2 * math.log(base))
        for turns in (given.get("beta_fast", 32), given.get("beta_slow", 1))
    ]
    if given.get("truncate", True):
        at = [math.floor(at[0]), math.ceil(at[1])]
    low, high = max(at[0], 0), min(at[1], width - 1)
    high += 0.001 * (low == high)
    ramp = [min(max((j - low) / (high - low), 0), 1) for j in range(width // 2)]
    m = lambda k: 0.1 * k * math.log(factor) + 1  # noqa: E731
    amplitude = given.get("attention_factor") or m(1)
    if given.get("mscale") and given.get("mscale_all_dim") and not given.get("attention_factor"):
        amplitude = m(given["mscale"]) / m(given["mscale_all_dim"])
    return [f * (1 - t) + f / factor * t for f, t in zip(plain, ramp)], amplitude
