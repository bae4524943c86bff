"""pretrain_t5.py over real processes: from a file of sentences to one process's losses. Processes, because gloo carries the tensors."""

from pathlib import Path
from shlex import split

import numpy as np
import pytest
from process_runs import assert_same_checkpoint
from processes import ROOT, Layout, pretrain
from sentence_files import write_sentences

MODEL = split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --decoder-seq-length 16 --vocab-extra-ids 10 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 5e-3 --log-interval 1 --eval-iters 1 --eval-interval 4 "
    "--split 80,20,0 --device cpu"
)


SCRIPT, SPLIT = str(ROOT / "pretrain_t5.py"), ["--pipeline-model-parallel-split-rank", "1"]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    draw = np.random.RandomState(0)
    lengths = [draw.randint(2, 9, 6).tolist() for _ in range(100)]
    documents = [(5 + np.arange(sum(one)) % 50, one) for one in lengths]
    return [*MODEL, *write_sentences(tmp_path, documents, words=60, pieces=20)]


@pytest.mark.full
def test_losses_equal_one_process(flags: list[str]):
    """An encoder's and a decoder's stage, each of two tensor-parallel ranks; tolerances as in test_training."""
    one = pretrain(flags, Layout(), script=SCRIPT)
    many = pretrain([*flags, *SPLIT], Layout(tp=2, pp=2, sp=True), script=SCRIPT)
    assert len(one.training) == 4
    for a, b in zip(many.training, one.training, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=2e-4) and a.grad_norm == pytest.approx(b.grad_norm, rel=5e-3)
    assert many.validation[-1].loss == pytest.approx(one.validation[-1].loss, rel=2e-4)


@pytest.mark.full
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(flags: list[str], tmp_path: Path):
    """In bfloat16, an encoder's and a decoder's stage: the printed lines, and the last checkpoint to the last byte."""
    layout, words = Layout(pp=2), [*flags, *SPLIT, "--bf16"]
    whole = pretrain([*words, "--save", f"{tmp_path}/whole"], layout, script=SCRIPT)
    words += ["--save", f"{tmp_path}/stopped", "--load", f"{tmp_path}/stopped"]
    first = pretrain([*words, "--exit-interval", "2"], layout, script=SCRIPT)
    second = pretrain(words, layout, script=SCRIPT)
    assert len(whole.training) == 4 and first.printed + second.printed == whole.printed
    last = "iter_0000004"
    assert_same_checkpoint(tmp_path / "stopped" / last, tmp_path / "whole" / last)
