"""Ids of every kind of tokenizer on texts that break tokenizers, against the libraries that published models are used with.

Oracles: transformers for BERT, GPT-2, tokenizer.json and Llama files, tiktoken for TikToken files, sentencepiece itself.
A test whose oracle or vocabulary is not there is skipped.
"""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from piece_models import train_pieces

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from tools.preprocessing import word_memory
from tools.preprocessing.word_memory import WordMemory, packer

tokenizers = pytest.importorskip("tokenizers")


DATA = Path(__file__).resolve().parents[3] / "shared/data"


GPT2 = [str(DATA / name) for name in ("gpt2-vocab.json", "gpt2-merges.txt")]


BERT = str(DATA / "bert-base-uncased-vocab.txt")


SPECIAL = (
    "<|endoftext|> [CLS] [SEP] [MASK] [PAD] [UNK] [BOS] <s> </s> <unk> <pad> <extra_id_0> <0x41> <SPECIAL_9> ##ing"
)


needs_gpt2 = pytest.mark.skipif(not all(map(Path.exists, map(Path, GPT2))), reason="needs GPT-2's vocabulary")


needs_bert = pytest.mark.skipif(not Path(BERT).exists(), reason="needs BERT's vocabulary")


def torture_texts():
    """Unicode of all planes, white space of all kinds, control characters, emoji, special tokens, long runs."""
    rng = np.random.default_rng(0)
    texts = [
        "",
        " ",
        "\n",
        "Hello world",
        " Hello  world ",
        "don't DON'T we'LL I'm 'tis",
        SPECIAL,
        SPECIAL.replace(" ", ""),
    ]
    texts += [
        "a" * 5000,
        "ab" * 2000,
        " " * 3000,
        "\n" * 500 + "x",
        "\t \r\n" * 300,
        "1" * 1000,
        "!?" * 600,
        "\u4f60" * 400,
    ]
    texts += ["".join(map(chr, range(first, first + 0x100))) for first in range(0, 0x3400, 0x100)]
    texts += [
        "na\u00efve cafe\u0301 \u00c5ngstr\u00f6m \u0130stanbul \ufb01 \u1e9e",
        "\u202eright\u202c \u200bzero\ufeffwidth\u00ad \u2028line\u2029",
    ]
    texts += [
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
        "\U00010348\U0001d54f\U000e0041\U0010ffff \ufffd\ufffe",
    ]
    texts += [
        "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \ud55c\uad6d\uc5b4 \u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
        "x\u0300\u0301\u0302" * 50,
    ]
    letters = [c for c in range(0x11000) if not 0xD800 <= c < 0xE000]
    spaces = [9, 10, 11, 12, 13, 28, 32, 0x85, 0xA0, 0x2003, 0x3000]
    kinds = [np.array(kind) for kind in (letters, range(32, 127), spaces, range(0x300))]
    for _ in range(150):
        texts.append("".join(chr(rng.choice(kinds[rng.integers(4)])) for _ in range(rng.integers(1, 60))))
    return texts


TEXTS = torture_texts()


def in_batch(tokenizer, texts):
    return [np.frombuffer(ids, np.int32).tolist() for ids in packer(tokenizer)(texts)]


def remembering(tokenizer):
    return WordMemory(tokenizer.library, tokenizer.word_pattern, tokenizer.added_tokens)


def remembered(memory, texts):
    return [np.frombuffer(memory.encode(text), np.int32).tolist() for text in texts]


def assert_ids(tokenizer, expected):
    """The tokenizer gives the ids that `expected(text)` gives, one by one and in a batch, all below vocab_size."""
    wanted = [list(expected(text)) for text in TEXTS]
    for text, ids in zip(TEXTS, wanted):
        assert tokenizer.tokenize(text) == ids, ascii(text)
    assert in_batch(tokenizer, TEXTS) == wanted
    assert max(max(ids, default=0) for ids in wanted) < tokenizer.vocab_size


@pytest.mark.full
@needs_gpt2
def test_gpt2_equals_transformers():
    reference = pytest.importorskip("transformers").GPT2Tokenizer(vocab=GPT2[0], merges=GPT2[1])
    tokenizer = build_tokenizer(TokenizerConfig("GPT2BPETokenizer", *GPT2))
    assert_ids(tokenizer, lambda text: reference(text, split_special_tokens=True).input_ids)
    for text in TEXTS:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@needs_gpt2
@pytest.mark.parametrize("kind", ["gpt2", *(pytest.param(k, marks=pytest.mark.full) for k in ("v1", "v2"))])
@pytest.mark.full
def test_remembered_words_are_cut_as_the_library_cuts_them(tmp_path, kind):
    """Batches go through Python's re, single texts through the library: a seventh of all characters, in several surroundings."""
    if kind == "gpt2":
        tokenizer = build_tokenizer(TokenizerConfig("GPT2BPETokenizer", *GPT2))
    else:
        path = write_tik(tmp_path / "t.json", gpt2_tokens()[:5000])
        tokenizer = build_tokenizer(TokenizerConfig("TikTokenizer", tokenizer_model=path, tiktoken_pattern=kind))
    characters = [chr(c) for c in range(1, 0x20000, 7) if not (0xD800 <= c < 0xE000 or 0x3500 <= c < 0x9F00)]
    texts = [f"a{c}1{c}! {c}{c}B" for c in characters]
    memory = remembering(tokenizer)
    assert remembered(memory, texts) == [encoding.ids for encoding in tokenizer.library.encode_batch(texts)]
    assert len(memory._ids) > len(texts), "else the comparison is one of the library with itself"


@needs_gpt2
def test_word_memory_forgets_and_keeps_no_long_words(monkeypatch):
    monkeypatch.setattr(word_memory, "_REMEMBERED_WORDS", 5)
    monkeypatch.setattr(word_memory, "_LONGEST_TEXT", 100)
    tokenizer = build_tokenizer(TokenizerConfig("GPT2BPETokenizer", *GPT2))
    texts = ["one two three four", "five six seven eight", "nine one " + "x" * 65, "nine" * 30]
    memory = remembering(tokenizer)
    assert remembered(memory, texts) == list(map(tokenizer.tokenize, texts))
    assert sorted(memory._ids) == [" one", "nine"]


def test_a_file_of_our_own_training_remembers_words(tmp_path):
    """Text that holds a token added to the file is left to the library, which cuts there."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    options = {"vocab_size": 300, "special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet}
    trained.train_from_iterator(["the cat sat on the mat " * 4], tokenizers.trainers.BpeTrainer(**options))
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    assert tokenizer.word_pattern is not None
    assert_ids(tokenizer, lambda text: trained.encode(text).ids)
    assert in_batch(tokenizer, ["the<|endoftext|>"])[0][-1] == tokenizer.eod


@needs_bert
@pytest.mark.parametrize("lower", [True, False])
def test_bert_equals_transformers(lower):
    reference = pytest.importorskip("transformers").BertTokenizer(vocab=BERT, do_lower_case=lower)
    kind = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
    tokenizer = build_tokenizer(TokenizerConfig(kind, BERT))
    options = {"add_special_tokens": False, "split_special_tokens": True}
    assert_ids(tokenizer, lambda text: reference(text, **options).input_ids)
    assert (tokenizer.name, tokenizer.vocab_size) == (kind, 30522 + 2)
    assert (tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad) == (101, 102, 103, 0)


@pytest.fixture
def small_bert(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "[", "]", "sep"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    return str(tmp_path / "vocab.txt")


def test_bert_numbers_what_it_adds_after_the_file(small_bert):
    tokenizer = build_tokenizer(TokenizerConfig("BertWordPieceLowerCase", small_bert, vocab_extra_ids=3))
    assert tokenizer.tokenize("The cats [SEP] dog") == [5, 6, 7, 8, 10, 9, 1]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.vocab_size) == (11, 12, 12, 16)
    assert tokenizer.additional_special_tokens_ids == [13, 14, 15]
    assert [tokenizer.inv_vocab[i] for i in (5, 12, 14)] == ["the", "[EOS]", "<extra_id_1>"]
    assert sorted(tokenizer.inv_vocab) == list(range(16))
    assert tokenizer.detokenize([2, 5, 6, 7, 12]) == "[CLS] the cats [EOS]"
    upper = build_tokenizer(TokenizerConfig("BertWordPieceCase", small_bert))
    assert upper.tokenize("The cat") == [1, 6]


def test_a_file_that_is_not_berts_is_named(tmp_path, small_bert):
    for content, reason in ((b"a\nb\n", r"has no \[UNK\]"), (b"[UNK]\n", r"has no \[CLS\]"), (b"[UNK]\n\xff", "UTF-8")):
        (tmp_path / "v").write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            build_tokenizer(TokenizerConfig("BertWordPieceCase", str(tmp_path / "v")))


def test_sentencepiece_alone_and_with_a_first_token(tmp_path):
    path = tmp_path / "tokenizer.model"
    model = train_pieces(path, model_type="bpe")
    plain = build_tokenizer(TokenizerConfig("GPTSentencePieceTokenizer", tokenizer_model=str(path)))
    assert_ids(plain, model.encode)
    llama = build_tokenizer(TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(path)))
    assert_ids(llama, lambda text: [1, *model.encode(text)])
    assert (llama.vocab_size, llama.bos, llama.eod, llama.pad) == (290, 1, 2, None)
    assert llama.detokenize(llama.tokenize("the cat \U0001f600")) == "the cat \U0001f600"


def test_llama_equals_transformers(tmp_path):
    """transformers reads its own spelling of the file, made here from the model's pieces and their ranks.

    Text that begins with a space is left out: transformers then adds no space of its own, sentencepiece does.
    """
    llama_class = pytest.importorskip("transformers").LlamaTokenizer
    model = train_pieces(
        tmp_path / "tokenizer.model",
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    vocab = {model.id_to_piece(i): i for i in range(290)}
    pairs = [(token[:i], token[i:]) for token in vocab for i in range(1, len(token))]
    merges = sorted((p for p in pairs if p[0] in vocab and p[1] in vocab), key=lambda p: vocab[p[0] + p[1]])
    reference = llama_class(vocab=vocab, merges=merges)
    tokenizer = build_tokenizer(TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(tmp_path / "tokenizer.model")))
    for text in ["the cat", "the  cat\n\tsat ", "\u4f60\u597d \U0001f600", "fish" * 50, "\x00\x01", "<|endoftext|>"]:
        assert tokenizer.tokenize(text) == [1, *reference(text, add_special_tokens=False).input_ids], ascii(text)


def test_plain_sentencepiece_adds_special_tokens_after_its_pieces(tmp_path):
    path = tmp_path / "tokenizer.model"
    model = train_pieces(path, model_type="unigram", pad_id=3)
    config = TokenizerConfig("SentencePieceTokenizer", tokenizer_model=str(path), vocab_extra_ids=2)
    tokenizer = build_tokenizer(config)
    assert (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask) == (290, 291, 292, 293)
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (3, 1, 2)
    assert (tokenizer.additional_special_tokens_ids, tokenizer.vocab_size) == ([294, 295], 296)
    expected = [*model.encode("the cat "), 294, *model.encode(" sat"), 292, 295, *model.encode("")]
    assert tokenizer.tokenize("the cat <extra_id_0> sat<EOD><extra_id_1>") == expected
    assert tokenizer.detokenize([*model.encode("the cat"), 294, *model.encode("sat")]) == "the cat <extra_id_0> sat"
    no_pad = train_pieces(path, model_type="unigram")
    tokenizer = build_tokenizer(TokenizerConfig("SentencePieceTokenizer", tokenizer_model=str(path)))
    assert (no_pad.pad_id(), tokenizer.pad, tokenizer.vocab_size) == (-1, 294, 295)


def test_unusable_sentencepiece_models_are_named(tmp_path, monkeypatch):
    path = tmp_path / "m"
    train_pieces(path, eos_id=-1)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        build_tokenizer(TokenizerConfig("GPTSentencePieceTokenizer", tokenizer_model=str(path)))
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="sentencepiece"):
        build_tokenizer(TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(path)))
    with pytest.raises(FileNotFoundError, match="--tokenizer-model"):
        build_tokenizer(TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(tmp_path / "none")))
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(ImportError, match="pip install sentencepiece"):
        build_tokenizer(TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(path)))


def test_tokenizer_json_equals_transformers(tmp_path):
    """With a template, and with an end token that only tokenizer_config.json names."""
    transformers = pytest.importorskip("transformers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|bos|>", "<|im_end|>", "<|fill|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    trained.train_from_iterator(["the cat sat on the mat " * 4], trainer)
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    trained.enable_truncation(5)  # as a file saved after use may have it
    trained.enable_padding(length=9, pad_id=2, pad_token="<|fill|>")
    trained.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"content": "<|im_end|>"},
        "pad_token": "<|fill|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    assert (tokenizer.eod, tokenizer.pad) == (1, 2)
    assert_ids(tokenizer, lambda text: reference(text, truncation=False, padding=False).input_ids)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"(?s)tokenizer_config.json.*JSON"):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))


def write_tik(path, tokens):
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def gpt2_tokens():
    """GPT-2's tokens as bytes, in the order in which TikToken wants them: single bytes first, then by rank."""
    from megatron.core.tokenizers.huggingface_bpe_wordpiece_tiktoken import byte_letters

    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    vocab = json.loads(Path(GPT2[0]).read_text())
    words = [bytes(byte_of[c] for c in token) for token in sorted(vocab, key=vocab.get) if "endoftext" not in token]
    return [bytes([i]) for i in range(256)] + [word for word in words if len(word) > 1]


@needs_gpt2
@pytest.mark.parametrize(("pattern", "size"), [("v1", None), ("v2", 12000)])
def test_tik_equals_tiktoken(tmp_path, pattern, size):
    tiktoken = pytest.importorskip("tiktoken")
    from megatron.core.tokenizers.huggingface_bpe_wordpiece_tiktoken import TIK_PATTERNS

    tokens = gpt2_tokens()[: size or 20000]
    path = write_tik(tmp_path / "t.json", tokens)
    config = TokenizerConfig("TikTokenizer", tokenizer_model=path, vocab_size=size, tiktoken_pattern=pattern)
    kept = tokens if size is None else tokens[: size - 1000]
    ranks = {token: i + 1000 for i, token in enumerate(kept)}
    reference = tiktoken.Encoding("t", pat_str=TIK_PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={})
    tokenizer = build_tokenizer(config)
    assert_ids(tokenizer, reference.encode_ordinary)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (len(kept) + 1000, 2, 4)
    assert tokenizer.detokenize([1, *tokenizer.tokenize("Hello \u4f60"), 2, 9]) == "<s>Hello \u4f60</s><SPECIAL_9>"


def test_tik_by_hand_and_what_is_refused(tmp_path):
    bytes_ = [bytes([i]) for i in range(256)]
    path = write_tik(tmp_path / "t.json", [*bytes_, b"th", b"the", b"he"])
    small = {"tokenizer_model": path, "tiktoken_num_special_tokens": 10}
    tokenizer = build_tokenizer(TokenizerConfig("TikTokenizer", **small))
    assert tokenizer.tokenize("thehe") == [10 + 257, 10 + 258]
    assert tokenizer.vocab_size == 269
    names = ["</s>", "<unk>", "<s>"]
    tokenizer = build_tokenizer(TokenizerConfig("TikTokenizer", tiktoken_special_tokens=names, **small))
    assert (tokenizer.eod, tokenizer.pad) == (0, None)
    with pytest.raises(ValueError, match=r"(?s)10.*269.*--vocab-size.*300"):
        build_tokenizer(TokenizerConfig("TikTokenizer", vocab_size=300, **small))
    for content, reason in (("{}", "first 256"), ("[1]", "TikTokenizer"), ("[", "TikTokenizer")):
        (tmp_path / "bad").write_text(content)
        with pytest.raises(ValueError, match=reason):
            build_tokenizer(TokenizerConfig("TikTokenizer", tokenizer_model=str(tmp_path / "bad")))
    with pytest.raises(ValueError, match="a token twice"):
        build_tokenizer(TokenizerConfig("TikTokenizer", tokenizer_model=write_tik(tmp_path / "d", [*bytes_, b"a"])))


SETTINGS_AND_PROBLEMS = [
    ({"tokenizer_type": "BertWordPieceCase"}, "needs --vocab-file"),
    ({"tokenizer_type": "Llama2Tokenizer"}, "needs --tokenizer-model"),
    ({"vocab_extra_ids": -1}, "must not be negative"),
    ({"tokenizer_type": "NullTokenizer", "vocab_size": 5, "vocab_extra_ids": 1}, "has no meaning with"),
    ({"tokenizer_type": "TikTokenizer", "tokenizer_model": "t", "vocab_size": 1000}, "must have room"),
    ({"tokenizer_type": "TikTokenizer", "tokenizer_model": "t", "tiktoken_special_tokens": ["a"]}, "different names"),
]


@pytest.mark.parametrize(("settings", "problem"), SETTINGS_AND_PROBLEMS)
def test_settings_that_cannot_work(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        TokenizerConfig(**settings)
