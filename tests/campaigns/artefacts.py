"""What earlier code has written to disk, read by later code to the same bits: checkpoints, caches, dumps, exported folders.

    python tests/campaigns/artefacts.py make FOLDER         at the earlier commit
    python tests/campaigns/artefacts.py check FOLDER        at the later one, on the same machine; exit code 1 if anything differs

    checkpoint/...   saved in the middle of a run. The run that resumes has every loss and norm of the one that went on, and ends in
                     the bits of its last checkpoint. Of some the folder of Hugging Face too: it is written again to the same bytes,
                     and imported to the same tensors
    copies           the local copy for restarts of a run that broke off
    data/...         data sets with the caches of their index arrays, which a run must find, and not build again
    dump             a step with a loss that is too large, which tools/replay_step.py computes again
    engine/...       a checkpoint of the engine of `megatron.deepspeed`

    git archive EARLIER tests | tar -x -C COPY
    python COPY/tests/campaigns/artefacts.py check FOLDER --product .       with what the earlier commit checks

Everything runs by the command line, and checkpoints are read by `independent_reader`, so that no name of a module matters. Paths are
in what is saved: FOLDER/kept has the artefacts, and each is used in FOLDER/work, in a copy with the path that it was made with.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from independent_reader import latest, read

ROOT = Path(__file__).resolve().parent.parent.parent

SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 4 "
    "--make-vocab-size-divisible-by 8 --lr 1e-2 --lr-decay-iters 20 --log-interval 1 --device cpu "
)
MOCK = "--mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 60 "
LLAMA = (
    "--swiglu --ffn-hidden-size 24 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --attention-dropout 0 --hidden-dropout 0 "
)
T5 = "--decoder-seq-length 8 "
SAVED, LAST = 2, 4  # iterations


@dataclass(frozen=True)
class Training:
    """A run of a script."""

    flags: str
    script: str = "pretrain_gpt.py"
    ranks: int = 1
    is_exported: bool = False
    chosen_once: str = ""  # flags of the first run alone, whose choice the checkpoint keeps


CHECKPOINTS = {
    "gpt": Training(""),
    "llama": Training(LLAMA, is_exported=True),
    "bf16": Training(LLAMA + "--bf16 ", chosen_once="--cpu-half-products native "),
    "fp16": Training("--fp16 --initial-loss-scale 262144 --loss-scale-window 3 "),
    "muon": Training("--optimizer muon "),
    "t5": Training(T5, "pretrain_t5.py", is_exported=True),
    "bert": Training("--norm-placement post ", "pretrain_bert.py", is_exported=True),
    "zero3": Training("--zero-stage 3 --bf16 ", ranks=2),
    "tp2": Training("--tensor-model-parallel-size 2 --sequence-parallel ", ranks=2),
    "offload-to-host": Training("--zero-stage 2 --optimizer-cpu-offload ", ranks=2),
    "offload-to-files": Training("--zero-stage 3 --offload-dir {here}/tier --offload-params "),
    "async": Training("--async-save --bf16 "),
}
COPIES = (
    "--save {here}/save --save-interval 2 --train-iters 6 --non-persistent-save-interval 1 --non-persistent-ckpt-type local "
    "--non-persistent-local-ckpt-dir {here}/disk "
)
COPIED, BREAKS = 3, 4  # iterations of the last copy, and of the error that ends the run
TEXT = "--tokenizer-type BertWordPieceLowerCase --vocab-file {here}/vocab.txt --data-path {here}/text_text_sentence "
DATA = {
    "gpt": Training(
        "--tokenizer-type NullTokenizer --vocab-size 60 --data-path 0.3 {here}/ids_text_document 0.7 {here}/more_text_document "
    ),
    "bert": Training(TEXT, "pretrain_bert.py"),
    "t5": Training(TEXT + T5 + "--vocab-extra-ids 5 ", "pretrain_t5.py"),
}
ENGINES = {
    "zero3": {"zero_optimization": {"stage": 3}},
    "zero1-bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
}
ENGINE = """
import hashlib, json, os, sys
import torch
from torch import nn
from megatron import deepspeed

folder, loads, more = sys.argv[1], sys.argv[2] == "load", json.loads(sys.argv[3])
given = {
    "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}},
}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 6))
engine, *_ = deepspeed.initialize(model=model, config=given | more)
data = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1))
losses = []
if loads:
    engine.load_checkpoint(folder)
for step in range(2 if loads else 0, 4):
    if step == 2 and not loads:
        engine.save_checkpoint(folder)
    for x in data[step].chunk(2)[engine.global_rank].chunk(2):
        x = x.to(next(engine.module.parameters()).dtype)
        loss = (engine(x) - x.flip(1)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
weights = {
    name: hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    for name, x in engine.module_state_dict().items()
}
norm = float(engine.get_global_grad_norm()).hex()
with open(f"{folder}.rank{engine.global_rank}.json", "w") as file:
    json.dump({"losses": losses[-4:], "norm": norm, "weights": weights}, file)
"""


# ---------------------------------------------------------------- commands


class Failed(Exception):
    """A command has ended otherwise than it must."""


@dataclass(frozen=True)
class Place:
    """Where an artefact is used, and the product that uses it."""

    here: Path
    product: Path

    def run(self, script: str, flags: str | list[str], ranks: int = 1, fails: bool = False) -> str:
        """What `python SCRIPT FLAGS` prints, as so many processes. {here} in the flags is the artefact's folder."""
        words = [word.format(here=self.here) for word in flags.split()] if isinstance(flags, str) else flags
        path = script if os.path.isabs(script) else str(self.product / script)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        processes = [
            subprocess.Popen(
                [sys.executable, path, *words],
                env=self._environment(rank, ranks, port),
                cwd=self.here,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        with ThreadPoolExecutor(ranks) as pool:
            said = list(pool.map(lambda process: process.communicate()[0], processes))
        if any((process.returncode != 0) != fails for process in processes):
            raise Failed(f"{script} {' '.join(words)}\n{said[0][-3000:]}")
        return said[0]

    def _environment(self, rank: int, ranks: int, port: int) -> dict[str, str]:
        """Of one thread: with more, bits would depend on their number."""
        names = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.product)}
        if ranks > 1:
            names |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return os.environ | names


def numbers(metrics: Path) -> dict[str, dict[str, str]]:
    """Every number of each iteration's record but times, floats as hexadecimal digits."""
    found = {}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "interval":
            kept = {key: x for key, x in record.items() if key not in ("iteration-time", "tokens-per-second")}
            found[str(record["iteration"])] = {
                key: x.hex() if isinstance(x, float) else str(x) for key, x in kept.items()
            }
    return found


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tensors_of(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of each tensor's type, shape and bits: of parameters, and of the optimizer's state."""
    return {
        name: sha256(f"{x.dtype} {x.bits.shape}".encode() + x.bits.tobytes())
        for name, x in sorted(read(checkpoint).tensors.items())
    }


def files_of(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()) for path in files}


# ---------------------------------------------------------------- kinds of artefacts: (make, check), which give what must be equal


def train(place: Place, one: Training, more: str) -> dict[str, dict[str, str]]:
    """The numbers of a run's iterations; of a run that resumes, those after it began."""
    (place.here / "metrics.jsonl").unlink(missing_ok=True)  # a run that resumes appends to it
    flags = f"{SMALL}{one.flags}--metrics-file {{here}}/metrics.jsonl {more}"
    place.run(one.script, flags, one.ranks)
    return numbers(place.here / "metrics.jsonl")


def make_checkpoint(place: Place, one: Training) -> dict[str, Any]:
    save = place.here / "save"
    ran = train(place, one, f"{MOCK}{one.chosen_once}--train-iters {LAST} --save-interval {SAVED} --save {{here}}/save")
    expected = {"numbers": {n: ran[n] for n in ran if int(n) > SAVED}, "tensors": tensors_of(latest(save))}
    shutil.rmtree(latest(save))
    pointer = save / "latest_checkpointed_iteration.txt"
    pointer.write_text(pointer.read_text().replace(str(LAST), str(SAVED)))
    if one.is_exported:
        export(place, "hf")
        expected |= {"exported": files_of(place.here / "hf"), "imported": imported(place)}
    return expected


def check_checkpoint(place: Place, one: Training) -> dict[str, Any]:
    ran = train(place, one, f"{MOCK}--train-iters {LAST} --load {{here}}/save --save {{here}}/again")
    found = {"numbers": ran, "tensors": tensors_of(latest(place.here / "again"))}
    if one.is_exported:
        export(place, "hf-again")
        found |= {"exported": files_of(place.here / "hf-again"), "imported": imported(place)}
        if files_of(place.here / "hf") != found["exported"]:
            found["exported"] |= {"the folder that is kept": "has other bytes"}
    return found


def export(place: Place, folder: str) -> None:
    flags = f"--load {{here}}/save --iteration {SAVED} --save-hf {{here}}/{folder} --max-shard-size 8KB"
    place.run("tools/checkpoint_convert.py", flags)


def imported(place: Place) -> dict[str, str]:
    """The tensors that the kept folder gives."""
    place.run("tools/checkpoint_convert.py", "--load {here}/hf --save {here}/imported")
    found = tensors_of(latest(place.here / "imported"))
    shutil.rmtree(place.here / "imported")
    return found


def make_copies(place: Place, one: Training) -> dict[str, Any]:
    """Two runs: one to the end, and one with an error in it, which leaves a copy that is newer than its checkpoint."""
    ran = train(place, one, MOCK + COPIES)
    expected = {
        "numbers": {n: ran[n] for n in ran if int(n) > COPIED},
        "tensors": tensors_of(latest(place.here / "save")),
    }
    shutil.rmtree(place.here / "save")
    shutil.rmtree(place.here / "disk")
    error = f"--rerun-interval {BREAKS} --error-injection-rate 1"
    place.run(one.script, f"{SMALL}{one.flags}{MOCK}{COPIES}{error}", one.ranks, fails=True)
    return expected


def check_copies(place: Place, one: Training) -> dict[str, Any]:
    ran = train(place, one, f"{MOCK}{COPIES}--load {{here}}/save")
    return {"numbers": ran, "tensors": tensors_of(latest(place.here / "save"))}


def make_data(place: Place, one: Training) -> dict[str, Any]:
    words = [f"w{number:02}" for number in range(50)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "."]
    (place.here / "vocab.txt").write_text("".join(f"{word}\n" for word in [*special, *words]))

    def draw(seed: int) -> Iterator[int]:
        while True:
            seed = (seed * 1103515245 + 12345) % 2**31
            yield seed >> 16

    for prefix, seed in (("ids", 1), ("more", 2)):
        dice = draw(seed)
        texts = [" ".join(str(next(dice) % 60) for _ in range(3 + next(dice) % 40)) for _ in range(30)]
        write_json_lines(place.here / f"{prefix}.jsonl", texts)
        tokenized = f"--input {{here}}/{prefix}.jsonl --output-prefix {{here}}/{prefix} --append-eod "
        if one.script == "pretrain_gpt.py":
            place.run("tools/preprocess_data.py", tokenized + "--tokenizer-type NullTokenizer --vocab-size 60")
    dice = draw(3)

    def sentence() -> str:
        return " ".join(words[next(dice) % 50] for _ in range(2 + next(dice) % 6)).capitalize() + "."

    write_json_lines(
        place.here / "text.jsonl", [" ".join(sentence() for _ in range(2 + next(dice) % 7)) for _ in range(40)]
    )
    if one.script != "pretrain_gpt.py":
        vocabulary = "--tokenizer-type BertWordPieceLowerCase --vocab-file {here}/vocab.txt --split-sentences"
        place.run("tools/preprocess_data.py", f"--input {{here}}/text.jsonl --output-prefix {{here}}/text {vocabulary}")
    return check_data(place, one)


def check_data(place: Place, one: Training) -> dict[str, Any]:
    """A file that was written again has another date, and one that was not found has a successor of another name."""
    ran = train(
        place, one, "--train-iters 4 --split 80,20,0 --eval-iters 1 --eval-interval 2 --data-cache-path {here}/cache"
    )
    cache = sorted(path for path in place.here.rglob("*") if path.is_file() and "cache" in path.parts[-2])
    if not cache:
        raise Failed("no cache was written")
    about = {path.name: f"{path.stat().st_mtime_ns} {sha256(path.read_bytes())}" for path in cache}
    return {"numbers": ran, "cache": about}


def write_json_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def make_dump(place: Place, one: Training) -> dict[str, Any]:
    """A learning rate that makes the losses of the second iteration larger than those of the first 100 microbatches."""
    dangerous = "--micro-batch-size 1 --global-batch-size 100 --lr 1e3 --check-for-spiky-loss --spike-action stop --bad-step-dir {here}/bad"
    place.run(one.script, f"{SMALL}{one.flags}{MOCK}--train-iters 4 {dangerous}", fails=True)
    return check_dump(place, one)


def check_dump(place: Place, one: Training) -> dict[str, Any]:
    said = place.run("tools/replay_step.py", "{here}/bad --device cpu")
    lines = [
        line.strip() for line in said.splitlines() if line.startswith(("   loss", "   norm", " tokens", "iteration"))
    ]
    if sum("comes again, to the bit" in line for line in lines) != 3:
        raise Failed(said[-3000:])
    return {"replayed": lines}


def make_engine(place: Place, more: dict[str, Any], way: str = "save") -> dict[str, Any]:
    script = place.here / "engine.py"
    script.write_text(ENGINE)
    place.run(str(script), [str(place.here / "engine"), way, json.dumps(more)], ranks=2)
    return {f"rank {rank}": json.loads((place.here / f"engine.rank{rank}.json").read_text()) for rank in range(2)}


def check_engine(place: Place, more: dict[str, Any]) -> dict[str, Any]:
    return make_engine(place, more, "load")


Kind = tuple[Callable[[Place, Any], dict[str, Any]], Callable[[Place, Any], dict[str, Any]], Any]


def artefacts() -> dict[str, Kind]:
    """name -> (make, check, what both are given)."""
    return {
        **{f"checkpoint/{name}": (make_checkpoint, check_checkpoint, one) for name, one in CHECKPOINTS.items()},
        "copies": (make_copies, check_copies, Training("--bf16 ")),
        **{f"data/{name}": (make_data, check_data, one) for name, one in DATA.items()},
        "dump": (make_dump, check_dump, Training("")),
        **{f"engine/{name}": (make_engine, check_engine, more) for name, more in ENGINES.items()},
    }


# ---------------------------------------------------------------- all of them


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """No other process makes or checks in this folder meanwhile."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another process works in {folder}")
        yield


def worked_in(folder: Path, name: str, product: Path, fresh: bool) -> Place:
    """The folder in which an artefact is made and used; with a copy of what is kept unless it is fresh."""
    here = folder / "work" / name
    shutil.rmtree(here, ignore_errors=True)
    if fresh:
        here.mkdir(parents=True)
    else:
        shutil.copytree(folder / "kept" / name, here)
    return Place(here, product)


def make(folder: Path, product: Path, only: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "record.json"
    if record.exists():
        sys.exit(f"{folder} has artefacts already")

    def one(name: str) -> dict[str, Any]:
        began = time.monotonic()
        make_it, _, given = artefacts()[name]
        place = worked_in(folder, name, product, fresh=True)
        expected = make_it(place, given)
        shutil.copytree(place.here, folder / "kept" / name)
        shutil.rmtree(place.here)
        print(f"made {name}  {time.monotonic() - began:.1f} s", flush=True)
        return expected

    with alone_in(folder):
        names = [name for name in artefacts() if name.startswith(only)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = dict(zip(names, pool.map(one, names), strict=True))
        commit = subprocess.run(
            ["git", "-C", str(product), "rev-parse", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        record.write_text(json.dumps({"folder": str(folder), "commit": commit, "artefacts": made}, indent=1) + "\n")
    print(f"{len(made)} artefacts in {folder}")
    return 0


def check(folder: Path, product: Path, only: str) -> int:
    """0 if every artefact gives what was recorded as it was made."""
    record = json.loads((folder / "record.json").read_text())
    if record["folder"] != str(folder):
        sys.exit(f"the artefacts were made in {record['folder']}, and hold that path: {folder} must be there")

    def one(name: str) -> bool:
        began = time.monotonic()
        try:
            _, check_it, given = artefacts()[name]
            found = check_it(worked_in(folder, name, product, fresh=False), given)
            wrong = differing(record["artefacts"][name], found)
        except (Failed, AssertionError, OSError) as error:
            wrong = [str(error)]
        result = "DIFFERS" if wrong else "equal  "
        print(f"{result} {name}  {time.monotonic() - began:.1f} s  {'; '.join(wrong[:8])}".rstrip(), flush=True)
        return not wrong

    with alone_in(folder):
        names = [name for name in record["artefacts"] if name.startswith(only)]
        if not names:
            sys.exit(f"no artefact's name begins with {only}")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            equal = list(pool.map(one, names))
    print(f"{len(names) - sum(equal)} of {len(names)} artefacts differ")
    return 0 if all(equal) else 1


def differing(expected: Any, found: Any, at: str = "") -> list[str]:
    """Where two values differ."""
    if expected == found:
        return []
    if not (isinstance(expected, dict) and isinstance(found, dict)):
        return [f"{at}: {str(found)[:100]} instead of {str(expected)[:100]}"]
    keys = [*expected, *(key for key in found if key not in expected)]
    return [line for key in keys for line in differing(expected.get(key), found.get(key), f"{at}/{key}".strip("/"))]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("make", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="NAME", help="artefacts whose name begins so")
    parser.add_argument("--product", type=Path, default=ROOT, help="folder of the code; default: this checkout")
    given = parser.parse_args(arguments)
    work = {"make": make, "check": check}[given.command]
    return work(given.folder.resolve(), given.product.resolve(), given.only)


if __name__ == "__main__":
    sys.exit(main())
