"""Measurements as JSON lines. Rounds may come from several runs of the same work, code, machine and contenders."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.benchmarking.contest import ROOT, Contest, summary
from tools.benchmarking.work import Contender, Work

Record = dict[str, Any]


def code_version() -> str:
    """Return git's hash of the folder megatron/, with a + if it has uncommitted changes; empty without git."""

    def git(*words: str) -> str:
        result = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return result.stdout.strip()

    try:
        version = git("rev-parse", "--short=12", "HEAD:megatron")
        is_changed = bool(git("status", "--porcelain", "megatron"))
    except OSError:
        return ""
    return f"{version}+" if is_changed else version


def cpu_name() -> str:
    """Return the CPU's name, family and model from Linux; "CPU" elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    info = {}
    for line in lines:
        key, _, value = line.partition(":")
        if value:
            info[key.strip()] = value.strip()
    return ", ".join(f"{key} {info[key]}" for key in ("model name", "cpu family", "model") if key in info)


def identity(work: Work, contenders: list[Contender]) -> Record:
    """Return the entries that must be equal in two records for their rounds to count together."""
    return {
        "work": asdict(work),
        "contenders": {contender.title(work.parallel): asdict(contender) for contender in contenders},
        "code": code_version(),
        "cpu": cpu_name(),
    }


def record_of(contest: Contest, ceilings: dict[str, float], missing: dict[str, str]) -> Record:
    """Return the record of a contest. missing: reasons by title of a contender that could not start."""
    work = contest.work
    return identity(work, list(contest.contenders.values())) | {
        "parameters": work.parameters,
        "flops_per_token": work.flops_per_token,
        "flops_per_token_full_attention": work.flops_per_token_full_attention,
        "ceilings": ceilings,
        "about": contest.about,
        "steps": contest.steps,
        "operators": contest.operators,
        "not_measured": missing | contest.failed,
    }


def read_records(path: Path) -> list[Record]:
    """Read the records of a file, without an incomplete last line of a killed run."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def append_record(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def same(records: list[Record], wanted: Record) -> list[Record]:
    """Return the records that have all entries of an identity."""
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]


def rounds_of(records: list[Record]) -> int:
    """Return the number of rounds of all records."""
    return sum(len(next(iter(record["steps"].values()))) for record in records)


def merged(records: list[Record]) -> Record:
    """Join the rounds of records of one identity; `results` has the medians of each contender.

    A contender that failed in one of the runs is left out, because it has fewer rounds than the others.
    """
    last = records[-1]
    failed: dict[str, str] = {}
    for record in records:
        failed |= record["not_measured"]
    steps = {}
    results = {}
    for title in last["steps"]:
        if title not in failed:
            steps[title] = [step for record in records for step in record["steps"][title]]
            results[title] = last["about"][title] | summary(steps[title])
    ceilings = {name: max(record["ceilings"].get(name, 0.0) for record in records) for name in last["ceilings"]}
    return last | {"ceilings": ceilings, "steps": steps, "results": results, "not_measured": failed}


def best(measured: Record, *, ours: bool) -> str | None:
    """Return the title of our fastest contender, or of the fastest peer, at the work's precision; None without one."""
    seconds = {}
    for title, result in measured["results"].items():
        contender = measured["contenders"][title]
        is_ours = contender["library"] == "ours"
        has_precision = contender["bf16"] in (None, measured["work"]["bf16"])
        if is_ours == ours and has_precision:
            seconds[title] = result["seconds"]
    return min(seconds, key=seconds.__getitem__, default=None)
