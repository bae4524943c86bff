"""`python -m megatron.configure`: sizes against their names, layouts against the rules of a run, memory against tools/estimate_memory.py."""

import json
import re
import shlex
import subprocess
import sys
from collections import Counter

import pytest
from documents import ROOT, commands_of

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.ops.decisions_overridable_for_memory_prediction import blocks_to_compute
from megatron.core.parallel.collectives import bytes_sent
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.validation import check
from megatron.training.memory import meta_tensor_mode_and_fake_group
from megatron.training.memory.dry_run_of_one_rank import alone, batches_of, build_rank_parts, mesh_of
from megatron.training.model_flops_of_unbuilt_layouts import ModelShape
from megatron.training.step import train_step
from tools import configure, estimate_memory
from tools.configuring.answers import QUESTIONS, Answers, Choices, complete, work_of
from tools.configuring.command import flags_of, in_lines, launch_words
from tools.configuring.layouts import Layout, Work, layouts, least_memory, loss, ranked, sent
from tools.configuring.search import bound_from_few_layers, estimate_words, predicted, search
from tools.configuring.sizes import SIZES, Model, Size
from tools.estimating.job import read

TINY = "--device cpu --devices 2 --model gpt --size tiny --show 1 --yes"
SMALL = Model("gpt", Size(4, 32, 4, 100, 16))
SMALL_EXPERTS = Model("mixtral", Size(4, 64, 8, 100, 16, 2, 96, False, 10000, 16, 4, 2, 48))


def work(**changed) -> Work:
    given = dict(model=SMALL, seq_length=16, global_batch=16, micro_batches=(1,), machines=1, devices=4, device="gpu")
    return Work(**given | {"half": True} | changed)


def flags(of: Work, layout: Layout) -> list[str]:
    precision = "bf16" if of.half else "fp32"
    return flags_of(Answers(device=of.device, precision=precision), Choices(), of, layout, [])


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, sizes in SIZES.items() for name in sizes if name != "tiny"]
)
def test_a_size_has_the_parameters_of_its_name(family: str, name: str):
    """A BERT's name counts its heads and positions, too: 2 %."""
    number = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert Model(family, SIZES[family][name]).parameters == pytest.approx(number, rel=0.02 if number > 2e9 else 0.03)


@pytest.mark.full
@pytest.mark.parametrize(
    "job",
    [
        work(),
        work(model=Model("llama", Size(6, 64, 8, 100, 16, 2, 96)), devices=8, global_batch=48, machines=2),
        work(model=Model("llama", Size(4, 96, 4, 100, 16)), machines=2),
        work(model=Model("bert", Size(4, 32, 4, 100, 16)), half=False, device="cpu"),
        work(model=SMALL_EXPERTS),
    ],
    ids=["gpt", "llama", "llama's own width", "bert", "experts"],
)
def test_a_run_accepts_every_layout(job: Work):
    found = list(layouts(job))
    assert len(found) > 20 and {one.tp for one in found} >= {1, 2} and {one.zero for one in found} == {0, 1, 2, 3}
    for layout in found[::5]:
        config = parse_args(flags(job, layout))[0]
        check(config, job.ranks)
        assert ModelShape.of(config.transformer, 100, 16) == job.model.shape(16)
        assert config.data_parallel_size(job.ranks) == layout.dp and config.data_parallel.stage == layout.zero
        assert config.transformer.num_layers == job.model.size.layers and config.parallel.sequence_parallel == (
            layout.tp > 1
        )


def test_what_a_layout_loses_follows_from_the_formulas():
    """By hand: N = 16 x 32 elements of 2 bytes, 4 layers, 12 x 32^2 x 4 + 100 x 32 parameters."""
    job, n, parameters = work(), 16 * 32 * 2, 12 * 32 * 32 * 4 + 100 * 32
    flops = (6 * parameters + 6 * 4 * 32 * 16) * 16 * 16 / 4
    whole, idle = loss(job, Layout(4, 1, 1, 0, "none")), loss(job, Layout(1, 4, 1, 0, "full"))
    assert whole.inside == 10 * 3 / 4 * n * 4 * 16 and whole.sent == pytest.approx(1000 * whole.inside / flops)
    assert (idle.idle, idle.repeated, idle.inside) == (3 / 16, 1 / 3, 2 * n * 16)
    shards = loss(job, Layout(1, 1, 4, 1, "none"))
    assert shards.inside == pytest.approx(3 / 4 * (4 + 2) * parameters)
    beside = 1 / 4  # one of four microbatches
    assert shards.sent == pytest.approx(1000 * shards.inside / flops - beside / 2)
    apart = work(machines=2, devices=2)
    assert loss(apart, Layout(2, 2, 1, 0, "none")).between == 2 * n / 2 * 16
    assert loss(apart, Layout(1, 2, 2, 1, "none")).between == 2 * n * 8


def test_what_experts_send_and_keep_follows_from_the_formulas():
    """By hand: TP 2 x DP 2 with EP 4: four layers, 2 of 4 experts of 3 x 64 x 48 elements, N = 16 x 64 elements of 2 bytes."""
    job = work(model=SMALL_EXPERTS)
    n = 16 * 64 * 2
    layout = Layout(2, 1, 2, 1, "none", 1, 4)
    assert job.model.parameters_of_experts == 4 * 4 * 3 * 64 * 48
    assert sent(job, layout)["experts"] == 4 * (2 * n / 2) * 3 / 4 * 4 * 8
    assert sent(job, layout)["tensor"] == 5 * n / 2 * 4 * 8, "experts need no sums over tensor-parallel ranks"
    apart, together = (least_memory(job, layout._replace(zero=0, ep=ep)) for ep in (4, 1))
    assert together - apart == pytest.approx(3 / 4 * job.model.parameters_of_experts * (2 + 4 + 12))
    assert {one.ep for one in layouts(job)} == {1, 2, 4} and {one.ep for one in layouts(work())} == {0}


def test_experts_have_published_sizes_alone():
    for words in (
        "--model mixtral --size shape",
        "--model qwen3-moe --num-layers 4",
        "--model mixtral --ffn-hidden-size 8",
    ):
        with pytest.raises(ConfigError) as error:
            configure.configure(shlex.split(words))
        assert "published sizes" in error.value.problems[0]


@pytest.mark.full
@pytest.mark.parametrize(("family", "name"), [("mixtral", "46.7b"), ("qwen3-moe", "30.5b")])
def test_a_recipe_of_experts_is_the_model_of_its_size(family: str, name: str):
    """As tools/estimate_memory.py reads it."""
    recipe = ROOT / "examples" / "recipes" / {"mixtral": "mixtral-8x7b.yaml", "qwen3-moe": "qwen3-30b-a3b.yaml"}[family]
    job = read(["--yaml-cfg", str(recipe), "--world-size", "8"]).job
    transformer = job.runtime.config.transformer
    size = SIZES[family][name]
    assert ModelShape.of(transformer, size.vocab, size.seq) == Model(family, size).shape(size.seq)


@pytest.mark.full
def test_a_mixture_of_experts_gets_a_layout_that_a_run_accepts_and_that_fits():
    """Memory for 0.6 of the experts' state, so they must be apart."""
    model = Model("mixtral", Size(2, 64, 4, 100, 32, 2, 128, False, 10000, 16, 8, 2, 1024))
    job = work(model=model, seq_length=32, half=False)
    experts = model.parameters_of_experts
    found = search(job, lambda layout: flags(job, layout), experts * 16 * 0.6, 1, lambda text: None)
    assert all(least_memory(job, one.layout) <= one.memory.total for one in found)
    (best,) = [one for one in found if one.fits]
    assert best.layout.ep > 1 or best.layout.zero > 1 or best.layout.pp > 1
    assert best.memory.total <= experts * 16 * 0.6


def recorded(job: Work, layout: Layout, rank: int) -> Counter[str]:
    """Bytes that a rank sends in a step by kind of parallelism: from the ledger of the real code, its neighbours silent."""
    of_run = read([*estimate_words(job), *flags(job, layout), "--device", "cpu"]).job
    mesh, found = mesh_of(of_run.runtime.config, job.ranks, rank), Counter()
    with alone(of_run.runtime, mesh) as runtime:
        parts = build_rank_parts(runtime, of_run)
        data = dict.fromkeys(parts.chunks, batches_of(runtime) if mesh["tp"].is_first else None)
        with mesh.ledger.record() as calls:
            train_step(parts.pipeline, parts.optimizer, data, first_sample=0, lr=0.0, check_finite=False)
    for call in calls:
        found[{"tp": "tensor", "dp": "data", "pp": "pipeline"}.get(call.axis[:2], "")] += bytes_sent(call)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gpt", Layout(2, 1, 2, 2, "mlp")),
        ("gpt", Layout(2, 1, 2, 1, "full")),
        ("llama", Layout(2, 1, 2, 1, "full")),
        ("llama", Layout(1, 1, 4, 3, "none")),
    ],
    ids=str,
)
def test_the_bytes_that_are_ranked_are_those_that_are_sent(family: str, layout: Layout):
    """By layer: what twice as many layers send more. Data-parallel sums count norms, biases and gaps, too: 5 %."""
    small, large = (
        work(model=Model(family, Size(layers, 64, 4, 100, 32, ffn=256)), seq_length=32) for layers in (2, 4)
    )
    more = recorded(large, layout, 0)
    more.subtract(recorded(small, layout, 0))
    expected = {kind: size - sent(small, layout)[kind] for kind, size in sent(large, layout).items()}
    assert more["tensor"] == pytest.approx(expected["tensor"], rel=0.01)  # with the norms' sums
    assert more["data"] == pytest.approx(expected["data"], rel=0.05)


@pytest.mark.full
def test_a_stage_in_the_middle_sends_what_is_ranked():
    layout, job = Layout(2, 4, 1, 0, "none"), work(devices=8)
    assert recorded(job, layout, 2)["pipeline"] == pytest.approx(sent(job, layout)["pipeline"], rel=0.01)


def test_equal_layouts_are_ranked_by_data_parallel_ranks_and_by_micro_batches():
    job = work(micro_batches=(1, 2, 4, 8))
    order = [(round(100 * loss(job, one).total), -one.dp, -one.micro_batch) for one in ranked(job)]
    assert order == sorted(order) and len(order) == len(list(layouts(job))) > len(list(layouts(work())))
    assert {one.micro_batch for one in ranked(job) if one.dp == 4} == {1, 2, 4}


LARGE = work(model=Model("gpt", Size(4, 256, 4, 4000, 256)), seq_length=256, global_batch=8)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "half"),
    [(Layout(1, 1, 4, 3, "none"), True), (Layout(2, 2, 1, 0, "mlp"), False), (Layout(1, 4, 1, 0, "full"), True)],
)
def test_the_least_memory_is_below_the_prediction_and_near_it(layout: Layout, half: bool):
    """Near for a small model: a tied table is counted once, and is on both ends of a pipeline."""
    job = work(**vars(LARGE) | {"half": half})
    total = predicted(job, flags(job, layout)).total
    assert 0.5 * total < least_memory(job, layout) <= total


MANY_LAYERS = {
    "gpt": Model("gpt", Size(8, 64, 4, 1000, 64)),
    "qwen3-moe": Model("qwen3-moe", Size(4, 64, 8, 1000, 64, 2, 96, False, 1000000, 16, 8, 4, 48)),
    "llama": Model("llama", Size(4, 64, 4, 1000, 64)),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "device", "layout"),
    [
        ("gpt", "gpu", Layout(1, 2, 2, 3, "mlp", 2)),
        ("gpt", "cpu", Layout(2, 1, 2, 1, "mlp")),
        ("qwen3-moe", "gpu", Layout(2, 1, 2, 2, "full", 1, 4)),
        ("qwen3-moe", "cpu", Layout(2, 1, 1, 0, "none", 1, 2)),
        ("llama", "gpu", Layout(4, 1, 1, 0, "full")),
    ],
    ids=str,
)
def test_a_prediction_with_few_layers_is_below_that_with_all_and_near_it(family: str, device: str, layout: Layout):
    ranks = layout.tp * layout.pp * layout.dp
    job = work(model=MANY_LAYERS[family], seq_length=64, device=device, half=device == "gpu", devices=ranks)
    total = predicted(job, flags(job, layout)).total
    assert 0.85 * total < bound_from_few_layers(job, layout, flags(job, layout)) <= total
    assert least_memory(job, layout) <= total


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "half", "layout"),
    [
        ("gpu", True, Layout(1, 1, 4, 1, "none", 1, 2)),
        ("cpu", True, Layout(2, 1, 2, 2, "mlp", 2, 2)),
        ("cpu", False, Layout(1, 1, 1, 0, "full", 1, 1)),
    ],
    ids=str,
)
def test_the_memory_of_all_experts_is_predicted_by_one(device: str, half: bool, layout: Layout, monkeypatch):
    """The products of a prediction are of the expert with most rows; the oracle computes those of all."""
    job = work(model=MANY_LAYERS["qwen3-moe"], seq_length=64, device=device, half=half, devices=layout.tp * layout.dp)
    of_one = predicted(job, flags(job, layout))
    numbers = set()  # not the blocks, whose memory would stay

    def all_blocks(blocks, size):
        computed = list(blocks)
        numbers.add(len(computed))
        return computed

    monkeypatch.setitem(meta_tensor_mode_and_fake_group._DECISIONS, blocks_to_compute, all_blocks)
    of_all = predicted(job, flags(job, layout))
    assert numbers == {8 // layout.ep} and of_one == of_all


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt", "qwen3-moe"])
def test_the_search_finds_what_predictions_of_all_layouts_find(family: str):
    """Memory that half of the first layouts lack."""
    job = work(model=MANY_LAYERS[family], seq_length=64, global_batch=4, devices=2, device="cpu", half=False)
    totals = [(one, predicted(job, flags(job, one)).total) for one in ranked(job)[:4]]
    capacity = sorted(total for _, total in totals)[1]
    (expected, total), *_ = [(one, total) for one, total in totals if total <= capacity]
    (*_, found) = search(job, lambda one: flags(job, one), capacity, 1, lambda line: None)
    assert (found.layout, found.memory.total, found.fits) == (expected, total, True)


@pytest.mark.full
@pytest.mark.parametrize("more", ["--optimizer-cpu-offload", "--optimizer sgd --sgd-momentum 0"])
def test_bounds_do_not_hide_layouts_that_flags_of_the_run_make_fit(more: str):
    job = work(model=MANY_LAYERS["gpt"], seq_length=64, global_batch=4, devices=1)
    (first, *_) = ranked(job)
    given = [*flags(job, first), *more.split()]
    capacity = predicted(job, given).total
    assert least_memory(job, first) > capacity
    (found,) = search(job, lambda one: [*flags(job, one), *more.split()], capacity, 1, lambda line: None)
    assert found.layout == first and found.fits


def said_by(capsys, words: str) -> str:
    assert configure.main(shlex.split(words)) == 0
    return capsys.readouterr().out


@pytest.mark.full
def test_the_memory_is_that_of_the_tool(capsys):
    """And the command that is shown for it prints the chosen layout's."""
    job, room = work(device="cpu", half=False, devices=2), 2**30
    found = search(job, lambda layout: flags(job, layout), room, 2, print)
    for layout, _, memory, fits in found:
        assert estimate_memory.main([*estimate_words(job), *flags(job, layout), "--json"]) == 0
        printed = capsys.readouterr().out
        assert json.loads(printed[printed.index("{") :])["worst_total_bytes"] == memory.total and fits
    text = said_by(capsys, TINY)
    (command,) = re.findall(r"its memory again: python tools/estimate_memory.py (.*)", text)
    assert estimate_memory.main(shlex.split(command)) == 0
    total = re.search(r"^0 .* (\S+ MiB)$", capsys.readouterr().out, re.M)[1]
    assert re.search(rf"^1 .* {re.escape(total)}$", text, re.M)


@pytest.mark.full
def test_a_bert_is_one_of_pretrain_bert(capsys):
    text = said_by(capsys, "--device cpu --devices 1 --model bert --size tiny --yes")
    assert "--world-size 1 --model bert" in text and "\npython pretrain_bert.py \\\n" in text and "torchrun" not in text


def test_several_machines_have_a_launch_line_for_each():
    launch = launch_words(work(machines=2), ["pretrain_gpt.py"])
    command = in_lines(launch, ["--lr", "1e-4", "--split", "a b"])
    done = subprocess.run(
        ["bash", "-uc", f'torchrun() {{ echo "$@"; }}\n{command}'],
        env={"NODE_RANK": "1", "MASTER_ADDR": "first"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[:10] == shlex.split(
        "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr first --master-port 6000"
    )
    assert done.stdout.endswith("pretrain_gpt.py --lr 1e-4 --split a b\n")
    assert launch_words(work(), ["megatron-pretrain-gpt"])[-2:] == ["--no-python", "megatron-pretrain-gpt"]


@pytest.mark.full
def test_files_have_the_flags_of_the_command(tmp_path, capsys):
    """And are never overwritten unasked."""
    shell, yaml = tmp_path / "run.sh", tmp_path / "run.yaml"
    more = "-- --split 98,2,0 --data-path books wiki --tokenizer-type NullTokenizer --vocab-size 99 --lr 1e-2"
    plain = said_by(capsys, f"{TINY} {more}")
    said_by(capsys, f"{TINY} --yaml {yaml} --shell {shell} {more}")
    command = plain[plain.index("\ntorchrun") :].replace("\\\n", " ")
    shown, from_file = (parse_args(words)[0] for words in (shlex.split(command)[4:], ["--yaml-cfg", str(yaml)]))
    assert shown == from_file and shown.data.data_path == ["books", "wiki"] and shown.learning_rate.lr == 1e-2
    assert (
        not shown.data.mock_data
        and subprocess.run(["bash", "-n", shell]).returncode == 0
        and shell.stat().st_mode & 0o100
    )
    before = shell.read_text()
    assert configure.main(shlex.split(f"{TINY} --yaml {yaml} --shell {shell}")) == 2
    err = capsys.readouterr().err
    assert f"--shell {shell} is there already" in err and "--overwrite" in err and shell.read_text() == before
    said_by(capsys, f"{TINY} --shell {shell} --overwrite")
    assert "--mock-data" in shell.read_text()


def test_questions_are_asked_until_they_are_answered(capsys):
    lines, asked = iter(["cpu", "", "two", "2", "", "bert", "shape", "", "2", "64", "4", "", "", ""]), []
    answers = complete(Answers(), lambda prompt: asked.append(prompt) or next(lines), print)
    assert (answers.machines, answers.devices, answers.num_layers, answers.seq_length) == (1, 2, 2, 1024)
    assert answers.global_batch_size == 8 and answers.precision == "fp32" and work_of(answers).model.size.vocab == 30522
    said = capsys.readouterr().out
    assert (
        "'two' is not a whole number" in said and "--num-layers is needed" in said and len(asked) == len(QUESTIONS) + 2
    )
    assert asked[0] == "what computes: gpu or cpu [gpu]: "
    assert complete(Answers(num_layers=2, hidden_size=8, num_attention_heads=2), None, print).size == "shape"

    def ended(_: str) -> str:
        raise EOFError

    with pytest.raises(ConfigError, match="give flags, or --yes"):
        complete(Answers(), ended, print)


@pytest.mark.full
def test_a_layout_is_chosen_by_its_number(capsys):
    """Of those that a run accepts: Muon is for ZeRO 0 and 1."""
    answers = iter(["cpu", "", "2", "8", "gpt", "shape", "2", "16", "2", "8", "8", "fp32", "2"])
    configure.configure(["--", "--optimizer", "muon"], lambda prompt: next(answers))
    text = capsys.readouterr().out
    rows = re.findall(r"^(\S+) +(\d) +(\d) +(\d) +(\d) ", text, re.M)
    assert [row[0] for row in rows] == ["1", "2", "3"] and {row[4] for row in rows} <= {"0", "1"}
    chosen = parse_args(shlex.split(text[text.index("\ntorchrun") :].replace("\\\n", " "))[4:])[0]
    sizes = chosen.parallel.tensor_model_parallel_size, chosen.parallel.pipeline_model_parallel_size
    assert sizes == tuple(map(int, rows[1][1:3])) and chosen.optimizer.optimizer == "muon"
    with pytest.raises(ConfigError, match="muon updates complete matrices"):
        configure.configure(shlex.split(f"{TINY} -- --optimizer muon --offload-dir x"))


def test_an_installed_program_is_called_by_its_command(monkeypatch, tmp_path):
    monkeypatch.setattr(configure, "programs_folder", lambda: tmp_path / "_programs")
    assert configure._program("pretrain_gpt") == ["megatron-pretrain-gpt"]
    monkeypatch.undo()
    monkeypatch.chdir(ROOT / "docs")
    assert configure._program("estimate_memory") == [str(ROOT / "tools" / "estimate_memory.py")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--size 9b", "--size is 9b; of gpt it is one of"),
        ("--model llama --size 7B", ", or shape; the nearest is 6.7b"),
        ("--size tiny --num-layers 3", "--size tiny and --num-layers exclude each other"),
        ("--size shape", "--num-layers is needed"),
        ("--model gpt --num-query-groups 2", "--num-query-groups is for --model llama"),
        ("--devices 0", "--devices is 0; it must be at least 1"),
        ("--global-batch-size 3 --devices 10 --machines 7", "70 and 140 suit every layout"),
        ("--choose 9 --devices 1", "--choose is 9, and 1 layout(s) fit"),
        ("--memorry 3", "did you mean --memory"),
        ("--devices 1 -- --zero-stage 3 --num-layers=2", "--zero-stage after --: the search chooses it; leave it out"),
    ],
)
def test_impossible_answers_are_refused(words: str, says: str, capsys):
    asked, sign, extra = words.partition(" -- ")
    model = "" if "--model" in asked else "--model gpt"
    assert configure.main(f"{asked} --device cpu --yes {model} {sign} {extra}".split()) == 2
    assert says in capsys.readouterr().err


@pytest.mark.full
def test_what_is_missing_is_said_where_nothing_fits():
    job = work(**vars(LARGE) | {"machines": 1, "devices": 2, "global_batch": 8})
    layout = min(layouts(job), key=lambda one: least_memory(job, one))
    memory = predicted(job, flags(job, layout))
    with pytest.raises(ConfigError) as refused:
        search(job, lambda one: flags(job, one), memory.state - 2**20, 1, print)
    first, less, more = refused.value.problems
    assert f"{layout} needs least" in first and "MiB too much" in first and less.startswith("less with ")
    assert re.search(r"no fewer than \d+ machines", more)


@pytest.mark.full
def test_the_page_shows_what_its_command_prints(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "configure.md"
    command, _ = commands_of(page)
    printed = said_by(capsys, command.removeprefix("python -m megatron.configure "))
    (shown,) = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.M | re.S)
    assert shown == printed[: printed.index("\nlayout 1")]


def test_help_and_questions_wait_for_no_torch():
    code = "import sys, tools.configure as c; c._parser().format_help(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
