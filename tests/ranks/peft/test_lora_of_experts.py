"""Adapters of experts' stacked weights: what they compute, as PEFT has them, through finetune_gpt.py and tools/lora.py.

Layouts: test_lora_layouts.py. Losses beside PEFT's: tests/compat/test_fine_tuning.py.
"""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import write_folders
from expert_models import GPT2, LLAMA
from local_ranks import run_ranks
from measured_memory import SMALL
from script_run import trainer_of
from sft_folder import FinetuneScript, read_safetensors, write_lines, write_safetensors
from tiny_run import GPT, Layout, build_chunks
from torch import Tensor

from megatron.convert import open_foreign
from megatron.convert.families.registry import FAMILIES
from megatron.convert.peft_of_experts import Pair, experts_in_hf, joined
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import load_whole_tensors, open_checkpoint
from megatron.core.distributed.sync_and_gather_params import full_state_dict
from megatron.core.inference import read_saved_settings
from megatron.core.inference.load_model import load_gpt
from megatron.core.inference.score import score
from megatron.core.parallel.mesh import Mesh
from megatron.core.peft.lora import add_lora
from megatron.core.peft.lora_config import LoRAConfig
from megatron.core.sharding.placement import Normal
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.memory.forecast_memory_along_schedule import IN_MEMORY, KINDS
from tools import lora as lora_tool
from tools.estimating.measure import measure


def with_adapters(config: ModelConfig, lora: LoRAConfig, **parts) -> torch.nn.Module:
    model = GPT.make(config, **parts)
    add_lora(model, lora, keys=model.context.keys, rows_of_sample=model.context.rows)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            parameter.placement = replace(parameter.placement, init=Normal(0.1))
    return model


@pytest.mark.parametrize("targets", [["all-linear"], ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]])
def test_an_expert_computes_what_its_weight_with_its_pair_added_would(targets: list[str]):
    def work(mesh: Mesh) -> None:
        lora = LoRAConfig(lora_rank=2, lora_alpha=6.0, lora_target_modules=targets)
        subject = replace(GPT, make=partial(with_adapters, lora=lora))
        chunks, _, _ = build_chunks(mesh, LLAMA, Layout(), subject=subject)
        experts = chunks[0].module.language_model.decoder.layers[0].mlp.experts
        counts = (3, 0, 2, 1, 0, 4, 1, 2)
        for linear in (experts.linear_fc1, experts.linear_fc2):
            x = torch.randn(sum(counts), linear.weight.shape[-1], dtype=torch.float64)
            deltas = [(b.flatten(1, -2) @ a) * 3.0 for _, _, a, b in linear.pairs()]  # [E, rows, in]
            weights = linear.weight.flatten(1, -2) + torch.cat(deltas, 1)
            expected = torch.cat([rows @ weight.T for rows, weight in zip(x.split(counts), weights)])
            torch.testing.assert_close(linear(x, counts), expected, rtol=1e-12, atol=1e-12)

    run_ranks({}, work)


@pytest.mark.parametrize(
    ("config", "lora", "problem"),
    [
        (
            LLAMA,
            {"lora_dropout": 0.1},
            r"--lora-dropout 0\.1: adapters of experts \(experts\.linear_fc1\) have no dropout",
        ),
        (
            LLAMA,
            {"lora_target_modules": ["linear_fc1"]},
            r"MLPs are experts; give experts\.linear_fc1 experts\.linear_fc2",
        ),
        (GPT2, {"lora_target_modules": ["experts.gate_proj"]}, r"experts\.gate_proj: the model has no such linear"),
        (None, {"lora_target_modules": ["gate"]}, r"gate: a router has no adapter, which is not built; leave it out"),
        (
            None,
            {"lora_target_modules": ["experts.gate_up_proj", "experts.up_proj"]},
            r"gives experts\.linear_fc1 and parts of it",
        ),
        (
            None,
            {"lora_target_modules": ["experts.linear_fc1=0"]},
            r"experts\.linear_fc1=0: give NAME=N, the name of a linear",
        ),
    ],
)
def test_what_experts_can_not_have_is_one_line(config: ModelConfig | None, lora: dict, problem: str):
    if config is None:
        with pytest.raises(ConfigError) as error:
            LoRAConfig(lora_rank=2, **lora)
        assert re.search(problem, error.value.problems[0])
        return
    subject = replace(GPT, make=partial(with_adapters, lora=LoRAConfig(lora_rank=2, **lora)))
    with pytest.raises(RuntimeError, match=problem):
        run_ranks({}, lambda mesh: build_chunks(mesh, config, Layout(), subject=subject))


# ---------------------------------------------------------------- as PEFT has them


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "granitemoe"])
def test_pairs_are_those_of_pefts_formula_and_keep_their_bits(kind: str):
    """PEFT 0.21: the delta of expert e is the product of columns e, E + e, ... of B with rows e r .. (e + 1) r of A. Their rows of gate
    and up are one behind the other, or, where matrices are stored transposed, in turn."""
    model = ModelConfig(**_SIZES_OF_EXPERTS)
    fc1, _, fc2, _ = experts_in_hf(FAMILIES[kind], model)  # of two layers
    module = f"model.layers.0.{'block_sparse_moe' if kind == 'granitemoe' else 'mlp'}.experts"
    assert (fc1.prefix({"gate_up_proj", "down_proj"}), fc1.prefix({"gate_up_proj"}), fc2.prefix({"down_proj"})) == (
        f"{module}.base_layer",
        *[module] * 2,
    )
    assert [f"model.layers.0.{experts.target}" for experts in (fc1, fc2)] == [fc1.name, fc2.name]
    assert fc1.name == f"{module}.gate_up_proj"
    for experts in (fc1, fc2):
        number, rows, columns = experts.shape
        a, b = torch.randn(number * 3, columns), torch.randn(rows, 3 * number)
        pair = experts.from_peft(a, b)
        back = experts.to_peft(pair)
        assert torch.equal(back.a, a) and torch.equal(back.b, b)
        theirs = torch.einsum("ore,eri->eoi", b.view(rows, 3, number), a.view(number, 3, columns))
        ours = pair.b.flatten(1, -2) @ pair.a
        if kind == "gpt_oss" and experts is fc1:
            theirs = torch.cat([theirs[:, 0::2], theirs[:, 1::2]], dim=1)
        torch.testing.assert_close(ours, theirs)
        with pytest.raises(ConfigError, match="is it an adapter of this base"):
            experts.from_peft(a, b[1:])
    parts = {part: Pair(torch.randn(4, 2, 8), torch.randn(4, 6, 2)) for part in fc1.parts}
    whole = joined(fc1, parts)
    deltas = torch.cat([pair.b @ pair.a for pair in parts.values()], 1)
    torch.testing.assert_close(whole.b.flatten(1, 2) @ whole.a, deltas)


_SIZES_OF_EXPERTS = {
    **{
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 6,
        "num_attention_heads": 2,
        "num_experts": 4,
        "moe_ffn_hidden_size": 6,
    },
    **{"swiglu": True, "position_embedding_type": "rope"},
}


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> tuple[Path, str]:
    """A folder of Mixtral, and the flags of a run on it."""
    root = tmp_path_factory.mktemp("mixture")
    base = write_folders(root, ["mixtral"])["mixtral"]
    lines = [{"prompt": f"{i % 7} {i % 5} 3", "completion": f"{i % 3} 9"} for i in range(16)]
    write_lines(root / "numbers.jsonl", lines)
    words = json.loads((base / "config.json").read_text())["vocab_size"]
    data = f"--data-path {root}/numbers.jsonl --split 1,0,0 --tokenizer-type NullTokenizer --vocab-size {words - 1}"
    sizes = (
        "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1 --lr-decay-style constant --log-interval 1"
    )
    return base, f"{sizes} {data} --pretrained-checkpoint {base} --device cpu --fp64 --optimizer sgd"


def train(flags: str, sizes: dict[str, int] | None = None) -> list[dict[str, Tensor]]:
    def work(mesh: Mesh) -> dict[str, Tensor]:
        with trainer_of(FinetuneScript(flags), mesh, flags, predicts=False) as trainer:
            trainer.run()
            return {name: p.clone() for chunk in trainer.model for name, p in full_state_dict(chunk.module).items()}

    return run_ranks(sizes or {}, work)


LAYOUTS = {
    "ep etp zero 3": (
        {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
        " --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2 --zero-stage 3",
    ),
    "pp ep": ({"pp": 3, "dp": 2, "ep": 2}, " --pipeline-model-parallel-size 3 --expert-model-parallel-size 2"),
}
ALL = " --lora-rank 2"
PARTS = " --lora-rank 2 --lora-target-modules experts.gate_proj=3 experts.up_proj linear_proj"


@pytest.mark.parametrize("lora", [ALL, PARTS, ""], ids=["all", "parts", "all weights"])
def test_the_log_says_how_many_parameters_are_trainable_in_every_layout(lora: str, mixture, capsys):
    """Of one process: the adapters' elements, and with them those of the files of the base."""
    base, flags = mixture
    layouts = {
        "alone": ({}, ""),
        "zero 1": ({"dp": 2}, " --zero-stage 1"),
        "tp": ({"tp": 2}, " --tensor-model-parallel-size 2"),
        **LAYOUTS,
    }
    of_adapters = 0

    def announce(mesh: Mesh, flags: str) -> int:
        with trainer_of(FinetuneScript(flags), mesh, flags, predicts=False) as trainer:
            trainer._announce()
            modules = (chunk.module for chunk in trainer.model)
            return sum(p.numel() for module in modules for name, p in module.named_parameters() if ".lora_" in name)

    for name, (sizes, more) in layouts.items():
        given = f"{flags}{lora}{more} --train-iters 3"
        counts = run_ranks(sizes, partial(announce, flags=given))
        if name == "alone":
            (of_adapters,) = counts
            assert bool(of_adapters) == bool(lora)
        (said,) = {*re.findall(r"^model of (.*); training to iteration 3$", capsys.readouterr().out, re.M)}
        total = of_adapters + sum(
            x.size for file in base.glob("*.safetensors") for x in read_safetensors(file).values()
        )
        share = f", {of_adapters:,} of them trainable ({100 * of_adapters / total:.4f}%)" if lora else ""
        assert said == f"{total:,} parameters{share}", name


@pytest.mark.sweep
@pytest.mark.parametrize("lora", [ALL, PARTS], ids=["all", "parts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_adapters_are_saved_resumed_to_the_bit_and_resharded(layout: str, lora: str, mixture, tmp_path: Path):
    _, flags = mixture
    sizes, more = LAYOUTS[layout]
    whole = train(f"{flags}{lora}{more} --train-iters 3 --save {tmp_path}/whole", sizes)
    train(f"{flags}{lora}{more} --train-iters 2 --save {tmp_path}/half", sizes)
    again = train(f"{flags}{lora}{more} --train-iters 3 --load {tmp_path}/half", sizes)
    for before, after in zip(whole, again, strict=True):
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    saved = {name for name in load_whole_tensors(tmp_path / "half") if name.startswith("model/")}
    assert all(".lora_" in name for name in saved) and any(".experts." in name for name in saved)
    others = [({}, ""), *(value for name, value in LAYOUTS.items() if name != layout)]
    expected = load_whole_tensors(tmp_path / "whole")
    for i, (other, of_other) in enumerate(others):
        train(f"{flags}{lora}{of_other} --train-iters 3 --load {tmp_path}/half --save {tmp_path}/{i}", other)
        got = load_whole_tensors(tmp_path / str(i))
        for name in saved:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-10)


def logits_of(folder: Path) -> Tensor:
    checkpoint = open_foreign(folder)
    config = ModelConfig(**checkpoint.state["config"]["transformer"] | {"fp64": True})
    words = checkpoint.state["vocab_size"]
    model = load_gpt(checkpoint, config, vocab_size=words, positions=16)
    with torch.no_grad():
        return model(torch.arange(12)[None] % words, torch.arange(12)[None], None)[..., :words]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "granitemoe", "gpt_oss"])
@pytest.mark.parametrize("lora", [ALL, PARTS], ids=["all", "parts"])
def test_folders_of_peft_are_written_read_and_merged(kind: str, lora: str, mixture, tmp_path: Path):
    base = write_folders(tmp_path, [kind])[kind]
    words = json.loads((base / "config.json").read_text())["vocab_size"]
    flags = mixture[1].replace(f"--pretrained-checkpoint {mixture[0]}", f"--pretrained-checkpoint {base}")
    flags = flags.replace(flags.partition("--vocab-size ")[2].split()[0], str(words - 1), 1)
    train(f"{flags}{lora} --train-iters 2 --save {tmp_path}/own")
    assert lora_tool.main(f"--load {tmp_path}/own --save-peft {tmp_path}/peft".split()) == 0
    for source, out in ((f"--load {tmp_path}/own", "merged"), (f"--adapter {tmp_path}/peft", "again")):
        assert lora_tool.main(f"{source} --base {base} --merge {tmp_path}/{out}".split()) == 0
    words = f"--adapter {tmp_path}/peft --base {tmp_path}/merged --unmerge {tmp_path}/back"
    assert lora_tool.main(words.split()) == 0
    for file in base.glob("*.safetensors"):
        merged, again, back, first = (
            read_safetensors(f / file.name) for f in (tmp_path / "merged", tmp_path / "again", tmp_path / "back", base)
        )
        for name, value in first.items():
            assert np.array_equal(merged[name], again[name])
            assert abs(back[name] - value).max() < 1e-12
    changed = logits_of(tmp_path / "merged")
    assert (changed - logits_of(base)).abs().max() > 1e-6

    # the same logits from the adapters on their base
    def of_adapters(mesh: Mesh) -> Tensor:
        loading = f"{flags}{lora} --train-iters 2 --load {tmp_path}/own"
        with trainer_of(FinetuneScript(loading), mesh, loading, predicts=False) as trainer, torch.no_grad():
            return trainer.model[0].module.eval()(
                torch.arange(12)[None] % changed.shape[-1], torch.arange(12)[None], None
            )

    (expected,) = run_ranks({}, of_adapters)
    torch.testing.assert_close(changed, expected[..., : changed.shape[-1]], rtol=0, atol=1e-10)
    checkpoint = open_checkpoint(tmp_path / "own")
    saved = read_saved_settings(checkpoint.state, "own")
    settings = {
        "vocab_size": saved.vocab_size,
        "positions": saved.positions,
        "lora": saved.lora,
        "base": open_foreign(base),
    }

    def loaded(mesh: Mesh) -> list[float]:
        model = load_gpt(checkpoint, saved.transformer, **settings, mesh=mesh)
        return [one.logprob for one in score(model, [([1, 2], [3, 4, 5]), ([6], [7])], max_length=16, mesh=mesh)]

    (alone,) = run_ranks({}, loaded)
    assert run_ranks({"pp": 3}, loaded) == [pytest.approx(alone, abs=1e-10)] * 3

    # parts have become one parameter of twice the rank
    train(f"{flags} --lora-adapter {tmp_path}/peft --train-iters 1 --lr 1e-300 --save {tmp_path}/kept")
    assert lora_tool.main(f"--load {tmp_path}/kept --save-peft {tmp_path}/written".split()) == 0
    written = [json.loads((tmp_path / x / "adapter_config.json").read_text()) for x in ("peft", "written")]
    assert bool(written[0]["rank_pattern"]) == (lora == PARTS)
    assert written[0] == written[1]
    first, second = (read_safetensors(tmp_path / x / "adapter_model.safetensors") for x in ("peft", "written"))
    # zeros beside the blocks have become as small as the rate
    assert first.keys() == second.keys() and all(abs(first[name] - second[name]).max() < 1e-290 for name in first)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_in_any_layout_begins_from_a_folder_of_peft(layout: str, mixture, tmp_path: Path):
    _, flags = mixture
    sizes, more = LAYOUTS[layout]
    train(f"{flags}{ALL} --train-iters 2 --save {tmp_path}/own")
    assert lora_tool.main(f"--load {tmp_path}/own --save-peft {tmp_path}/peft".split()) == 0
    begun = f"{flags} --lora-adapter {tmp_path}/peft --train-iters 1"
    train(f"{begun} --save {tmp_path}/alone")
    train(f"{begun}{more} --save {tmp_path}/layout", sizes)
    got, expected = load_whole_tensors(tmp_path / "layout"), load_whole_tensors(tmp_path / "alone")
    first = load_whole_tensors(tmp_path / "own")
    for name in [name for name in expected if name.startswith("model/")]:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-10)
        assert not torch.equal(got[name], first[name])


SCRIPT = """
import pretrain_gpt
from megatron.core.base.dataclass_flags import add_flags, build
from megatron.core.enums import ModelType
from megatron.core.peft.lora import add_lora
from megatron.core.peft.lora_config import LoRAConfig
from megatron.training import get_args, pretrain


def add_own_flags(parser):
    add_flags(parser, LoRAConfig)
    return parser


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    model = pretrain_gpt.model_provider(pre_process, post_process, vp_stage)
    add_lora(model, build(LoRAConfig, vars(get_args())))
    return model


if __name__ == "__main__":
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step, extra_args_provider=add_own_flags, rules=pretrain_gpt.GPTModel.rules,
    )
"""
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --swiglu --moe-router-force-load-balancing"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "flags",
    [
        "--world-size 2 --rank 1 --expert-model-parallel-size 2",
        "--world-size 4 --rank 2 --zero-stage 3 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    ],
)
def test_their_memory_is_predicted(flags: str, tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    got = measure(f"{SMALL} {EXPERTS} --model {tmp_path}/script.py --lora-rank 4 {flags}".split())
    expected = got.predicted.within(*IN_MEMORY)
    for kind in KINDS[:3]:
        assert expected[kind] == got.bytes[kind], kind
    assert got.bytes["parameters"] > 4 * got.bytes["gradients"] > 0
    assert expected["activations"] == pytest.approx(got.bytes["activations"], rel=0.05)


def one_by_one(folder: Path, base: Path, experts: int) -> Path:
    """Write adapters as PEFT did for transformers 4, where each expert was a module."""
    random = np.random.default_rng(0)
    tensors = {}
    weights = {name: x for file in base.glob("*.safetensors") for name, x in read_safetensors(file).items()}
    for name, weight in weights.items():
        found = name.split(".experts.")
        if len(found) == 2 and int(found[1].split(".")[0]) < experts:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = random.standard_normal((2, weight.shape[1]))
            tensors[f"{module}.lora_B.weight"] = random.standard_normal((weight.shape[0], 2))
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["w1", "w2", "w3"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.sweep
def test_adapters_of_experts_one_by_one_are_read_too(mixture, tmp_path: Path):
    base, flags = mixture
    theirs = one_by_one(tmp_path / "theirs", base, 4)
    train(f"{flags} --lora-adapter {theirs} --train-iters 1 --lr 1e-300 --save {tmp_path}/own")
    assert lora_tool.main(f"--load {tmp_path}/own --base {base} --merge {tmp_path}/ours".split()) == 0
    assert lora_tool.main(f"--adapter {theirs} --base {base} --merge {tmp_path}/named".split()) == 0
    torch.testing.assert_close(logits_of(tmp_path / "ours"), logits_of(tmp_path / "named"), rtol=0, atol=1e-12)
    shutil.rmtree(theirs)
    one_by_one(theirs, base, 3)
    with pytest.raises(
        ConfigError, match="are of 3 of 4 experts, or of several ranks; only the same of all can be read"
    ):
        FinetuneScript(f"{flags} --lora-adapter {theirs}")
    shutil.rmtree(theirs)
    one_by_one(theirs, base, 4)
    plain = json.loads((theirs / "adapter_config.json").read_text())
    for other, problem in (
        (
            {"target_parameters": ["mlp.gate.weight"]},
            "only experts' gate_up_proj and down_proj can be read, no router's",
        ),
        ({"rank_pattern": {"w1": 4}}, r"has an adapter of rank 2 on .*experts\.0\.w1, and adapter_config\.json says 4"),
        ({"alpha_pattern": {"w1": 8}}, r"the factor of .*experts\.0\.w1 is 4 and that of others 2"),
        ({"rank_pattern": {"(": 4}}, r"rank_pattern is .*; it must have patterns of names, and numbers"),
    ):
        (theirs / "adapter_config.json").write_text(json.dumps(plain | other))
        with pytest.raises(ConfigError, match=problem):
            FinetuneScript(f"{flags} --lora-adapter {theirs}")
