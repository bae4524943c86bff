"""Releases of Megatron are named where their differences are kept: in the older models, in the tables of flags and in commands."""

import re
from pathlib import Path

PRODUCT = Path(__file__).parents[3] / "megatron"
# A release by its tag, by the name of its project, or of its core.
RELEASE = re.compile(r"\bcore_[vr]0|Megatron(-LM)?( core)? v?\d|\bcore 0\.\d|\b23\.0[46]\b|\bv2\.[0-9]")
WHERE = (
    "evaluation/perplexity_and_mean_stderr.py",  # the source of a formula
    "legacy/",
    "training/arguments/args_namespace.py",
    "training/arguments/ignored_and_refused_flags.py",
    "training/arguments/flags_of_releases.py",
    "doctor",
    "on_cpu",
)


def test_no_file_of_the_product_names_a_release():
    named = [
        (path.relative_to(PRODUCT).as_posix(), found[0])
        for path in sorted(PRODUCT.rglob("*.py"))
        if not path.relative_to(PRODUCT).as_posix().startswith(WHERE)
        for found in RELEASE.finditer(path.read_text())
    ]
    assert not named
