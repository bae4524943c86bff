"""What the golden record holds: the value of each entry, plain JSON, made by the helpers that the tests have.

layout/...      the triples of layout_space: losses, norms, gradients, weights, and what each rank sends in a step (the ledger)
zero/...        the triples of zero_matrix: the same for stages, hybrids, overlap, accumulation, recompute and offload
t5/...          cases of t5_cases in which every choice occurs
bert/...        small BERTs over axes, stages and schedules
context/...     cases of context_matrix in which every choice occurs
muon/...        cases of muon_matrix
half/...        GPT-2 and Llama shapes in bfloat16, and in float16 with a scaled loss; T5 in bfloat16
regions/...     --compile regions and layers, traced and run eagerly; one compiled by a C++ compiler
engine/...      the engine that `megatron.deepspeed` gives a loop of one's own
generation/...  token ids, with the cache of keys and values and without
convert/...     the files of exported Hugging Face folders, and the tensors of what is imported from them
memory/...      predicted bytes of each pipeline rank, by tier and kind
schedule/...    the lowered lists of every schedule over a grid of sizes
initial/...     names, shapes and values of the parameters that a run starts with
manifest/...    what a checkpoint's manifest says
help/...        what --help prints
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import context_matrix
import independent_reader
import layout_space
import muon_matrix
import parity_cases
import pretrain_t5
import t5_cases
import tiny_bert
import tiny_t5
import torch
import whole_run
import zero_matrix
from local_ranks import run_ranks
from tiny_run import GPT2, LLAMA, TINY_GPT2, TINY_LLAMA, Layout, Outcome, TinyTrainer, run
from torch import nn

import pretrain_bert
import pretrain_gpt
from megatron import deepspeed
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.ops.compile import compiled_region
from megatron.core.ops.compile.compile_config import CompileConfig
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.optimizer.loss_scaler import LossScaleConfig, make_grad_scaler
from megatron.core.pipeline_parallel.schedule.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule.registry import SCHEDULES
from megatron.training.memory.forecast_memory_along_schedule import forecast
from tools import checkpoint_convert, generate
from tools.estimating.job import read

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"gpt2": GPT2, "llama": LLAMA}
SAVED = {"one": Layout(), "tp2-pp2": Layout(tp=2, pp=2, m=2), "zero3": Layout(dp=2)}
SCRIPTS = ("pretrain_gpt.py", "pretrain_bert.py", "examples/minimal_fork/pretrain.py")

ZERO_2, ZERO_3 = DataParallelConfig(zero_stage=2), DataParallelConfig(zero_stage=3)
BERT = {  # layouts: the loss is a mean over a microbatch, or a sum where ranks share a text
    "one": Layout(m=4),
    "tp2sp": Layout(tp=2, sp=True, m=4, recompute="selective"),
    "tp2sp-pp2-zb-h1-zero2": Layout(
        tp=2, sp=True, pp=2, dp=2, m=2, schedule="zb-h1", data_parallel=ZERO_2, delayed=True
    ),
    "pp2-v2-interleaved": Layout(pp=2, v=2, m=4, schedule="interleaved", recompute="uniform 1"),
    "dp2-zero3": Layout(dp=2, m=2, data_parallel=ZERO_3, delayed=True),
}
SHARED_BERT = {
    "cp2": Layout(cp=2, m=2),
    "cp2-a2a-tp2sp": Layout(cp=2, cp_heads=2, cp_types=("a2a",), tp=2, sp=True, m=2),
}
HALF_LAYOUTS = {
    "one": Layout(),
    "tp2sp-pp2": Layout(tp=2, sp=True, pp=2, m=2),
    "dp2-zero3": Layout(dp=2, m=2, data_parallel=ZERO_3),
    "dp2-zero2-overlap": Layout(dp=2, m=2, data_parallel=replace(ZERO_2, overlap_grad_reduce=True)),
}
HALVES = {"bf16": {"bf16": True}, "fp16": {"fp16": True}}
REGIONS = {
    "gpt2-one": (TINY_GPT2, Layout()),
    "llama-tp2sp-pp2": (TINY_LLAMA, Layout(tp=2, sp=True, pp=2, m=2)),
    "gpt2-bf16-recompute": (
        replace(TINY_GPT2, fp64=False, bf16=True, hidden_dropout=0.0, attention_dropout=0.0),
        Layout(recompute="uniform 1"),
    ),
}
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and parts of DeepSpeed's configuration
    "one": (1, {}),
    **{f"dp2-zero{stage}": (2, {"zero_optimization": {"stage": stage}}) for stage in (0, 1, 2, 3)},
    "dp2-zero2-bf16": (2, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}),
    "dp2-zero1-fp16": (2, {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "initial_scale_power": 8}}),
    "dp2-zero3-offload": (
        2,
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
    ),
}
# Flags of a small model that is trained for two iterations and saved.
SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60 --make-vocab-size-divisible-by 8 --micro-batch-size 4 --lr 1e-2 --eval-iters 0 --device cpu --train-iters 2 "
)
ROTARY = (
    "--swiglu --ffn-hidden-size 24 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --hidden-dropout 0 --attention-dropout 0 "
)
TRAINED = {
    "gpt2": (pretrain_gpt, ""),
    "llama": (pretrain_gpt, ROTARY),
    "llama-bf16": (pretrain_gpt, ROTARY + "--bf16 --cpu-half-products widened "),
    "bert": (pretrain_bert, "--norm-placement post "),
    "t5": (pretrain_t5, "--decoder-seq-length 8 "),
}
GENERATED = {"gpt2": "", "llama": "", "llama-bf16": "", "t5": "--decoder-start-token-id 1 --max-new-tokens 8"}
GENERATION = {
    "cached": "--greedy",
    "uncached": "--greedy --recompute",
    "drawn": "--seed 7 --num-samples 2 --temperature 1.5 --top_k 20 --top_p 0.9",
}
MEMORY = {
    "gpt": "",
    "gpt-bf16-recompute": "--bf16 --recompute-activations",
    "gpt-tp2sp-pp2": "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --world-size 4",
    "gpt-zero3-bf16": "--zero-stage 3 --bf16 --attention-dropout 0 --world-size 4",
    "gpt-offload": "--zero-stage 2 --optimizer-cpu-offload --cpu-offloading-num-layers 2 --world-size 2",
    "gpt-cp2": "--context-parallel-size 2 --cp-comm-type p2p --attention-dropout 0 --bf16 --world-size 2",
    "gpt-muon": "--optimizer muon --world-size 2",
    "gpt-interleaved": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8 --world-size 2",
    "llama-fp16": "--fp16 " + ROTARY,
    "bert": "--model bert --bf16",
    "t5": "--model t5 --decoder-seq-length 32",
}


def entries() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what makes its value, plain JSON) of the whole record."""
    for case in layout_space.covering_cases(3):
        yield f"layout/{case}", partial(of_layout, case)
    for case in zero_matrix.covering_cases(3):
        yield f"zero/{case}", partial(of_zero, case)
    for case in t5_cases.t5_cases(1):
        yield f"t5/{case}", partial(of_t5, case)
    for name in tiny_bert.CONFIGS:
        for layout in BERT:
            yield f"bert/{name}-{layout}", partial(of_bert, name, BERT[layout], tiny_bert.BERT)
    for layout in SHARED_BERT:
        yield f"bert/bert-{layout}", partial(of_bert, "bert", SHARED_BERT[layout], tiny_bert.SHARED_BERT)
    for case in context_matrix.covering_cases(1):
        yield f"context/{case}", partial(of_context, case)
    for case in muon_matrix.covering_cases()[::4]:
        yield f"muon/{case}", partial(of_muon, case)
    for precision in HALVES:
        for name in MODELS:
            for layout in HALF_LAYOUTS:
                yield f"half/{precision}-{name}-{layout}", partial(of_half, precision, name, layout)
    for case in t5_cases.half_cases(1)[::3]:
        yield f"half/t5-{case}", partial(of_t5, case)
    for name in REGIONS:
        for choice in ("regions", "layers"):
            yield f"regions/{choice}-{name}", partial(of_regions, choice, name, "eager")
    yield "regions/compiled-llama", partial(of_compiled, TINY_LLAMA)
    for name in ENGINES:
        yield f"engine/{name}", partial(of_engine, *ENGINES[name])
    for name in GENERATED:
        yield f"generation/{name}", partial(of_generation, name)
    for name in TRAINED:
        yield f"convert/{name}", partial(of_conversion, name)
    for name in MEMORY:
        yield f"memory/{name}", partial(of_memory, MEMORY[name])
    for name in SCHEDULES:
        yield f"schedule/{name}", partial(of_schedule, name)
    for name in MODELS:
        yield f"initial/{name}", partial(of_initial, name)
        for layout in SAVED:
            yield f"manifest/{name}-{layout}", partial(of_manifest, name, layout)
    for script in [*SCRIPTS, *(f"tools/{path.name}" for path in sorted((ROOT / "tools").glob("*.py")))]:
        if "__main__" in (ROOT / script).read_text() or script in SCRIPTS:
            yield f"help/{script}", partial(of_help, script)


# ---------------------------------------------------------------- training


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names, types, shapes and bits."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return sha.hexdigest()


def of_outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "losses": [loss.hex() for loss in outcome.losses],
        "norms": [norm.hex() for norm in outcome.norms],
        "gradients": [digest(grads) for grads in outcome.grads],
        "weights": digest(outcome.weights),
        "ledger": [
            [rank, *sorted(f"{op} {axis} {size} x{times}" for (op, axis, size), times in calls.items())]
            for rank, calls in outcome.calls
        ],
    }


def of_layout(case: layout_space.Case) -> dict[str, Any]:
    layout, texts = parity_cases.layout_of(case), parity_cases.texts_of(case)
    return of_outcome(run(parity_cases.model_of(case), layout, global_batch=case.global_batch, texts=texts))


def of_zero(case: zero_matrix.ZeroCase) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, zero_matrix.several_slices():
        return of_outcome(run(case.model, replace(case.run_layout, offload=case.offload_to(folder))))


def of_t5(case: t5_cases.T5Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"steps": 2, "global_batch": t5_cases.BATCH, "optimizer": case.optimizer, "subject": tiny_t5.T5}
        return of_outcome(run(case.model, case.layout(folder), **options))


def of_bert(name: str, layout: Layout, subject: Any) -> dict[str, Any]:
    return of_outcome(run(tiny_bert.CONFIGS[name], layout, steps=2, global_batch=8, subject=subject))


def of_context(case: context_matrix.ContextCase) -> dict[str, Any]:
    options = {"steps": 2, "global_batch": context_matrix.BATCH, "optimizer": case.optimizer}
    return of_outcome(run(case.model, case.layout, texts=context_matrix.TEXTS[case.texts], **options))


def of_muon(case: muon_matrix.MuonCase) -> dict[str, Any]:
    return of_outcome(run(muon_matrix.MODELS[case.model], case.run_layout, optimizer=case.optimizer))


def of_half(precision: str, name: str, layout: str) -> dict[str, Any]:
    """float16 with a scale that overflows in some steps, whose updates are left out."""
    config = replace({"gpt2": TINY_GPT2, "llama": TINY_LLAMA}[name], fp64=False, **HALVES[precision])
    settings = LossScaleConfig(initial_loss_scale=2.0**18, hysteresis=1)
    make_scaler = partial(make_grad_scaler, settings, fp16=config.fp16)
    return of_outcome(run(config, HALF_LAYOUTS[layout], steps=4, make_scaler=make_scaler))


def of_regions(choice: str, name: str, backend: str) -> dict[str, Any]:
    config, layout = REGIONS[name]
    compiled_region.BACKEND = backend
    return of_outcome(run(replace(config, compile=choice), layout, steps=2))


def of_compiled(config: Any) -> dict[str, Any]:
    if not compiles(CompileConfig("regions"), "cpu"):
        return {"left out": "no C++ compiler"}
    return of_outcome(run(replace(config, compile="regions", num_layers=1), Layout(), steps=2))


def of_engine(ranks: int, more: dict[str, Any]) -> dict[str, Any]:
    """A loop of its own over an engine of a plain model: two accumulated microbatches in each of three updates."""
    given = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.999], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}},
    }
    data = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(1))

    def work(mesh: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 6))
        engine, *_ = deepspeed.initialize(model=model, config=given | more)
        losses, norms = [], []
        for whole in data:
            for x in whole.chunk(ranks)[mesh.samples.rank].chunk(2):
                x = x.to(next(engine.module.parameters()).dtype)
                loss = (engine(x) - x.flip(1)).float().square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item().hex())
            norms.append(float(engine.get_global_grad_norm()).hex())
        return {"losses": losses, "norms": norms, "weights": digest(engine.module_state_dict())}

    return {f"rank {rank}": found for rank, found in enumerate(run_ranks({"dp": ranks}, work))}


# ---------------------------------------------------------------- generation, conversion, memory


def train_small(name: str, folder: Path) -> None:
    """A checkpoint of a run's second iteration."""
    script, flags = TRAINED[name]
    defaults = getattr(script, "DEFAULTS", None)  # of T5: those of the published models
    whole_run.run(f"{SMALL}{flags} --save {folder}", script=script, tiny=[], args_defaults=defaults)


def said_by(main: Callable[[list[str]], int | None], *arguments: Any) -> str:
    """What a tool writes to stdout; it must succeed."""
    said = StringIO()
    with redirect_stdout(said):
        code = main([str(argument) for argument in arguments])
    if code:
        raise RuntimeError(f"{main.__module__} ends with {code}")
    return said.getvalue()


def of_generation(name: str) -> dict[str, str]:
    """Ids beyond the length that the model was trained with."""
    with tempfile.TemporaryDirectory() as folder:
        train_small(name, Path(folder))
        shared = ["--device", "cpu", "--load", folder, "--prompt", "5 6 7", "--prompt", "1 2", "--max-new-tokens", 20]
        shared += GENERATED[name].split()
        return {way: said_by(generate.main, *shared, *flags.split()) for way, flags in GENERATION.items()}


def of_conversion(name: str) -> dict[str, Any]:
    """The files of the folder of Hugging Face, and every tensor of the checkpoint that it is imported to."""
    with tempfile.TemporaryDirectory() as folder:
        own, foreign, back = (Path(folder) / part for part in ("own", "foreign", "back"))
        train_small(name, own)
        said_by(checkpoint_convert.main, "--load", own, "--save-hf", foreign, "--max-shard-size", "8KB")
        said_by(checkpoint_convert.main, "--load", foreign, "--save", back)
        return {
            "exported": digests_of_files(foreign),
            "imported": digests_of_checkpoint(independent_reader.latest(back)),
        }


def digests_of_files(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def digests_of_checkpoint(folder: Path) -> dict[str, str]:
    """SHA-256 of each tensor's type, shape and bits, by docs/checkpoint_format.md alone."""
    tensors = independent_reader.read(folder).tensors
    return {
        name: hashlib.sha256(f"{x.dtype} {x.bits.shape}".encode() + x.bits.tobytes()).hexdigest()
        for name, x in sorted(tensors.items())
    }


def of_memory(flags: str) -> list[dict[str, Any]]:
    """Of each pipeline rank the bytes by tier and kind, which a dry run with shapes finds."""
    small = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --vocab-size 500 "
        "--make-vocab-size-divisible-by 8 --device cpu "
    )
    job = read(shlex.split(small + flags)).job
    return [{"layers": one.layers, "parameters": one.parameters, "bytes": one.by_tier} for one in forecast(job)]


# ---------------------------------------------------------------- schedules, initial values, manifests, help


def of_schedule(name: str) -> dict[str, str]:
    """The lists of every rank, in short where they are long."""
    lists = {}
    for p, m, v in ((1, 3, 1), (2, 4, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (4, 12, 3), (8, 16, 1)):
        try:
            made = SCHEDULES[name](p, m, v)
        except ValueError as refusal:
            lists[f"{p} {m} {v}"] = str(refusal)
            continue
        rows = "\n".join(" ".join(map(str, row)) for row in add_reduce(add_transfers(made)))
        lists[f"{p} {m} {v}"] = rows if p < 4 else hashlib.sha256(rows.encode()).hexdigest()
    return lists


def of_initial(name: str) -> dict[str, list]:
    """Of each parameter its shape and the SHA-256 of its first values."""

    def values(mesh) -> dict[str, list]:
        chunk = TinyTrainer(mesh, MODELS[name], Layout()).model[0]
        return {n: [list(p.shape), digest({n: p.data})] for n, p in chunk.module.named_parameters()}

    return run_ranks(Layout().sizes, values)[0]


def of_manifest(name: str, layout: str) -> dict[str, Any]:
    chosen = SAVED[layout]
    if layout == "zero3":
        chosen = replace(chosen, data_parallel=replace(chosen.data_parallel, zero_stage=3))
    with tempfile.TemporaryDirectory() as folder:

        def save(mesh) -> None:
            tiny = TinyTrainer(mesh, MODELS[name], chosen)
            tiny.step(0)
            tiny.save(Path(folder), 1)

        run_ranks(chosen.sizes, save)
        (path,) = Path(folder).glob("iter_*/manifest.json")
        manifest = json.loads(path.read_text().replace(folder, "FOLDER"))
        del manifest["sha256"]  # of a text that names the folder
        return manifest


def of_help(script: str) -> str:
    environment = {**os.environ, "COLUMNS": "120"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, str(ROOT / script), "--help"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
