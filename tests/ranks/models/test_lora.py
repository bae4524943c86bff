"""The adapters of examples/lora on every linear: any layout trains them as one process does, and the base keeps its bits."""

import importlib.util
import re
import sys
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from documents import names_of_block
from local_ranks import run_ranks
from measured_memory import SMALL, check
from same_code import ROOT
from script_run import trainer_of
from tiny_run import GPT, GPT2, LLAMA, TINY_GPT2, TINY_LLAMA, Layout, Outcome, assert_equal, build_chunks, run
from torch import nn
from whole_run import TINY

import pretrain_gpt
from megatron.core.dist_checkpointing import load_whole_tensors, open_checkpoint
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.distributed.sync_and_gather_params import full_state_dict
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel.exchange_parallel_linears_for_adapters import replace_linears
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear
from megatron.core.transformer.layer_parallel_context import LayerContext
from tools.estimating.measure import measure

ZERO = partial(DataParallelConfig, overlap_grad_reduce=True, ddp_bucket_size=2000)
AHEAD = DataParallelConfig(zero_stage=3, overlap_grad_reduce=True, overlap_param_gather=True)
LAYOUTS = {
    "tp sp pp": Layout(tp=2, sp=True, pp=2, m=4),
    "tp zb": Layout(tp=2, pp=2, m=4, schedule="zb-h1"),
    "vpp recomputed": Layout(pp=2, v=2, m=4, schedule="interleaved", recompute="uniform 1"),
    "cp zero 1": Layout(cp=2, dp=2, m=2, data_parallel=ZERO(zero_stage=1)),
    "zero 2 selective": Layout(tp=2, dp=2, m=2, recompute="selective", data_parallel=ZERO(zero_stage=2)),
    "zero 3": Layout(dp=2, m=3, data_parallel=DataParallelConfig(zero_stage=3)),
    "zero 3 sp": Layout(tp=2, sp=True, dp=2, m=2, data_parallel=AHEAD),
    "zero 3 zb": Layout(tp=2, pp=2, dp=2, m=2, schedule="zb-h1", data_parallel=AHEAD),
    "zero 3 vpp recomputed": Layout(
        pp=2,
        v=2,
        dp=2,
        m=2,
        schedule="interleaved",
        recompute="uniform 1",
        data_parallel=DataParallelConfig(zero_stage=3),
    ),
    "zero 3 cp recomputed": Layout(cp=2, dp=2, m=2, recompute="uniform 2", data_parallel=AHEAD),
    "zero 3 selective": Layout(tp=2, dp=2, m=2, recompute="all parts", data_parallel=DataParallelConfig(zero_stage=3)),
    "zero 3 zb-v": Layout(pp=2, dp=2, m=2, schedule="zb-v", v=2, data_parallel=AHEAD),
    "zero 3 hybrid": Layout(
        tp=2,
        dp=4,
        m=1,
        data_parallel=DataParallelConfig(
            zero_stage=3, num_distributed_optimizer_instances=2, outer_dp_sharding_strategy="optim"
        ),
    ),
}


def example(name: str = "lora"):
    sys.path.insert(0, str(ROOT / "examples" / "lora"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "lora" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LORA = example()
PAGE = "adding_a_model.md"


def adapted(config, **parts) -> nn.Module:
    model = GPT.make(config, **parts)
    names = LORA.add_lora(model, rank=2, alpha=4.0, output_layer=True)
    has_head = parts.get("post_process", True) and config.untie_embeddings_and_output_weights
    assert len(names) == 4 * len(model.language_model.decoder.layers) + has_head
    for name, parameter in model.named_parameters():
        if "lora_b" in name:  # else A has no gradient in the first step
            parameter.placement = replace(parameter.placement, init=LORA.Normal(0.1))
    return model


ADAPTED = replace(GPT, make=adapted)
# LayerNorm, biases and tied embeddings; grouped queries, a fused gate and an output layer of its own, in tiles
MODELS = {"gpt2": GPT2, "llama": replace(LLAMA, tiled_loss=2, final_logit_softcapping=30.0)}


@cache
def one_process(model: str) -> Outcome:
    return run(MODELS[model], Layout(), subject=ADAPTED, steps=2, global_batch=12)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=[pytest.mark.full] * ((i + j) % 4 > 0))
        for i, name in enumerate(LAYOUTS)
        for j, model in enumerate(MODELS)
        if (i + j) % 2 == 0
    ],
)
def test_every_layout_trains_adapters_as_one_process(name: str, model: str):
    got, expected = run(MODELS[model], LAYOUTS[name], subject=ADAPTED, steps=2, global_batch=12), one_process(model)
    assert_equal(got, expected, 1e-10)
    trained = {key for key, grad in got.grads[-1].items() if grad.abs().max() > 0}
    assert trained == {key for key in got.weights if "lora" in key} and trained


def test_adapters_that_are_zero_change_nothing():
    def outputs(mesh: Mesh) -> list[torch.Tensor]:
        ids, positions = torch.arange(8).view(1, 8), torch.arange(8).view(1, 8)
        results = []
        for subject in (GPT, replace(GPT, make=lambda config, **parts: _with_lora(GPT.make(config, **parts)))):
            chunks, _, _ = build_chunks(mesh, TINY_GPT2, Layout(tp=2), subject=subject)
            results.append(chunks[0].module.eval()(ids, positions))
        return results

    for plain, with_adapters in run_ranks({"tp": 2}, outputs):
        assert torch.equal(plain, with_adapters)


def _with_lora(model: nn.Module) -> nn.Module:
    LORA.add_lora(model)
    return model


# two samples a step, whatever the number of data-parallel ranks
FLAGS = " --global-batch-size 2 --num-layers 2 --hidden-size 8 --num-attention-heads 2 --override-opt_param-scheduler --lr-decay-iters 18 "


def train(script, sizes: dict[str, int], flags: str) -> list[dict[str, torch.Tensor]]:
    def train_rank(mesh: Mesh) -> dict[str, torch.Tensor]:
        with trainer_of(script, mesh, " ".join(TINY) + FLAGS + flags, predicts=False) as trainer:
            trainer._train()
            return {name: p.clone() for chunk in trainer.model for name, p in full_state_dict(chunk.module).items()}

    return run_ranks(sizes, train_rank)


RUNS = {  # sizes of the run that saves, with its flags
    "tp 2": ({"tp": 2}, " --tensor-model-parallel-size 2"),
    "zero 3": ({"dp": 2}, " --zero-stage 3 --overlap-param-gather --overlap-grad-reduce"),
}


def test_an_adapter_begins_from_a_plain_base_and_goes_on_as_itself_alone(tmp_path, capsys):
    """Whose model_provider declares no name. The checkpoint has the adapter's class in its model's name."""
    add_ia3 = names_of_block(PAGE, "def add_ia3")["add_ia3"]

    class Other(names_of_block(PAGE, "def add_ia3")["Scaled"]):
        """Of the same parameters."""

    def adapted(add):
        def model_provider(pre_process=True, post_process=True, vp_stage=None):
            model = pretrain_gpt.model_provider(pre_process, post_process, vp_stage)
            add(model)
            return model

        return SimpleNamespace(**vars(pretrain_gpt) | {"model_provider": model_provider})

    tp2 = " --tensor-model-parallel-size 2"
    train(pretrain_gpt, {}, f" --train-iters 1 --save {tmp_path / 'base'}")
    base = f" --pretrained-checkpoint {tmp_path / 'base'} --allow-missing-tensors"
    capsys.readouterr()
    (begun,) = train(adapted(add_ia3), {}, f"{base} --train-iters 1 --save {tmp_path / 'adapted'}")
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert "lacks 8 parameters, which get first values: " in warning
    assert "language_model.decoder.layers.*.mlp.linear_fc1.ia3 (2)" in warning
    (of_base,) = train(pretrain_gpt, {}, f" --train-iters 1 --load {tmp_path / 'base'}")
    assert all(torch.equal(begun[name], value) for name, value in of_base.items())
    assert open_checkpoint(tmp_path / "adapted").state["model"] == "GPTModel of Scaled"
    train(adapted(add_ia3), {"tp": 2}, f"{tp2} --train-iters 2 --load {tmp_path / 'adapted'}")

    other = adapted(lambda model: replace_linears(model, lambda name, linear: Other(linear)))
    for script, flags, this_run in (
        (other, f"--load {tmp_path / 'adapted'}", "GPTModel of Other"),
        (other, f"--finetune --load {tmp_path / 'adapted'}", "GPTModel of Other"),
        (pretrain_gpt, f"--load {tmp_path / 'adapted'}", "GPTModel"),
        (adapted(add_ia3), f"--load {tmp_path / 'base'}", "GPTModel of Scaled"),
    ):
        with pytest.raises(RuntimeError, match=f"the checkpoint has a .*, this run a {this_run}:"):
            train(script, {}, f" --train-iters 2 {flags}")


def test_a_base_lacks_the_flags_of_an_adapter_and_a_resume_does_not(tmp_path, capsys):
    """The base is of pretrain_gpt.py: its weights mean the same at any rank of an adapter."""
    own = example("pretrain")
    parts = {"model_provider": own.model_provider, "extra_args_provider": own.add_own_flags}
    script = SimpleNamespace(**vars(pretrain_gpt) | parts)
    train(pretrain_gpt, {}, f" --train-iters 1 --save {tmp_path / 'base'}")
    base = f" --pretrained-checkpoint {tmp_path / 'base'} --allow-missing-tensors"
    train(script, {}, f" --lora-rank 2 --train-iters 1 --save {tmp_path / 'adapted'}{base}")
    assert "another lora_rank" not in capsys.readouterr().out
    for flags, expected in (
        (f"--lora-rank 4 --load {tmp_path / 'adapted'}", "lora_rank: the checkpoint has 2, this run has 4"),
        (f"--lora-rank 4 --load {tmp_path / 'base'}", "lora_rank: the checkpoint has none, this run has 4"),
        (f"--lora-rank 4 --finetune --load {tmp_path / 'adapted'}", "lora_rank: the checkpoint has 2, this run has 4"),
    ):
        with pytest.raises(RuntimeError, match=expected):
            train(script, {}, f" --train-iters 2 {flags}")


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_a_run_begins_from_a_base_saves_resumes_to_the_bit_and_reshards(name: str, tmp_path):
    """The other layout is one process at ZeRO 0."""
    sizes, flags = RUNS[name]
    own = example("pretrain")
    parts = {"model_provider": own.model_provider, "extra_args_provider": own.add_own_flags}
    script = SimpleNamespace(**vars(pretrain_gpt) | parts)
    train(pretrain_gpt, {}, f" --train-iters 2 --save {tmp_path / 'base'}")
    begin = f" --lora-rank 2 --pretrained-checkpoint {tmp_path / 'base'} --allow-missing-tensors"
    whole = train(script, sizes, f"{begin}{flags} --train-iters 3 --save {tmp_path / 'whole'}")
    train(script, sizes, f"{begin}{flags} --train-iters 2 --save {tmp_path / 'half'}")
    again = train(script, sizes, f" --lora-rank 2{flags} --train-iters 3 --load {tmp_path / 'half'}")
    for before, after in zip(whole, again, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    (alone,) = train(script, {}, f" --lora-rank 2 --train-iters 3 --load {tmp_path / 'half'}")
    (base,) = train(pretrain_gpt, {}, f" --train-iters 2 --load {tmp_path / 'base'}")
    assert all(torch.equal(alone[name], value) for name, value in base.items())  # frozen
    for name, value in alone.items():
        if "lora_a" in name and name.endswith(("linear_qkv.lora_a", "linear_fc1.lora_a")):
            torch.testing.assert_close(value, whole[0][name], rtol=1e-4, atol=1e-6)


def test_linears_are_exchanged_before_a_model_is_wrapped_and_with_their_parameters():
    def work(mesh: Mesh) -> None:
        chunks, _, _ = build_chunks(mesh, TINY_GPT2, Layout())
        with pytest.raises(RuntimeError, match="is in the buffers of a DistributedDataParallel already"):
            replace_linears(chunks[0].module, lambda name, linear: None)

        model = GPT.make(TINY_GPT2, vocab_size=61, layers=range(2), context=chunks[0].module.context)
        before = dict(model.named_modules())
        with pytest.raises(ValueError, match=r"in place of .*linear_qkv must hold its parameter weight itself"):
            replace_linears(model, lambda name, linear: nn.Linear(2, 2))
        assert dict(model.named_modules()) == before
        only = lambda name, linear: LORA.ColumnLoRA(linear, 2, 2.0) if name.endswith("fc1") else linear  # noqa: E731
        assert all(name.endswith("linear_fc1") for name in replace_linears(model, only))
        assert sum(isinstance(module, ColumnParallelLinear) for module in model.modules()) == 2

        own = GPT.make(TINY_LLAMA, vocab_size=61, layers=range(2), context=chunks[0].module.context)
        before = [name for name, _ in own.named_parameters()]
        column = lambda name, linear: LORA.ColumnLoRA(linear, 2, 2.0) if name.endswith("output_layer") else None  # noqa: E731
        assert replace_linears(own, column) == [], "the output layer only where it is asked for"
        assert replace_linears(own, column, output_layer=True) == ["language_model.output_layer"]
        after = [name for name, _ in own.named_parameters()]
        assert [name for name in after if "lora" not in name] == before
        assert [name for name in after if "lora" in name] == [
            f"language_model.output_layer.linear.lora_{factor}" for factor in "ab"
        ]
        assert replace_linears(model, column, output_layer=True) == [], "a tied one has the embedding's weight"

    run_ranks({}, work)


def test_the_adapter_of_the_page_trains_as_in_one_process():
    """docs/adding_a_model.md: vectors that multiply the outputs of every linear."""
    names = names_of_block(PAGE, "def add_ia3")

    def make(config, **parts) -> nn.Module:
        model = GPT.make(config, **parts)
        names["add_ia3"](model)
        return model

    scaled = partial(run, LLAMA, subject=replace(GPT, make=make), steps=2, global_batch=12)
    assert_equal(scaled(Layout(tp=2, sp=True, pp=2, m=3)), scaled(Layout()), 1e-10)


def test_the_adapter_of_a_part_of_a_linear_trains_as_in_one_process():
    """docs/adding_a_model.md: IA3 of the paper, where tensor-parallel ranks share the one key and value head."""
    names = names_of_block(PAGE, "def add_rescaling")

    def make(config, **parts) -> nn.Module:
        model = GPT.make(config, **parts)
        assert {name.rpartition(".")[2] for name in names["add_rescaling"](model)} == {"linear_qkv", "linear_fc2"}
        return model

    config = replace(LLAMA, num_layers=2, num_query_groups=1)
    scaled = partial(run, config, subject=replace(GPT, make=make), steps=1, global_batch=4)
    got = scaled(Layout(tp=2, sp=True, m=2))
    assert_equal(got, scaled(Layout(m=2)), 1e-10)
    groups = [grad for name, grad in got.grads[-1].items() if name.endswith("linear_qkv.ia3")]
    queries = config.num_attention_heads * config.head_width
    assert len(groups) == 2 and all(not grad[:queries].any() and grad[queries:].all() for grad in groups)


def test_a_parameter_that_may_be_a_part_says_what_a_rank_has():
    class Scaled(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.weight, self.bias, self.matmul_state = linear.weight, linear.bias, linear.matmul_state
            self.ia3 = nn.Parameter(torch.ones(len(linear.weight)))

    class Declared(Scaled):
        def __init__(self, linear):
            super().__init__(linear)
            self.ia3.sequence_parallel = False

    def work(mesh: Mesh) -> None:
        model = GPT.make(TINY_GPT2, vocab_size=61, layers=range(2), context=LayerContext.from_mesh(mesh, torch.float32))
        if mesh["tp"].size > 1:
            with pytest.raises(
                ValueError, match=r"ia3 of the Scaled in place of .*linear_qkv does not say which part of it"
            ):
                replace_linears(model, lambda name, linear: Scaled(linear))
            assert replace_linears(model, lambda name, linear: Declared(linear))
        else:
            assert replace_linears(model, lambda name, linear: Scaled(linear))

    run_ranks({"tp": 2}, work)
    run_ranks({}, work)


def test_the_low_rank_adapter_of_the_page_leaves_the_padding_of_the_vocabulary():
    """Its rows are zeros, of which the norm is no divisor."""
    names = names_of_block(PAGE, "class DoRA")

    def work(mesh: Mesh) -> None:
        model = GPT.make(
            TINY_LLAMA, vocab_size=61, layers=range(1), context=LayerContext.from_mesh(mesh, torch.float32)
        )
        make = lambda name, linear: names["DoRA"](linear, 2, 4.0) if name.endswith("output_layer") else None  # noqa: E731
        assert replace_linears(model, make, output_layer=True)
        for module in model.modules():
            if isinstance(module, names["DoRA"]):
                with torch.no_grad():
                    module.initialize_from_weights()
        scores = model(torch.arange(4)[None], torch.arange(4)[None])
        assert scores.shape[-1] > 61 // mesh["tp"].size and scores.isfinite().all()

    run_ranks({"tp": 2}, work)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "config"),
    [
        pytest.param(Layout(tp=2, sp=True, pp=2, m=3), GPT2, id="sp pp"),
        pytest.param(Layout(tp=2, m=3), LLAMA, id="tp", marks=pytest.mark.full),
        pytest.param(
            Layout(tp=4, dp=2, m=3, data_parallel=AHEAD), replace(LLAMA, num_query_groups=2), id="zero 3, shared heads"
        ),
    ],
)
def test_the_low_rank_adapter_of_the_page_trains_as_in_one_process(layout: Layout, config):
    """docs/adding_a_model.md: DoRA, from drawn factors and magnitudes that are no norms, so that all of it has gradients."""
    names = names_of_block(PAGE, "def add_dora")

    def make(config, **parts) -> nn.Module:
        model = GPT.make(config, **parts)
        names["add_dora"](model, 2, 8.0)
        for name, parameter in model.named_parameters():
            if "dora_b" in name:
                parameter.placement = replace(parameter.placement, init=LORA.Normal(0.1))
        return model

    adapted_run = partial(run, config, subject=replace(GPT, make=make), steps=2, global_batch=12)
    got = adapted_run(layout)
    assert_equal(got, adapted_run(Layout()), 1e-10)
    trained = {key.split(".")[-1] for key, grad in got.grads[-1].items() if grad.abs().max() > 0}
    assert trained == {"dora_a", "dora_b", "magnitude"}


def test_the_low_rank_adapter_of_the_page_begins_as_its_base(tmp_path, capsys):
    """Its magnitudes begin as the norms of the base's rows, so that its first loss is the base's."""
    names = names_of_block(PAGE, "def add_dora")

    def model_provider(pre_process=True, post_process=True, vp_stage=None):
        model = pretrain_gpt.model_provider(pre_process, post_process, vp_stage)
        names["add_dora"](model)
        return model

    script = SimpleNamespace(**vars(pretrain_gpt) | {"model_provider": model_provider})
    train(pretrain_gpt, {}, f" --fp64 --train-iters 1 --save {tmp_path / 'base'}")
    begin = f" --fp64 --lr 1e-3 --train-iters 1 --log-interval 1 --pretrained-checkpoint {tmp_path / 'base'} --allow-missing-tensors"
    capsys.readouterr()
    train(pretrain_gpt, {}, begin)
    (expected,) = re.findall(r"lm loss: (\S+)", capsys.readouterr().out)
    for sizes, flags in (({}, ""), ({"tp": 2}, " --tensor-model-parallel-size 2 --sequence-parallel")):
        train(script, sizes, f"{begin}{flags} --save {tmp_path / 'adapted'}")
        assert set(re.findall(r"lm loss: (\S+)", capsys.readouterr().out)) == {expected}
    base, adapted_tensors = load_whole_tensors(tmp_path / "base"), load_whole_tensors(tmp_path / "adapted")
    magnitudes = [name for name in adapted_tensors if name.startswith("model/") and name.endswith("magnitude")]
    assert len(magnitudes) == 8
    for name in magnitudes:  # after a step of at most the learning rate
        norms = base[name.replace("magnitude", "weight")].norm(dim=1)
        torch.testing.assert_close(adapted_tensors[name], norms, rtol=0, atol=1.1e-3)


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_adapters_are_saved_alone_and_need_their_own_base(name: str, tmp_path):
    sizes, flags = RUNS[name]
    own = example("pretrain")
    parts = {"model_provider": own.model_provider, "extra_args_provider": own.add_own_flags}
    script = SimpleNamespace(**vars(pretrain_gpt) | parts)
    for name, seed in (("base", 1), ("other", 2)):
        train(pretrain_gpt, {}, f" --train-iters 1 --seed {seed} --save {tmp_path / name}")
    base = f" --lora-rank 2 --pretrained-checkpoint {tmp_path / 'base'} --allow-missing-tensors"
    whole = train(script, sizes, f"{base}{flags} --train-iters 3 --save {tmp_path / 'whole'}")
    train(script, sizes, f"{base}{flags} --train-iters 2 --no-save-frozen --save {tmp_path / 'adapters'}")
    saved = load_whole_tensors(tmp_path / "adapters")
    assert all("lora" in name for name in saved if name.startswith("model/")) and any("lora" in name for name in saved)

    resume = f" --lora-rank 2 --train-iters 3 --load {tmp_path / 'adapters'}"
    again = train(script, sizes, f"{resume}{flags} --pretrained-checkpoint {tmp_path / 'base'}")
    for before, after in zip(whole, again, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    (alone,) = train(script, {}, f"{resume} --pretrained-checkpoint {tmp_path / 'base'}")  # in another layout, too
    (of_base,) = train(pretrain_gpt, {}, f" --train-iters 1 --load {tmp_path / 'base'}")
    assert all(torch.equal(alone[name], value) for name, value in of_base.items())
    with pytest.raises(RuntimeError, match="give the base model as --pretrained-checkpoint"):
        train(script, {}, resume)
    with pytest.raises(RuntimeError, match="is not the base of --load"):
        train(script, {}, f"{resume} --pretrained-checkpoint {tmp_path / 'other'}")


OF_FOUR = "--world-size 4 --rank 2 --zero-stage 3"
MEMORY = [
    "",
    "--world-size 2 --rank 1 --tensor-model-parallel-size 2 --sequence-parallel",
    f"{OF_FOUR} --pipeline-model-parallel-size 2 --overlap-param-gather",
    pytest.param(
        f"{OF_FOUR} --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform",
        marks=pytest.mark.sweep,
    ),
]


@pytest.mark.full
@pytest.mark.parametrize("flags", MEMORY)
def test_memory_of_adapters_and_their_frozen_base_is_predicted(flags: str):
    got = measure(f"{SMALL} {flags} --model {ROOT / 'examples/lora/pretrain.py'}".split())
    check(got.predicted, got.bytes, got.total, got.in_file)
    if "zero" not in flags:  # the base's are among them
        assert got.bytes["parameters"] > 4 * got.bytes["gradients"] > 0


@pytest.mark.full
def test_a_rank_keeps_its_share_of_the_base_and_one_gathered_unit():
    """Two ranks at ZeRO 3 against one: half of the bytes, but for the alignment of each unit; and of the units one at a time, with
    the gradients of its adapters."""
    flags = f"{SMALL} --model {ROOT / 'examples/lora/pretrain.py'} --lora-rank 4"
    alone, shared = measure(flags.split()), measure(f"{flags} --world-size 2 --rank 1 --zero-stage 3".split())
    check(shared.predicted, shared.bytes, shared.total, shared.in_file)
    whole = alone.bytes["parameters"]
    assert shared.bytes["parameters"] == pytest.approx(whole / 2, rel=0.002)
    h, vocabulary, rank = 64, 500, 4
    frozen = 12 * h * h + 13 * h  # of a layer: products with biases, norms
    adapters = rank * ((h + 3 * h) + (h + h) + 2 * (h + 4 * h))
    largest = max(4 * (frozen + 2 * adapters), 4 * vocabulary * h)
    assert largest <= shared.bytes["communication"] <= 1.05 * largest
