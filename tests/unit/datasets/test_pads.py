"""A pad that texts hold too is text wherever it stands in a file: only what a data set fills up is padding."""

import json
import types

import numpy as np
import pytest
from token_files import write

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets import DataConfig, IndexedDataset, MockGPTDataset, build_gpt_datasets
from megatron.core.datasets.bert_and_t5_samples import BertDataset, T5Dataset
from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig, MaskingRules, WordPieces
from megatron.core.datasets.fill_in_the_middle import FimConfig
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.gpt_dataset_and_builder import TokenRules
from megatron.core.datasets.pad_token_is_text import pad_is_text
from megatron.core.datasets.t5_dataset_builder import build_t5_datasets
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig, build_tokenizer

tokenizers = pytest.importorskip("tokenizers")

S = 8
WORDS = ["<eos>", "<unk>", "<s>", "<mask>", "<fill>", "the", "cat", "sat", "!"]
ID = {word: i for i, word in enumerate(WORDS)}
TEXTS = ["the cat sat !", "sat ! ! cat dog the", "! the the cat", "cat"]  # "dog" is <unk>


def folder(path, settings, *, template=True, unk="<unk>", generation=None, files=None):
    """A Hugging Face folder of a tokenizer of words; texts begin with <s> where it has a template.

    files: name -> content of further ones.
    """
    path.mkdir(exist_ok=True)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ID, unk_token=unk))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([word for word in WORDS if word.startswith("<")])
    if template:
        begin = {"single": "<s> $A", "special_tokens": [("<s>", ID["<s>"])]}
        made.post_processor = tokenizers.processors.TemplateProcessing(**begin)
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", **settings}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    for name, content in (files or {}).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(path)))


def files_of(tmp_path, tokenizer):
    """(prefix, the tokens of the file end to end): each text three times, with an end."""
    documents = [[*tokenizer.tokenize(text), tokenizer.eod] for text in TEXTS * 3]
    return write(tmp_path / "text", [[document] for document in documents]), documents


def stream_of(dataset, documents):
    """The tokens that the samples of a data set are cut from."""
    return [token for d in dataset.indices.document_index for token in documents[d]]


CHAT = "{% for message in messages %}<s>{{ message['content'] }}<mask>{% endfor %}"
# The pad of a folder that texts hold: by the name of the end, for unknown words, in the template, as a word, ...
IN_TEXTS = {
    "the end of documents": ({"pad_token": "<eos>"}, {}),
    "the end as a dictionary": ({"pad_token": {"content": "<eos>"}}, {}),
    "unknown words": ({"pad_token": "<unk>"}, {}),
    "unknown words by name": ({"pad_token": "<mask>", "unk_token": "<mask>"}, {"unk": "<unk>"}),
    "what begins every text": ({"pad_token": "<s>"}, {}),
    "a begin by name": ({"pad_token": "<s>", "bos_token": "<s>"}, {"template": False}),
    "a word": ({"pad_token": "!"}, {}),
    "another end of config.json": (
        {"pad_token": "<mask>"},
        {"files": {"config.json": {"eos_token_id": [0, ID["<mask>"]]}}},
    ),
    "the begin of config.json": ({"pad_token": "<mask>"}, {"files": {"config.json": {"bos_token_id": ID["<mask>"]}}}),
    "the end of a chat's turn": ({"pad_token": "<mask>", "chat_template": CHAT}, {}),
    "one of several chats": ({"pad_token": "<mask>", "chat_template": [{"name": "default", "template": CHAT}]}, {}),
    "a chat's own file": ({"pad_token": "<mask>"}, {"files": {"chat_template.jinja": CHAT}}),
    "a chat's older file": ({"pad_token": "<mask>"}, {"files": {"chat_template.json": {"chat_template": CHAT}}}),
    "another chat's file": ({"pad_token": "<mask>"}, {"files": {"additional_chat_templates/tools.jinja": CHAT}}),
    "a chat by its variable": ({"pad_token": "<mask>", "chat_template": "{{ text + pad_token }}"}, {}),
    "another end": ({"pad_token": "<mask>"}, {"generation": {"eos_token_id": [ID["<eos>"], ID["<mask>"]]}}),
    "a begin of the model": ({"pad_token": "<mask>"}, {"generation": {"bos_token_id": ID["<mask>"]}}),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", IN_TEXTS)
def test_a_pad_that_texts_hold_is_text(tmp_path, kind):
    settings, parts = IN_TEXTS[kind]
    tokenizer = folder(tmp_path / "folder", settings, **parts)
    assert pad_is_text(tokenizer) and tokenizer.pad is not None
    prefix, documents = files_of(tmp_path, tokenizer)
    said = []
    config = DataConfig(data_path=[prefix], seq_length=S, data_cache_path=str(tmp_path / "cache"), split="8,2,2")
    built = build_gpt_datasets(config, tokenizer, [6, 2, 2], 1, progress=said.append)
    assert [line for line in said if f"pad token ({tokenizer.pad})" in line]
    for dataset in built:  # train, valid and test
        stream = stream_of(dataset, documents)
        for i, k in enumerate(dataset.indices.shuffle_index.tolist()):
            item = dataset[i]
            assert item["tokens"].tolist() == stream[k * S : k * S + S]
            assert item["labels"].tolist() == stream[k * S + 1 : k * S + S + 1]
            assert item["loss_mask"].all()


def test_a_pad_that_is_nothing_else_is_masked_in_files(tmp_path):
    beside = {"config.json": {"bos_token_id": ID["<s>"], "eos_token_id": ID["<eos>"]}, "chat_template.jinja": CHAT}
    tokenizer = folder(tmp_path / "folder", {"pad_token": "<fill>"}, files=beside)
    assert not pad_is_text(tokenizer)
    pad = ID["<fill>"]
    prefix = write(tmp_path / "text", [[[5, 6, 7, 0, pad, pad, pad, pad, 5]]])
    config = DataConfig(data_path=[prefix], seq_length=S, data_cache_path=str(tmp_path / "cache"), split="1")
    said = []
    item = build_gpt_datasets(config, tokenizer, [1, 0, 0], 1, progress=said.append)[0][0]
    assert item["tokens"].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert item["labels"].tolist() == [6, 7, 0, 0, 0, 0, 0, 5]
    assert item["loss_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 1]
    assert not [line for line in said if "pad token" in line]


@pytest.mark.parametrize("pad, is_text", [("!", True), ("ab", True), ("<fill>", False)])
def test_a_pad_that_merges_make_is_text_though_its_file_adds_it(tmp_path, pad, is_text):
    """As transformers saves it: every named token is an added one."""
    words = {"!": 0, "a": 1, "b": 2, "ab": 3, "<eos>": 4, "<fill>": 5}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("a", "b")]))
    made.add_special_tokens(["<eos>", pad])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": pad}))
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    assert (tokenizer.pad, pad_is_text(tokenizer)) == (words[pad], is_text)


def test_documents_end_where_their_end_is_the_pad(tmp_path):
    tokenizer = folder(tmp_path / "folder", {"pad_token": "<eos>"})
    prefix, documents = files_of(tmp_path, tokenizer)
    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), True)
    config = DataConfig(data_path=[prefix], seq_length=S, data_cache_path=str(tmp_path), split="1", **flags)
    dataset = build_gpt_datasets(config, tokenizer, [6, 0, 0], 1)[0]
    stream, borders = stream_of(dataset, documents), 0
    for i, k in enumerate(dataset.indices.shuffle_index.tolist()):
        position, document = 0, 0
        item = dataset[i]
        for j, token in enumerate(stream[k * S : k * S + S]):
            row = [item[name][j] for name in ("tokens", "position_ids", "document_ids", "loss_mask")]
            assert row == [token, position, document, token != tokenizer.eod]
            ends = token == tokenizer.eod
            position, document = (0, document + 1) if ends else (position + 1, document)
            borders += ends
    assert borders > 5


class Asked:
    """A script's tokenizer, as far as data sets look at one; Megatron's raise for ids that they lack."""

    vocab_size, eod = 30, 9

    def __init__(self, first=(), **ids):
        self.first = list(first)
        vars(self).update(ids)

    @property
    def sep(self):
        raise NotImplementedError("no sep")

    def tokenize(self, text):
        return [*self.first, *map(int, text.split())]


@pytest.mark.parametrize(
    ("tokenizer", "is_text"),
    [
        (Asked(pad=9), True),
        (Asked(pad=3, eos=3), True),
        (Asked(pad=3, unk_id=3), True),
        (Asked(pad=3, sep_id=3), True),
        (Asked(pad=3, eos_token_id=3), True),
        (Asked(pad=3, bos_token_id=3, unk_token_id=4), True),
        (Asked(pad=3, bos_token_id=5, unk_token_id=4), False),
        (Asked(pad=3, first=(3,)), True),
        (Asked(pad=3, pad_is_text=True), True),
        (Asked(pad=3, bos=4), False),
        (Asked(pad=None), False),
        (Asked(), False),
        (types.SimpleNamespace(vocab_size=30, eod=9, pad=3), False),
    ],
)
def test_a_script_s_tokenizer_is_asked_for_its_ids(tokenizer, is_text):
    assert pad_is_text(tokenizer) == is_text


def test_megatron_core_s_names_read_the_same(tmp_path):
    documents = [[1, 2, 3, 4, 5, 9]] * 6
    prefix = write(tmp_path / "text", [[document] for document in documents])
    given = {"random_seed": 1, "sequence_length": S, "path_to_cache": str(tmp_path), "split": "1", "blend": [prefix]}
    config = GPTDatasetConfig(tokenizer=Asked(pad=9), create_attention_mask=False, **given)
    built = BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], config).build()[0]
    alone = GPTDataset(IndexedDataset(prefix), prefix, np.arange(6, dtype=np.int32), 4, None, config)
    for samples in (built, alone):
        items = [samples[i] for i in range(4)]
        assert all(item["loss_mask"].all() for item in items)
        assert sum((item["labels"] == 9).sum() for item in items) >= 4
    refused = GPTDatasetConfig(tokenizer=Asked(pad=9), allow_ambiguous_pad_tokens=True, **given)
    for use in (
        BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], refused).build,
        lambda: GPTDataset(IndexedDataset(prefix), prefix, np.arange(6, dtype=np.int32), 4, None, refused),
    ):
        with pytest.raises(ConfigError, match=r"allow_ambiguous_pad_tokens=True.*\(9\).*leave it out"):
            use()
    allowed = GPTDatasetConfig(tokenizer=Asked(pad=8), allow_ambiguous_pad_tokens=True, **given)
    assert BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], allowed).build()[0][0]["loss_mask"].all()


def test_made_up_text_holds_any_token():
    plain, padded = (MockGPTDataset(20, 64, (1, 0), TokenRules(30, 29, pad)) for pad in (None, 7))
    for i in range(20):
        assert all(np.array_equal(padded[i][name], plain[i][name]) for name in plain[i])
    assert sum((padded[i]["labels"] == 7).sum() for i in range(20)) > 0


NAMES = {"<fim_prefix>": 200, "<fim_middle>": 201, "<fim_suffix>": 202, "<end>": 204}
LETTERS = types.SimpleNamespace(
    vocab_size=300,
    eod=204,
    vocab=NAMES,
    tokenize=lambda text: [*map(ord, text)],
    detokenize=lambda ids: "".join(map(chr, ids)),
)


def test_a_rearranged_sample_is_masked_only_where_it_was_filled(tmp_path):
    """The token that fills is the one that ends documents; empty documents make samples shorter."""
    documents = [[*map(ord, text), 204] for text in ["abc", "", "", "d", "efgh", ""] * 6]
    prefix = write(tmp_path / "text", [[document] for document in documents])
    config = DataConfig(data_path=[prefix], seq_length=S, data_cache_path=str(tmp_path), split="1")
    fim = FimConfig(fim_data=True, fim_rate=0.0, fim_pad_token="<end>")
    dataset = build_gpt_datasets(config, LETTERS, [9, 0, 0], 1, fim=fim)[0]
    stream = stream_of(dataset, documents)
    ends = filled = 0
    for i, k in enumerate(dataset.indices.shuffle_index.tolist()[:9]):
        item, raw = dataset[i], stream[k * S : k * S + S + 1]
        # An empty document between two ends, or before the first, is left out.
        kept = [token for j, token in enumerate(raw) if token != 204 or (j and raw[j - 1] != 204)]
        assert item["labels"].tolist() == [*kept[1:], *[204] * (S + 1 - len(kept))]
        assert item["loss_mask"].tolist() == [1] * (len(kept) - 1) + [0] * (S + 1 - len(kept))
        ends, filled = ends + kept[1:].count(204), filled + S + 1 - len(kept)
    assert ends > 3 and filled > 3


# ---------------------------------------------------------------- BERT and T5

VOCAB = tuple(f"{i}" for i in range(40))


def sentences(tmp_path, ids):
    """A file of documents of two sentences, and a map of its samples."""
    rng = np.random.RandomState(0)
    texts = [[rng.choice(ids, 6).tolist(), rng.choice(ids, 5).tolist()] for _ in range(20)]
    indexed = IndexedDataset(write(tmp_path / "text", texts))
    return indexed, np.array([[2 * d, 2 * d + 2, 12] for d in range(20)]), texts


def test_words_of_a_bert_are_seen_where_they_are_the_pad(tmp_path):
    """The pad is the mask, and a word of the file: neither hides a word from the others."""
    indexed, rows, texts = sentences(tmp_path, range(6, 12))
    for pad, is_text in ((3, True), (7, True), (7, False)):
        pieces = WordPieces(VOCAB, cls=1, sep=2, mask=3, pad=pad, pad_is_text=is_text)
        dataset = BertDataset(indexed, rows, 20, 1, pieces, MaskingRules(0.3), binary_head=False)
        hidden = 0
        for i, (a, b) in enumerate(texts):
            item = dataset[i]
            text = np.where(item["labels"] >= 0, item["labels"], item["text"])
            assert text.tolist() == [1, *a, *b, 2] + [pad] * 7
            drawn = (item["text"] == pad) & (item["labels"] >= 0) & (item["labels"] != pad)
            seen = np.arange(20) < 13
            assert item["padding_mask"].tolist() == (seen if is_text else seen & ~drawn).tolist()
            assert not item["types"].any()  # padding is of no other part of the text
            hidden += (item["text"] == 3).sum()
        assert hidden > 20


@pytest.mark.parametrize(("pad", "bos"), [(7, 4), (4, 4), (0, 5)])
def test_words_of_a_t5_are_seen_where_they_are_the_pad(tmp_path, pad, bos):
    """A word of the file is the pad, or the decoder's text begins with it, as that of the published models."""
    indexed, rows, texts = sentences(tmp_path, range(6, 12))
    pieces = WordPieces(VOCAB, 1, 2, 3, pad, bos, 5, sentinels=tuple(range(30, 40)))
    dataset = T5Dataset(indexed, rows, 20, 1, pieces, MaskingRules(0.3), decoder_seq_length=16)
    for i, text in enumerate(texts):
        item = dataset[i]
        for name, mask in (("text_enc", "enc_mask"), ("text_dec", "dec_mask")):
            count = int(item[mask].sum())
            assert item[mask].tolist() == [1] * count + [0] * (len(item[mask]) - count)
            assert not item[name][count:].any()
        asked = item["labels"][item["loss_mask"] == 1].tolist()
        assert asked[-1] == 5 and item["text_dec"][: len(asked)].tolist() == [bos, *asked[:-1]]
        spans, sentinel = {}, None
        for token in asked[:-1]:
            sentinel = token if token >= 30 else sentinel
            spans.setdefault(sentinel, []).extend([token] if token < 30 else [])
        whole = [t for token in item["text_enc"][item["enc_mask"] == 1].tolist() for t in spans.get(token, [token])]
        assert whole == [token for part in text for token in part]


def test_the_masked_data_sets_hear_of_a_pad_in_texts(tmp_path):
    indexed, _, _ = sentences(tmp_path, range(6, 12))
    prefix, ids = indexed.prefix, {"cls": 1, "mask": 3, "bos": 4, "eos": 5, "inv_vocab": dict(enumerate(VOCAB))}
    told = types.SimpleNamespace(vocab_size=40, eod=5, sep=2, additional_special_tokens_ids=range(30, 40), **ids)
    lengths = {"seq_length": 16, "decoder_seq_length": 16}
    config = DataConfig(data_path=[prefix], data_cache_path=str(tmp_path), split="1", **lengths)
    masking = MaskedDataConfig(bert_binary_head=False)
    for pad, is_text in ((4, True), (0, False)):
        told.pad = pad
        for dataset in (
            build_bert_datasets(config, masking, told, [4, 0, 0], 1)[0],
            build_t5_datasets(config, masking, told, [4, 0, 0], 1)[0],
        ):
            assert (dataset.pieces.pad, dataset.pieces.pad_is_text) == (pad, is_text)
