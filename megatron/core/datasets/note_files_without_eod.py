"""Check whether documents end with the end-of-document token, in a few documents of each file."""

from collections.abc import Iterable, Iterator

import numpy as np

from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset

_MAX_CHECKED = 8  # documents of a file; one that ends with the token is enough


def sampled_last_tokens(indexed: IndexedDataset) -> Iterator[int]:
    """Yield the last token of a few documents, spread from the first to the last of the file.

    Empty ones are left out.
    """
    count = indexed.document_count
    for d in np.unique(np.linspace(0, count - 1, min(count, _MAX_CHECKED)).astype(np.int64)):
        first, past = indexed.document_indices[d : d + 2].tolist()  # its sequences
        if past == first:
            continue
        length = int(indexed.sequence_lengths[past - 1])
        if length:
            yield int(indexed.get(past - 1, length - 1, 1)[0])


def files_without_eod_note(files: Iterable[IndexedDataset], eod_id: int) -> str | None:
    """Return a note about the files in which no checked document ends with `eod_id`; None if there is no such file."""
    names = []
    for file in files:
        tokens = list(sampled_last_tokens(file))
        if tokens and eod_id not in tokens:
            names.append(file.prefix)
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"documents of {names[0]}{more} do not end with the end-of-document token ({eod_id}), as if preprocessed without "
        "--append-eod: a sample goes on from one to the next without a mark"
    )
