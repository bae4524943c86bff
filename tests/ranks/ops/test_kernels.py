"""The table of attention kernels: a script adds its own, and each says what it cannot do."""

import pytest
import torch
import whole_run
from torch import Tensor

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.ops.attention import kernels
from megatron.core.ops.attention.document_and_window_masks import Documents
from megatron.core.ops.attention.kernels import KERNELS, AttentionCase, Kernel, kernel_or_fallback, news_of_attention
from megatron.core.ops.layout_invariant_dropout import AttentionDropout, SampleDropoutKeys
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.transformer.dot_product_attention import CoreAttention
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.command_line import parse_args

CASE = AttentionCase(torch.empty(2, 4, 9, 8), torch.empty(2, 4, 9, 8), None, 0.0)
FUSED = ("auto", "fused", "flash")


@pytest.mark.parametrize("name", list(KERNELS))
def test_dropout_alone_takes_the_fused_kernel_from_its_work(name: str):
    plain, tiles = KERNELS["unfused"], KERNELS["tiled-eager"]
    others = plain if name in ("unfused", "local") else tiles
    assert kernel_or_fallback(name, CASE) is (KERNELS["fused"] if name in FUSED else others)
    assert kernel_or_fallback(name, CASE._replace(dropout=0.1)) is others
    with_cache = AttentionCase(CASE.q[:, :, :1], CASE.k, None, 0.1)
    assert kernel_or_fallback(name, with_cache) is plain


def test_a_kernel_that_is_asked_for_and_not_used_is_told_once(monkeypatch):
    monkeypatch.setattr(kernels, "_replaced", {})
    for _ in range(3):
        kernel_or_fallback("auto", CASE._replace(dropout=0.1))
        kernel_or_fallback("flash", CASE)
        kernel_or_fallback("unfused", CASE)
    assert news_of_attention() == []
    for _ in range(3):
        kernel_or_fallback("flash", CASE._replace(dropout=0.1))
        kernel_or_fallback("tiled", CASE)
    first, second = news_of_attention()
    assert first == "--attention-backend flash has no dropout by samples: tiled-eager computes what it cannot"
    assert second == "--attention-backend tiled is compiled (--compile regions): tiled-eager computes what it cannot"
    assert news_of_attention() == []


def test_a_run_says_which_kernel_computes_in_place_of_the_one_that_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "_replaced", {})
    whole_run.run("--train-iters 2 --attention-backend tiled")
    assert capsys.readouterr().out.count("--attention-backend tiled is compiled") == 1
    whole_run.run("--train-iters 2 --attention-backend tiled-eager")
    whole_run.run("--train-iters 2")
    assert "--attention-backend" not in capsys.readouterr().out


def test_a_kernel_of_a_script_is_a_value_of_the_flag_and_is_asked_before_each_use(monkeypatch):
    asked: list[AttentionCase] = []

    def mean_of_values(q: Tensor, k: Tensor, v: Tensor, mask: object, dropout: AttentionDropout) -> Tensor:
        return v.mean(dim=2, keepdim=True).expand_as(q)

    def refuses(case: AttentionCase) -> str | None:
        asked.append(case)
        return "has no documents" if isinstance(case.mask, Documents) else None

    with pytest.raises(ConfigError, match=r"'mean'.*auto.*fused.*flash.*unfused.*local"):
        parse_args(["--attention-backend", "mean"])
    monkeypatch.setitem(KERNELS, "mean", Kernel(mean_of_values, refuses))
    assert parse_args(["--attention-backend", "mean"])[0].transformer.attention_backend == "mean"
    config = ModelConfig(attention_backend="mean", attention_dropout=0.5)
    attention = CoreAttention(config, 0, LayerContext(TensorParallel(ALONE), SampleDropoutKeys(0)))
    q, k, v = torch.randn(3, 5, 2, 4, 8).unbind()
    torch.testing.assert_close(attention(q, k, v), v.mean(dim=0, keepdim=True).expand_as(v).flatten(2))
    (case,) = asked
    assert case.q.shape == case.k.shape == (2, 4, 5, 8) and (case.mask, case.dropout) == (None, 0.5)
    with pytest.raises(ConfigError, match=r"--attention-backend mean .*documents"):
        attention(q, k, v, Documents(torch.zeros(2, 5)))
