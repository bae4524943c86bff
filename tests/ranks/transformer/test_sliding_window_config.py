"""Sliding windows: what a query sees, in blocks of the band as by a mask, with nothing of s x s in memory."""

import argparse
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from tiny_run import GPT2, LLAMA, SEQ, Layout, Outcome, assert_equal, build, run
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.common.model_rules import BERT_RULES, GPT_RULES
from megatron.core.ops.attention import sliding_window_sdpa
from megatron.core.ops.attention.document_and_window_masks import Documents, Mask, Window, hidden_keys, with_window
from megatron.core.ops.attention.kernels import (
    KERNELS,
    AttentionCase,
    fused_attention,
    kernel_or_fallback,
    unfused_attention,
)
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.ops.attention.sliding_window_sdpa import blocks_of
from megatron.core.transformer.layer_freq_pattern import read_pattern
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.parse_sliding_window import read_window
from megatron.core.transformer.transformer_config import model_config
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.compare_settings_with_checkpoint import compare

# ---------------------------------------------------------------- which layers, which keys


def befores(layers: int, **settings) -> list[int | None]:
    config = ModelConfig(num_layers=layers, **settings)
    return [config.window_left(layer) for layer in range(layers)]


def test_layers_have_windows_as_in_megatron():
    """Layer i, from 0, has the window if (i + 1) mod N is not 0, or if its entry in the list is 1."""
    assert befores(2) == [None, None]
    assert befores(3, window_size="4095,0") == [4095] * 3
    assert befores(5, window_size="0,0", window_attn_skip_freq="2") == [0, None, 0, None, 0]
    assert befores(7, window_size="(9,0)", window_attn_skip_freq="3") == [9, 9, None, 9, 9, None, 9]
    assert befores(2, window_size="9,0", window_attn_skip_freq="1") == [None, None]
    assert befores(4, window_size="9,0", window_attn_skip_freq="[0,1]*2") == [None, 9, None, 9]
    assert befores(2, window_size="-1,0") == [None, None]
    assert befores(2, window_size=(7, 0), window_attn_skip_freq=[0, 1]) == [None, 7], "as Megatron's scripts have them"


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (read_window, "(4095, 0)", "4095,0"),
        (read_window, "-1,0", "-1,0"),
        (read_window, "4096", "L,0"),
        (read_window, "1,2,3", "L,0"),
        (read_window, "4,1", "give 4,0"),
        (read_window, "-2,0", "-1 for all"),
        (read_pattern, " 4", "4"),
        (read_pattern, "([1]*2+[0])*2", "[1,1,0,1,1,0]"),
        (read_pattern, "2*[1, 0]", "[1,0,1,0]"),
        (read_pattern, "0", "a whole number of at least 1"),
        (read_pattern, "often", "list"),
        (read_pattern, "[]", "list"),
        (read_pattern, "[2]", "list"),
        (read_pattern, "[True]", "list"),
        (read_pattern, "[1]*99999999999", "list"),
        (read_pattern, "[print(1)]", "list"),
        (read_pattern, "[1", "list"),
    ],
)
def test_a_setting_has_one_spelling_or_is_refused_with_what_is_allowed(read, text: str, expected: str):
    try:
        assert read(text) == expected == read(expected)
    except argparse.ArgumentTypeError as error:
        assert text in str(error) and expected in str(error)


def test_scripts_read_and_give_the_settings_in_megatrons_types():
    flags = ["--window-size", "9,0", "--window-attn-skip-freq", "[1,0]*2", "--num-layers", "4"]
    config, args, _ = parse_args(flags)
    assert (args.window_size, args.window_attn_skip_freq) == ((9, 0), [1, 0, 1, 0])
    assert (config.transformer.window_size, config.transformer.window_attn_skip_freq) == ("9,0", "[1,0,1,0]")
    again = model_config(core_transformer_config_from_args(args))
    assert [again.window_left(layer) for layer in range(4)] == [9, None, 9, None]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"window_size": "4096"}, "--window-size: '4096' must be L,0"),
        ({"window_attn_skip_freq": "2"}, "--window-attn-skip-freq 2 needs --window-size L,0"),
        ({"window_size": "4,0", "window_attn_skip_freq": "[1,0]*3"}, "has 6 entries, but --num-layers is 4"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict, problem: str):
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        ModelConfig(num_layers=4, **settings)


def test_a_window_hides_what_lies_before_it_and_what_comes_later():
    pictures = {0: ["x....", ".x...", "..x.."], 2: ["x....", "xx...", "xxx..", ".xxx.", "..xxx"]}
    for before, picture in pictures.items():
        hidden = hidden_keys(Window(before, None), 5, 5, torch.device("cpu"))
        assert ["".join(".x"[not one] for one in row) for row in hidden.tolist()][: len(picture)] == picture
    last_two = hidden_keys(Window(2, torch.zeros(1, 2, 5, dtype=torch.bool)), 2, 5, torch.device("cpu"))
    assert (~last_two[0]).long().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


# ---------------------------------------------------------------- over the band


def test_blocks_cover_every_query_once_and_the_keys_that_it_sees():
    for queries, earlier, before, rows in product((1, 2, 7, 12), (0, 1, 5), (0, 1, 4, 11), (1, 3, 5, 16)):
        keys = queries + earlier
        blocks = blocks_of(queries, keys, before, rows)
        assert [row for a, b, *_ in blocks for row in range(a, b)] == list(range(queries))
        for start, stop, first, end in blocks:
            assert first == max(0, earlier + start - before) and end == earlier + stop
            assert stop - start <= rows or first == start == 0 or earlier + stop <= before + 1
    assert blocks_of(8192, 8192, 511, 128)[:2] == [(0, 512, 0, 512), (512, 640, 1, 640)]


def masks(batch: int, s: int) -> dict[str, Tensor | Documents | None]:
    """Those that a window can be within: of every kind, none of which hides a query from itself."""
    generator = torch.Generator().manual_seed(s)
    numbers = torch.randint(0, 3, (batch, s), generator=generator).sort()[0]
    hidden = (torch.rand(batch, 1, s, s, generator=generator) > 0.6) & ~torch.eye(s, dtype=torch.bool)
    return {
        "causal": None,
        "documents": Documents(numbers),
        "a mask": hidden,
        "of keys": torch.zeros(batch, 1, 1, s) > 0,
    }


@pytest.mark.parametrize("within", ["causal", "documents", "a mask", "of keys"])
def test_the_fused_kernel_equals_the_plain_one_forward_and_backward(within: str, monkeypatch):
    """In float64, in blocks of odd sizes, of which s is no multiple; with shared key heads."""
    for before, rows, groups, s in [
        (0, 3, 2, 11),
        (1, 4, 1, 11),
        (4, 3, 4, 11),
        (9, 1, 2, 11),
        (3, 16, 2, 7),
        (2, 2, 2, 9),
    ]:
        monkeypatch.setattr(sliding_window_sdpa, "_ROWS_ON_CPU", rows)
        mask, results = with_window(masks(2, s)[within], before, s), []
        generator = torch.Generator().manual_seed(before)
        shapes = [(2, 4, s, 8), (2, groups, s, 8), (2, groups, s, 8), (2, 4, s, 8)]
        *heads, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        for kernel in (unfused_attention, fused_attention):
            q, k, v = (x.clone().requires_grad_() for x in heads)
            out = kernel(q, k, v, mask, lambda probabilities: probabilities)
            results.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_later_tokens_of_a_cache_see_their_window(monkeypatch):
    """Queries that are the last of the keys, causal and with a mask, in one block and in several."""
    monkeypatch.setattr(sliding_window_sdpa, "_ROWS_ON_CPU", 2)
    q, k, v = (torch.randn(2, heads, 9, 8, dtype=torch.float64) for heads in (4, 2, 2))
    whole = unfused_attention(q, k, v, Window(3, None), lambda probabilities: probabilities)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for new in (1, 3, 5, 7):
        mask = None if new == 1 else hidden[None, None, -new:]
        for kernel in (unfused_attention, fused_attention):
            out = kernel(q[:, :, -new:], k, v, with_window(mask, 3, 9), lambda probabilities: probabilities)
            torch.testing.assert_close(out, whole[:, :, -new:], rtol=1e-12, atol=1e-12)


def test_a_window_that_hides_nothing_is_the_mask_itself():
    numbers = Documents(torch.zeros(1, 5, dtype=torch.long))
    assert (
        with_window(None, 4, 5) is None and with_window(None, None, 5) is None and with_window(numbers, 4, 5) is numbers
    )
    assert with_window(None, 3, 5) == Window(3, None)


def test_dropout_takes_the_fused_kernel_from_a_window_too():
    case = AttentionCase(torch.empty(1, 1, 9, 8), torch.empty(1, 1, 9, 8), Window(3, None), 0.0)
    assert kernel_or_fallback("auto", case) is KERNELS["fused"]
    assert kernel_or_fallback("auto", case._replace(dropout=0.1)) is KERNELS["tiled-eager"]


@pytest.mark.full
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["dropout", "fused"])
def test_windows_that_hide_nothing_have_the_bits_of_none(config: ModelConfig):
    whole = run(config, Layout(), steps=1, global_batch=4)
    for size, skip in ((f"{SEQ - 1},0", None), ("-1,0", None), ("1,0", "1")):
        other = run(replace(config, window_size=size, window_attn_skip_freq=skip), Layout(), steps=1, global_batch=4)
        assert (other.losses, other.norms) == (whole.losses, whole.norms)
        assert_equal(other, whole, 0.0)


# ---------------------------------------------------------------- with other features

WINDOWS = replace(LLAMA, init_method_std=0.3, window_size="2,0", window_attn_skip_freq="3")


@cache
def one_process() -> Outcome:
    return run(WINDOWS, Layout(), steps=2, global_batch=8)


@pytest.mark.full
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
def test_shards_of_a_model_with_windows_equal_one_process(stage: int):
    sharded = DataParallelConfig(zero_stage=stage, overlap_grad_reduce=True, overlap_param_gather=True)
    layout = Layout(tp=2, sp=True, pp=2 if stage < 2 else 1, dp=2, m=2, recompute="selective", data_parallel=sharded)
    assert_equal(run(WINDOWS, layout, steps=2, global_batch=8), one_process(), 1e-10)


def test_a_prompt_in_pieces_sees_what_it_sees_whole():
    """With a cache: 4 tokens, 3 more (by mask), and one (the last keys alone)."""
    model = build(single_rank_mesh(), WINDOWS, sp=False)[0].module.eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    positions, cache = torch.arange(8)[None], KeyValueCache([0], capacity=8)
    with torch.no_grad():
        whole = model(tokens, positions)
        # Of each piece the scores of its last token.
        pieces = [model(tokens[:, a:b], positions[:, a:b], cache=cache) for a, b in ((0, 4), (4, 7), (7, 8))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole[:, [3, 6, 7]], rtol=1e-12, atol=1e-12)
    short = build(single_rank_mesh(), replace(WINDOWS, window_size="1,0"), sp=False)[0].module.eval()
    with torch.no_grad():
        assert (short(tokens, positions) - whole).abs().max() > 0.1, "one key less is seen"


def test_a_bert_refuses_a_window_and_a_resumed_run_another():
    config = parse_args(["--window-size", "9,0"])[0]
    assert any("--window-size looks back alone" in problem for problem in BERT_RULES.problems(config, None))
    assert not any("--window-size" in problem for problem in GPT_RULES.problems(config, None))
    saved = parse_args(["--window-size", "(9, 0)"])[0].as_json()
    assert not compare(config.as_json(), saved).model
    for other in ([], ["--window-size", "8,0"], ["--window-size", "9,0", "--window-attn-skip-freq", "2"]):
        (change,) = compare(config.as_json(), parse_args(other)[0].as_json()).model
        assert change.name in ("window_size", "window_attn_skip_freq")


# ---------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operator inside the block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *made])
        return out


@pytest.mark.parametrize("within", ["causal", "documents"])
def test_nothing_of_s_times_s_is_made_or_kept(within: str):
    s, before, heads, width = 1024, 63, 2, 8
    mask: Mask = with_window(None if within == "causal" else Documents(torch.arange(s)[None] // 400), before, s)
    q, k, v = (torch.randn(1, heads, s, width, requires_grad=True) for _ in range(3))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with Largest() as largest:
        with saved_tensors_hooks(keep, lambda x: x):
            out = fused_attention(q, k, v, mask, lambda probabilities: probabilities)
        out.sum().backward()
    block = sliding_window_sdpa._ROWS_ON_CPU * (before + sliding_window_sdpa._ROWS_ON_CPU + 15)
    assert largest.elements <= max(block, heads * s * width) < s * s / 16
    shared = block * (1 if within == "causal" else 3)  # of each document
    assert sum(kept.values()) <= 4 * (4 * heads * s * width + heads * s + shared), "q, k, v, out, and a number a row"
