"""Settings from a YAML file are those of a command line: same flags, same refusals, and the command line wins."""

from pathlib import Path

import pytest
from said import tells, tells_each

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.arguments import yaml_arguments
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.config import Config


@pytest.fixture
def read(tmp_path):
    """read(text of a file, further flags) -> (config, view, notes)"""

    def parse(text: str, line: str = "", **options):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return parse_args(["--yaml-cfg", str(path), *line.split()], **options)

    return parse


FLAT = """
# a run
num-layers: 24
hidden_size: 1024
--num-attention-heads: 16
lr: 1e-4
min_lr: 1.0e-5
split: 949,50,1
bf16: true
fp16: false
no-load-optim: yes
add_bias_linear: off
local_rank: 0
data_path: books
save: ~
"""
GROUPED = """
model: {num-layers: 24, hidden_size: 1024, num_attention_heads: 16, add-bias-linear: false}
training:
  precision:
    bf16: true
  lr: 1e-4
  min_lr: 0.00001
data:
  data_path: [books]
  split: [949, 50, 1]
checkpoints:
  load_optim: false
  local-rank: 0
"""
LINE = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --disable-bias-linear --bf16 --lr 1e-4 --min-lr 1e-5 "
    "--data-path books --no-load-optim --local-rank 0 --split"
)


@pytest.mark.parametrize(("text", "split"), [(FLAT, "949,50,1"), (GROUPED, "949 50 1")], ids=["flat", "grouped"])
def test_a_file_says_what_a_command_line_says(read, text: str, split: str):
    config, _, notes = read(text)
    line = [*LINE.split(), split]
    assert (config, notes) == (parse_args(line)[0], parse_args(line)[2])


def test_an_empty_file_changes_nothing(read):
    assert read("# nothing\n")[0] == Config(**{name: type(part)() for name, part in vars(parse_args([])[0]).items()})


def test_the_command_line_wins(read):
    config, args, notes = read(
        "seed: 5\nnum_layers: 4\nrecompute_granularity: full\n", "--seed 6 --recompute-activations"
    )
    assert (config.training.seed, config.transformer.num_layers, args.seed) == (6, 4, 6)
    assert config.transformer.recompute_granularity == "selective"
    assert notes == []


def test_a_file_wins_over_the_scripts_defaults(read):
    assert read("seed: 5", args_defaults={"seed": 7, "num_layers": 3})[0].training.seed == 5
    assert read("seed: 5", args_defaults={"seed": 7, "num_layers": 3})[0].transformer.num_layers == 3


def test_flags_of_the_script_stand_in_a_file_too(read):
    def extra(parser):
        parser.add_argument("--my-rate", type=float, default=0.5)
        parser.add_argument("--my-names", nargs="+", default=[])

    assert read("my_rate: 0.25\nmy-names: [a, b]", extra_args_provider=extra)[1].my_rate == 0.25
    assert read("my_rate: 0.25\nmy-names: [a, b]", extra_args_provider=extra)[1].my_names == ["a", "b"]
    assert read("my_rate: 0.25", "--my-rate 1", extra_args_provider=extra)[1].my_rate == 1.0


def test_shorthands_and_flags_without_effect_stand_in_a_file_too(read):
    config, _, notes = read("use_flash_attn: true\nrecompute-activations: true\nno_position_embedding: true\n")
    assert config.transformer.recompute_granularity == "selective"
    assert config.transformer.position_embedding_type == "none"
    assert [note.split(": ")[1] for note in notes] == ["--use-flash-attn"]


def test_what_a_file_gives_and_a_run_would_not_is_warned_of_or_refused_as_on_the_line(read):
    *_, notes = read("transformer_impl: transformer_engine\nckpt_format: torch\nmoe_router_topk: 2\nlog_energy: false")
    given = ("--transformer-impl transformer_engine", "--ckpt-format torch")
    assert [note.split(": ")[:2] for note in notes] == [["WARNING", flag] for flag in given]
    with pytest.raises(ConfigError) as error:
        read("spec: [a, b]\nconfig_logger_dir: 9\nlog_energy: true\nconfig_logger_dirs: 9")
    assert [problem.split(": ")[1] for problem in error.value.problems[1:]] == [
        "--spec",
        "--config-logger-dir",
        "--log-energy",
    ]
    assert "did you mean" not in error.value.problems[0]


# Lines of the file that Megatron ships for its GPT.
OF_MEGATRON = """
language_model:
  num_layers: 24
  layernorm_zero_centered_gamma: false
  num_moe_experts: null
  init_method: null
  masked_softmax_fusion: True
  apply_rope_fusion: True
  bias_dropout_fusion: False
  memory_efficient_layer_norm: False
  window_size: null
model_parallel:
  virtual_pipeline_model_parallel_size: null
  batch_p2p_comm: True
  barrier_with_L1_time: True
encoder_num_layers: null
"""


def test_names_of_megatrons_config_classes_are_known(read):
    config, _, notes = read(OF_MEGATRON)
    assert config == parse_args(["--num-layers", "24", "--barrier-with-level-1-timing"])[0]
    assert [note.split(": ")[1] for note in notes] == [
        "--no-bias-dropout-fusion",
        "memory_efficient_layer_norm",
        "batch_p2p_comm",
        "--barrier-with-level-1-timing",  # the file has no timers to be exact about
    ]


def test_a_list_of_layers_may_be_a_list_of_the_file(read):
    text = "num_layers: 4\nnum_experts: 8\nmoe_layer_freq: [0, 1, 1, 0]\nwindow_size: 4,0\nwindow_attn_skip_freq: [1, 1, 1, 0]"
    line = (
        "--num-layers 4 --num-experts 8 --moe-layer-freq [0,1,1,0] --window-size 4,0 --window-attn-skip-freq [1,1,1,0]"
    )
    assert read(text)[0] == parse_args(line.split())[0]
    with pytest.raises(ConfigError, match=r"--moe-layer-freq: '\[0,2\]' must be N"):
        read("moe_layer_freq: [0, 2]")


# 30 such lines would be a thousand million groups, each of which says something twice.
BILLION_LAUGHS = "a0: &a0 {seed: 1}\n" + "".join(f"a{n}: &a{n} {{x0: *a{n - 1}, x1: *a{n - 1}}}\n" for n in range(1, 9))


TEXTS_AND_PROBLEMS = [
    ("activation_func: swiglu", "FILE:1 activation_func swiglu"),
    ("qk_l2_norm: true", "FILE --qk-l2-norm"),
    ("num_layer: 3", "FILE:1 num_layer num-layers"),
    ("model:\n  xyzzy: 3", "FILE:2 xyzzy --help"),
    ("seed: 1\nseed: 2", "FILE:2 1"),
    ("a: {seed: 1}\nb: {seed: 2}", "FILE:2 1"),
    ("bf16: perhaps", "FILE:1 bf16 perhaps"),
    ("seed: {a: 1}", "FILE:1 seed"),
    ("data_path: [[a]]", "FILE:1 data_path"),
    ("yaml-cfg: other.yaml", "FILE:1 yaml-cfg"),
    ("moe_latent_size: 8", "FILE --moe-latent-size"),
    ("hidden_size: much", "FILE --hidden-size much"),
    ("lr: .inf", "FILE --lr .inf"),
    ("seed: -5", "--seed -5 0 2^32"),
    ("- seed", "--yaml-cfg FILE"),
    ("seed: [1", "--yaml-cfg FILE YAML"),
    (
        "num_layer: 3\nhidden_siz: 2\nseed: -5",
        "FILE:1 num_layer num-layers|FILE:2 hidden_siz hidden-size|--seed -5 0 2^32",
    ),
    ("!!python/object/apply:os.system ['true']", "--yaml-cfg FILE"),
    ("a: &a {b: *a}", "FILE:1"),
    ("&a {b: {c: *a}}", "FILE:1"),
    ("data_path: &a [*a]", "FILE:1 data_path"),
    ("a: &a {seed: 1}\nb: *a", "FILE:2"),
    (BILLION_LAUGHS, "|".join(f"FILE:{line} x{copy}" for line in range(2, 10) for copy in (0, 1))),
    ("? [a]\n: 1\n? {b: 2}\n: {c: 3}", "FILE:1|FILE:3"),
    ("a: " + "[" * 1000 + "]" * 1000, "--yaml-cfg FILE"),
    ("{a: " * 5000 + "1" + "}" * 5000, "--yaml-cfg FILE"),
]


@pytest.mark.full
@pytest.mark.parametrize(("text", "problems"), TEXTS_AND_PROBLEMS)
def test_what_is_wrong_with_a_file_is_said(read, tmp_path, text: str, problems: str):
    with pytest.raises(ConfigError) as error:
        read(text)
    assert tells_each(error.value.problems, problems.replace("FILE", str(tmp_path / "run.yaml")))


def test_a_file_that_is_none_of_settings_is_refused_unread(monkeypatch):
    monkeypatch.setattr(yaml_arguments, "_LARGEST", 1 << 20)
    with pytest.raises(ConfigError, match=r"(?s)--yaml-cfg.*/dev/zero.*1.*MB"):
        parse_args(["--yaml-cfg", "/dev/zero"])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError) as error:
        parse_args(["--yaml-cfg", str(tmp_path / "no.yaml")])
    assert tells(error.value, f"--yaml-cfg {tmp_path}/no.yaml YAML")


def test_the_tutorial_s_file_is_nanogpt_s_setting():
    """4 layers of 128, 4 heads, 64 characters, 12 a step, 2,000 steps from 1e-3 to 1e-4, no dropout."""
    config, _, notes = parse_args(["--yaml-cfg", str(Path(__file__).parents[3] / "examples" / "shakespeare_char.yaml")])
    model, training, rate = config.transformer, config.training, config.learning_rate
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, config.data.seq_length) == (4, 128, 4, 64)
    assert (model.hidden_dropout, model.attention_dropout) == (0.0, 0.0)
    assert (training.train_iters, training.global_batch_size, training.eval_iters) == (2000, 12, 20)
    assert (rate.lr, rate.min_lr, rate.lr_decay_style, rate.lr_warmup_iters) == (1e-3, 1e-4, "cosine", 100)
    assert config.checkpoint.save == config.checkpoint.load and not notes


@pytest.mark.parametrize("character", ["\\0", "\\ud800"])
@pytest.mark.parametrize(
    ("key", "value"), [("load", '"a{}b"'), ("save", '"{}"'), ("data-path", '[a, "b{}"]'), ("tokenizer-model", '"x{}"')]
)
def test_a_character_that_no_file_name_can_have_is_refused_where_it_stands(key, value, character, read):
    with pytest.raises(ConfigError) as error:
        read(f"lr: 1e-4\n{key}: {value.format(character)}\n")
    (problem,) = [problem for problem in error.value.problems if "such a character" in problem]
    assert f":2: {key} is " in problem


@pytest.mark.parametrize("key", ["yaml-cfg", "--yaml_cfg", "help", "help-all", "help_all", "h"])
def test_what_only_a_command_line_can_say_is_said(key, read):
    with pytest.raises(ConfigError) as error:
        read(f"{key}: true\n")
    (problem,) = [problem for problem in error.value.problems if ":1: " in problem]
    assert problem.endswith(f"{key} is given on the command line, not in a file")


def test_the_name_of_an_unknown_setting_is_printable(read):
    with pytest.raises(ConfigError) as error:
        read('"num\\0layers": 3\n')
    assert any("unknown setting 'num\\x00layers'" in problem for problem in error.value.problems)


RECIPE = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  NCCL_ALGO: Ring
TEST_TYPE: ckpt-resume
LAUNCHER: torchrun
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --disable-bias-linear: true
  --num-experts: 8
  --moe-aux-loss-coeff: 1e-2
METRICS:
  - lm loss
  - num-zeros
"""


def test_of_a_recipe_of_megatrons_functional_tests_the_flags_are_read(read):
    config, _, (note,) = read(RECIPE)
    line = "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --disable-bias-linear --num-experts 8 --moe-aux-loss-coeff 1e-2"
    assert config == parse_args(line.split()).config
    assert tells(note, "no effect here ENV_VARS TEST_TYPE LAUNCHER METRICS MODEL_ARGS")


def test_a_key_of_such_a_recipe_may_be_wrong_as_any_other(read):
    with pytest.raises(ConfigError, match=r":8: unknown setting --num-layer; did you mean num-layers"):
        read(RECIPE.replace("--num-layers", "--num-layer"))


@pytest.mark.parametrize("text", ["MODEL_ARGS: 3", "MODEL_ARGS: [--num-layers, 3]"])
def test_a_group_of_flags_that_is_none_is_told(text: str, read):
    with pytest.raises(ConfigError, match="unknown setting MODEL_ARGS"):
        read(text)
