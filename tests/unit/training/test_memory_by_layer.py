"""Memory by layer: rows of every layer add up to the prediction, layers that differ are told apart, and sizes from data are bounded."""

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from documents import ROOT, commands_of
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, weight_flops
from megatron.core.ops.decisions_overridable_for_memory_prediction import row_counts
from megatron.core.pipeline_parallel.schedule.actions import Op
from megatron.core.sharding.placement import Placement, XavierUniform
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer
from megatron.training import get_runtime
from megatron.training.memory.dry_run_of_one_rank import Job, dry_run
from megatron.training.memory.forecast_memory_along_schedule import RankMemory, forecast, predicted_of, profiles_of
from megatron.training.memory.params_flops_bytes_by_layer import LayerCost, layer_costs
from tools import estimate_memory
from tools.estimating.job import read

SIZES = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --vocab-size 60 --attention-dropout 0 "
BIG = f"{SIZES}--num-layers 4 --bf16 "


def job_of(words: str) -> Job:
    return read(words.split()).job


def costs_of(job: Job) -> tuple[list[LayerCost], list[RankMemory], list]:
    profiles = profiles_of(job, by_module=True)
    return layer_costs(job, profiles), [predicted_of(one, rank) for rank, one in enumerate(profiles)], profiles


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--world-size 2 --pipeline-model-parallel-size 2",
        "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--world-size 2 --zero-stage 3 --recompute-granularity full --recompute-method uniform",
        pytest.param("--world-size 2 --use-distributed-optimizer --device cpu", marks=pytest.mark.full),
        pytest.param("--model t5 --decoder-seq-length 16", marks=pytest.mark.full),
        pytest.param("--model bert", marks=pytest.mark.full),
    ],
)
def test_the_rows_add_up_to_the_prediction(flags: str):
    job = job_of(BIG + flags)
    costs, ranks, profiles = costs_of(job)
    assert sum(cost.parameters for cost in costs) == sum(rank.parameters for rank in ranks)
    for rank, profile in zip(ranks, profiles):
        rows = [cost for cost in costs if cost.stage == rank.rank]
        for kind in ("parameters", "gradients", "optimizer"):  # but for gaps in the buffers
            total = sum(cost.bytes[kind] for cost in rows)
            assert 0.98 * rank.bytes[kind] <= total <= rank.bytes[kind], kind
        last = max(number for op, _, number in profile.changes if op is Op.F)
        left = profile.changes[Op.F, 0, last].left["activations"]
        # a forward outside the model leaves the batch's loss; what it takes from a receive was there before
        assert sum(cost.bytes["activations"] for cost in rows) == pytest.approx(left, rel=0.02)
    layers = [cost for cost in costs if ".layers." in cost.name]
    assert len(layers) >= 4 and all(cost.flops.forward and cost.is_counted for cost in layers)


def test_the_tool_lists_layers(capsys):
    words = [*BIG.split(), "--recompute-activations", "--global-batch-size", "4", "--by-layer"]
    assert estimate_memory.main(words) == 0
    table = capsys.readouterr().out
    (row,) = (line.split() for line in table.splitlines() if "layers.0 to 3" in line)
    tokens, h = 32, 64
    forward = 2 * tokens * 12 * h**2 + 2 * tokens**2 * h
    assert row[:5] == ["0", "language_model.decoder.layers.0", "to", "3", "4"] and f"{12 * h * h + 13 * h:,}" in row
    assert f"{forward / 1e6:.4g} MFLOP" in " ".join(row) and f"{2 * forward / 1e6:.4g} MFLOP" in " ".join(row)
    model = 3 * (4 * forward + 2 * tokens * h * 61)
    assert f"FLOPs of a sample: {model:,} of the model, {model + 4 * 2 * tokens**2 * h:,} with recomputation" in table
    assert f"of a step of 4 samples: {4 * model / 1e6:.4g} MFLOP" in table
    assert estimate_memory.main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["by_layer"]
    assert sum(one["flops"]["forward"] for one in rows) * 3 == model
    assert [one["layer"] for one in rows if one["class"] == "TransformerLayer"][-1] == "language_model.decoder.layers.3"
    assert estimate_memory.main([*words, "--measure"]) == 2
    assert "--by-layer lists what is predicted" in capsys.readouterr().err


@pytest.mark.full
def test_the_page_shows_what_its_command_prints(capsys):
    page = (ROOT / "docs" / "memory.md").read_text()
    (command,) = (command for command in commands_of(ROOT / "docs" / "memory.md") if "--by-layer" in command)
    assert estimate_memory.main(command.split()[2:]) == 0
    table = capsys.readouterr().out.partition("\neach layer: ")[2].partition("\n")[2]
    assert "layers.0 to 23" in table and f"```\n{table}```" in page


# ---------------------------------------------------------------- layers of a script's own


class WideMLP(ParallelMLP):
    """Three times the width from the third layer on."""

    def __init__(self, config, layer, context):
        super().__init__(config, layer, context)
        if layer >= 2:
            self.further = nn.ModuleList([ParallelMLP(config, layer, context) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return sum((mlp(x) for mlp in getattr(self, "further", ())), super().forward(x))


class Experts(nn.Module):
    """Experts of which a token goes to one: how many rows each receives depends on the data, and is at most all of them."""

    number = 4

    def __init__(self, config, layer, context):
        super().__init__()
        h = config.hidden_size
        placement = Placement((self.number, h, h), XavierUniform(), replicated_over=("tp",), init_per_matrix=True)
        self.weight = context.tp.parameter((self.number, h, h), placement)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)  # [tokens, h]
        expert = (rows.detach()[:, 0] > 0).long()  # of each token: 0 or 1
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.number) if not x.is_meta else torch.zeros(self.number)
        received = row_counts(counts, len(rows), [len(rows)] + [0] * (self.number - 1))
        parts = rows[order].split(received)
        results = torch.cat([torch.tanh(part @ weight.t()) for part, weight in zip(parts, self.weight)])
        return x + torch.zeros_like(rows).index_copy(0, order, results).view_as(x)

    def count_flops(self, x: LayerInput) -> Flops:
        return weight_flops(x, self.weight, per_token=self.weight[0].numel())


def job_with(make_mlp: Callable[..., nn.Module], words: str) -> Job:
    def model_provider(pre_process: bool = True, post_process: bool = True) -> nn.Module:
        runtime = get_runtime()
        parts = runtime.model_parts(pre_process, post_process)
        make_layer = partial(ParallelTransformerLayer, make_mlp=make_mlp)
        return GPTModel(runtime.config.transformer, **parts, make_layer=make_layer)

    return job_of(words)._replace(model_provider=model_provider)


@pytest.mark.full
def test_stages_whose_layers_are_built_otherwise_have_predictions_of_their_own():
    """Stages 1 and 2 are alike by the settings; a GPT's share a dry run, these do not."""
    words = f"{BIG} --world-size 4 --pipeline-model-parallel-size 4"
    job = job_with(WideMLP, words)
    costs, four, profiles = costs_of(job)
    width = 64 * 256 * 2 + 256 + 64
    assert four[2].parameters - four[1].parameters == 2 * width and len({id(one) for one in profiles}) == 4
    assert four[2].bytes["activations"] * 1.3 > four[1].bytes["activations"]  # one microbatch less, of a wider layer
    plain = profiles_of(job_of(words))
    assert plain[1] is plain[2]
    of_layers = [cost.flops.forward for cost in costs if ".layers." in cost.name]
    assert of_layers[2] - of_layers[1] == 2 * 2 * 32 * 64 * 256 * 2 and of_layers[3] == of_layers[2]


@pytest.mark.full
@pytest.mark.parametrize("size", ["--num-layers 4 --bf16", "--num-layers 2 --device cpu"])
def test_sizes_that_depend_on_data_are_bounded_by_what_the_layer_says(size: str):
    """A small model, which would run with values, runs without them."""
    job = job_with(Experts, SIZES + size)
    (rank,) = forecast(job)
    assert rank.bytes["activations"] == predicted_of(dry_run(job, 0), 0).bytes["activations"]
    layers = job.runtime.config.transformer.num_layers
    costs, _, _ = costs_of(job)
    first = next(cost for cost in costs if cost.name.endswith("layers.0"))
    assert first.flops.forward == 2 * 32 * (4 * 64**2 + 64**2) + 2 * 32**2 * 64, "one expert for each token"
    rows_of_experts = 2 * 32 * 64 * (2 if "bf16" in size else 4)
    assert first.bytes["activations"] > 2 * rows_of_experts
    assert rank.parameters > layers * 4 * 64 * 64
