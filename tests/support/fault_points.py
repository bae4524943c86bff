"""Every file call of every save of small runs killed at, failed or cut short: the same command goes on, to the same bits.

    python tests/support/fault_points.py results.jsonl --limit-minutes 3            goes on where it stopped
    python tests/support/fault_points.py results.jsonl --write docs/reliability.md
    python tests/support/fault_points.py results.jsonl --scenario "EP 4, ZeRO 1" --write docs/reliability.md     its own table

A run's ranks are threads (`stopped_runs.job`), and its file calls go through a double (`failing_files`). A case is a scenario, a call
of it, and what happens there:

    killed         before the call, all ranks (the machine goes down); `killed in`: half of a write has happened
    killed alone   only the rank that makes the call; the others hear of it, and end as after any error
    ENOSPC, EIO    the call fails; `in`: half of a write has happened
    short          a write or a read does half, and says so

Then the run is started again by the same command. It must not go back behind a checkpoint that was said to be saved, print the
lines of the run that nothing happened to, end in its last checkpoint to the bit, and leave no other name in the folder. (Only an older
checkpoint that --keep-checkpoints was about to remove after the last save stays.)
"""

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from case_runs import campaign_parser, end_campaign, read_results, sweep
from failing_files import FileCall, Killed, counted, failing
from stopped_runs import announced, differing, differs_in, ended, job, lines

BOTH = "--train-iters 4 --save-interval 2 --save {root} --load {root} "
SIX = "--train-iters 6 --save-interval 2 --save {root} --load {root} "


@dataclass(frozen=True)
class Scenario:
    """flags: {root} is the folder of the run. again: the folder has the checkpoints of another run when the run starts."""

    flags: str
    sizes: tuple[tuple[str, int], ...]
    again: bool = False

    @property
    def ranks(self) -> int:
        return prod(size for axis, size in self.sizes if axis != "ep")  # whose ranks those of dp are


# A run that loads from one folder and saves over the checkpoints of another run in a second one saves iterations again.
AGAIN = "--train-iters 4 --save-interval 2 --save {root} --load {root}/../first --global-batch-size 2"
COPIES = "--train-iters 5 --save-interval 3 --save {root} --load {root} --non-persistent-save-interval 1 --non-persistent-ckpt-type "
SHARDED = "--use-distributed-optimizer --global-batch-size 2 "
EXPERTS = (
    "--num-experts 8 --ffn-hidden-size 8 --moe-ffn-hidden-size 4 --swiglu --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 "
)
SCENARIOS = {
    "ZeRO 1, bf16": Scenario(SIX + "--use-distributed-optimizer --bf16 --global-batch-size 2", (("dp", 2),)),
    "TP 2": Scenario(BOTH + "--tensor-model-parallel-size 2", (("tp", 2),)),
    "again, PP 2": Scenario(AGAIN + " --num-layers 2 --pipeline-model-parallel-size 2", (("pp", 2),), again=True),
    "ZeRO 1, async": Scenario(SIX + "--use-distributed-optimizer --async-save --global-batch-size 2", (("dp", 2),)),
    "CP 2, ZeRO 1": Scenario(BOTH + "--use-distributed-optimizer --context-parallel-size 2", (("cp", 2),)),
    "local copies, ZeRO 1": Scenario(
        COPIES + "local --non-persistent-local-ckpt-dir {root}/../disk " + SHARDED, (("dp", 2),)
    ),
    "global copies, TP 2": Scenario(COPIES + "global --tensor-model-parallel-size 2", (("tp", 2),)),
    "ZeRO 3, one kept": Scenario(SIX + "--zero-stage 3 --keep-checkpoints 1 --global-batch-size 2", (("dp", 2),)),
    "EP 4, ZeRO 1": Scenario(
        BOTH + EXPERTS + "--use-distributed-optimizer --global-batch-size 4", (("dp", 4), ("ep", 4))
    ),
}
_PROBE = re.compile(r"iter_0000000\.[0-9]+\.partial")  # by which a start finds that it may write; the number is drawn
_FOLDER = re.compile(r"^tmp[a-z0-9_]{8}$")  # in which the root is; drawn
ON_WRITES = ("killed in", "ENOSPC in", "EIO in", "short")
ON_CHANGES = ("killed", "killed alone", "ENOSPC", "EIO")
ON_READS = ("EIO",)


@dataclass(frozen=True)
class Point:
    """A call is known by its rank, kind and file, and by how many calls like it went before, whatever other ranks do meanwhile."""

    scenario: str
    call: FileCall
    before: int
    how: str

    def __str__(self) -> str:
        return f"{self.scenario} / rank {self.call.rank}: {self.call.kind} {self.call.name}, {self.before} / {self.how}"


def known(call: FileCall) -> FileCall:
    """The call, with a name that is the same wherever the folder lies."""
    call = call._replace(name=_PROBE.sub("iter_0000000.N.partial", call.name))
    is_of_root = not call.name.partition(" ")[2].startswith("iter_") and not call.name.startswith("iter_")
    return call._replace(name=_FOLDER.sub("folder of the root", call.name.rpartition("/")[2])) if is_of_root else call


@dataclass(frozen=True)
class Whole:
    """The run that nothing happens to."""

    calls: tuple[FileCall, ...]
    lines: dict[str, str]
    ended: dict[str, object]


def run(scenario: Scenario, root: Path) -> str:
    return job(scenario.flags.format(root=root), **dict(scenario.sizes))


@contextmanager
def prepared(name: str) -> Iterator[Path]:
    """The folder in which a run of the scenario is to start."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_before(name).name, folder, dirs_exist_ok=True)
        yield Path(folder, "root")


@cache
def _before(name: str) -> tempfile.TemporaryDirectory:
    """What lies there when a run of the scenario starts."""
    folder, scenario = tempfile.TemporaryDirectory(), SCENARIOS[name]
    if scenario.again:
        flags = scenario.flags.replace("{root}/../first", "{root}")
        job(flags.format(root=f"{folder.name}/first") + " --exit-interval 2", **dict(scenario.sizes))
        job(flags.format(root=f"{folder.name}/root") + " --seed 7", **dict(scenario.sizes))
    return folder


@cache
def whole(name: str) -> Whole:
    with prepared(name) as root:
        with counted() as calls:
            said = run(SCENARIOS[name], root)
        return Whole(tuple(map(known, calls.made)), lines(said), ended(root))


def points(names: tuple[str, ...] = tuple(SCENARIOS)) -> Iterator[Point]:
    """Every call of the scenarios with everything that may happen to it."""
    for name in names:
        before = Counter()
        for call in whole(name).calls:
            hows = ON_CHANGES if call.changes_disk else ON_READS
            hows += ON_WRITES if call.kind == "write" else ("short",) if call.kind == "read_into" else ()
            yield from (Point(name, call, before[call], how) for how in hows)
            before[call] += 1


def in_order(some: Iterator[Point]) -> list[Point]:
    """Shuffled, so that whatever part has run is a fair sample; the first call of each kind on each file before its others."""
    found = list(some)
    Random(0).shuffle(found)
    return sorted(found, key=lambda point: point.before > 0)


@contextmanager
def unsynced() -> Iterator[None]:
    """No case cuts the power, and waiting for the disk takes most of the time of a small save."""
    before, os.fsync = os.fsync, lambda handle: None
    try:
        yield
    finally:
        os.fsync = before


def outcome(point: Point) -> dict[str, object]:
    """How the case ended; AssertionError says what is wrong."""
    scenario, expected = SCENARIOS[point.scenario], whole(point.scenario)
    how, _, where = point.how.partition(" ")
    alone = where == "alone"
    with prepared(point.scenario) as root, unsynced():
        only = lambda call: known(call) == point.call  # noqa: E731
        with failing(point.before + 1, how if alone else point.how, alone=alone, only=only) as calls:
            try:
                said, end = run(scenario, root), "went on"
            except RuntimeError as error:
                said, end = error.said, "killed" if isinstance(error.__cause__, Killed) else "failed"
        assert calls.hit is not None, "the call was not made"
        assert end in {"killed": ("killed", "failed"), "short": ("went on",)}.get(how, ("failed", "went on")), end
        saved = announced(said)
        again = run(scenario, root)
        both, last = lines(said) | lines(again), ended(root)
    began = min(map(int, lines(again)), default=len(expected.lines) + 1) - 1
    assert scenario.again or began >= saved, f"iteration {saved} was saved, and the next run began after {began}"
    assert not (differ := differing(both, expected.lines)), f"other lines: {differ}"
    wrong = differs_in(last, expected.ended, may_keep_more="kept" in point.scenario)
    assert not wrong, f"not as expected: {wrong}"
    return {"end": end, "began": began}


def run_point(point: Point) -> dict[str, object]:
    result = {"case": str(point), "scenario": point.scenario, "how": point.how, "call": point.call}
    try:
        return result | {"ok": True} | outcome(point)
    except Exception as error:
        return result | {"ok": False, "where": f"{type(error).__name__}: {error}"[:600], "worst": None}


# ---------------------------------------------------------------- report


def table(results: list[dict]) -> str:
    hows = ("killed", "killed in", "killed alone", "ENOSPC", "ENOSPC in", "EIO", "EIO in", "short")
    counts = Counter((result["call"][1], result["how"]) for result in results)
    kinds = dict.fromkeys(kind for kind, _ in counts)
    failed = sum(not result["ok"] for result in results)
    rows = [f"| {kind} | " + " | ".join(str(counts[kind, how] or "") for how in hows) + " |" for kind in kinds]
    return "\n".join(
        [
            f"{len(results):,} points of {len({r['scenario'] for r in results})} runs; {failed} did not resume to the same bits. "
            f"Points per call and fault:",
            "",
            "| call | " + " | ".join(hows) + " |",
            "|---|" + "---|" * len(hows),
            *rows,
        ]
    )


def main() -> int:
    parser = campaign_parser(__doc__)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only this one; may be repeated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.write is None:
        cases = in_order(points(tuple(given.scenario or SCENARIOS)))
        sweep(cases, len(cases), [given.results], 60 * given.limit_minutes, run_point)
    results = [r for r in read_results(given.results).values() if r["scenario"] in (given.scenario or SCENARIOS)]
    part = " of ".join(["fault points", *(given.scenario or ())])
    return end_campaign(results, given.write, part, table)


if __name__ == "__main__":
    sys.exit(main())
