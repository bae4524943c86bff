"""Measurements as JSON lines. Rounds of a work may be taken in several runs, if code, machine and contenders are the same."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.benchmarking.contest import ROOT, Contest, summary
from tools.benchmarking.work import Contender, Work

Record = dict[str, Any]


def code_version() -> str:
    """The state of megatron/: git's hash of the folder, with a + for changes that are not committed; empty without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD:megatron") + "+" * bool(git("status", "--porcelain", "megatron"))
    except OSError:
        return ""


def cpu_name() -> str:
    """As Linux says it; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    wanted = ("model name", "cpu family", "model")
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    return ", ".join(f"{key} {found[key]}" for key in wanted if key in found)


def identity(work: Work, contenders: list[Contender]) -> Record:
    """What two records must share so that their rounds count together."""
    return {
        "work": asdict(work),
        "contenders": {one.title(work.parallel): asdict(one) for one in contenders},
        "code": code_version(),
        "cpu": cpu_name(),
    }


def record_of(contest: Contest, ceilings: dict[str, float], missing: dict[str, str]) -> Record:
    """A contest as one line."""
    work = contest.work
    return identity(work, list(contest.contenders.values())) | {
        "parameters": work.parameters,
        "flops_per_token": work.flops_per_token,
        "flops_per_token_full_attention": work.shape.flops_per_token(full_attention=True),
        "ceilings": ceilings,
        "about": contest.about,
        "steps": contest.steps,
        "operators": contest.operators,
        "not_measured": missing | contest.failed,
    }


def read_records(path: Path) -> list[Record]:
    """The lines of a file; a last line that a killed run has cut is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def append_record(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def same(records: list[Record], wanted: Record) -> list[Record]:
    """The records of an identity."""
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]


def rounds_of(records: list[Record]) -> int:
    return sum(len(next(iter(record["steps"].values()))) for record in records)


def merged(records: list[Record]) -> Record:
    """All rounds of records with one identity, with `results` of every contender: what each says, and medians.

    A contender that failed in one of the runs is left out: its rounds would not stand beside those of the others.
    """
    last = records[-1]
    failed: dict[str, str] = {}
    for record in records:
        failed |= record["not_measured"]
    steps = {
        title: [step for record in records for step in record["steps"][title]]
        for title in last["steps"]
        if title not in failed
    }
    ceilings = {name: max(record["ceilings"].get(name, 0.0) for record in records) for name in last["ceilings"]}
    results = {title: last["about"][title] | summary(taken) for title, taken in steps.items()}
    return last | {"ceilings": ceilings, "steps": steps, "results": results, "not_measured": failed}


def best(measured: Record, *, ours: bool) -> str | None:
    """The title of our fastest contender, or of the fastest peer at the same precision; None without one."""
    half = measured["work"]["bf16"]
    of_kind = {
        title: result["seconds"]
        for title, result in measured["results"].items()
        if (measured["contenders"][title]["library"] == "ours") == ours
        and measured["contenders"][title]["bf16"] in (None, half)
    }
    return min(of_kind, key=of_kind.__getitem__, default=None)
