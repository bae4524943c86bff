"""Metrics of evaluation, of numbers alone: natural logarithms in, `Metric` out.

Names and formulas are lm-evaluation-harness's, unless said otherwise. ll is the log-likelihood of a text or continuation.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Metric(NamedTuple):
    """A number of a task."""

    value: float
    stderr: float | None = None  # the standard error of the mean; None: the metric is no mean
    higher_is_better: bool = True


def mean_metric(values: Sequence[float]) -> Metric:
    """Return the mean with its standard error, std / sqrt(n), std with n - 1 in the denominator; one value has none."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Metric(mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Metric(mean, math.sqrt(variance / n))


def exp_or_inf(x: float) -> float:
    """Return exp(x), infinity where it is beyond a float."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def perplexity(logprob_sum: float, count: float) -> Metric:
    """Return exp(-sum ll / count): by tokens, words, bytes or, for LAMBADA, examples."""
    return Metric(exp_or_inf(-logprob_sum / count), None, higher_is_better=False)


def bits_per_byte(logprob_sum: float, num_bytes: int) -> Metric:
    """Return -sum ll / bytes / ln 2."""
    return Metric(-logprob_sum / num_bytes / math.log(2), None, higher_is_better=False)


def mean_loss(logprob_sum: float, count: int) -> Metric:
    """Return -sum ll / count, the loss of a token as training logs it."""
    return Metric(-logprob_sum / count, None, higher_is_better=False)


LARGEST_EXPONENT = 20.0  # of Megatron's perplexities


def adjusted_perplexity(logprob_sum: float, tokens: int, original_tokens: int) -> dict[str, Metric]:
    """Return Megatron's metrics of WikiText-103 (its `tasks/zeroshot_gpt`, of release core_v0.12.0).

    With mean = -sum ll / (tokens - 1) and ratio = (tokens - 1) / (original_tokens - 1), words of the original text: the
    perplexity is exp(min(20, mean)), the adjusted one exp(min(20, mean ratio)), which models of any tokenizer compare by.
    """
    mean = -logprob_sum / (tokens - 1)
    ratio = (tokens - 1) / (original_tokens - 1)
    values = {
        "loss": mean,
        "perplexity": math.exp(min(LARGEST_EXPONENT, mean)),
        "adjusted_perplexity": math.exp(min(LARGEST_EXPONENT, mean * ratio)),
        "token_ratio": ratio,
    }
    return {name: Metric(value, None, higher_is_better=False) for name, value in values.items()}


def first_largest(values: Sequence[float]) -> int:
    """Return the index of the largest value, the first of equal ones; of a NaN, as numpy.argmax does."""
    for index, value in enumerate(values):
        if math.isnan(value):
            return index
    return max(range(len(values)), key=lambda index: (values[index], -index))
