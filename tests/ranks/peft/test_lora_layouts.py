"""Adapters train as in one process in every pair of layouts' choices: those of experts (`expert_layouts`), more tensor-parallel ranks,
compilation and offload. The frozen base keeps its bytes.

    python -m pytest tests/ranks/peft/test_lora_layouts.py -m sweep
"""

from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import expert_layouts
import pytest
import torch
from covering import covering
from expert_layouts import LayoutCase
from expert_models import ROUTERS, SUBJECT
from local_ranks import run_ranks
from offload_runs import offload
from tiny_run import GPT2, LLAMA, SEQ, Layout, Outcome, Subject, assert_equal, build_chunks, run
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.compile import compiled_region
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.peft.lora import adapter_names, add_lora
from megatron.core.peft.lora_config import EXPERTS, NAMES, LoRAConfig
from megatron.core.sharding.placement import Normal
from megatron.core.transformer.model_config import ModelConfig

_EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 12}
MODELS = {
    "llama": replace(LLAMA, num_query_groups=4),
    "gpt2": GPT2,
    # experts with a shared one, and layers without experts
    "experts": replace(LLAMA, **_EXPERTS, **ROUTERS["bias"]),
    "gpt2 experts": replace(GPT2, **_EXPERTS, **ROUTERS["softmax"]),
}
ADAPTERS = {
    "parts": LoRAConfig(lora_rank=2, lora_alpha=4.0, lora_dropout=0.3),
    "some parts": LoRAConfig(
        lora_rank=3, use_rslora=True, lora_dropout=0.3, lora_target_modules=["linear_proj", "linear_qkv"]
    ),
    "output": LoRAConfig(lora_rank=2, lora_target_modules=["all-linear", "output_layer"]),
    "experts": LoRAConfig(lora_rank=3, lora_target_modules=["experts.up_proj", "experts.down_proj", "linear_qkv"]),
}
DIMENSIONS = expert_layouts.DIMENSIONS | {
    "tp": (1, 2, 8),
    "model": tuple(MODELS),
    "compile": ("off", "regions", "layers"),
    "offload": ("none", "host", "file", "half", "params"),
    "adapters": tuple(ADAPTERS),
}


def lora_of(model: str, adapters: str) -> LoRAConfig:
    """Adapters of experts have no dropout."""
    lora = ADAPTERS[adapters]
    return replace(lora, lora_dropout=0.0) if "experts" in model and adapters == "parts" else lora


@dataclass(frozen=True)
class Case(LayoutCase):
    """One choice of each dimension, in the order of DIMENSIONS."""

    compile: str
    offload: str
    adapters: str

    def layout_in(self, folder: Path) -> Layout:
        return replace(self.layout, offload=offload(self.offload, folder))

    @property
    def config(self) -> ModelConfig:
        return replace(MODELS[self.model], compile=self.compile, moe_layer_recompute=self.recompute == "experts")

    @property
    def can_be(self) -> bool:
        has_experts = "experts" in self.model
        is_tied = "gpt2" in self.model
        of_experts = self.ep > 1 or self.etp is not None or "experts" in (self.recompute, self.adapters)
        return (
            super().can_be
            and not (self.tp == 8 and ((self.sp and self.cp > 1) or has_experts))
            and not (of_experts and not has_experts)
            and not (is_tied and (self.pipeline == "zb-v" or self.adapters == "output"))
            and not (self.offload == "params" and self.stage < 3)
        )


PLAIN = Case(**asdict(expert_layouts.PLAIN), compile="off", offload="none", adapters="output")
CHOSEN = [  # in the test command
    Case(2, True, "alone", 1, 2, 2, None, 3, True, 1, "selective", False, "experts", "off", "host", "parts")
]


@cache
def covering_cases() -> tuple[Case, ...]:
    """Cases in which every two choices that can stand together do."""
    seeds = [replace(PLAIN, **changes, stage=3) for changes in expert_layouts.SEEDS if "etp" not in changes]
    seeds += [replace(PLAIN, **changes, stage=3, model="experts") for changes in expert_layouts.SEEDS]
    return covering(Case, DIMENSIONS, 2, seeds=[asdict(seed) for seed in seeds], chosen=CHOSEN)


def adapted(config: ModelConfig, lora: LoRAConfig, **parts) -> nn.Module:
    model = GPTModel(config, positions=SEQ, **parts)
    elsewhere = [name for name in NAMES if name.startswith(EXPERTS)]  # some stages have none
    add_lora(model, lora, keys=model.context.keys, rows_of_sample=model.context.rows, elsewhere=elsewhere)
    names = adapter_names(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in names)
        if "lora_b" in name:  # else A has no gradient in the first step
            parameter.placement = replace(parameter.placement, init=Normal(0.1))
    return model


def trained(config: ModelConfig, lora: LoRAConfig, layout: Layout) -> Outcome:
    optimizer = OptimizerConfig(clip_grad=0.5, weight_decay=0.1)
    return run(config, layout, subject=subject_of(lora), steps=2, global_batch=8, optimizer=optimizer)


def subject_of(lora: LoRAConfig) -> Subject:
    return replace(SUBJECT, make=partial(adapted, lora=lora))


@cache
def one_process(model: str, adapters: str) -> Outcome:
    return trained(MODELS[model], lora_of(model, adapters), Layout())


@cache
def first_weights(model: str, adapters: str) -> dict[str, Tensor]:
    """What a run begins with."""

    def work(mesh: Mesh) -> dict[str, Tensor]:
        chunks, _, _ = build_chunks(mesh, MODELS[model], Layout(), subject=subject_of(lora_of(model, adapters)))
        return {name: p.detach().clone() for name, p in chunks[0].module.named_parameters()}

    return run_ranks({}, work)[0]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{i}", marks=pytest.mark.full if case in CHOSEN else pytest.mark.sweep)
        for i, case in enumerate(covering_cases())
    ],
)
def test_every_pair_of_choices_trains_adapters_as_one_process(case: Case, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(compiled_region, "BACKEND", "eager")  # formulas are traced as for a compiler, and run eagerly
    got = trained(case.config, lora_of(case.model, case.adapters), case.layout_in(tmp_path))
    expected = one_process(case.model, case.adapters)
    assert_equal(got, expected, 1e-10)
    first = first_weights(case.model, case.adapters)
    moved = {key for key, value in got.weights.items() if not torch.equal(value, first[key][: len(value)])}
    assert moved == {key for key in first if ".lora_" in key} and moved
    assert list(tmp_path.iterdir()) == []
