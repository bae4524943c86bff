"""A command line promises nothing that a run does not give: what is not there is refused, or a WARNING says what comes instead."""

import pytest
from said import tells_each

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.arguments.command_line import parse_args

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


def test_flags_of_experts_say_nothing_where_there_are_none():
    *_, notes = parse_args(["--moe-router-topk", "2", "--moe-grouped-gemm", "--moe-aux-loss-coeff", "1e-2"])
    assert notes == []


@pytest.mark.parametrize(
    "slip", ["--config-logger-dirs", "--num-expert", "--batch_size", "--temprature", "--config-logger"]
)
def test_a_refused_flag_is_not_suggested_nor_one_that_does_something_else(slip: str):
    assert tells_each(problems_of(slip), f"{slip} --help")
