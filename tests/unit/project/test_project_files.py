"""Files that other programs read, none of which runs here: the hosted CI's, the Dockerfile, pre-commit, mkdocs, the citation.

Every path and every command in them is there, and facts that stand in two of them are the same.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatron
from megatron import report

ROOT = Path(__file__).parents[3]
SETUP = (ROOT / "setup.py").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
EXTRAS = next(
    ast.literal_eval(node.value)
    for node in ast.parse(SETUP).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRAS"
)


OLDEST_TORCH = re.search(r'"torch>=([\d.]+),', SETUP)[1]
OF_THE_SYSTEM = ("useradd", "chown")


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def check_command(command: str) -> None:
    """That the program is there, or comes with a pinned package, and that what it names in the repository exists."""
    program, *words = shlex.split(command)
    if "/" in program:
        assert os.access(ROOT / program, os.X_OK), f"{program} is no program"
        return
    assert program in ("pip", "python", *OF_THE_SYSTEM) or program in PINNED, f"{program}: where does it come from?"
    if program == "python":
        assert words[0] == "-m", command
        assert words[1] in PINNED or (ROOT / (words[1].replace(".", "/") + ".py")).is_file(), command
    if program == "pip":
        check_pip(words)


def check_pip(words: list[str]) -> None:
    assert words.pop(0) in ("install", "wheel")
    while words:
        word = words.pop(0)
        if word == "-c":
            assert (ROOT / words.pop(0)).is_file()
        elif word in ("--wheel-dir", "--find-links"):
            assert words.pop(0) == "wheels"  # which the job itself makes
        elif word in (".", "megatron-anywhere", f"torch=={OLDEST_TORCH}.0"):
            pass
        elif word.startswith(".["):
            assert set(word[2:-1].split(",")) <= EXTRAS.keys(), word
        elif not word.startswith("-"):
            assert word in PINNED, f"{word} has no version in constraints.txt"


def docker_instructions() -> Iterator[tuple[str, str]]:
    for line in re.sub(r"\\\n", " ", DOCKERFILE).splitlines():
        if line and not line.startswith("#"):
            yield tuple(line.split(" ", 1))


def test_the_dockerfile_names_what_is_there():
    instructions = list(docker_instructions())
    assert instructions[0][0] == "FROM" and ":" in instructions[0][1]
    assert {name for name, _ in instructions} == {"FROM", "WORKDIR", "ENV", "COPY", "RUN", "USER", "CMD"}
    assert [rest for name, rest in instructions if name == "USER"] not in ([], ["root"])
    for name, rest in instructions:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in shlex.split(rest)[:-1]), rest
        if name == "RUN":
            check_command(rest)
        if name == "CMD":
            check_command(shlex.join(ast.literal_eval(rest)))


def test_the_hosted_ci_calls_the_local_one():
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands and "mkdocs build --strict" in commands
    for command in commands:
        check_command(command)
    for job in jobs.values():
        assert all("@v" in step["uses"] for step in job["steps"] if "uses" in step)
        versions = job.get("strategy", {}).get("matrix", {}).get("python", ["3.11"])
        assert all(tuple(map(int, version.split("."))) >= (3, 11) for version in versions)


def test_the_hosted_ci_has_the_oldest_torch_the_newest_python_and_a_wheel():
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    commands = {name: " ".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()}
    assert f"torch=={OLDEST_TORCH}.0" in commands["oldest-torch"] and "pytest" in commands["oldest-torch"]
    assert "pip wheel" in commands["wheel"] and "tests/wheel.sh" in commands["wheel"]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', SETUP)
    versions = jobs["tests"]["strategy"]["matrix"]["python"]
    assert (versions[0], versions[-1]) == (named[0], named[-1]) and f'python_requires=">={named[0]}"' in SETUP


def test_nobody_is_named_and_no_address_is_given_that_does_not_exist():
    citation = (ROOT / "CITATION.cff").read_text()
    author = re.search(r'author="(.+)"', SETUP)[1]
    assert author == "The contributors of megatron-anywhere" and f"- name: {author}" in citation
    for text in (SETUP, citation, DOCKERFILE, (ROOT / "pyproject.toml").read_text(), (ROOT / "mkdocs.yml").read_text()):
        assert "://" not in text.replace("s3://", "") and "@" not in text


def test_pre_commit_runs_the_pinned_ruff():
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"].split(" --")[0] for hook in repository["hooks"]] == ["ruff check", "ruff format"]
    assert {name for hook in repository["hooks"] for name in hook["additional_dependencies"]} == {
        f"ruff=={PINNED['ruff']}"
    }


def test_a_command_that_is_not_there_would_be_found():
    for command in (
        "tests/walk.sh",
        "tox",
        "python -m megatron.nothing",
        "pip install -e .[nothing]",
        "pip install tox",
    ):
        with pytest.raises(AssertionError):
            check_command(command)


@pytest.mark.parametrize(
    "name", ["Dockerfile", ".github/workflows/ci.yml", ".pre-commit-config.yaml", "mkdocs.yml", "MANIFEST.in"]
)
def test_comments_name_what_is_there(name):
    for path in re.findall(r"(?:examples|docs|tools|tests|megatron)/[\w./-]*\w", (ROOT / name).read_text()):
        assert (ROOT / path).exists(), f"{name} names {path}"


def test_the_source_distribution_takes_what_exists():
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        command, *patterns = line.split()
        if command in ("include", "graft"):
            assert all(list(ROOT.glob(pattern)) for pattern in patterns), line


def test_the_version_is_one():
    version = megatron.__version__
    citation = read_yaml("CITATION.cff")
    assert (
        citation["version"] == version == report.collect()["system"]["version"].split()[-1]
        and {"cff-version", "message", "title", "authors"} <= citation.keys()
    )
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["title"].split(":")[0] in SETUP
    said = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.strip() == version


def test_the_site_has_every_page_once_and_the_tutorial_before_the_reference():
    def pages(entries: list[dict[str, Any]]) -> Iterator[str]:
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else pages(value)

    site = read_yaml("mkdocs.yml")
    found = list(pages(site["nav"]))
    outside = ["index.md", "CONTRIBUTING.md", "CHANGELOG.md"]  # docs/site_hooks.py brings them in
    assert sorted(found) == sorted([path.name for path in (ROOT / "docs").glob("*.md")] + outside)
    assert found[:2] == ["index.md", "tutorial.md"] and site["strict"] is True
    assert all((ROOT / hook).is_file() for hook in site["hooks"])
