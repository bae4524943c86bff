"""Tokenizers of published encoders: a BERT's and a T5's, which have no token that ends a document, or one that ends every text.

The files are small, in the form of the published ones. Expected ids are counted by hand from the lists below.
"""

import io
import json
import types
from pathlib import Path

import pytest
from refusals import BASE
from said import tells
from token_files import contents

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets import DataConfig
from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, FimConfig
from megatron.core.datasets.gpt_dataset_and_builder import build_gpt_datasets
from megatron.core.datasets.t5_dataset_builder import build_t5_datasets
from megatron.core.models.common.model_rules import GPT_RULES
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.training.arguments.command_line import parse_args
from tools import generate, inspect_dataset, preprocess_data
from tools.generating.t5 import encoder_ids

tokenizers = pytest.importorskip("tokenizers")

BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BERT_WORDS = [*BERT_SPECIAL, "the", "cat", "##s", "sat", ".", "on", "mat"]
T5_WORDS = [
    "<pad>",
    "</s>",
    "<unk>",
    "\u2581",
    "\u2581the",
    "\u2581cat",
    "s",
    "\u2581sat",
    ".",
    "\u2581on",
    "\u2581mat",
]
SENTINELS = 5
LINES = [{"text": f"The cats sat. The cat sat on the mat. {'The cat sat. ' * n}The mat sat."} for n in range(12)]


def with_special(library, tokens):
    library.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in tokens])
    return library


@pytest.fixture
def bert_folder(tmp_path):
    """vocab.txt, and the tokenizer.json that transformers writes of it: [CLS] text [SEP], no token that ends a document."""
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(BERT_WORDS) + "\n")
    model = tokenizers.models.WordPiece({word: i for i, word in enumerate(BERT_WORDS)}, unk_token="[UNK]")
    library = with_special(tokenizers.Tokenizer(model), BERT_SPECIAL)
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.decoder = tokenizers.decoders.WordPiece()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def t5_folder(tmp_path):
    """The tokenizer.json of a T5: text </s>, and the sentinels after the pieces, the first of them last."""
    folder = tmp_path / "t5"
    folder.mkdir()
    pieces = [(word, -float(i)) for i, word in enumerate(T5_WORDS)]
    pieces += [(f"<extra_id_{SENTINELS - 1 - i}>", 0.0) for i in range(SENTINELS)]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    with_special(library, ["<pad>", "</s>", "<unk>", *(f"<extra_id_{i}>" for i in range(SENTINELS))])
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    library.decoder = tokenizers.decoders.Metaspace()
    library.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    library.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "extra_ids": SENTINELS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "T5Tokenizer"}))
    return folder


def of(folder):
    return build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))


def write_lines(path):
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(path)


def preprocess(tmp_path, folder, *flags):
    words = ["--input", write_lines(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"), *flags]
    return preprocess_data.main([*words, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)])


def test_a_berts_own_tokenizer_has_the_tokens_of_masked_words_and_no_end(bert_folder):
    tokenizer = of(bert_folder)
    assert (tokenizer.eod, tokenizer.bos, tokenizer.vocab_size) == (None, None, len(BERT_WORDS))
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    assert tokenizer.tokenize("The cats") == [2, 5, 6, 7, 3]
    assert tokenizer.tokenize_sentences(["The cats", ""]) == [[5, 6, 7], []]


def test_an_end_is_asked_for_only_where_one_is_appended(bert_folder, tmp_path, capsys):
    assert preprocess(tmp_path, bert_folder) == 0
    assert contents(tmp_path / "out_text_document")[0][0][:4] == [2, 5, 6, 7]
    assert preprocess(tmp_path, bert_folder, "--append-eod") == 1
    assert tells(capsys.readouterr().err, f"--append-eod {bert_folder}/tokenizer.json no token ends document drop")
    words = ["--input", str(tmp_path / "out_text_document"), "--verify", "--tokenizer-type", "HuggingFaceTokenizer"]
    assert inspect_dataset.main([*words, "--tokenizer-model", str(bert_folder)]) == 0
    assert "do not end" not in capsys.readouterr().out


def test_sentences_carry_no_begin_and_end_of_their_own(bert_folder, tmp_path):
    """A BERT's samples put [CLS] and [SEP] around two runs of sentences, so none may stand in them."""
    assert preprocess(tmp_path, bert_folder, "--split-sentences") == 0
    assert contents(tmp_path / "out_text_sentence")[0][:2] == [[5, 6, 7, 8, 9], [5, 6, 8, 10, 5, 11, 9]]
    config = DataConfig(seq_length=32, data_path=[str(tmp_path / "out_text_sentence")], split="1,0,0")
    train, *_ = build_bert_datasets(config, MaskedDataConfig(), of(bert_folder), [8, 0, 0], 1)
    for i in range(8):
        item = train[i]
        whole = [int(y if y >= 0 else x) for x, y in zip(item["text"], item["labels"])]
        assert whole[0] == 2 and (whole.count(2), whole.count(3)) == (1, 2)


def test_a_gpt_reads_such_data_unless_it_looks_for_ends(bert_folder, tmp_path):
    assert preprocess(tmp_path, bert_folder) == 0
    tokenizer = of(bert_folder)
    given = {"seq_length": 8, "data_path": [str(tmp_path / "out_text_document")], "split": "1,0,0"}
    said = []
    train, *_ = build_gpt_datasets(DataConfig(**given), tokenizer, [4, 0, 0], 1, say=said.append, progress=said.append)
    assert len(train[0]["tokens"]) == 8 and not any("--append-eod" in line for line in said)
    asking = DataConfig(**given, reset_position_ids=True, eod_mask_loss=True)
    with pytest.raises(ConfigError, match=r"(?s)--eod-mask-loss.*has none.*--reset-position-ids.*has none"):
        build_gpt_datasets(asking, tokenizer, [4, 0, 0], 1)
    names = {"fim_prefix_token": "the", "fim_middle_token": "cat", "fim_suffix_token": "sat", "fim_pad_token": "[PAD]"}
    without_template = types.SimpleNamespace(
        eod=None, vocab=tokenizer.vocab, tokenize=lambda text: tokenizer.tokenize_sentences([text])[0]
    )
    with pytest.raises(ConfigError, match="--fim-eod-token"):
        FillInTheMiddle(FimConfig(fim_data=True, **names), without_template, 1)
    FillInTheMiddle(FimConfig(fim_data=True, fim_eod_token="[SEP]", **names), without_template, 1)


def test_the_rules_of_a_gpt_name_the_flag_before_processes_meet(bert_folder):
    config, *_ = parse_args(
        [
            *f"{BASE} --mock-data --reset-attention-mask --tokenizer-type HuggingFaceTokenizer".split(),
            "--tokenizer-model",
            str(bert_folder),
        ]
    )
    assert any("--reset-attention-mask" in problem for problem in GPT_RULES.problems(config, of(bert_folder)))


def test_an_empty_prompt_needs_an_end_to_begin_after():
    silent = types.SimpleNamespace(name="HuggingFaceTokenizer", eod=None, tokenize=lambda text: [])
    with pytest.raises(ConfigError, match=r"empty prompt.*give a text"):
        generate.prompt_ids("", silent)


@pytest.mark.parametrize(
    ("rows", "extra", "size", "eod"),
    [
        (None, 0, 14, 13),  # Megatron's: [BOS] 12, [EOS] 13
        (14, 0, 14, 13),
        (12, 0, 12, None),  # the model's own rows
        (17, 3, 17, 13),
        (15, 3, 15, None),
        (11, 0, 12, None),  # too few for the file: the run refuses it by the number of words
    ],
)
def test_a_word_piece_file_counts_no_more_than_its_model_has_rows(bert_folder, rows, extra, size, eod):
    for kind in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        given = {"vocab_extra_ids": extra, "model_vocab_size": rows}
        tokenizer = build_tokenizer(TokenizerConfig(kind, str(bert_folder / "vocab.txt"), **given))
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (size, eod, eod and eod - 1)
        assert tokenizer.additional_special_tokens_ids == list(range(size - extra, size))
        assert (tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad) == (2, 3, 4, 0)


def test_a_t5s_own_tokenizer_has_its_sentinels_and_no_begin(t5_folder):
    tokenizer = of(t5_folder)
    assert (tokenizer.eod, tokenizer.eos, tokenizer.bos, tokenizer.pad) == (1, 1, None, 0)
    assert (tokenizer.vocab_size, tokenizer.additional_special_tokens_ids) == (16, [15, 14, 13, 12, 11])
    assert tokenizer.tokenize("the cats") == [4, 5, 6, 1]
    assert tokenizer.tokenize_sentences(["the cats"]) == [[4, 5, 6]]


def test_a_t5_trains_with_its_own_tokenizer(t5_folder, tmp_path):
    assert preprocess(tmp_path, t5_folder, "--split-sentences") == 0
    paths = {"data_path": [str(tmp_path / "out_text_sentence")], "split": "1,0,0"}
    config = DataConfig(seq_length=32, decoder_seq_length=16, **paths)
    train, *_ = build_t5_datasets(config, MaskedDataConfig(), of(t5_folder), [8, 0, 0], 1)
    longest = 0
    for i in range(8):
        item = train[i]
        length = int(item["loss_mask"].sum())
        assert 1 not in item["text_enc"] and item["labels"][length - 1] == 1  # </s> ends what is asked for alone
        begin, *asked = item["text_dec"].tolist()
        assert begin == 0 and item["dec_mask"].tolist() == [1] * length + [0] * (16 - length)
        assert (
            length == 1 or asked[0] == 15
        )  # <extra_id_0>; the chosen span of a short text may be too long to be left out
        longest = max(longest, length)
        assert item["labels"][:-1][: length - 1].tolist() == item["text_dec"][1:][: length - 1].tolist()
    assert longest > 2


def test_a_prompt_with_sentinels_ends_once(t5_folder):
    """As transformers encodes it: the names are found within the text, and </s> stands at the end alone."""
    ids = encoder_ids("the <extra_id_0> sat", of(t5_folder), lambda text, tokenizer: tokenizer.tokenize(text))
    assert [i for i in ids if i != 3] == [4, 15, 7, 1]


def test_a_llama_files_begin_is_left_out_of_sentences(tmp_path):
    pytest.importorskip("sentencepiece")
    from piece_models import train_pieces

    model = train_pieces(Path(tmp_path / "tokenizer.model"), model_type="bpe")
    config = TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(tmp_path / "tokenizer.model"))
    assert build_tokenizer(config).tokenize_sentences(["the cat"]) == [model.encode("the cat")]


@pytest.fixture
def pieces(tmp_path):
    """A sentencepiece model as a T5's: <pad> 0, </s> 1, <unk> 2, no begin."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    lines = ["the cat sat on the mat and the dogs ate their fish", "near a river with stones while it rained"] * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=30,
        model_type="unigram",
        minloglevel=3,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    )
    (tmp_path / "spiece.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))


@pytest.mark.parametrize(
    ("name", "said", "given", "count"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 7}, 0, 7),
        ("tokenizer_config.json", {"tokenizer_class": "T5TokenizerFast"}, 0, 100),
        ("config.json", {"model_type": "t5"}, 0, 100),
        ("config.json", {"model_type": "t5"}, 30, 30),
        ("tokenizer_config.json", {"tokenizer_class": "MT5Tokenizer", "extra_ids": 0}, 0, 0),
    ],
)
def test_the_pieces_of_a_published_t5_have_transformers_ids(pieces, tmp_path, name, said, given, count):
    """<extra_id_0> is the last id, and nothing of our own stands between the pieces and the sentinels."""
    (tmp_path / name).write_text(json.dumps(said))
    config = TokenizerConfig(
        "SentencePieceTokenizer", tokenizer_model=str(tmp_path / "spiece.model"), vocab_extra_ids=given
    )
    tokenizer = build_tokenizer(config)
    assert tokenizer.vocab_size == 30 + count
    assert tokenizer.additional_special_tokens_ids == [30 + count - 1 - k for k in range(count)]
    assert (tokenizer.pad, tokenizer.eod, tokenizer.eos, tokenizer.bos) == (0, 1, 1, None)
    assert tokenizer.tokenize("the cat") == [*pieces.encode("the cat"), 1]
    assert tokenizer.tokenize_sentences(["the cat", ""]) == [pieces.encode("the cat"), []]
    if count:
        ids = [*pieces.encode("the"), 30 + count - 1, *pieces.encode("sat"), 1]
        assert tokenizer.tokenize("the <extra_id_0> sat") == tokenizer.tokenize("the<extra_id_0>sat") == ids
        assert encoder_ids("the <extra_id_0> sat", tokenizer, lambda text, tokenizer: tokenizer.tokenize(text)) == ids
        assert tokenizer.detokenize(ids) == "the <extra_id_0> sat </s>"


@pytest.mark.parametrize("said", [{}, {"model_type": "llama"}])
def test_pieces_that_are_no_published_t5s_are_numbered_as_megatron_does(pieces, tmp_path, said):
    (tmp_path / "config.json").write_text(json.dumps(said))
    path = str(tmp_path / "spiece.model")
    tokenizer = build_tokenizer(TokenizerConfig("SentencePieceTokenizer", tokenizer_model=path, vocab_extra_ids=2))
    assert (tokenizer.cls, tokenizer.bos, tokenizer.additional_special_tokens_ids) == (30, 34, [35, 36])
    assert tokenizer.tokenize("the cat") == pieces.encode("the cat")
