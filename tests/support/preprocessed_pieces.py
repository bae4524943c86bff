"""Texts that are preprocessed in pieces, and what comes of them."""

import json
import random

from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from tools.preprocessing.encode import Encoder
from tools.preprocessing.sources import Chunk


def numbered(count):
    """`count` documents, told apart by their tokens, as JSON lines."""
    return b"".join(b'{"text": "%d %d %d"}\n' % (i % 100, i // 100 % 100, i % 7) for i in range(count))


def expected(count):
    return [[[i % 100, i // 100 % 100, i % 7, 100]] for i in range(count)]


def mutate(line, rng):
    """One to three random changes of bytes: set, insert, delete, cut off, doubled."""
    line = bytearray(line)
    for _ in range(rng.randrange(1, 4)):
        at, byte = rng.randrange(len(line) + 1), rng.choice([rng.randrange(256), *b'"{}[]\\:, u019'])
        kind = rng.randrange(5)
        if kind == 0 and at < len(line):
            line[at] = byte
        elif kind == 1:
            line.insert(at, byte)
        elif kind == 2:
            del line[at : at + rng.randrange(4)]
        elif kind == 3:
            del line[at:]
        else:
            line[at:at] = line[at : at + rng.randrange(8)]
    return bytes(line)


def oracle(line):
    """What a line means, said once more: the token list, None for a blank line, "bad" for any other."""
    if not line.strip(b" \t\n\r\x0b\f"):
        return None
    try:
        text = json.loads(str(line, "utf-8"))["text"]
        texts = text if isinstance(text, list) else [text]
        ids = [[int(word) for word in text.encode("utf-8").decode("utf-8").split()] for text in texts]
        if all(0 <= i <= 100 for sequence in ids for i in sequence):
            return [sequence for sequence in ids if sequence]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        pass
    return "bad"


def check_mutations(count, seed):
    """`count` changed lines, a few good ones around each: every line gives its own tokens or is reported, by number."""
    rng = random.Random(seed)
    good = [
        b'{"text": "1 2 3"}',
        b'{"text": ["4", "", "5 6"], "more": {"a": [1.5, null]}}',
        b'{"x": "\\u00e9", "text": "7"}',
    ]
    encoder = Encoder(build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=100)), ["text"], False)
    for _ in range(count // 50):
        lines = [mutate(rng.choice(good), rng) if i % 2 else rng.choice(good) for i in range(100)]
        text = b"\n".join(lines)
        meanings = [oracle(line) for line in text.split(b"\n")]
        result = encoder.encode([Chunk("f", 1, text)])
        bad = [number for number, meaning in enumerate(meanings, 1) if meaning == "bad"]
        assert result.bad_count == len(bad)
        assert [int(report.split(":")[1]) for report in result.bad] == sorted(bad)[: len(result.bad)] or set(
            int(report.split(":")[1]) for report in result.bad
        ) <= set(bad)
        documents = [meaning for meaning in meanings if isinstance(meaning, list)]
        column = result.columns["text"]
        assert column.tokens.tolist() == [i for document in documents for sequence in document for i in sequence]
        assert column.lengths.tolist() == [len(sequence) for document in documents for sequence in document]
        assert column.counts.tolist() == [len(document) for document in documents]
        assert result.documents == len(documents)
