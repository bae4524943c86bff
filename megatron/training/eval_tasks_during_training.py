"""Evaluation on tasks during training (--eval-tasks), by forwards of the training pipeline, so in any layout.

Each continuation is a line of --seq-length tokens, padded on the right; lines are dealt to the data-parallel ranks, which
all run as many microbatches:

    2 replicas, microbatches of 2     line 0 1 | 2 3 | 4 5 | 6 -        replica 0: 0 1, 4 5     replica 1: 2 3, 6 -

tools/evaluate.py gives the same numbers from a checkpoint, faster: it computes contexts once and pads nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.base import rank_status
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.inference.score import (
    BatchPlan,
    Request,
    Row,
    Score,
    local_columns,
    local_predictions,
    log_probabilities,
    plan_padded,
    request_problems,
    rows_of,
    scoring_problems,
)
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.pipeline_parallel.schedules import Pipeline
from megatron.core.tokenizers.tokenizer_registry import Tokenizer
from megatron.core.utils import unwrap_model
from megatron.evaluation.eval_task_requests_and_metrics import Task
from megatron.evaluation.read_tasks_by_first_line import ReadOptions, read_tasks
from megatron.evaluation.tokenize_and_window_requests import TextEncoder


class EvalTasks:
    """The tasks of --eval-tasks, read once, and their evaluation with the weights of the moment.

    Raises ConfigError: data that cannot be read, a tokenizer that is missing, a model that is no GPT.
    """

    def __init__(
        self, paths: list[str], limit: int | None, tokenizer: Tokenizer | None, pipeline: Pipeline, seq_length: int
    ):
        self.pipeline = pipeline
        self.seq_length = seq_length
        self.tasks: list[Task] = []
        self.requests: list[list[Request]] = []
        if not paths:
            return
        if tokenizer is None:
            raise ConfigError(
                "--eval-tasks reads text, and this run has no tokenizer; give --tokenizer-type and its files"
            )
        for chunk in pipeline.chunks.values():
            if problems := scoring_problems(unwrap_model(chunk)):
                raise ConfigError(f"--eval-tasks: {problems[0]}; leave it out")
        self.tasks = read_tasks(paths, ReadOptions(limit=limit))
        encoder = TextEncoder(tokenizer)
        self.requests = [task.requests(encoder, seq_length) for task in self.tasks]
        vocab_size = unwrap_model(next(iter(pipeline.chunks.values()))).vocab_size
        for task, requests in zip(self.tasks, self.requests, strict=True):
            if problems := request_problems(requests, vocab_size, seq_length):
                raise ConfigError(f"--eval-tasks, {task.name}: {problems[0]}")

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each task by name, on the last stage; {} elsewhere. Every rank must call."""
        together = [request for requests in self.requests for request in requests]
        if not together:
            return {}
        scores = pipeline_scores(self.pipeline, together, self.seq_length)
        if not self.pipeline.mesh.has_last_stage:
            return {}
        results = {}
        first = 0
        for task, requests in zip(self.tasks, self.requests, strict=True):
            metrics = task.metrics(scores[first : first + len(requests)])
            first += len(requests)
            results[task.name] = {name: metric.value for name, metric in metrics.items()}
        return results


def pipeline_scores(pipeline: Pipeline, requests: list[Request], seq_length: int) -> list[Score]:
    """Return the scores of requests by the training pipeline, on the last stage; of other ranks they say nothing.

    Every rank must call with equal requests.
    """
    mesh = pipeline.mesh
    device = pipeline.device
    rows = rows_of(requests, seq_length, shares=False)
    columns = local_columns(seq_length, mesh.sequence, device)
    plans = _plans_of_replica(rows, pipeline, seq_length)
    sums = torch.zeros(2, len(requests), dtype=torch.float64)  # log-probabilities; tokens without the highest logit

    def forward_step(plan_iterator: Iterator[BatchPlan], model: nn.Module) -> tuple[Any, Callable[[Tensor], Any]]:
        plan = next(plan_iterator)
        tokens = torch.tensor(plan.tokens, device=device)[:, columns]  # [b, s / c]
        positions = torch.tensor(plan.positions, device=device)[:, columns]
        gpt = unwrap_model(model)

        def loss_func(logits: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
            """logits: [b, s / c, v/t]; adds the scores of the batch, and returns no loss."""
            predicted, sources, targets = local_predictions(plan, columns, device)
            axis = gpt.axis if gpt.parallel_output else ALONE
            chosen = logits.transpose(0, 1).flatten(0, 1)[sources]  # [predictions, v/t]
            rows_of_chosen = torch.arange(len(sources), device=device)
            logprobs, is_best = log_probabilities(chosen, rows_of_chosen, targets, axis, gpt.vocab_size)
            of_request = torch.tensor(plan.requests, dtype=torch.int64)[predicted.cpu()]
            sums.index_add_(1, of_request, torch.stack((logprobs, 1 - is_best)).cpu())
            return logits.new_zeros(()), 1, {}

        return model(tokens, positions, None), loss_func

    # run the forwards, as many microbatches at once as in a training step
    for chunk in pipeline.chunks.values():
        chunk.eval()
    at_once = pipeline.batch.num_microbatches
    with torch.no_grad():
        for first in range(0, len(plans), at_once):
            rank_status.heartbeat()
            own = plans[first : first + at_once]
            iterators = {stage: iter(own) for stage in pipeline.chunks}
            pipeline.run(iterators, 0, training=False, num_microbatches=len(own), forward_step=forward_step)
    shared = sums.to(device)
    if mesh.has_last_stage:
        collectives.all_reduce(shared, mesh.tokens)
    return [Score(logprob, missed == 0) for logprob, missed in zip(*shared.tolist(), strict=True)]


def _plans_of_replica(rows: list[Row], pipeline: Pipeline, seq_length: int) -> list[BatchPlan]:
    """Return the microbatches of this data-parallel rank, as many on each; lines that are left over predict nothing."""
    samples = pipeline.mesh.samples
    lines = pipeline.batch.micro_batch_size
    at_once = lines * samples.size
    plans = []
    for first in range(0, len(rows), at_once):
        begin = first + samples.rank * lines
        plan = plan_padded(rows[begin : begin + lines], seq_length)
        for _ in range(lines - len(plan.tokens)):
            plan.tokens.append([0] * seq_length)
            plan.positions.append(list(range(seq_length)))
        plans.append(plan)
    return plans
