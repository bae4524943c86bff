"""Megatron-LM's own pretraining scripts, not one line changed, over our `megatron`: the losses of one process in every layout.

    MEGATRON_LM_PATH=CLONE python -m pytest tests/compat/test_megatron_scripts.py

CLONE: a git clone of NVIDIA/Megatron-LM with its tags. A script is taken from a tag into a folder of its own; nothing else of
the clone is read.
"""

import os
import subprocess
from pathlib import Path
from shlex import split

import numpy as np
import pytest
from processes import PRETRAIN_BERT, PRETRAIN_GPT, ROOT, Layout, Outcome, run
from sentence_files import write_sentences
from token_files import NULL, write

CLONE = os.environ.get("MEGATRON_LM_PATH")
pytestmark = pytest.mark.skipif(
    CLONE is None or not Path(CLONE).is_dir(),
    reason="MEGATRON_LM_PATH names no clone of Megatron-LM; see the head of this file",
)
# The flags of their example scripts, at small sizes and without dropout, whose masks are not Megatron's.
MODEL = split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 4 "
    "--global-batch-size 8 --train-iters 20 --lr-decay-iters 20 --lr-decay-style cosine --lr 5e-3 --min-lr 1e-5 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --split 949,50,1 --log-interval 1 --eval-interval 1000 "
    "--eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --distributed-backend gloo"
)
OURS = {"gpt": PRETRAIN_GPT, "bert": PRETRAIN_BERT}
TAGS = {"v2.5": [], "23.04": [], "core_v0.5.0": [], "core_v0.5.0 mcore": ["--use-mcore-models"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Flags of a token file for a GPT, and of sentences for a BERT."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.RandomState(0)
    counts = [[((start + np.arange(300)) % 90).tolist()] for start in range(60)]
    lengths = [rng.randint(2, 12, rng.randint(2, 9)).tolist() for _ in range(200)]
    documents = ((rng.randint(60) // 2 + 5 + np.arange(sum(of)) // 2 % 50, of) for of in lengths)
    bert = write_sentences(folder, documents, words=60, pieces=20)
    return {"gpt": ["--data-path", write(folder / "gpt", counts), *NULL], "bert": bert}


def trained(script: str, flags: list[str], layout: Layout, *more: str) -> Outcome:
    return run([script, *MODEL, *flags, *layout.flags, *more], layout.ranks, timeout=300).succeeded()


@pytest.mark.full
@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("tag", TAGS)
def test_an_unchanged_script_has_the_losses_of_one_process_and_of_our_script(
    tag: str, kind: str, data, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script, flags = tmp_path / f"pretrain_{kind}.py", [*data[kind], *TAGS[tag]]
    show = ["git", "-C", CLONE, "show", f"{tag.split()[0]}:{script.name}"]
    script.write_bytes(subprocess.run(show, capture_output=True, check=True).stdout)
    zero = [] if tag == "v2.5" else ["--use-distributed-optimizer"]
    one = trained(str(script), flags, Layout())
    losses = [line.loss for line in one.training]
    assert len(losses) == 20 and losses[-1] < losses[0]
    for layout, more in ((Layout(tp=2), []), (Layout(pp=2), []), (Layout(dp=2), zero)):
        got = [line.loss for line in trained(str(script), flags, layout, *more).training]
        assert got == pytest.approx(losses, rel=2e-4), layout
    once = ("--global-batch-size", "4")  # a log line of ours weighs microbatches by their masked words
    ours, theirs = (
        [line.loss for line in trained(one, flags, Layout(), *once).training] for one in (OURS[kind], str(script))
    )
    assert theirs[:3] == pytest.approx(ours[:3], rel=2e-4)
    half = trained(str(script), flags, Layout(), "--fp16", "--initial-loss-scale", "65536").training
    assert len(half) == 20 and half[-1].loss == pytest.approx(losses[-1], rel=0.1)
