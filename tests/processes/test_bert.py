"""pretrain_bert.py over real processes: from a file of sentences, stopped and gone on. Processes, because they start anew."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from shlex import split

import numpy as np
import pytest
from process_runs import assert_same_checkpoint
from processes import PRETRAIN_BERT, ROOT, Layout, pretrain
from sentence_files import write_sentences

MODEL = split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 6 --lr 5e-3 --log-interval 3 --eval-interval 4 --eval-iters 2 --split 80,20,0 --device cpu"
)
FOUR = Layout(tp=2, pp=2, sp=True)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of 200 documents and their vocabulary."""
    folder = tmp_path_factory.mktemp("sentences")
    rng = np.random.RandomState(0)

    def documents() -> Iterator[tuple[np.ndarray, list[int]]]:
        for _ in range(200):
            lengths = rng.randint(2, 12, rng.randint(1, 9)).tolist()
            yield rng.randint(60) // 2 + 5 + np.arange(sum(lengths)) // 2 % 50, lengths

    return write_sentences(folder, documents(), words=60, pieces=20)


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(pp=2), FOUR], ids=str)
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(layout: Layout, sentences, tmp_path: Path):
    """Every printed digit of both losses, and the last checkpoint to the last byte."""
    flags = [*MODEL, *sentences, "--bf16"]
    whole = pretrain([*flags, "--save", f"{tmp_path}/whole"], layout, script=PRETRAIN_BERT)
    both = [*flags, "--save", f"{tmp_path}/two", "--load", f"{tmp_path}/two"]
    first = pretrain([*both, "--exit-interval", "2"], layout, script=PRETRAIN_BERT)
    second = pretrain(both, layout, script=PRETRAIN_BERT)
    assert [line.iteration for line in whole.training] == [3, 6]
    assert all(" | sop loss: " in line.text for line in whole.training)
    assert all(" | sop accuracy value: " in line.text for line in whole.validation) and len(whole.validation) == 2
    assert first.printed + second.printed == whole.printed
    assert_same_checkpoint(tmp_path / "two" / "iter_0000006", tmp_path / "whole" / "iter_0000006")


@pytest.mark.full
@pytest.mark.parametrize("layout", [FOUR, Layout(pp=2, v=2, dp=2), Layout(dp=4)], ids=str)
def test_losses_equal_one_process(layout: Layout, sentences):
    """Tolerances as in test_training. Layers for two chunks on each of two ranks."""
    flags = [*MODEL, *sentences, "--num-layers", "4", "--log-interval", "1"]
    one, many = (pretrain(flags, where, script=PRETRAIN_BERT) for where in (Layout(), layout))
    for a, b in zip(many.training, one.training, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=2e-4) and a.grad_norm == pytest.approx(b.grad_norm, rel=5e-3)
    assert many.validation[-1].loss == pytest.approx(one.validation[-1].loss, rel=2e-4)


@pytest.mark.full
def test_every_command_of_the_page_runs(tmp_path, monkeypatch):
    """docs/bert.md in its order, in an empty folder, but for steps and ranks."""
    page = (ROOT / "docs" / "bert.md").read_text()
    blocks = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ")
    monkeypatch.chdir(tmp_path)
    tools = [split(line)[1:] for line in blocks.splitlines()[:3]]
    one, _, four, _ = blocks.splitlines()[3:]  # made-up data; a published encoder: tests/real/test_encoder.py
    for tool, *flags in tools:
        assert importlib.import_module(tool.removesuffix(".py").replace("/", ".")).main(flags) == 0
    folder = [
        f"{tmp_path}/{word}" if word in ("vocab.txt", "data/docs_text_sentence") else word for word in split(one)[2:]
    ]
    short = shlex.split("--train-iters 4 --lr-warmup-iters 1 --eval-interval 0 --eval-iters 1 --log-interval 2")
    done = pretrain([*folder, *short, "--device", "cpu"], script=PRETRAIN_BERT)
    assert [line.iteration for line in done.training] == [2, 4] and len(done.validation) == 1
    assert four.startswith("torchrun --nproc-per-node 4 pretrain_bert.py ")
