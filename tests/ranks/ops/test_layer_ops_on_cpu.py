"""Eager operations of a layer that have a backward of their own on a CPU: equal to what autograd derives of torch's operations."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops import fused_layer_ops
from megatron.core.ops.fused_layer_ops import REGIONS, gated_silu
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.tensor_parallel.cross_entropy import sharded_cross_entropy

SHAPES = [(6, 2, 16), (5, 3, 2, 8), (4, 1), (0, 3, 8)]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return REGIONS["RMSNorm"].eager(x, weight, None, 1e-5)[1]


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    y, expected = rms_norm(x, weight), torch_rms_norm(x, weight)
    assert torch.equal(y, expected)
    grads = torch.autograd.grad(y, (x, weight), grad)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, weight), grad), rtol=1e-12, atol=1e-13)
    if x.numel():
        assert torch.autograd.gradcheck(rms_norm, (x, weight))


def test_rms_norm_in_float32_is_as_near_to_float64_as_torchs():
    generator = torch.Generator().manual_seed(2)
    x, grad = torch.randn((2, 96, 4, 64), generator=generator)
    weight = torch.randn(64, generator=generator)

    def results(norm, dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        y = norm(*inputs)
        return y.detach(), *torch.autograd.grad(y, inputs, grad.to(dtype))

    exact = results(torch_rms_norm, torch.float64)
    for own, torchs, wanted in zip(results(rms_norm, x.dtype), results(torch_rms_norm, x.dtype), exact):
        assert (own - wanted).abs().max() <= 1.5 * (torchs - wanted).abs().max()


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_rms_norm_of_a_frozen_input(trained: str):
    inputs = {"x": torch.randn(3, 2, 8), "weight": torch.randn(8)}
    inputs[trained].requires_grad_()
    for norm in (rms_norm, torch_rms_norm):
        norm(**inputs).square().sum().backward()
    both = inputs[trained].grad  # the sum of two that should be equal
    inputs[trained].grad = None
    torch_rms_norm(**inputs).square().sum().backward()
    torch.testing.assert_close(both, 2 * inputs[trained].grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [*((*shape[:-1], 2 * shape[-1]) for shape in SHAPES), (7, 12)])
def test_gated_silu_by_blocks(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Blocks of fewer rows than there are, whose number does not divide them; equal to the bit."""
    monkeypatch.setattr(fused_layer_ops, "rows_in_cache", lambda width: 3)
    x = torch.randn(shape).to(dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    expected = functional.silu(gate) * up
    y = gated_silu(x)
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(each, x, grad)[0] for each in (y, expected)))


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cross_entropy(dtype: torch.dtype, overwrite: bool, layout: str):
    """Rows whose largest logit is far below or above 0, and one whose target's probability underflows."""
    logits = torch.randn(3, 2, 37) + torch.tensor([[-900.0, 0.0], [7.0, 900.0], [0.0, 0.0]]).unsqueeze(-1)
    logits[2, 0, 4] = 500.0
    logits = logits.to(dtype)
    target = torch.tensor([[0, 5], [36, 3], [3, 4]])
    leaf = logits.clone().requires_grad_()
    mine = leaf * 1
    if layout == "transposed":
        mine = mine.transpose(0, 1).contiguous().transpose(0, 1)
    losses = sharded_cross_entropy(mine, target, ALONE, overwrite=overwrite)
    (grad,) = torch.autograd.grad(losses.sum(), leaf, retain_graph=True)
    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(exact.view(-1, 37), target.view(-1), reduction="none").view(3, 2)
    (expected_grad,) = torch.autograd.grad(expected.sum(), exact)
    wide = torch.promote_types(dtype, torch.float32)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(
        losses, expected.to(wide), rtol=1e-6 if dtype != torch.float64 else 1e-14, atol=tolerance
    )
    torch.testing.assert_close(grad.double(), expected_grad, rtol=tolerance, atol=tolerance / 100)
    assert torch.equal(torch.autograd.grad(losses.sum(), leaf)[0], grad)
    assert overwrite or torch.equal(mine, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_cross_entropy_is_in_the_memory_of_overwritten_logits(dtype: torch.dtype):
    """Not while the graph is kept for another backward."""
    leaf = torch.randn(4, 2, 9, dtype=dtype, requires_grad=True)
    logits = leaf * 1
    losses = sharded_cross_entropy(logits, torch.zeros(4, 2).long(), ALONE, overwrite=True)
    for is_kept in (True, True, False):
        (grad,) = torch.autograd.grad(losses.sum(), logits, retain_graph=is_kept)
        assert (grad.data_ptr() == logits.data_ptr()) is not is_kept


@pytest.mark.parametrize("no_gradient", [torch.no_grad, torch.inference_mode])
def test_cross_entropy_without_a_gradient_leaves_the_logits(no_gradient: type):
    leaf = torch.randn(4, 2, 9, requires_grad=True)
    for logits in (leaf.detach(), leaf * 1):
        before = logits.detach().clone()
        with no_gradient():
            sharded_cross_entropy(logits, torch.zeros(4, 2).long(), ALONE, overwrite=True)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_derivative_of_the_cross_entropy_is_refused(dtype: torch.dtype, overwrite: bool):
    """The exponentials are constants for autograd, so a gradient penalty would lack a term."""
    leaf = torch.randn(4, 2, 9, dtype=dtype, requires_grad=True)
    losses = sharded_cross_entropy(leaf * 1, torch.zeros(4, 2).long(), ALONE, overwrite=overwrite)
    with pytest.raises(RuntimeError, match=r"create_graph=True: .* no second derivative.*without labels"):
        torch.autograd.grad(losses.sum(), leaf, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overwritten_logits_may_be_a_view_or_saved_elsewhere(dtype: torch.dtype):
    """Those of a module with a full backward hook are a view that may not change in the graph."""
    target = torch.randint(0, 9, (4, 2))
    x = torch.randn(4, 2, 5, dtype=dtype, requires_grad=True)
    linear = torch.nn.Linear(5, 9, dtype=dtype)
    expected = functional.cross_entropy(linear(x).flatten(0, 1).float(), target.flatten(), reduction="sum")
    expected = torch.autograd.grad(expected, [x, *linear.parameters()])
    seen = []
    linear.register_full_backward_hook(lambda module, grad_inputs, grads: seen.append(grads[0].clone()))
    around = (nullcontext(), torch.autograd.graph.save_on_cpu(), torch.autograd.graph.allow_mutation_on_saved_tensors())
    for saved_tensor_hooks in around:
        with saved_tensor_hooks:
            losses = sharded_cross_entropy(linear(x), target, ALONE, overwrite=True)
            grads = torch.autograd.grad(losses.sum(), [x, *linear.parameters()])
        torch.testing.assert_close(grads, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
    assert len(seen) == 3 and torch.equal(seen[0], seen[1])
