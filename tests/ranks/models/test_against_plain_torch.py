"""One process of ours equals a GPT written down in plain torch: the oracle behind every parity test.

Nothing here uses our layers, losses, dropout or optimizer: functional calls on the named weights, autograd, and torch's AdamW and
clip_grad_norm_. Dropout is off, since its masks are ours alone.
"""

from dataclasses import replace

import pytest
import torch
from tiny_run import GPT2, LLAMA, SEQ, VOCAB, Layout, build, run, sample
from torch import Tensor
from torch.nn import functional as F

from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.transformer.model_config import ModelConfig

PLAIN = {
    "gpt2": replace(GPT2, hidden_dropout=0.0, attention_dropout=0.0),
    "llama": LLAMA,
    "partial rotary, wide heads": replace(LLAMA, rotary_percent=0.5, kv_channels=8, rotary_base=500.0),
    "one group, qkv bias, norm of heads": replace(LLAMA, num_query_groups=1, add_qkv_bias=True, qk_layernorm=True),
    "LayerNorm of heads, smoothed": replace(
        GPT2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        qk_layernorm=True,
        position_embedding_type="rope",
        label_smoothing=0.1,
    ),
    # Large weights: one key more or less must be seen.
    "windows": replace(LLAMA, init_method_std=0.3, window_size="2,0", window_attn_skip_freq="3"),
    "windows of another rule": replace(
        LLAMA, num_query_groups=1, init_method_std=0.3, window_size="(4,0)", window_attn_skip_freq="[1,0]*2"
    ),
    "z-loss, smoothed, gated with biases": replace(
        LLAMA, add_bias_linear=True, label_smoothing=0.2, z_loss_coeff=0.01, untie_embeddings_and_output_weights=False
    ),
}

# Keys before the query's own that it sees in each layer.
WINDOWS = {None: (SEQ,) * 4, "2,0": (2, 2, SEQ, 2), "(4,0)": (4, SEQ, 4, SEQ)}


def plain_rotary(x: Tensor, config: ModelConfig) -> Tensor:
    """By complex numbers: feature pair (i, i + half) of position p turns by p * base^(-2i / width). x: [b, n, s, d]"""
    width = int(config.head_width * config.rotary_percent)
    half = width // 2
    angle = torch.arange(x.shape[2])[:, None] * (1 / config.rotary_base ** (torch.arange(0, width, 2) / width))
    turned = torch.complex(x[..., :half], x[..., half:width]) * torch.polar(torch.ones(()), angle)
    return torch.cat((turned.real, turned.imag, x[..., width:]), -1)


def plain_norm(x: Tensor, w: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    if config.normalization == "RMSNorm":
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_epsilon) * w[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + config.norm_epsilon) * w[f"{name}.weight"] + w[f"{name}.bias"]


def plain_losses(w: dict[str, Tensor], config: ModelConfig, tokens: Tensor, labels: Tensor) -> Tensor:
    """-log p of every label, with the terms that the config adds, [b, s]."""
    prefix = "language_model."
    w = {name.removeprefix(prefix): value for name, value in w.items()}
    table = w["embedding.word_embeddings.weight"]
    x = table[tokens]
    if config.position_embedding_type == "learned_absolute":
        x = x + w["embedding.position_embeddings.weight"][: tokens.shape[1]]
    n, groups, d = config.num_attention_heads, config.query_groups, config.head_width

    def affine(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    for i in range(config.num_layers):
        layer = f"decoder.layers.{i}."
        fused = affine(plain_norm(x, w, layer + "input_layernorm", config), layer + "self_attention.linear_qkv")
        fused = fused.view(*x.shape[:2], groups, n // groups + 2, d).permute(0, 2, 3, 1, 4)  # [b, g, heads + 2, s, d]
        q, k, v = fused[:, :, :-2], fused[:, :, -2:-1], fused[:, :, -1:]
        if config.qk_layernorm:
            q = plain_norm(q, w, layer + "self_attention.q_layernorm", config)
            k = plain_norm(k, w, layer + "self_attention.k_layernorm", config)
        if config.position_embedding_type == "rope":
            q, k = (plain_rotary(y.flatten(1, 2), config).view_as(y) for y in (q, k))
        rows = []
        for position in range(SEQ):
            seen = slice(max(0, position - WINDOWS[config.window_size][i]), position + 1)
            scores = q[..., position, None, :] @ k[..., seen, :].transpose(-1, -2) / d**0.5
            rows.append(scores.softmax(-1) @ v[..., seen, :])
        heads = torch.cat(rows, dim=-2)  # [b, g, heads, s, d]
        heads = heads.permute(0, 3, 1, 2, 4).flatten(2)
        x = x + affine(heads, layer + "self_attention.linear_proj")
        inner = affine(plain_norm(x, w, layer + "pre_mlp_layernorm", config), layer + "mlp.linear_fc1")
        if config.swiglu:
            gate, up = inner.split(config.ffn_size, -1)
            inner = gate * torch.sigmoid(gate) * up
        else:
            inner = 0.5 * inner * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
        x = x + affine(inner, layer + "mlp.linear_fc2")
    x = plain_norm(x, w, "decoder.final_layernorm", config)
    logits = x @ w.get("output_layer.weight", table).t()
    # Megatron spreads s over the other K - 1 words, torch over all K.
    smoothing = config.label_smoothing * VOCAB / (VOCAB - 1)
    nll = F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=smoothing, reduction="none")
    return nll + config.z_loss_coeff * logits.exp().sum(-1).log().square()


@pytest.mark.full
@pytest.mark.parametrize("name", PLAIN)
def test_three_steps_equal_plain_torch(name: str):
    config, batch = PLAIN[name], 6
    torch.set_default_dtype(torch.float64)
    try:
        weights = initial_weights(config)
        decayed = [w for w in weights.values() if w.dim() > 1]
        others = [w for w in weights.values() if w.dim() == 1]
        adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, foreach=False
        )
        losses, norms = [], []
        for step in range(3):
            rows = [sample(step * batch + i) for i in range(batch)]
            stacked = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
            per_token = plain_losses(weights, config, stacked["tokens"], stacked["labels"])
            loss = (per_token * stacked["mask"]).sum() / stacked["mask"].sum()
            adam.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), 0.5).item())
            adam.step()
            losses.append(loss.item())
    finally:
        torch.set_default_dtype(torch.float32)
    ours = run(config, Layout(m=2), global_batch=batch, optimizer=OptimizerConfig(clip_grad=0.5, weight_decay=0.1))
    assert ours.losses == pytest.approx(losses, rel=1e-12)
    assert ours.norms == pytest.approx(norms, rel=1e-10)
    for key, expected in weights.items():
        worst = (ours.weights[key] - expected).abs().max().item()
        # Adam divides by the gradient's size, which amplifies rounding where a gradient is nearly zero.
        assert worst <= 1e-8 * expected.abs().max().item(), f"{key} differs by {worst}"


def initial_weights(config: ModelConfig) -> dict[str, Tensor]:
    from local_ranks import run_ranks

    (module,) = run_ranks({}, lambda mesh: build(mesh, config, False)[0].module)
    weights = {name: p.data.clone() for name, p in module.named_parameters()}
    for name, weight in weights.items():
        if "word_embeddings" in name or "output_layer" in name:
            assert weight.shape[0] == 64, "padded to a multiple of 8"
            assert not weight[VOCAB:].any(), "padding is zero"
            weights[name] = weight[:VOCAB]
    return {name: weight.clone().requires_grad_() for name, weight in weights.items()}
