"""Real processes killed, or failed in a file call, and started again by the same command: they go on, to the same bits.

    python tests/campaigns/restart_campaign.py results.jsonl --limit-minutes 3            goes on where it stopped
    python tests/campaigns/restart_campaign.py results.jsonl --write docs/reliability.md
    python tests/campaigns/restart_campaign.py results.jsonl --only experts --write docs/reliability.md     a table of their own

    points     each kind of file call, on each rank that makes it, killed at, failed and cut short: one call of each, drawn by seed
    instants   at an instant drawn uniformly over the run a rank, all ranks, or the launcher are killed (SIGKILL)
    saves      the same at an instant within a save, over a slow file layer
    beside     the instants of a run whose saves are asynchronous
    copies     as `saves`, within a copy for restarts (--non-persistent-save-interval), local and global
    shared     the instants of a run whose ranks share each sample (context parallelism)
    experts    the instants of a run whose ranks have different experts, with expert bias
    starts     the launcher is killed in the first fifth of the run
    ends       under a launcher, a rank, all, or the launcher are killed after a rank has begun to leave

The scenarios are those of fault_points.py, of two processes over gloo, with experts of four; launched jobs have torchrun's agent above them. What a
case must keep is said there. A result has the seed, the instant, and the mark (gloo/marked_script.py) that each rank had come to.
"""

import hashlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import split
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from case_runs import campaign_parser, code_revision, end_campaign
from fault_points import SCENARIOS, prepared
from kill_campaign import Ranks, lives
from processes import Job
from stopped_runs import TINY, announced, differing, differs_in, ended, lines

GLOO = Path(__file__).parents[1] / "processes"
SCRIPT, LAUNCHER = str(GLOO / "faulty_script.py"), str(GLOO / "forking_launcher.py")
PATIENCE, SLOW = 90.0, 0.002
HOWS = {"write": ("killed in", "ENOSPC in", "EIO in", "short"), "read_into": ("EIO", "short", "killed")}
COUNTS = {
    "instants": 140,
    "saves": 60,
    "beside": 40,
    "starts": 40,
    "ends": 40,
    "shared": 40,
    "copies": 40,
    "experts": 108,
}
COPIED = ("local copies, ZeRO 1", "global copies, TP 2")
OF_KINDS = {
    "beside": ("ZeRO 1, async",),
    "shared": ("CP 2, ZeRO 1",),
    "copies": COPIED,
    "experts": ("EP 4, ZeRO 1",),
}  # the others draw one of the rest
IN_ITS_WAY = tuple(name for name in SCENARIOS if name not in sum(OF_KINDS.values(), ()))
WITHIN = {"saves": "saving", "copies": "copying"}  # kind -> the mark after which a rank is killed


@dataclass(frozen=True)
class Case:
    kind: str  # points, or a key of COUNTS
    number: int
    scenario: str
    launched: bool
    who: str  # "rank 0", "rank 1", .., "all", "launcher"; of points the rank that meets the fault
    fault: str  # "rank:call:how"; empty for kills
    instant: float  # fraction of the run, or seconds after the save, or the rank's leaving, began
    save: int  # which save of the run
    call: str = ""  # the kind of call that meets the fault

    @property
    def how(self) -> str:
        return self.fault.rpartition(":")[2]

    def __str__(self) -> str:
        return (
            f"points {self.scenario} / {self.who}: {self.call} / {self.how}"
            if self.fault
            else f"{self.kind} {self.number}"
        )


def kills(seed: int) -> Iterator[Case]:
    for kind, count in COUNTS.items():
        for number in range(count):
            draw = random.Random(f"{seed}/{kind}/{number}")
            ranks = [f"rank {rank}" for rank in range(4 if kind == "experts" else 2)]
            who = draw.choices([*ranks, "all", "launcher"], [*(6 // len(ranks) for _ in ranks), 4, 3])[0]
            launched = who == "launcher" or draw.random() < 0.2
            instant = draw.random() if kind not in WITHIN else draw.uniform(0, 0.25)
            scenario = draw.choice(IN_ITS_WAY) if kind not in OF_KINDS else draw.choice(OF_KINDS[kind])
            save = draw.choice((1, 2))
            if kind in ("starts", "ends"):
                launched, instant = True, draw.uniform(0, 0.2)
                who = "launcher" if kind == "starts" else who
            yield Case(kind, number, scenario, launched, who, "", instant, save)


def points(seed: int, calls: dict[str, dict[str, list[str]]]) -> Iterator[Case]:
    """calls: scenario -> rank -> the kinds of its calls, in order."""
    number = 0
    for scenario, of_ranks in calls.items():
        for rank, made in of_ranks.items():
            for kind in dict.fromkeys(made):
                for how in (*HOWS.get(kind, ()), *(("killed", "ENOSPC", "EIO") if kind != "read_into" else ())):
                    draw = random.Random(f"{seed}/{scenario}/{rank}/{kind}/{how}")
                    at = draw.choice([n for n, one in enumerate(made, 1) if one == kind])
                    yield Case("points", number, scenario, False, f"rank {rank}", f"{rank}:{at}:{how}", 0.0, 0, kind)
                    number += 1


# ---------------------------------------------------------------- one case


def start(scenario: str, root: Path, *, launched: bool = False, **environment: str) -> Job:
    longer = "" if SCENARIOS[scenario].again else "--train-iters 40 --save-interval 10 "
    longer = "--train-iters 18 --save-interval 6 --non-persistent-save-interval 2" if scenario in COPIED else longer
    flags = f"{TINY}{SCENARIOS[scenario].flags.format(root=root)} {longer} --distributed-timeout-minutes {max(1, int(PATIENCE // 60))}"
    words = [SCRIPT, *split(flags)]
    for name in ("FAULT", "SLOW"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    ranks = SCENARIOS[scenario].ranks
    return Job([[LAUNCHER, str(ranks), *words]] if launched else [words] * ranks)


def said_by(job: Job) -> str:
    return "".join(job.stdout(stream) for stream in range(len(job.processes)))


def digests(root: Path) -> dict[str, object]:
    """The names in the folder, and of the newest checkpoint the hash of each part."""
    last = ended(root)
    state = last["manifest"]["state"]
    # Not the settings and what else describes a run: there may be more of it while a campaign goes on.
    last["manifest"] = [last["manifest"]["tensors"], state["train"], state["log"], state["optimizer_steps"]]
    text = {name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in last.items()}
    return {name: hashlib.sha256(value).hexdigest() for name, value in text.items()} | {"names": last["names"]}


def whole(scenario: str) -> dict:
    """The run that nothing happens to."""
    with prepared(scenario) as root:
        began = time.monotonic()
        with start(scenario, root) as job:
            job.wait(PATIENCE).succeeded()
            said, seconds = said_by(job), time.monotonic() - began
        calls = {rank: made.split() for rank, made in re.findall(r"calls of rank (\d+): (.*)", said)}
        return {"lines": lines(said), "ended": digests(root), "calls": calls, "seconds": seconds}


def run_case(case: Case, expected: dict, seconds: float) -> dict:
    """seconds: that a run takes at present."""
    with prepared(case.scenario) as root:
        fault = {"FAULT": case.fault} if case.fault else {}
        slow = {"SLOW": str(SLOW)} if case.kind in WITHIN else {}
        with start(case.scenario, root, launched=case.launched, **fault, **slow) as job:
            found = {} if case.fault else _kill(case, job, seconds)
            found["seconds to end"] = wait_for_the_end(job)
            found |= _fault_of(job) if case.fault else {}
            said, codes = said_by(job), [process.poll() for process in job.processes]
        found |= {"codes": codes, "saved": announced(said)}
        again = ""
        if any(codes) or digests(root) != expected["ended"]:
            began = time.monotonic()
            with start(case.scenario, root, launched=case.launched) as job:
                told = job.wait(PATIENCE)
                again = said_by(job)
                assert not any(told.codes), f"the restart failed: {told}"
            found["seconds again"] = round(time.monotonic() - began, 2)
            first = min(map(int, lines(again)), default=len(expected["lines"]) + 1)
            is_again = SCENARIOS[case.scenario].again
            assert is_again or first > announced(said), f"{announced(said)} was saved, and it began with {first}"
        differ = differing(lines(said) | lines(again), expected["lines"])
        assert not differ, f"other lines: {differ}"
        wrong = differs_in(digests(root), expected["ended"], may_keep_more="kept" in case.scenario)
        assert not wrong, f"not as expected: {wrong}"
        return found


def _kill(case: Case, job: Job, seconds: float) -> dict:
    """Wait for the instant, and kill; where the ranks were."""
    ranks, began = Ranks(job), time.monotonic()
    if case.kind in (*WITHIN, "ends"):
        mark, times = (WITHIN[case.kind], case.save) if case.kind in WITHIN else ("leaving", 1)
        while max((marks.count(mark) for marks in ranks.marks().values()), default=0) < times:
            if not job.running() or time.monotonic() - began > PATIENCE:
                break
            time.sleep(0.005)
        time.sleep(case.instant)
    else:
        time.sleep(case.instant * seconds)
    return kill(case.who, job, launched=case.launched)


def kill(who: str, job: Job, *, launched: bool) -> dict:
    """SIGKILL to "rank N", "all" (with their launcher) or the "launcher"; where the ranks were, and how many were killed."""
    ranks = Ranks(job)
    numbers, at_once = ranks.processes(), range(len(job.processes))
    victims = {"all": list(numbers.values()), "launcher": []}.get(who)
    if victims is None:
        victims = [numbers[rank] for rank in [int(who[-1])] if rank in numbers]
    if launched and (who in ("all", "launcher") or not victims):
        victims.append(job.processes[0].pid)
    elif not victims or (who == "all" and not launched):  # before a rank has said its number
        victims = [job.processes[rank].pid for rank in at_once if who in ("all", f"rank {rank}")]
    killed = [number for number in victims if lives(number)]
    for number in killed:
        os.kill(number, signal.SIGKILL)
    return {"phase": {rank: marks[-1] for rank, marks in ranks.marks().items()}, "killed": len(killed)}


def wait_for_the_end(job: Job, patience: float | None = None) -> float:
    """Until the launcher, every rank and what they have started have ended; seconds. Those that have not are ended, and the case
    has failed."""
    began, patience = time.monotonic(), patience or PATIENCE
    while job.running() or job.left():
        if time.monotonic() - began > patience:
            for number in (left := job.left()):
                os.kill(number, signal.SIGKILL)
            raise AssertionError(f"{len(left)} processes live on for {patience} s")
        time.sleep(0.01)
    return round(time.monotonic() - began, 2)


def _fault_of(job: Job) -> dict:
    hit = re.search(r"^fault (\w+) (.*)", "".join(job.stderr(stream) for stream in range(len(job.processes))), re.M)
    assert hit, "the call was not made"
    return {"call": hit[1], "name": hit[2]}


# ---------------------------------------------------------------- all of them


def read(path: Path) -> tuple[dict[str, dict], dict[str, dict]]:
    """(the whole runs of this revision by scenario, the results by case)."""
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    wholes = {one["whole"]: one for one in known if one.get("code") == code_revision() and "whole" in one}
    return wholes, {one["case"]: one for one in known if "case" in one}


def note(path: Path, one: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(one) + "\n")


def campaign(path: Path, seed: int, limit_seconds: float, only: str | None = None, scenario: str | None = None) -> None:
    began, (wholes, results) = time.monotonic(), read(path)

    names = tuple(SCENARIOS) if scenario is None else (scenario,)
    for name in names:
        if name not in wholes:
            wholes[name] = {"whole": name, "code": code_revision()} | whole(name)
            note(path, wholes[name])
    cases = [*points(seed, {name: wholes[name]["calls"] for name in names})]
    cases += [case for case in kills(seed) if case.scenario in names]
    random.Random(seed).shuffle(cases)
    recent = [whole(names[0])["seconds"] for _ in range(2)][1:]  # the first waits for torch to be imported
    for case in cases:
        if only not in (None, case.kind) or str(case) in results or time.monotonic() - began > limit_seconds:
            continue
        result = {"case": str(case), "seed": seed, "code": code_revision(), **asdict(case)}
        try:
            result |= {"ok": True} | run_case(case, wholes[case.scenario], median(recent[-5:]))
            if not case.launched and "seconds again" in result:
                recent.append(result["seconds again"])
        except Exception as error:
            result |= {"ok": False, "where": f"{type(error).__name__}: {error}"[:3000]}
            print(f"FAILED {case}: {result['where']}", flush=True)
        results[str(case)] = result
        note(path, result)
    print(f"{len(results)} of {len(cases)} cases", flush=True)


def table(results: list[dict]) -> str:
    failed = sum(not result["ok"] for result in results)
    of_points = [result for result in results if result["kind"] == "points"]
    of_kills = [result for result in results if result["kind"] != "points" and result.get("killed")]
    out = [
        f"{len(of_points)} points and " * bool(of_points)
        + f"{len(of_kills)} kills; {failed} did not resume to the same bits."
    ]
    counts = Counter((result.get("call"), result["fault"].split(":")[2]) for result in of_points)
    hows = list(dict.fromkeys(how for _, how in counts))
    out += ["", "| call | " + " | ".join(hows) + " |", "|---|" + "---|" * len(hows)] if hows else []
    out += [
        f"| {call} | " + " | ".join(str(counts[call, how] or "") for how in hows) + " |"
        for call in dict.fromkeys(call for call, _ in counts)
    ]
    where = [sorted(set(result["phase"].values())) or ["starting"] for result in of_kills]
    phases = [next((mark for mark in WITHIN.values() if mark in names), names[0]) for names in where]
    return "\n".join([*out, "", *table_of_kills("a rank was", dict.fromkeys(phases), phases, of_kills)])


def table_of_kills(head: str, rows: Iterable[str], of_each: list[str], results: list[dict]) -> list[str]:
    """Kills by row and by who was killed. of_each: the row of each result."""
    counts = Counter((row, result["who"].split()[0]) for row, result in zip(of_each, results))
    body = [
        f"| {row} | " + " | ".join(str(counts[row, who] or "") for who in ("rank", "all", "launcher")) + " |"
        for row in rows
    ]
    return [f"| {head} | one rank killed | all | the launcher |", "|---|---|---|---|", *body]


def main() -> int:
    parser = campaign_parser(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="the kind of cases to run")
    parser.add_argument("--scenario", choices=SCENARIOS, help="only cases of this one")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds that a job may take (90); give more on a busy machine"
    )
    given = parser.parse_args()
    globals()["PATIENCE"] = given.patience
    torch.set_num_threads(1)
    if given.write is None:
        campaign(given.results, given.seed, 60 * given.limit_minutes, given.only, given.scenario)
    results = [result for result in read(given.results)[1].values() if given.only in (None, result["kind"])]
    part = "restarts" if given.only is None else f"restarts of {given.only}"
    return end_campaign(results, given.write, part, table)


if __name__ == "__main__":
    sys.exit(main())
