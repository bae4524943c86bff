"""Every case of the layout space against one process, as one command that can be stopped and goes on where it was.

    python tests/parity_sweep.py results.jsonl --limit-minutes 30
    python tests/parity_sweep.py results.jsonl --report docs/parity.md

Cases come in a fixed order: those that cover all pairs, then all triples, then the product of what most runs choose, then the
rest, both shuffled, so that whatever part has run is a fair sample of the whole. Exit code 1 if any case differs.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from layout_space import DIMENSIONS, Case, case_of, count_cases, covering_cases, main_product
from option_cases import OPTION_DIMENSIONS, option_cases, worst_difference_of
from parity_cases import TOLERANCE, worst_difference


def ordered_cases(max_ranks: int) -> Iterator[Case]:
    """All cases of at most so many ranks; a smaller limit leaves out cases and keeps the order of the others."""
    covering, chosen = covering_cases(3), list(main_product())
    Random(0).shuffle(chosen)
    first = dict.fromkeys(case for case in (*covering, *chosen) if case.ranks <= max_ranks)
    yield from first
    numbers, known = list(range(count_cases())), set(first)
    Random(0).shuffle(numbers)
    limit = count_cases(max_ranks)
    for case in (case_of(number) for number in numbers if number < limit):
        if case not in known:
            yield case


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


def run_case(
    case: Any, compare: Callable[[Any], tuple[float, str]] | None = None, dimensions: Iterable[str] = DIMENSIONS
) -> dict:
    """What came of one case, ready to be written; of another space with its own dimensions and comparison."""
    began, result = time.monotonic(), {"case": str(case), "choices": dict(zip(dimensions, case.choices))}
    try:
        worst, where = (compare or worst_difference)(case)
        result |= {"ok": worst <= TOLERANCE, "worst": worst if math.isfinite(worst) else None, "where": where}
    except Exception as error:
        result |= {"ok": False, "worst": None, "where": f"{type(error).__name__}: {error}"[:500]}
    return result | {"seconds": round(time.monotonic() - began, 3)}


def sweep(
    cases: Iterable[Any], count: int, paths: list[Path], limit_seconds: float, run_one: Callable[[Any], dict] = run_case
) -> None:
    """Run what is in no file yet of `count` cases, until done or out of time; each result is added to the first file at once."""
    path, results = paths[0], read_results(*paths)
    began, said, ran, passed, revision = time.monotonic(), 0.0, 0, 0, code_revision()
    with path.open("a") as file:
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            file.write("\n")
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
            result = run_one(case) | {"code": revision}
            ran += 1
            file.write(json.dumps(result) + "\n")
            file.flush()
            if not result["ok"]:
                print(f"DIFFERS  {case}: {result['where']} by {result['worst']}", flush=True)


def code_revision() -> str:
    """The commit that is run, with a + if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=10", "--dirty=+"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.1f} min"


# ---------------------------------------------------------------- report


def report(results: list[dict]) -> str:
    """The table in docs/parity.md."""
    failed = [result for result in results if not result["ok"]]
    worst = max((result for result in results if result["ok"]), key=lambda result: result["worst"], default=None)
    pairs, triples = ({str(case) for case in covering_cases(strength)} for strength in (2, 3))
    chosen = {str(case) for case in main_product()}
    names = {result["case"] for result in results}
    hours = sum(result["seconds"] for result in results) / 3600
    lines = [
        "# Any layout, same numbers: how much of it has been run",
        "",
        "Each case trains a small GPT for three steps in float64, with ranks as threads, and compares every loss, gradient norm,",
        "gradient and weight with the run of one process: max |a - b| <= 1e-10 max |b|, tensor by tensor. A case is one choice",
        "from each row below that can stand together with the others (`tests/layout_space.py`). Written by",
        "",
        "    python tests/parity_sweep.py results.jsonl --limit-minutes 600        stops in time, and goes on where it was",
        "    python tests/parity_sweep.py results.jsonl --report docs/parity.md",
        "",
        "With `--shard 1/2 a.jsonl b.jsonl` and `--shard 2/2 b.jsonl a.jsonl` two processes share the work.",
        "",
        f"**{len(names):,} of {count_cases():,} cases have been run; {len(failed)} differ.** "
        f"It took {hours:.2f} hours of one process.",
        "",
        f"- cases in which every pair of choices occurs: {len(pairs & names)} of {len(pairs)} (the fast tests)",
        f"- cases in which every triple of choices occurs, up to 16 ranks: {len(triples & names)} of {len(triples)} "
        "(the full tests)",
        "- the product of tp, sp, pp, v, dp, schedule, microbatches, recompute {none, selective, full}, style, tied and dropout, with "
        f"the other choices dealt out: {len(chosen & names):,} of {len(chosen):,}, in shuffled order",
        f"- the others, on up to 64 ranks: {len(names - triples - chosen):,} of {count_cases() - len(triples | chosen):,}, in "
        "shuffled order",
        "- code that was run: "
        + ", ".join(f"{code} ({n:,})" for code, n in Counter(r["code"] for r in results).items()),
    ]
    if worst:
        lines += [f"- worst relative difference: {worst['worst']:.1e}, {worst['where']} of `{worst['case']}`"]
    lines += ["", "| dimension | cases run, by choice |", "|---|---|"]
    ranks = Counter(result["choices"]["tp"] * result["choices"]["pp"] * result["choices"]["dp"] for result in results)
    lines += ["| ranks | " + ", ".join(f"{n}: {count:,}" for n, count in sorted(ranks.items())) + " |"]
    for name, choices in DIMENSIONS.items():
        counts = Counter(result["choices"][name] for result in results)
        lines += [f"| {name} | " + ", ".join(f"{_word(choice)}: {counts[choice]:,}" for choice in choices) + " |"]
    lines += ["", *(f"DIFFERS: `{result['case']}`: {result['where']}, {result['worst']}  " for result in failed)]
    return "\n".join(lines).rstrip() + "\n"


def _word(choice: object) -> str:
    return {True: "yes", False: "no"}[choice] if isinstance(choice, bool) else str(choice)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", type=Path, nargs="+", help="files of JSON lines, one per finished case; the first is added to"
    )
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--max-ranks", type=int, default=64, help="leave out larger jobs")
    parser.add_argument("--only", default="", help="only cases whose name has this in it, such as zb-v")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th case, from the i-th on; each with its own file")
    compiled = "run the layouts compiled, and one process eagerly; with a file of results of its own"
    parser.add_argument("--compile", choices=("off", "regions", "layers"), default="off", help=compiled)
    with_options = (
        "the options of published families, each bundle in every pair of layouts; with a file of results of its own"
    )
    parser.add_argument("--options", action="store_true", help=with_options)
    parser.add_argument("--report", type=Path, help="write this table of the results so far, and run nothing")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.report is None:
        i, n = (int(part) for part in given.shard.split("/"))
        if not 1 <= i <= n:
            parser.error(f"--shard is {given.shard}; it must be i/n with 1 <= i <= n")
        cases, count = ordered_cases(given.max_ranks), count_cases(given.max_ranks)
        if given.options:
            cases = list(option_cases())
            count = len(cases)
        if given.only:
            cases = [case for case in cases if given.only in str(case)]
            count = len(cases)
        cases = islice(cases, i - 1, None, n)
        compare = partial(worst_difference_of if given.options else worst_difference, compile=given.compile)
        run_one = partial(run_case, compare=compare, dimensions=OPTION_DIMENSIONS if given.options else DIMENSIONS)
        sweep(cases, -(-(count - i + 1) // n), given.results, given.limit_minutes * 60, run_one)
    results = list(read_results(*given.results).values())
    if given.report is not None:
        given.report.write_text(report(results))
    failed = sum(not result["ok"] for result in results)
    total = len(list(option_cases())) if given.options else count_cases()
    print(f"{len(results):,} of {total:,} cases have been run, {failed} differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
