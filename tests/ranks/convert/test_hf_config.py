"""--hf-config: published descriptions make models of the published size; what contradicts or is unknown is refused by name."""

import json
import shlex
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import numpy as np
import pretrain_t5
import pytest
from cases import BERT_CASES, CASES, T5_CASES, read_record, write_folder
from local_ranks import run_ranks
from published import CONFIGS
from published_parameters import PARAMETERS
from said import tells
from script_run import trainer_of
from sentence_files import write_sentences
from whole_run import run

import pretrain_bert
import pretrain_gpt
from megatron.convert.families.read_and_write_hf_config import effective_settings, settings_of
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.models.common.model_rules import BERT_RULES, GPT_RULES, T5_RULES
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.hf_config import hf_config_problems
from tools.estimating.estimate import run as estimate

REST = shlex.split(
    "--mock-data --micro-batch-size 1 --lr 0.1 --log-interval 1 --eval-iters 0 --device cpu --train-iters 1"
)
WORDS = ["--tokenizer-type", "NullTokenizer"]


@pytest.fixture
def described(tmp_path: Path):
    """A config.json with these keys; its path."""

    def write(config: dict, **changed: object) -> str:
        path = tmp_path / "described.json"
        path.write_text(json.dumps(config | changed))
        return str(path)

    return write


SWEPT = ("Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "OLMoE-1B-7B-0924", "Mixtral-8x7B-v0.1")


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.sweep] * (name in SWEPT)) for name in CONFIGS])
def test_a_published_description_makes_the_published_model(name: str, described, capsys):
    """The flags that are taken compute what the file says, and the planned job has the published number of parameters."""
    config, path = CONFIGS[name], described(CONFIGS[name])
    taken = parse_args(["--hf-config", path, *WORDS, *REST])
    assert effective_settings(taken.config.transformer) == effective_settings(
        ModelConfig(**settings_of(config, name)[0])
    )
    assert sum(note.startswith(f"--hf-config: taken from {path}: ") for note in taken.notes) == 1
    kind = config["model_type"] if config["model_type"] in ("bert", "t5") else "gpt"
    sizes = ["--seq-length", "128", *(["--decoder-seq-length", "64"] if kind == "t5" else [])]
    assert estimate(["--model", kind, "--hf-config", path, "--micro-batch-size", "1", *sizes]) == 0
    assert f"{PARAMETERS[name]:,} parameters" in capsys.readouterr().out


def test_flags_that_describe_another_model_are_refused_together(described, capsys):
    path = described(CASES["llama"])
    flags = "--num-layers 2 --rotary-base 5000 --qk-layernorm --model-vocab-size 64 --num-query-groups 3 --seq-length 8"
    with pytest.raises(SystemExit) as ended:
        run(f"--hf-config {path} {flags}", tiny=[*REST, *WORDS])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count(f"--hf-config {path} describes another model") == 5
    for told in ("num_layers 3 2", "rotary_base 10000.0 5000.0", "qk_layernorm False True", "model_vocab_size 31 64"):
        assert tells(said, told), said
    with pytest.raises(ConfigError) as error:
        parse_args(["--hf-config", path, "--load", "x", "--use-checkpoint-args", *WORDS, *REST])
    assert tells(error.value, f"--hf-config {path} --use-checkpoint-args")


def test_a_learned_table_has_the_rows_of_the_file(described, capsys):
    with pytest.raises(SystemExit):
        run(f"--hf-config {described(CASES['gpt2'])} --seq-length 8 --max-position-embeddings 12", tiny=[*REST, *WORDS])
    assert tells(capsys.readouterr().err, "max_position_embeddings 16 12")


def test_another_scripts_model_is_refused(described, capsys):
    for config, script in ((CASES["llama"], pretrain_bert), (BERT_CASES["bert"], pretrain_gpt)):
        with pytest.raises(SystemExit):
            run(f"--hf-config {described(config)} --seq-length 8", tiny=[*REST, *WORDS], script=script)
        assert tells(capsys.readouterr().err, "BertModel GPTModel")


@cache
def sentences() -> str:
    """Flags of a file of sentences, whose vocabulary has 46 words."""
    draw = np.random.RandomState(0)
    documents = [(5 + draw.randint(30) + np.arange(24) % 9, [5, 6, 7, 6]) for _ in range(40)]
    return " ".join(write_sentences(Path(mkdtemp(prefix="hf-config-")), documents, words=30, pieces=9))


def losses_of(mesh: Mesh, script: SimpleNamespace, flags: str) -> list[dict]:
    """This rank's losses of a whole run."""
    steps = []
    with trainer_of(script, mesh, flags, predicts=False) as trainer:
        assert hf_config_problems(trainer.runtime.config) == []
        trainer.log.add = lambda losses, is_nan=False, *, skipped=False: steps.append(dict(losses))
        trainer._train()
    return steps


SCRIPTS = {
    "llama": (SimpleNamespace(**vars(pretrain_gpt), rules=GPT_RULES), "--mock-data --tokenizer-type NullTokenizer"),
    "bert": (SimpleNamespace(**vars(pretrain_bert), rules=BERT_RULES), ""),
    "t5": (
        SimpleNamespace(
            **vars(pretrain_t5), rules=T5_RULES, args_defaults=pretrain_t5.DEFAULTS | {"decoder_num_layers": 0}
        ),
        "--decoder-seq-length 16 --vocab-extra-ids 5 --mask-prob 0.3",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("case", SCRIPTS)
def test_a_tiny_description_trains_at_tp_2_and_pp_2_as_in_one_process(case: str, described):
    script, flags = SCRIPTS[case]
    depth = "num_layers" if case == "t5" else "num_hidden_layers"
    config = (CASES | BERT_CASES | T5_CASES)[case]
    path = described(config, **{depth: 2, "vocab_size": 64, "dtype": "float64"})
    flags += (
        f" --hf-config {path} --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-2 "
    )
    flags += "--device cpu --num-workers 0 --eval-iters 0 --short-seq-prob 0.3 " * (case != "llama")
    flags += "--device cpu --eval-iters 0 " if case == "llama" else sentences()
    layout = " --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    (one,) = run_ranks({}, partial(losses_of, script=script, flags=flags))
    *_, many = run_ranks({"tp": 2, "pp": 2}, partial(losses_of, script=script, flags=flags + layout))
    assert len(one) == 3 and one[0]["lm loss"] == pytest.approx(np.log(64), rel=0.15)
    for got, expected in zip(many, one, strict=True):
        assert got == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    "text, told",
    [
        (None, "is not a file"),
        ("{", "cannot be read"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "the same key twice"),
        (json.dumps(CASES["llama"] | {"use_magic": True}), "use_magic (True)"),
        (json.dumps(CASES["llama"] | {"model_type": "mystery"}), "model_type is 'mystery'"),
        (json.dumps(CASES["llama"] | {"num_hidden_layers": -3}), "num_hidden_layers is -3"),
    ],
)
def test_a_file_that_is_not_understood_is_refused_by_name(text: str | None, told: str, tmp_path: Path):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse_args(["--hf-config", str(path), *WORDS, *REST])
    assert str(path) in str(error.value) and told in str(error.value)


def test_a_yaml_file_may_name_it_and_what_changes_no_model_may_differ(described, tmp_path: Path):
    path = described(CASES["llama"], dtype="bfloat16")
    (tmp_path / "run.yaml").write_text(f"hf-config: {path}\nmodel:\n  attention-dropout: 0.25\n  num-layers: 3\n")
    config, _, notes = parse_args(["--yaml-cfg", str(tmp_path / "run.yaml"), *WORDS, *REST])
    assert (config.transformer.hidden_size, config.transformer.attention_dropout) == (24, 0.25)
    assert config.transformer.bf16 and any(tells(note, "--attention-dropout 0.25 0.0") for note in notes)
    assert not parse_args(["--hf-config", path, "--fp16", *WORDS, *REST]).config.transformer.bf16
    assert not parse_args(["--hf-config", path, "--allow-precision-change", *WORDS, *REST]).config.transformer.bf16


def test_a_folder_gives_its_tokenizer_and_no_weights(tmp_path: Path, capsys):
    """The run starts from weights of its own; a folder of weights with --load fills the flags by itself."""
    write_folder(tmp_path / "llama", read_record("llama"), "F64")
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    config = parse_args(["--hf-config", str(tmp_path / "llama"), *REST]).config
    assert config.tokenizer.tokenizer_type == "HuggingFaceTokenizer"
    assert config.tokenizer.tokenizer_model == str(tmp_path / "llama" / "tokenizer.json")
    by_file = parse_args(["--hf-config", str(tmp_path / "llama" / "config.json"), *WORDS, *REST]).config
    assert (by_file.tokenizer.tokenizer_model, by_file.tokenizer.vocab_size) == (None, 30)
    with pytest.raises(ConfigError) as error:
        parse_args(["--hf-config", "x", "--load", str(tmp_path / "llama"), *REST])
    assert tells(error.value, f"--hf-config --load {tmp_path / 'llama'}")
    run(f"--hf-config {tmp_path / 'llama' / 'config.json'} --seq-length 8", tiny=[*REST, *WORDS])
    assert "loaded" not in capsys.readouterr().out


@pytest.mark.parametrize("case", ["t5", "bert"])
@pytest.mark.parametrize("flag", ["--hf-config", "--load", "--pretrained-checkpoint"])
def test_a_model_of_another_script_is_named_and_nothing_else(case: str, flag: str, tmp_path: Path, capsys):
    """The flags that came from the file are not complained of one by one."""
    configs = {
        "t5": {"model_type": "t5", "vocab_size": 32, "d_model": 16, "d_kv": 4, "num_heads": 4, "num_layers": 1},
        "bert": {"model_type": "bert", "vocab_size": 32, "hidden_size": 16, "num_attention_heads": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(configs[case]))
    with pytest.raises(SystemExit):
        run(f"{flag} {tmp_path} --seq-length 8 --vocab-size 31", tiny=[*REST, *WORDS])
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  - ")]
    assert len(told) == 1 and f"{flag} {tmp_path} describes a" in told[0] and f"run pretrain_{case}.py" in told[0]
