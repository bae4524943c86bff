"""pretrain_t5.py over real processes: from a file of sentences to one process's losses. Processes, because gloo carries the tensors."""

from pathlib import Path
from shlex import split

import numpy as np
import pytest
from processes import ROOT, Layout, pretrain
from sentence_files import write_sentences

MODEL = split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --decoder-seq-length 16 --vocab-extra-ids 10 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 5e-3 --log-interval 1 --eval-iters 1 --eval-interval 4 "
    "--split 80,20,0 --device cpu"
)


@pytest.mark.full
def test_losses_equal_one_process(tmp_path: Path):
    """An encoder's and a decoder's stage, each of two tensor-parallel ranks; tolerances as in test_training."""
    draw = np.random.RandomState(0)
    lengths = [draw.randint(2, 9, 6).tolist() for _ in range(100)]
    documents = [(5 + np.arange(sum(one)) % 50, one) for one in lengths]
    flags = [*MODEL, *write_sentences(tmp_path, documents, words=60, pieces=20)]
    script = str(ROOT / "pretrain_t5.py")
    one = pretrain(flags, Layout(), script=script)
    split_in_two = [*flags, "--pipeline-model-parallel-split-rank", "1"]
    many = pretrain(split_in_two, Layout(tp=2, pp=2, sp=True), script=script)
    assert len(one.training) == 4
    for a, b in zip(many.training, one.training, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=2e-4) and a.grad_norm == pytest.approx(b.grad_norm, rel=5e-3)
    assert many.validation[-1].loss == pytest.approx(one.validation[-1].loss, rel=2e-4)
