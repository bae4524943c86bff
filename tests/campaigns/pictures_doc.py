"""Writes the pictures that the documents show, by the tools that the documents describe: a minute on a CPU.

    python tests/campaigns/pictures_doc.py

Of PICTURES the SVG files depend on the code alone, and a test compares them. The PNG files are of two runs of small models; a test
only checks that a page shows each. docs/optimizers.png is of benchmarks/optimizers.py, docs/tuning.png of
the commands of docs/after_pretraining.md, docs/expert_loads.png of two of the metrics files of
benchmarks/experts_loss.py, by tools/plot_run.py.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import plot_schedule  # noqa: E402  (found below ROOT)
from tools.drawing import page, ring  # noqa: E402

DOCS = ROOT / "docs"
PICTURES = {
    plot_schedule.PICTURE: ("schedules.md", "parallelism.md"),
    page.PICTURE: ("context_parallel.md", "parallelism.md"),
    "runs.png": ("watching.md",),
    "expert_loads.png": ("experts.md",),
    "differ.png": ("checkpoint_format.md",),
    "optimizers.png": ("optimizers.md",),
    "tuning.png": ("after_pretraining.md",),
}
DRAWN = {plot_schedule.PICTURE: plot_schedule.picture_of_page, page.PICTURE: lambda: ring.svg_of(page.RANKS_DRAWN)}
TINY = ["--yaml-cfg", "examples/recipes/tiny.yaml", "--eval-interval", "20", "--eval-iters", "2", "--num-workers", "0"]
# Rows of words that occur in no sample of a step keep their bits under plain SGD.
STEPS = shlex.split(
    "--vocab-size 250 --micro-batch-size 1 --global-batch-size 1 --optimizer sgd --weight-decay 0 --eval-iters 0 "
    "--untie-embeddings-and-output-weights"
)


def run(*words: str) -> str:
    """Return what a program prints, run with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True).stdout


def write_runs(folder: Path) -> None:
    """Losses, rates, norms and throughput of two runs, of which one learns faster."""
    logs = []
    for rate in ("3e-3", "3e-4"):
        logs.append(folder / f"lr_{rate}.log")
        logs[-1].write_text(run("pretrain_gpt.py", *TINY, "--lr", rate, "--min-lr", "0"))
    run("tools/plot_run.py", "--log", *map(str, logs), "--output", str(DOCS / "runs.png"))


def write_difference(folder: Path) -> None:
    """A model before and after its fourth step."""
    save = ["--save", str(folder / "run"), "--save-interval", "3", "--train-iters", "4", "--lr-warmup-iters", "0"]
    run("pretrain_gpt.py", *TINY, *STEPS, *save)
    both = ["--load", str(folder / "run"), "--compare", str(folder / "run"), "--ckpt-step", "3", "--compare-step", "4"]
    run("tools/checkpoint_inspect.py", *both, "--tensors", "^model/", "--png", str(DOCS / "differ.png"))


if __name__ == "__main__":
    for name, draw in DRAWN.items():
        (DOCS / name).write_text(draw())
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder))
        write_difference(Path(folder))
