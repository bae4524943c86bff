"""The public names that Megatron's own scripts and unit tests use are here.

    MEGATRON_LM_PATH=CLONE python -m pytest tests/compat/test_moved_or_unbuilt_megatron_names.py -s

CLONE: as in test_megatron_scripts.py.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from megatron_names import SOURCES, missing, used_names

CLONE = os.environ.get("MEGATRON_LM_PATH")
pytestmark = pytest.mark.skipif(
    CLONE is None or not Path(CLONE).is_dir(),
    reason="MEGATRON_LM_PATH names no clone of Megatron-LM; see the head of this file",
)
SHARE = 0.9  # at least, of the names


def test_the_names_that_megatrons_scripts_and_tests_use_are_here():
    users = used_names(CLONE)
    gone = missing(list(users))
    for tag in SOURCES:
        used = [name for name, tags in users.items() if tag in tags]
        print(f"\n{tag}: {len(used) - sum(name in gone for name in used)} of {len(used)} names", end="")
    print(f"\nall: {len(users) - len(gone)} of {len(users)} names; missing:")
    print("\n".join(f"    {name}: {reason}" for name, reason in gone.items()))
    assert len(users) - len(gone) >= SHARE * len(users)
