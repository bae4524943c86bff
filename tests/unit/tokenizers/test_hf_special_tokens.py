"""Tokens that only the files beside a tokenizer.json name: ids, sizes and ends of text are those that transformers gives.

Oracle: tests/support/exchange/records/special_tokens.json, what 4.57.6 and 5.23.0 say of the folders of special_token_folders.py.
"""

import json

import cases
import pytest
from said import tells
from special_token_folders import FOLDERS, RECORD, TEXTS, library_of, smallest, write_folder

from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.tokenizer_sha256 import tokenizer_sha256
from megatron.training.arguments.command_line import parse_args
from tools import checkpoint_convert

tokenizers = pytest.importorskip("tokenizers")

ANSWERS = json.loads(RECORD.read_text())


def config_of(folder, version=None, **more):
    path = str(folder)
    return TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=path, tokenizer_transformers_version=version, **more)


def differing(tokenizer, answer):
    """What differs from a recorded answer. Ours also looks for an end and for padding by name where no file says them."""
    found = {"size": tokenizer.library.get_vocab_size(), "ids": [tokenizer.tokenize(text) for text in TEXTS]}
    found |= {name: getattr(tokenizer, name) for name in ("bos", "eos", "pad") if answer[name] is not None}
    return {name: (value, answer[name]) for name, value in found.items() if value != answer[name]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return {name: write_folder(root, name) for name in FOLDERS}


@pytest.mark.full
def test_ids_and_sizes_are_those_of_both_versions(folders):
    compared = 0
    for name, folder in folders.items():
        for version, of in (("4", "4.57.6"), ("5", "5.23.0")):
            if not isinstance(ANSWERS[name][of], str):  # an error of that version
                tokenizer = build_tokenizer(config_of(folder, version))
                assert not differing(tokenizer, ANSWERS[name][of]), (name, version)
                compared += 1
    assert compared > 250


def test_a_folder_is_refused_only_where_the_versions_differ(folders):
    """By both ids, and the flag that chooses. Where one version alone reads a folder, its ids are taken."""
    refused = 0
    for name, folder in folders.items():
        read = [answer for answer in ANSWERS[name].values() if not isinstance(answer, str)]
        if all(answer == read[0] for answer in read):
            assert not differing(build_tokenizer(config_of(folder)), read[0]), name
        else:
            with pytest.raises(ValueError, match=r"4\.57.*(id \d|no token).*5\.x.*--tokenizer-transformers-version"):
                build_tokenizer(config_of(folder))
            refused += 1
    assert refused > 20


def test_the_end_of_a_chat_is_the_end_of_a_document(tmp_path):
    """500 words; 500 and 501 only in tokenizer_config.json."""
    smallest(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = build_tokenizer(config_of(path))
        assert (tokenizer.eod, tokenizer.eos, tokenizer.vocab_size) == (501, 501, 502)
        assert tokenizer.tokenize("w1<|im_start|>w2 <|im_end|>") == [1, 500, 2, 501]
        assert tokenizer.detokenize([500, 7, 501]) == "<|im_start|> w7 <|im_end|>"


def folder_with(folder, config=None, mapped=None, added=None, kind="PreTrainedTokenizerFast"):
    folder.mkdir(exist_ok=True)
    library_of(kind, True, ["<s>", "</s>", "<unk>"], "<s> $A").save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config": config, "special_tokens_map": mapped, "added_tokens": added}
    for name, content in files.items():
        (folder / f"{name}.json").unlink(missing_ok=True)
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_each_file_that_may_name_a_token_is_read(tmp_path):
    size = 265  # of the file alone
    assert build_tokenizer(config_of(folder_with(tmp_path / "f"))).vocab_size == size
    for given in (
        {"config": {"eos_token": "<new>"}},
        {"config": {"eos_token": {"__type": "AddedToken", "content": "<new>"}}},
        {"config": {"additional_special_tokens": ["<new>", "</s>"]}},
        {"config": {"extra_special_tokens": ["<new>"]}},
        {"config": {"extra_special_tokens": {"image_token": "<new>"}}},
        {"config": {"added_tokens_decoder": {"900": {"content": "<new>"}}}},
        {"mapped": {"pad_token": {"content": "<new>", "lstrip": False}}},
        {"mapped": {"additional_special_tokens": ["<new>"]}},
        {"added": {"<new>": size}},
    ):
        tokenizer = build_tokenizer(config_of(folder_with(tmp_path / "f", **given)))
        assert (tokenizer.vocab_size, tokenizer.vocab["<new>"]) == (size + 1, size), given
        assert tokenizer.tokenize("cat<new>")[-1] == size, given
        assert "<new>" in tokenizer.added_tokens, "else a batch would cut it into words"
    told = {"config": {"added_tokens_decoder": {}}, "mapped": {"eos_token": "<new>"}}
    assert (
        build_tokenizer(config_of(folder_with(tmp_path / "f", **told))).vocab_size == size
    )  # both versions skip the map


def test_begin_and_end_of_a_text_are_as_the_folder_says(tmp_path):
    def of(version=None, **flags):
        config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        folder = folder_with(tmp_path / "f", {**config, "unk_token": "<unk>", **flags})
        return build_tokenizer(config_of(folder, version)).tokenize("")

    assert of() == of(add_bos_token=True, add_eos_token=False) == [0]  # 4.57 and 5.x agree
    with pytest.raises(ValueError, match=r"every text ends with id 1 in 4\.57 and with no token in 5\.x"):
        of(add_eos_token=True)
    assert (of("4", add_eos_token=True), of("5", add_eos_token=True)) == ([0, 1], [0])
    with pytest.raises(ValueError, match=r"every text begins with no token in 4\.57 and with id 0 in 5\.x"):
        of(add_bos_token=False)
    assert (of("4", add_bos_token=False), of("5", add_bos_token=False)) == ([], [0])


@pytest.mark.parametrize("named", [{"bos_token": "<s>"}, {"eos_token": "</s>"}])
def test_a_folder_may_name_one_end_of_a_text_alone(tmp_path, named):
    """Its class then begins and ends no text, whatever template the tokenizer.json has."""
    settings = {"tokenizer_class": "CodeLlamaTokenizerFast", "unk_token": "<unk>", "add_bos_token": False, **named}
    tokenizer = build_tokenizer(config_of(folder_with(tmp_path / "f", settings), "4"))
    assert tokenizer.tokenize("") == []


def test_text_is_cut_as_the_chosen_version_cuts_it(tmp_path):
    """tokenizer.json says it, and 4.57; 5 has rules of its own for two classes."""

    def of(kind, text, *versions, byte_level=False, **config):
        library = library_of(kind, byte_level, ["<s>", "</s>", "<unk>"], None)
        if byte_level:
            split = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
            last = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, last])  # one letter each
        library.save(str(tmp_path / "tokenizer.json"))
        said = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
        found = [build_tokenizer(config_of(tmp_path, version)).tokenize(text) for version in versions]
        return [[library.id_to_token(i) for i in ids] for ids in found]

    llama = {"add_bos_token": False}
    cut = ["\u2581", "\u2581cat"]
    assert of("LlamaTokenizerFast", " cat", None, "4", "5", **llama) == [cut, cut, ["\u2581cat"]]
    assert of("LlamaTokenizer", "cat", "4", "5", add_prefix_space=False, **llama)[1] == ["c", "a", "t"]
    assert of("PreTrainedTokenizerFast", " cat", None, "4", "5") == [cut] * 3
    letters = ["c", "a", "t"]
    assert of("GPT2Tokenizer", "cat", None, "4", "5", byte_level=True) == [letters, letters, ["cat"]]


def written(folder, library, **config):
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_berts_text_is_cut_as_its_config_says(tmp_path):
    """Not as its tokenizer.json: 4.57 and 5.x agree. Without a class, config.json says that it is a BERT."""
    tokens = ["[UNK]", "\u00c9a", "\u00e9a", "ea", "Ea", "\u6771\u4eac", "\u6771", "\u4eac"]
    library = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()

    def of(**config):
        tokenizer = build_tokenizer(config_of(written(tmp_path, library, **config)))
        return [tokens[i] for i in tokenizer.tokenize("\u00c9a \u6771\u4eac")], json.dumps(tokenizer.hashed_changes)

    kind = {"tokenizer_class": "BertTokenizer"}
    as_file, cased = of(**kind), of(**kind, do_lower_case=False)
    assert (
        as_file[0]
        == of(tokenizer_class="PreTrainedTokenizerFast", do_lower_case=False)[0]
        == ["ea", "\u6771", "\u4eac"]
    )
    assert cased[0] == ["\u00c9a", "\u6771", "\u4eac"] and cased[1] != as_file[1], "a hash tells them apart"
    assert of(**kind, strip_accents=False)[0] == ["\u00e9a", "\u6771", "\u4eac"]
    assert of(**kind, tokenize_chinese_chars=False)[0] == ["ea", "\u6771\u4eac"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "distilbert"}))
    assert of(do_lower_case=False)[0] == cased[0]


def test_a_vocab_txt_is_cut_as_the_config_beside_it_says(tmp_path):
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]", "\u00e9a", "ea", "\u6771\u4eac", "\u6771", "\u4eac"]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(tokens), encoding="utf-8")

    def of(**config):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = build_tokenizer(TokenizerConfig("BertWordPieceLowerCase", vocab_file=str(path)))
        return [tokens[i] for i in tokenizer.tokenize("\u00c9a \u6771\u4eac")], tokenizer.hashed_changes

    assert of() == of(tokenize_chinese_chars=True) == (["ea", "\u6771", "\u4eac"], [])
    accents, joined = of(strip_accents=False), of(tokenize_chinese_chars=False)
    assert accents[0] == ["\u00e9a", "\u6771", "\u4eac"] and joined[0] == ["ea", "\u6771\u4eac"]
    assert accents[1] and joined[1], "a hash tells them apart"


def test_special_tokens_of_a_text_are_split_where_the_config_says_so(tmp_path):
    library = library_of("PreTrainedTokenizerFast", True, ["<s>", "</s>", "<unk>"], None)

    def of(split):
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "split_special_tokens": split}
        return build_tokenizer(config_of(written(tmp_path, library, **kind)))

    whole, split = of(False), of(True)
    assert whole.tokenize("</s>") == whole.tokenize_batch(["</s>"])[0] == [1]
    assert 1 not in split.tokenize("a</s>") + split.tokenize_batch(["a</s>"])[0]
    assert split.detokenize(split.tokenize("a</s>")) == "a</s>" and split.hashed_changes != whole.hashed_changes


def test_a_space_before_a_text_is_as_the_config_says(tmp_path):
    """add_prefix_space; in 5.x tokenizer.json counts for the classes that take all from it."""

    def of(kind, version=None, said=None, file=False):
        library = library_of(kind, True, ["<s>", "</s>", "<unk>"], None)
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=file)
        config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        config |= {} if said is None else {"add_prefix_space": said}
        tokenizer = build_tokenizer(config_of(written(tmp_path, library, **config), version))
        return tokenizer.detokenize(tokenizer.tokenize("zz"))

    for version in (None, "4", "5"):
        assert of("GPT2Tokenizer", version, said=True) == " zz"
        assert of("GPT2TokenizerFast", version, file=True) == "zz"
        assert of("PreTrainedTokenizerFast", version, said=True, file=True) == " zz"
    both = [of("PreTrainedTokenizerFast", version, said=True) for version in ("4", "5")]
    assert both == [" zz", "zz"]
    assert [of("PreTrainedTokenizerFast", version, file=True) for version in ("4", "5")] == ["zz", " zz"]
    with pytest.raises(ValueError, match=r'the text "a" is id \d+ id \d+ in 4\.57 and id \d+ in 5\.x'):
        of("PreTrainedTokenizerFast", said=True)


def test_hashes_of_tokenizers_that_say_all_by_themselves_stay(tmp_path):
    """As they were before the files beside were read, so that checkpoints and caches go on; a token more is another tokenizer."""

    def sha256(config, kind="PreTrainedTokenizerFast", **more):
        given = config_of(folder_with(tmp_path / "f", config, kind=kind), **more)
        return tokenizer_sha256(given, build_tokenizer(given))

    old = "9bedae479b7eb98a028b806ac57a83033774181432a4989af7ea5c4097d17f03"
    ends = {"eos_token": "</s>"}
    llama = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": "<s>", "unk_token": "<unk>"}
    assert sha256(None) == sha256(ends) == sha256(ends | llama, "LlamaTokenizerFast") == old
    rows = "0d2c00e0ed9696aa3c4cd6df1ea9581b08b77071abd486ea0aaed11e1a13cffa"
    assert sha256(ends, model_vocab_size=300) == rows
    one, other = (sha256(ends | {"additional_special_tokens": [token]}) for token in ("<a>", "<b>"))
    assert len({old, one, other}) == 3
    no_begin = ends | llama | {"add_bos_token": False}
    assert len({old, *(sha256(no_begin, version=version) for version in "45")}) == 3


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer_config", '{"eos_token": 5}', r"eos_token .* is 5; it must be a string, or an object"),
        ("tokenizer_config", '{"added_tokens_decoder": [1]}', r"added_tokens_decoder is \[1\]; it must be an object"),
        ("tokenizer_config", '{"added_tokens_decoder": {"7": {}}}', r"added_tokens_decoder/7 is \{\}"),
        (
            "tokenizer_config",
            '{"additional_special_tokens": "x"}',
            r"additional_special_tokens .* 'x'; it must be a list",
        ),
        ("special_tokens_map", "{", "special_tokens_map.json is not valid JSON"),
        ("added_tokens", '{"<a>": "7"}', "added_tokens.json gives '<a>' the id '7'"),
    ],
)
def test_a_file_that_says_no_token_is_named(tmp_path, name, content, reason):
    folder = folder_with(tmp_path / "f")
    (folder / f"{name}.json").write_text(content)
    with pytest.raises(ValueError, match=reason):
        build_tokenizer(config_of(folder))


def test_the_flag_says_when_it_changes_nothing(tmp_path):
    line = "--tokenizer-type NullTokenizer --vocab-size 9 --tokenizer-transformers-version 5 --mock-data"
    _, _, notes = parse_args(line.split())
    assert any(tells(str(note), "--tokenizer-transformers-version NullTokenizer") for note in notes)


def test_a_folder_that_is_written_has_the_same_ids(tmp_path):
    """All files of tokens go along, in the spelling that both versions read."""
    folder, out = tmp_path / "in", tmp_path / "out"
    cases.write_folder(folder, cases.read_record("llama"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    folder_with(folder, config, {"additional_special_tokens": ["<tool>"]}, {"<more>": 900})
    assert checkpoint_convert.main(["--load", str(folder), "--save-hf", str(out)]) == 0
    one, other = (build_tokenizer(config_of(root)) for root in (folder, out))
    assert (one.vocab, one.eod) == (other.vocab, other.eod) and one.vocab_size == 268
