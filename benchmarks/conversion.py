"""Measure memory and speed of tools/checkpoint_convert.py, in both directions, against a copy of as many bytes.

    python benchmarks/conversion.py --results conversion.jsonl               a Llama of 2.2 GB in bfloat16, in files of 500 MB
    python benchmarks/conversion.py --layers 4 --rounds 1 --folder /scratch
    python benchmarks/conversion.py --layers 8 --dtype float32
    python benchmarks/conversion.py --model /scratch/llama --rounds 0        makes the model alone, for later runs

    in      a Hugging Face folder -> a checkpoint of ours          against   a copy of the folder's files
    out     that checkpoint -> a Hugging Face folder               against   a copy of the checkpoint's file

The copy reads 16 MiB at a time, passes them through SHA-256, writes them, and syncs each file: one process without torch. A round
runs all four, each side first in every other round, and each run is a process of its own, whose largest resident memory, processor
time and seconds come from the system (wait4). All begin alike: old output removed and the disk synced, the source in the page
cache, and as much free memory as the output takes in use just before, as a file's pages. (A virtual machine that gives unused
memory back to its host, as free page reporting does after two seconds, else spends up to ten times the processor time on the same
writes, now on one side, now on the other.) The largest resident memory of a process that imports the tool and converts nothing is
subtracted, and its seconds too. What comes out is compared with what went in, tensor by tensor. Exit code 1 if it differs, if memory
beyond the imports exceeds twice the largest fused tensor and 100 MB, or if the speed (the median of the rounds' ratios) is less than
half of the copy's. Linux.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.convert.formats.safetensors_header import header_of, read_header  # noqa: E402  # which needs no torch

CHUNK = 16 << 20  # bytes that pass at a time on the plain side
MARGIN = 100_000_000  # bytes
EXTRA_MEMORY = 1 << 29  # bytes of memory for a process beside its output
ITEM = {"bfloat16": 2, "float32": 4}
HEAD, QUERIES, GROUPS = 64, 32, 8


# ---------------------------------------------------------------- the folder


def shapes_of(layers: int, ffn: int, words: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's tensors, by their names."""
    hidden = HEAD * QUERIES
    kv_width = HEAD * GROUPS
    shapes = {"model.embed_tokens.weight": (words, hidden)}
    for i in range(layers):
        rows = {"q": hidden, "k": kv_width, "v": kv_width, "o": hidden}
        layer = {f"self_attn.{x}_proj": (count, hidden) for x, count in rows.items()}
        layer |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
        layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}


def make_folder(folder: Path, options: argparse.Namespace) -> None:
    """Write a Hugging Face folder: config.json, and random weights in files of at most 500 MB."""
    import numpy as np

    shapes = shapes_of(options.layers, options.ffn, options.words)
    item = ITEM[options.dtype]
    config = {
        **{
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "dtype": options.dtype,
            "vocab_size": options.words,
        },
        **{"hidden_size": HEAD * QUERIES, "intermediate_size": options.ffn, "num_hidden_layers": options.layers},
        **{"num_attention_heads": QUERIES, "num_key_value_heads": GROUPS, "max_position_embeddings": 2048},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if files[-1] and sum(map(int, map(np.prod, [*files[-1].values(), shape]))) * item > 500_000_000:
            files.append({})
        files[-1][name] = shape
    generator = np.random.default_rng(0)
    index = {}  # tensor -> file
    for number, tensors in enumerate(files, 1):
        path = folder / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with open(path, "wb") as file:
            file.write(header_of({name: (options.dtype, shape) for name, shape in tensors.items()}))
            for name, shape in tensors.items():
                index[name] = path.name
                left = int(np.prod(shape))
                while left:
                    values = generator.standard_normal(min(left, CHUNK // 4), dtype=np.float32)
                    if item == 4:
                        file.write(values)
                    else:  # bfloat16 is the upper half of float32
                        file.write((values.view(np.uint32) >> 16).astype(np.uint16))
                    left -= len(values)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def hashes_of(folder: Path) -> dict[str, str]:
    """Return each tensor's dtype, shape and SHA-256."""
    hashes = {}
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            for name, x in read_header(path).items():
                file.seek(x.start)
                digest = hashlib.sha256()
                left = x.nbytes
                while left:
                    chunk = file.read(min(left, CHUNK))
                    digest.update(chunk)
                    left -= len(chunk)
                hashes[name] = f"{x.dtype} {x.shape} {digest.hexdigest()}"
    return hashes


# ---------------------------------------------------------------- runs


def copy_files(source: Path, target: Path) -> None:
    """Copy and hash the files of a folder: the plain side."""
    target.mkdir()
    buffer = memoryview(bytearray(CHUNK))
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as input_file, open(target / path.name, "wb", buffering=0) as output_file:
            while count := input_file.readinto(buffer):
                digest.update(buffer[:count])
                rest = buffer[:count]
                while rest:
                    rest = rest[output_file.write(rest) :]
            os.fsync(output_file.fileno())


def run(*command: str) -> dict[str, float]:
    """Run a Python process; return its seconds, processor seconds and peak resident bytes."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}")
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "processor": usage.ru_utime + usage.ru_stime, "peak": 1024 * usage.ru_maxrss}


def get_ready(source: Path, scratch: Path, nbytes: int) -> None:
    """Read the files of `source` into the page cache, and free `nbytes` of memory that has just been page cache."""
    buffer = memoryview(bytearray(CHUNK))
    with open(scratch, "wb", buffering=0) as file:
        for _ in range(0, nbytes, CHUNK):
            file.write(buffer)
    for path in source.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    scratch.unlink()


TOOL = str(ROOT / "tools" / "checkpoint_convert.py")
DIRECTIONS = {
    "in": ("hf", ["--save"]),
    "out": ("in", ["--max-shard-size", "500MB", "--save-hf"]),
}  # name: source, flags


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def one_run(side: str, name: str, source: Path, work: Path) -> dict[str, float]:
    """Run one side, tool or copy, of a direction. The output of the tool stays in `work/name`."""
    if side == "copy":
        command = [__file__, "--copy", str(source)]
        target = work / "copy"
    else:
        command = [TOOL, "--load", str(source), *DIRECTIONS[name][1]]
        target = work / name
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    run(__file__, "--ready", str(source), str(work / "scratch"), str(bytes_in(source) + EXTRA_MEMORY))
    took = run(*command, str(target))
    shutil.rmtree(work / "copy", ignore_errors=True)
    return took


def measure(work: Path, model: Path, rounds: int) -> dict[str, list[dict[str, dict[str, float]]]]:
    """Return the runs of each direction: for each round, the run of each side."""
    took: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in DIRECTIONS}
    for turn in range(rounds):
        imports = run(TOOL, "--help")
        for name, (folder, _) in DIRECTIONS.items():
            source = model if folder == "hf" else work / folder
            sides = ("tool", "copy") if turn % 2 else ("copy", "tool")
            took[name].append({"imports": imports} | {side: one_run(side, name, source, work) for side in sides})
    return took


def result_of(name: str, rounds: list[dict[str, dict[str, float]]], options: argparse.Namespace, nbytes: int) -> dict:
    """The record of a direction: medians over the rounds."""

    def median(key: str, of: Callable[[float, float], float]) -> float:
        """Of what `of` makes of the tool's (without imports) and the copy's."""
        return statistics.median(of(one["tool"][key] - one["imports"][key], one["copy"][key]) for one in rounds)

    item, hidden = ITEM[options.dtype], HEAD * QUERIES
    fused = 2 * options.ffn * hidden * item
    imports = statistics.median(one["imports"]["peak"] for one in rounds)
    beyond = max(one["tool"]["peak"] for one in rounds) - imports
    times = {}
    for key, prefix, suffix in (("seconds", "", ""), ("processor", "processor_", "_by_processor")):
        times[f"{prefix}seconds"] = median(key, lambda tool, copy: tool)
        times[f"copy_{prefix}seconds"] = median(key, lambda tool, copy: copy)
        times[f"relative_speed{suffix}"] = median(key, lambda tool, copy: copy / tool)
    return {
        **{"direction": name, "bytes": nbytes, "dtype": options.dtype, "rounds": len(rounds)},
        **{"largest_fused_bytes": fused, "largest_bytes": max(fused, options.words * hidden * item)},
        **{"imports_bytes": imports, "beyond_imports_bytes": beyond, "allowed_bytes": 2 * fused + MARGIN},
        **times,
        "runs": rounds,
    }


def show(result: dict) -> str:
    ratios = ", ".join(
        f"{one['copy']['seconds'] / (one['tool']['seconds'] - one['imports']['seconds']):.2f}" for one in result["runs"]
    )
    return (
        f"{result['direction']:3} {result['bytes'] / 1e9:.2f} GB: {result['beyond_imports_bytes'] / 1e6:.0f} MB beyond the "
        f"imports' {result['imports_bytes'] / 1e6:.0f} (allowed {result['allowed_bytes'] / 1e6:.0f}); {result['seconds']:.2f} s, "
        f"copy {result['copy_seconds']:.2f} s, speed {result['relative_speed']:.2f} of the copy ({ratios}); processor "
        f"{result['processor_seconds']:.2f} s, copy {result['copy_processor_seconds']:.2f} s "
        f"({result['relative_speed_by_processor']:.2f})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ffn", type=int, default=8192, help="width of the MLP")
    parser.add_argument("--words", type=int, default=32000, help="rows of the word table")
    parser.add_argument("--dtype", choices=ITEM, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", help="where to work, on the disk to measure; default: the system's temporary folder"
    )
    parser.add_argument("--model", type=Path, help="folder of the model, which is made if it is not there, and kept")
    parser.add_argument("--results", type=Path, help="file of JSON lines to which a line for each direction is added")
    parser.add_argument("--copy", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--ready", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.copy or options.make or options.ready:  # the processes that this command starts
        if options.ready:
            source, scratch, nbytes = options.ready
            get_ready(Path(source), Path(scratch), int(nbytes))
        elif options.copy:
            copy_files(*options.copy)
        else:
            make_folder(options.make, options)
        return 0
    fine = True
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = Path(folder)
        model = options.model or work / "hf"
        if not model.exists():
            run(__file__, "--make", str(model), *sys.argv[1:])
        if not options.rounds:
            return 0
        # ru_maxrss of a child begins with this process's own, which is small: neither torch nor numpy is imported here
        for name, rounds in measure(work, model, options.rounds).items():
            source = model if name == "in" else work / "in"
            result = result_of(name, rounds, options, bytes_in(source))
            fine &= result["beyond_imports_bytes"] <= result["allowed_bytes"] and result["relative_speed"] >= 0.5
            print(show(result), flush=True)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
        is_same = hashes_of(model) == hashes_of(work / "out")
        if not is_same:
            print("what came out differs from what went in")
    return 0 if fine and is_same else 1


if __name__ == "__main__":
    sys.exit(main())
