"""Megatron's helpers of absent features answer that these are off, and its handling of views keeps values and gradients."""

import pytest
import torch

from megatron.core.config_logger import has_config_logger_enabled
from megatron.core.fp8_utils import get_fp8_context, is_float8tensor
from megatron.core.jit import jit_fuser
from megatron.core.utils import (
    WrappedTensor,
    assert_viewless_tensor,
    deprecate_inference_params,
    make_viewless_tensor,
    nvtx_range_pop,
    nvtx_range_push,
    safely_set_viewless_tensor_data,
)


def test_what_is_absent_is_said_to_be_off():
    @jit_fuser
    def double(x):
        return 2 * x

    nvtx_range_push("layer", suffix="0")
    with get_fp8_context(None, 3):
        assert double(2) == 4
    nvtx_range_pop("layer", suffix="0")
    assert not is_float8tensor(torch.ones(1)) and not has_config_logger_enabled(None)


def test_a_view_keeps_its_values_and_its_gradient():
    x = torch.randn(2, 3, requires_grad=True)
    out = make_viewless_tensor((2 * x).transpose(0, 1), requires_grad=True, keep_graph=True)
    assert assert_viewless_tensor(out, "a message") is out
    out.sum().backward()
    assert torch.equal(out, 2 * x.T) and torch.equal(x.grad, torch.full((2, 3), 2.0))

    apart = make_viewless_tensor(x.T, requires_grad=True, keep_graph=False)
    assert apart.is_leaf and apart.requires_grad and torch.equal(apart, x.T)
    assert make_viewless_tensor(x, requires_grad=False, keep_graph=False) is x  # no view

    safely_set_viewless_tensor_data(apart, torch.zeros(1))
    assert apart.tolist() == [0.0]


def test_a_wrapped_tensor_is_taken_out_once():
    x = torch.ones(1)
    wrapped = WrappedTensor(x)
    assert wrapped.unwrap() is x
    with pytest.raises(RuntimeError, match="unwrapped before"):
        wrapped.unwrap()


def test_the_older_name_of_an_inference_context_is_taken_with_a_warning():
    assert deprecate_inference_params("new", None) == "new" and deprecate_inference_params("new", "old") == "new"
    with pytest.warns(UserWarning, match="inference_context"):
        assert deprecate_inference_params(None, "old") == "old"
