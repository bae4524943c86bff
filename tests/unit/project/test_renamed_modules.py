"""Old names of modules serve what moved: tests written before a move find, and change, what the code has now."""

import subprocess
import sys
from pathlib import Path

PRODUCT = {
    "house/__init__.py": "",
    "house/core/__init__.py": "",
    "house/core/counting.py": "STEP = 2\ndef count(): return STEP\n",  # was house.old.counter
    "house/core/shapes/__init__.py": "from house.core.shapes.square import area\n",  # was the package house.forms
    "house/core/shapes/square.py": "SIDE = 3\ndef area(): return SIDE ** 2\n",
    "house/core/first.py": "class Alpha: pass\nLIMIT = 5\ndef limit(): return LIMIT\n",  # both were in house.mixed
    "house/core/second.py": "def beta(): return 'beta'\n",
    "house/core/loader.py": "WHAT = 'what house.core.reader was'\n",
    "house/core/reader.py": "WHAT = 'another module'\n",  # a new file under an old name
    "house/core/partly.py": "def stays(): return 'stays'\n",  # a name of it went to house.core.second
    "house/uses.py": "from house.core.reader import WHAT\nimport house.core.reader as reader\n",
}
TABLE = {
    "house.old.counter": "house.core.counting",
    "house.forms": "house.core.shapes",
    "house.mixed": "house.core.first",
    "house.mixed:gamma": "house.core.second:beta",
    "house.core.reader": "house.core.loader",
    "house.core.partly:went": "house.core.second:beta",
}
TEST = """
import sys
import house.old.counter as counter
from house import forms, mixed
from house.core import counting, first, partly, reader
from house.core.partly import stays, went
from house.core.reader import WHAT
from house.core.shapes import square
from house.forms.square import area
from house.mixed import Alpha, gamma
from house.old import counter as again
import house.uses

assert counter is counting is again, "one module under both names"
counter.STEP = 7
assert counting.count() == 7, "what is set under the old name is seen by the code"
assert counting.__spec__.name == "house.core.counting" and counting.__name__ == "house.core.counting"

assert sys.modules["house.forms.square"] is square, "what is below a package is not loaded twice"
square.SIDE = 4
assert area() == 16 and forms.area is area

assert Alpha is first.Alpha and gamma() == "beta"
mixed.LIMIT = 6
assert first.limit() == 6, "what is set on a module whose names went to several is set where the name is"
mixed.gamma = lambda: "patched"
assert sys.modules["house.core.second"].beta() == "patched"
assert not hasattr(mixed, "gone")

assert WHAT == reader.WHAT == "what house.core.reader was", "tests are given the old module of a name that is another's now"
assert house.uses.WHAT == house.uses.reader.WHAT == "another module", "and the code its own"
assert stays() == partly.stays() == "stays" and went() == "beta"

try:
    import house.core.reader
except ImportError as error:
    assert "from ... import" in str(error)
else:
    raise AssertionError("which of the two?")
try:
    import house.old.nowhere
except ModuleNotFoundError:
    print("all is found")
"""


def test_old_names_are_found(tmp_path: Path):
    for name, text in PRODUCT.items() | {("tests/test_house.py", TEST)}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    start = "import runpy, sys; from pathlib import Path; sys.path[:0] = sys.argv[1:3]; import renamed_modules; "
    start += (
        f"renamed_modules.install({TABLE!r}, Path(sys.argv[2])); runpy.run_path(sys.argv[2] + '/tests/test_house.py')"
    )
    harness = str(Path(__file__).parents[2])
    ended = subprocess.run([sys.executable, "-c", start, harness, str(tmp_path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "all is found\n"), ended.stderr
