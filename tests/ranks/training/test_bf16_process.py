"""What a --bf16 run sets for the whole process ends with the run."""

import pytest
import torch
from whole_run import run

import pretrain_gpt


@pytest.mark.full
def test_float32_products_are_as_before_after_a_bf16_run():
    matmul = torch.backends.mkldnn.matmul
    before, during = matmul.fp32_precision, []
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(128, 128, generator=generator) for _ in range(2))
    expected = a @ b

    def forward_step(*given, **more):
        during.append(matmul.fp32_precision)
        return pretrain_gpt.forward_step(*given, **more)

    run("--train-iters 1 --bf16", forward_step=forward_step)
    assert set(during) == {"bf16"}
    assert matmul.fp32_precision == before
    assert torch.equal(a @ b, expected)
