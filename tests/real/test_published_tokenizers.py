"""Published tokenizers give transformers' ids on 20 hard lines and 1,000 paragraphs: special tokens, begin and end, sizes.

`bash tests/real.sh` fetches them, asks transformers 4.57.6 and 5.23.0, and runs this. Skipped where they are not there.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.core.tokenizers import TokenizerConfig, build_tokenizer

pytest.importorskip("tokenizers")

sys.path.append(str(Path(__file__).parent))
from published_tokenizers import HARD_LINES, NAMES, PARAGRAPHS, VERSIONS, artefacts, digest

ROOT = artefacts()


@cache
def read(name: str) -> Any:
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"{path} is not there; bash tests/real.sh fetches it")
    return json.loads(path.read_text())


def built(name: str, version: str | None = None) -> Any:
    path = str(ROOT / name)
    config = TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=path, tokenizer_transformers_version=version)
    return build_tokenizer(config)


def assert_size_and_names(tokenizer: Any, answer: dict) -> None:
    """len(tokenizer), which leaves gaps between ids out, and the ids of named tokens."""
    assert len(tokenizer.vocab) == answer["size"] <= tokenizer.vocab_size
    named = {key: value for key, value in answer["named"].items() if value is not None}
    assert {key: getattr(tokenizer, key) for key in named} == named


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(name: str) -> None:
    texts = read("texts.json")
    said = {version: read(f"answers-{version}.json").get(name) for version in VERSIONS}
    if None in said.values():
        pytest.skip(f"{ROOT / name} is not there; bash tests/real.sh fetches it")
    assert len(texts) == len(HARD_LINES) + PARAGRAPHS
    answers = {version: answer for version, answer in said.items() if not isinstance(answer, str)}
    ids = [answer["ids"] for answer in answers.values()]
    for version, answer in answers.items():
        tokenizer = built(name, version[0])
        assert_size_and_names(tokenizer, answer)
        assert [digest(found) for found in tokenizer.tokenize_batch(texts)] == answer["ids"], version
    differing = sum(one != other for one, other in zip(ids[0], ids[-1]))
    try:
        tokenizer = built(name)
    except ValueError as error:
        assert "--tokenizer-transformers-version" in str(error) and differing == len(texts), (
            "every text, else it is read"
        )
        print(
            f"\n{name}: {len(tokenizer.vocab)} tokens; refused as the versions differ, each equal by its number: {error}"
        )
        return
    for answer in answers.values():  # a name that one version alone knows, as 5.23.0 a mask of Gemma's, may be left out
        known = [key for key in answer["named"] if all(other["named"][key] is not None for other in answers.values())]
        assert_size_and_names(tokenizer, answer | {"named": {key: answer["named"][key] for key in known}})
    found = [digest(found) for found in tokenizer.tokenize_batch(texts)]
    assert found == [digest(tokenizer.tokenize(text)) for text in texts]
    wrong = [i for i in range(len(texts)) if found[i] not in {of[i] for of in ids}]
    assert not wrong, [texts[i][:80] for i in wrong[:5]]
    equal = {version: sum(a == b for a, b in zip(found, answer["ids"])) for version, answer in answers.items()}
    counts = ", ".join(f"{count} of {len(texts)} as {version}" for version, count in equal.items())
    print(f"\n{name}: {len(tokenizer.vocab)} tokens; texts: {counts}")
