"""Which of two settings counts: command line, then its file, then the folder, then the script's defaults, then ours."""

import json
from pathlib import Path

import pretrain_t5
import pytest
from cases import T5_CASES, read_record, read_tensors, write_folder
from said import tells
from whole_run import run

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.arguments.command_line import parse_args

REST = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --micro-batch-size 1 --global-batch-size 2 --eval-iters 0 "
    "--seq-length 8 --make-vocab-size-divisible-by 8 --device cpu"
)
T5_REST = f"{REST} --decoder-seq-length 6 --lr 1e-30 --train-iters 1"


@pytest.fixture
def folder(tmp_path: Path):
    """write(case, changed keys of its config.json) -> the folder of a recorded model."""

    def write(case: str, **changed: object) -> Path:
        record = read_record(case)
        write_folder(tmp_path / case, record | {"config": record["config"] | changed})
        return tmp_path / case

    return write


# ---------------------------------------------------------------- the folder and the script's defaults


@pytest.mark.full
@pytest.mark.parametrize(
    "case, flag",
    [
        ("t5-gated", "--load"),
        ("t5-tied", "--pretrained-checkpoint"),
        ("t5-gated", "--hf-config"),
        pytest.param("t5-tied", "--load", marks=pytest.mark.full),
        pytest.param("t5-gated", "--pretrained-checkpoint", marks=pytest.mark.full),
        pytest.param("t5-tied", "--hf-config", marks=pytest.mark.full),
    ],
)
def test_a_t5_1_1_is_trained_by_the_script_whose_defaults_are_those_of_1_0(
    case: str, flag: str, folder, tmp_path: Path
):
    """With next to no learning rate a folder leaves as it came, so the model that it filled is the folder's."""
    root, out = folder(case), tmp_path / "out"
    run(f"{flag} {root} --save-hf {out}", script=pretrain_t5, tiny=T5_REST.split(), args_defaults=pretrain_t5.DEFAULTS)
    config = json.loads((out / "iter_0000001" / "config.json").read_text())
    for key in ("feed_forward_proj", "layer_norm_epsilon", "tie_word_embeddings", "scale_decoder_outputs"):
        assert config[key] == T5_CASES[case].get(key, config[key]), key
    assert config["feed_forward_proj"] == "gated-gelu"
    if flag != "--hf-config":
        assert read_tensors(out / "iter_0000001") == read_tensors(root)


A_FORK = {
    **{"qk_layernorm": True, "rotary_base": 500000, "add_qkv_bias": True, "hidden_dropout": 0.3, "softmax_scale": 0.5},
    **{"bf16": True, "seed": 7},
}


def test_a_forks_defaults_of_the_model_give_way_to_the_folder_and_others_stay(folder):
    config, _, notes = parse_args(["--load", str(folder("llama")), *REST.split()], args_defaults=A_FORK)
    model = config.transformer
    assert (model.qk_layernorm, model.rotary_base, model.add_qkv_bias) == (False, 10000.0, False)
    assert (model.softmax_scale, model.hidden_dropout, config.training.seed) == (None, 0.0, 7)
    assert (model.bf16, model.fp64) == (False, True)  # a folder of float64
    assert tells(notes[0], "qk_layernorm False rotary_base 10000.0 softmax_scale")


def test_what_a_folder_does_not_say_of_its_training_is_the_scripts(folder):
    root = folder("llama", dtype=None, torch_dtype=None)
    config = parse_args(["--load", str(root), *REST.split()], args_defaults=A_FORK | {"init_method_std": 0.5}).config
    assert config.transformer.bf16 and config.transformer.init_method_std == 0.5


@pytest.mark.full
def test_a_checkpoint_of_ours_wins_over_the_scripts_defaults_too(tmp_path: Path):
    """Of this code's own models: a switch that is off and a number that is left open, which no flag says."""
    tiny = f"{REST} --num-layers 1 --hidden-size 8 --num-attention-heads 1 --lr 0.1"
    run(f"--save {tmp_path} --train-iters 1", tiny=tiny.split())
    again = f"--load {tmp_path} --use-checkpoint-args --train-iters 2 --override-opt_param-scheduler"
    run(f"{again} --lr 0.1", tiny=REST.split(), args_defaults={"qk_layernorm": True, "softmax_scale": 0.5})
    defaults = {"activation": "relu", "add_bias_linear": False, "attention_dropout": 0.5}
    taken = parse_args([*again.split(), *REST.split()], args_defaults=defaults).config.transformer
    assert (taken.activation, taken.add_bias_linear, taken.attention_dropout) == ("gelu-tanh", True, 0.1)


# ---------------------------------------------------------------- the command line and its file


FILES = {
    "bf16: false": ("llama", "bf16", False),
    "fp64: false": ("llama-tied", "fp64", False),
    "swiglu: false": ("llama", "swiglu", False),
    "add-bias-linear: true": ("llama", "add_bias_linear", True),
    "untie_embeddings_and_output_weights: off": ("llama", "untie_embeddings_and_output_weights", False),
    "layernorm_zero_centered_gamma: false": ("gemma", "apply_layernorm_1p", False),
    "scale_decoder_outputs: true": ("t5-tied", "scale_decoder_outputs", True),
    "group-query-attention: false": ("llama", "group_query_attention", False),
}


@pytest.mark.full
@pytest.mark.parametrize("text", FILES)
def test_a_switch_of_a_file_counts_at_either_value(text: str, folder, tmp_path: Path):
    case, name, value = FILES[text]
    (tmp_path / "run.yaml").write_text(text)
    given = ["--yaml-cfg", str(tmp_path / "run.yaml"), *REST.split()]
    root = folder(case, **({"dtype": "bfloat16", "torch_dtype": "bfloat16"} if name == "bf16" else {}))
    for flag in ("--load", "--hf-config"):
        assert getattr(parse_args([*given, flag, str(root)]).config.transformer, name) is value
    assert getattr(parse_args(given, args_defaults={name: not value}).config.transformer, name) is value


def test_a_file_that_describes_another_model_is_refused_by_name(folder, tmp_path: Path, capsys):
    (tmp_path / "run.yaml").write_text("add-bias-linear: true\nswiglu: false\n")
    with pytest.raises(SystemExit):
        run(
            f"--yaml-cfg {tmp_path / 'run.yaml'} --load {folder('llama')} --lr 1e-30 --train-iters 1", tiny=REST.split()
        )
    said = capsys.readouterr().err
    assert tells(said, "add_bias_linear False True") and tells(said, "swiglu True False")


@pytest.mark.full
@pytest.mark.parametrize("case, groups, before", [("llama", 2, 2), ("gpt2", 6, 1)])
def test_a_files_number_of_groups_is_megatrons(case: str, groups: int, before: int, folder, tmp_path: Path, capsys):
    """Alone it says that heads share keys and values; as many groups as heads are no sharing, as the folder says it."""
    (tmp_path / "run.yaml").write_text(f"num-query-groups: {groups}\n")
    rest = f"--yaml-cfg {tmp_path / 'run.yaml'} --lr 1e-30 --train-iters 1"
    run(f"{rest} --load {folder(case)} --save-hf {tmp_path / 'out'}", tiny=REST.split())
    assert read_tensors(tmp_path / "out" / "iter_0000001") == read_tensors(tmp_path / case)
    (tmp_path / "run.yaml").write_text("num-query-groups: 3\n")
    alone = parse_args(["--yaml-cfg", str(tmp_path / "run.yaml"), *REST.split()]).config.transformer
    assert alone.query_groups == 3
    with pytest.raises(SystemExit):
        run(f"{rest} --load {tmp_path / case}", tiny=REST.split())
    assert tells(capsys.readouterr().err, f"num_query_groups {before} 3")
    with pytest.raises(ConfigError, match="--num-query-groups needs --group-query-attention"):
        parse_args(["--num-query-groups", "3", *REST.split()])


@pytest.mark.parametrize(
    "defaults, line, expected",
    [
        ({"swiglu": True}, "--activation relu", {"swiglu": False, "activation": "relu"}),
        ({"activation": "relu"}, "--swiglu", {"swiglu": True, "activation": "gelu-tanh"}),
        ({"gated": True, "activation": "gelu"}, "--swiglu", {"swiglu": True, "gated": False}),
        ({"bf16": True}, "--fp16", {"bf16": False, "fp16": True}),
        # At the value of our own default too.
        ({"swiglu": True}, "--activation gelu-tanh", {"swiglu": False, "activation": "gelu-tanh"}),
        ({"swiglu": True}, "--openai-gelu", {"swiglu": False, "activation": "gelu-tanh"}),
        (
            {"position_embedding_type": "learned_absolute"},
            "--no-position-embedding",
            {"position_embedding_type": "none"},
        ),
    ],
)
def test_a_setting_that_says_the_same_in_other_words_replaces_a_lower_one(
    defaults: dict, line: str, expected: dict, tmp_path: Path
):
    """Of the script's defaults, and of a file."""
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{name.replace('_', '-')}: {value}\n" for name, value in defaults.items()))
    words = [*line.split(), *REST.split()]
    for parsed in (parse_args(words, args_defaults=defaults), parse_args(["--yaml-cfg", str(file), *words])):
        assert {name: getattr(parsed.config.transformer, name) for name in expected} == expected


@pytest.mark.parametrize("words", ["--activation gelu-tanh", "gated: false"])
def test_a_folder_with_a_gate_is_refused_where_none_is_asked_for(words: str, folder, tmp_path: Path, capsys):
    (tmp_path / "run.yaml").write_text(words if ":" in words else "")
    given = f"--yaml-cfg {tmp_path / 'run.yaml'}" if ":" in words else words
    with pytest.raises(SystemExit):
        run(f"{given} --load {folder('llama')} --lr 1e-30 --train-iters 1", tiny=REST.split())
    assert tells(capsys.readouterr().err, "swiglu True False")


def test_positions_that_are_hidden_are_not_brought_back_by_a_folder(folder, tmp_path: Path, capsys):
    """A script's default has no part in it: positions that the folder rotates are none that are learned."""
    hides = f"--no-position-embedding --lr 1e-30 --train-iters 1 --load {tmp_path}"
    for defaults in ({}, {"position_embedding_type": "rope"}):
        with pytest.raises(SystemExit):
            run(f"{hides}/{folder('gpt2').name}", tiny=REST.split(), args_defaults=defaults)
        assert tells(capsys.readouterr().err, "position_embedding_type learned_absolute none")
    taken = parse_args([*f"{hides}/{folder('llama').name}".split(), *REST.split()]).config.transformer
    assert taken.position_embedding_type == "rope"
    (tmp_path / "run.yaml").write_text("no-position-embedding: true")
    words = ["--yaml-cfg", str(tmp_path / "run.yaml"), "--position-embedding-type", "learned_absolute", *REST.split()]
    assert parse_args(words).config.transformer.position_embedding_type == "learned_absolute"


@pytest.mark.parametrize(
    "above, below, expected",
    [
        (
            {"activation": "gelu-tanh"},
            {"swiglu": True},
            {"swiglu": False, "activation": "gelu-tanh"},
        ),  # our default, said
        ({"activation": "relu"}, {"swiglu": True}, {"swiglu": False, "activation": "relu"}),
        ({"gated": False}, {"swiglu": True}, {"swiglu": False, "gated": False}),
        ({"swiglu": True}, {"gated": True, "activation": "gelu"}, {"swiglu": True, "gated": False}),
        ({"fp16": True}, {"bf16": True}, {"fp16": True, "bf16": False}),
        ({"train_iters": 5}, {"train_samples": 8}, {"train_iters": 5, "train_samples": None}),
        ({"lr_warmup_iters": 3}, {"lr_warmup_fraction": 0.1}, {"lr_warmup_iters": 3, "lr_warmup_fraction": None}),
        ({"lr_warmup_iters": 0}, {"lr_warmup_fraction": 0.1}, {"lr_warmup_iters": 0, "lr_warmup_fraction": None}),
        ({"data_path": ["x"]}, {"train_data_path": ["y"]}, {"data_path": ["x"], "train_data_path": None}),
        ({"valid_data_path": ["x"]}, {"train_data_path": ["y"]}, {"valid_data_path": ["x"], "train_data_path": ["y"]}),
        ({"data_path": ["x"]}, {"mock_data": True}, {"data_path": ["x"], "mock_data": False}),
    ],
    ids=str,
)
def test_a_source_replaces_what_a_lower_one_says_in_other_words(
    above: dict, below: dict, expected: dict, tmp_path: Path
):
    """The command line what its file says, and the file what the script's defaults say."""
    rest = [word for word in REST.split() if word != "--mock-data"]
    for name, settings in (("above", above), ("below", below)):
        (tmp_path / name).write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in settings.items()))
    results = [parse_args(["--yaml-cfg", str(tmp_path / "above"), *rest], args_defaults=below)]
    ((name, value),) = above.items()
    if value is not False:  # which no flag says
        values = [] if value is True else value if isinstance(value, list) else [str(value)]
        words = [f"--{name.replace('_', '-')}", *values]
        results.append(parse_args(["--yaml-cfg", str(tmp_path / "below"), *words, *rest]))
    for parsed in results:
        assert {name: getattr(parsed.args, name) for name in expected} == expected


@pytest.mark.parametrize("flag", ["--load", "--hf-config"])
def test_an_activation_that_is_our_default_is_not_lost_against_a_folder(flag: str, folder, capsys):
    """The model is another one then, which is refused by name."""
    with pytest.raises(SystemExit):
        run(f"{flag} {folder('llama')} --activation gelu-tanh --lr 1e-30 --train-iters 1", tiny=REST.split())
    assert tells(capsys.readouterr().err, "swiglu True False")


def test_a_length_in_samples_replaces_the_scripts_in_steps():
    training = parse_args(["--train-samples", "8", *REST.split()], args_defaults={"train_iters": 5}).config.training
    assert (training.train_iters, training.train_samples) == (None, 8)


@pytest.mark.parametrize(
    "lower, line, expected",
    [
        ("lr_warmup_iters: 2", "--lr-warmup-fraction 0.5", {"lr_warmup_iters": 0, "lr_warmup_fraction": 0.5}),
        ("lr_warmup_fraction: 0.5", "--lr-warmup-iters 0", {"lr_warmup_iters": 0, "lr_warmup_fraction": None}),
        ("lr_decay_iters: 5", "--lr-decay-samples 8", {"lr_decay_iters": None, "lr_decay_samples": 8}),
        ("train_iters: 5", "--train-samples 8", {"train_iters": None, "train_samples": 8}),
    ],
)
def test_a_length_replaces_a_lower_one_in_another_unit(lower: str, line: str, expected: dict, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(lower)
    words, (name, value) = [*line.split(), *REST.split()], lower.split(": ")
    defaults = {name: json.loads(value)}
    for config in (
        parse_args(words, args_defaults=defaults).config,
        parse_args(["--yaml-cfg", str(tmp_path / "run.yaml"), *words]).config,
    ):
        got = vars(config.learning_rate) | vars(config.training)
        assert {name: got[name] for name in expected} == expected
