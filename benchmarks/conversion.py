"""Memory and speed of tools/checkpoint_convert.py, in both directions, against a copy of as many bytes.

    python benchmarks/conversion.py --results conversion.jsonl               a Llama of 2.2 GB in bfloat16, in files of 500 MB
    python benchmarks/conversion.py --layers 4 --rounds 1 --folder /scratch
    python benchmarks/conversion.py --layers 8 --dtype float32

    in      a Hugging Face folder -> a checkpoint of ours          against   a copy of the folder's files
    out     that checkpoint -> a Hugging Face folder               against   a copy of the checkpoint's file

The copy reads 16 MiB at a time, passes them through SHA-256, writes them, and syncs each file: one process without torch. Both sides
take turns, each run a process of its own, whose largest resident memory, processor time and seconds come from the system (wait4). The
largest resident memory of a process that imports the tool and converts nothing is subtracted, and its seconds too. What comes out is
compared with what went in, tensor by tensor. Exit code 1 if it differs, if memory beyond the imports exceeds twice the largest fused
tensor and 100 MB, or if the speed (of medians, without the imports) is less than half of the copy's. Linux.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.core.interchange.formats.safetensors import header_of, read_header  # noqa: E402  # which needs no torch

CHUNK = 16 << 20  # bytes that pass at a time on the plain side
MARGIN = 100_000_000  # bytes
ITEM = {"bfloat16": 2, "float32": 4}
HEAD, QUERIES, GROUPS = 64, 32, 8


# ---------------------------------------------------------------- the folder


def shapes_of(layers: int, ffn: int, words: int) -> dict[str, tuple[int, ...]]:
    """A Llama's tensors by their names."""
    hidden, groups = HEAD * QUERIES, HEAD * GROUPS
    shapes = {"model.embed_tokens.weight": (words, hidden)}
    for i in range(layers):
        rows = {"q": hidden, "k": groups, "v": groups, "o": hidden}
        layer = {f"self_attn.{x}_proj": (count, hidden) for x, count in rows.items()}
        layer |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
        layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}


def make_folder(folder: Path, options: argparse.Namespace) -> None:
    """config.json, and random weights in files of at most 500 MB."""
    import numpy as np

    shapes, item = shapes_of(options.layers, options.ffn, options.words), ITEM[options.dtype]
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
    dice, index = np.random.default_rng(0), {}
    for number, tensors in enumerate(files, 1):
        path = folder / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with open(path, "wb") as file:
            file.write(header_of({name: (options.dtype, shape) for name, shape in tensors.items()}))
            for name, shape in tensors.items():
                index[name], left = path.name, int(np.prod(shape))
                while left:
                    some = dice.standard_normal(min(left, CHUNK // 4), dtype=np.float32)
                    file.write(some if item == 4 else (some.view(np.uint32) >> 16).astype(np.uint16))
                    left -= len(some)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def hashes_of(folder: Path) -> dict[str, str]:
    """Each tensor's dtype, shape and SHA-256."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            for name, x in read_header(path).items():
                file.seek(x.start)
                digest, left = hashlib.sha256(), x.nbytes
                while left:
                    digest.update(some := file.read(min(left, CHUNK)))
                    left -= len(some)
                found[name] = f"{x.dtype} {x.shape} {digest.hexdigest()}"
    return found


# ---------------------------------------------------------------- runs


def copy_files(source: Path, target: Path) -> None:
    """The plain side."""
    target.mkdir()
    room = memoryview(bytearray(CHUNK))
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as one, open(target / path.name, "wb", buffering=0) as other:
            while count := one.readinto(room):
                digest.update(room[:count])
                rest = room[:count]
                while rest:
                    rest = rest[other.write(rest) :]
            os.fsync(other.fileno())


def run(*command: str) -> dict[str, float]:
    """Seconds, processor seconds and most resident bytes of a process."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}")
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "processor": used.ru_utime + used.ru_stime, "peak": 1024 * used.ru_maxrss}


def measure(name: str, source: Path, work: Path, flags: list[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Runs of each side, in turns; the last output of the tool stays in `work/name`."""
    took: dict[str, list[dict[str, float]]] = {"tool": [], "imports": [], "copy": []}
    tool = str(ROOT / "tools" / "checkpoint_convert.py")
    commands = {
        "tool": [tool, "--load", str(source), *flags, str(work / name)],
        "imports": [tool, "--help"],
        "copy": [__file__, "--copy", str(source), str(work / "copy")],
    }
    for turn in range(rounds):
        shutil.rmtree(work / name, ignore_errors=True)
        for side in list(commands)[:: 1 if turn % 2 else -1]:
            took[side].append(run(*commands[side]))
        shutil.rmtree(work / "copy")
    return took


def result_of(name: str, took: dict[str, list[dict[str, float]]], options: argparse.Namespace, nbytes: int) -> dict:
    """The record of a direction."""
    middle = {
        side: {key: statistics.median(one[key] for one in runs) for key in ("seconds", "processor")}
        for side, runs in took.items()
    }
    item, hidden = ITEM[options.dtype], HEAD * QUERIES
    fused = 2 * options.ffn * hidden * item
    imports = statistics.median(one["peak"] for one in took["imports"])
    beyond = max(one["peak"] for one in took["tool"]) - imports
    own, other = (
        {key: middle[side][key] - (middle["imports"][key] if side == "tool" else 0) for key in ("seconds", "processor")}
        for side in ("tool", "copy")
    )
    return {
        **{"direction": name, "bytes": nbytes, "dtype": options.dtype, "rounds": len(took["tool"])},
        **{"largest_fused_bytes": fused, "largest_bytes": max(fused, options.words * hidden * item)},
        **{"imports_bytes": imports, "beyond_imports_bytes": beyond, "allowed_bytes": 2 * fused + MARGIN},
        **{
            "seconds": own["seconds"],
            "copy_seconds": other["seconds"],
            "relative_speed": other["seconds"] / own["seconds"],
        },
        **{"processor_seconds": own["processor"], "copy_processor_seconds": other["processor"]},
        **{"relative_speed_by_processor": other["processor"] / own["processor"], "runs": took},
    }


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
    parser.add_argument("--results", type=Path, help="file of JSON lines to which a line for each direction is added")
    parser.add_argument("--copy", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.copy or options.make:  # the processes that this command starts
        copy_files(*options.copy) if options.copy else make_folder(options.make, options)
        return 0
    fine = True
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = Path(folder)
        run(__file__, "--make", str(work / "hf"), *sys.argv[1:])
        # ru_maxrss of a child begins with this process's own, which is small: neither torch nor numpy is imported here
        steps = {"in": ("hf", ["--save"]), "out": ("in", ["--max-shard-size", "500MB", "--save-hf"])}
        for name, (source, flags) in steps.items():
            nbytes = sum(path.stat().st_size for path in (work / source).rglob("*") if path.is_file())
            result = result_of(name, measure(name, work / source, work, flags, options.rounds), options, nbytes)
            beyond, allowed = result["beyond_imports_bytes"], result["allowed_bytes"]
            fine &= beyond <= allowed and result["relative_speed"] >= 0.5
            print(
                f"{name:3} {nbytes / 1e9:.2f} GB: {beyond / 1e6:.0f} MB beyond the imports' {result['imports_bytes'] / 1e6:.0f} "
                f"(allowed {allowed / 1e6:.0f}); {result['seconds']:.2f} s, copy {result['copy_seconds']:.2f} s, speed "
                f"{result['relative_speed']:.2f} of the copy; processor {result['processor_seconds']:.2f} s, copy "
                f"{result['copy_processor_seconds']:.2f} s ({result['relative_speed_by_processor']:.2f})",
                flush=True,
            )
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
        if not (same := hashes_of(work / "hf") == hashes_of(work / "out")):
            print("what came out differs from what went in")
    return 0 if fine and same else 1


if __name__ == "__main__":
    sys.exit(main())
