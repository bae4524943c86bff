"""How many of NVIDIA's own launch scripts our parser and its rules accept, release by release.

    python tests/compat/launch_scripts.py CLONE [--folder FOLDER]

CLONE: a git clone of NVIDIA/Megatron-LM with its tags. FOLDER: keeps the files of the releases and the commands found, so that
a second run only parses.

The commands of a release are those that start one of the three programs:

    launch scripts      each .sh runs under bash with recorders in place of python, torchrun, srun, pip and all that changes files
    jobs of its CI      the lines of .gitlab-ci.yml and of the recipes run so too, with their variables
    functional tests    each model_config.yaml is expanded as the release's runner does

Of them those count that the release's own parser accepts (megatron_arguments.py).
"""

import argparse
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
TAGS = ("v2.5", "23.04", "core_v0.5.0", "core_v0.8.0", "core_v0.12.0", "core_v0.16.1", "core_v0.19.0")
PROGRAMS = ("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py")

# What is counted apart: experts, and parts that are not built here -> the flags that ask for it.
OUT_OF_SCOPE = {
    "experts": ("--num-experts", "--moe-use-upcycling"),
    "fp8": ("--fp8-format", "--fp8-e4m3", "--fp8-hybrid", "--fp4-format"),
    "latent attention": ("--multi-latent-attention",),
    "multi-token prediction": ("--mtp-num-layers",),
}


@dataclass
class Command:
    """One start of a program, as a script of a release starts it."""

    source: str  # the script, job or test
    program: str
    words: list[str]
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)

    def asks_for(self) -> list[str]:
        """Return what it asks for that is counted apart."""
        given = {word.partition("=")[0] for word in self.words}
        return [part for part, flags in OUT_OF_SCOPE.items() if given.intersection(flags)]


# ---- run a script with recorders in place of what it would start

# They only read, or print.
HARMLESS = [
    "awk",
    "basename",
    "bash",
    "cat",
    "cut",
    "date",
    "dirname",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "getopt",
    "grep",
    "gawk",
    "head",
    "hostname",
    "id",
    "ls",
    "nproc",
    "printf",
    "pwd",
    "readlink",
    "realpath",
    "rev",
    "sed",
    "seq",
    "sh",
    "shuf",
    "sort",
    "tail",
    "test",
    "tr",
    "true",
    "uname",
    "uniq",
    "wc",
    "whoami",
    "xargs",
]
RECORDERS = ["python", "python3", "torchrun", "ft_launcher", "deepspeed", "uv", "mpirun", "srun", "sbatch"]
RECORDER = r"""#!/bin/bash
# A shell or a script among the words of srun and sbatch is run; anything else is written down.
words=("$@")
for index in "${!words[@]}"; do
    [[ "$0" == *srun || "$0" == *sbatch ]] || break
    word="${words[$index]}"
    case "$word" in
        --nodes=*) export LAUNCH_NODES="${word#*=}" ;;
        -N | --nodes) export LAUNCH_NODES="${words[$((index + 1))]}" ;;
        bash | sh | /bin/bash) exec bash "${words[@]:$((index + 1))}" ;;
        *.sh) exec bash "${words[@]:$index}" ;;
    esac
done
record=$(mktemp "$LAUNCH_RECORDS/XXXXXXXX")
env -0 > "$record.environment"
printf '%s\0' "$@" > "$record"
"""
PRELUDE = r"""
command_not_found_handle() { return 0; }
cd() { builtin cd "$@" 2> /dev/null || true; }
source() { [[ -f "$1" ]] && builtin source "$@"; return 0; }
"""
# A user fills these in; the rest is unset in a script as in its shell.
GIVEN = {
    "SLURM_NNODES": "1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_JOB_START_TIME": "0",
    "SLURM_JOB_END_TIME": "14400",
    "DATA_DIR": "/data",
    "BASE_DIR": "/data/base",
}


@dataclass
class Recorder:
    """Runs scripts of one release, whose files are in `tree`."""

    tree: Path
    bin: Path

    def commands(self, source: str, script: Sequence[str], folder: Path, variables: Mapping[str, str]) -> list[Command]:
        """Run `bash *script` in a folder and return the starts of the programs that it made."""
        with tempfile.TemporaryDirectory() as records:
            os.chmod(records, 0o777)
            (Path(records) / "prelude").write_text(PRELUDE)
            environment = GIVEN | {
                "PATH": str(self.bin),
                "HOME": records,
                "TMPDIR": records,
                "SCRIPTS_DIR": records,
                "BUILD_DIR": str(self.tree),
                "LAUNCH_RECORDS": records,
                "BASH_ENV": f"{records}/prelude",
            }
            nobody = {"user": 65534, "group": 65534, "extra_groups": ()} if os.geteuid() == 0 else {}
            try:
                subprocess.run(
                    ["/bin/bash", *script],
                    cwd=folder,
                    env=environment | {name: str(value) for name, value in variables.items()},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=30,
                    **nobody,
                )
            except subprocess.TimeoutExpired:
                print(f"{source}: stopped after 30 s", file=sys.stderr)
            return list(self._read(source, Path(records)))

    def _read(self, source: str, records: Path) -> Iterator[Command]:
        for record in sorted(records.glob("*.environment"), key=lambda path: path.stat().st_mtime_ns):
            environment = dict(pair.split("=", 1) for pair in record.read_text().split("\0") if "=" in pair)
            words = record.with_suffix("").read_text().split("\0")[:-1]
            for index, word in enumerate(words):
                if Path(word).name in PROGRAMS:
                    ranks = ranks_of(words[:index], environment)
                    kept = {name: text for name, text in environment.items() if re.match("NVTE_|CUDA_|NCCL_", name)}
                    yield Command(source, Path(word).name, words[index + 1 :], ranks, kept)
                    break


def ranks_of(launcher: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the processes that the words before the program ask for."""
    text = " ".join(launcher)

    def number(names: str, default: int) -> int:
        found = re.search(rf"--?(?:{names})[ =](\d+)", text)
        return int(found[1]) if found else default

    if re.search(r"nproc[_-]per[_-]node", text):
        return number("nproc[_-]per[_-]node", 8) * number("nnodes", 1)
    nodes = environment.get("LAUNCH_NODES")
    return 8 * int(nodes) if nodes and nodes.isdigit() else 1


def write_recorders(folder: Path) -> None:
    """Make a folder that stands for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in HARMLESS:
        real = shutil.which(name)
        if real and not (folder / name).exists():
            (folder / name).symlink_to(real)
    (folder / "mktemp").symlink_to(shutil.which("mktemp"))
    for name in RECORDERS:
        (folder / name).write_text(RECORDER)
        (folder / name).chmod(0o755)


# ---- the commands of a release


def of_scripts(tree: Path, recorder: Recorder) -> Iterator[Command]:
    """The commands of every .sh, with a path for each placeholder and each argument."""
    arguments = [f"/data/argument{number}" for number in range(1, 12)]
    for path in sorted(tree.rglob("*.sh")):
        text = path.read_text(errors="replace")
        if "pretrain" not in text and ".sh" not in text:
            continue
        filled = re.sub(r"=\s*[\"']?<[^>\n]*>", "=/data/given", text)
        if filled != text:
            path.write_text(filled)
        source = str(path.relative_to(tree))
        for folder in (tree, path.parent):  # scripts that include a neighbour are started from their own folder
            found = recorder.commands(source, [str(path), *arguments], folder, {})
            yield from found
            if found:
                break


def of_ci(tree: Path, recorder: Recorder) -> Iterator[Command]:
    """The commands of the jobs in .gitlab-ci.yml."""
    path = tree / ".gitlab-ci.yml"
    if not path.exists():
        return
    text = path.read_text()
    used = set(re.findall(r"\*([\w-]+)", text))
    # an anchor that no alias names may stand there twice, which PyYAML refuses
    text = re.sub(r": &([\w-]+)", lambda found: found[0] if found[1] in used else ":", text)
    content = yaml.load(text, Loader=_AnyTag)
    for name, job in content.items():
        if not isinstance(job, dict) or name.startswith(".") or "RUN_MODEL" not in (job.get("variables") or {}):
            continue
        variables = {key: str(value) for key, value in job["variables"].items() if not isinstance(value, dict)}
        lines = "\n".join(str(line) for line in job["script"])
        yield from recorder.commands(f".gitlab-ci.yml {name}", ["-c", lines], tree, variables)


class _AnyTag(yaml.SafeLoader):
    """Reads tags that are GitLab's own as nothing."""


_AnyTag.add_multi_constructor("!", lambda loader, suffix, node: None)


def of_recipes(tree: Path, recorder: Recorder) -> Iterator[Command]:
    """The commands of the recipes of 2024, which are shell lines with Python's expressions in braces."""
    for path in sorted(tree.glob("tests/functional_tests/jet_recipes/*.yaml")):
        for recipe in yaml.safe_load_all(path.read_text()):
            for product in recipe.get("products") or []:
                for values in itertools.product(*product.values()):
                    spec = recipe["spec"] | dict(zip(product, values)) | {"assets_dir": "/data/assets"}
                    spec["name"] = filled_in(spec.get("name", ""), spec)
                    source = f"{path.relative_to(tree)} {spec['name']}"
                    lines = filled_in(spec.get("script") or "", spec)
                    yield from recorder.commands(source, ["-c", lines], tree, {})


def filled_in(text: str, spec: Mapping[str, Any]) -> str:
    """Return a recipe's text with the values of the expressions in its braces. Doubled braces are the shell's, as in ${{A[@]}}."""

    def value(found: re.Match) -> str:
        return found[0][0] if found[1] is None else str(eval(found[1], dict(spec)))

    return re.sub(r"\{\{|\}\}|\{([^{}]*)\}", value, text)


def of_functional_tests(tree: Path) -> Iterator[Command]:
    """The commands of every model_config.yaml, as `_run_training.sh` of the release expands it."""
    started_by = programs_of_recipes(tree)
    runner = tree / "tests/functional_tests/shell_test_utils/run_ci_test.sh"
    exits_at_end = runner.exists() and '"--exit-interval" = .MODEL_ARGS."--train-iters"' in runner.read_text()
    training = tree / "tests/functional_tests/shell_test_utils/_run_training.sh"
    is_quoted = training.exists() and "TRAINING_PARAMS_ARRAY" in training.read_text()
    for path in sorted(tree.glob("tests/*/test_cases/*/*/model_config*.yaml")):
        model, case = path.parts[-3:-1]
        program, ranks = started_by.get((model, case), (default_program(model), 8))
        text = path.read_text()
        for _ in range(2):  # a value may name another variable
            text = re.sub(r"\$\{?([A-Z_]+)\}?", lambda found: VARIABLES.get(found[1], f"/data/{found[1]}"), text)
        content = yaml.safe_load(text)
        if Path(program).name not in PROGRAMS or content.get("MODE", "pretraining") != "pretraining":
            continue
        environment = {name: str(value) for name, value in (content.get("ENV_VARS") or {}).items()}
        for key in [key for key in content if re.fullmatch(r"MODEL_ARGS(_\d+)?", key)]:
            settings = dict(content[key] or {})
            if exits_at_end and content.get("TEST_TYPE") != "release" and "--train-iters" in settings:
                settings["--exit-interval"] = settings["--train-iters"]
            words = ["--exit-duration-in-mins", "225"]
            for flag, value in settings.items():
                words += [flag, *words_of_value(value, is_quoted)]
            own = (content.get("MODEL_ENV_VARS") or {}).get(key) or {}
            source = f"{path.relative_to(tree)}{'' if key == 'MODEL_ARGS' else ' ' + key}"
            command_ranks = int(own.get("GPUS_PER_NODE", ranks))
            if (model, case) not in started_by:  # its nodes are written nowhere: those that one replica fills
                command_ranks = max(command_ranks, ranks_of_replica(settings))
            yield Command(source, Path(program).name, words, command_ranks, environment)


def ranks_of_replica(settings: Mapping[str, Any]) -> int:
    """Return the processes that hold one copy of the model."""

    def size(axis: str, default: int = 1) -> int:
        return int(settings.get(f"--{axis}-size", default))

    of_sample = size("tensor-model-parallel") * size("context-parallel")
    of_experts = size("expert-model-parallel") * size("expert-tensor-parallel", size("tensor-model-parallel"))
    of_stage = math.lcm(of_sample, of_experts) if "--num-experts" in settings else of_sample
    return of_stage * size("pipeline-model-parallel")


VARIABLES = {
    "CHECKPOINT_SAVE_PATH": "/data/checkpoints",
    "CHECKPOINT_LOAD_PATH": "/data/checkpoints",
    "TENSORBOARD_PATH": "/data/tensorboard",
    "DATA_PATH": "/data",
    "DATA_CACHE_PATH": "/data/cache",
    "OUTPUT_PATH": "/data/output",
    "REPEAT": "1",
}


def words_of_value(value: Any, is_quoted: bool) -> list[str]:
    """Return the words that a value of a configuration becomes. is_quoted: the runner quotes values with blanks."""
    if value is True or value == "true":
        return []
    if value is None or value == "":
        return []
    if isinstance(value, list):  # [384 384 97656250] is a list of one text
        return " ".join(map(str, value)).split()
    text = str(value).lower() if isinstance(value, bool) else str(value).strip()
    if not is_quoted:
        return text.split()
    if re.fullmatch(r"\[[^\]]+\]", text):
        return shlex.split(text[1:-1])
    text = " ".join(shlex.split(text))  # as xargs does
    return [text] if re.search(r"[ |()]", text) else text.split()


def default_program(model: str) -> str:
    """Return the program of a configuration that no recipe names."""
    return {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py"}.get(
        model, "pretrain_gpt.py" if model in ("gpt", "moe", "mixtral") else ""
    )


def programs_of_recipes(tree: Path) -> dict[tuple[str, str], tuple[str, int]]:
    """Return (model, test case) -> (program, ranks), from the recipes of a release."""
    programs: dict[tuple[str, str], tuple[str, int]] = {}
    for path in sorted(tree.glob("tests/test_utils/recipes/**/*.yaml")):
        recipe = yaml.safe_load(path.read_text())
        spec = recipe.get("spec") or {}
        found = re.search(r"TRAINING_SCRIPT_PATH=\"?([\w./-]+)", spec.get("script") or "")
        if not found:
            continue
        for product in recipe.get("products") or []:
            inner = (product.get("products") or [{}])[0]
            sizes = {name: _first(inner.get(name, product.get(name, spec.get(name)))) for name in ("nodes", "gpus")}
            ranks = int(sizes["nodes"] or 1) * int(sizes["gpus"] or 8)
            for case in product.get("test_case") or []:
                programs.setdefault((spec["model"], case), (found[1], ranks))
    return programs


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


# ---- what the parsers say


def verdicts_of_release(tree: Path, commands: Sequence[Command]) -> list[str | None]:
    """Return for each command what the release's own parser says against it."""
    request = [[one.program, one.words, one.ranks, one.environment] for one in commands]
    script = Path(__file__).with_name("megatron_arguments.py")
    python = [sys.executable, "-W", "ignore", "-I", str(script), str(tree)]
    answer = subprocess.run(python, input=json.dumps(request), capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"{tree.name}: {answer.stderr[-2000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def our_problems(command: Command) -> list[str]:
    """Return what our parser and the rules between its settings say against a command."""
    from megatron.core.base.dataclass_flags import ConfigError
    from megatron.core.models.common.model_rules import BERT_RULES, GPT_RULES, T5_RULES
    from megatron.training.arguments import monitor_config
    from megatron.training.arguments.command_line import parse_args
    from megatron.training.arguments.validation import check

    rules = {"pretrain_gpt.py": GPT_RULES, "pretrain_bert.py": BERT_RULES, "pretrain_t5.py": T5_RULES}[command.program]
    monitor_config._is_installed = lambda package: True  # what is installed here says nothing about the flags
    problems: list[str] = []
    try:
        config = parse_args(command.words, None, defaults_of(command.program), rules.unread).config
    except ConfigError as error:
        return error.problems
    try:
        check(config, command.ranks)
    except ConfigError as error:
        problems += error.problems
    return problems + rules.problems(config, None)


def defaults_of(program: str) -> dict[str, Any]:
    """Return the defaults that our program of this name has."""
    import pretrain_t5

    if program == "pretrain_t5.py":
        return pretrain_t5.DEFAULTS | {"decoder_num_layers": 0}  # `pretrain` adds it for ModelType.encoder_and_decoder
    return {"tokenizer_type": "GPT2BPETokenizer" if program == "pretrain_gpt.py" else "BertWordPieceLowerCase"}


def reason(problem: str) -> str:
    """Return a problem without what differs from script to script."""
    text = re.sub(r"/data/\S+", "PATH", problem)
    return re.sub(r"(?<![\w-])\d[\d.,]*", "N", text)


# ---- the page


def collect(tag: str, clone: str, folder: Path) -> list[Command]:
    """Return the commands of a release that its own parser accepts; kept in `folder`."""
    kept = folder / f"{tag}.json"
    if kept.exists():
        return [Command(**one) for one in json.loads(kept.read_text())]
    tree = folder / tag
    if not tree.exists():
        tree.mkdir(parents=True)
        archive = subprocess.run(["git", "-C", clone, "archive", tag], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    programs = folder / "bin"
    if not programs.exists():
        write_recorders(programs)
    recorder = Recorder(tree, programs)
    commands = [
        *of_scripts(tree, recorder),
        *of_ci(tree, recorder),
        *of_recipes(tree, recorder),
        *of_functional_tests(tree),
    ]
    once = {json.dumps([one.program, one.words, one.ranks]): one for one in reversed(commands)}
    commands = list(reversed(once.values()))
    verdicts = verdicts_of_release(tree, commands)
    refused = Counter(verdict for verdict in verdicts if verdict)
    print(f"{tag}: {len(commands)} commands, {sum(refused.values())} refused by its own parser", file=sys.stderr)
    for verdict, count in refused.most_common(8):
        print(f"    {count} {verdict[:150]}", file=sys.stderr)
    accepted = [one for one, verdict in zip(commands, verdicts) if verdict is None]
    kept.write_text(json.dumps([asdict(one) for one in accepted]))
    return accepted


def date_of(tag: str, clone: str) -> str:
    """Return the day of a release's commit."""
    shown = subprocess.run(
        ["git", "-C", clone, "log", "-1", "--format=%cs", tag], capture_output=True, text=True, check=True
    )
    return shown.stdout.strip()


@dataclass
class Measured:
    """The counts of each release, and the problems of scripts in scope with an example of each."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def totals(self) -> Counter[str]:
        return sum(self.rows.values(), Counter())


def measure(clone: str, folder: Path) -> Measured:
    """Collect the commands of all releases into `folder`, and ask our parser."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    measured = Measured()
    for tag in TAGS:
        counts: Counter[str] = Counter()
        for command in collect(tag, clone, folder):
            problems = our_problems(command)
            counts["scripts"] += 1
            counts["accepted of all"] += not problems
            if command.asks_for():
                continue
            counts["in scope"] += 1
            counts["accepted"] += not problems
            for text in sorted({reason(problem) for problem in problems}):
                measured.reasons[text] += 1
                measured.examples.setdefault(text, f"{tag} {command.source}")
        measured.rows[tag] = counts
    return measured


def main() -> None:
    """Print a table of the releases, and one of the reasons for which scripts in scope are refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    measured = measure(arguments.clone, arguments.folder or Path(tempfile.mkdtemp()))

    print("| release | of | scripts | accepted | in scope | accepted of these |\n|---|---|--:|--:|--:|--:|")
    for tag, counts in measured.rows.items():
        numbers = " | ".join(str(counts[name]) for name in ("scripts", "accepted of all", "in scope", "accepted"))
        print(f"| {tag} | {date_of(tag, arguments.clone)} | {numbers} |")
    totals = measured.totals
    in_scope = totals["accepted"] / totals["in scope"]
    of_all = totals["accepted of all"] / totals["scripts"]
    print(
        f"| all | | {totals['scripts']} | {totals['accepted of all']}: {of_all:.1%} | {totals['in scope']} | "
        f"{totals['accepted']}: {in_scope:.1%} |"
    )
    print("\n| refused | because | such as |\n|--:|---|---|")
    for text, count in measured.reasons.most_common():
        print(f"| {count} | {text} | {measured.examples[text]} |")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    main()
