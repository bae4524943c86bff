"""Kills one rank of small jobs, at instants and in layouts drawn by seed, and measures how long the others live on.

    python tests/campaigns/kill_campaign.py results.jsonl --count 200 --seed 1
    python tests/campaigns/kill_campaign.py results.jsonl --write docs/testing.md

Goes on where it stopped. A job is killed at a place (importing, meeting, making groups, ..., leaving: the marks of
gloo/marked_script.py) that its victim has come to, and some milliseconds later. How a case ended is in `results.jsonl`: where the
victim was by then, seconds from its death to the end of each survivor, whether a survivor named the victim.

A rank that dies before it has opened its line to rank 0 is not known to have started: without a launcher that notices, the others
say whom they wait for until --distributed-timeout-minutes. Such cases are counted apart. So is a survivor that comes only when the
others have left, and finds nobody.
"""

import itertools
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shlex import split

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

import processes
from case_runs import campaign_parser, end_campaign, read_results, sweep
from processes import Job, free_port

SCRIPT = str(Path(__file__).parents[1] / "processes" / "marked_script.py")
LIMIT = 15.0  # seconds in which every survivor is to end
PATIENCE = 100.0  # seconds until a case is given up; more than --distributed-timeout-minutes 1

MODEL = split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --make-vocab-size-divisible-by 16 --device cpu "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --lr 1e-3 --train-iters 16 --micro-batch-size 1 "
    "--global-batch-size 12 --log-interval 1 --eval-interval 3 --eval-iters 2 --save-interval 3 --distributed-timeout-minutes 1"
)
TP, PP, ZERO = (
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--zero-stage 3 --overlap-grad-reduce --overlap-param-gather",
)

# kind -> (how many of 20 cases, (ranks, flags) of its layouts)
KINDS = {
    "ZeRO 3, overlap": (
        7,
        [*((ranks, ZERO) for ranks in (2, 3, 4))]
        + [(4, f"{ZERO} {more}") for more in (TP, PP, "--num-distributed-optimizer-instances 2")],
    ),
    "PP 2": (
        5,
        [
            (2, PP),
            (4, PP),
            (4, f"{PP} {TP} --sequence-parallel"),
            (2, f"{PP} --num-virtual-stages-per-pipeline-rank 2"),
        ],
    ),
    "TP 2": (3, [(2, TP), (4, TP), (2, f"{TP} --sequence-parallel")]),
    "DP": (3, [(2, ""), (3, ""), (4, "--use-distributed-optimizer --overlap-grad-reduce")]),
    "own process group": (2, [(2, f"--own-group {TP}"), (4, f"--own-group {PP} {TP}"), (3, f"--own-group {ZERO}")]),
}
# place -> how many of 31 cases
_SHARES = (
    "importing 1, settings 1, opening its line 1, meeting 4, connecting 3, agreeing 2, making groups 3, "
    "initialising 1, building 2, loading 2, training 5, saving 3, evaluating 2, leaving 1"
)
PLACES = {name: int(cases) for name, cases in (share.rsplit(" ", 1) for share in _SHARES.split(", "))}
_RUN = (
    "importing, settings, opening its line, meeting, connecting, agreeing, making groups, initialising, "
    "building, loading, making ready, training, evaluating, saving, going on, leaving, left, ending"
)
MARKS = tuple(_RUN.split(", "))  # in the order of a run


@dataclass(frozen=True)
class Case:
    seed: int
    number: int
    kind: str
    ranks: int
    flags: str
    launcher: str
    victim: int
    place: str
    occurrence: int  # how often the victim comes there before it is killed
    delay: float  # seconds
    late: str  # a rank that comes later, and by how many seconds

    def __str__(self) -> str:
        return f"kill {self.number} of seed {self.seed}"


def drawn(seed: int, number: int) -> Case:
    """The same for the same seed and number, whatever else is run."""
    draw = random.Random(f"{seed}/{number}")
    kinds = [kind for kind, (share, _) in KINDS.items() for _ in range(share)]
    kind = kinds[number % len(kinds)]
    ranks, flags = draw.choice(KINDS[kind][1])
    launcher = "torchrun" if draw.random() < 0.15 else "none"
    victim = draw.randrange(ranks)
    place = draw.choices(list(PLACES), list(PLACES.values()))[0]
    if launcher == "none" and place in ("importing", "settings") and number % 4:
        place = "agreeing"  # the others of a rank that has not come wait for a minute: a few such cases are enough
    if kind == "own process group" and place in ("opening its line", "meeting", "connecting", "agreeing"):
        place = "making groups"
    occurrence = draw.randint(1, {"training": 12, "saving": 3, "evaluating": 3}.get(place, 1))
    delay = draw.uniform(0, {"importing": 2.0, "meeting": 1.0, "training": 0.2, "saving": 0.1}.get(place, 0.05))
    others = [rank for rank in range(ranks) if rank != victim]
    late = f"{draw.choice(others)}:{draw.uniform(0.5, 2):.2f}" if place == "meeting" else ""
    return Case(seed, number, kind, ranks, flags, launcher, victim, place, occurrence, delay, late)


# ---------------------------------------------------------------- one case


class Ranks:
    """The processes of a job, by what they have printed: torchrun's ranks are no children of this process."""

    def __init__(self, job: Job):
        self._job = job

    def marks(self) -> dict[int, list[str]]:
        """Rank -> where it has been, in order."""
        marks: dict[int, list[str]] = defaultdict(list)
        for stream in range(len(self._job.processes)):
            for what, rank, _ in re.findall(r"mark ([a-z ]+) rank (\d+) process (\d+)", self._job.stdout(stream)):
                marks[int(rank)].append(what)
        return marks

    def processes(self) -> dict[int, int]:
        """Rank -> number of its process."""
        found: dict[int, int] = {}
        for stream in range(len(self._job.processes)):
            for rank, process in re.findall(r"mark importing rank (\d+) process (\d+)", self._job.stdout(stream)):
                found[int(rank)] = int(process)
        return found


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_case(case: Case, saved: Path) -> dict:
    """Start the job, kill its victim, and watch the others end."""
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        words = [SCRIPT, *MODEL, *case.flags.split(), "--load", str(saved), "--save", folder]
        os.environ["LATE"] = case.late
        if case.launcher == "torchrun":
            launch = [
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(case.ranks),
                "--master-port",
                str(free_port()),
            ]
            job = Job([[*launch, *words]])
        else:
            job = Job([words] * case.ranks)
        with job:
            result = {"case": str(case)} | asdict(case) | _kill_and_watch(case, job)
    lived_on = is_counted(result) and result["seconds"] > LIMIT
    return result | {"ok": not lived_on, "where": f"a rank lived on for {result['seconds']} s" if lived_on else ""}


def _kill_and_watch(case: Case, job: Job) -> dict:
    ranks, began = Ranks(job), time.monotonic()

    def is_there() -> bool:
        return ranks.marks()[case.victim].count(case.place) >= case.occurrence and len(ranks.processes()) == case.ranks

    while not is_there():
        if not job.running() or time.monotonic() - began > PATIENCE:
            return {"outcome": "did not come there", "said": str(job.wait(1) if not job.running() else "")[-1500:]}
        time.sleep(0.002)
    time.sleep(case.delay)
    numbers = ranks.processes()
    others = {rank: number for rank, number in numbers.items() if rank != case.victim}
    if not lives(numbers[case.victim]):
        return {"outcome": "had ended"}
    before = ranks.marks()
    os.kill(numbers[case.victim], signal.SIGKILL)
    died, seconds = time.monotonic(), {}
    while len(seconds) < len(others) and time.monotonic() - died < PATIENCE:
        for rank, number in others.items():
            if rank not in seconds and not lives(number):
                seconds[rank] = round(time.monotonic() - died, 3)
        time.sleep(0.005)
    marks = ranks.marks()[case.victim]
    had_come = {rank for rank in numbers if "meeting" in before[rank] or case.kind == "own process group"}
    told = [rank for rank in others if rank in had_come or case.launcher == "torchrun"]
    late = [rank for rank in others if rank not in told]
    streams = range(len(job.processes))
    said = "".join(job.stderr(stream) for stream in streams)
    return {
        "outcome": "killed",
        "found": marks[-1],
        "had come": case.victim in had_come,
        "seconds": max((seconds.get(rank, PATIENCE) for rank in told), default=0.0),
        "late": max((seconds.get(rank, PATIENCE) for rank in late), default=None),
        "named": len(
            re.findall(rf"stopping, because rank {case.victim} \(on \S+, process {numbers[case.victim]}\)", said)
        ),
        "waited for": len(re.findall(rf"has waited \d+ s for rank {case.victim} to come", said)),
        "said": said[-3000:] if len(seconds) < len(others) or any(seconds[rank] > LIMIT for rank in told) else "",
    }


# ---------------------------------------------------------------- all of them


def is_counted(result: dict) -> bool:
    """Whether others could know of the death: the victim had come, and one of them as well, or torchrun watches."""
    could_know = result["outcome"] == "killed" and (result["had come"] or result["launcher"] == "torchrun")
    return could_know and result["seconds"] > 0


def cases(path: Path, count: int, seed: int) -> Iterator[Case]:
    """Cases until so many kills that others could know of stand in the file of results."""
    for number in itertools.count():
        if sum(map(is_counted, read_results(path).values())) >= count:
            return
        yield drawn(seed, number)


def table(results: list[dict]) -> str:
    counted = [result for result in results if is_counted(result)]

    def rows(name: str, groups: dict[str, list[dict]]) -> list[str]:
        lines = [
            f"| {name} | kills | seconds until the last survivor has ended: median | longest | named by a survivor |",
            "|---|---|---|---|---|",
        ]
        for group, members in groups.items():
            seconds = sorted(member["seconds"] for member in members)
            named = sum(member["named"] > 0 for member in members)
            lines.append(
                f"| {group} | {len(members)} | {seconds[len(seconds) // 2]:.1f} | {seconds[-1]:.1f} | {named} |"
            )
        return lines

    by_kind: dict[str, list[dict]] = defaultdict(list)
    by_place: dict[str, list[dict]] = defaultdict(list)
    for result in counted:
        by_kind[f"{result['kind']}, {'under torchrun' if result['launcher'] == 'torchrun' else 'no launcher'}"].append(
            result
        )
        by_place[result["found"]].append(result)
    absent = [
        result for result in results if result["outcome"] == "killed" and not is_counted(result) and result["late"]
    ]
    lines = rows("layout", dict(sorted(by_kind.items()))) + [""]
    lines += rows("the victim was", dict(sorted(by_place.items(), key=lambda item: MARKS.index(item[0]))))
    late = [result["late"] for result in counted if result["late"] is not None]
    if late:
        lines += [
            "",
            (
                f"In {len(late)} of these jobs a rank started only after the death. In {sum(seconds <= LIMIT for seconds in late)} of them it "
                f"ended within {LIMIT:.0f} s. In the others rank 0 had died, and the late rank waited for rank 0 until "
                "`--distributed-timeout-minutes 1`."
            ),
        ]
    if absent:
        waited = sum(result["waited for"] > 0 for result in absent)
        lines += [
            "",
            (
                f"Not counted are {len(absent)} kills without a launcher in which no rank could learn of the death, because the victim or all "
                f"others had not arrived yet. In {waited} of them the others printed which rank they wait for. They ended after "
                f"{max(result['late'] for result in absent):.0f} s at most."
            ),
        ]
    return "\n".join(lines)


def main() -> int:
    parser = campaign_parser(__doc__)
    parser.add_argument("--count", type=int, default=200, help="kills that the others can know of")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.write is None:
        with tempfile.TemporaryDirectory(prefix="saved-") as saved:
            with Job([[processes.PRETRAIN_GPT, *MODEL, "--exit-interval", "1", "--save", saved]]) as job:
                job.wait().succeeded()
            run_one = partial(run_case, saved=Path(saved))
            drawn_cases = cases(given.results, given.count, given.seed)
            sweep(drawn_cases, given.count, [given.results], 60 * given.limit_minutes, run_one)
    return end_campaign(list(read_results(given.results).values()), given.write, "kills", table)


if __name__ == "__main__":
    sys.exit(main())
