"""A command line promises nothing that a run does not give: what is not there is refused, or a WARNING says what comes instead."""

import re
from pathlib import Path

import pytest
from said import tells_each

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.ignored_and_refused_flags import REFUSED as REFUSED_FLAGS

REFUSED = """
    --spec a_module a_function      --lazy-mpu-init 2               --train-tokens 300000000000
    --result-rejected-tracker-filename FILE                         --deepspeed
    --log-energy                    --config-logger-dir logs        --distributed-timeout-seconds-after-init 60
    --fp16-lm-cross-entropy         --no-pipeline-parallel
"""


def problems_of(line: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_args(line.split())
    return error.value.problems


def test_what_would_guard_or_change_a_run_and_is_not_there_is_refused():
    flags = {word for word in REFUSED.split() if word.startswith("--")}
    assert {problem.split(": ")[0] for problem in problems_of(REFUSED)} == flags


@pytest.mark.parametrize(
    ("line", "warned"),
    [
        ("--transformer-impl transformer_engine", ["--transformer-impl transformer_engine"]),
        ("--transformer-impl local", []),
        ("--ckpt-format torch_dist", ["--ckpt-format torch_dist"]),
        ("--data-impl mmap --no-load-rng --use-flash-attn --rerun-mode disabled --spec local", []),
        (
            "--use-dist-ckpt --data-impl lazy --ckpt-format torch",
            ["--use-dist-ckpt --ckpt-format torch", "--data-impl lazy"],
        ),
    ],
)
def test_what_scripts_everywhere_give_goes_on_with_one_warning_for_each_reason(line: str, warned: list[str]):
    *_, notes = parse_args(line.split())
    warnings = [note.split(": ", 2) for note in notes if note.startswith("WARNING")]
    assert [flags for _, flags, _ in warnings] == warned
    assert all(len(instead) > 20 for _, _, instead in warnings)


def test_flags_of_experts_are_named_in_one_line_where_there_are_none():
    """Those with their default are not; those of kernels alone say nothing."""
    line = "--moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2 --moe-permute-fusion --expert-tensor-parallel-size 2"
    *_, notes = parse_args(line.split())
    assert notes == [
        "no effect here: --moe-aux-loss-coeff --moe-grouped-gemm --expert-tensor-parallel-size: the model has no experts "
        "without --num-experts"
    ]


@pytest.mark.parametrize(
    "slip", ["--config-logger-dirs", "--moe-latent-siz", "--batch_size", "--temprature", "--config-logger"]
)
def test_a_refused_flag_is_not_suggested_nor_one_that_does_something_else(slip: str):
    assert tells_each(problems_of(slip), f"{slip} --help")


# the topic in the reason of refused flags -> its words in the README
TOPICS = {
    "experts in a latent width": "experts in a latent width",
    "multi-latent attention": "multi-latent attention",
    "prediction of several tokens": "prediction of several tokens",
    "state-space models": "state-space models",
    "layers that differ from one another": "layers that differ from one another",
    "retrieval": "retrieval",
    "models of pictures": "models of pictures",
    "downstream tasks": "downstream tasks",
    "distillation": "distillation",
    "fp8 and fp4": "fp8 and fp4",
    "CUDA graphs": "CUDA graphs",
    "hyper-connections": "hyper-connections",
    "a decoder on ranks of its own": "a T5's decoder on ranks of its own",
    "other formats": "writing Megatron's formats",
    "rates and initial weights that scale with the width": "rates and initial weights that scale with the width",
}
OF_FLAGS = {
    "--multi-latent-attention": "multi-latent attention",
    "--perform-rl-step": "reinforcement learning",
    "--replication": "replicas of local checkpoints",
    "--inprocess-restart": "restarts in the process",
    "--variable-seq-lengths": "samples of several lengths",
    "--log-energy": "energy log",
    "--one-logger-project": "OneLogger",
    "--output-bert-embeddings": "embeddings of texts by a BERT",
    "--use-precision-aware-optimizer": "moments and masters below float32",
}


def not_built_yet() -> str:
    text = (Path(__file__).parents[3] / "README.md").read_text()
    section = text.split("## Not built yet")[1].split("\n## ")[0]
    return " ".join(section.split())


def test_the_readme_names_every_topic_whose_flags_are_refused():
    """A reason that begins with a topic has it in TOPICS; one that begins with "is not built yet" is of single flags."""
    section = not_built_yet()
    topics = set()
    for flag in REFUSED_FLAGS.values():
        topic = re.match(r"(.+?) (is|are) not built yet", flag.reason)
        if topic:
            topics.add(topic[1])
    assert topics == TOPICS.keys()
    assert [name for name in (*TOPICS.values(), *OF_FLAGS.values()) if name not in section] == []
    assert OF_FLAGS.keys() <= REFUSED_FLAGS.keys()


@pytest.mark.parametrize("line", ["--ckpt-format torch_dist", "--use-dist-ckpt", "--dist-ckpt-format zarr"])
def test_the_warning_about_formats_says_that_megatrons_checkpoints_are_read(line: str):
    words = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--seq-length", "8", "--mock-data"]
    notes = "\n".join(parse_args([*words, *line.split()]).notes)
    assert f"WARNING: {line}" in notes and "its own, of both formats, are read by --load" in notes
