"""Models whose compiled runs are measured."""

from dataclasses import replace

import pytest
from tiny_bert import BERT
from tiny_run import GPT, TINY_GPT2, TINY_LLAMA, Layout, Subject

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.ops.compile import compiled_region
from megatron.core.transformer.model_config import ModelConfig


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas run where compiled ones would, as Python."""
    monkeypatch.setattr(compiled_region, "BACKEND", "as written")
    monkeypatch.setattr(compiled_region, "_compile", lambda formula: formula)


def zero(stage: int) -> DataParallelConfig:
    return DataParallelConfig(
        zero_stage=stage, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=1500
    )


GELU, GATED = replace(TINY_GPT2, num_layers=2), replace(TINY_LLAMA, num_layers=2)  # with dropout; grouped queries


SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")}


OFFLOAD = OffloadConfig(optimizer_cpu_offload=True)


RUNS: dict[str, tuple[ModelConfig, Layout, Subject]] = {
    "ZeRO 1": (GELU, Layout(dp=2, m=2, data_parallel=zero(1), delayed=True), GPT),
    "ZeRO 2, all recomputed": (GELU, Layout(dp=2, recompute="uniform 1", data_parallel=zero(2), delayed=True), GPT),
    "ZeRO 3, grouped queries": (GATED, Layout(dp=2, m=2, data_parallel=zero(3), delayed=True), GPT),
    "ZeRO 3, recomputed and offloaded": (
        replace(GATED, **SELECTIVE),
        Layout(dp=2, recompute="selective", data_parallel=zero(3), offload=replace(OFFLOAD, offload_params=True)),
        GPT,
    ),
    "selective recomputation": (replace(GELU, **SELECTIVE), Layout(tp=2, sp=True, recompute="selective"), GPT),
    "activations in host memory": (
        replace(GELU, cpu_offloading_num_layers=2, min_offloaded_tensor_size=1),
        Layout(offload=OFFLOAD),
        GPT,
    ),
    "zb-v, windows": (
        replace(GELU, num_layers=4, window_size="2,0", window_attn_skip_freq="3"),
        Layout(pp=2, v=2, m=4, schedule="zb-v", delayed=True),
        GPT,
    ),
    "zb-v, ZeRO 2, grouped queries": (
        replace(GATED, num_layers=4),
        Layout(pp=2, v=2, dp=2, m=2, schedule="zb-v", data_parallel=zero(2)),
        GPT,
    ),
    "BERT": (GELU, Layout(tp=2, sp=True, m=2), BERT),
}
