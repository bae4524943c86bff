"""A flag that is given changes the numbers, the files or the log of a run, or is refused, or a line of the log names it.

Each flag gets a value that is not its default, in a run of one process that may have no use for it, and in one that has
(USES). What a flag changes elsewhere (speed, memory, other ranks, a run that fails) is listed with the reason. The sweep walks
all flags, the test command a few.
"""

import contextlib
import hashlib
import io
import re
import shlex
import shutil
import typing
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from whole_run import run

from megatron.core.base.dataclass_flags import default_of, flags_of, option_fields, value_kind
from megatron.training.arguments.config import COMPONENTS

BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 31 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 0.1 --log-interval 1 --eval-iters 1 --eval-interval 2 --train-iters 4 --device cpu"
)
# Values that differ from those of BASE too, where the next number or the first choice would not do.
VALUES = {
    "--ffn-hidden-size": "16",
    "--hidden-size": "16",
    "--num-attention-heads": "4",
    "--max-position-embeddings": "16",
    "--make-vocab-size-divisible-by": "8",
    "--global-batch-size": "2",
    "--eval-global-batch-size": "8",
    "--train-iters": "3",
    "--eval-interval": "1",
    "--start-eval-at-iter": "3",
    "--pipeline-model-parallel-layout": "EttL",
    "--exit-interval": "3",
    "--exit-signal": "SIGUSR1",
    "--lr-decay-iters": "3",
    "--lr-warmup-iters": "1",
    "--lr-warmup-init": "0.01",
    "--lr-wsd-decay-iters": "2",
    "--min-lr": "0.01",
    "--decoupled-min-lr": "0.01",
    "--zero-stage": "1",
    "--data-parallel-sharding-strategy": "optim",
    "--log-interval": "2",
    "--window-size": "3,0",
    "--window-attn-skip-freq": "2",
    "--no-rope-freq": "2",
    "--rope-scaling": '{"rope_type": "linear", "factor": 4}',
    "--cp-comm-type": "all_gather",
    "--pipeline-schedule": "gpipe",
    "--recompute-granularity": "selective",
    "--recompute-modules": "mlp",
    "--muon-num-ns-steps": "3",
    "--save-hf-max-shard-size": "1KB",
    "--iterations-to-skip": "2",
    "--moe-layer-freq": "2",
    "--moe-router-load-balancing-type": "seq_aux_loss",
    "--moe-aux-loss-coeff": "0.5",
    "--moe-router-dtype": "fp64",
    "--num-experts": "4",
}
# What gives a flag something to do.
USES = {
    "--num-query-groups": "--group-query-attention",
    "--add-qkv-bias": "--disable-bias-linear",
    "--add-attention-output-bias": "--disable-bias-linear",
    "--add-mlp-bias": "--disable-bias-linear",
    "--rotary-base": "--position-embedding-type rope",
    "--rotary-percent": "--position-embedding-type rope",
    "--rotary-interleaved": "--position-embedding-type rope",
    "--rotary-seq-len-interpolation-factor": "--position-embedding-type rope",
    "--rope-scaling-factor": "--position-embedding-type rope --use-rope-scaling --rotary-base 1000000 --save {tmp}/saved",
    "--rope-scaling": "--position-embedding-type rope",
    "--no-rope-freq": "--position-embedding-type rope",
    "--window-attn-skip-freq": "--window-size 3,0",
    "--activation-func-clamp-value": "--gated",
    "--glu-linear-offset": "--gated",
    "--qk-norm-over": "--qk-layernorm",
    "--sgd-momentum": "--optimizer sgd",
    "--muon-momentum": "--optimizer muon",
    "--muon-nesterov": "--optimizer muon",
    "--muon-num-ns-steps": "--optimizer muon",
    "--muon-coefficient-type": "--optimizer muon",
    "--muon-scale-mode": "--optimizer muon",
    "--muon-extra-scale-factor": "--optimizer muon",
    "--muon-no-split-qkv": "--optimizer muon",
    "--lr-wsd-decay-iters": "--lr-decay-style WSD --lr-wsd-decay-iters 3",
    "--lr-wsd-decay-style": "--lr-decay-style WSD --lr-wsd-decay-iters 3",
    "--lr-warmup-style": "--lr-warmup-iters 2 --lr-warmup-init 0.01",
    "--lr-warmup-init": "--lr-warmup-iters 2",
    "--decoupled-min-lr": "--decoupled-lr 0.05",
    "--initial-loss-scale": "--fp16",
    "--min-lr": "--lr-decay-style cosine",
    "--start-weight-decay": "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.5",
    "--save-interval": "--save {tmp}/saved",
    "--no-save-optim": "--save {tmp}/saved",
    "--keep-checkpoints": "--save {tmp}/saved --save-interval 1",
    "--timing-log-option": "--timing-log-level 1",
    "--log-progress": "--save {tmp}/saved",
    "--inspect": "--metrics-file {tmp}/metrics.jsonl",
    "--log-validation-ppl-to-tensorboard": "--metrics-file {tmp}/metrics.jsonl",
    "--error-injection-rate": "--rerun-interval 1",
    "--error-injection-type": "--rerun-interval 1 --error-injection-rate 1",
}
# The same of experts: each is given in a run with a mixture of 4 experts, and these words.
USES_OF_EXPERTS = {
    "--moe-shared-expert-gate": "--moe-shared-expert-intermediate-size 8",
    "--moe-shared-expert-overlap": "--moe-shared-expert-intermediate-size 8 --moe-token-dispatcher-type alltoall",
    "--moe-router-num-groups": "--moe-router-num-groups 1 --moe-router-group-topk 1",
    "--moe-router-group-topk": "--moe-router-num-groups 2 --moe-router-group-topk 1",
    "--moe-router-enable-expert-bias": "--moe-router-score-function sigmoid",
    "--moe-router-bias-update-rate": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --save {tmp}/saved",
    "--moe-router-load-balancing-type": "--moe-aux-loss-coeff 0.5",
    "--moe-pad-expert-input-to-capacity": "--moe-expert-capacity-factor 0.5",
    "--moe-token-drop-policy": "--moe-expert-capacity-factor 0.5",
    "--moe-apply-probs-on-input": "--moe-router-topk 1 --moe-router-pre-softmax",
}
# Flags that change neither numbers nor files nor log in a run of one process that goes well -> what they change.
ELSEWHERE = {
    "what happens when a number, a rank, a disk or a limit is bad": (
        "--no-check-for-nan-in-loss-and-grad --nan-action --check-for-spiky-loss --check-for-large-grads --rerun-mode "
        "--rerun-interval --bad-step-dir --check-state-hash-interval --spike-action --hang-timeout --hang-timeout-floor "
        "--distributed-timeout-minutes --no-check-memory --exit-duration-in-mins --exit-signal-handler "
        "--decrease-batch-size-if-needed --poison-released-buffers"
    ),
    "speed or memory": "--eval-micro-batch-size --num-workers --empty-unused-memory-level --recompute-modules --tiled-mlp --tiled-loss --recompute-granularity",
    "speed or memory of experts, or where their tokens travel": (
        "--moe-shared-expert-overlap --moe-token-dispatcher-type --moe-grouped-gemm --moe-layer-recompute"
    ),
    "what a script may do": "--moe-enable-routing-replay",
    "which process this is, or how it joins others": "--local-rank --distributed-backend --cp-comm-type",
    "which number ends a document, in files and in generated text": "--null-tokenizer-eod-id",
}
ONLY_ELSEWHERE = {flag for flags in ELSEWHERE.values() for flag in flags.split()}
# Flags that BASE itself gives a value that cannot be another, or whose other value would leave this process.
FIXED = {"--mock-data", "--device", "--hf-config", "--profile-ranks"}


@dataclass(frozen=True)
class Flag:
    name: str
    words: tuple[str, ...]


def _flag(component: type, field: Any) -> Flag | None:
    """Return a flag with a value that is not its default; None if there is no other."""
    name = flags_of(field)[0]
    kind = value_kind(component, field)
    default = default_of(field)
    if name in VALUES:
        return Flag(name, (name, VALUES[name]))
    if kind is bool:
        return Flag(name, (name,))
    choices = field.metadata["names"] or (typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ())
    if choices:
        other = next((choice for choice in choices if choice not in (default, "auto")), None)
        return None if other is None else Flag(name, (name, str(other)))
    if typing.get_origin(kind) is list:
        return Flag(name, (name, "1"))
    if kind is int:
        return Flag(name, (name, str((default or 1) + 1)))
    if kind is float:
        return Flag(name, (name, str((default or 0.5) * 0.5)))
    return Flag(name, (name, "{tmp}/x"))


FLAGS = [
    flag
    for component in COMPONENTS.values()
    for field in option_fields(component)
    if (flag := _flag(component, field)) is not None and flag.name not in FIXED
]


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: exit code, its lines without times, what it says in refusing, and the hashes of its files."""

    code: Any
    lines: tuple[str, ...]
    error: str
    files: tuple[tuple[str, str], ...]


_TIMES = re.compile(
    r"\[\d{4}-[^\]]*\]|elapsed time per iteration \(ms\): [\d.]+|[\d.,]+ (ms|s)\b|[\d.,]+ (samples|tokens)(/| a | per )s\w*"
)


def outcome(flags: str, folder: Path) -> Outcome:
    """Run pretrain_gpt.py with BASE and these flags in this process. {tmp}: an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(folder):
        try:
            run(flags.replace("{tmp}", str(folder)), tiny=shlex.split(BASE))
        except SystemExit as stop:
            code = stop.code

    # the lines, without the list of settings, which names every flag
    lines = []
    is_list = False
    for line in out.getvalue().splitlines():
        is_list = line.startswith("settings that are not") or (is_list and line.startswith("  "))
        if not is_list and "the last value counts" not in line:
            lines.append(_TIMES.sub("", line))
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():  # a manifest and a record hold times and all settings
            is_bare = path.suffix in (".json", ".prom") or path.name == "x"
            content = "" if is_bare else hashlib.sha256(path.read_bytes()).hexdigest()
            if path.suffix == ".jsonl":
                content = ",".join(sorted(set(re.findall(r'"([\w -]+)":', path.read_text()))))
            files.append((str(path.relative_to(folder)), content))
    return Outcome(code, tuple(lines), err.getvalue(), tuple(files))


@cache
def outcome_without(flags: str) -> Outcome:
    return outcome(flags, _FOLDER)


_FOLDER = Path()


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs, since its name stands in their lines."""
    global _FOLDER
    if Path() == _FOLDER:
        _FOLDER = tmp_path_factory.mktemp("flags") / "run"
    return _FOLDER


@pytest.mark.full
@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: " ".join(flag.words))
def test_a_flag_has_an_effect_or_is_named(flag: Flag, folder: Path):
    """In a run that gives it nothing to do."""
    base = outcome_without("")
    assert base.code == 0
    given = outcome(shlex.join(flag.words), folder)
    if given.code != 0:
        assert given.code == 2 and "cannot start" in given.error, given.error
        return
    if given.lines == base.lines and given.files == base.files:
        assert flag.name in ONLY_ELSEWHERE, f"{flag.words} changes nothing, and no line names it"


@pytest.mark.full
@pytest.mark.parametrize("name", USES)
def test_a_flag_has_an_effect_where_it_is_of_use(name: str, folder: Path):
    (flag,) = (flag for flag in FLAGS if flag.name == name)
    base = outcome_without(USES[name])
    given = outcome(f"{USES[name]} {shlex.join(flag.words)}", folder)
    assert "cannot start" not in base.error + given.error
    assert not any("no effect" in line and re.search(rf"{name}(?![\w-])", line) for line in given.lines)
    assert given != base


OF_EXPERTS = [flag for flag in FLAGS if flag.name.startswith("--moe-") and flag.name != "--moe-per-layer-logging"]


@pytest.mark.sweep
@pytest.mark.parametrize("flag", OF_EXPERTS, ids=lambda flag: " ".join(flag.words))
def test_a_flag_of_experts_has_an_effect_or_is_named_in_a_mixture(flag: Flag, folder: Path):
    """With what it needs beside it, and alone."""
    with_experts = "--num-experts 4 --ffn-hidden-size 8"
    for more in sorted({"", USES_OF_EXPERTS.get(flag.name, "")}):
        base = outcome_without(f"{with_experts} {more}")
        assert base.code == 0
        given = outcome(f"{with_experts} {more} {shlex.join(flag.words)}", folder)
        if given.code != 0:
            assert given.code == 2 and "cannot start" in given.error, given.error
        elif (given.lines, given.files) == (base.lines, base.files):
            assert flag.name in ONLY_ELSEWHERE, f"{more} {flag.words} changes nothing, and no line names it"


def test_each_list_names_flags():
    names = {flag.name for flag in FLAGS}
    assert USES_OF_EXPERTS.keys() <= {flag.name for flag in OF_EXPERTS}
    assert ONLY_ELSEWHERE | USES.keys() | VALUES.keys() <= names
    assert len(FLAGS) > 250 and {field.name for field in fields(Outcome)} == {"code", "lines", "error", "files"}
