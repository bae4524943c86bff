"""A step with shapes only, in which the real code runs and nothing is computed."""

import pytest
import torch
from torch.nn import functional

from megatron.core.ops.attention.query_tiles import tiles_of
from megatron.core.ops.decisions_overridable_for_memory_prediction import blocks_to_compute
from megatron.core.parallel.mesh import build_mesh
from megatron.core.parallel.rank_grid import AxisSizes
from megatron.core.transformer.layer_parallel_context import ExpertParallel
from megatron.core.transformer.moe.token_dispatcher import DISPATCHERS
from megatron.training.memory.meta_tensor_mode_and_fake_group import META, FakeGroup, ShapesOnly


def test_shapes_say_that_they_are_on_the_device_and_numbers_that_are_read_are_0():
    with META, ShapesOnly():
        x = torch.ones(3, 4, device="cpu", requires_grad=True)
        assert x.is_meta and x.device.type == "cpu" and x.sum().item() == 0 and not bool((x > 0).all())
        assert torch.tensor([5, -5]).tolist() == [5, -5]  # a few integers, by which ranks agree
        torch.nn.functional.scaled_dot_product_attention(*(x.view(1, 1, 3, 4) for _ in range(3))).sum().backward()
    assert x.grad.shape == x.shape and x.device.type == "meta"


def test_of_shapes_without_values_the_largest_block_stands_for_all():
    assert list(blocks_to_compute([1, 3, 2], abs)) == [1, 3, 2]
    with META, ShapesOnly():
        assert list(blocks_to_compute([1, 3, 2], abs)) == [3] and list(blocks_to_compute([], abs)) == []
        (only,) = tiles_of(torch.empty(96, 2050, 64), 128, 2**17)
    assert only.rows[1] == slice(1920, 2048) and only.columns == (slice(0, 1), slice(0, 2048))


def test_grouped_products_have_shapes_in_every_dtype():
    """torch's own has none on the meta device but in bfloat16."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        with META, ShapesOnly():
            x, matrices = torch.ones(5, 8, dtype=dtype), torch.ones(3, 8, 16, dtype=dtype)
            ends = torch.zeros(3, dtype=torch.int32)
            y = functional.grouped_mm(x, matrices.transpose(1, 2).contiguous().transpose(1, 2), offs=ends)
            assert y.shape == (5, 16) and y.dtype == dtype and y.is_meta


@pytest.mark.parametrize("kind", DISPATCHERS)
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (3, 1), (2, 2), (1, 2)])
def test_tokens_reach_experts_that_do_not_divide_them(kind: str, ep: int, etp: int):
    """A prediction spreads 14 and 70 rows over 6 experts; how many a rank sends itself it then knows twice."""
    for rank in range(ep * etp):
        sizes = AxisSizes(dp=ep * etp, ep=ep, etp=etp)
        mesh = build_mesh(sizes, rank, lambda _, ranks, rank=rank: FakeGroup(len(ranks), ranks.index(rank)))
        for tokens in (7, 35):
            with META, ShapesOnly():
                x = torch.ones(tokens, 8, requires_grad=True)
                ids = torch.zeros(tokens, 2, dtype=torch.int64)
                dispatcher = DISPATCHERS[kind](6, ExpertParallel(mesh["ep"], mesh["etp"], mesh["ep_etp"]))
                dispatcher.start(x, ids, torch.ones(tokens, 2, requires_grad=True), None)
                y = dispatcher.finish(lambda rows: rows.x * 2)
                y.sum().backward()
            assert y.shape == x.shape == x.grad.shape
