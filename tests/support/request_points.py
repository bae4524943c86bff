"""Requests of runs that save to an object store, at each of which the store ends: the same command goes on, to the same bits.

    python tests/support/request_points.py results.jsonl --limit-minutes 3            goes on where it stopped

A run's ranks are threads, and the store is a double of S3 (`s3_server`). A case is a scenario, a request, and what happens there: the
store answers no more before or after it is carried out (as where every client dies), fails it once, or loses its answer. Then
the store is back and the run is started again by the same command.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from case_runs import read_results, sweep
from s3_server import HOWS, Request, s3_server
from stopped_runs import announced, differing, job, lines

COMMON = "--train-iters 4 --save-interval 2 --save s3://bucket/run --load s3://bucket/run "
SCENARIOS = {
    "ZeRO 1, one kept": (COMMON + "--use-distributed-optimizer --keep-checkpoints 1 --global-batch-size 2", {"dp": 2}),
    "TP 2, async": (COMMON + "--tensor-model-parallel-size 2 --async-save", {"tp": 2}),
}
_MARK = re.compile(r"\.[0-9a-f]{16}\.bin")


class Point(NamedTuple):
    scenario: str
    request: Request
    before: int  # requests like it that went before
    how: str

    def __str__(self) -> str:
        return f"{self.scenario} / {self.request.kind} {self.request.name}, {self.before} / {self.how}"


def known(request: Request) -> Request:
    """The request, without the mark of its save."""
    return request._replace(name=_MARK.sub(".bin", request.name))


def run(name: str) -> str:
    flags, sizes = SCENARIOS[name]
    return job(flags, **sizes)


def ended(stored: Mapping[str, bytes]) -> dict[str, object]:
    """All names, and what the newest checkpoint holds, but for marks and what a run was told about folders. stored: by bucket/key."""
    objects = {_MARK.sub(".bin", name): data for name, data in stored.items()}
    last = int(objects["bucket/run/latest_checkpointed_iteration.txt"].split()[0])
    folder = f"bucket/run/iter_{last:07d}/"
    manifest = json.loads(_MARK.sub(".bin", objects.pop(folder + "manifest.json").decode()))
    del manifest["sha256"], manifest["state"]["config"]["checkpoint"]
    manifest["state"].pop("checkpoints", None)
    found = {name: data for name, data in objects.items() if name.startswith(folder)}
    return {"manifest": manifest, "names": sorted(objects), **found}


@cache
def whole(name: str) -> tuple[tuple[Request, ...], dict[str, str], dict[str, object]]:
    """(requests, training lines, end) of the run that nothing happens to."""
    with s3_server() as store:
        said = run(name)
        return tuple(map(known, store.made)), lines(said), ended(store.objects)


def points() -> Iterator[Point]:
    for name in SCENARIOS:
        before: Counter[Request] = Counter()
        for request in whole(name)[0]:
            hows = HOWS if request.changes_store else ("before", "error")
            yield from (Point(name, request, before[request], how) for how in hows)
            before[request] += 1


def outcome(point: Point) -> dict[str, object]:
    """How the case ended; AssertionError says what is wrong."""
    _, expected, end = whole(point.scenario)
    with s3_server() as store:
        store.arm(point.before + 1, point.how, lambda request: known(request) == point.request)
        try:
            said, how = run(point.scenario), "went on"
        except RuntimeError as error:
            said, how = error.said, "failed"
        assert store.hit is not None, "the request was not made"
        store.revive()
        saved = announced(said)
        again = run(point.scenario)
        last = ended(store.objects)
    began = min(map(int, lines(again)), default=len(expected) + 1) - 1
    assert began >= saved, f"iteration {saved} was saved, and the next run began after {began}"
    assert not (differ := differing(lines(said) | lines(again), expected)), f"other lines: {differ}"
    older = [name for name in last["names"] if name not in end["names"]]
    more = [name for name in older if "kept" not in point.scenario or ".partial" in name]
    assert not more and set(end["names"]) <= set(last["names"]), f"left over: {more}"
    assert all(last.get(name) == value for name, value in end.items() if name != "names"), "other bits"
    return {"end": how, "began": began}


def run_point(point: Point) -> dict[str, object]:
    result = {"case": str(point), "kind": point.request.kind, "how": point.how}
    try:
        return result | {"ok": True} | outcome(point)
    except Exception as error:
        return result | {"ok": False, "where": f"{type(error).__name__}: {error}"[:600], "worst": None}


def in_order(some: Iterator[Point]) -> list[Point]:
    """Shuffled, so that whatever part has run is a fair sample; what changes the store first."""
    found = list(some)
    Random(0).shuffle(found)
    return sorted(found, key=lambda point: not point.request.changes_store)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of JSON lines, one per case, that is added to")
    parser.add_argument("--limit-minutes", type=float, default=float("inf"), help="stop after so long")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases = in_order(points())
    sweep(cases, len(cases), [given.results], 60 * given.limit_minutes, run_point)
    results = list(read_results(given.results).values())
    failed = [result for result in results if not result["ok"]]
    print(f"{len(results)} of {len(cases)} points, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
