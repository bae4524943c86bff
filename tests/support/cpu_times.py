"""pytest -p cpu_times --cpu-times FILE: appends the processor time of each test to FILE, as "seconds name" a line.

Wall time says little on a machine that does other work. The time of a test is that of its process, and of the processes that it
started and waited for, from the set-up to the tear-down. What a test file computes once is counted for the test that asked first.
`python tests/support/cpu_times.py FILE` sums it up: the dearest files and tests.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="append the processor time of each test to FILE")


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _processor_seconds()
    result = yield
    file = item.config.getoption("--cpu-times")
    if file:
        with open(file, "a", encoding="utf-8") as lines:  # a line is one write, so that processes may share the file
            lines.write(f"{_processor_seconds() - before:.2f} {item.nodeid.removeprefix('tests/')}\n")
    return result


def _print_summary(path: str) -> None:
    by_file, by_test, cases = Counter(), Counter(), Counter()
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        seconds, _, name = line.partition(" ")
        test = name.partition("[")[0]
        by_file[test.partition("::")[0]] += float(seconds)
        by_test[test] += float(seconds)
        cases[test] += 1
    print(f"{sum(by_file.values()):.0f} s of processor time, {sum(cases.values())} tests")
    for title, counted in (("files", by_file), ("tests, with their cases", by_test)):
        print(f"\n{title}")
        for name, seconds in counted.most_common(100):
            print(f"{seconds:8.1f} s {cases.get(name) or '':>5} {name}")


if __name__ == "__main__":
    _print_summary(sys.argv[1])
