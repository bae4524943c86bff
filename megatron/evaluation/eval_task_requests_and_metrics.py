"""Tasks: a data set's requests to a model, and its metrics from the scores of the requests. Without torch."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megatron.core.base.dataclass_flags import ConfigError
from megatron.evaluation.perplexity_and_mean_stderr import (
    Metric,
    adjusted_perplexity,
    bits_per_byte,
    first_largest,
    mean_loss,
    mean_metric,
    perplexity,
)
from megatron.evaluation.tokenize_and_window_requests import Request, TextEncoder, overlapping_windows, rolling_windows
from megatron.evaluation.wikitext_detokenizer import detokenized


class Scored(Protocol):
    """The score of a request, as `megatron.core.inference.score.Score`."""

    @property
    def logprob(self) -> float: ...

    @property
    def is_greedy(self) -> bool: ...


class Task(Protocol):
    """A data set of one kind.

    requests(encoder, max_length): of all samples; called once, before `metrics`. metrics(scores): the scores in the order
    of the requests -> the metrics by name.
    """

    name: str
    kind: str  # lm-evaluation-harness's output_type

    @property
    def num_samples(self) -> int: ...

    def requests(self, encoder: TextEncoder, max_length: int) -> list[Request]: ...

    def metrics(self, scores: Sequence[Scored]) -> dict[str, Metric]: ...

    def line(self, metrics: dict[str, Metric]) -> str | None:
        """Return a line to print beside the table, that other programs read."""


class NoLine:
    """A task without a line of its own."""

    def line(self, metrics: dict[str, Metric]) -> str | None:
        return None


# ---------------------------------------------------------------- texts


class Document(NamedTuple):
    """A text to predict, and what its perplexities count: words and bytes may be those of another form of it."""

    text: str
    words: int
    num_bytes: int


def plain_document(text: str) -> Document:
    return Document(text, len(re.split(r"\s+", text)), len(text.encode("utf-8")))


def wikitext_page(page: str) -> Document:
    """A page of WikiText as lm-evaluation-harness reads it: detokenized, counted as it was."""
    return plain_document(page)._replace(text=detokenized(page))


@dataclass
class TextTask(NoLine):
    """Predict each text from its beginning on, in rolling windows."""

    name: str
    documents: Sequence[Document]
    kind = "loglikelihood_rolling"
    tokens: int = field(default=0, init=False)

    @property
    def num_samples(self) -> int:
        return len(self.documents)

    def requests(self, encoder: TextEncoder, max_length: int) -> list[Request]:
        requests: list[Request] = []
        self.tokens = 0
        for document in self.documents:
            ids = encoder.encode(document.text)
            self.tokens += len(ids)
            requests += rolling_windows(ids, encoder.prefix_id, max_length)
        return requests

    def metrics(self, scores: Sequence[Scored]) -> dict[str, Metric]:
        total = math.fsum(score.logprob for score in scores)
        words = sum(document.words for document in self.documents)
        num_bytes = sum(document.num_bytes for document in self.documents)
        return {
            "loss": mean_loss(total, self.tokens),
            "perplexity": perplexity(total, self.tokens),
            "word_perplexity": perplexity(total, words),
            "byte_perplexity": perplexity(total, num_bytes),
            "bits_per_byte": bits_per_byte(total, num_bytes),
        }


@dataclass
class TokenTask(NoLine):
    """Predict each document of a token file, in rolling windows. Bytes are those of its text, without the end tokens."""

    name: str
    documents: Sequence[Sequence[int]]
    kind = "loglikelihood_rolling"
    num_bytes: int | None = field(default=None, init=False)  # None: the ids are no text

    @property
    def num_samples(self) -> int:
        return len(self.documents)

    def requests(self, encoder: TextEncoder, max_length: int) -> list[Request]:
        tokenizer = encoder.tokenizer
        if tokenizer.name != "NullTokenizer":
            self.num_bytes = 0
        requests: list[Request] = []
        for ids in self.documents:
            requests += rolling_windows(ids, encoder.prefix_id, max_length)
            if self.num_bytes is not None:
                text = [id for id in ids if id != tokenizer.eod]
                self.num_bytes += len(encoder.text(text).encode("utf-8"))
        return requests

    def metrics(self, scores: Sequence[Scored]) -> dict[str, Metric]:
        total = math.fsum(score.logprob for score in scores)
        tokens = sum(map(len, self.documents))
        metrics = {"loss": mean_loss(total, tokens), "perplexity": perplexity(total, tokens)}
        if self.num_bytes:
            metrics["bits_per_byte"] = bits_per_byte(total, self.num_bytes)
        return metrics


@dataclass
class WikitextTask:
    """Megatron's WIKITEXT103: one text, windows that overlap, the perplexity adjusted to the words of the original text."""

    name: str
    text: str
    overlapping_eval: int = 32
    kind = "loglikelihood_rolling"
    num_samples = 1
    tokens: int = field(default=0, init=False)

    @property
    def original_tokens(self) -> int:
        return len(self.text.strip().split(" "))

    def requests(self, encoder: TextEncoder, max_length: int) -> list[Request]:
        ids = encoder.encode(detokenized(self.text.strip()))
        self.tokens = len(ids)
        if len(ids) < 2 or self.original_tokens < 2:
            raise ConfigError(f"{self.name} has one word, and a perplexity needs two; give the whole text")
        if self.overlapping_eval > max_length:
            raise ConfigError(
                f"--overlapping-eval {self.overlapping_eval} is above the {max_length} tokens of a window; lower it"
            )
        return list(overlapping_windows(ids, max_length, self.overlapping_eval))

    def metrics(self, scores: Sequence[Scored]) -> dict[str, Metric]:
        total = math.fsum(score.logprob for score in scores)
        return adjusted_perplexity(total, self.tokens, self.original_tokens)

    def line(self, metrics: dict[str, Metric]) -> str | None:
        return (
            f" validation results on WIKITEXT103 | avg loss: {metrics['loss'].value:.4E} | ppl: "
            f"{metrics['perplexity'].value:.4E} | adjusted ppl: {metrics['adjusted_perplexity'].value:.4E} | token ratio: "
            f"{metrics['token_ratio'].value} |"
        )


# ---------------------------------------------------------------- continuations


@dataclass
class LambadaTask:
    """Megatron's LAMBADA: the last token of a text, or `strict` its last word, is what the model says greedily."""

    name: str
    texts: Sequence[str]
    strict: bool = False
    kind = "loglikelihood"

    @property
    def num_samples(self) -> int:
        return len(self.texts)

    def requests(self, encoder: TextEncoder, max_length: int) -> list[Request]:
        requests: list[Request] = []
        for number, text in enumerate(self.texts, 1):
            if self.strict:
                word = text.split()[-1]
                beginning = encoder.encode(text[: text.rfind(word)].strip())
                end = encoder.encode(f" {word}", special=False)
            else:
                ids = encoder.encode(text)
                beginning = ids[:-1]
                end = ids[-1:]
            if not beginning or not end:
                raise ConfigError(f"{self.name}: text {number} is {text!r:.40}, and its last word needs a context")
            requests.append((beginning, end))
        return requests

    def metrics(self, scores: Sequence[Scored]) -> dict[str, Metric]:
        return likelihood_metrics(scores)

    def line(self, metrics: dict[str, Metric]) -> str | None:
        n = self.num_samples
        accuracy = metrics["acc"].value
        return (
            f" validation results on LAMBADA | number correct: {accuracy * n:.4E} | total examples: {n:.4E} | avg accuracy: "
            f"{accuracy:.4E}"
        )


def likelihood_metrics(scores: Sequence[Scored]) -> dict[str, Metric]:
    """Return the share of examples whose continuation the model says greedily, and exp of their mean loss."""
    return {
        "perplexity": perplexity(math.fsum(score.logprob for score in scores), len(scores)),
        "acc": mean_metric([float(score.is_greedy) for score in scores]),
    }


@dataclass
class LikelihoodTask(NoLine):
    """One continuation of each context."""

    name: str
    pairs: Sequence[tuple[str, str]]
    metric_names: Sequence[str] = ("perplexity", "acc")
    kind = "loglikelihood"

    @property
    def num_samples(self) -> int:
        return len(self.pairs)

    def requests(self, encoder: TextEncoder, max_length: int) -> list[Request]:
        requests = []
        for number, (context, continuation) in enumerate(self.pairs, 1):
            requests.append(encoder.pair(context, continuation))
            _check_continuation(self.name, number, requests[-1], continuation, max_length)
        return requests

    def metrics(self, scores: Sequence[Scored]) -> dict[str, Metric]:
        metrics = likelihood_metrics(scores)
        return {name: metrics[name] for name in self.metric_names}


class Question(NamedTuple):
    """A context, its choices, and the right ones."""

    context: str
    choices: Sequence[str]
    gold: Sequence[int]


@dataclass
class ChoiceTask(NoLine):
    """Of several continuations of a context the right one is the likeliest: by its sum of log p (acc), per character of the
    choice (acc_norm), per UTF-8 byte (acc_bytes). `delimiter` stands between context and choice, and is not counted."""

    name: str
    questions: Sequence[Question]
    delimiter: str = " "
    metric_names: Sequence[str] = ("acc", "acc_norm", "acc_bytes")
    kind = "multiple_choice"

    @property
    def num_samples(self) -> int:
        return len(self.questions)

    def requests(self, encoder: TextEncoder, max_length: int) -> list[Request]:
        requests = []
        for number, question in enumerate(self.questions, 1):
            for choice in question.choices:
                requests.append(encoder.pair(question.context, self.delimiter + choice))
                _check_continuation(self.name, number, requests[-1], choice, max_length)
        return requests

    def metrics(self, scores: Sequence[Scored]) -> dict[str, Metric]:
        right: dict[str, list[float]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
        first = 0
        for question in self.questions:
            logprobs = [score.logprob for score in scores[first : first + len(question.choices)]]
            first += len(question.choices)
            characters = [len(choice) for choice in question.choices]
            num_bytes = [len(choice.encode("utf-8")) for choice in question.choices]
            by_character = [logprob / count for logprob, count in zip(logprobs, characters, strict=True)]
            by_byte = [logprob / count for logprob, count in zip(logprobs, num_bytes, strict=True)]
            for name, values in zip(right, (logprobs, by_character, by_byte), strict=True):
                right[name].append(float(first_largest(values) in question.gold))
        return {name: mean_metric(right[name]) for name in self.metric_names}


def _check_continuation(name: str, number: int, request: Request, text: str, max_length: int) -> None:
    if not request[1]:
        raise ConfigError(f"{name}: the continuation {text!r:.40} of example {number} has no token; give a text")
    if len(request[1]) > max_length:
        raise ConfigError(
            f"{name}: the continuation {text!r:.40} of example {number} has {len(request[1])} tokens, and the model sees "
            f"{max_length} at once; shorten it"
        )


def limited(items: Sequence[Any], limit: int | None) -> Sequence[Any]:
    """Return the first `limit` items; None: all."""
    return items if limit is None else items[:limit]
