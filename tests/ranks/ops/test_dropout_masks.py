"""Masks against the same function in Python's integers, and against what fair bits would give."""

from collections.abc import Callable
from itertools import product

import mask_statistics
import pytest
import torch
from torch import Tensor

from megatron.core.ops.dropout_masks import MaskWords, dropped, keep_mask, mixed, pairs_of_words, threshold_of
from megatron.core.ops.layout_invariant_dropout import AttentionDropout, HiddenDropout, SampleDropoutKeys
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard
from megatron.core.sharding.initial_values import seed_of

WORD = 2**32 - 1


def keys_of(*samples: int) -> SampleDropoutKeys:
    keys = SampleDropoutKeys(7)
    keys.samples = samples
    return keys


# ---------------------------------------------------------------- the function, in unsigned integers of Python


def draw(counter: int, first: int, second: int) -> int:
    x = (counter ^ first) & WORD
    x = ((x ^ x >> 16) * 0x21F0AAAD & WORD) ^ second
    return ((x ^ x >> 15) * 0xD35A2D97 & WORD) ^ first


def word(counter: int, key: tuple[int, int]) -> int:
    x = draw(counter, *key)
    return x ^ x >> 16


def numbered(key: tuple[int, int], number: int) -> tuple[int, int]:
    return word(2 * number, key), word(2 * number + 1, key)


def halves(key: int) -> tuple[int, int]:
    return key & WORD, key >> 32


def is_kept(p: float, site: str, layer: int, sample: int, numbers: tuple[int, ...], column: int) -> bool:
    """numbers: of the head and the row, or of the row."""
    place, of_sample = halves(seed_of(site, layer)), halves(seed_of(7, sample))
    key = word(place[0], of_sample), word(place[1], of_sample)
    for number in numbers:
        key = numbered(key, number)
    drawn = draw(word(column, place), *key) ^ 1 << 31  # signed words are compared
    return drawn >= round(p * 2**32)


def test_masks_are_those_of_pythons_integers():
    shape, p = (2, 3, 4, 5), 0.4
    words = AttentionDropout(p, keys_of(3, 2**40), 2, first_head=6).words_for(shape, torch.device("cpu"))
    expected = [
        is_kept(p, "attention", 2, (3, 2**40)[row], (6 + head, query), key)
        for row, head, query, key in product(*map(range, shape))
    ]
    assert keep_mask(words, p).flatten().tolist() == expected
    hidden = HiddenDropout(p, keys_of(3, 2**40), "mlp", 5, SequenceShard()).words_for(torch.empty(4, 2, 5))
    expected = [
        is_kept(p, "mlp", 5, (3, 2**40)[row], (token,), column)
        for token, row, column in product(*map(range, (4, 2, 5)))
    ]
    assert keep_mask(hidden, p).flatten().tolist() == expected


def test_words_are_a_bijection_of_the_counter_and_of_each_key_word():
    numbers = torch.arange(2**16, dtype=torch.int32) * 65521
    for counter, keys in (
        (numbers, torch.tensor([5, -9], dtype=torch.int32)),
        (torch.tensor(5, dtype=torch.int32), torch.stack([torch.full_like(numbers, -3), numbers], -1)),
    ):
        assert len(mixed(counter, keys).unique()) == 2**16


@pytest.mark.parametrize(("p", "share"), [(0.5, 2**31), (0.1, 429496730), (1 - 2**-40, 2**32 - 1), (2**-40, 0)])
def test_the_threshold_is_the_probability_to_32_bits(p: float, share: int):
    assert threshold_of(p) + 2**31 == share


# ---------------------------------------------------------------- what is done with a mask


def words_of(lines: int, width: int) -> MaskWords:
    return AttentionDropout(0.3, keys_of(4), 1, 0).words_for((1, 1, lines, width), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_precision_drops_the_same_and_scales_the_rest(dtype: torch.dtype):
    x = torch.rand(1, 1, 300, 700, generator=torch.Generator().manual_seed(1)).to(dtype) + 1
    mask = keep_mask(words_of(300, 700), 0.3)
    expected = torch.where(mask, x * (1 / 0.7), 0)
    assert torch.equal(dropped(x, words_of(300, 700), 0.3), expected)


def test_inputs_and_gradients_of_any_strides_have_the_same_mask():
    x = torch.rand(1, 1, 9, 8, dtype=torch.float64, requires_grad=True)
    mask = keep_mask(words_of(8, 9), 0.3)
    dropped(x.transpose(2, 3), words_of(8, 9), 0.3).sum().backward()  # the gradient of a sum is one number, expanded
    assert torch.equal(x.grad, mask.transpose(2, 3) * torch.tensor(1 / 0.7, dtype=torch.float64))


def test_nothing_of_the_size_of_a_mask_waits_for_the_backward():
    kept_back = []
    x = torch.rand(1, 1, 64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept_back.append(t.numel()) or t, lambda t: t):
        dropped(x, words_of(64, 64), 0.3)
    assert kept_back == [2 * 64, 64]


@pytest.mark.full
def test_traced_code_has_the_same_bits_and_one_graph_for_all_samples_and_layers():
    graphs = []

    def run(graph: torch.fx.GraphModule, _: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    traced = torch.compile(lambda x, *words: dropped(x, MaskWords(*words), 0.3), backend=run, fullgraph=True)
    x = torch.rand(8, 2, 32)
    for sample, layer in product((1, 5), (0, 3)):
        dropout = HiddenDropout(0.3, keys_of(sample, sample + 1), "mlp", layer, SequenceShard())
        assert torch.equal(traced(x, *dropout.words_for(x)), dropout(x))
    assert len(graphs) == 1


# ---------------------------------------------------------------- statistics


@pytest.mark.full
@pytest.mark.parametrize("p", [0.5, 0.1])
def test_masks_of_neighbouring_keys_rows_and_columns_are_independent(p: float):
    """2^20 bits. `python tests/campaigns/mask_statistics.py` asks the same of more, with the results in docs/dropout.md."""
    found = mask_statistics.added(mask_statistics.lot(p, number, size=128) for number in range(4))
    assert {name: round(mask_statistics.chance(values), 4) for name, values in found.items() if unlikely(values)} == {}


def unlikely(values: Tensor) -> bool:
    return mask_statistics.chance(values) < 1e-3


def test_statistics_see_a_weaker_mixer():
    """Keys added to a counter, a mixer of one round, and a sum of row and column words."""
    counters = torch.arange(128, dtype=torch.int32)
    rows = mixed(counters, pairs_of_words([9])[0])[:, None]
    one_round = (counters + 128 * counters[:, None]) * 0x21F0AAAD
    shifted = mixed(counters + counters[:, None], pairs_of_words([3])[0])
    summed = rows ^ rows.T
    for name, bits in (("patterns", one_round), ("rows", shifted), ("squares", summed)):
        values = mask_statistics.scores((bits < 0).expand(4, -1, -1).contiguous(), 0.5)[name]
        assert mask_statistics.chance(values) < 1e-9, name


def test_a_compiled_mask_leaves_the_layout_of_a_tensor(monkeypatch):
    """Its words lie by samples, and a product with a result of that layout would be one a sample."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.ones(4, 2, 8)
    dropout = HiddenDropout(0.1, keys_of(3, 4), "mlp", 0, SequenceShard())
    assert dropped(x, dropout.words_for(x), 0.1).stride() == x.stride()
