"""The recipes of examples/ through the programs that take a training run's flags: training, memory, the walkthrough, the plan of data."""

import re
from pathlib import Path

import pretrain_t5
import pytest
from cases import read_record, write_folder
from examples import walkthrough
from said import tells
from token_files import write
from whole_run import run

import pretrain_bert
import pretrain_gpt
from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.arguments.command_line import make_parser
from megatron.training.arguments.yaml_arguments import read_yaml
from tools import data_plan
from tools.estimating import estimate
from tools.estimating.job import read

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXPERTS_PAGE = EXAMPLES.parent / "docs" / "experts.md"
RECIPES = [*sorted((EXAMPLES / "recipes").glob("*.yaml")), EXAMPLES / "shakespeare_char.yaml"]
OWN_WEIGHTS = [path for path in RECIPES if path.stem != "longer-context"]  # which goes on from a folder
SCRIPTS = {"bert": pretrain_bert, "t5": pretrain_t5}
WORDS = [
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
]  # shakespeare_char.yaml names a file that its tutorial makes
# The command of examples/recipes/README.md, for any recipe; and what a recipe's own options need in this size.
TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --kv-channels 16 --ffn-hidden-size 128 --seq-length 64 "
    "--vocab-size 512 --tensor-model-parallel-size 1 --micro-batch-size 2 --global-batch-size 4 --train-iters 1000 "
    "--exit-interval 1 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --device cpu --log-interval 1 --num-workers 0"
)
TINY_OF = {
    "expert-model-parallel-size": "--expert-model-parallel-size 1",
    "moe-ffn-hidden-size": "--moe-ffn-hidden-size 48",
    "num-query-groups": "--num-query-groups 2",
    "embedding-multiplier": "--embedding-multiplier 8",
    "window-size": "--window-size 15,0",
    "max-position-embeddings": "--max-position-embeddings 64",
    "decoder-num-layers": "--decoder-num-layers 4 --decoder-seq-length 32",
}


def model_of(path: Path) -> str:
    return next((name for name in SCRIPTS if path.stem.startswith(name)), "gpt")


def flags_of(path: Path) -> list[str]:
    own_words = [*WORDS, "65"] if path.stem == "shakespeare_char" else []
    return ["--yaml-cfg", str(path), "--model", model_of(path), *own_words]


def parameters_of(path: Path) -> int:
    """The number in the recipe's first line."""
    if path.stem == "shakespeare_char":
        return 4 * (12 * 128 * 128 + 13 * 128) + 2 * 128 + 65 * 128 + 64 * 128  # layers, last norm, words, positions
    (number,) = re.findall(r"([\d,]+) parameters", path.read_text())
    return int(number.replace(",", ""))


def rows_beyond(path: Path, counted: int) -> float:
    """How many rows of words were counted beyond those of the recipe, in all of its tables of words."""
    settings = read(flags_of(path)).job.runtime.config
    return (counted - parameters_of(path)) / settings.transformer.hidden_size


COUNTED = [path for path in OWN_WEIGHTS if path.parent.name == "recipes"]
COSTLY = [
    path for path in COUNTED if "tokenizer-type:" not in path.read_text()
]  # seconds each, at their published size


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.full] * (p in COSTLY)) for p in COUNTED], ids=lambda path: path.stem
)
def test_the_memory_of_a_recipe_is_predicted_with_the_parameters_that_its_comment_says(path: Path, capsys):
    """Exactly: with the recipe's own tokenizer, or else with one that has as many tokens as the published vocabulary."""
    text = path.read_text()
    flags = flags_of(path)
    if path in COSTLY:
        (words,) = re.findall(r"^ *vocab-size: (\d+)$", text, re.MULTILINE)
        flags += ["--vocab-size", str(int(words) - 1)]  # a NullTokenizer has one token more than words
    assert estimate.run(flags) == 0
    report = capsys.readouterr().out
    parameters, ranks = re.findall(r"^([\d,]+) parameters; (\d+) rank", report)[0]
    counted = int(parameters.replace(",", ""))
    assert counted == parameters_of(path)
    assert int(ranks) == read(flags).job.runtime.config.parallel.ranks_per_sample

    # the page of experts: "| `NAME.yaml`, TOKENS | LAYOUT | MEMORY (RANKS) | .."
    of_page = re.findall(rf"^\| `{path.name}`.*", EXPERTS_PAGE.read_text(), re.MULTILINE)
    (memory,) = re.findall(r"^worst rank: .* = ([\d.]+) GiB", report, re.MULTILINE)
    assert all(f"| {float(memory):.1f} GiB ({ranks}) |" in row for row in of_page)
    assert bool(of_page) == (path.stem in ("mixtral-8x7b", "qwen3-30b-a3b"))

    # "of which a token visits": without the experts that it is not sent to
    transformer = read(flags).job.runtime.config.transformer
    visited = [int(number.replace(",", "")) for number in re.findall(r"a token visits (\d[\d,]{3,})", text)]
    for number in visited:
        width = transformer.moe_ffn_hidden_size or transformer.ffn_hidden_size
        expert = 3 * transformer.hidden_size * width  # gate, up and down
        others = transformer.num_experts - transformer.moe_router_topk
        assert number == counted - transformer.num_layers * others * expert
    assert bool(visited) == (transformer.num_experts is not None and "tiny" not in path.stem)


@pytest.mark.full
@pytest.mark.parametrize("path", [p for p in OWN_WEIGHTS if p not in COUNTED], ids=lambda path: path.stem)
def test_memory_is_predicted_of_the_other_files(path: Path, capsys):
    assert estimate.run(flags_of(path)) == 0
    counted, ranks = re.findall(r"^([\d,]+) parameters; (\d+) rank", capsys.readouterr().out)[0]
    assert int(ranks) == read(flags_of(path)).job.runtime.config.parallel.ranks_per_sample
    # A NullTokenizer has one token more than words; the rows are then rounded up to the tensor-parallel ranks.
    assert 0 <= rows_beyond(path, int(counted.replace(",", ""))) <= 2 * int(ranks) + 1


def test_a_comment_in_millions_is_rounded_from_the_parameters():
    path = EXAMPLES / "shakespeare_char.yaml"
    (millions,) = re.findall(r"# ([\d.]+) million parameters", path.read_text())
    assert millions == f"{parameters_of(path) / 1e6:.1f}"


@pytest.mark.parametrize("path", OWN_WEIGHTS, ids=lambda path: path.stem)
def test_the_walkthrough_shows_the_model_of_every_recipe(path: Path, capsys):
    """At its full size: the parameters of its stages have the published number of elements."""
    walkthrough.main(["model", *flags_of(path)])
    counted = 0
    for line in capsys.readouterr().out.splitlines():
        shape = re.match(r"\S+ +\(([\d, ]+)\)", line)
        if shape:
            elements = 1
            for size in re.findall(r"\d+", shape[1]):
                elements *= int(size)
            counted += elements
    ranks = read(flags_of(path)).job.runtime.config.parallel.ranks_per_sample
    assert 0 <= rows_beyond(path, counted) <= 2 * ranks + 1


def test_a_recipe_that_goes_on_from_a_folder_is_predicted_and_shown(tmp_path: Path, capsys):
    """examples/recipes/longer-context.yaml: the folder has the model."""
    write_folder(tmp_path / "llama", read_record("llama"))
    words = [
        "--yaml-cfg",
        str(EXAMPLES / "recipes" / "longer-context.yaml"),
        "--pretrained-checkpoint",
        str(tmp_path / "llama"),
    ]
    words += [*WORDS, "30", "--tensor-model-parallel-size", "2"]
    assert estimate.run(words) == 0
    assert tells(capsys.readouterr().out, "4 rank(s): tp 2, dp 1, cp 2")
    walkthrough.main(["model", *words])
    assert tells(capsys.readouterr().out, "rank 0: tp 0 of 2, cp 0 of 2")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_data_of_every_recipe_are_planned_or_refused_in_a_line(path: Path, tmp_path: Path, capsys):
    """By hand: 3 steps of the recipe's batch, each sample as long as it says."""
    prefix = write(tmp_path / "tokens", [[[1] * 100]] * 200)
    words = ["--yaml-cfg", str(path), "--train-data-path", prefix, "--train-iters", "3", "--eval-iters", "0"]
    status = data_plan.main(words)
    said = capsys.readouterr()
    if model_of(path) != "gpt":
        assert status == 2 and said.err.count("\n") == 1 and not said.out
        assert tells(said.err, f"{path.name} prepare_cache.py --prepare-cache-model {model_of(path)}")
        return
    batch, length = (
        int(re.findall(rf"{name}: (\d+)", path.read_text())[0]) for name in ("global-batch-size", "seq-length")
    )
    *_, samples, tokens, repeats, name = said.out.splitlines()[1].split()
    assert status == 0 and name == prefix
    assert (samples, tokens) == (f"{3 * batch:,}", f"{3 * batch * length:,}")
    assert repeats == f"{3 * batch * length / 20000:.2f}"


def test_a_flag_goes_before_the_file_of_a_plan(tmp_path: Path, capsys):
    """Also of an alternative: samples for iterations, one list of data for three."""
    prefix = write(tmp_path / "tokens", [[[1] * 100]] * 200)
    other = write(tmp_path / "other", [[[1] * 100]] * 200)
    (tmp_path / "run.yaml").write_text(
        f"text:\n  train-data-path: {other}\n  valid_data_path: [{other}]\nsteps:\n  train-iters: 3\n  lr: 1e-3\n"
        "  global-batch-size: 4\n  seq-length: 10\n  num-layers: 2\n"
    )
    words = ["--yaml-cfg", str(tmp_path / "run.yaml"), "--data-path", prefix, "--train-samples", "7"]
    assert data_plan.main([*words, "--split", "1"]) == 0
    assert tells(capsys.readouterr().out, f"7 70 0.00 {prefix}")
    for text, reason in (
        ("seq-lenght: 8", "did you mean seq-length"),
        ("[1, 2]", "key: value"),
        ("a: [", "not valid YAML"),
    ):
        (tmp_path / "run.yaml").write_text(text)
        assert data_plan.main(words) == 2
        said = capsys.readouterr().err
        assert tells(said, f"run.yaml {reason}") and said.count("\n") == 1


def test_a_heading_may_have_the_name_of_a_flag_of_the_script(tmp_path: Path):
    """A fork's own flags, of which the recipes' authors know nothing; a setting's name is still no heading."""

    def own_flags(parser):
        parser.add_argument("--size", type=int)
        parser.add_argument("--layout", nargs="+")
        parser.add_argument("--training", action="store_true")

    path = tmp_path / "run.yaml"
    path.write_text("size:\n  num-layers: 3\nlayout:\n  deeper: {seq-length: 8}\ntraining: {lr: 1e-3}\n")
    found = read_yaml(str(path), make_parser(own_flags))
    assert found.words == ["--num-layers=3", "--seq-length=8", "--lr=1e-3"] and not found.problems
    path.write_text("size: 3\nlayout: [a, b]\ntraining: true\n")
    found = read_yaml(str(path), make_parser(own_flags))
    assert found.words == ["--size=3", "--layout", "a", "b", "--training"] and not found.problems
    path.write_text("num-layers: {deep: 3}\n")
    assert tells(read_yaml(str(path), make_parser(own_flags)).problems[0], "num-layers takes a value")


@pytest.mark.full
@pytest.mark.parametrize("path", OWN_WEIGHTS, ids=lambda path: path.stem)
def test_every_recipe_trains_by_its_script_in_the_size_of_the_readme(path: Path, tmp_path: Path, capfd):
    settings = path.read_text()
    tiny = [TINY, *(flags for name, flags in TINY_OF.items() if f"\n  {name}:" in settings)]
    if "\n  save:" in settings:
        tiny.append(f"--save {tmp_path / 'run'} --load {tmp_path / 'run'}")
    run(" ".join(tiny), script=SCRIPTS.get(model_of(path), pretrain_gpt), tiny=["--yaml-cfg", str(path)])
    assert tells(capfd.readouterr().out, "iteration 1/ 1000")


def test_a_t5_for_a_gpts_tool_says_which_model_to_give():
    words = ["--yaml-cfg", str(EXAMPLES / "recipes" / "t5-small.yaml")]
    with pytest.raises(ConfigError) as error:
        read(words)
    assert tells(str(error.value), "--model t5")


def test_a_recipe_of_a_bert_is_not_estimated_as_a_gpt():
    recipe = ["--yaml-cfg", str(EXAMPLES / "recipes" / "bert-base.yaml")]
    with pytest.raises(
        ConfigError, match=r"--mask-prob and --short-seq-prob are read by a model of masked words.*--model bert"
    ):
        read(recipe)
    assert (
        read([*recipe, "--model", "bert"]).args.model == "bert"
        and read([*recipe, "--model", "gpt"]).args.model == "gpt"
    )
