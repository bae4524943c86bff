"""--use-checkpoint-args: a command line without the model's flags trains the checkpoint's model."""

import shlex

import pytest
from said import tells
from whole_run import TINY, run

from megatron.core.base.dataclass_flags import ConfigError, flag_of
from megatron.core.dist_checkpointing import manifest_format as disk
from megatron.training.arguments.command_line import make_parser, parse_args
from megatron.training.arguments.load_args_from_checkpoint import _MODEL, _TOKENIZER, words_of_setting

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --swiglu --ffn-hidden-size 12 --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --rotary-base 5e5 --group-query-attention --num-query-groups 1 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0.25 --window-size 4,0 --bf16 "
    "--max-position-embeddings 16 --tokenizer-type NullTokenizer --vocab-size 31"
)
REST = shlex.split("--mock-data --micro-batch-size 1 --lr 0.1 --log-interval 1 --eval-iters 0 --device cpu")


@pytest.mark.full
def test_a_run_goes_on_without_the_flags_of_its_model(tmp_path, capsys):
    folder = f"--save {tmp_path} --load {tmp_path} --use-checkpoint-args"
    run(f"--train-iters 2 --exit-interval 1 {folder}", tiny=[*MODEL, *REST])
    assert "no checkpoint yet" in capsys.readouterr().out
    run(f"--train-iters 2 {folder} --seed 7", tiny=REST)
    out = capsys.readouterr().out
    assert tells(out, "num_layers swiglu bf16 vocab_size seq_length 500000.0") and "going on from iteration 1" in out
    with pytest.raises(SystemExit):
        run(f"--train-iters 2 {folder} --num-layers 3", tiny=REST)
    assert tells(capsys.readouterr().err, "num_layers 2 3")


def parsed(root, *words):
    return parse_args(["--load", str(root), "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", *words])


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint of these settings, which has no tensors."""

    def write(words, more=None):
        config = parse_args([*words, "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"]).config.as_json()
        for part, settings in (more or {}).items():
            config[part] = config[part] | settings if isinstance(settings, dict) else settings
        folder = tmp_path / "iter_0000001"
        folder.mkdir(exist_ok=True)
        (folder / disk.MANIFEST).write_text(disk.to_json(disk.Manifest(1, {"config": config}, {}, {})))
        (tmp_path / disk.LATEST).write_text("1")
        return tmp_path

    return write


def test_what_is_given_counts_and_is_said(saved):
    root = saved([*MODEL, "--tensor-model-parallel-size", "2"])
    config, _, notes = parsed(root, "--use-checkpoint-args", "--hidden-size", "16", "--allow-precision-change")
    assert (config.transformer.num_layers, config.transformer.hidden_size, config.transformer.bf16) == (2, 16, False)
    assert any(tells(note, "--hidden-size 16 8") for note in notes) and config.data.seq_length == 8
    assert config.parallel.tensor_model_parallel_size == 1
    config, _, notes = parsed(root, "--use-mp-args-from-checkpoint-args")
    assert config.parallel.tensor_model_parallel_size == 2 and config.transformer.num_layers == 12
    assert parsed(root, "--use-checkpoint-args", "--fp16").config.transformer.bf16 is False
    other = parsed(
        root,
        "--use-checkpoint-args",
        "--tokenizer-type",
        "GPT2BPETokenizer",
        *["--vocab-file", "v", "--merge-file", "m"],
    ).config
    assert other.tokenizer.vocab_size is None


@pytest.mark.parametrize(
    "more, told",
    [
        ({"transformer": {"num_layers": "many"}}, "--num-layers many"),
        ({"transformer": {"num_layers": -3}}, "--num-layers"),
        ({"transformer": {"hidden_size": [1, {}]}}, "--hidden-size"),
        ({"transformer": {"normalization": "--help"}}, "--normalization"),
        ({"tokenizer": {"tokenizer_type": "Nobodys"}}, "--tokenizer-type Nobodys"),
        ({"transformer": 7}, "--use-checkpoint-args"),
        ({"own_model": {"save": "/elsewhere"}}, ""),
    ],
)
def test_settings_that_no_run_has_saved_are_refused_or_do_nothing(saved, more, told):
    root = saved(MODEL, more)
    if told:
        with pytest.raises(ConfigError) as error:
            parsed(root, "--use-checkpoint-args")
        assert tells(error.value, told), error.value
    else:
        assert parsed(root, "--use-checkpoint-args").config.checkpoint.save is None


def test_every_setting_that_is_taken_can_be_said_by_flags():
    """The model's and the tokenizer's settings of one command line are those of the flags made of them."""
    parser = make_parser()
    for words in (
        MODEL,
        TINY,
        ["--no-rope-freq", "2", "--position-embedding-type", "rope", "--fp32-residual-connection", "--bf16"],
    ):
        config = parse_args([*words]).config.as_json()
        values = {
            name: config[part][name]
            for part, names in (("transformer", _MODEL), ("tokenizer", _TOKENIZER))
            for name in names
        }
        again = parse_args(
            [word for name, value in values.items() for word in words_of_setting(name, value, parser)]
        ).config.as_json()
        assert values == {name: again["transformer" if name in _MODEL else "tokenizer"][name] for name in values}


# ---------------------------------------------------------------- a checkpoint that is loaded without its model's flags

OF_ANOTHER_MODEL = "--hidden-size 24 --num-layers 2 --swiglu --disable-bias-linear --normalization RMSNorm"
ADVICE = "--use-checkpoint-args takes those of the model and the tokenizer from the checkpoint"


@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint", "--finetune --load"])
def test_another_model_is_refused_before_it_is_built_and_the_flag_that_helps_is_named(flag: str, tmp_path, capsys):
    run(f"{OF_ANOTHER_MODEL} --train-iters 1 --save {tmp_path}/run")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(f"--train-iters 2 {flag} {tmp_path}/run --save {tmp_path}/more")
    told = capsys.readouterr()
    lines = [line.strip() for line in (told.out + told.err).splitlines()]
    problems = [line for line in lines if line.startswith("- ")]
    assert ADVICE in problems[0] and sum(ADVICE in line for line in lines) == 1
    assert any("num_layers: the checkpoint has 2, this run has 1" in line for line in problems)
    assert not any("building the model" in line for line in lines)
    assert not (tmp_path / "more").exists(), "a refused run creates no folder"


def test_with_the_flag_only_what_contradicts_it_is_told(tmp_path, capsys):
    run(f"{OF_ANOTHER_MODEL} --train-iters 1 --save {tmp_path}")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(f"--use-checkpoint-args --train-iters 2 --load {tmp_path} --hidden-size 24 --num-layers 3")
    told = capsys.readouterr()
    assert "num_layers: the checkpoint has 2, this run has 3" in told.out + told.err
    assert ADVICE not in told.out + told.err


OF_A_LLAMA = f"{OF_ANOTHER_MODEL} --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --position-embedding-type rope"


@pytest.mark.full
def test_what_contradicts_a_folder_of_another_project_is_told_once_before_anything_is_built(tmp_path, capsys):
    """A folder has the model's settings itself, so that no flag is missing: one of its sizes is given otherwise."""
    run(f"{OF_A_LLAMA} --train-iters 1 --save-hf {tmp_path}/hf --save {tmp_path}/run")
    (folder,) = (tmp_path / "hf").glob("iter_*")
    bare = shlex.split(
        "--seq-length 8 --mock-data --micro-batch-size 1 --lr 0.1 --eval-iters 0 --device cpu --train-iters 2"
    )
    for flag, size in {
        "--load": "num_layers 4",
        "--pretrained-checkpoint": "hidden_size 16",
        "--use-checkpoint-args --load": "num_attention_heads 4",
        "--finetune --pretrained-checkpoint": "num_experts 4",
    }.items():
        capsys.readouterr()
        name, value = size.split()
        given = f"{flag_of(name)} {value} --tokenizer-type NullTokenizer --vocab-size 31"
        with pytest.raises(SystemExit):
            run(f"{flag} {folder} {given}", tiny=bare)
        told = capsys.readouterr()
        lines = [line.strip() for line in (told.out + told.err).splitlines()]
        (problem,) = (line for line in lines if line.startswith("- "))
        if name == "num_experts":  # what the folder has not can be made of it
            assert problem.endswith("--save NEW --num-experts 4 makes (Megatron's --moe-use-upcycling)")
        else:
            assert f"{name}: the checkpoint has" in problem and f"this run has {value}; leave its flag out" in problem
        assert not any("building the model" in line for line in lines)


def test_settings_that_are_required_are_in_the_checkpoint(tmp_path, capsys):
    """Without any flag of the model, sequence and tokenizer."""
    run(f"--train-iters 1 --save {tmp_path}")
    bare = shlex.split("--mock-data --micro-batch-size 1 --lr 0.1 --eval-iters 0 --device cpu --train-iters 2")
    with pytest.raises(SystemExit):
        run(f"--load {tmp_path}", tiny=bare)
    told = capsys.readouterr()
    assert f"the checkpoint in {tmp_path} has a model, a tokenizer and a --seq-length" in told.out + told.err
    run(f"--finetune --load {tmp_path} --use-checkpoint-args", tiny=bare)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(f"--load {tmp_path}/none --exit-on-missing-checkpoint", tiny=bare)
    told = capsys.readouterr()
    assert "--use-checkpoint-args" not in told.out + told.err
