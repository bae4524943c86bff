"""A folder goes on with a longer context: examples/recipes/longer-context.yaml, tiny, against one process; and out as a folder."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import ids, read_record, write_folder
from local_ranks import run_ranks
from said import tells
from script_run import trainer_of
from whole_run import run

import pretrain_gpt
from megatron.convert import open_any, open_foreign
from megatron.core.inference.load_model import load_gpt
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.model_config import ModelConfig
from tools import checkpoint_convert, generate

RECIPE = Path(__file__).parents[3] / "examples" / "recipes" / "longer-context.yaml"
YARN = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 32}  # the folder has 32 positions
LONGER = f"--rope-scaling {shlex.quote(json.dumps(YARN))} --max-position-embeddings 64 --seq-length 64 "
TINY = (
    f"{LONGER} --fp64 --mock-data --tokenizer-type NullTokenizer --vocab-size 30 --global-batch-size 4 --micro-batch-size 2 "
    "--lr 1e-2 --lr-warmup-iters 2 --eval-iters 0 --device cpu --num-workers 0 --log-interval 1 "
)
ONE = "--tensor-model-parallel-size 1 --context-parallel-size 1 "
REST = shlex.split("--mock-data --micro-batch-size 1 --lr 0.1 --eval-iters 0 --device cpu --train-iters 1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama of 32 positions, with a tokenizer of 31 words."""
    root = tmp_path_factory.mktemp("hf") / "llama"
    write_folder(root, read_record("llama"))
    words = {"<eos>": 0} | {f"w{i}": i for i in range(1, 31)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<eos>"}
    special = {"id": 0, "content": "<eos>", "special": True}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None}
    parts |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model}
    (root / "tokenizer.json").write_text(json.dumps(parts))
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return root


def losses_of(mesh: Mesh, flags: str) -> list[float]:
    """This rank's losses of a whole run of the recipe."""
    steps = []
    with trainer_of(pretrain_gpt, mesh, f"--yaml-cfg {RECIPE} {TINY}{flags}", predicts=False) as trainer:
        trainer.log.add = lambda losses, is_nan=False, *, skipped=False: steps.append(losses["lm loss"])
        trainer._train()
    return steps


def trained(folder: Path, sizes: dict[str, int], flags: str) -> list[float]:
    return run_ranks(sizes, partial(losses_of, flags=f"--pretrained-checkpoint {folder} {flags}"))[-1]


def scores_of(root: Path) -> torch.Tensor:
    """The scores of two texts that are shorter than the folder's own context."""
    checkpoint = open_any(root)
    config = ModelConfig(**checkpoint.state["config"]["transformer"])
    model = load_gpt(checkpoint, config, vocab_size=checkpoint.state["vocab_size"], positions=64)
    tokens = torch.tensor(ids())
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))[..., :31]


@pytest.mark.full
def test_twenty_steps_at_tp_2_and_cp_2_equal_one_process_and_leave_as_a_folder(folder: Path, tmp_path: Path, capsys):
    length = "--train-iters 20 --save-interval 20 "
    one = trained(folder, {}, f"{ONE}{length}--save {tmp_path / 'one'}")
    assert tells(capsys.readouterr().out, "rope_scaling yarn None")  # the change is said
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 2 "
    many = trained(folder, {"tp": 2, "cp": 2}, f"{layout}{length}--save {tmp_path / 'many'}")
    assert len(one) == 20 and many == pytest.approx(one, rel=1e-10)
    for name in ("one", "many"):
        out = tmp_path / f"{name}-hf"
        words = ["--load", str(tmp_path / name), "--save-hf", str(out), "--tokenizer", str(folder)]
        assert checkpoint_convert.main(words) == 0
        config = json.loads((out / "config.json").read_text())
        assert config["max_position_embeddings"] == 64 and config["model_type"] == "llama"
        assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 32}
        assert config["rope_parameters"] == config["rope_scaling"] | {"rope_theta": 10000.0}
        assert torch.equal(scores_of(out), scores_of(tmp_path / name))
    assert (scores_of(tmp_path / "many") - scores_of(tmp_path / "one")).abs().max() < 1e-9
    capsys.readouterr()
    words = ["--load", str(tmp_path / "many-hf"), "--prompt", " ".join(f"w{i % 30 + 1}" for i in range(40))]
    assert (
        generate.main([*words, "--max-new-tokens", "20", "--device", "cpu"]) == 0
    )  # beyond the 32 positions of before
    assert len(capsys.readouterr().out.split()) > 41


TYPES = {kind: 2 for kind in ("p2p", "all_gather", "a2a")} | {"a2a+p2p --hierarchical-context-parallel-sizes 2 2": 4}


@pytest.mark.full
@pytest.mark.parametrize("how", TYPES)
def test_every_type_of_context_parallelism_gives_the_numbers_of_one_rank(how: str, folder: Path):
    alone = trained(folder, {}, f"{ONE}--train-iters 2")
    sizes = {"cp": TYPES[how], "cp_heads": 2 if TYPES[how] == 4 else 1}
    flags = f"--tensor-model-parallel-size 1 --context-parallel-size {sizes['cp']} --cp-comm-type {how} --train-iters 2"
    assert trained(folder, sizes, flags) == pytest.approx(alone, rel=1e-10)


@pytest.mark.full
def test_a_change_of_positions_is_refused_unless_it_is_allowed(folder: Path, tmp_path: Path, capsys):
    """Of a folder and of a description; what changes parameters is refused in any case."""
    rotary = f"{LONGER} --rotary-base 50000"
    for source in (f"--load {folder}", f"--hf-config {folder}"):
        with pytest.raises(SystemExit):
            run(f"{source} {rotary}", tiny=REST)
        said = capsys.readouterr().err
        assert tells(said, "rotary_base 10000.0 50000.0 rope_scaling None yarn")
        assert tells(said, "--allow-rope-change") or "--hf-config" in source
        with pytest.raises(SystemExit):
            run(f"{source} {rotary} --allow-rope-change --num-layers 2", tiny=REST)
        said = capsys.readouterr().err
        assert tells(said, "num_layers 3 2") and not tells(said, "rotary_base")
        run(f"{source} {rotary} --allow-rope-change", tiny=REST)
        said = capsys.readouterr().out
        assert tells(said, "rotary_base 10000.0 50000.0") or "--hf-config" in source


def test_another_kind_of_scaling_takes_the_place_of_the_folders(tmp_path: Path):
    """A folder of llama3's scaling goes on with a linear one, of another flag."""
    write_folder(tmp_path / "llama3", read_record("llama3"))
    words = f"--load {tmp_path / 'llama3'} --allow-rope-change --rotary-seq-len-interpolation-factor 2 --seq-length 8 "
    words += f"--tokenizer-type NullTokenizer --vocab-size 30 --save {tmp_path / 'run'}"
    run(words, tiny=REST)
    (rope,) = ModelConfig(**open_any(tmp_path / "run").state["config"]["transformer"]).ropes
    assert (rope.scaling.rope_type, rope.scaling.factor) == ("linear", 2)
    assert open_foreign(tmp_path / "llama3").state["config"]["transformer"]["rope_scaling"].count("llama3") == 1
