"""Products in half precision on a CPU: both ways right, the faster one chosen by all ranks alike, and kept with the run."""

import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import whole_run
from local_ranks import run_ranks
from said import tells
from torch import Tensor

from megatron.core.ops import cblas_gemm_bf16bf16f32, cpu_half_precision_matmul as matmul
from megatron.core.ops.attention.document_and_window_masks import Documents
from megatron.core.ops.cpu_half_precision_matmul import (
    NATIVE,
    MatmulModes,
    choose,
    dgrad,
    linear_forward,
    modes_from_json,
    select_matmul_modes,
)
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.tensor_parallel import linear_autograd
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.transformer.dot_product_attention import CoreAttention
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig

HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half of the distance of two neighbours, relative
FAST = {"native": 1.0, "widened": 2.0}
SLOW = {"native": 2.0, "widened": 1.0}


def timed(forward: dict, backward: dict, attention: dict) -> dict:
    return {"forward": forward, "backward": backward, "attention": attention}


# ---------------------------------------------------------------- the products


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_rounded_once(got: Tensor, exact: Tensor) -> None:
    """Within half a unit of the last place of the exact value, and what float32 sums add."""
    allowed = (HALF[got.dtype] * 1.01) * exact.abs() + 1e-6 * exact.abs().max()
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("at_once", [4096, 7])
def test_widened_products_are_rounded_once(dtype: torch.dtype, at_once: int, monkeypatch):
    """Whole, and in blocks of features with a rest."""
    for module in (matmul, linear_autograd):
        monkeypatch.setattr(module, "FEATURES_AT_ONCE", at_once)
    x, weight, grad = drawn(6, 2, 40, dtype=dtype), drawn(24, 40, dtype=dtype), drawn(6, 2, 24, dtype=dtype)
    assert_rounded_once(linear_forward(x, weight, "widened"), x.double() @ weight.double().t())
    assert_rounded_once(dgrad(grad, weight, "widened"), grad.double() @ weight.double())
    rows, of_rows = x.flatten(0, 1), grad.flatten(0, 1)
    exact = of_rows.double().t() @ rows.double()
    assert_rounded_once(dgrad(of_rows.t(), rows, "widened"), exact)
    add = linear_autograd._accumulate_for(x.device, dtype, dtype, "widened")
    total = torch.full((24, 40), float("nan"), dtype=dtype)
    add(total, of_rows, rows, 0)
    assert_rounded_once(total, exact)
    before = total.clone()
    add(total, of_rows, rows, 1)
    assert_rounded_once(total, before.double() + exact)


BF16_IN_LIBRARY = cblas_gemm_bf16bf16f32._gemm_of_bfloat16() is not None  # a CPU with AMX, and a torch with MKL


@pytest.mark.skipif(not BF16_IN_LIBRARY, reason="no product of bfloat16 matrices with a float32 sum here")
@pytest.mark.parametrize(
    ("tokens", "features", "width"), [(0, 3, 5), (1, 1, 1), (7, 3, 5), (33, 1, 70), (600, 257, 65)]
)
def test_a_weight_gradient_of_bfloat16_is_exact_without_wide_factors(tokens: int, features: int, width: int):
    """Written over what was there, NaN or not, and added; also of factors that do not lie row by row."""
    add = linear_autograd._accumulate_for(torch.device("cpu"), torch.float32, torch.bfloat16)
    assert add is cblas_gemm_bf16bf16f32.addmm_bf16_to_fp32
    grad, x = drawn(tokens, features, dtype=torch.bfloat16), drawn(tokens, width, dtype=torch.bfloat16)
    exact = grad.double().t() @ x.double()
    total = torch.full((features, width), float("nan"))
    add(total, grad, x, 0)
    add(total, grad.t().contiguous().t(), drawn(tokens, 2 * width, dtype=torch.bfloat16)[:, ::2].copy_(x), 1)
    torch.testing.assert_close(total.double(), 2 * exact, rtol=0, atol=1e-6 * max(1.0, exact.abs().max().item()))


def test_a_cpu_whose_own_products_are_slow_widens_the_factors_of_weight_gradients():
    assert (
        linear_autograd._accumulate_for(torch.device("cpu"), torch.float32, torch.bfloat16, "widened")
        is linear_autograd._widened
    )


@pytest.mark.parametrize("backend", ["fused", "unfused"])
@pytest.mark.parametrize("masked", [False, True])
def test_widened_attention_is_as_good_as_rounding_its_result(backend: str, masked: bool):
    """With grouped heads, and with documents that do not see each other."""
    q, k, v = (drawn(9, 2, heads, 8, dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2))
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]]).expand(2, -1)
    mask = Documents(numbers) if masked else None
    config = ModelConfig(attention_backend=backend, attention_dropout=0.0)

    def run(*factors: Tensor, way: str) -> tuple[Tensor, ...]:
        attention = CoreAttention(
            config,
            0,
            LayerContext(TensorParallel(ALONE, matmul_modes=MatmulModes(attention=way)), SampleDropoutKeys(0)),
        )
        out = attention(*factors, mask)
        return out, *torch.autograd.grad((out * out.detach()).sum(), factors)

    exact = run(*(x.detach().double().requires_grad_() for x in (q, k, v)), way="native")
    got = run(q, k, v, way="widened")
    assert_rounded_once(got[0], exact[0])
    for mine, true in zip(got, exact):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - true).norm() <= 2.0**-8 * true.norm()


# ---------------------------------------------------------------- the choice


def test_only_what_is_clearly_faster_is_widened():
    close = {"native": 1.3, "widened": 1.0}
    assert choose(timed(SLOW, FAST, close)) == MatmulModes("widened", "native", "native")


def test_the_slowest_rank_decides_for_all(monkeypatch):
    """Two kinds of CPU in one job: the ranks would compute other numbers, and one of them would keep the other waiting."""
    found = {0: timed(FAST, FAST, FAST), 1: timed({"native": 9.0, "widened": 3.0}, FAST, FAST)}
    turn, lock = iter(found.values()), threading.Lock()

    def measure(dtype: torch.dtype) -> dict:
        with lock:
            return next(turn)

    monkeypatch.setattr(matmul, "measure", measure)

    def choice(mesh: Mesh) -> tuple[MatmulModes, str | None]:
        return select_matmul_modes(torch.bfloat16, "cpu", mesh["world"])

    chosen = run_ranks({"dp": 2}, choice)
    assert [one for one, _ in chosen] == [MatmulModes("widened", "native", "native")] * 2
    assert tells(chosen[0][1], "9000.0 3000.0")


def test_what_a_device_does_by_itself_is_not_measured(monkeypatch):
    monkeypatch.setattr(matmul, "measure", None)
    (mesh,) = run_ranks({}, lambda mesh: mesh)
    ask = partial(select_matmul_modes, world=mesh["world"])
    assert ask(torch.float32, "cpu") == ask(torch.float64, "cpu") == ask(torch.bfloat16, "cuda:0") == (NATIVE, None)
    assert ask(torch.float16, "cpu", requested="widened")[0] == MatmulModes.all("widened")
    kept = {"dtype": "torch.float16", "forward": "widened", "backward": "native", "attention": "widened"}
    assert ask(torch.float16, "cpu", requested="auto", saved=kept)[0] == MatmulModes("widened", "native", "widened")


@pytest.mark.parametrize("kept", [None, {}, {"dtype": "torch.float16"}, {"dtype": "torch.bfloat16", "forward": 3}, []])
def test_a_choice_that_cannot_be_kept_is_made_anew(kept: object):
    assert modes_from_json(kept, torch.bfloat16) is None


def test_both_ways_are_measured():
    found = matmul.measure(torch.bfloat16)
    assert found.keys() == timed({}, {}, {}).keys()
    assert all(0 < found[kind][way] < 60 for kind in found for way in matmul.MATMUL_MODES)


# ---------------------------------------------------------------- a run


def test_ways_are_measured_in_one_thread_whose_own_time_counts(monkeypatch):
    """Others' threads, and those of this process that spin while they wait, are no part of it."""
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(matmul, "_best_of", lambda run: seen.append(torch.get_num_threads()))
        matmul.measure(torch.bfloat16)
        assert seen == [1, 1, 1] and torch.get_num_threads() == 2
        monkeypatch.undo()
        spinning, stop = matmul._best_of, threading.Event()
        others = [threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)]) for _ in range(2)]
        for other in others:
            other.start()
        began = time.process_time()
        best = spinning(lambda way: time.sleep(0.002))
        stop.set()
        for other in others:
            other.join()
        assert max(best.values()) < 0.002 < time.process_time() - began
    finally:
        torch.set_num_threads(threads)


@pytest.mark.full
def test_a_run_goes_on_as_it_multiplied_before(tmp_path, capsys, monkeypatch):
    """Stopped and started on a CPU where the other way is faster, to the bit; chosen anew where that is asked for."""

    def train(way: str, flags: str = "") -> bytes:
        monkeypatch.setattr(matmul, "measure", lambda dtype: timed(*[SLOW if way == "widened" else FAST] * 3))
        argv = (
            "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --vocab-size 60 "
            "--mock-data --tokenizer-type NullTokenizer --train-iters 4 --lr 0.01 --eval-iters 0 --device cpu --bf16 "
            f"--hidden-dropout 0 --attention-dropout 0 --save {tmp_path} --load {tmp_path} --save-interval 2 {flags}"
        ).split()
        whole_run.run(argv, tiny=[])
        return (tmp_path / "iter_0000004" / "rank_00000.bin").read_bytes()

    def again_from_the_second_step(way: str, flags: str = "") -> bytes:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
        return train(way, flags)

    through = train("widened")
    assert tells(capsys.readouterr().out, "2000.0 1000.0")
    assert again_from_the_second_step("native") == through
    assert "as before: forward widened, backward widened, attention widened" in capsys.readouterr().out
    assert again_from_the_second_step("native", "--cpu-half-products measure") != through
    assert tells(capsys.readouterr().out, "1000.0")
    assert Path(tmp_path / "iter_0000004" / "manifest.json").read_text().count('"forward": "native"') == 1
