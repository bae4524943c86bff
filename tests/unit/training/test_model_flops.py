"""FLOPs of a token against counts by hand and figures in print."""

import pytest

from megatron.core.transformer.model_config import ModelConfig
from megatron.training.model_flops_of_unbuilt_layouts import ModelShape


def test_shapes_of_gpt_and_llama_are_counted_by_hand():
    gpt = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    by_hand = 2 * (8 * 8 * 3 + 8 * 8 + 2 * 8 * 32) + 8 * 10
    assert ModelShape.of(gpt, vocab_size=10, seq_length=4).multiplied_parameters == by_hand
    llama = ModelConfig(
        num_layers=3,
        hidden_size=8,
        num_attention_heads=4,
        kv_channels=3,
        group_query_attention=True,
        num_query_groups=2,
        swiglu=True,
        ffn_hidden_size=20,
    )
    shape = ModelShape.of(llama, vocab_size=10, seq_length=4)
    queries, keys_and_values, out, mlp = 8 * 12, 2 * 8 * 6, 12 * 8, 3 * 8 * 20
    assert shape.multiplied_parameters == 3 * (queries + keys_and_values + out + mlp) + 8 * 10
    assert shape.flops_per_token() == 6 * shape.multiplied_parameters + 6 * 3 * 4 * 12
    assert shape.flops_per_sample == 4 * shape.flops_per_token()


def test_llama_3_8b_has_the_published_flops():
    """51.5 GFLOP a token at 8192 with causal attention: 744 TFLOP/s at 14,451 tokens/s, as Megatron-Bridge prints them."""
    shape = ModelShape(32, 4096, 4096, 1024, 14336, 128256, 8192, gated=True)
    assert shape.flops_per_token() * 14_451 / 1e12 == pytest.approx(744, rel=0.002)


def test_full_attention_equals_korthikantis_formula():
    """72 B L s h^2 (1 + s / 6h + V / 12hL), arXiv:2205.05198, for GPT-3."""
    layers, hidden, vocab, seq = 96, 12288, 51200, 2048
    published = 72 * layers * seq * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    shape = ModelShape(layers, hidden, hidden, hidden, 4 * hidden, vocab, seq)
    assert shape.flops_per_token(full_attention=True) * seq == pytest.approx(published, rel=1e-12)


def test_a_window_counts_the_keys_that_its_queries_see():
    """Layers 0, 1, 3 see 3 keys: 3 s - 9 / 2 a sequence, with the triangle at the start; layer 2 half of all, s^2 / 2."""
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    full = ModelShape.of(ModelConfig(**sizes), vocab_size=10, seq_length=8)
    config = ModelConfig(**sizes, window_size="2,0", window_attn_skip_freq="3")
    shape = ModelShape.of(config, vocab_size=10, seq_length=8)
    fewer, pairs = full.flops_per_token() - shape.flops_per_token(), sum(min(i, 2) + 1 for i in range(8))
    assert (shape.windows, fewer) == ((3, 3, 3), 3 * 12 * 8 * (8 / 2 - (3 * 8 - 9 / 2) / 8))
    assert pairs == 3 * 8 - 9 / 2 + 3 / 2, "the diagonal's half is left out, as without a window"
    assert full.flops_per_token(full_attention=True) - shape.flops_per_token(full_attention=True) == 3 * 12 * 8 * (
        8 - 3
    )
    longer = ModelConfig(**sizes, window_size="7,0")
    assert ModelShape.of(longer, vocab_size=10, seq_length=8) == full


def test_a_window_of_an_eighth_leaves_15_of_64_of_the_attention():
    """w s - w^2 / 2 of s^2 / 2, with s = 8 w: Mistral 7B's 4,096 keys in 32,768 tokens."""
    shape = ModelShape(32, 4096, 4096, 1024, 14336, 32000, 32768, gated=True)
    inside = ModelShape(32, 4096, 4096, 1024, 14336, 32000, 32768, gated=True, windows=(4096,) * 32)
    attention, left = (one.flops_per_token() - 6 * one.multiplied_parameters for one in (shape, inside))
    assert left / attention == 15 / 64
