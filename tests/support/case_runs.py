"""Cases of a space, run one after the other as a command that can be stopped and goes on where it was, and a page that counts them.

    {"case": NAME, "choices": {DIMENSION: CHOICE}, "ok": true, "worst": 1e-14, "where": "weight w", "seconds": 1.5, "code": COMMIT}

is a line of the file of results. A case is anything with a name, `str(case)`, and `choices`, one of each dimension.
"""

import argparse
import contextlib
import json
import math
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from documents import write_part
from parity_cases import TOLERANCE

REPORT = "write this page of the results so far, and run nothing; its sections by hand are kept"

Compare = Callable[[Any], tuple[float, str]]  # the largest relative difference of a case, and where it is


@dataclass(frozen=True)
class Matrix:
    """Cases, in the order in which they are run, and the page in docs about them."""

    script: str  # whose page is docs/SCRIPT.md
    title: str
    text: Sequence[str]  # lines below the title
    dimensions: Mapping[str, Sequence[Any]]
    cases: Sequence[Any]
    total: int  # cases of the whole space
    compare: Compare
    sets: Mapping[str, Sequence[Any]] = field(
        default_factory=dict
    )  # cases of which the page says how many have been run


def command(matrix: Matrix, description: str, arguments: Sequence[str] | None = None) -> int:
    """Run what is in no file yet, or write the page; 1 if any case differs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of JSON lines, one per finished case, that is added to")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    parser.add_argument("--report", type=Path, help=REPORT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = [case for case in matrix.cases if given.only in str(case)]
    if given.report is None:
        run_one = partial(run_case, compare=matrix.compare, dimensions=matrix.dimensions)
        sweep(cases, len(cases), [given.results], given.limit_minutes * 60, run_one)
    names = set(map(str, cases))
    results = [result for result in read_results(given.results).values() if result["case"] in names]
    if given.report is not None:
        write_page(given.report, page(matrix, results))
    failed = sum(not result["ok"] for result in results)
    print(f"{len(results)} of {len(cases)} cases have been run, {failed} differ")
    return 1 if failed else 0


# ---------------------------------------------------------------- running


def read_results(*paths: Path) -> dict[str, dict]:
    """Finished cases by name. A line that a stop cut short counts as not finished."""
    results = {}
    for line in (line for path in paths if path.exists() for line in path.read_text().splitlines()):
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        results[result["case"]] = result
    return results


def run_case(case: Any, compare: Compare, dimensions: Iterable[str]) -> dict:
    """What came of one case, ready to be written."""
    began, result = time.monotonic(), {"case": str(case), "choices": dict(zip(dimensions, case.choices))}
    try:
        worst, where = compare(case)
        result |= {"ok": worst <= TOLERANCE, "worst": worst if math.isfinite(worst) else None, "where": where}
    except Exception as error:
        result |= {"ok": False, "worst": None, "where": f"{type(error).__name__}: {error}"[:500]}
    return result | {"seconds": round(time.monotonic() - began, 3)}


def sweep(
    cases: Iterable[Any], count: int, paths: list[Path], limit_seconds: float, run_one: Callable[[Any], dict]
) -> None:
    """Run what is in no file yet of `count` cases, until done or out of time; each result is added to the first file at once."""
    results = read_results(*paths)
    began, said, ran, passed = time.monotonic(), 0.0, 0, 0
    with open_results(paths[0]) as add:
        for case in cases:
            passed += 1
            if str(case) in results:
                continue
            spent = time.monotonic() - began
            if spent >= limit_seconds:
                break
            if ran and spent - said > 15:
                said, whole = spent, spent / ran * (count - passed)
                left = min(whole, limit_seconds - spent)
                print(
                    f"{passed - 1} of {count} cases, {_span(left)} left in this run, {_span(whole)} for all", flush=True
                )
            result = run_one(case)
            ran += 1
            add(result)
            if not result["ok"]:
                by = "" if result.get("worst") is None else f" by {result['worst']}"
                print(f"DIFFERS  {case}: {result.get('where', '')}{by}", flush=True)


@contextlib.contextmanager
def open_results(path: Path) -> Iterator[Callable[[dict], None]]:
    """Give the function that adds a result to a file of results at once, with the commit that was run."""
    revision = code_revision()
    with path.open("a") as file:
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            file.write("\n")

        def add(result: dict) -> None:
            file.write(json.dumps(result | {"code": revision}) + "\n")
            file.flush()

        yield add


def code_revision() -> str:
    """The commit that is run, with a + if files differ from it."""
    git = ["git", "describe", "--always", "--abbrev=10", "--dirty=+"]
    done = subprocess.run(git, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.1f} min"


# ---------------------------------------------------------------- the ends of a campaign


def campaign_parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every campaign has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of JSON lines, one per case, that is added to")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--write", type=Path, help="put the tables into this file, and run nothing")
    return parser


def end_campaign(results: Sequence[dict], page: Path | None, name: str, table: Callable[[Sequence[dict]], str]) -> int:
    """The exit code, 1 if a case failed. page: of which the part NAME is to have the table of the results."""
    if page is not None:
        write_part(page, name, table(results))
    failed = sum(not result["ok"] for result in results)
    print(f"{len(results)} cases, {failed} failed")
    return 1 if failed else 0


# ---------------------------------------------------------------- the page


def page(matrix: Matrix, results: Sequence[dict]) -> str:
    names = {result["case"] for result in results}
    differ = sum(not result["ok"] for result in results)
    lines = [f"# {matrix.title}", "", *matrix.text, ""]
    lines += [
        f"`python tests/campaigns/{matrix.script}.py results.jsonl` runs cases and resumes where it stopped; with",
        f"`--report docs/{matrix.script}.md` it writes this page.",
        "",
        f"**{len(names):,} of {matrix.total:,} cases have been run; {differ} differ.**",
        "",
        *(
            f"- {what}: {len(names & set(map(str, cases)))} of {len(cases)} cases"
            for what, cases in matrix.sets.items()
        ),
        *about(results),
        "",
        "| dimension | cases run, by choice |",
        "|---|---|",
        *choices_run(matrix.dimensions, results),
        "",
        *differing(results),
    ]
    return "\n".join(lines).rstrip() + "\n"


def write_page(path: Path, text: str) -> None:
    """Write `text` to a page, and keep the sections of the page that `text` has not: those written by hand, or of other results.

    A section is what stands from a line `## HEADING` to the next, or, without a heading, before the first of them.
    """
    before, after = (_sections(page) for page in (path.read_text() if path.exists() else "", text))
    path.write_text("\n\n".join((before | after).values()) + "\n")


def _sections(page: str) -> dict[str, str]:
    """Heading -> the section with it, in their order."""
    sections = [section.strip("\n") for section in re.split("^(?=## )", page, flags=re.MULTILINE)]
    return {section.partition("\n")[0] if section.startswith("## ") else "": section for section in sections if section}


def about(results: Sequence[dict]) -> list[str]:
    """The code that was run, and the largest difference that is allowed."""
    codes = Counter(result["code"] for result in results)
    lines = ["- code that was run: " + ", ".join(f"{code} ({n:,})" for code, n in codes.items())]
    worst = max((result for result in results if result["ok"]), key=lambda result: result["worst"], default=None)
    if worst:
        lines += [
            f"- worst relative difference: {worst['worst']:.1e} (allowed {TOLERANCE:.0e}), {worst['where']} of `{worst['case']}`"
        ]
    return lines


def choices_run(dimensions: Mapping[str, Sequence[Any]], results: Sequence[dict]) -> list[str]:
    """A row for each dimension. JSON has lists for tuples."""
    rows = []
    for name, choices in dimensions.items():
        counts = Counter(str(tuple(x) if isinstance(x := result["choices"][name], list) else x) for result in results)
        rows.append(f"| {name} | {', '.join(f'{_word(choice)}: {counts[str(choice)]:,}' for choice in choices)} |")
    return rows


def differing(results: Sequence[dict]) -> list[str]:
    failed = (result for result in results if not result["ok"])
    return [f"DIFFERS: `{result['case']}`: {result['where']}, {result['worst']}  " for result in failed]


def _word(choice: object) -> str:
    return {True: "yes", False: "no"}[choice] if isinstance(choice, bool) else str(choice)
