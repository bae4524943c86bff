"""Evaluate a trained model on texts and tasks by its log-probabilities: perplexities and accuracies.

    python tools/evaluate.py --load checkpoints --data book.txt questions.jsonl --output results.json
    torchrun --nproc-per-node 4 tools/evaluate.py --load Llama-3.2-1B --data wiki.test.tokens --task WIKITEXT103 \\
        --tensor-model-parallel-size 2
    python tools/evaluate.py --load Llama-3.2-1B --lm-eval-tasks hellaswag arc_easy

Model and tokenizer are those of the checkpoint or Hugging Face folder. More processes than the layout needs are replicas,
which share the samples. What a file of --data is follows from its name and its first line (docs/evaluation.md).
--lm-eval-tasks runs tasks of EleutherAI's lm-evaluation-harness, which must be installed.
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import (
    ConfigError,
    Count,
    FlagConfig,
    FlagParser,
    WholeNumber,
    add_flags,
    build,
    option,
    read_flags,
)
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig
from tools.errors import answer_help
from tools.trained_model.flags import LAYOUT_SIZES, RefusedFlags, TrainedModelConfig


@dataclass(frozen=True)
class EvaluateConfig(FlagConfig):
    """Evaluation."""

    data: list[str] = option(
        [],
        "files to evaluate on: text, JSONL, definitions (.yaml), prefixes of token files",
        metavar="FILE",
        flags=("--data", "--valid-data"),
    )
    task: Literal["WIKITEXT103", "LAMBADA"] | None = option(None, "read the data as this task of Megatron's does")
    strict_lambada: bool = option(False, "LAMBADA: the whole last word, not only its last token")
    overlapping_eval: Count = option(32, "WIKITEXT103: tokens between the starts of two windows")
    target_delimiter: str = option(" ", "text between the context and a choice of a JSONL file")
    lm_eval_tasks: list[str] = option(
        [], "tasks of lm-evaluation-harness, or its definitions (.yaml), run by it in this process", metavar="TASK"
    )
    num_fewshot: WholeNumber | None = option(
        None, "--lm-eval-tasks: examples before each question; default: the task's"
    )
    limit: Count | None = option(None, "samples of each task; default: all")
    max_length: Count | None = option(None, "tokens that the model sees at once; default: its sequence length")
    batch_tokens: Count = option(2048, "tokens of a batch; it changes results only by rounding")
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = option(
        None, "dtype of weights and products; default: that of the checkpoint"
    )
    output: str | None = option(None, "JSON file for the results", metavar="FILE", flags=("--output", "--output-path"))

    def problems(self) -> Iterator[str]:
        if not self.data and not self.lm_eval_tasks:
            yield "nothing to evaluate on: give --data FILE, or --lm-eval-tasks TASK"
        if self.strict_lambada and self.task != "LAMBADA":
            yield "--strict-lambada needs --task LAMBADA"
        if self.num_fewshot is not None and not self.lm_eval_tasks:
            yield "--num-fewshot needs --lm-eval-tasks; a data file holds its examples in the contexts"


def make_parser() -> FlagParser:
    """Return the parser of all flags of this tool."""
    parser = FlagParser(description=__doc__.splitlines()[0])
    add_flags(parser, EvaluateConfig)
    add_flags(parser, TrainedModelConfig)
    add_flags(parser, TokenizerConfig)
    return parser


if __name__ == "__main__":
    answer_help(make_parser)

from megatron.core import parallel_state
from megatron.core.base.lazy_imports import optional_package
from megatron.core.base.tolerate_broken_output import until_reader_ends
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.evaluation.eval_task_requests_and_metrics import Task
from megatron.evaluation.read_tasks_by_first_line import ReadOptions, read_tasks
from megatron.evaluation.results import TaskResult, as_json, table, write_json
from megatron.evaluation.tokenize_and_window_requests import TextEncoder
from tools.evaluating.model import EvaluatedModel, refuse_other_models, with_dtype
from tools.trained_model.load import ModelSettings, TrainedModel, read_model_settings
from tools.trained_model.run_on_ranks import run_on_ranks


@dataclass(frozen=True)
class Settings:
    """The command line."""

    evaluation: EvaluateConfig
    model: ModelSettings


def read_settings(arguments: list[str] | None) -> Settings:
    """Read the command line and check what this rank can check alone. Raises ConfigError with the problems."""
    values = read_flags(make_parser(), arguments)
    evaluation = build(EvaluateConfig, values)
    model = read_model_settings(values)

    # a whole number of replicas
    world_size = parallel_state.launched_world_size()
    config = model.config
    replica_size = config.replica_size * config.expert_replicas
    if world_size % replica_size:
        experts = ""
        if config.expert_replicas > 1:
            experts = (
                f" x {config.expert_replicas} replicas, which --expert-model-parallel-size "
                f"{config.expert_model_parallel_size} needs,"
            )
        raise ConfigError(
            f"{world_size} process(es), and a replica of --tensor-model-parallel-size {config.tensor_model_parallel_size} x "
            f"--pipeline-model-parallel-size {config.pipeline_model_parallel_size} x --context-parallel-size "
            f"{config.context_parallel_size}{experts} takes {replica_size}; start a multiple of that"
            f"{config.fewer_processes}"
        )
    if evaluation.output is not None and not (folder := Path(evaluation.output).resolve().parent).is_dir():
        raise ConfigError(
            f"--output {evaluation.output}: there is no folder {folder}; create it, or choose another file"
        )
    if evaluation.output is not None and Path(evaluation.output).is_dir():
        raise ConfigError(f"--output {evaluation.output} is a folder; give the name of a file")
    return Settings(evaluation, model)


def log(text: str) -> None:
    """Print a line about the work on the first rank."""
    if parallel_state.launched_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def run(settings: Settings, world: Axis) -> None:
    """Load the model, score, print the results. Every rank of `world` must call; an error on one rank stops all."""
    evaluation = settings.evaluation
    device = settings.model.device.torch_device

    # read the data first: loading the model may take minutes
    adapter: Any = None
    if evaluation.lm_eval_tasks:
        with collectives.raise_together(world, device):
            optional_package("lm_eval", "--lm-eval-tasks")
            adapter = import_module("tools.evaluating.lm_eval_adapter")
    read_options = ReadOptions(
        evaluation.task,
        evaluation.strict_lambada,
        evaluation.overlapping_eval,
        evaluation.limit,
        evaluation.target_delimiter,
    )
    tasks: list[Task] = []
    with collectives.raise_together(world, device):
        if world.is_first:
            tasks = read_tasks(evaluation.data, read_options)

    # the checkpoint, its tokenizer, and the requests
    trained = TrainedModel.open(settings.model, world, log)
    requests = []
    text = None
    with collectives.raise_together(world, device):
        refuse_other_models(trained.state, trained.source)
        max_length = longest_text(evaluation.max_length, trained.saved)
        # lm-evaluation-harness encodes on every rank, our tasks on the first alone
        encoder = None
        if world.is_first or evaluation.lm_eval_tasks:
            encoder = TextEncoder(trained.tokenizer())
        if world.is_first:
            requests = [task.requests(encoder, max_length) for task in tasks]
            text = json.dumps(requests)
    requests = json.loads(collectives.broadcast_text(text, world, device))

    # the model
    transformer = with_dtype(trained.saved.transformer, evaluation.dtype)
    restarts_positions = settings.model.config.context_parallel_size == 1
    stage, mesh = trained.load(transformer, [], restarts_positions=restarts_positions)
    model = EvaluatedModel(stage, mesh, max_length, evaluation.batch_tokens)
    for note in trained.notes:
        log(note)
    root = settings.model.config.load
    iteration = trained.checkpoint.iteration
    log(f"iteration {iteration} of {root} on {settings.model.device.name}, {max_length} tokens at once")

    # the scores, of all tasks together, so that batches are full
    config = {
        "model": "megatron",
        "model_args": {"load": root, "iteration": iteration, "dtype": str(model.dtype)},
        "batch_size": f"{evaluation.batch_tokens} tokens",
        "max_length": max_length,
        "device": settings.model.device.name,
        "limit": evaluation.limit,
        "layout": {name: getattr(settings.model.config, name) for name in LAYOUT_SIZES}
        | {"replicas": mesh.samples.size},
    }
    results = evaluate_tasks(tasks, requests, model, is_first=world.is_first)
    content = as_json(results, config)
    if evaluation.lm_eval_tasks:
        assert encoder is not None
        harness, harness_table = adapter.run_lm_eval(
            model, encoder, evaluation.lm_eval_tasks, evaluation.num_fewshot, evaluation.limit, is_first=world.is_first
        )
        for name, values in harness.items():
            if isinstance(values, dict) and isinstance(content.get(name, {}), dict):
                content[name] = values if name == "config" and not results else content.get(name, {}) | values
        if world.is_first:
            print(harness_table)

    # print and write
    with collectives.raise_together(world, device):
        if world.is_first:
            if results:
                print(table(results))
            for task, metrics in results:
                if line := task.line(metrics):
                    print(line)
            if evaluation.output is not None:
                write_json(evaluation.output, content)
                log(f"results written to {evaluation.output}")


def longest_text(requested: int | None, saved: Any) -> int:
    """Return the tokens that the model sees at once: --max-length, else its sequence length."""
    longest = requested or saved.data.seq_length or saved.positions
    if saved.transformer.position_embedding_type == "learned_absolute" and longest > saved.positions:
        raise RefusedFlags(
            f"--max-length {longest} is above the {saved.positions} positions that the model has learned"
        )
    return longest


def evaluate_tasks(
    tasks: list[Task], requests: list[list[Any]], model: EvaluatedModel, *, is_first: bool
) -> list[TaskResult]:
    """Return the results on the first rank, [] on others. Every rank must call with equal requests, of each task."""
    together = [request for of_task in requests for request in of_task]
    if not together:
        return []
    began = time.perf_counter()
    scores = model.score(together, log)
    seconds = time.perf_counter() - began
    tokens = sum(len(context) + len(continuation) for context, continuation in together)
    log(f"{len(together)} requests of {tokens} tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):.0f} tokens/s")
    if not is_first:
        return []
    results = []
    first = 0
    for task, of_task in zip(tasks, requests, strict=True):
        results.append(TaskResult(task, task.metrics(scores[first : first + len(of_task)])))
        first += len(of_task)
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status, as `run_on_ranks` says."""
    return run_on_ranks("evaluate", read_settings, run, arguments)


if __name__ == "__main__":
    sys.exit(until_reader_ends(main))
