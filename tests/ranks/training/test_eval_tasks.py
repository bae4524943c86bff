"""--eval-tasks: in any layout the metrics of one plain forward a continuation, of the weights of the moment."""

import json
import math
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from local_ranks import run_ranks
from script_run import trainer_of

import pretrain_gpt
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.mesh import Mesh

MODEL = (
    "--mock-data --num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --fp64 --micro-batch-size 2 "
    "--make-vocab-size-divisible-by 8 --device cpu --num-workers 0 --global-batch-size 24 --train-iters 4 --lr 1e-2 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --eval-interval 3 --eval-iters 1 "
)
TP, PP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
LAYOUTS = {
    "dp2-vpp": ({"dp": 2, "pp": 2}, PP + "--num-layers-per-virtual-pipeline-stage 1 "),
    "tp2-sp-cp2": ({"tp": 2, "cp": 2}, TP + "--sequence-parallel --context-parallel-size 2 "),
    "dp3-zero3": ({"dp": 3}, "--zero-stage 3 "),
    "tp2-pp2-dp2": ({"dp": 2, "tp": 2, "pp": 2}, TP + PP),
}
QUESTIONS = [
    {"context": "1 2 3", "choices": ["4 5", "6", "7 8 9"], "gold": 1},
    {"context": "9 8 7 6 5 4 3 2", "choices": ["1 2 3", "4"], "gold": 0},  # longer than 8 tokens
    {"context": "", "choices": ["11", "12 13"], "gold": 1},
]
TEXTS = ["1 2 3 4 5 6 7 8 9 10 11 12 13", "14"]


@cache
def files() -> str:
    folder = Path(mkdtemp(prefix="tasks-"))
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return f"--eval-tasks {folder}/questions.jsonl {folder}/texts.jsonl "


def said(mesh: Mesh, flags: str) -> dict[str, dict[str, float]]:
    with trainer_of(pretrain_gpt, mesh, MODEL + files() + flags, predicts=False) as trainer:
        reported = {}
        trainer.watch.report_validation = lambda name, metrics, *, at_end: reported.update({name: metrics})
        trainer._evaluate_tasks(at_end=False)
        return reported


def one_by_one(mesh: Mesh) -> dict[str, dict[str, float]]:
    """The metrics by their formulas, each continuation alone through the model; 60 ends documents."""
    with trainer_of(pretrain_gpt, mesh, MODEL, predicts=False) as trainer:
        (model,) = trainer.model
        model.eval()

        def logprob(context: list[int], continuation: list[int]) -> float:
            ids = (context + continuation)[-9:]
            tokens = torch.tensor([ids[:-1]])
            with torch.no_grad():
                logits = model(tokens, torch.arange(len(ids) - 1)[None], None)[0, :, :61]
            rows = logits.log_softmax(-1)[-len(continuation) :]
            return sum(float(row[id]) for row, id in zip(rows, continuation))

        right = {"acc": 0, "acc_norm": 0, "acc_bytes": 0}
        for one in QUESTIONS:
            context = [int(word) for word in one["context"].split()] or [60]
            sums = [logprob(context, [int(word) for word in choice.split()]) for choice in one["choices"]]
            norms = [x / len(choice) for x, choice in zip(sums, one["choices"])]
            right["acc"] += sums.index(max(sums)) == one["gold"]
            for name in ("acc_norm", "acc_bytes"):  # digits are one byte each
                right[name] += norms.index(max(norms)) == one["gold"]
        ids = [[int(word) for word in text.split()] for text in TEXTS]
        total = logprob([60], ids[0][:8]) + logprob(ids[0][4:8], ids[0][8:]) + logprob([60], ids[1])
        loss, num_bytes = -total / 14, sum(map(len, TEXTS))
        return {
            "questions": {name: count / 3 for name, count in right.items()},
            "texts": {
                "loss": loss,
                "perplexity": math.exp(loss),
                "word_perplexity": math.exp(loss),
                "byte_perplexity": math.exp(-total / num_bytes),
                "bits_per_byte": -total / num_bytes / math.log(2),
            },
        }


@cache
def expected() -> dict[str, dict[str, float]]:
    return run_ranks({}, one_by_one)[0]


def check(reported: dict[str, dict[str, float]]) -> None:
    assert reported.keys() == expected().keys()
    for name, metrics in expected().items():
        assert reported[name] == pytest.approx(metrics, rel=1e-10)


def test_one_process_has_the_formulas():
    check(run_ranks({}, partial(said, flags=""))[0])


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=[pytest.mark.sweep] if one == "tp2-pp2-dp2" else []) for one in LAYOUTS]
)
def test_every_layout_has_those_of_one_process(layout: str):
    sizes, flags = LAYOUTS[layout]
    reports = [report for report in run_ranks(sizes, partial(said, flags=flags)) if report]
    assert reports
    for report in reports:
        check(report)


def test_what_cannot_be_evaluated_is_refused_before_the_first_step(tmp_path: Path):
    def refused(mesh: Mesh, script=pretrain_gpt, flags: str = MODEL) -> str:
        with pytest.raises(ConfigError) as error, trainer_of(script, mesh, flags, predicts=False):
            pass
        return str(error.value)

    assert "no such file" in run_ranks({}, partial(refused, flags=f"{MODEL} --eval-tasks {tmp_path}/none.jsonl"))[0]
    (tmp_path / "ids.jsonl").write_text('{"text": "5 61"}\n')
    assert "61" in run_ranks({}, partial(refused, flags=f"{MODEL} --eval-tasks {tmp_path}/ids.jsonl"))[0]
