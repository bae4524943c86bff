"""What a folder lacks is refused by name, in training as in conversion; a head that its architecture lacks gets first values."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import dist_files
import megatron_files
import pytest
import torch
from cases import read_record, read_tensors, write_folder
from local_ranks import run_ranks
from option_cases import BUNDLES
from said import tells
from script_run import trainer_of
from tiny_run import TINY_LLAMA
from whole_run import run

import pretrain_bert
import pretrain_gpt
from megatron.convert import open_any
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.dist_checkpointing.save_load_state_dict import load_whole_tensors
from megatron.core.inference import load_gpt, load_model, read_saved_settings
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.transformer.expected_parameter_names import PARAMETER_NAMES
from megatron.core.transformer.expected_parameter_shapes import parameter_shape
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.training import trainer
from tools import checkpoint_convert

SCRIPT = SimpleNamespace(**vars(pretrain_gpt))
REST = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --micro-batch-size 1 --global-batch-size 2 --lr 0.1 --eval-iters 0 "
    "--seq-length 8 --train-iters 1 --make-vocab-size-divisible-by 8 --device cpu"
)

# ---------------------------------------------------------------- the names themselves

TINY = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "make_vocab_size_divisible_by": 8}
BERT = TINY | {"position_embedding_type": "learned_absolute"}
MODELS = {
    "gpt2": ("GPTModel", TINY | {"position_embedding_type": "learned_absolute"}),
    "llama": (
        "GPTModel",
        {name: getattr(TINY_LLAMA, name) for name in ("swiglu", "normalization", "add_bias_linear", "ffn_hidden_size")}
        | TINY,
    ),
    **{name: ("GPTModel", TINY | bundle) for name, bundle in BUNDLES.items()},
    "bert": ("BertModel", BERT),
    "bert, post": ("BertModel", BERT | {"norm_placement": "post", "untie_embeddings_and_output_weights": True}),
    "t5": (
        "T5Model",
        TINY | {"position_embedding_type": "relative", "decoder_num_layers": 3, "normalization": "RMSNorm"},
    ),
    "t5 of Megatron": ("T5Model", BERT | {"decoder_num_layers": 1, "untie_embeddings_and_output_weights": True}),
}


@pytest.mark.parametrize("case", MODELS)
def test_names_and_shapes_are_those_of_the_model_that_is_built(case: str):
    name, settings = MODELS[case]
    config, more = build(ModelConfig, settings), {}
    if name == "T5Model":
        more = {"decoder_seq_length": 8}
    kind = {"GPTModel": GPTModel, "BertModel": BertModel, "T5Model": T5Model}[name]
    context = LayerContext.from_mesh(single_rank_mesh(), config.params_dtype, fills=False)
    model = kind(config, vocab_size=32, positions=8, layers=range(config.all_layers), context=context, **more)
    assert sorted(PARAMETER_NAMES[name](config)) == sorted(n for n, _ in model.named_parameters())
    shapes = {n: tuple(x.shape) for n, x in model.named_parameters()}
    assert {n: parameter_shape(config, n, 32, 8) for n in shapes} == shapes


# ---------------------------------------------------------------- folders


def without(root: Path, case: str, *absent: str, **config) -> Path:
    """The folder of a case without some tensors: what the names begin with."""
    record = read_record(case)
    shapes = (
        {name: shape for name, shape in record["shapes"].items() if not name.startswith(absent)}
        if absent
        else record["shapes"]
    )
    write_folder(root, record | {"shapes": shapes, "config": record["config"] | config})
    return root


LACKING = [
    ("llama", "model.layers.1.input_layernorm.weight"),
    ("llama", "model.layers.2."),
    ("llama", "lm_head.weight"),
    ("llama", "model.norm.weight"),
    ("gpt2", "transformer.wpe.weight"),
    ("gpt2", "transformer.h.0.mlp.c_fc.bias"),
    ("phi", "lm_head.bias"),
    ("t5", "shared.weight"),
    ("t5", "decoder.block.1.layer.1.EncDecAttention."),
    ("t5-gated", "lm_head.weight"),
    ("bert", "bert.pooler."),
    ("bert", "cls.predictions.transform."),
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "absent"), LACKING)
def test_a_conversion_of_an_incomplete_folder_names_what_is_absent(case: str, absent: str, tmp_path: Path, capsys):
    """And writes nothing, whatever is to be written; with the flag what is there."""
    folder, record = without(tmp_path / "in", case, absent), read_record(case)
    lost = [name for name in record["shapes"] if name.startswith(absent)]
    for flag in ("--save-hf", "--save", "--save-dcp"):
        assert checkpoint_convert.main(["--load", str(folder), flag, str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert tells(said, f"{lost[0]} --allow-missing-tensors") and not (tmp_path / "out").exists()
    words = ["--load", str(folder), "--save-hf", str(tmp_path / "out"), "--allow-missing-tensors"]
    assert checkpoint_convert.main(words) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in lost)
    assert read_tensors(tmp_path / "out") == read_tensors(folder)


@pytest.mark.full
def test_megatrons_files_without_a_final_norm_or_a_head_are_not_converted(tmp_path: Path, capsys, monkeypatch):
    original = megatron_files.llama_chunk
    for number, lost in enumerate(("decoder.final_layernorm.weight", "output_layer.weight")):

        def chunk(*args, lost=lost):
            return {name: x for name, x in original(*args).items() if name != lost}

        monkeypatch.setattr(megatron_files, "llama_chunk", chunk)
        megatron_files.write(tmp_path / f"files{number}", "llama", tp=2, pp=3)
        for flag in ("--save-hf", "--save"):
            words = ["--load", str(tmp_path / f"files{number}"), flag, str(tmp_path / "out")]
            assert checkpoint_convert.main(words) == 1
            assert tells(capsys.readouterr().err, f"{lost} --allow-missing-tensors")
        with pytest.raises(SystemExit):
            run(f"--load {tmp_path / f'files{number}'}", tiny=REST.split())
        assert tells(capsys.readouterr().err, f"{lost} --allow-missing-tensors")


# ---------------------------------------------------------------- heads

BARE = [
    ("llama", "LlamaModel", ("lm_head.",), "output_layer"),
    ("gpt2-untied", "GPT2ForSequenceClassification", ("lm_head.",), "output_layer"),
    ("t5-gated", "T5Model", ("lm_head.",), "output_layer"),
    ("bert", "BertModel", ("cls.",), "lm_head"),
    ("bert", "BertForMaskedLM", ("bert.pooler.", "cls.seq_relationship."), "pooler"),
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "architecture", "absent", "head"), BARE)
def test_a_head_that_the_architecture_lacks_is_named_and_stays_away(
    case: str, architecture: str, absent: tuple[str, ...], head: str, tmp_path: Path, capsys
):
    """A folder that is written is one of that architecture, by way of a checkpoint of ours too."""
    folder = without(tmp_path / "in", case, *absent, architectures=[architecture])
    assert checkpoint_convert.main(["--load", str(folder), "--save", str(tmp_path / "ours")]) == 0
    for number, source in enumerate((folder, tmp_path / "ours")):
        capsys.readouterr()
        out = tmp_path / f"out{number}"
        assert checkpoint_convert.main(["--load", str(source), "--save-hf", str(out)]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "architecture" in line]
        assert head in line and "first values" in line
        assert read_tensors(out) == read_tensors(folder)
        written = json.loads((out / "config.json").read_text())["architectures"][0]
        base = architecture.replace("ForSequenceClassification", "Model")
        assert written == base


OF_ANOTHER_TASK = [
    ("llama", "LlamaForSequenceClassification", ("lm_head.",), {"score.weight": (3, 24)}),
    ("gpt2-untied", "GPT2DoubleHeadsModel", (), {"multiple_choice_head.summary.weight": (1, 24)}),
    (
        "bert",
        "BertForTokenClassification",
        ("cls.", "bert.pooler."),
        {"classifier.weight": (3, 24), "classifier.bias": (3,)},
    ),
    (
        "bert",
        "BertForQuestionAnswering",
        ("cls.", "bert.pooler."),
        {"qa_outputs.weight": (2, 24), "qa_outputs.bias": (2,)},
    ),
    ("mixtral", "MixtralForSequenceClassification", ("lm_head.",), {"score.weight": (3, 24)}),
]


@pytest.mark.parametrize(("case", "architecture", "absent", "own"), OF_ANOTHER_TASK)
def test_the_head_of_another_task_is_left_out_and_named(
    case: str, architecture: str, absent: tuple[str, ...], own: dict, tmp_path: Path, capsys
):
    folder = without(tmp_path / "in", case, *absent, architectures=[architecture])
    expected = read_tensors(folder)
    record = read_record(case)
    config = record["config"] | {"architectures": [architecture]}
    shapes = {name: shape for name, shape in record["shapes"].items() if not absent or not name.startswith(absent)}
    write_folder(tmp_path / "headed", record | {"config": config, "shapes": shapes | own})
    assert checkpoint_convert.main(["--load", str(tmp_path / "headed"), "--save-hf", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in own) and "another task" in said
    assert read_tensors(tmp_path / "out") == expected
    # without the architecture that has it, nothing says what such a tensor is
    write_folder(
        tmp_path / "odd", record | {"config": config | {"architectures": ["OwnModel"]}, "shapes": shapes | own}
    )
    assert checkpoint_convert.main(["--load", str(tmp_path / "odd"), "--save-hf", str(tmp_path / "odd_out")]) == 1
    assert "for which the model has no place" in capsys.readouterr().err


def test_an_unknown_architecture_and_half_a_head_are_no_excuse(tmp_path: Path, capsys):
    folders = [
        without(tmp_path / "unknown", "llama", "lm_head.", architectures=["OwnModel"]),
        without(tmp_path / "half", "bert", "cls.predictions.transform.", architectures=["BertModel"]),
        without(tmp_path / "layer", "llama", "lm_head.", "model.layers.0.mlp.", architectures=["LlamaModel"]),
    ]
    for folder in folders:
        assert checkpoint_convert.main(["--load", str(folder), "--save-hf", str(tmp_path / "out")]) == 1
        assert "lacks" in capsys.readouterr().err


# ---------------------------------------------------------------- training


def of_rank(mesh, flags: str) -> None:
    with trainer_of(SCRIPT, mesh, f"{REST} {flags}", predicts=False) as trainer:
        trainer.run()


LACKING_OF_A_RUN = [
    ("llama", "model.layers.1.input_layernorm.weight", True),
    ("qwen3_moe", "model.layers.1.mlp.gate.weight", True),
    ("llama", "model.layers.1.mlp.gate_proj.weight", False),  # half of a parameter
    ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight", False),  # a part of all experts' parameter
]


@pytest.mark.parametrize(("case", "absent", "is_whole"), LACKING_OF_A_RUN)
def test_a_run_is_refused_by_names_before_its_model_takes_memory(
    case: str, absent: str, is_whole: bool, tmp_path: Path, capsys, monkeypatch
):
    """--allow-missing-tensors is about whole parameters, which the refusal says."""

    def build(*_, **__):
        raise AssertionError("the model is built")

    folder = without(tmp_path / "in", case, absent)
    monkeypatch.setattr(trainer, "build_chunks", build)
    for flag in ("", "--allow-missing-tensors"):
        if is_whole and flag:
            with pytest.raises(AssertionError, match="the model is built"):
                run(f"--load {folder} {flag}", tiny=REST.split())
            continue
        with pytest.raises(SystemExit) as stop:
            run(f"--load {folder} {flag}", tiny=REST.split())
        said = capsys.readouterr().err
        assert stop.value.code == 2 and tells(said, f"{absent} fetch again --allow-missing-tensors"), said
        assert ("parts of one" in said) is not is_whole


@pytest.mark.parametrize("case", ["llama", "qwen3_moe"])
def test_a_tool_refuses_by_names_before_its_model_takes_memory(case: str, tmp_path: Path, monkeypatch):
    folder = without(tmp_path / "in", case, "model.layers.1.input_layernorm.weight")
    built = []
    build_stage = load_model._build_stage

    def build(kind, config, mesh, device, *more, **sizes):
        built.append(str(device))
        return build_stage(kind, config, mesh, device, *more, **sizes)

    monkeypatch.setattr(load_model, "_build_stage", build)
    checkpoint = open_any(folder)
    saved = read_saved_settings(checkpoint.state, str(folder))
    with pytest.raises(ConfigError, match=r"layers\.1\.input_layernorm\.weight"):
        load_gpt(checkpoint, saved.transformer, vocab_size=saved.vocab_size, positions=saved.positions)
    assert built == ["meta"]


ABSENT = ("lm_head.", "model.layers.1.input_layernorm.")


@pytest.mark.full
def test_a_run_draws_what_it_may_and_any_layout_draws_the_same(tmp_path: Path, capsys):
    """A head by the architecture, and a norm by the flag: TP 2 x PP 3 with ZeRO save what one process saves."""
    folder = without(tmp_path / "in", "llama", *ABSENT, architectures=["LlamaModel"])
    flags = f"--load {folder} --lr 1e-30 --weight-decay 0"
    with pytest.raises(SystemExit):
        run(flags, tiny=REST.split())
    said = capsys.readouterr().err
    assert tells(said, "model.layers.1.input_layernorm.weight --allow-missing-tensors") and "lm_head" not in said
    flags += " --allow-missing-tensors"
    run(f"{flags} --save {tmp_path / 'one'}", tiny=REST.split())
    said = capsys.readouterr().out
    assert len([line for line in said.splitlines() if "no output_layer" in line and "first values" in line]) == 1
    assert any("WARNING" in line and "model.layers.1.input_layernorm.weight" in line for line in said.splitlines())
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --zero-stage 1"
    run_ranks({"tp": 2, "pp": 3}, partial(of_rank, flags=f"{flags} {sizes} --save {tmp_path / 'six'}"))
    one, six = load_whole_tensors(tmp_path / "one"), load_whole_tensors(tmp_path / "six")
    assert {*one} == {*six} and all(torch.equal(x, six[name]) for name, x in one.items() if name.startswith("model/"))
    head = one["model/language_model.output_layer.weight"]
    assert 0.01 < head.double().std() < 0.04  # --init-method-std, and not what the folder had
    assert one["model/language_model.decoder.layers.1.input_layernorm.weight"].eq(1).all()
    table = read_tensors(folder)["model.embed_tokens.weight"][2]
    assert one["model/language_model.embedding.word_embeddings.weight"].double().numpy().tobytes() == table
    run(
        f"--load {tmp_path / 'one'} --save {tmp_path / 'one'} --use-checkpoint-args", tiny=REST.split()
    )  # it is complete


@pytest.mark.full
def test_a_checkpoint_of_ours_that_lacks_a_tensor_goes_on_with_weights_alone(tmp_path: Path, capsys, monkeypatch):
    """Without the flag it is refused before its model is built."""
    folder = without(tmp_path / "in", "llama", "model.norm.")
    words = ["--load", str(folder), "--save", str(tmp_path / "ours"), "--allow-missing-tensors"]
    assert checkpoint_convert.main(words) == 0
    start = f"--use-checkpoint-args --pretrained-checkpoint {tmp_path / 'ours'}"
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(trainer, "build_chunks", lambda *_, **__: pytest.fail("the model is built"))
        run(start, tiny=REST.split())
    assert tells(capsys.readouterr().err, "model.norm.weight --allow-missing-tensors")
    run(f"{start} --allow-missing-tensors", tiny=REST.split())
    assert "model.norm.weight" in capsys.readouterr().out


def test_torch_dist_without_a_norm_is_not_converted(tmp_path: Path, capsys, monkeypatch):
    original, lost = dist_files.core_layer, "mlp.linear_fc1.layer_norm_weight"

    def layer(x, case, i):
        return {name: tensor for name, tensor in original(x, case, i).items() if name != lost}

    monkeypatch.setattr(dist_files, "core_layer", layer)
    dist_files.write_dist(tmp_path / "in", "llama", tp=2, stacked=False)
    assert checkpoint_convert.main(["--load", str(tmp_path / "in"), "--save", str(tmp_path / "out")]) == 1
    assert tells(
        capsys.readouterr().err, "language_model.decoder.layers.1.pre_mlp_layernorm.weight --allow-missing-tensors"
    )


def with_heads_of_bert(*absent: str):
    """Adds the heads of Megatron's BERT to a rank's values, but for `absent`."""
    heads = {"lm_head.dense.weight": (24, 24), "lm_head.dense.bias": (24,), "lm_head.bias": (32,)}
    heads |= {"lm_head.layernorm.weight": (24,), "lm_head.layernorm.bias": (24,)}
    heads |= {"binary_head.weight": (2, 24), "binary_head.bias": (2,)}
    inner = {"pooler.dense.weight": (24, 24), "pooler.dense.bias": (24,)}
    inner["embedding.tokentype_embeddings.weight"] = (2, 24)

    def change(rank: int, stage: int, values: dict) -> None:
        for place, shapes in ((values["model"], heads), (values["model"]["language_model"], inner)):
            for name, shape in shapes.items():
                if not name.startswith(absent):
                    *path, last = name.split(".")
                    at = place
                    for part in path:
                        at = at.setdefault(part, {})
                    at[last] = torch.ones(shape)

    return change


@pytest.mark.parametrize(
    ("absent", "flags", "refused"),
    [
        (("nothing",), {}, ""),
        (("pooler.", "binary_head."), {"bert_binary_head": False}, ""),
        (("pooler.", "binary_head."), {}, "pooler.dense.weight"),
        (("lm_head.",), {}, "lm_head.dense.weight"),
    ],
)
def test_the_heads_of_megatrons_bert(absent: tuple[str, ...], flags: dict, refused: str, tmp_path: Path, capsys):
    """Their args say whether the run had a head for the order of sentences; without its words' head it is no GPT."""
    megatron_files.write(tmp_path / "in", "gpt2", change=with_heads_of_bert(*absent), **flags)
    code = checkpoint_convert.main(["--load", str(tmp_path / "in"), "--save", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert code == (1 if refused else 0), said.err
    assert (
        tells(said.err, f"{refused} --allow-missing-tensors") if refused else ("binary_head" in said.out) == bool(flags)
    )


def test_megatrons_sinks_are_parameters_of_ours(tmp_path: Path, capsys):
    """Learnable sinks have their name in a model of ours; without them a layer is incomplete."""
    for number, layers in enumerate((range(3), range(2))):

        def change(rank: int, stage: int, values: dict, layers=layers) -> None:
            sinks = {f"decoder.layers.{i}.self_attention.core_attention.softmax_offset": torch.ones(3) for i in layers}
            values["model"] |= sinks

        megatron_files.write(tmp_path / f"in{number}", "llama", tp=2, change=change, softmax_type="learnable")
    run(
        f"--load {tmp_path / 'in0'} --save {tmp_path / 'run'} --fp64",
        tiny=REST.replace("--vocab-size 30", "--vocab-size 31").split(),
    )
    sinks = "language_model.decoder.layers.{}.self_attention.core_attention.softmax_offset"
    assert load_whole_tensors(tmp_path / "run")[f"model/{sinks.format(2)}"].shape == (6,)
    assert checkpoint_convert.main(["--load", str(tmp_path / "in1"), "--save", str(tmp_path / "out")]) == 1
    assert tells(capsys.readouterr().err, f"{sinks.format(2)} --allow-missing-tensors")


def test_a_published_bert_without_its_token_types_is_told_which_flag_to_leave_out(tmp_path: Path, capsys):
    """A BertForMaskedLM loads: the heads that it lacks get first values. --bert-no-binary-head leaves out token types."""
    absent = ("bert.pooler.", "cls.seq_relationship.")
    folder = without(tmp_path / "in", "bert", *absent, architectures=["BertForMaskedLM"])
    flags = REST.replace("--seq-length 8", "--seq-length 16")
    run(f"--load {folder}", tiny=flags.split(), script=pretrain_bert)
    assert tells(capsys.readouterr().out, "pooler binary_head first values")
    with pytest.raises(SystemExit):
        run(f"--load {folder} --bert-no-binary-head", tiny=flags.split(), script=pretrain_bert)
    assert tells(capsys.readouterr().err, "tokentype_embeddings --bert-no-binary-head")
