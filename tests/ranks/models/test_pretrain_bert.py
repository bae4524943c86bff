"""pretrain_bert.py from a file of sentences to its losses: every layout against one process, with ranks as threads.

Float64, so that a layout may differ from one process by rounding alone. tests/ranks/models/test_bert.py compares gradients and weights.
"""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from local_ranks import run_ranks
from script_run import trainer_of
from sentence_files import write_sentences
from torch.utils.flop_counter import FlopCounterMode

import pretrain_bert
from megatron.core.parallel.mesh import Mesh
from megatron.training.evaluate_window_chosen_by_iteration import evaluate

MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --fp64 --micro-batch-size 2 --lr 1e-2 "
    "--make-vocab-size-divisible-by 8 --device cpu --clip-grad 0.5 --num-workers 0 "
    "--global-batch-size 8 --train-iters 3 --mask-prob 0.3 --short-seq-prob 0.3 --split 8,2,0 --eval-iters 2 "
)
TP, PP, ZERO = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 ", "--use-distributed-optimizer "
SP = TP + "--sequence-parallel "
VPP = PP + "--num-layers-per-virtual-pipeline-stage 1 "
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 1500 "
CP = "--context-parallel-size 2 --cp-comm-type "
LAYOUTS = {
    "tp": ({"tp": 2}, TP),
    "tp4-sp-selective": ({"tp": 4}, "--tensor-model-parallel-size 4 --sequence-parallel --recompute-activations "),
    "vpp-full": ({"pp": 2}, VPP + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "),
    "pp-zb": ({"pp": 2}, PP + "--pipeline-schedule zb-h1 "),
    "dp-overlap": ({"dp": 4}, OVERLAP),
    "dp-zero1": ({"dp": 2}, ZERO + OVERLAP + "--overlap-param-gather "),
    "tp-sp-pp-dp-zero2": ({"tp": 2, "pp": 2, "dp": 2}, SP + PP + "--zero-stage 2 " + OVERLAP),
    "tp-vpp-dp": ({"tp": 2, "pp": 2, "dp": 2}, TP + VPP + OVERLAP),
    "dp-zero3": ({"dp": 2}, "--zero-stage 3 "),
    "cp-p2p": ({"cp": 2}, CP + "p2p "),
    "cp-a2a-tp-sp-pp-dp-zero1": (
        {"tp": 2, "cp": 2, "pp": 2, "dp": 2},
        CP + "a2a " + SP + PP + ZERO + "--recompute-activations ",
    ),
    "cp-all_gather-dp-zero3": ({"cp": 2, "dp": 2}, CP + "all_gather --zero-stage 3 "),
    "cp4-mixed-full": (
        {"cp": 4, "cp_heads": 2, "tp": 2},
        "--context-parallel-size 4 --cp-comm-type a2a+p2p p2p all_gather p2p --hierarchical-context-parallel-sizes 2 2 "
        + TP
        + "--recompute-granularity full --recompute-method uniform ",
    ),
}
HEADS = {"with the order of sentences": "", "words alone": "--bert-no-binary-head "}


@cache
def data() -> str:
    """Flags of a file of 60 documents and its vocabulary. Words follow each other in the order of the alphabet."""
    folder, rng = Path(mkdtemp(prefix="bert-")), np.random.RandomState(0)

    def documents() -> Iterator[tuple[np.ndarray, list[int]]]:
        for _ in range(60):
            lengths = rng.randint(1, 7, rng.randint(1, 9)).tolist()
            yield (5 + rng.randint(30) + np.arange(sum(lengths))) % 39 + 5, lengths

    return " ".join([*write_sentences(folder, documents(), words=30, pieces=9), f"--data-cache-path {folder}/cache "])


def train(mesh: Mesh, flags: str) -> tuple[list, dict[str, float]]:
    """(losses and gradient norm of each step, losses of a validation) of this rank's whole run."""
    with trainer_of(pretrain_bert, mesh, MODEL + data() + flags, predicts=False) as trainer:
        steps = []
        trainer.log.add = lambda losses, is_nan=False, *, skipped=False: steps.append(dict(losses))
        trainer._train()
        validation = evaluate(
            trainer.pipeline,
            partial(trainer._iterators, "valid", trainer.datasets["valid"][0].samples),
            num_microbatches=2 * trainer.pipeline.batch.num_microbatches,
            first_sample=0,
        )
        return steps, validation


@cache
def one_process(head: str) -> tuple[list, dict[str, float]]:
    return run_ranks({}, partial(train, flags=HEADS[head]))[0]


@pytest.mark.full
def test_one_process_reports_what_it_learns():
    steps, validation = one_process("with the order of sentences")
    assert [list(losses) for losses in steps] == [["lm loss", "sop loss"]] * 3
    assert list(validation) == ["lm loss", "sop accuracy", "sop loss"]
    assert steps[0]["lm loss"] == pytest.approx(np.log(46), rel=0.02)
    assert steps[0]["sop loss"] == pytest.approx(np.log(2), rel=0.05)
    assert 0 <= validation["sop accuracy"] <= 1 and (16 * validation["sop accuracy"]).is_integer()


@pytest.mark.full
def test_the_flops_of_the_log_are_those_that_torch_counts():
    """Of a forward, three times. The pooler, which reads one token of a sample, is left out of both."""
    flags = f"{HEADS['words alone']}--log-throughput --attention-backend unfused --make-vocab-size-divisible-by 2 "

    def counts(mesh: Mesh) -> tuple[float, int]:
        with trainer_of(pretrain_bert, mesh, MODEL + data() + flags, predicts=False) as trainer:
            ids = torch.full((1, 16), 7)
            with FlopCounterMode(display=False) as counted, torch.no_grad():
                trainer.model[0].module.eval()(ids, torch.ones_like(ids))
            return trainer.log.device_flops_per_sample, 3 * counted.get_total_flops()

    logged, counted = run_ranks({}, counts)[0]
    assert logged == counted > 0


FEWER = ("tp4-sp-selective", "vpp-full", "tp-sp-pp-dp-zero2")
CASES = [("with the order of sentences", layout) for layout in LAYOUTS] + [("words alone", layout) for layout in FEWER]
FAST = [("with the order of sentences", "tp-sp-pp-dp-zero2")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("head", "layout"), [pytest.param(*case, marks=[pytest.mark.full] * (case not in FAST)) for case in CASES]
)
def test_every_layout_trains_as_one_process(head: str, layout: str):
    """Also with dropout. A step's loss is a mean over microbatches, so all layouts have microbatches of 2 samples."""
    expected_steps, expected = one_process(head)
    sizes, flags = LAYOUTS[layout]
    steps, validation = run_ranks(sizes, partial(train, flags=HEADS[head] + flags))[-1]
    for got, losses in zip(steps, expected_steps, strict=True):
        assert got == pytest.approx(losses, rel=1e-9)
    assert validation == pytest.approx(expected, rel=1e-9)
