"""A stop after every iteration of a run, and a resume, in every pair of features: the bits of the run that did not stop.

    python tests/campaigns/stop_matrix.py results.jsonl --limit-minutes 3             goes on where it stopped
    python tests/campaigns/stop_matrix.py results.jsonl --write docs/reliability.md

A case is a choice from each dimension below; the cases cover every pair of choices that is not refused. Each is a run of 12 steps of
pretrain_gpt.py with ranks as threads, once without a stop, once with a save after each step, and resumed from each of the saves: the
last checkpoints (weights, masters, moments, loss scale, position) and all printed lines are the same to the bit.
"""

import contextlib
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from case_runs import campaign_parser, end_campaign, read_results, sweep
from script_run import settings_of
from stopped_runs import TINY, differing, differs_in, ended, job, lines
from token_files import write
from zero_matrix import several_slices

import pretrain_gpt
from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.arguments.validation import check

STEPS = 12
_PP = "--num-layers 4 --pipeline-model-parallel-size 2"
DIMENSIONS = {
    "precision": {
        "float32": "",
        "bfloat16": "--bf16",
        "float16": "--fp16 --initial-loss-scale 2097152 --hysteresis 1 --loss-scale-window 3",
    },
    "stage": {"0": "", "1": "--zero-stage 1", "2": "--zero-stage 2", "3": "--zero-stage 3"},
    "overlap": {
        "none": "",
        "gradients": "--overlap-grad-reduce --ddp-bucket-size 600",
        "both": "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 600",
    },
    "offload": {"none": "", "host": "--optimizer-cpu-offload", "file": "--offload-dir {folder}/offload"},
    "recompute": {
        "none": "",
        "selective": "--recompute-granularity selective",
        "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    },
    "schedule": {
        "one stage": "--num-layers 2",
        "1f1b": _PP,
        "interleaved": f"{_PP} --num-virtual-stages-per-pipeline-rank 2",
        "zb-h1": f"{_PP} --pipeline-schedule zb-h1",
        "zb-v": f"{_PP} --pipeline-schedule zb-v --untie-embeddings-and-output-weights",
    },
    "context": {
        "none": "",
        "ring": "--context-parallel-size 2",
        "gathered": "--context-parallel-size 2 --cp-comm-type all_gather",
        "heads": "--context-parallel-size 2 --cp-comm-type a2a",
    },
    "dropout": {"none": "--hidden-dropout 0 --attention-dropout 0", "0.1": ""},
    "batch": {
        "constant": f"--global-batch-size 4 --train-iters {STEPS}",
        "ramp-up": "--rampup-batch-size 4 4 16 --global-batch-size 8 --train-samples 80",
    },
    "data": {
        "made up": "--mock-data",
        "one file": "--data-path {data}/a --split 1,0,0",
        "blend": "--data-path 0.6 {data}/a 0.3 {data}/b 0.1 {data}/c --split 1,0,0",
    },
    "save": {"synchronous": "", "asynchronous": "--async-save"},
}
Choices = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """One choice of each dimension, in the order of DIMENSIONS."""

    choices: Choices

    def __str__(self) -> str:
        return ", ".join(self.choices)

    @property
    def pairs(self) -> frozenset:
        return frozenset(combinations(enumerate(self.choices), 2))

    @property
    def sizes(self) -> dict[str, int]:
        chosen = dict(zip(DIMENSIONS, self.choices))
        return {
            "dp": 2,
            "pp": 1 if chosen["schedule"] == "one stage" else 2,
            "cp": 1 if chosen["context"] == "none" else 2,
        }

    def flags(self, folder: str) -> str:
        """folder: of its offloaded state."""
        chosen = (of[choice] for of, choice in zip(DIMENSIONS.values(), self.choices))
        return " ".join(chosen).format(folder=folder, data=data_folder()) + " --lr 1e-2 --lr-decay-style cosine"

    @property
    def is_refused(self) -> bool:
        try:
            config, _ = settings_of(pretrain_gpt, words(self.flags("/tmp")) + " --save /tmp/any")
            check(config, math.prod(self.sizes.values()))
        except ConfigError:
            return True
        return False


def words(flags: str) -> str:
    """TINY, whose data, batch and rate a case says itself."""
    return TINY.replace("--mock-data ", "").replace("--lr-decay-iters 50 ", "") + flags


@cache
def data_folder() -> str:
    """Three token files, there until the process ends."""
    folder, draw = tempfile.TemporaryDirectory(), random.Random(0)
    data_folder.kept = folder
    for name, documents in (("a", 20), ("b", 12), ("c", 5)):
        write(f"{folder.name}/{name}", [[[draw.randrange(30) for _ in range(40)]] for _ in range(documents)])
    return folder.name


# ---------------------------------------------------------------- which


@cache
def covering_cases(seed: int = 0) -> tuple[Case, ...]:
    """Cases in which every pair of choices occurs that any case has which is not refused."""
    draw, found, refused = random.Random(seed), [], set()
    names = [list(of) for of in DIMENSIONS.values()]
    missing = {
        frozenset(((i, a), (j, b)))
        for (i, one), (j, other) in combinations(enumerate(names), 2)
        for a in one
        for b in other
    }
    while missing:
        pair = min(missing, key=lambda pair: sorted(pair))
        tried = [_with(pair, names, draw) for _ in range(60)]
        tried.sort(key=lambda case: -len({frozenset(p) for p in case.pairs} & missing))
        best = next((case for case in tried if not case.is_refused), None)
        if best is None:
            refused.add(pair)
            missing.discard(pair)
            continue
        found.append(best)
        missing -= {frozenset(p) for p in best.pairs}
    covering_cases.refused = [tuple(choice for _, choice in sorted(pair)) for pair in refused]
    return tuple(found)


def _with(pair: frozenset, names: list[list[str]], draw: random.Random) -> Case:
    given = dict(pair)
    return Case(tuple(given.get(i, draw.choice(choices)) for i, choices in enumerate(names)))


# ---------------------------------------------------------------- one


def outcome(case: Case, stops: Iterator[int] = range(1, STEPS)) -> None:
    """AssertionError says after which stop, and what differs."""
    with tempfile.TemporaryDirectory() as folder, several_slices():

        def run(name: str, flags: str) -> tuple[dict[str, str], dict[str, object]]:
            said = job(words(f"{case.flags(folder)} --save {folder}/{name} {flags}"), tiny="", **case.sizes)
            last = ended(Path(folder, name))
            del last["names"]
            return lines(said), last | {"names": []}

        expected, whole = run("whole", "")
        assert len(expected) == STEPS, expected
        every, last = run("every", "--save-interval 1")
        assert not (wrong := differing(every, expected) or differs_in(last, whole)), f"saves change it: {wrong}"
        for stop in stops:
            again, last = run(f"after{stop}", f"--load {folder}/every --ckpt-step {stop}")
            assert len(again) == STEPS - stop, f"after {stop}: {sorted(again)}"
            wrong = differing(dict(list(expected.items())[:stop]) | again, expected) or differs_in(last, whole)
            assert not wrong, f"after {stop}: {wrong}"


def run_case(case: Case) -> dict:
    result = {"case": str(case), "choices": dict(zip(DIMENSIONS, case.choices))}
    try:
        with contextlib.redirect_stderr(None):
            outcome(case)
        return result | {"ok": True}
    except Exception as error:
        return result | {"ok": False, "where": f"{type(error).__name__}: {error}"[:1500], "worst": None}


def table(results: list[dict]) -> str:
    names = {result["case"] for result in results}
    cases = covering_cases()
    done = sum(str(case) in names for case in cases)
    failed = sum(not result["ok"] for result in results)
    refused = ", ".join(sorted(" with ".join(pair) for pair in covering_cases.refused))
    rows = [f"| {name} | {', '.join(choices)} |" for name, choices in DIMENSIONS.items()]
    return "\n".join(
        [
            f"{done} of {len(cases)} cases, each with {STEPS - 1} stops; {failed} differ. The {len(cases)} cases cover every pair of these choices,",
            f"except the pairs that are refused ({refused}).",
            "",
            "| feature | choices |",
            "|---|---|",
            *rows,
        ]
    )


def main() -> int:
    parser = campaign_parser(__doc__)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.write is None:
        sweep(covering_cases(), len(covering_cases()), [given.results], 60 * given.limit_minutes, run_case)
    return end_campaign(list(read_results(given.results).values()), given.write, "stops", table)


if __name__ == "__main__":
    sys.exit(main())
