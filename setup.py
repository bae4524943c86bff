"""The distribution megatron-anywhere, whose package is `megatron`: `pip install -c constraints.txt -e .`, with the tested versions."""

import re
import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

REQUIRED = [
    "torch>=2.11,<3",  # tensors, autograd, and the communication behind megatron/core/parallel/collectives.py
    "numpy",  # memory-mapped token files and the order of samples
    "tokenizers",  # byte-level BPE: to learn a vocabulary, and to turn text into tokens and back
    "sentencepiece",  # SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer: the tokenizers of many published models
    "matplotlib",  # the curves of tools/plot_run.py
    "PyYAML",  # settings from a file, --yaml-cfg; imported only then
]

EXTRAS = {
    "test": [
        "pytest",
        "pytest-xdist",  # runs tests/ on every core
        "hypothesis",  # inputs that nobody thought of, for the tests of properties
        "s3fs",  # the client of the extra s3, against a double of its server
    ],
    "chat": ["jinja2>=3.1.6"],  # chat templates, for --sft on conversations
    "docs": ["mkdocs"],  # the documents as a site, mkdocs.yml
    "s3": ["s3fs"],  # --save and --load of s3://BUCKET/FOLDER; fsspec, by which it is asked, comes with torch
    "watch": ["tensorboard"],  # writes and shows the curves of --tensorboard-dir
    "zstd": ["zstandard"],  # tools/preprocess_data.py --input corpus.jsonl.zst
    "parquet": ["pyarrow"],  # tools/preprocess_data.py --input corpus.parquet
    "benchmark": ["transformers"],  # a peer of tools/benchmark.py
    "evaluate": ["jinja2", "PyYAML", "lm_eval==0.4.13"],  # definitions of tools/evaluate.py, and --lm-eval-tasks
    "nltk": ["nltk"],  # tools/preprocess_data.py --sentence-splitter nltk, for languages other than English
}

# Each is a console command too: tools/plot_run is `megatron-plot-run`.
PROGRAMS = [
    "finetune_gpt",
    "pretrain_bert",
    "pretrain_gpt",
    "pretrain_t5",
    "tools/benchmark",
    "tools/checkpoint_convert",
    "tools/checkpoint_inspect",
    "tools/configure",
    "tools/data_plan",
    "tools/estimate_memory",
    "tools/evaluate",
    "tools/generate",
    "tools/index_cache",
    "tools/inspect_dataset",
    "tools/lora",
    "tools/merge_datasets",
    "tools/plot_context",
    "tools/plot_run",
    "tools/plot_schedule",
    "tools/prepare_cache",
    "tools/preprocess_data",
    "tools/replay_step",
    "tools/stdlib_corpus",
    "tools/train_tokenizer",
]
COMMANDS = {f"megatron-{Path(program).name.replace('_', '-')}": "megatron.console_scripts:main" for program in PROGRAMS}
COMMANDS["megatron-report"] = "megatron.report:main"
COMMANDS["megatron-doctor"] = "megatron.doctor:main"
COMMANDS["megatron-on-cpu"] = "megatron.on_cpu:main"


# Beside the package, in a wheel's megatron/_programs: the programs, and the examples and recipes that the documents name.
PROGRAM_FILES = ["finetune_gpt.py", "pretrain_*.py", "tools/**/*.py", "examples/**/*"]

KEYWORDS = [
    "deep learning",
    "language model",
    "pretraining",
    "transformer",
    "Megatron",
    "DeepSpeed",
    "PyTorch",
    "ZeRO",
    "CPU",
]
CLASSIFIERS = [
    "Development Status :: 4 - Beta",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3 :: Only",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Programming Language :: Python :: 3.14",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]


class BuildWithPrograms(build_py):
    """A wheel has the programs in megatron/_programs; an editable installation uses them where they are."""

    def run(self) -> None:
        package = Path(self.build_lib) / "megatron"
        if not self.editable_mode and package.is_dir():
            shutil.rmtree(package)  # an earlier build may have files that are gone since
        super().run()
        if self.editable_mode:
            return
        for pattern in PROGRAM_FILES:
            for path in Path().glob(pattern):
                if path.is_file() and path.suffix != ".pyc":
                    copy = package / "_programs" / path
                    self.mkpath(str(copy.parent))
                    self.copy_file(str(path), str(copy))


setup(
    name="megatron-anywhere",
    version=re.search(r'__version__ = "(.+)"', Path("megatron/core/base/version.py").read_text(encoding="utf-8"))[1],
    description="Pretraining of transformers over tensor, sequence, pipeline and data parallel ranks, on a CPU too",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The contributors of megatron-anywhere",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=KEYWORDS,
    classifiers=CLASSIFIERS,
    package_dir={"": "."},  # an editable installation is then one line with this path, not an import hook
    packages=find_namespace_packages(include=["megatron", "megatron.*"], exclude=["*.__pycache__"]),
    package_data={"megatron": ["py.typed"]},
    entry_points={"console_scripts": [f"{command} = {function}" for command, function in COMMANDS.items()]},
    cmdclass={"build_py": BuildWithPrograms},
    python_requires=">=3.11",
    install_requires=REQUIRED,
    extras_require=EXTRAS,
)
