"""Real processes that save to an object store are killed and started again by the same command: they go on, to the same bits.

    python tests/campaigns/store_campaign.py results.jsonl --limit-minutes 3            goes on where it stopped
    python tests/campaigns/store_campaign.py results.jsonl --write docs/reliability.md

    requests   a rank, all ranks or the launcher are killed (SIGKILL) up to 50 ms after a request that changes the store, drawn by seed
    instants   the same at an instant drawn uniformly over the run
    server     the store's server is killed after such a request: every rank ends by itself, with an error, and nothing is left running

The store is moto's server in a process of its own (`store_server`), the client s3fs, the processes those of restart_campaign.py. After
a kill, once every process has ended, each checkpoint of the store that has a manifest must be one by docs/checkpoint_format.md
(`independent_reader`); so must every checkpoint at the end. A run goes on from a checkpoint that is not older than the last one it
said it had saved, and leaves the objects of the run that nothing happened to, to the byte, and no other; but that an older checkpoint
stays which --keep-checkpoints was about to remove after the last save.
"""

import hashlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import split
from statistics import median
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

import independent_reader
from case_runs import campaign_parser, code_revision, end_campaign
from processes import Job
from request_points import ended
from restart_campaign import LAUNCHER, SCRIPT, kill, note, read, said_by, table_of_kills, wait_for_the_end
from stopped_runs import TINY, announced, differing, lines
from store_server import Carried, StoreServer, store_server

COUNTS = {"requests": 64, "instants": 16, "server": 6}
COMMON = (
    "--train-iters 12 --save-interval 3 --save s3://bucket/run --load s3://bucket/run --distributed-timeout-minutes 9 "
)
PATIENCE = 500.0  # seconds: a machine may be busy with other work


class Scenario(NamedTuple):
    flags: str
    ranks: int = 2
    part: int = 32 << 20  # bytes of an object that are sent at once


SHARDED = "--use-distributed-optimizer --global-batch-size 2 "
SCENARIOS = {
    "ZeRO 1": Scenario(SHARDED),
    "ZeRO 1, async": Scenario(SHARDED + "--async-save"),
    "ZeRO 3, one kept": Scenario("--zero-stage 3 --global-batch-size 2 --keep-checkpoints 1"),
    "TP 2, async, one kept": Scenario("--tensor-model-parallel-size 2 --async-save --keep-checkpoints 1"),
    "one process, async, two kept": Scenario("--async-save --keep-checkpoints 2", 1),
    "in parts": Scenario(SHARDED + "--hidden-size 64 --vocab-size 20000", part=5 << 20),
}
# A part of a name -> the row of the table, of the last request before a kill; the first that fits.
ROWS = {
    "delete": "removes objects",
    "partNumber": "a part of an object",
    "upload": "begins or completes an object of several parts",
    ".partial/save.json": "begins a save or removal",
    ".partial/rank_": "the list of a rank",
    ".partial/manifest.json": "the manifest, made ready",
    "/manifest.json": "the manifest",
    ".bin": "the pieces of a rank",
    "latest": "the pointer, or the check at the start",
}


@dataclass(frozen=True)
class Case:
    kind: str  # a key of COUNTS
    number: int
    scenario: str
    launched: bool
    who: str  # "rank 0", "rank 1", "all", "launcher" or "server"
    instant: float  # which of the requests, or when in the run, as a fraction
    delay: float  # seconds

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


def cases(seed: int) -> Iterator[Case]:
    for kind, count in COUNTS.items():
        for number in range(count):
            draw = random.Random(f"{seed}/{kind}/{number}")
            scenario = draw.choice(list(SCENARIOS))
            is_one = SCENARIOS[scenario].ranks == 1
            who = draw.choice(["rank 0", "rank 0" if is_one else "rank 1", "all", "launcher"])
            launched = who == "launcher" or draw.random() < 0.2
            who = "server" if kind == "server" else who
            yield Case(kind, number, scenario, launched, who, draw.random(), draw.uniform(0, 0.05))


# ---------------------------------------------------------------- one case


def start(scenario: Scenario, *, launched: bool = False) -> Job:
    words = [SCRIPT, *split(TINY + COMMON + scenario.flags)]
    for name in ("FAULT", "SLOW", "RESTARTS"):
        os.environ.pop(name, None)
    os.environ["PART"] = str(scenario.part)
    return Job([[LAUNCHER, str(scenario.ranks), *words]] if launched else [words] * scenario.ranks)


def changes(store: StoreServer) -> list[Carried]:
    return [request for request in store.requests() if request.changes_store]


def whole(name: str, store: StoreServer) -> dict:
    """The run that nothing happens to."""
    store.empty()
    began = time.monotonic()
    with start(SCENARIOS[name]) as job:
        job.wait(PATIENCE).succeeded()
        said, seconds = said_by(job), time.monotonic() - began
    check_checkpoints(stored := store.objects())
    return {"lines": lines(said), "ended": digests(stored), "changes": len(changes(store)), "seconds": seconds}


def digests(stored: Mapping[str, bytes]) -> dict[str, object]:
    """Of `ended`, the names as they are, of all else the hash."""
    found = ended(stored)
    text = {name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in found.items()}
    return {name: hashlib.sha256(value).hexdigest() for name, value in text.items()} | {"names": found["names"]}


def check_checkpoints(stored: Mapping[str, bytes]) -> int:
    """Whatever has a manifest must be a checkpoint, to the last byte; how many there are."""
    manifests = [name for name in stored if re.search(r"/iter_[0-9]{7}/manifest\.json$", name)]
    for manifest in manifests:
        folder = manifest.removesuffix("manifest.json")
        with tempfile.TemporaryDirectory() as where:
            here = Path(where, Path(folder).name)
            here.mkdir()
            text = stored[manifest].decode()
            for name, data in stored.items():  # those of a save that was killed lie beside it
                if name == manifest or (name.startswith(folder) and f'"{name.removeprefix(folder)}"' in text):
                    (here / name.removeprefix(folder)).write_bytes(data)
            independent_reader.read(here)
    return len(manifests)


def run_case(case: Case, expected: dict, seconds: float, store: StoreServer) -> dict:
    """seconds: that a run takes at present."""
    scenario = SCENARIOS[case.scenario]
    store.empty()
    with start(scenario, launched=case.launched) as job:
        found = _strike(case, job, expected["changes"], seconds, store)
        found["seconds to end"] = wait_for_the_end(job, PATIENCE)
        said, codes = said_by(job), [process.poll() for process in job.processes]
    found |= {"codes": codes, "saved": announced(said)}
    if case.kind == "server":
        # That objects of a save are left, after the last checkpoint, is a warning.
        is_done = not found["killed"] or found["saved"] == len(expected["lines"])
        assert all(codes) or is_done, f"the server has ended, {found['saved']} was saved, and exit codes are {codes}"
        return found
    stored, again = store.objects(), ""
    found["checkpoints"] = check_checkpoints(stored)
    if any(codes) or _differs(stored, expected, "kept" in case.scenario):
        since = time.monotonic()
        with start(scenario, launched=case.launched) as job:
            told = job.wait(PATIENCE)
            again = said_by(job)
            assert not any(told.codes), f"the restart failed: {told}"
        began = min(map(int, lines(again)), default=len(expected["lines"]) + 1) - 1
        assert began >= announced(said), f"{announced(said)} was saved, and the next run began after {began}"
        found |= {"began": began, "seconds again": round(time.monotonic() - since, 1)}
    assert not (differ := differing(lines(said) | lines(again), expected["lines"])), f"other lines: {differ}"
    stored = store.objects()
    check_checkpoints(stored)
    assert not (wrong := _differs(stored, expected, "kept" in case.scenario)), f"not as expected: {wrong}"
    return found


def _differs(stored: Mapping[str, bytes], expected: dict, may_keep_more: bool) -> list[str]:
    """What is not as the run that nothing happened to has left it."""
    got, end = digests(stored), expected["ended"]
    more = [name for name in got["names"] if name not in end["names"] and (not may_keep_more or ".partial" in name)]
    less = [f"no {name}" for name in end["names"] if name not in got["names"]]
    return more + less + [f"other bits in {name}" for name in end if name != "names" and got.get(name) != end[name]]


def _strike(case: Case, job: Job, requests: int, seconds: float, store: StoreServer) -> dict:
    """Wait for the instant, and kill; where the ranks were, and what the store had done."""
    if case.kind == "instants":
        time.sleep(case.instant * seconds)
    else:
        began, at = time.monotonic(), 1 + int(case.instant * requests)
        while len(changes(store)) < at and job.running() and time.monotonic() - began < PATIENCE:
            time.sleep(0.002)
        time.sleep(case.delay)
    if case.who != "server":
        found = kill(case.who, job, launched=case.launched)
    else:
        found = {"killed": len(job.running())}
        store.kill()
    made = changes(store)
    return found | {"after": _row(made[-1]) if made else "nothing", "changes": len(made)}


def _row(request: Carried) -> str:
    what = ("delete " if request.kind == "DELETE" else "") + request.name
    return next((row for part, row in ROWS.items() if part in what), request.name)


# ---------------------------------------------------------------- all of them


def campaign(path: Path, seed: int, limit_seconds: float, only: Sequence[str] = tuple(SCENARIOS)) -> None:
    began, (wholes, results) = time.monotonic(), read(path)
    some = [case for case in cases(seed) if case.scenario in only]
    random.Random(seed).shuffle(some)
    some.sort(key=lambda case: case.kind == "server")
    recent: list[float] = []
    with store_server() as store:
        for case in some:
            if str(case) in results or time.monotonic() - began > limit_seconds:
                continue
            if case.scenario not in wholes:
                wholes[case.scenario] = {"whole": case.scenario, "code": code_revision()} | whole(case.scenario, store)
                note(path, wholes[case.scenario])
            recent = recent or [wholes[case.scenario]["seconds"]]
            result = {"case": str(case), "seed": seed, "code": code_revision(), **asdict(case)}
            try:
                if case.kind == "server":
                    with store_server() as its:
                        result |= {"ok": True} | run_case(case, wholes[case.scenario], 0.0, its)
                else:
                    result |= {"ok": True} | run_case(case, wholes[case.scenario], median(recent[-5:]), store)
                    recent += [result["seconds again"]] if "seconds again" in result and not case.launched else []
            except Exception as error:
                result |= {"ok": False, "where": f"{type(error).__name__}: {error}"[:3000]}
                print(f"FAILED {case}: {result['where']}", flush=True)
            results[str(case)] = result
            note(path, result)


def table(results: list[dict]) -> str:
    failed = sum(not result["ok"] for result in results)
    of_kills = [result for result in results if result["kind"] != "server" and result.get("killed")]
    of_servers = [result for result in results if result["kind"] == "server" and result.get("killed")]
    ended_after = max((result.get("seconds to end", 0.0) for result in of_servers), default=0.0)
    rows = [result["after"] for result in of_kills]
    began = sum(result.get("checkpoints", 0) > 0 for result in of_kills)
    servers = (
        f" After {len(of_servers)} kills of the server the last rank ended within {ended_after:.0f} s."
        if of_servers
        else ""
    )
    return "\n".join(
        [
            f"{len(of_kills)} kills, of which {began} found a checkpoint in the store; {failed} cases failed.{servers}",
            "",
            *table_of_kills(
                "the last request that changed the store", dict.fromkeys([*ROWS.values(), *rows]), rows, of_kills
            ),
        ]
    )


def main() -> int:
    parser = campaign_parser(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only this one; may be repeated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.write is None:
        campaign(given.results, given.seed, 60 * given.limit_minutes, given.scenario or tuple(SCENARIOS))
    return end_campaign(list(read(given.results)[1].values()), given.write, "store kills", table)


if __name__ == "__main__":
    sys.exit(main())
