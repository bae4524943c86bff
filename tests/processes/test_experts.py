"""A mixture of experts over gloo: it goes on to the same bits, and its checkpoint serves any ranks of experts."""

import shutil
from pathlib import Path
from shlex import split

import pytest
from process_runs import assert_same_checkpoint, rewound
from processes import ROOT, Layout, pretrain, run
from said import tells

from megatron.core.dist_checkpointing import load_whole_tensors

# Mixtral's layers, with the router of which a buffer is saved too.
FLAGS = split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 16 "
    "--ffn-hidden-size 24 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --fp64 --device cpu --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --make-vocab-size-divisible-by 16 --num-experts 8 --moe-router-topk 2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.02 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall --use-distributed-optimizer "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --train-iters 4 --log-interval 1 --eval-iters 0 --save-interval 2"
)
LAST = "iter_0000004"


def train(folder: Path, load: Path, ranks: int, ep: int, etp: int, *more: str) -> list[str]:
    """What a run printed that loads from one folder and saves to another."""
    experts = f"--expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp}"
    folders = ["--save", str(folder), "--load", str(load)]
    return pretrain([*FLAGS, *split(experts), *folders, *more], Layout(dp=ranks)).printed


@pytest.mark.full
def test_a_run_with_experts_resumes_and_its_experts_move_to_other_ranks(tmp_path: Path):
    whole, again, moved = tmp_path / "whole", tmp_path / "again", tmp_path / "moved"
    printed = train(whole, whole, 4, 4, 1)
    assert len(printed) == 4

    # from the middle, with as many ranks: equal bits
    rewound(whole, 2, again)
    shutil.rmtree(again / LAST)
    shutil.copytree(again, moved)
    assert train(again, again, 4, 4, 1) == printed[2:]
    assert_same_checkpoint(again / LAST, whole / LAST)

    # EP 4 -> EP 2 x ETP 2 -> one process, a step each
    train(moved, moved, 4, 2, 2, "--exit-interval", "3")
    train(moved, moved, 1, 1, 1)
    expected, got = load_whole_tensors(whole), load_whole_tensors(moved)
    assert got.keys() == expected.keys()
    biases = [name for name in expected if name.endswith("expert_bias")]
    assert len(biases) == 2 and all(expected[name].any() for name in biases)
    for name, value in expected.items():
        worst = (got[name].double() - value.double()).abs().max()
        tolerance = 0.0 if name in biases else 1e-9 * value.double().abs().max()
        assert worst <= tolerance, f"{name} differs by {worst}"


@pytest.mark.full
@pytest.mark.parametrize("tool", ["generate", "evaluate"])
def test_expert_ranks_that_do_not_divide_the_experts_are_refused_as_flags(tool: str, tmp_path: Path):
    train(tmp_path / "saved", tmp_path / "saved", 1, 1, 1, "--exit-interval", "1")
    (tmp_path / "text.txt").write_text("1 2 3")
    words = ["--prompt", "1 2"] if tool == "generate" else ["--data", str(tmp_path / "text.txt")]
    words += ["--load", str(tmp_path / "saved"), "--device", "cpu", "--expert-model-parallel-size", "3"]
    outcome = run([str(ROOT / "tools" / f"{tool}.py"), *words], 3, timeout=60)
    assert set(outcome.codes) == {2}, outcome
    assert outcome.everything.count("\n") == 1, outcome
    assert tells(outcome.everything, f"{tool}: --num-experts (8) --expert-model-parallel-size (3)"), outcome
