"""Whether NVIDIA's own pretraining scripts train here, release by release, kind by kind, layout by layout.

    python tests/compat/megatron_scripts.py CLONE [--folder FOLDER] [--tags TAG ...] [--kinds gpt bert t5] [--write] [--again]

CLONE: a git clone of NVIDIA/Megatron-LM with its tags. FOLDER: keeps the scripts and the losses found, so that a second run only
does what is missing or failed; --again does all of it anew. --write puts the table into docs/megatron_scripts.md.

The scripts and the files beside them (builders, model_provider) lie unchanged in a folder of their own; nothing else of the clone
is read. Each runs 12 iterations at a tiny size in five layouts. A cell of the table says

    yes       the losses of this layout are those of one process (relative 2e-4)
    cuda      the same under `python -m megatron.on_cpu`, because the path that runs calls torch.cuda itself
    a number  a footnote with the reason

and the column "ours" whether the first three losses are those of our own script on the same weights.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from shlex import split
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
sys.path[:0] = [str(folder) for folder in (ROOT, SUPPORT, ROOT / "tests" / "campaigns", ROOT / "tests")]

import numpy as np  # noqa: E402
from layouts import Layout  # noqa: E402
from processes import Outcome, run  # noqa: E402
from sentence_files import write_sentences  # noqa: E402
from token_files import NULL, write  # noqa: E402

TAGS = (
    *(
        "v2.5",
        "v2.6",
        "23.04",
        "core_v0.4.0",
        "core_v0.5.0",
        "core_v0.6.0",
        "core_v0.7.0",
        "core_v0.8.0",
        "core_v0.9.0",
    ),
    *("core_v0.10.0", "core_v0.11.0", "core_v0.12.0", "core_v0.12.1", "core_v0.12.2", "core_v0.12.3", "core_v0.13.0"),
    *("core_v0.13.1", "core_v0.14.0", "core_v0.15.0", "core_v0.15.1", "core_v0.15.2", "core_v0.15.3", "core_v0.16.0"),
    *("core_v0.16.1", "core_v0.17.0", "core_v0.17.1", "core_v0.18.0", "core_v0.18.2", "core_v0.19.0"),
)
KINDS = ("gpt", "bert", "t5")
BESIDE = ("gpt_builders.py", "hybrid_builders.py", "mamba_builders.py", "model_provider.py", "pretrain_gpt.py")
LAYOUTS = {
    "one process": (Layout(), []),
    "TP 2": (Layout(tp=2), []),
    "PP 2": (Layout(pp=2), []),
    "DP 2, ZeRO 1": (Layout(dp=2), ["--use-distributed-optimizer"]),
    "TP 2 + SP": (Layout(tp=2, sp=True), []),
}
PAGE = ROOT / "docs" / "megatron_scripts.md"
ITERATIONS = 12
TOLERANCE = 2e-4

# The flags of their example scripts, at small sizes and without dropout, whose masks are not Megatron's.
COMMON = split(
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 4 "
    f"--train-iters {ITERATIONS} --lr-decay-iters {ITERATIONS} --lr-decay-style cosine --lr 5e-3 --min-lr 1e-5 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --split 949,50,1 --log-interval 1 --eval-interval 1000 "
    "--eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --distributed-backend gloo"
)
MODEL = {
    "gpt": split("--num-layers 2"),
    "bert": split("--num-layers 2"),
    "t5": split(
        "--encoder-num-layers 2 --decoder-num-layers 2 --decoder-seq-length 32 --kv-channels 8 --ffn-hidden-size 128 "
        "--vocab-extra-ids 20 --position-embedding-type learned_absolute"
    ),
}
# What our own script needs to be the model of the releases' script: for a T5, Megatron's defaults, and no tied weights,
# with which our layer has no bias.
OURS = {
    "gpt": [],
    "bert": [],
    "t5": split("--normalization LayerNorm --norm-epsilon 1e-5 --activation gelu --softmax-scale 0.35355339059327373"),
}
BIAS = "add_bias_linear: true\n"  # the T5 of our script has none, and no flag says that a model has

UNTIED = {"gpt": [], "bert": [], "t5": ["--untie-embeddings-and-output-weights"]}


def shown(clone: str, tag: str, path: str) -> bytes | None:
    """Return a file of a tag, or None."""
    found = subprocess.run(["git", "-C", clone, "show", f"{tag}:{path}"], capture_output=True, check=False)
    return None if found.returncode else found.stdout


def scripts_of(clone: str, tag: str, folder: Path) -> Path:
    """Write the scripts of a tag, and the files beside them, into a folder of their own; return it."""
    place = folder / "scripts" / tag
    if not place.exists():
        place.mkdir(parents=True)
        for name in BESIDE:
            if (content := shown(clone, tag, name)) is not None:
                (place / name).write_bytes(content)
        for kind in ("bert", "t5"):  # from some release on, an example
            name = f"pretrain_{kind}.py"
            content = shown(clone, tag, name) or shown(clone, tag, f"examples/{kind}/{name}")
            (place / name).write_bytes(content)
    return place


def fingerprint(place: Path, kind: str) -> str:
    """Return a hash of what a script consists of: releases share results where their files are equal."""
    used = [*(name for name in BESIDE if kind != "bert"), f"pretrain_{kind}.py"]
    content = b"".join((place / name).read_bytes() for name in used if (place / name).exists())
    return hashlib.sha256(content).hexdigest()[:16]


def data_flags(folder: Path) -> dict[str, list[str]]:
    """Return the flags of a token file for a GPT, and of sentences for a BERT and a T5."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    rng = np.random.RandomState(0)
    counts = [[((start + np.arange(300)) % 90).tolist()] for start in range(60)]
    lengths = [rng.randint(2, 12, rng.randint(2, 9)).tolist() for _ in range(200)]
    documents = ((rng.randint(60) // 2 + 5 + np.arange(sum(of)) // 2 % 50, of) for of in lengths)
    sentences = write_sentences(folder / "data", documents, words=60, pieces=20)
    tokens = ["--data-path", write(folder / "data" / "gpt", counts), *NULL]
    (folder / "bias.yaml").write_text(BIAS)
    return {"gpt": tokens, "bert": sentences, "t5": sentences}


def trained(script: Path, flags: list[str], layout: Layout, *, on_cpu: bool = False) -> Outcome:
    """Run a script to its end."""
    command = [str(script), *flags, *layout.flags]
    if on_cpu:
        command = [str(on_cpu_script(script)), *command]
    os.environ["PYTHONPATH"] = str(ROOT)
    return run(command, layout.ranks, timeout=120)


def on_cpu_script(script: Path) -> Path:
    """Write a script that does what `python -m megatron.on_cpu SCRIPT` does, for the server that forks scripts."""
    wrapper = script.parent / "_on_cpu.py"
    wrapper.write_text("import sys\nfrom megatron.on_cpu import main\nsys.exit(main())\n")
    return wrapper


def result_of(script: Path, flags: list[str], layout: Layout) -> dict[str, Any]:
    """Return the losses of a script in a layout, or the reason why it stopped."""
    for on_cpu in (False, True):
        try:
            outcome = trained(script, flags, layout, on_cpu=on_cpu)
        except AssertionError as error:
            return {"error": reason_of(str(error))}
        losses = [line.loss for line in outcome.training]
        if not any(outcome.codes) and len(losses) == ITERATIONS:
            return {"losses": losses, "norms": [line.grad_norm for line in outcome.training], "cuda": on_cpu}
        if not re.search("CUDA|NVIDIA driver", outcome.everything):
            break
    return {"error": reason_of(outcome.everything), "said": outcome.everything[-4000:]}


def reason_of(said: str) -> str:
    """Return the line of an output that says why a run stopped."""
    lines = [re.sub(r"^\[rank\d\]: ", "", line).strip() for line in said.splitlines()]
    errors = [
        line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception): |- |.*stopping, because (?!rank)", line)
    ]
    if errors:
        return errors[0].removeprefix("- ")
    return next((line for line in reversed(lines) if line), "nothing was printed")


def measure(
    clone: str, folder: Path, tags: list[str], kinds: list[str], layouts: list[str], again: bool
) -> dict[str, Any]:
    """Run what is missing or failed; return the results, by fingerprint and layout."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "results.json"
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() and not again else {}
    data = data_flags(folder)
    done = set()

    def measured(key: str, script: Path, flags: list[str], layout: Layout, name: str) -> None:
        if key not in done and "losses" not in results.get(key, {}):
            results[key] = result_of(script, flags, layout)
            kept.write_text(json.dumps(results))
            print(f"{name}: {results[key].get('error') or results[key]['losses'][-1]}", flush=True)
        done.add(key)

    for kind in kinds:
        # one microbatch in the comparison: a log line of ours weighs microbatches by their masked words
        flags = [*MODEL[kind], *COMMON, *data[kind]]
        own = [*flags, *UNTIED[kind], "--global-batch-size", "4"]
        more = ["--yaml-cfg", str(folder / "bias.yaml")] if kind == "t5" else []
        measured(f"ours {kind}", ROOT / f"pretrain_{kind}.py", [*own, *OURS[kind], *more], Layout(), f"our {kind}")
        for tag in tags:
            place = scripts_of(clone, tag, folder)
            script, hashed = place / f"pretrain_{kind}.py", fingerprint(place, kind)
            modern = ["--use-mcore-models"] if b"use_mcore_models" in script.read_bytes() else []
            for name in layouts:
                layout, more = LAYOUTS[name]
                batch = ["--global-batch-size", "8"]
                measured(f"{hashed} {name}", script, [*flags, *batch, *modern, *more], layout, f"{tag} {kind} {name}")
            measured(f"{hashed} ours", script, [*own, *modern], Layout(), f"{tag} {kind} as ours")
    return results


def close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= TOLERANCE * abs(y) for x, y in zip(a, b))


def table(folder: Path, clone: str, results: dict[str, Any]) -> str:
    """Return the table of the page, and its footnotes."""
    notes: list[str] = []

    def cell(result: dict[str, Any] | None, expected: dict[str, Any] | None, count: int = ITERATIONS) -> str:
        if result is None:
            return "-"
        problem = result.get("error")
        if problem is None:
            if expected is None or "losses" not in expected:
                problem = "there is nothing to compare it with"
            elif close(result["losses"][:count], expected["losses"][:count]):
                return "cuda" if result["cuda"] else "yes"
            else:
                problem = f"other losses: {result['losses'][:3]} instead of {expected['losses'][:3]}"
        problem = re.sub(r"/\w+/\S+", "FILE", problem.replace("|", "\\|"))
        if problem not in notes:
            notes.append(problem)
        return f"[{notes.index(problem) + 1}]"

    lines = ["| release | script | " + " | ".join(LAYOUTS) + " | ours |", "|---|---|" + "---|" * (len(LAYOUTS) + 1)]
    for tag in TAGS:
        for kind in KINDS:
            hashed = fingerprint(scripts_of(clone, tag, folder), kind)
            one = results.get(f"{hashed} one process")
            cells = [cell(results.get(f"{hashed} {name}"), one) for name in LAYOUTS]
            cells.append(cell(results.get(f"{hashed} ours"), results.get(f"ours {kind}"), 3))
            lines.append(f"| {tag} | `pretrain_{kind}.py` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))])


def page(table: str) -> str:
    """Return the page with a new table."""
    before, begin, rest = PAGE.read_text().partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end of the table -->")
    return f"{before}{begin}{table}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tags", nargs="+", default=list(TAGS), choices=TAGS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument("--again", action="store_true", help="forget the results of earlier runs")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp())
    results = measure(asked.clone, folder, asked.tags, asked.kinds, asked.layouts, asked.again)
    found = table(folder, asked.clone, results)
    print(found)
    if asked.write:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
