"""Merge token files into one: PREFIX.bin and .idx with the documents of all inputs, in order.

    python tools/merge_datasets.py --input data/books_text_document data/wiki_text_document --output-prefix data/both

A folder as --input means all token files in it, sorted by name. The tool uses constant memory; the output files get their
names when they are complete.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import FlagConfig, option
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.note_files_without_eod import sampled_last_tokens
from tools.errors import missing, run_tool

_SEQUENCES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class MergeConfig(FlagConfig):
    """Token files to merge."""

    input: list[str] | None = option(
        None, "prefixes of PREFIX.bin and PREFIX.idx, or folders with such files; they are merged in this order"
    )
    output_prefix: str | None = option(None, "prefix of the merged files")

    def problems(self) -> list[str]:
        return missing(self, "input", "output_prefix")


def prefixes_of(names: list[str]) -> list[str]:
    """Return the prefixes of token files, given as prefixes, files or folders.

    A name is a prefix even if a folder has the same name: training creates PREFIX/cache beside PREFIX.idx. Raises
    ValueError for a folder without token files.
    """
    prefixes = []
    for name in names:
        is_prefix = any(Path(f"{name}{ending}").is_file() for ending in (".bin", ".idx"))
        if Path(name).is_dir() and not is_prefix:
            in_folder = sorted(str(path.with_suffix("")) for path in Path(name).glob("*.idx"))
            if not in_folder:
                raise ValueError(f"--input {name}: no token file (.idx) in this folder")
            prefixes += in_folder
        elif name.endswith((".bin", ".idx")):
            prefixes.append(str(Path(name).with_suffix("")))
        else:
            prefixes.append(name)
    return prefixes


def merge(prefixes: list[str], output_prefix: str) -> IndexedDatasetWriter:
    """Write the merged files. Raises ValueError for incompatible inputs, before anything is written."""
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if len({dataset.dtype for dataset in datasets}) > 1:
        kinds = ", ".join(f"{dataset.prefix} {dataset.dtype}" for dataset in datasets)
        raise ValueError(f"the token types differ ({kinds}): the files were made with different tokenizers")
    if Path(f"{output_prefix}.idx").resolve() in [Path(dataset.index_path).resolve() for dataset in datasets]:
        raise ValueError(f"--output-prefix {output_prefix} is one of the inputs; choose another")
    Path(output_prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(output_prefix, datasets[0].dtype) as writer:
        for dataset in datasets:
            _append(dataset, writer)
    return writer


def without_ends(prefixes: list[str]) -> list[str]:
    """Return the inputs without an end-of-document token: their documents end in different tokens.

    Inputs with several sequences in a document are not examined.
    """
    result = []
    for dataset in map(IndexedDataset, prefixes):
        is_sequence_per_document = len(dataset) == dataset.document_count
        if is_sequence_per_document and len(set(sampled_last_tokens(dataset))) > 1:
            result.append(dataset.prefix)
    return result


def _append(dataset: IndexedDataset, writer: IndexedDatasetWriter) -> None:
    """Copy whole documents, about a million sequences at a time, for constant memory."""
    borders = dataset.document_indices  # [documents + 1], in sequences
    offset = 0  # bytes
    first = 0  # document
    with open(dataset.data_path, "rb") as file:
        while first < dataset.document_count:
            limit = borders[first] + _SEQUENCES_AT_ONCE
            stop = max(first + 1, int(np.searchsorted(borders, limit, side="right")) - 1)
            lengths = dataset.sequence_lengths[borders[first] : borders[stop]]
            writer.copy_documents(file, offset, lengths, np.diff(borders[first : stop + 1]))
            offset += int(lengths.sum(dtype=np.int64)) * dataset.dtype.itemsize
            first = stop


def run(config: MergeConfig) -> None:
    """Merge the files and print what was written."""
    prefixes = prefixes_of(config.input)
    merged = merge(prefixes, config.output_prefix)
    counts = f"{merged.documents} documents, {merged.tokens} tokens of {len(prefixes)} files"
    if unmarked := without_ends(prefixes):
        print(
            f"documents of {', '.join(unmarked)} end in different tokens, as if preprocessed without --append-eod: no token "
            "marks the border between documents",
            file=sys.stderr,
        )
    print(f"wrote {config.output_prefix}: {counts}")


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [MergeConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())
