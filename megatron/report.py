"""Describe the machine for a bug report: `python -m megatron.report [--json]`.

It changes nothing and never fails: a part that cannot be determined says why, even if torch cannot be imported.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import megatron
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.tolerate_broken_output import until_reader_ends
from megatron.core.base.version import version_text
from megatron.core.parallel.launcher_environment import discover, threads_per_rank

PACKAGES = {  # package -> what needs it
    "torch": "everything",
    "numpy": "token files, the order of samples",
    "tokenizers": "HuggingFaceTokenizer, tools/train_tokenizer.py",
    "sentencepiece": "SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer",
    "PyYAML": "--yaml-cfg, definitions of tools/evaluate.py",
    "jinja2": "templates in definitions of tools/evaluate.py",
    "lm_eval": "tools/evaluate.py --lm-eval-tasks",
    "tensorboard": "--tensorboard-dir",
    "wandb": "--wandb-project",
    "matplotlib": "tools/plot_run.py",
    "zstandard": "tools/preprocess_data.py on .zst files",
    "pyarrow": "tools/preprocess_data.py on .parquet files",
    "nltk": "tools/preprocess_data.py --sentence-splitter nltk",
    "fsspec": "--save and --load with a URL",
    "s3fs": "--save and --load with s3://...",
    "transformers": "tools/benchmark.py beside other models",
    "grouped_gemm": "scripts that take it from grouped_gemm_util; nothing here uses it",
    "pytest": "tests",
    "pytest-xdist": "tests on all cores",
    "hypothesis": "tests of properties",
}
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)
_GIB = 2**30
_PACKAGE = Path(megatron.__file__).resolve().parent

Facts = dict[str, Any]


def collect() -> dict[str, Facts]:
    """Return all parts of the report by name. A part that fails is {"unknown": why}."""
    parts = (_system, _packages, _devices, _launcher, _threads, _memory, _disk)
    return {part.__name__.removeprefix("_"): _facts_or_error(part) for part in parts}


def _facts_or_error(part: Callable[[], Facts]) -> Facts:
    try:
        return part()
    except Exception as error:  # what is broken is what the bug report is about
        return {"unknown": f"{type(error).__name__}: {error}"}


def _system() -> Facts:
    return {
        "version": version_text(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "code": _commit(),
        "package": str(_PACKAGE),
        "hidden by it": ", ".join(_shadowed_packages()) or "no other package of its name",
    }


def _shadowed_packages() -> list[str]:
    """Return the other packages named `megatron` on the path (megatron-core, a Megatron-LM checkout)."""
    folders = (Path(entry or ".").resolve() / "megatron" for entry in sys.path)
    return [str(folder) for folder in dict.fromkeys(folders) if folder != _PACKAGE and (folder / "core").is_dir()]


def _commit() -> str:
    """Return the commit of this checkout, with `-dirty` if files have changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.check_output(command, cwd=_PACKAGE, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()
    except (OSError, subprocess.SubprocessError):
        return "not a git checkout"


def _packages() -> Facts:
    return {name: _version(name) or f"missing; for {purpose}" for name, purpose in PACKAGES.items()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Facts:
    torch = importlib.import_module("torch")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    part: Facts = {"accelerator": accelerator.type if accelerator else "none, the CPU computes"}
    part["threads of torch"] = torch.get_num_threads()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        for i in range(torch.accelerator.device_count()):
            free, total = module.mem_get_info(i)
            part[f"device {i}"] = f"{module.get_device_name(i)}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    versions = {}  # cuda, hip, ...: of what torch was built for
    for name, value in vars(torch.version).items():
        if isinstance(value, str) and not name.startswith(("_", "git")):
            versions[name] = value
    part["torch is built for"] = versions or "the CPU"
    part["back ends"] = importlib.import_module("megatron.core.parallel_state").available_backends()
    return part


def _launcher() -> Facts:
    part: Facts = {}
    try:
        launch = discover(os.environ)
        part["launcher"] = launch.launcher
        part["rank"] = f"{launch.rank} of {launch.world_size}, on its node {launch.local_rank} of {launch.local_size}"
        if launch.address is not None:
            part["meeting point"] = f"{launch.address}:{launch.port}"
    except ConfigError as error:
        part["launcher"] = f"refused: {error}"
    return part | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _threads() -> Facts:
    usable_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        usable_cores = len(os.sched_getaffinity(0))
    part: Facts = {"cores": os.cpu_count(), "cores this process may use": usable_cores}
    try:
        threads = threads_per_rank(os.environ, discover(os.environ), usable_cores)
        part["threads of a rank"] = threads or "those of torch"
    except ConfigError:
        part["threads of a rank"] = "unknown, see launcher"
    return part


def _memory() -> Facts:
    sizes = {}  # name -> GiB
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, rest = line.partition(":")
            sizes[name] = int(rest.split()[0]) / 2**20
    return {"total GiB": round(sizes["MemTotal"], 1), "available GiB": round(sizes["MemAvailable"], 1)}


def _disk() -> Facts:
    part: Facts = {}
    for name, folder in (("here", os.getcwd()), ("temporary", tempfile.gettempdir())):
        part[name] = f"{folder}, {shutil.disk_usage(folder).free / _GIB:.1f} GiB free, {_writable(folder)}"
    return part


def _writable(folder: str) -> str:
    """Say whether a file can be written, after writing one: permissions do not show a read-only or full file system."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
        return "writable"
    except OSError as error:
        return f"not writable ({error.strerror})"


def as_text(parts: dict[str, Facts]) -> str:
    """Return the report as text: each part has a heading and a line for each fact."""
    lines = []
    for name, part in parts.items():
        lines.append(name)
        width = max(map(len, part))
        lines += [f"  {key:<{width}}  {_value_as_text(value)}" for key, value in part.items()]
    return "\n".join(lines)


def _value_as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return the exit status, 0."""
    parser = argparse.ArgumentParser("python -m megatron.report", description="Describe this machine for a bug report.")
    parser.add_argument("--version", action="version", version=version_text(), help="print the version")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    parts = collect()
    print(json.dumps(parts, indent=2, default=str) if options.json else as_text(parts))
    return 0


if __name__ == "__main__":
    sys.exit(until_reader_ends(main))
