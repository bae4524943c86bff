"""Text into sentences: what is cut by hand-written examples, what must hold for any text."""

import sys
import time
import types

import pytest

from tools.preprocessing.sentences import nltk_starts, rule_starts, split_text

EXAMPLES = [
    ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
    (
        "Dr. Smith met J. R. Jones of the U.S. Army, e.g. Then he left.",
        ["Dr. Smith met J. R. Jones of the U.S. Army, e.g. Then he left."],
    ),
    ("See fig. 3 in file.txt. Next one.", ["See fig. 3 in file.txt.", "Next one."]),
    ('"Why?" he said. "Go!" She went.', ['"Why?" he said.', '"Go!"', "She went."]),
    ("It costs 3.50 euros. 12 people paid.", ["It costs 3.50 euros.", "12 people paid."]),
    ("Wait... what? No... Yes.", ["Wait... what?", "No...", "Yes."]),
    ("Title\n\nFirst line\nsecond line.\nThird", ["Title", "First line\nsecond line.", "Third"]),
    (
        "\u4f60\u597d\u3002\u4ed6\u8d70\u4e86\uff01\u771f\u7684\uff1f\u662f",
        ["\u4f60\u597d\u3002", "\u4ed6\u8d70\u4e86\uff01", "\u771f\u7684\uff1f", "\u662f"],
    ),
    (
        "\u041f\u0440\u0438\u0432\u0435\u0442. \u041a\u0430\u043a \u0434\u0435\u043b\u0430?",
        ["\u041f\u0440\u0438\u0432\u0435\u0442.", "\u041a\u0430\u043a \u0434\u0435\u043b\u0430?"],
    ),
    ("  ", []),
    ("", []),
]


@pytest.mark.parametrize(("text", "sentences"), EXAMPLES)
def test_examples(text, sentences):
    assert split_text(text, rule_starts, keep_newlines=False) == sentences
    assert "".join(split_text(text, rule_starts, keep_newlines=True)) == text


def test_sentences_are_the_text_again():
    hypothesis = pytest.importorskip("hypothesis")
    letters = (
        hypothesis.strategies.sampled_from(list(" \n\t.!?\"'\u201d)aA1\u3002\uff01\u00e9\u0130"))
        | hypothesis.strategies.characters()
    )

    @hypothesis.settings(max_examples=300, deadline=None)
    @hypothesis.given(hypothesis.strategies.text(letters, max_size=60))
    def check(text):
        assert "".join(split_text(text, rule_starts, keep_newlines=True)) == text
        sentences = split_text(text, rule_starts, keep_newlines=False)
        assert all(sentence == sentence.strip() != "" for sentence in sentences)
        assert "".join("".join(sentences).split()) == "".join(text.split())

    check()


@pytest.mark.parametrize("text", [".", "\n", " ", ". ", ".\n", "!'", "\u3002", "a.", "\n ", '."'])
def test_long_runs_take_linear_time(text):
    started = time.monotonic()
    rule_starts(text * 100_000)
    assert time.monotonic() - started < 5, "0.1 s on an idle machine; quadratic time would be minutes"


def test_nltk_is_asked_if_it_is_there(monkeypatch):
    class PunktTokenizer:
        def __init__(self, language):
            if language != "german":
                raise LookupError
            self.language = language

        def span_tokenize(self, text):  # it reports spans without the white space between them
            return [(1, 3), (5, 8)]

    monkeypatch.setitem(sys.modules, "nltk", types.ModuleType("nltk"))
    module = types.ModuleType("nltk.tokenize")
    module.PunktTokenizer = PunktTokenizer
    monkeypatch.setitem(sys.modules, "nltk.tokenize", module)
    starts = nltk_starts("german")
    assert split_text(" ab. Cde", starts, keep_newlines=False) == ["ab.", "Cde"]
    assert split_text(" ab. Cde", starts, keep_newlines=True) == [" ab. ", "Cde"]
    with pytest.raises(ValueError, match=r"(?s)--lang.*nltk\.downloader"):
        nltk_starts("latin")
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(ImportError, match="pip install nltk"):
        nltk_starts("german")
