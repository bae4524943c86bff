"""examples/walkthrough.py takes the flags that it is given: the stage of ZeRO, the rank, and every axis."""

import math
import re
import shlex
import subprocess
import sys
from collections import Counter

import pytest
from documents import ROOT
from examples import walkthrough
from said import tells

SMALL = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 7 --make-vocab-size-divisible-by 8"
# Elements of the model above: two layers of 12 h^2 + 13 h, the final norm, 8 words and 8 positions.
ELEMENTS = 2 * (12 * 8 * 8 + 13 * 8) + 2 * 8 + 8 * 8 + 8 * 8


def shown(capsys, name: str, *words: str) -> str:
    walkthrough.main([name, *SMALL.split(), *words])
    return capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [["--zero-stage", "3"], ["--data-parallel-sharding-strategy", "optim_grads_params"], ["--zero-stage", "1"]],
    ids=" ".join,
)
def test_the_stage_that_is_asked_for_is_the_one_that_is_shown(flags: list[str], capsys):
    (head,) = re.findall(r"ZeRO (\d), rank 0 of 4 keeps elements: parameters ([\d,]+)", shown(capsys, "zero", *flags))
    stage, kept = int(head[0]), int(head[1].replace(",", ""))
    # A quarter of the parameters in stage 3, and some padding; all of them before.
    whole = 1 if stage < 3 else 4
    assert stage == (1 if flags[-1] == "1" else 3) and ELEMENTS / whole <= kept < 1.2 * ELEMENTS / whole


@pytest.mark.full
def test_the_distributed_optimizer_is_stage_1_of_the_rank_asked_for(capsys):
    text = shown(capsys, "zero", "--use-distributed-optimizer", "--rank", "3")
    assert re.findall(r"ZeRO (\d), rank (\d) of 4", text) == [("1", "3")]


ONE_STAGE = ["--pipeline-model-parallel-size", "1"]
SUMS = {
    # Flags: the axes of each of two tables, two layers' twelve parameters, and the last norm's two.
    "--tensor-model-parallel-size 1 --context-parallel-size 2 --world-size 4": {"dp cp": 28},
    "--tensor-model-parallel-size 1 --context-parallel-size 4 --world-size 4": {"cp": 28},
    "--tensor-model-parallel-size 1 --world-size 1": {"-": 28},
}


@pytest.mark.parametrize("flags", SUMS)
def test_the_gradient_of_a_replica_is_summed_over_every_axis_of_replicas(flags: str, capsys):
    """Megatron: over its data-parallel group with context parallelism."""
    text = shown(capsys, "model", *f"{flags} --pipeline-model-parallel-size 1".split())
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.startswith("language_model")]
    assert Counter(row[-1] for row in rows) == SUMS[flags]
    assert ("cp 0 of" in text) == ("context" in flags)


def test_an_axis_of_one_rank_shards_nothing(capsys):
    assert "tp (dim" not in shown(capsys, "model", *ONE_STAGE, "--tensor-model-parallel-size", "1", "--world-size", "2")
    assert "tp (dim 0)" in shown(capsys, "model", *ONE_STAGE, "--tensor-model-parallel-size", "2", "--world-size", "2")


@pytest.mark.parametrize("instances", [1, 2])
def test_stage_3_keeps_a_shard_of_each_parameter(instances: int, capsys):
    """The ranks of a group hold every element once; of two groups each holds all."""
    kept: Counter[str] = Counter()
    whole = {}
    flags = "--tensor-model-parallel-size 1 --context-parallel-size 2 --world-size 4 --zero-stage 3"
    words = [*ONE_STAGE, *flags.split()]
    for rank in range(4):
        text = shown(
            capsys, "model", *words, "--num-distributed-optimizer-instances", str(instances), "--rank", str(rank)
        )
        found = re.findall(r"^(language_model\S+) .*?\(([\d, ]+)\), ([\d,]+) kept  (.*?)  ", text, re.MULTILINE)
        for name, shape, count, shards in found:
            kept[name] += int(count.replace(",", ""))
            whole[name] = math.prod(int(size) for size in shape.split(",") if size.strip())
            assert "(elements)" in shards
    assert sum(whole.values()) == ELEMENTS
    assert kept == {name: instances * count for name, count in whole.items()}


def test_the_gradient_of_a_shared_key_head_is_summed_over_the_ranks_that_share_it(capsys):
    words = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --world-size 2 --num-attention-heads 2 "
    text = shown(capsys, "model", *words.split(), "--group-query-attention", "--num-query-groups", "1")
    sums = {line.split()[0].split(".", 4)[-1]: line.rsplit("  ", 1)[-1].strip() for line in text.splitlines()[2:]}
    assert sums["self_attention.linear_qkv.weight"] == "kv" and sums["mlp.linear_fc1.weight"] == "-"
    assert sums["input_layernorm.weight"] == "tp"  # under sequence parallelism


def examples_of_its_help() -> list[str]:
    """Those that need one process; `torchrun` ones are in docs/walkthrough.md."""
    words = re.findall(r"python examples/walkthrough.py (.*?)(?:  |\n)", walkthrough.__doc__)
    return words + [line for line in re.findall(r"`(.*?)`", walkthrough.__doc__.replace("\n", " ")) if "--" in line]


@pytest.mark.full
@pytest.mark.parametrize("line", examples_of_its_help())
def test_an_example_of_its_help_can_be_shown(line: str, capsys):
    assert walkthrough.main(shlex.split(line)) == 0
    assert capsys.readouterr().out


def test_its_help_has_six_examples():
    assert len(examples_of_its_help()) == 6


GROUPS = {
    "--context-parallel-size 2": ["context-parallel groups: [g0, g2], [g1, g3]", "data- and context-parallel"],
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2": [
        "exchange of heads (a2a+p2p) groups: [g0, g2], [g1, g3], [g4, g6]",
        "ring of keys (a2a+p2p) groups: [g0, g4], [g1, g5]",
    ],
    "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2": [
        "key/value head groups: [g0, g1], [g2, g3]"
    ],
    "--num-distributed-optimizer-instances 2": ["replicas of an optimizer instance groups: [g0, g4], [g1, g5]"],
}


@pytest.mark.parametrize("flags", GROUPS)
def test_groups_of_every_axis_are_listed(flags: str, capsys):
    """By hand: tensor-parallel neighbours first, then context, then data; here of one pipeline stage."""
    words = f"{flags} --world-size 8 --pipeline-model-parallel-size 1".split()
    assert walkthrough.main(["groups", *words]) == 0
    said = capsys.readouterr().out
    assert all(text in said for text in GROUPS[flags])
    assert walkthrough.main(["groups"]) == 0
    names = re.findall(r"^\d+ (.*) groups", capsys.readouterr().out, re.MULTILINE)
    assert names == ["data_parallel", "tensor model-parallel", "pipeline model-parallel", "model-parallel", "embedding"]


MISTAKES = {
    "model --num-layer 3": "--num-layers",
    "step --world-size 8 --tensor-model-parallel-size 4": "8",
    "zero --yaml-cfg none.yaml": "none.yaml",
    "buffers --rank 16": "ranks 0 to 15",
    "engine --zero-stage 1": "engine takes no flags",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_listed_without_a_traceback(command: str, capsys):
    assert walkthrough.main(shlex.split(command)) == 2
    said = capsys.readouterr().err
    assert tells(said, f"cannot show {command.split()[0]} {MISTAKES[command]}")


def test_an_unknown_command_ends_before_torch_is_imported():
    for words in (["grups"], [], ["--rank", "3"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "examples/walkthrough.py", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and tells(done.stderr, "commands groups step") and " torch\n" not in done.stderr
    words = [sys.executable, "-X", "importtime", "examples/walkthrough.py", "model", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "torchrun" in done.stdout and " torch\n" not in done.stderr
