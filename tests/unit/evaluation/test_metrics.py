"""The formulas of evaluation, beside numpy's and the texts of models.md's sources; windows that predict each token once."""

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from megatron.evaluation.eval_task_requests_and_metrics import (
    ChoiceTask,
    LambadaTask,
    LikelihoodTask,
    Question,
    TextTask,
    WikitextTask,
    plain_document,
    wikitext_page,
)
from megatron.evaluation.perplexity_and_mean_stderr import adjusted_perplexity, first_largest, mean_metric
from megatron.evaluation.results import TaskResult, as_json, table
from megatron.evaluation.tokenize_and_window_requests import TextEncoder, overlapping_windows, rolling_windows
from megatron.evaluation.wikitext_detokenizer import detokenized


class Said(NamedTuple):
    logprob: float
    is_greedy: bool = False


@dataclass
class Letters:
    """Each character is a token, but a space belongs to the letter behind it; 0 begins a text where `adds_first`."""

    name = "Letters"
    vocab_size = 1 << 21
    eod = 0
    bos = 0
    adds_first: bool = False

    def tokenize(self, text: str) -> list[int]:
        return [0] * self.adds_first + self.tokenize_sentences([text])[0]

    def tokenize_sentences(self, texts: list[str]) -> list[list[int]]:
        ids = []
        for text in texts:
            pieces = text.replace(" ", "\1 ").split("\1")
            of_text = [ord(c) for c in pieces[0]]
            for piece in pieces[1:]:
                of_text += [ord(piece[1]) + (1 << 20), *map(ord, piece[2:])] if len(piece) > 1 else [32]
            ids.append(of_text)
        return ids

    def detokenize(self, ids: list[int]) -> str:
        return "".join(chr(i) if i < 1 << 20 else " " + chr(i - (1 << 20)) for i in ids)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-12)


def test_multiple_choice_by_sum_by_character_and_by_byte():
    questions = [Question("a", ["xyz", "日本", "q"], [0]), Question("b", ["no", "yesyes"], [1])]
    task = ChoiceTask("t", questions)
    logprobs = [-3.0, -4.2, -2.9, -2.0, -4.0]
    metrics = task.metrics([Said(x) for x in logprobs])
    sizes = {"acc": [1] * 5, "acc_norm": [3, 2, 1, 2, 6], "acc_bytes": [3, 6, 1, 2, 6]}
    for name, divisors in sizes.items():
        scaled = np.array(logprobs) / np.array(divisors)
        right = [float(scaled[:3].argmax() == 0), float(scaled[3:].argmax() == 1)]
        assert metrics[name].value == np.mean(right)
        assert metrics[name].stderr == close(np.std(right, ddof=1) / math.sqrt(2))
    assert {name: metric.value for name, metric in metrics.items()} == {"acc": 0.0, "acc_norm": 1.0, "acc_bytes": 0.5}


def test_means_and_ties():
    values = [random.Random(0).random() for _ in range(50)]
    assert mean_metric(values)[:2] == (close(np.mean(values)), close(np.std(values, ddof=1) / math.sqrt(50)))
    assert mean_metric([3.0])[:2] == (3.0, None)
    for row in ([1.0, 2.0, 2.0], [2.0, 2.0], [-math.inf, -math.inf], [1.0, math.nan, 3.0]):
        assert first_largest(row) == int(np.argmax(row))


def test_perplexities_of_texts():
    documents = [plain_document("ab  cd\né"), plain_document("x")]
    assert [document[1:] for document in documents] == [(3, 9), (1, 1)]
    task = TextTask("t", documents)
    requests = task.requests(TextEncoder(Letters()), 4)
    scores = [Said(-0.5 * len(continuation)) for _, continuation in requests]
    metrics = {name: metric.value for name, metric in task.metrics(scores).items()}
    tokens = sum(len(ids) for ids in Letters().tokenize_sentences([document.text for document in documents]))
    assert metrics == {
        "loss": close(0.5),
        "perplexity": close(math.exp(0.5)),
        "word_perplexity": close(math.exp(0.5 * tokens / 4)),
        "byte_perplexity": close(math.exp(0.5 * tokens / 10)),
        "bits_per_byte": close(0.5 * tokens / 10 / math.log(2)),
    }


def test_wikitext_perplexity_is_adjusted_by_the_words_before_detokenizing():
    text = " = A = \n one @,@ two , three ( x ) ."
    task = WikitextTask("w", text, 2)
    requests = task.requests(TextEncoder(Letters()), 6)
    ids = Letters().tokenize(detokenized(text.strip()))
    words = len(text.strip().split(" "))
    total = -2.5 * (len(ids) - 1)
    metrics = task.metrics([Said(-2.5 * len(continuation)) for _, continuation in requests])
    ratio = (len(ids) - 1) / (words - 1)
    assert metrics["adjusted_perplexity"].value == close(math.exp(min(20, 2.5 * ratio)))
    assert metrics["perplexity"].value == close(math.exp(2.5)) and metrics["token_ratio"].value == close(ratio)
    assert adjusted_perplexity(total * 100, len(ids), words)["adjusted_perplexity"].value == math.exp(20)
    assert "adjusted ppl" in task.line(metrics)


def test_wikitext_as_it_was_written():
    page = ' = Head = \n It \'s a " test " of 3 @,@ 000 @-@ odd ( small ) things , e.g. [ x ] ; 1 @.@ 5 : N \n = = Two = = \n'
    written = detokenized(page)
    assert '"test"' in written and "3,000-odd (small) things, e.g. [x]; 1.5: N" in written and "It's" in written
    document = wikitext_page(page)
    assert document.text == written and document.num_bytes == len(page.encode()) != len(written.encode())


def test_rolling_windows_predict_each_token_once():
    for count in (1, 3, 4, 5, 8, 9, 13):
        ids = list(range(1, count + 1))
        windows = list(rolling_windows(ids, 0, 4))
        assert [id for _, continuation in windows for id in continuation] == ids
        whole = [0, *ids]
        for context, continuation in windows:
            end = whole.index(continuation[-1]) + 1
            begin = end - len(context) - len(continuation)
            assert whole[begin:end] == context + continuation and len(context) >= 1
            assert len(context) + len(continuation) == min(5, end)  # as many as the model sees, and the one to predict
    assert list(rolling_windows([], 0, 4)) == []


def test_overlapping_windows_are_megatron_s():
    """Windows of 4 inputs begin every `step` tokens; of each but the first the last `step` targets count."""
    for count in range(2, 20):
        for step in (1, 2, 3, 4):
            ids = list(range(count))
            windows = list(overlapping_windows(ids, 4, step))
            assert [id for _, continuation in windows for id in continuation] == ids[1:]
            for number, (context, continuation) in enumerate(windows):
                assert (
                    context[0] == number * step
                    and context + continuation == ids[number * step :][: len(context + continuation)]
                )
                assert len(continuation) <= (step if number else 4)


@pytest.mark.parametrize("adds_first", [False, True])
def test_a_continuation_is_what_the_whole_has_beyond_its_context(adds_first: bool):
    tokenizer = Letters(adds_first)
    encoder = TextEncoder(tokenizer)
    for context, continuation in (("ab", " cd"), ("ab ", "cd"), ("ab", "cd"), ("ab  ", "c")):
        context_ids, ids = encoder.pair(context, continuation)
        assert context_ids + ids == tokenizer.tokenize(context + continuation)
        assert context_ids == tokenizer.tokenize(context.rstrip())
    assert encoder.pair("", "cd") == ([0], [99, 100])
    assert encoder.pair("", "\0cd") == ([0], [99, 100])


def test_lambada_of_the_last_token_and_of_the_last_word():
    encoder = TextEncoder(Letters())
    texts = ["ab cd", "x yz"]
    assert LambadaTask("l", texts).requests(encoder, 9)[0] == (encoder.encode("ab c"), [100])
    assert LambadaTask("l", texts, strict=True).requests(encoder, 9)[1] == (encoder.encode("x"), encoder.encode(" yz"))
    task = LambadaTask("l", texts)
    metrics = task.metrics([Said(-1.0, True), Said(-2.0, False)])
    assert (metrics["acc"].value, metrics["perplexity"].value) == (0.5, close(math.exp(1.5)))
    assert "number correct: 1.0000E+00 | total examples: 2.0000E+00" in task.line(metrics)


def test_results_have_the_shape_of_the_harness():
    task = LikelihoodTask("words", [("a", " b"), ("c", " d")])
    metrics = task.metrics([Said(-1.0, True), Said(-2.0, False)])
    content = as_json([TaskResult(task, metrics)], {"model": "megatron"})
    assert content["results"]["words"] == {
        "alias": "words",
        "perplexity,none": close(math.exp(1.5)),
        "perplexity_stderr,none": "N/A",
        "acc,none": 0.5,
        "acc_stderr,none": close(0.5),
    }
    assert content["higher_is_better"] == {"words": {"perplexity": False, "acc": True}}
    assert content["n-samples"] == {"words": {"original": 2, "effective": 2}}
    lines = table([TaskResult(task, metrics)]).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1 and "0.5000" in lines[2]
