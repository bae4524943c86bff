"""tools/generate.py --model SCRIPT: checkpoints of models that a script builds, against the formulas written out by hand."""

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import plain_model
import pytest
import torch
from documents import ROOT
from script_run import leaving_nothing_of

from megatron.convert import open_any
from megatron.core.dist_checkpointing import Checkpoint
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.training import run_script
from tools import generate
from tools.checkpoint_inspect import read_tensor
from tools.script import script_at

FORK = ROOT / "examples" / "minimal_fork"
LORA = ROOT / "examples" / "lora"
SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --fp64 "
    "--train-iters 3 --lr 3e-2 --eval-iters 0 --device cpu --num-workers 0 --log-interval 1"
)
WORDS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
PROMPT = [3, 1, 4, 1, 5, 92, 6]


def train(script: Path, *words: str) -> None:
    run_script(script_at(str(script))._replace(argv=[*SMALL.split(), *words]))


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints of examples/minimal_fork: layers, a head and flags of its own."""
    folder = tmp_path_factory.mktemp("fork")
    with leaving_nothing_of(FORK):
        train(FORK / "pretrain.py", "--branch-scale", "0.7", "--save", str(folder))
        yield folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints of examples/lora: a GPT with adapters, whose rank is no setting of a model."""
    folder = tmp_path_factory.mktemp("lora")
    with leaving_nothing_of(LORA):
        train(
            LORA / "pretrain.py", "--lora-rank", "3", "--lora-alpha", "40", "--mock-data", *WORDS, "--save", str(folder)
        )
        yield folder


def opened(folder: Path) -> tuple[Checkpoint, ModelConfig, dict[str, torch.Tensor]]:
    """The checkpoint, its model's settings, and its parameters as the plain formulas name them."""
    checkpoint = open_any(folder)
    weights = {
        name.removeprefix("model/"): read_tensor(checkpoint, name)
        for name in checkpoint.names
        if name.startswith("model/")
    }
    plain = {name.removeprefix("language_model."): tensor for name, tensor in weights.items()}
    return checkpoint, ModelConfig(**checkpoint.state["config"]["transformer"]), plain


def greedy_ids(weights: dict[str, torch.Tensor], config: ModelConfig, count: int) -> list[int]:
    """The most probable ids one after the other, without a cache."""
    ids = list(PROMPT)
    for _ in range(count):
        scores = plain_model.plain_scores(weights, config, torch.tensor([ids]))
        ids.append(int(scores[0, -1, :100].argmax()))
    return ids


def said_by(capsys, folder: Path, *words: str) -> list[int]:
    more = ["--load", str(folder), "--greedy", "--max-new-tokens", "6", "--device", "cpu", *WORDS]
    status = generate.main([*more, *words])
    said = capsys.readouterr()
    assert status == 0, said.err
    return [int(word) for word in said.out.split()]


PROMPTS = ["--prompt", " ".join(map(str, PROMPT))]


def test_a_forks_layers_generate_by_their_formula(fork: Path, capsys, monkeypatch):
    """x + scale (attention(norm(x)) + mlp(norm(x))), with the scale that the checkpoint was trained with."""
    checkpoint, config, weights = opened(fork)
    assert checkpoint.state["model"] == "SideBySideModel of SideBySideLayer"

    def layer(x, w, i, config, positions):
        y = plain_model._norm(x, w, f"decoder.layers.{i}.layernorm", config)
        attended = plain_model._attention(y, w, i, config, positions)
        return x + 0.7 * (attended + plain_model._mlp(y, w, f"decoder.layers.{i}.mlp.", config))

    monkeypatch.setattr(plain_model, "_layer", layer)
    wanted = greedy_ids(weights, config, 6)
    script = ["--model", str(FORK / "pretrain.py")]
    assert said_by(capsys, fork, *script, *PROMPTS) == wanted
    assert said_by(capsys, fork, *script, *PROMPTS, "--recompute") == wanted
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(PROMPTS[1].encode() + b"\n")))
    assert said_by(capsys, fork, *script, "--prompt-file", "-") == wanted


def test_adapters_of_a_script_are_part_of_the_model(adapted: Path, capsys):
    """W + alpha / rank B A in the place of every W."""
    _, config, weights = opened(adapted)
    for name in [name for name in weights if name.endswith(".lora_a")]:
        linear = name.removesuffix(".lora_a")
        weights[f"{linear}.weight"] = weights[f"{linear}.weight"] + 40 / 3 * weights[f"{linear}.lora_b"] @ weights[name]
    assert said_by(capsys, adapted, "--model", str(LORA / "pretrain.py"), *PROMPTS) == greedy_ids(weights, config, 6)
