"""What is installed: the name, the console commands, a build's programs, and the refusal to share a folder with megatron-core."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import megatron
from megatron import core
from megatron.console_scripts import program_of, programs_folder
from megatron.core import package_info

ROOT = Path(__file__).parents[3]
PROGRAMS = sorted(
    path
    for path in [*ROOT.glob("*.py"), *(ROOT / "tools").glob("*.py")]
    if 'if __name__ == "__main__":' in path.read_text()
)


def assigned(name: str) -> list[str]:
    """A list of setup.py's."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"setup.py has no {name}")


def test_every_program_is_a_console_command():
    assert [ROOT / f"{name}.py" for name in assigned("PROGRAMS")] == PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_command_runs_the_program_of_its_name(program):
    command = f"/anywhere/bin/megatron-{program.stem.replace('_', '-')}"
    assert program_of(command, programs_folder()) == program
    with pytest.raises(FileNotFoundError, match=r"no no_such_thing\.py"):
        program_of("megatron-no-such-thing", programs_folder())


def test_the_name_is_one_of_its_own():
    name = next(line for line in (ROOT / "setup.py").read_text().splitlines() if line.startswith("    name=")).split(
        '"'
    )[1]
    assert name not in ("megatron", "megatron-core", "megatron-lm")
    assert name in (ROOT / "megatron" / "__init__.py").read_text() and name in (ROOT / "README.md").read_text()
    assert (ROOT / "megatron" / "py.typed").is_file()


THEIR_INFO = "__package_name__ = 'megatron_core'\n"  # of megatron-core's package_info.py


@pytest.fixture
def folder(tmp_path) -> Path:
    """Of an installed package: the files of ours that tell whose it is."""
    folder = tmp_path / "megatron"
    for name in ("__init__.py", "core/__init__.py", "core/package_info.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "megatron" / name, folder / name)
    return folder


def imported_from(folder: Path) -> None:
    """Run this project's megatron/__init__.py where a copy lies."""
    spec = importlib.util.spec_from_file_location("megatron_elsewhere", folder / "__init__.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def installed(folder: Path, *files: str) -> Path:
    """What pip leaves beside the package of an installed megatron-core with these files."""
    info = folder.parent / "megatron_core-0.16.1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in files))
    return info


def refuses(folder: Path, *named: Path) -> None:
    with pytest.raises(ImportError) as error:
        imported_from(folder)
    for word in (folder, *named, "pip uninstall --yes megatron-core megatron-anywhere"):
        assert str(word) in str(error.value)


@pytest.mark.parametrize("text", [THEIR_INFO, ""])
def test_megatron_core_over_this_project_is_refused(folder, text):
    """Its package_info replaces ours, whatever it says."""
    imported_from(folder)
    (folder / "core" / "package_info.py").write_text(text)
    refuses(folder, folder / "core" / "package_info.py")
    refuses(folder, installed(folder, "megatron/core/package_info.py"))


def test_this_project_over_megatron_core_is_refused(folder):
    """Our package_info replaces its own; files that only it has stay, and pip's record of them."""
    left = folder / "core" / "models" / "bert" / "pooler.py"
    left.parent.mkdir(parents=True)
    left.touch()
    refuses(folder, left)
    left.unlink()
    imported_from(folder)
    refuses(folder, installed(folder, "megatron_core-0.16.1.dist-info/METADATA", "megatron/core/enums.py"))


def test_megatron_core_in_another_folder_does_no_harm(folder):
    """In editable form pip records a path to it alone."""
    installed(folder, "__editable__.megatron_core-0.16.1.pth", "megatron_core-0.16.1.dist-info/METADATA")
    imported_from(folder)


@pytest.mark.parametrize("name", ["__init__.py", "package_info.py"])
def test_what_an_uninstalled_megatron_core_took_away_is_said(folder, name):
    (folder / "core" / name).unlink()
    with pytest.raises(ImportError, match=rf"(?s)core/{name}.*--force-reinstall"):
        imported_from(folder)


def test_what_tells_the_two_projects_apart_is_so():
    assert megatron._OURS in (ROOT / "megatron" / "core" / "package_info.py").read_text().splitlines()
    assert not [name for name in megatron._ONLY_THEIRS if (ROOT / "megatron" / "core" / name).exists()]


def test_package_info_is_what_is_installed():
    assert f'    name="{package_info.__package_name__.replace("_", "-")}",' in (ROOT / "setup.py").read_text()
    assert (
        core.__version__ == package_info.__version__ == "0.16.1+anywhere"
    )  # which interface of Megatron's this one follows


@pytest.mark.full
def test_a_build_has_the_programs_and_runs_them_away_from_the_repository(tmp_path):
    """Processes, because another folder is to be the package."""
    built = tmp_path / "built"
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(built)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    programs = built / "megatron" / "_programs"
    assert [programs / path.relative_to(ROOT) for path in PROGRAMS] == [
        path
        for path in sorted(programs.rglob("*.py"))
        if 'if __name__ == "__main__":' in path.read_text() and path.parent.name in ("tools", "_programs")
    ]
    assert (built / "megatron" / "py.typed").is_file()
    command = (
        "import sys; sys.argv[0] = 'bin/megatron-plot-schedule'; from megatron.console_scripts import main; main()"
    )
    drawn = subprocess.run(
        [sys.executable, "-c", command, "--microbatches", "4"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(built)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bubble" in drawn.stdout


@pytest.mark.full
def test_a_second_build_has_the_examples_and_no_file_that_is_gone(tmp_path):
    """As a build folder keeps a module, a program and a recipe of an earlier build."""
    built = tmp_path / "built"
    gone = [
        built / "megatron" / name
        for name in ("gone.py", "core/gone.py", "_programs/tools/gone.py", "_programs/gone.yaml")
    ]
    for path in gone:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(built)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    assert not [path for path in gone if path.exists()]
    named: set[str] = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        named |= set(re.findall(r"examples/[\w./-]+\.(?:yaml|py|sh|sbatch|md)", page.read_text()))
    programs = built / "megatron" / "_programs"
    assert len(named) > 10 and not [name for name in named if not (programs / name).is_file()]
    assert not list(programs.rglob("__pycache__"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources, so that no file of an earlier build gets into it."""
    sources = tmp_path_factory.mktemp("sources")
    for name in ("megatron", "tools", "examples"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"):
        shutil.copy(path, sources)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(sources / "wheels"), str(sources)], check=True)
    (built,) = (sources / "wheels").glob("*.whl")
    return built


@pytest.mark.full
def test_a_wheel_has_every_file_of_the_package(wheel):
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron").rglob("*") if path.is_file()}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("megatron/")}
    assert {name for name in files if "__pycache__" not in name} == {n for n in in_wheel if "/_programs/" not in n}


@pytest.mark.full
def test_an_installed_wheel_works_in_another_folder(wheel, tmp_path):
    """In an environment of its own, which finds the libraries of this one, but not what is installed here in editable form."""
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    libraries = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "libraries.pth").write_text("\n".join(libraries))

    def said(*command: str | Path) -> str:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=elsewhere, env=clean, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "--tensor-model-parallel-size" in said(environment / "bin" / "megatron-pretrain-gpt", "--help")
    code = """
from dataclasses import fields
import megatron
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.deepspeed.settings import KEYS
print(megatron.__file__)
print(*(len(fields(one)) for one in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig, GPTDatasetConfig)))
print(KEYS.answers["gradient_clipping"].status)
"""
    assert said(python, "-c", code).splitlines() == [
        str(packages / "megatron" / "__init__.py"),
        "243 50 27 34",
        "works",
    ]
