"""Which settings are compared when a run goes on from a checkpoint: all, but for those that a table names with a reason."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from megatron.core.base.dataclass_flags import default_of, option, option_fields
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig
from megatron.core.tokenizers.tokenizer_sha256 import tokenizer_sha256
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe.moe_config import OF_EXPERTS
from megatron.training.arguments import compare_settings_with_checkpoint
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.compare_settings_with_checkpoint import (
    BEGINS_AT_ZEROS,
    BY_DATA,
    BY_TOKENIZER,
    COURSE_OF_MODEL,
    NOT_COMPARED,
    NOT_COMPARED_PARTS,
    PRECISION,
    ROPE,
    compare,
)
from megatron.training.arguments.config import COMPONENTS, TrainingConfig

DEFAULTS = parse_args([])[0].as_json()
KNOBS = {f.name: part for part, component in COMPONENTS.items() for f in option_fields(component)}
LEFT_OUT = [name for names in NOT_COMPARED.values() for name in names]
LEFT_OUT += [name for name, part in KNOBS.items() if part in NOT_COMPARED_PARTS]


def with_value(part: str, name: str, value) -> dict:
    return {**DEFAULTS, part: {**DEFAULTS[part], name: value}}


def kinds(changes) -> dict[str, list[str]]:
    return {kind: names for kind, found in vars(changes).items() if (names := [change.name for change in found])}


def other_than(value):
    """As many more as a width of heads stays whole with."""
    if isinstance(value, bool):
        return not value
    return value * 2 or 1 if isinstance(value, int | float) else 24 if value is None else "another"


def kind_of(name: str) -> str | None:
    """By the tables, where the rest is compared."""
    if name in LEFT_OUT or name in PRECISION:
        return None if name in LEFT_OUT else "precision"
    if name in ROPE:
        return "rope"
    return "model" if KNOBS[name] == "transformer" and name not in COURSE_OF_MODEL else "course"


# Settings of experts that are read only if another is given.
READ_WITH = {
    "moe_router_num_groups": {"moe_router_group_topk": 2},
    "moe_shared_expert_gate": {"moe_shared_expert_intermediate_size": 8},
}


def with_experts(name: str) -> dict:
    """Settings of a model that reads the setting `name` of experts."""
    return {**DEFAULTS, "transformer": {**DEFAULTS["transformer"], "num_experts": 8, **READ_WITH.get(name, {})}}


@pytest.mark.parametrize("name", READ_WITH)
def test_a_setting_of_experts_that_nothing_reads_is_not_compared(name):
    base = with_value("transformer", "num_experts", 8)
    given = {**base, "transformer": {**base["transformer"], name: other_than(DEFAULTS["transformer"][name])}}
    assert kinds(compare(base, given)) == kinds(compare(given, base)) == {}
    assert kinds(compare(with_experts(name), with_experts(""))) != {}


@pytest.mark.parametrize("name", BEGINS_AT_ZEROS)
def test_what_begins_at_zeros_may_be_turned_on_and_not_off(name):
    off = with_experts("")
    on = {**off, "transformer": {**off["transformer"], name: True}}
    assert kinds(compare(on, off)) == {"turned_on": [name]} and kinds(compare(off, on)) == {"model": [name]}
    older = {**off, "transformer": {key: value for key, value in off["transformer"].items() if key != name}}
    assert kinds(compare(on, older)) == {"turned_on": [name]} and kinds(compare(off, older)) == {}
    assert kinds(compare(on, DEFAULTS)) == {"model": ["num_experts"]}, "a dense model begins no bias"


SAME_EXPERTS = [
    ({"moe_router_topk_scaling_factor": 1.0}, {}),
    ({"moe_router_num_groups": 4, "moe_router_group_topk": 4}, {}),
    ({"moe_router_num_groups": 4, "moe_router_group_topk": 4}, {"moe_router_num_groups": 2}),
    (
        {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True},
        {"moe_router_score_function": "sigmoid"},
    ),
]


@pytest.mark.parametrize("one, other", SAME_EXPERTS)
def test_experts_that_are_the_same_in_other_words_are_no_change(one: dict, other: dict):
    base = with_experts("")
    one, other = ({**base, "transformer": {**base["transformer"], **settings}} for settings in (one, other))
    assert kinds(compare(one, other)) == kinds(compare(other, one)) == {}


@pytest.mark.parametrize("part", COMPONENTS)
def test_a_setting_is_compared_unless_a_table_says_why_not(part):
    found = {}
    for name, value in DEFAULTS[part].items():
        base = with_experts(name) if name in OF_EXPERTS[1:] else DEFAULTS
        other = "2" if name == "moe_layer_freq" else other_than(value)
        changes = kinds(compare(base, {**base, part: {**base[part], name: other}}))
        found[name] = next((kind for kind, names in changes.items() if name in names), None)
    assert found == {name: kind_of(name) for name in DEFAULTS[part]}


def test_of_a_model_without_experts_no_setting_of_them_is_compared():
    idle = {name: "2" if name == "moe_layer_freq" else other_than(DEFAULTS["transformer"][name]) for name in OF_EXPERTS}
    dense = {**DEFAULTS, "transformer": {**DEFAULTS["transformer"], **idle, "num_experts": 1}}
    assert kinds(compare(DEFAULTS, dense)) == kinds(compare(dense, DEFAULTS)) == {}
    mixture = {**DEFAULTS, "transformer": {**DEFAULTS["transformer"], **idle, "num_experts": 4}}
    for one, other in ((DEFAULTS, mixture), (mixture, DEFAULTS), (dense, mixture)):
        assert kinds(compare(one, other)) == {"model": ["num_experts"]}


def test_the_tables_name_each_setting_once_and_none_that_is_not_there():
    listed = [*LEFT_OUT, *PRECISION, *COURSE_OF_MODEL, *BY_TOKENIZER, *BY_DATA]
    assert len(set(listed)) == len(listed) and set(listed) <= set(KNOBS)
    assert set(NOT_COMPARED_PARTS) <= set(COMPONENTS)
    assert all(KNOBS[name] == "transformer" for name in (*PRECISION, *COURSE_OF_MODEL))


@dataclass(frozen=True)
class YoungerModel(ModelConfig):
    squared_relu: bool = option(False, "another activation")


@dataclass(frozen=True)
class YoungerTraining(TrainingConfig):
    curriculum: int = option(0, "another course")


@pytest.mark.parametrize(
    "part, component, name, kind",
    [("transformer", YoungerModel, "squared_relu", "model"), ("training", YoungerTraining, "curriculum", "course")],
)
def test_a_setting_that_nobody_has_listed_is_compared(part, component, name, kind, monkeypatch):
    """Whichever of the two is older: an activation that only one side knows never goes on as another."""
    monkeypatch.setitem(compare_settings_with_checkpoint.COMPONENTS, part, component)
    default = next(default_of(f) for f in option_fields(component) if f.name == name)
    off, on = (with_value(part, name, value) for value in (default, 1))
    assert kinds(compare(off, on)) == kinds(compare(on, off)) == {kind: [name]}
    assert kinds(compare(on, DEFAULTS)) == {kind: [name]}, "the checkpoint is older, and had the default"
    assert kinds(compare(off, DEFAULTS)) == {}
    monkeypatch.undo()
    assert kinds(compare(DEFAULTS, on)) == {kind: [name]}, "the code is older, and knows no such setting"
    assert compare(DEFAULTS, on).__dict__[kind][0].is_unknown


def test_what_is_unset_is_compared_by_what_it_stands_for():
    saved = with_value("transformer", "ffn_hidden_size", 4 * 768)
    saved["transformer"] |= {"kv_channels": 64}
    saved["data"] = {**saved["data"], "split": "969,30,1"}
    assert kinds(compare(DEFAULTS, saved)) == {}


@pytest.mark.parametrize("name, marked", [("window_attn_skip_freq", 0), ("no_rope_freq", 1)])
def test_a_pattern_is_compared_by_the_layers_that_it_leaves_out(name, marked):
    """Of 12 layers. A folder of another library has them as a list, a command line as a number."""

    def of(pattern):
        return with_value("transformer", name, pattern)

    def listed(*left_out):
        return of(str([marked if layer in left_out else 1 - marked for layer in range(12)]).replace(" ", ""))

    for number, list_ in {"2": listed(1, 3, 5, 7, 9, 11), "12": listed(11), "13": listed(), None: listed()}.items():
        assert kinds(compare(of(number), list_)) == kinds(compare(list_, of(number))) == {}
        assert kinds(compare(of(number), listed(0))) == kinds(compare(listed(0), of(number))) == {"model": [name]}


def test_a_scripts_own_flags_are_compared_and_those_of_its_model_refuse():
    own = {**DEFAULTS, "own": {"phrase": 8, "gone": 3}, "own_model": {"scale": 1.0}}
    now = {**DEFAULTS, "own": {"phrase": 4, "new": 5}, "own_model": {"scale": 0.5, "power": 2}}
    found = compare(now, own, {"new": 5, "power": 1})
    assert kinds(found) == {"model": ["scale", "power"], "course": ["phrase", "gone"]}
    assert found.course[1].is_unknown
    assert [change.is_new for change in found.model] == [False, True], "power is of this run alone"
    older = {part: values for part, values in DEFAULTS.items() if not part.startswith("own")}
    assert kinds(compare(now, older)) == {}, "an older checkpoint does not say"


def test_a_flag_that_comes_later_makes_no_other_tokenizer():
    @dataclass(frozen=True)
    class Later(TokenizerConfig):
        add_bos: bool = option(False, "put a token before each document")

    tokenizer = SimpleNamespace(vocab_size=32, eod=31, pad=None)
    settings = {"tokenizer_type": "NullTokenizer", "vocab_size": 31}
    now = tokenizer_sha256(TokenizerConfig(**settings), tokenizer)
    assert tokenizer_sha256(Later(**settings), tokenizer) == now
    assert tokenizer_sha256(Later(**settings, add_bos=True), tokenizer) != now


@pytest.mark.parametrize(
    "unread",
    [
        {"merge_file": "gone"},
        {"tokenizer_model": "m"},
        {"tiktoken_pattern": "v1"},
        {"null_tokenizer_eod_id": 3},
        {"vocab_size": 9},
    ],
)
def test_what_a_tokenizer_does_not_read_makes_no_other_one(tmp_path, unread):
    """Scripts give --merge-file to a WordPiece; taking it out, or its change, changes no id."""
    (tmp_path / "vocab.txt").write_text("[UNK]")
    (tmp_path / "other.txt").write_text("[PAD]")
    tokenizer = SimpleNamespace(vocab_size=32, eod=31, pad=None)

    def of(file: str, **more) -> str:
        config = TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(tmp_path / file), **more)
        return tokenizer_sha256(config, tokenizer)

    if "null_tokenizer_eod_id" in unread:
        unread = {**unread, "vocab_size": 9}  # which it lies in
    assert of("vocab.txt", **unread) == of("vocab.txt") != of("other.txt")
    assert of("vocab.txt", vocab_extra_ids=2) != of("vocab.txt")
