"""Every case of the layout space against one process, as one command that can be stopped and goes on where it was.

    python tests/campaigns/parity_sweep.py results.jsonl --limit-minutes 30
    python tests/campaigns/parity_sweep.py results.jsonl --report docs/parity.md
    python tests/campaigns/parity_sweep.py options.jsonl --options --compile regions --report docs/parity.md

Cases come in a fixed order: those that cover all pairs, then all triples, then the product of what most runs choose, then the
rest, both shuffled, so that whatever part has run is a fair sample of the whole. Exit code 1 if any case differs.

A report with --options or --compile writes the section of such runs, one without them all else but the sections written by hand.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from case_runs import REPORT, about, choices_run, differing, read_results, run_case, sweep, write_page
from layout_space import DIMENSIONS, Case, case_of, count_cases, covering_cases, main_product
from option_cases import OPTION_DIMENSIONS, option_cases, worst_difference_of
from parity_cases import worst_difference
from t5_cases import DIMENSIONS as T5_DIMENSIONS, swept_cases, t5_report, worst_t5_difference


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


# ---------------------------------------------------------------- report


def report(results: list[dict]) -> str:
    """The page in docs, but the sections of runs with `--options` and `--compile`."""
    pairs, triples = ({str(case) for case in covering_cases(strength)} for strength in (2, 3))
    chosen = {str(case) for case in main_product()}
    names = {result["case"] for result in results}
    ranks = Counter(result["choices"]["tp"] * result["choices"]["pp"] * result["choices"]["dp"] for result in results)
    lines = [
        "# Any layout, same numbers: the layouts that were run",
        "",
        "This page counts the layouts that were compared with one process, for those who want to know how well the promise of equal numbers",
        "in any layout is tested.",
        "",
        "Each case trains a small GPT for three steps in float64, with ranks as threads. Every loss, gradient norm, gradient and weight is",
        "compared with the run of one process: max |a - b| <= 1e-10 max |b|, tensor by tensor. A case takes one choice from each row of the",
        "table below; combinations that the settings refuse are left out (`tests/support/layout_space.py`). The first command runs cases",
        "until its time is up, and resumes where it stopped; the second writes this page:",
        "",
        "    python tests/campaigns/parity_sweep.py results.jsonl --limit-minutes 600",
        "    python tests/campaigns/parity_sweep.py results.jsonl --report docs/parity.md",
        "",
        "Two processes share the work with `--shard 1/2 a.jsonl b.jsonl` and `--shard 2/2 b.jsonl a.jsonl`.",
        "",
        f"**{len(names):,} of {count_cases():,} cases have been run; {len(differing(results))} differ.** "
        f"This took one process {sum(result['seconds'] for result in results) / 3600:.2f} hours.",
        "",
        f"- a set of cases that covers every pair of choices: {len(pairs & names)} of {len(pairs)} (the tests, with `-m sweep`)",
        f"- a set that covers every triple of choices, up to 16 ranks: {len(triples & names)} of {len(triples)} "
        "(the tests, with `-m sweep`)",
        "- every combination of tp, sp, pp, v, dp, schedule, microbatches, recompute {none, selective, full}, style, tied and dropout, "
        f"each with some choice of the other dimensions: {len(chosen & names):,} of {len(chosen):,}, in shuffled order",
        f"- all other combinations, on up to 64 ranks: {len(names - triples - chosen):,} of {count_cases() - len(triples | chosen):,}, in "
        "shuffled order",
        *about(results),
        "",
        "| dimension | cases run, by choice |",
        "|---|---|",
        "| ranks | " + ", ".join(f"{n}: {count:,}" for n, count in sorted(ranks.items())) + " |",
        *choices_run(DIMENSIONS, results),
        "",
        "`--t5` does the same for a T5, which has dimensions of its own: [t5_matrix.md](t5_matrix.md).",
        "",
        *differing(results),
    ]
    return "\n".join(lines)


def section(flags: str, results: list[dict], count: int) -> str:
    """What has been run with other flags, which choose other cases or how they are run. count: cases that there are."""
    results = [result for result in results if result.get("flags", flags) == flags]
    lines = [
        f"## With `{flags}`",
        "",
        f"Written by `python tests/campaigns/parity_sweep.py results.jsonl {flags} --report docs/parity.md`.",
        "",
        f"**{len(results):,} of {count:,} cases have been run; {len(differing(results))} differ.**",
        "",
        *about(results),
        "",
        *differing(results),
    ]
    return "\n".join(lines)


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
    parser.add_argument(
        "--t5", action="store_true", help="a T5 (tests/support/t5_cases.py); with a file of results of its own"
    )
    parser.add_argument("--report", type=Path, help=REPORT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    flags = " ".join(["--options"] * given.options + [f"--compile {given.compile}"] * (given.compile != "off"))
    if given.report is None:
        i, n = (int(part) for part in given.shard.split("/"))
        if not 1 <= i <= n:
            parser.error(f"--shard is {given.shard}; it must be i/n with 1 <= i <= n")
        cases, count = ordered_cases(given.max_ranks), count_cases(given.max_ranks)
        compare, dimensions = partial(worst_difference, compile=given.compile), DIMENSIONS
        if given.t5:
            cases, compare, dimensions = swept_cases(), worst_t5_difference, T5_DIMENSIONS
        elif given.options:
            cases, dimensions = option_cases(), OPTION_DIMENSIONS
            compare = partial(worst_difference_of, compile=given.compile)
        if given.only or given.t5 or given.options:
            cases = [case for case in cases if given.only in str(case) and case.ranks <= given.max_ranks]
            count = len(cases)
        cases = islice(cases, i - 1, None, n)
        run_one = lambda case: run_case(case, compare, dimensions) | {"flags": flags}  # noqa: E731
        sweep(cases, -(-(count - i + 1) // n), given.results, given.limit_minutes * 60, run_one)
    results = list(read_results(*given.results).values())
    failed = sum(not result["ok"] for result in results)
    total = len(swept_cases()) if given.t5 else len(list(option_cases())) if given.options else count_cases()
    if given.report is not None:
        write_page(
            given.report,
            t5_report(results) if given.t5 else section(flags, results, total) if flags else report(results),
        )
    print(f"{len(results):,} of {total:,} cases have been run, {failed} differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
