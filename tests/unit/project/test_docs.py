"""Documents against the code: every command is run by some test or has a reason, every quoted message is there, every link leads somewhere.

A new fenced bash command needs a line in COMMANDS: the test that runs its program, or why none does.
"""

import ast
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from code_lines import nodes
from documents import DOCUMENTS, ROOT, commands_of, name_of

import finetune_gpt
from megatron.core.base.dataclass_flags import FlagParser, add_flags
from megatron.core.tokenizers import TokenizerConfig
from megatron.training.arguments.command_line import make_parser as pretrain_parser
from tools import evaluate, generate, plot_run, preprocess_data, train_tokenizer

MESSAGES_BY = ROOT / "docs" / "troubleshooting.md"

READS_ON = "tests/processes/test_documents.py::test_the_readme_leads_from_a_text_to_a_sample"
TEACHES = "tests/processes/test_documents.py::test_the_tutorial_leads_from_a_text_to_the_same_numbers_in_four_processes"
WATCHES = "tests/processes/test_documents.py::test_the_page_about_watching_shows_what_can_be_seen"
PREPARES = "tests/unit/tools/test_data_tools.py::test_every_command_of_the_page_runs"
CONFIGURES = "tests/processes/test_documents.py::test_what_configure_writes_trains"
WALKS = "tests/processes/test_documents.py::test_the_walkthrough_shows_what_its_commands_print"
TUNES = "tests/ranks/training/test_after_pretraining.py::test_every_command_of_the_page_works"
TUNES_AGAIN = "tests/ranks/training/test_after_pretraining.py::test_every_command_of_the_second_example_works"
EXCHANGES = "tests/processes/test_documents.py::test_a_description_leads_to_text_and_on_to_a_longer_context"
EVALUATES = "tests/ranks/inference/test_evaluate.py::test_the_commands_of_the_page_run"
TRAINS_A_BERT = "tests/processes/test_bert.py::test_every_command_of_the_page_runs"
# document: command, or its beginning before " ..." -> the test that runs it, word for word, or "not run: why".
COMMANDS = {
    "README.md": {
        "bash examples/quickstart.sh": "tests/processes/test_documents.py::test_the_quickstart_leads_from_nothing_to_a_sample",
        "bash tests/run.sh": "not run: it runs the tests",
        "bash tests/run.sh --fast": "not run: it runs the tests",
        "bash tests/run.sh -k schedule": "not run: it runs the tests",
        "python -c ...": READS_ON,
        "python tools/train_tokenizer.py ...": READS_ON,
        "python tools/preprocess_data.py ...": READS_ON,
        "torchrun --nproc-per-node 8 pretrain_gpt.py ...": READS_ON,
        "python tools/plot_run.py ...": READS_ON,
        "python tools/generate.py ...": READS_ON,
        "python tools/benchmark.py ...": "not run: it takes minutes; tests/unit/tools/test_benchmark.py runs a tiny contest",
    },
    "docs/checkpoint_format.md": {
        "python tools/checkpoint_inspect.py ...": "tests/unit/tools/test_checkpoint_inspect.py::test_every_command_of_the_page_runs"
    },
    "docs/tutorial.md": {
        "bash examples/setup_env.sh": "tests/processes/test_documents.py::test_the_quickstart_leads_from_nothing_to_a_sample",
        "source .venv/bin/activate": "not run: the tests have an environment",
        "export OMP_NUM_THREADS=1": "not run: the tests set it",
        "curl ...": "not run: no test downloads; the text is taken from a file",
        "mkdir -p runs/shakespeare": TEACHES,
        "python -c ...": TEACHES,
        "python tools/train_tokenizer.py ...": TEACHES,
        "python tools/preprocess_data.py ...": TEACHES,
        "python tools/inspect_dataset.py ...": TEACHES,
        "python pretrain_gpt.py ...": TEACHES,
        "python tools/plot_run.py ...": TEACHES,
        "python tools/generate.py ...": TEACHES,
        "torchrun --nproc-per-node 4 pretrain_gpt.py ...": TEACHES,
        "grep -h ...": TEACHES,
    },
    "docs/models.md": {
        "python tools/estimate_memory.py ...": EXCHANGES,
        "python tools/preprocess_data.py ...": EXCHANGES,
        "python pretrain_gpt.py ...": EXCHANGES,
        "python tools/checkpoint_convert.py ...": EXCHANGES,
        "python tools/generate.py ...": EXCHANGES,
        "torchrun --nproc-per-node 2 pretrain_gpt.py ...": EXCHANGES,
    },
    "docs/after_pretraining.md": {
        "python finetune_gpt.py ...": TUNES,
        "torchrun --nproc-per-node 2 finetune_gpt.py ...": TUNES,
        "python pretrain_gpt.py ...": TUNES,
        "python tools/generate.py ...": TUNES,
        "python tools/lora.py ...": TUNES,
        "python tools/preprocess_data.py ...": TUNES,
        "python tools/train_tokenizer.py ...": TUNES,
        "python tools/evaluate.py ...": TUNES_AGAIN,
        "mkdir -p runs/library": "not run: the test makes the folder",
        "python tools/plot_run.py ...": TUNES_AGAIN,
        "python tools/stdlib_corpus.py ...": TUNES_AGAIN,
        "python -c ...": TUNES,
    },
    "docs/offload.md": {
        "python pretrain_gpt.py ...": "tests/processes/test_limited_memory.py::test_a_model_larger_than_memory_trains_with_files_and_not_without"
    },
    "docs/memory.md": {
        "python tools/estimate_memory.py ...": "tests/unit/training/test_memory.py::test_gpt3_on_a_thousand_ranks_is_estimated_in_one_process"
    },
    "docs/reliability.md": {
        "python tools/replay_step.py ...": "tests/ranks/training/test_guard_dump.py::test_a_dumped_step_comes_again_to_the_bit"
    },
    "docs/context_parallel.md": {
        "python tools/plot_context.py ...": "tests/unit/tools/test_plot_context.py::test_the_commands_of_the_page_draw"
    },
    "docs/configure.md": {"python -m megatron.configure ...": CONFIGURES, "bash runs/tiny.sh ...": CONFIGURES},
    "docs/walkthrough.md": {
        "RANK=5 WORLD_SIZE=16 ...": WALKS,
        "torchrun --nproc-per-node 4 examples/walkthrough.py start": WALKS,
        "python examples/walkthrough.py ...": WALKS,
        "torchrun --nproc-per-node 2 examples/walkthrough.py engine": WALKS,
    },
    "docs/generation.md": {
        "python tools/generate.py ...": READS_ON,
        "torchrun --nproc-per-node 4 tools/generate.py ...": READS_ON,
        "torchrun --nproc-per-node 2 tools/generate.py ...": READS_ON,
    },
    "docs/evaluation.md": {
        "python tools/evaluate.py --load checkpoints/books --lm-eval-tasks ...": "not run: it downloads; tests/compat/test_lm_eval.py runs local tasks",
        "python tools/evaluate.py ...": EVALUATES,
        "python pretrain_gpt.py ...": EVALUATES,
        "torchrun --nproc-per-node 4 tools/evaluate.py ...": "tests/ranks/inference/test_evaluate.py::test_replicas_and_tensor_parallel_processes_give_what_one_gives",
    },
    "docs/watching.md": {
        'SMALL="--num-layers ...': WATCHES,
        "torchrun --nproc-per-node 2 pretrain_gpt.py ...": WATCHES,
        "python pretrain_gpt.py ...": WATCHES,
        "python tools/plot_run.py ...": WATCHES,
        "tensorboard --logdir runs/tb": "not run: it shows a page until it is stopped",
        "grep ...": WATCHES,
    },
    "docs/data_preparation.md": {
        "python tools/stdlib_corpus.py ...": PREPARES,
        "python tools/train_tokenizer.py ...": PREPARES,
        "python tools/preprocess_data.py ...": PREPARES,
        "python tools/inspect_dataset.py ...": PREPARES,
        "python tools/merge_datasets.py ...": PREPARES,
        "python tools/data_plan.py ...": PREPARES,
        "python tools/prepare_cache.py ...": PREPARES,
        "python tools/index_cache.py ...": PREPARES,
        "echo ...": PREPARES,
        "printf ...": PREPARES,
        "python -c ...": PREPARES,
        "gzip --keep corpus/library.jsonl": PREPARES,
        "zcat corpus/library.jsonl.gz | python tools/preprocess_data.py ...": PREPARES,
    },
    "docs/bert.md": {
        "python tools/stdlib_corpus.py ...": TRAINS_A_BERT,
        "python tools/train_tokenizer.py ...": TRAINS_A_BERT,
        "python tools/preprocess_data.py ...": TRAINS_A_BERT,
        "python pretrain_bert.py ...": TRAINS_A_BERT,
        "torchrun --nproc-per-node 4 pretrain_bert.py ...": "tests/processes/test_bert.py::test_losses_equal_one_process",
    },
    "docs/t5.md": {
        "python pretrain_t5.py ...": "tests/ranks/models/test_pretrain_t5.py::test_the_commands_of_the_page_train",
        "torchrun --nproc-per-node 8 pretrain_t5.py ...": "tests/ranks/models/test_pretrain_t5.py::test_the_commands_of_the_page_train",
        "python tools/generate.py ...": "tests/ranks/inference/test_generate_t5.py::test_the_decoder_writes_what_the_plain_model_says",
    },
    "docs/experts.md": {
        "python pretrain_gpt.py ...": "tests/ranks/transformer/test_moe_runs.py::test_the_commands_of_the_page_train",
        "torchrun --nproc-per-node 2 pretrain_gpt.py ...": "tests/ranks/transformer/test_moe_runs.py::test_the_commands_of_the_page_train",
    },
    "docs/adding_a_model.md": {
        "python tools/plot_schedule.py ...": "tests/unit/tools/test_plot_schedule.py::test_a_schedule_of_a_fork_is_drawn_from_its_file",
        "torchrun --nproc-per-node 2 examples/minimal_fork/pretrain.py ...": "tests/processes/test_documents.py::test_the_fork_of_the_page_trains",
        "torchrun --nproc-per-node 4 examples/toy_moe/pretrain.py ...": "tests/processes/test_documents.py::test_the_experts_of_the_page_train",
        "python tools/generate.py ...": "tests/ranks/inference/test_script_models.py::test_a_forks_layers_generate_by_their_formula",
    },
}


def matches(entry: str, command: str) -> bool:
    return command.startswith(entry[:-3]) if entry.endswith(" ...") else command == entry


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_is_run_or_has_a_reason(document: Path):
    entries = COMMANDS.get(name_of(document), {})
    commands = commands_of(document)
    for command in commands:
        assert any(matches(entry, command) for entry in entries), (
            f"{name_of(document)} has a command that no test runs: {command!r}; "
            "run it in a test, or say in COMMANDS why not"
        )
    for entry in entries:
        assert any(matches(entry, command) for command in commands), f"{entry!r} is gone; take it out of COMMANDS"


def test_the_tests_that_run_commands_exist():
    for entry in {value for entries in COMMANDS.values() for value in entries.values()}:
        if not entry.startswith("not run: "):
            path, name = entry.split("::")
            assert f"def {name}(" in (ROOT / path).read_text(), entry


@cache
def flags_of_programs() -> dict[str, set[str]]:
    """What each program of the documents understands, where it has a parser to ask."""
    fork = re.findall(
        r"(\w+): (?:int|float) = option\(",
        "".join(p.read_text() for p in (ROOT / "examples/minimal_fork").glob("*.py")),
    )
    tools = {}
    for tool, configs in (
        ("preprocess_data", (preprocess_data.PreprocessConfig, TokenizerConfig)),
        ("train_tokenizer", (train_tokenizer.TrainTokenizerConfig,)),
        ("plot_run", (plot_run.PlotRunConfig,)),
    ):
        parser = FlagParser()
        for config in configs:
            add_flags(parser, config)
        tools[f"tools/{tool}.py"] = set(parser.known_flags())
    trains = set(pretrain_parser().known_flags())
    return tools | {
        "finetune_gpt.py": set(pretrain_parser(finetune_gpt.add_own_flags).known_flags()),
        "pretrain_gpt.py": trains,
        "pretrain_bert.py": trains,
        "examples/minimal_fork/pretrain.py": trains | {f"--{name.replace('_', '-')}" for name in fork},
        "tools/generate.py": set(generate.make_parser().known_flags()),
        "tools/evaluate.py": set(evaluate.make_parser().known_flags()),
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_flags_in_commands_exist(document: Path):
    for command in commands_of(document):
        words = shlex.split(command.split(" | ")[0])
        program = next((word for word in words if word in flags_of_programs()), None)
        if program is not None:
            given = {word for word in words[words.index(program) :] if word.startswith("--")}
            assert given <= flags_of_programs()[program], f"{program} has no {given - flags_of_programs()[program]}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path):
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", document.read_text()):
        page = document.parent / target if target else document
        assert page.exists(), f"{name_of(document)} links to {target}, which is not there"
        if heading:
            headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}
            assert heading in anchors, f"{name_of(document)} links to {target}#{heading}, which is not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_of_the_code_exist(document: Path):
    """A file or a test may be named from the root, from megatron/ or from megatron/core/."""
    text = document.read_text()
    folders = [ROOT, *(ROOT / "megatron" / part for part in ("", "core", "training"))]
    for path in set(re.findall(r"`(?:python )?((?:\w+/)+\w+\.py)", text)) - {"tools/NAME.py", "mine/pretrain.py"}:
        assert any((folder / path).is_file() for folder in folders), f"{name_of(document)} names {path}"
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(?:\w+::)?(\w+)", text):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{name_of(document)} names {path}::{name}"


def test_what_the_commands_write_is_no_change_to_the_repository():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout")
    writes = r"(?:> |tee -a |--(?:output|output-prefix|save|offload-dir|metrics-file|data-cache-path|tensorboard-dir) )([\w/.]+)"
    written = {
        path for document in DOCUMENTS for command in commands_of(document) for path in re.findall(writes, command)
    }
    assert {"books.log", "data/books", "state", "run.jsonl", "checkpoints/books"} <= written
    inside = "".join(f"{path}/x\n" for path in sorted(written))  # a file in it is ignored if it is, file or folder
    ran = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"], cwd=ROOT, input=inside, capture_output=True, text=True
    )
    assert ran.stdout == inside
    tracked = subprocess.run(["git", "ls-files", "-ic", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    assert (tracked.returncode, tracked.stdout) == (0, "")


# ---------------------------------------------------------------- messages


def rendered(node: ast.AST) -> str | None:
    """A string of the source, each value that is filled in written as one blank character."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return None


@cache
def strings_of_the_product() -> tuple[str, ...]:
    files = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), *ROOT.glob("*.py")]
    found = [rendered(node) for path in files for node in nodes(path.read_text())]
    shell = [line for path in (ROOT / "examples").rglob("*sh") for line in path.read_text().splitlines()]
    return tuple(text for text in found if text is not None) + tuple(shell)


def quoted_messages() -> list[str]:
    return re.findall(r"^### `(.+)`$", MESSAGES_BY.read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_messages_are_in_the_source(message: str):
    """What stands between two `...` is found in one string of the source, in this order."""
    parts = [part for part in message.split("...") if part.strip(" ;,:()")]
    assert parts, f"{message!r} quotes nothing"
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in parts), re.DOTALL)
    assert any(pattern.search(text) for text in strings_of_the_product()), f"no string of the source says {message!r}"


def test_a_message_that_nobody_says_would_be_found():
    assert len(quoted_messages()) > 15
    with pytest.raises(AssertionError, match="no string of the source says"):
        test_quoted_messages_are_in_the_source("the gradient's norm is ... and it rains")


# ---------------------------------------------------------------- figures


def test_calls_per_layer_are_those_that_are_counted():
    """docs/parallelism.md derives what docs/communication.md, generated from the ledger, counts."""
    counted = (ROOT / "docs" / "communication.md").read_text()
    derived = (ROOT / "docs" / "parallelism.md").read_text()
    rows = {
        "| tensor, t |": "| tensor parallel, t = 2 |",
        "| tensor and sequence, t |": "| tensor and sequence parallel, t = 2 |",
        "| the same, every layer recomputed |": "| the same, every layer recomputed |",
    }
    for begins, other in rows.items():
        row = next(line for line in derived.splitlines() if line.startswith(begins))
        mine = {
            op.replace("-", "_"): int(count)
            for count, op in re.findall(r"(\d+) (all-reduce|all-gather|reduce-scatter)s", row)
        }
        block = counted[counted.index(other) :].split("\n")
        block = [block[0], *[line for line in block[1:] if line.startswith("|  |")][: _length(block[1:])]]
        theirs = {}
        for cells in ([cell.strip() for cell in line.split("|")] for line in block):
            if cells[5]:
                theirs[cells[2]] = int(cells[5])
        assert mine == theirs, begins


def _length(lines: list[str]) -> int:
    """Rows that go on with a table's entry."""
    return next(i for i, line in enumerate(lines) if not line.startswith("|  |"))


def test_the_page_about_experts_names_every_other_file_that_knows_of_them():
    section = (ROOT / "docs" / "experts.md").read_text().partition("## Who else knows of experts")[2]
    named = re.findall(r"`([^`]+\.py)`", section.partition("|---|")[2])
    sources = [*ROOT.glob("pretrain_*.py"), ROOT / "finetune_gpt.py"]
    sources += [path for folder in ("megatron", "tools") for path in (ROOT / folder).rglob("*.py")]
    own = ROOT / "megatron" / "core" / "transformer" / "moe"
    others = (path for path in sources if not path.is_relative_to(own))
    found = [str(path.relative_to(ROOT)) for path in others if re.search("moe|expert", path.read_text())]
    assert sorted(named) == sorted(found)
