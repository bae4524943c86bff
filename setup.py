"""The package `megatron`, for `pip install -c constraints.txt -e .`: constraints.txt holds the tested versions."""

from setuptools import find_namespace_packages, setup

REQUIRED = [
    "torch>=2.11",  # tensors, autograd, and the communication behind megatron/core/comm.py
    "numpy",  # memory-mapped token files and the order of samples
    "tokenizers",  # byte-level BPE: to learn a vocabulary, and to turn text into tokens and back
    "matplotlib",  # the curves of tools/plot_run.py
    "PyYAML",  # settings from a file, --yaml-cfg; imported only then
]

EXTRAS = {
    "test": [
        "pytest",
        "pytest-xdist",  # runs tests/ on every core
        "hypothesis",  # inputs that nobody thought of, for the tests of properties
    ],
    "watch": ["tensorboard"],  # writes and shows the curves of --tensorboard-dir
    "sentencepiece": ["sentencepiece"],  # SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer
    "zstd": ["zstandard"],  # tools/preprocess_data.py --input corpus.jsonl.zst
    "parquet": ["pyarrow"],  # tools/preprocess_data.py --input corpus.parquet
    "nltk": ["nltk"],  # tools/preprocess_data.py --sentence-splitter nltk, for languages other than English
}

setup(
    name="megatron",
    version="0.1.0",
    description="Pretraining of transformers over tensor, sequence, pipeline and data parallel ranks, on a CPU too",
    license="Apache-2.0",
    package_dir={"": "."},  # an editable installation is then one line with this path, not an import hook
    packages=find_namespace_packages(include=["megatron", "megatron.*"], exclude=["*.__pycache__"]),
    python_requires=">=3.11",
    install_requires=REQUIRED,
    extras_require=EXTRAS,
)
