"""Attention in tiles by torch operations equals the plain kernel, and keeps no scores."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops.attention import query_tiled_eager
from megatron.core.ops.attention.document_and_window_masks import Documents, Mask, Window
from megatron.core.ops.attention.kernels import unfused_attention
from megatron.core.ops.attention.query_tiled_eager import eager_tiled_attention
from megatron.core.ops.attention.query_tiles import tiles_of
from megatron.core.ops.layout_invariant_dropout import AttentionDropout, SampleDropoutKeys

PADDING = torch.arange(10).view(1, 1, 1, 10) >= torch.tensor([7, 10]).view(2, 1, 1, 1)
OF_HEADS = torch.ones(2, 4, 10, 10).tril(3).roll((1, 2), (2, 3)) == 0
DOCUMENTS = Documents(torch.tensor([[0] * 4 + [1] * 6, [0] * 9 + [1]]))
MASKS: dict[str, Mask] = {
    "causal": None,
    "padding": PADDING,
    "each head's": OF_HEADS,
    "two dimensions": OF_HEADS[0, 0],
    "documents": DOCUMENTS,
    "window": Window(2, None),
    "window of documents": Window(5, DOCUMENTS),
    "window of padding": Window(3, PADDING),
}


def dropout_of(probability: float, first_head: int = 0) -> AttentionDropout:
    keys = SampleDropoutKeys(5)
    keys.samples = (11, 4)
    return AttentionDropout(probability, keys, 1, first_head)


def both_kernels(mask: Mask, dropout: AttentionDropout, *heads: Tensor) -> list[list[Tensor]]:
    """Results and gradients of the plain kernel, then of tiles."""
    found = []
    for kernel in (unfused_attention, eager_tiled_attention):
        inputs = [x.detach().requires_grad_() for x in heads]
        out = kernel(*inputs, mask, dropout)
        out.backward(torch.sin(torch.arange(out.numel())).view(out.shape).to(out.dtype))
        found.append([out.detach(), *(x.grad for x in inputs)])
    return found


def values(*shape: int, seed: int = 0, **kwargs: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 queries, the last of 2; of one head or of several, some of one sample and some of the next."""
    monkeypatch.setattr(query_tiled_eager, "_QUERIES", 4)
    monkeypatch.setattr(query_tiled_eager, "_ELEMENTS_PER_THREAD", 120 // torch.get_num_threads())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_in_tiles_is_the_plain_one(mask: str, dropout: float, small_tiles: None):
    """Two query heads of each key and value head; q as a model has it, a view of [s, b, n, d]."""
    heads = [values(10, 2, n, 6, seed=n).permute(1, 2, 0, 3) for n in (4, 2, 2)]
    for plain, tiled in zip(*both_kernels(MASKS[mask], dropout_of(dropout, first_head=4), *heads), strict=True):
        assert (tiled - plain).abs().max() < 1e-12 * plain.abs().max()


@pytest.mark.parametrize("length", [127, 128, 129])
def test_a_length_that_is_no_multiple_of_a_tile_has_a_shorter_one(length: int):
    heads = [values(2, 3, length, 4, seed=n) for n in range(3)]
    for plain, tiled in zip(*both_kernels(None, dropout_of(0.1), *heads), strict=True):
        assert (tiled - plain).abs().max() < 1e-12 * plain.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_half_precision_is_as_near_to_float64_as_the_plain_kernel(mask: str, dtype: torch.dtype, small_tiles: None):
    heads = [values(2, 4, 10, 6, seed=n).to(dtype) for n in range(3)]
    exact, _ = both_kernels(MASKS[mask], dropout_of(0.2), *(x.double() for x in heads))
    for right, plain, tiled in zip(exact, *both_kernels(MASKS[mask], dropout_of(0.2), *heads), strict=True):
        errors = [(x.double() - right).abs().max() for x in (tiled, plain)]
        assert tiled.dtype == dtype and errors[0] <= errors[1] + torch.finfo(dtype).eps * right.abs().max()


def test_a_hidden_score_may_overflow_and_a_sure_row_has_no_gradient(small_tiles: None):
    """As in the plain kernel, to the bit: float16 overflows at 65,504."""
    q, k = torch.ones(2, 1, 10, 4, dtype=torch.float16) * 200, torch.zeros(2, 1, 10, 4, dtype=torch.float16)
    k[..., 0, :], k[..., 9, :] = 100, 30_000
    q[..., 9, :] = 0
    plain, tiled = both_kernels(None, dropout_of(0.0), q, k, values(2, 1, 10, 4).half())
    assert math.isinf(float(q[0, 0, 0] / 2 @ k[0, 0, 9]))
    assert all(map(torch.equal, plain[1:3], tiled[1:3])) and not tiled[1][:, :, :9].any()


@pytest.mark.parametrize("mask", ["causal", "documents", "window"])
def test_nothing_of_the_size_of_all_scores_is_saved(mask: str, small_tiles: None):
    sizes: list[int] = []
    heads = [values(2, 4, 10, 6).requires_grad_() for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        eager_tiled_attention(*heads, MASKS[mask], dropout_of(0.1))
    assert max(sizes) == 2 * 4 * 10 * 6


def test_each_query_meets_each_key_that_it_sees_in_one_tile():
    for before, is_causal in ((None, True), (3, True), (None, False)):
        met = torch.zeros(3, 10, 10, dtype=torch.int64)
        for (heads, queries), (same_heads, keys) in tiles_of(
            torch.empty(3, 10, 1), 4, 50, is_causal=is_causal, window_left=before
        ):
            assert heads == same_heads and met[heads, queries, keys].numel() <= max(50, 4 * 10)
            met[heads, queries, keys] += 1
        seen = torch.ones(10, 10, dtype=torch.int64)
        seen = seen.tril() if is_causal else seen
        assert met.max() == 1 and bool((met >= (seen if before is None else seen.triu(-before))).all())
        assert before is None or met[:, 8:, :5].sum() == 0  # keys that no query of the last tile sees
