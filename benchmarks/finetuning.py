"""Measure a step of fine-tuning and of LoRA against transformers with peft, on the same weights and batches.

    peers/bin/python benchmarks/finetuning.py                                     all works; half an hour on two quiet cores
    peers/bin/python benchmarks/finetuning.py --works lora-packed --ways eager    one of them
    peers/bin/python benchmarks/finetuning.py --rounds 1 --steps 1 --layers 1     whether it runs

    works    sft-padded sft-packed lora-padded lora-packed: all weights or adapters of all linears, one example a line or lines
             filled with examples that do not see each other
    ways     eager, and compiled: ours by --compile regions, transformers by torch.compile

The interpreter has torch, transformers and peft. Each contender is a process of its own that waits while another one's turn lasts: a
turn is `--steps` steps, the order rotates, and both take the samples of our data set in its order. AdamW, the norm clipped to 1,
float32. Threads that wait for one another sleep, so processor time is work on a shared machine too. Prints for each work the median
milliseconds of a step by the clock and by processor time, the peak of resident memory above that after the imports, and ours / theirs
of each: below 1 is faster, or smaller. Exit code 1 if the losses of one step differ by 1e-3, or if a ratio by processor time or of
memory is above 1.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

WORKS = ("sft-padded", "sft-packed", "lora-padded", "lora-packed")
WAYS = ("eager", "compiled")
CONTENDERS = ("ours", "theirs")
LR, RANK, ALPHA = 1e-3, 16, 32
Step = Callable[[], float]  # returns the loss


def write_inputs(folder: Path, options: argparse.Namespace) -> None:
    """Write a Llama of drawn weights, and examples whose lengths differ and whose answers are about half of them."""
    import random

    import numpy as np
    from sft_folder import CONFIGS, shapes_of, write_lines, write_safetensors, write_tokenizer

    model = folder / "model"
    write_tokenizer(model)
    sizes = {
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": options.hidden * 8 // 3 // 16 * 16,
        "max_position_embeddings": options.sequence,
    }
    config = CONFIGS["llama"] | sizes
    (model / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes_of(config).items():
        drawn = 0.02 * draw.standard_normal(shape, dtype=np.float32)
        tensors[name] = 1 + drawn if len(shape) == 1 else drawn
    write_safetensors(model / "model.safetensors", tensors)

    random.seed(0)
    records = []
    for _ in range(2000):
        length = random.randint(options.sequence // 8, options.sequence - 8)  # of bytes, which are tokens
        text = "".join(random.choices("abcdefgh ", k=length))
        records.append({"prompt": text[: length // 2], "completion": text[length // 2 :]})
    write_lines(folder / "pairs.jsonl", records)


# ---------------------------------------------------------------- contenders, each in a process of its own


@contextlib.contextmanager
def our_step(folder: Path, work: str, way: str, options: argparse.Namespace) -> Iterator[Step]:
    """A step of finetune_gpt.py's trainer."""
    from script_run import trainer_of

    import finetune_gpt
    from megatron.core import parallel_state
    from megatron.training.step import train_step

    kind, packing = work.split("-")
    flags = (
        f"--pretrained-checkpoint {folder}/model --data-path {folder}/pairs.jsonl --split 1,0,0 --device cpu --lr {LR} "
        f"--seq-length {options.sequence} --micro-batch-size {options.batch} --train-iters 1000 --lr-decay-style constant "
        "--weight-decay 0 --adam-beta2 0.999"
    )
    flags += f" --lora-rank {RANK} --lora-alpha {ALPHA}" if kind == "lora" else ""
    flags += "" if packing == "packed" else " --no-sft-packing"
    flags += " --compile regions" if way == "compiled" else ""

    class Script:
        train_valid_test_datasets_provider = staticmethod(finetune_gpt.train_valid_test_datasets_provider)
        model_provider = staticmethod(finetune_gpt.model_provider)
        forward_step = staticmethod(finetune_gpt.forward_step)
        extra_args_provider = staticmethod(finetune_gpt.add_own_flags)
        args_defaults = finetune_gpt.defaults_of(flags.split())

    mesh = parallel_state.initialize_model_parallel()
    with trainer_of(Script, mesh, flags, predicts=False) as trainer:
        data = trainer.training_data()
        step_of = functools.partial(train_step, trainer.pipeline, trainer.optimizer, data, lr=LR, num_microbatches=1)

        def step() -> float:
            result = step_of(first_sample=0)
            return result.losses["lm loss"]

        yield step


@contextlib.contextmanager
def their_step(folder: Path, work: str, way: str, options: argparse.Namespace) -> Iterator[Step]:
    """A step of transformers' Llama, with peft's adapters, on the samples of our data set."""
    import torch
    import transformers

    from megatron.core.datasets.data_config import DataConfig
    from megatron.core.datasets.sft_dataset import build_sft_datasets
    from megatron.core.tokenizers import TokenizerConfig, build_tokenizer

    kind, packing = work.split("-")
    is_packed = packing == "packed"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if kind == "lora":
        import peft

        settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True)
    called = torch.compile(model) if way == "compiled" else model

    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder / "model")))
    config = DataConfig(
        data_path=[str(folder / "pairs.jsonl")],
        split="1,0,0",
        seq_length=options.sequence,
        sft=True,
        sft_packing=is_packed,
        reset_position_ids=True,
        reset_attention_mask=True,
    )
    train, _, _ = build_sft_datasets(config, tokenizer, [1000 * options.batch, 0, 0], 1234, say=lambda line: None)
    done = 0

    def step() -> float:
        nonlocal done
        items = [train[done + i] for i in range(options.batch)]
        done += options.batch
        tokens, labels, mask, documents, positions = (
            torch.stack([torch.from_numpy(item[name]) for item in items]).long()
            for name in ("tokens", "labels", "loss_mask", "document_ids", "position_ids")
        )
        # packed: transformers sees by the positions where an example begins; padded: what is no padding
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if is_packed:
            inputs["position_ids"] = positions
        else:
            inputs["attention_mask"] = (documents == documents[:, :1]).long()
        logits = called(**inputs).logits
        targets = labels.masked_fill(mask == 0, -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        adam.zero_grad()
        return loss.item()

    yield step


def resident(name: str) -> float:
    """Return a figure of this process's resident memory, VmRSS or VmHWM, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(name)


def serve(folder: Path, contender: str, work: str, way: str, options: argparse.Namespace) -> None:
    """Take as many steps as each line on standard input says, and answer with their figures."""
    import torch

    import finetune_gpt  # noqa: F401  (what both import does not count)

    if contender == "theirs":
        import peft  # noqa: F401
        import transformers  # noqa: F401
    if way == "compiled":  # the compiler's modules, part of which peft has imported already
        import torch._inductor.compile_fx
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    answers = os.fdopen(os.dup(1), "w")  # what is printed is no answer
    os.dup2(2, 1)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    with (our_step if contender == "ours" else their_step)(folder, work, way, options) as step:
        for line in sys.stdin:
            count = int(line)
            losses = []
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(count):
                losses.append(step())
            clock, cpu = time.perf_counter() - began, time.process_time() - cpu_began
            figures = {"clock": 1000 * clock / count, "cpu": 1000 * cpu / count, "losses": losses}
            answers.write(json.dumps(figures | {"peak": resident("VmHWM") - before}) + "\n")
            answers.flush()


# ---------------------------------------------------------------- measurements


def measure(folder: Path, work: str, way: str, options: argparse.Namespace) -> bool:
    """Measure and print one work in one way; return whether it meets the gates."""
    processes = {}
    for name in CONTENDERS:
        words = [sys.executable, __file__, *sys.argv[1:], "--serve", str(folder), name, work, way]
        log = open(folder / f"{name}.log", "w")  # noqa: SIM115  until the process ends
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        environment = dict(os.environ)
        if options.passive:
            environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        processes[name] = subprocess.Popen(words, env=environment, **pipes)

    def turn(name: str, steps: int) -> dict[str, Any]:
        process = processes[name]
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{name} has failed: {(folder / f'{name}.log').read_text()[-2000:]}")
        return json.loads(answer)

    # warm up, one after the other, and compare
    first = {name: turn(name, options.warmup)["losses"] for name in CONTENDERS}
    difference = abs(first["ours"][0] - first["theirs"][0])
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    order = list(CONTENDERS)
    for _ in range(options.rounds):
        for name in order:
            turns[name].append(turn(name, options.steps))
        order.reverse()
    for process in processes.values():
        process.stdin.close()
        process.wait()

    # print
    def median(name: str, figure: str) -> float:
        return statistics.median(one[figure] for one in turns[name])

    ratios = {}
    for figure in ("clock", "cpu"):
        each = [a[figure] / b[figure] for a, b in zip(turns["ours"], turns["theirs"])]
        ratios[figure] = median("ours", figure) / median("theirs", figure), min(each), max(each)
    peaks = {name: turns[name][-1]["peak"] for name in CONTENDERS}
    memory = peaks["ours"] / peaks["theirs"]
    print(f"{work}, {way}: the first loss differs by {difference:.1e}")
    for name in CONTENDERS:
        print(
            f"  {name:8}{median(name, 'clock'):9.1f} ms a step, {median(name, 'cpu'):9.1f} of the processor, "
            f"{peaks[name]:8.0f} MiB"
        )
    shown = [f"{figure} {value:.3f} ({low:.2f}-{high:.2f})" for figure, (value, low, high) in ratios.items()]
    print(f"  ours / theirs: {', '.join(shown)}, memory {memory:.3f}", flush=True)
    return difference < 1e-3 and ratios["cpu"][0] <= 1 and memory <= 1


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    sizes = {
        "hidden": 256,
        "layers": 4,
        "vocab": 4096,
        "sequence": 256,
        "batch": 8,
        "rounds": 9,
        "steps": 3,
        "warmup": 3,
    }
    for name, default in (sizes | {"threads": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--passive",
        action="store_true",
        help="waiting threads sleep: on a busy machine, where one that spins would count as work",
    )
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.serve[0]), *options.serve[1:], options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), options)
        met = [measure(Path(folder), work, way, options) for work in options.works for way in options.ways]
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
