"""--compile regions: a linear layer keeps what its input is made from, which the norm or activation before it keeps anyway."""

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron.core.ops.compile import compiled_region
from megatron.core.ops.fused_layer_ops import REGIONS, activation_of
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.ops.recomputable_tensors import save_or_recompute
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.tensor_parallel.linear_autograd import linear
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm

ROWS, WIDTH, INNER = (6, 2), 16, 24


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas are traced as for a compiler, and run eagerly."""
    monkeypatch.setattr(compiled_region, "BACKEND", "eager")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def nodes_below(made: Tensor) -> Iterator[torch.autograd.graph.Node]:
    waiting, seen = [made.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [below for below, _ in node.next_functions]


def kept_elements(made: Tensor, beside: list[Tensor | None]) -> int:
    """Elements of the memories that the graph of `made` keeps, without those `beside`."""
    outside = {x.untyped_storage().data_ptr() for x in beside if x is not None}
    saved = [x for node in nodes_below(made) for x in getattr(node, "saved_tensors", ()) if x is not None]
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // x.itemsize for x in saved}
    return sum(size for pointer, size in sizes.items() if pointer not in outside)


class Block:
    """x + W2 f(W1 norm(x) + b): a layer's MLP of compiled regions."""

    def __init__(self, activation: str, *, bias: bool, norm: str, dtype: torch.dtype = torch.float32):
        self.norm, self.activation = REGIONS[norm], activation_of(activation)
        self.gated = activation.startswith("gated_")
        wide = INNER * (2 if self.gated else 1)
        self.x = drawn(*ROWS, WIDTH, dtype=dtype)
        self.weight = drawn(WIDTH, seed=1, dtype=dtype)
        self.norm_bias = drawn(WIDTH, seed=2, dtype=dtype) if norm == "LayerNorm" else None
        self.fc1, self.fc2 = drawn(wide, WIDTH, seed=3, dtype=dtype), drawn(WIDTH, INNER, seed=4, dtype=dtype)
        self.bias = drawn(wide, seed=5, dtype=dtype) if bias else None

    def parameters(self) -> list[Tensor]:
        found = self.x, self.weight, self.norm_bias, self.fc1, self.fc2, self.bias
        return [x for x in found if x is not None]

    def run(self, read: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """read: what a product is given instead of its input."""
        x, normed = self.norm.compiled(self.x, self.weight, self.norm_bias, 1e-5)
        inner = linear(read(normed), self.fc1)
        return x + linear(read(self.activation.compiled(inner, self.bias)), self.fc2)

    def gradients(self, made: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(made.square().sum(), self.parameters()))


BLOCKS = [
    pytest.param(activation, bias, norm, id=f"{activation}{'-bias' * bias}-{norm}")
    for activation, norm in (("gelu-tanh", "LayerNorm"), ("gated_silu", "RMSNorm"))
    for bias in (False, True)
]


@pytest.mark.full
@pytest.mark.parametrize(("activation", "bias", "norm"), BLOCKS)
def test_a_block_keeps_its_input_and_one_product(activation: str, bias: bool, norm: str):
    """Beside x and parameters: the product before the activation, and the norm's numbers of each row. Plain readers keep the
    results of norm and activation too."""
    block, tokens = Block(activation, bias=bias, norm=norm), ROWS[0] * ROWS[1]
    product = INNER * (2 if block.gated else 1)
    of_rows = 2 if norm == "LayerNorm" else 1  # mean and scale; scale
    kept, plain = (kept_elements(block.run(read), block.parameters()) for read in (lambda x: x, lambda x: x.view_as(x)))
    assert kept == tokens * (product + of_rows)
    assert plain == kept + tokens * (WIDTH + INNER)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "bias", "norm"), BLOCKS)
def test_gradients_are_those_of_inputs_that_are_kept(activation: str, bias: bool, norm: str, dtype: torch.dtype):
    """To the bit. A view is another tensor, which nobody has marked."""
    block = Block(activation, bias=bias, norm=norm, dtype=dtype)
    again, kept = (block.gradients(block.run(read)) for read in (lambda x: x, lambda x: x.view_as(x)))
    assert all(map(torch.equal, again, kept))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_program_makes_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    if compiled_region.why_not("cpu"):
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(compiled_region, "BACKEND", "inductor")
    test_gradients_are_those_of_inputs_that_are_kept("gelu-tanh", True, "LayerNorm", dtype)


def gradients_in_buffers(block: Block, read: Callable[[Tensor], Tensor], backwards: int = 1) -> list[Tensor]:
    for weight in (block.fc1, block.fc2):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    made = block.run(read).square().sum()
    others = [x for x in block.parameters() if x is not block.fc1 and x is not block.fc2]
    for left in reversed(range(backwards)):
        found = torch.autograd.grad(made, [*others, block.fc1, block.fc2], retain_graph=left > 0, allow_unused=True)
    assert found[len(others) :] == (None, None)
    return [*found[: len(others)], block.fc1.main_grad, block.fc2.main_grad]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "bias", "norm"), BLOCKS)
def test_a_gradient_in_a_buffer_is_made_in_the_backward_of_its_inputs_maker(
    activation: str, bias: bool, norm: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Without a pass that makes the input again, to the same numbers; also in a second backward."""
    block = Block(activation, bias=bias, norm=norm, dtype=dtype)
    plain = gradients_in_buffers(block, lambda x: x.view_as(x))

    def refused(*_: object) -> None:
        raise AssertionError("a pass of its own")

    monkeypatch.setattr("megatron.core.ops.recomputable_tensors._recompute", refused)
    asked, twice = (gradients_in_buffers(block, lambda x: x, backwards) for backwards in (1, 2))
    assert all(map(torch.equal, asked, plain))
    torch.testing.assert_close(twice[-2:], [2 * x for x in plain[-2:]])


@pytest.mark.full
def test_a_backward_that_leaves_out_the_maker_makes_the_input_itself():
    block = Block("gelu-tanh", bias=True, norm="LayerNorm")
    expected = gradients_in_buffers(block, lambda x: x)[-1]
    block.fc2.main_grad = torch.zeros_like(block.fc2)
    torch.autograd.grad(block.run().square().sum(), [block.fc2], allow_unused=True)
    assert torch.equal(block.fc2.main_grad, expected)


def test_a_tensor_changed_in_place_is_kept():
    made = REGIONS["gelu-tanh"].compiled(drawn(4, 8), None)
    assert save_or_recompute(made)[1][0] is not made
    with torch.no_grad():
        made.add_(1)
    again, kept = save_or_recompute(made)
    assert kept == (made,) and again(*kept) is made


def test_a_norm_by_itself_is_kept_by_its_readers():
    """They may run where ZeRO stage 3 has released its weight, as the output layer after the final norm."""
    if compiled_region.why_not("cpu"):
        pytest.skip("no C++ compiler")  # without, norms run eager
    config = ModelConfig(hidden_size=8, num_layers=1, num_attention_heads=1, compile="regions")
    norm, x = make_norm(config, LayerContext(TensorParallel(ALONE), SampleDropoutKeys(0))), drawn(4, 2, 8)
    assert not hasattr(norm(x), "recompute_recipe") and hasattr(norm(x, with_input=True)[1], "recompute_recipe")


@pytest.mark.full
def test_a_region_that_does_not_keep_its_inputs_marks_nothing():
    fused, angles = drawn(6, 2, 2, 5, 8), drawn(6, 1, 3, seed=1).detach()
    assert not any(hasattr(x, "recompute_recipe") for x in REGIONS["heads"].compiled(fused, None, angles, angles, 3))


def test_without_gradients_nothing_is_marked():
    with torch.no_grad():
        assert not hasattr(REGIONS["gelu-tanh"].compiled(drawn(4, 8), None), "recompute_recipe")


def test_an_input_that_is_made_again_is_free_after_the_forward():
    made = REGIONS["gelu-tanh"].compiled(drawn(4, 8), None)
    result, seen = linear(made, drawn(3, 8, seed=1)), weakref.ref(made)
    del made
    assert result.requires_grad and seen() is None  # without a collection of garbage: the mark closes no circle
