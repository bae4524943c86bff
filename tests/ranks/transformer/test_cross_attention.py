"""Attention to another sequence: against torch's, and a decoder's layers in Megatron's names over tensor-parallel ranks."""

import pytest
import torch
from local_ranks import run_ranks
from torch.nn import functional

from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec
from megatron.core.parallel.global_state import defer_weight_initialization, get_global_state
from megatron.core.sharding.initial_values import initialize_parameter
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

S, M, B, H, N = 6, 9, 2, 8, 4
X, MEMORY = torch.randn(2, M, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
MASK = torch.arange(M)[None, None, None, :] >= torch.tensor([5, 9])[:, None, None, None].expand(B, 1, S, 1)


def decoded(mesh, dropout=0.0):
    """(output, gradient of the memory, the block) of two layers."""
    options = {"params_dtype": torch.float64, "attention_dropout": dropout, "hidden_dropout": dropout}
    config = TransformerConfig(num_layers=2, hidden_size=H, num_attention_heads=N, init_method_std=0.3, **options)
    get_global_state().seed = 1
    with defer_weight_initialization():
        block = TransformerBlock(config, get_t5_decoder_with_local_block_spec(2))
    for path, parameter in block.named_parameters():
        initialize_parameter(parameter, 3, path, mesh)
    memory = MEMORY.clone().requires_grad_()
    out = block(X[:S], None, context=memory, context_mask=MASK)
    (grad,) = torch.autograd.grad(out.square().sum(), memory)
    return out.detach(), grad, block


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_tensor_parallel_ranks_compute_what_one_does(dropout):
    ((out, grad, _),) = run_ranks({}, lambda mesh: decoded(mesh, dropout))
    for mine, slope, _ in run_ranks({"tp": 2}, lambda mesh: decoded(mesh, dropout)):
        torch.testing.assert_close(mine, out, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(slope, grad, rtol=1e-10, atol=1e-10)
    assert grad[5:, 0].abs().max() == 0 and grad[:5, 0].abs().min() > 0, "masked tokens are not seen"


def attended(mesh):
    *_, block = decoded(mesh)
    attention = block._get_layer(0).cross_attention
    return attention, attention(X[:S], MASK, MEMORY)


def test_one_layer_computes_what_torch_does():
    ((attention, (out, bias)),) = run_ranks({}, attended)
    heads = lambda x: x.unflatten(-1, (N, -1)).permute(1, 2, 0, 3)  # noqa: E731
    kv = functional.linear(MEMORY, attention.linear_kv.weight, attention.linear_kv.bias).unflatten(-1, (N, 2, -1))
    k, v = (part.permute(1, 2, 0, 3) for part in kv.unbind(3))
    q = heads(functional.linear(X[:S], attention.linear_q.weight, attention.linear_q.bias))
    mixed = functional.scaled_dot_product_attention(q, k, v, ~MASK).permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(out, functional.linear(mixed, attention.linear_proj.weight), rtol=1e-10, atol=1e-10)
    assert bias is attention.linear_proj.bias
