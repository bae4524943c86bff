"""What only an accelerator can show. Skipped where there is none."""

import subprocess
import sys
from pathlib import Path
from shlex import split

import pytest
import torch

from megatron.core.random import AttentionDropout, DropoutKeys
from megatron.core.tensor_parallel.linear import weight_gradient
from megatron.core.transformer.core_attention import fused_attention, plain_attention

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
ROOT = Path(__file__).parents[2]


def on_device(*shape: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.accelerator.current_accelerator(), torch.bfloat16)


@pytest.mark.parametrize("groups", [8, 2])
def test_fused_attention_equals_the_plain_kernel(groups: int):
    q, k, v = on_device(2, 8, 128, 64), on_device(2, groups, 128, 64, seed=1), on_device(2, groups, 128, 64, seed=2)
    none = AttentionDropout(0.0, DropoutKeys(0), 0, 0)
    fused, plain = (kernel(q, k, v, None, none) for kernel in (fused_attention, plain_attention))
    # Two roundings to bfloat16 (2^-9 each) on values near one.
    torch.testing.assert_close(fused.float(), plain.float(), rtol=2e-2, atol=2e-2)


def test_half_precision_weight_gradients_are_summed_in_float32():
    weight = torch.nn.Parameter(on_device(64, 32))
    weight.main_grad = torch.zeros(64, 32, device=weight.device)
    grad, x = on_device(512, 64, seed=1), on_device(512, 32, seed=2)
    assert weight_gradient(weight, grad, x) is None
    expected = grad.double().t() @ x.double()
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=0, atol=expected.abs().max().item() * 1e-5)


FLAGS = split(
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 4 --train-iters 5 --lr 1e-3 --log-interval 1 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
)


def losses_of(*flags: str) -> list[float]:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *FLAGS, *flags]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    return [float(part.split()[2]) for part in text.split("|") if part.startswith(" lm loss:")]


def test_one_process_trains_as_on_the_cpu():
    cpu, other = (losses_of("--device", name) for name in ("cpu", torch.accelerator.current_accelerator().type))
    assert len(cpu) == 5
    assert other == pytest.approx(cpu, rel=1e-3)


@pytest.mark.parametrize("place", ["--optimizer-cpu-offload", "--offload-dir {tmp}"])
@pytest.mark.parametrize(
    "rest", ["--bf16", "--bf16 --zero-stage 3 --offload-params", "--optimizer-offload-fraction 0.5"]
)
def test_state_on_the_host_or_in_a_file_trains_as_on_the_device(place: str, rest: str, tmp_path):
    """The host's kernel rounds otherwise than the device's."""
    moved = split(f"{place.format(tmp=tmp_path)} {rest}")
    here = ["--bf16"] if "--bf16" in moved else []
    assert losses_of(*moved) == pytest.approx(losses_of(*here), rel=1e-3)


@pytest.mark.parametrize("rest", ["", "--recompute-granularity full --recompute-method uniform"])
@pytest.mark.parametrize("place", ["", "--offload-dir {tmp} --optimizer-offload-fraction 0"])
def test_activations_that_wait_elsewhere_come_back_as_they_were(rest: str, place: str, tmp_path):
    moved = split(f"--cpu-offloading-num-layers 2 --min-offloaded-tensor-size 1 {place.format(tmp=tmp_path)}")
    assert losses_of(*split(rest), *moved) == losses_of(*split(rest))
