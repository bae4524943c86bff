"""List the index caches of data sets, and remove those that no run needs.

    python tools/index_cache.py --data-path data/books_text_document
    python tools/index_cache.py --data-path data/books_text_document data/wiki_text_document --remove-older-than 30
    python tools/index_cache.py --data-cache-path cache --remove 1f3a9c04 77b0

Each split, sequence length, seed and number of samples has arrays of its own, which stay until they are removed. A run with
the same settings builds removed ones again. Remove none that a run is about to open; a run that has opened them goes on.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import ConfigError, FlagConfig, NotNegative, option
from megatron.core.datasets.index_cache import CachedArrays, cached_arrays_in
from tools.errors import run_tool

_DAY = 24 * 60 * 60.0
_SHOWN_OF_KEY = 8  # characters
_SHORTEST_KEY = 4


@dataclass(frozen=True)
class IndexCacheConfig(FlagConfig):
    """Caches to look at."""

    data_path: list[str] | None = option(
        None, "prefixes of token files, whose caches are in PREFIX/cache", metavar="PREFIX"
    )
    data_cache_path: str | None = option(None, "the --data-cache-path of runs", metavar="DIR")
    remove: list[str] | None = option(
        None, "remove these: the first characters of their keys, at least four; or all", metavar="KEY"
    )
    remove_older_than: NotNegative | None = option(None, "remove those written more than so many days ago")

    def problems(self) -> Iterator[str]:
        if self.data_path is None and self.data_cache_path is None:
            yield "give --data-path, the data sets, or --data-cache-path, the folder"
        if self.remove is not None and self.remove_older_than is not None:
            yield "--remove and --remove-older-than choose what to remove; give one of them"
        for key in self.remove or []:
            if key != "all" and len(key) < _SHORTEST_KEY:
                yield f"--remove {key}: give at least {_SHORTEST_KEY} characters of the key, or all"


def folders_of(config: IndexCacheConfig) -> list[Path]:
    """Return the folders that may hold caches. Raises ConfigError for a --data-cache-path that is none."""
    folders = []
    for prefix in config.data_path or []:
        folders += sorted(path for path in Path(f"{prefix}/cache").glob("*") if path.is_dir())
    if config.data_cache_path is not None:
        if not Path(config.data_cache_path).is_dir():
            raise ConfigError(f"--data-cache-path {config.data_cache_path} is not a folder; give that of the runs")
        folders.append(Path(config.data_cache_path))
    return list(dict.fromkeys(folders))


def chosen(arrays: list[CachedArrays], config: IndexCacheConfig) -> list[CachedArrays]:
    """Return what is to be removed. Raises ConfigError for a key that none, or more than one, has."""
    if config.remove_older_than is not None:
        latest = time.time() - config.remove_older_than * _DAY
        return [one for one in arrays if one.written < latest]
    result = []
    for key in config.remove or []:
        matches = arrays if key == "all" else [one for one in arrays if one.key.startswith(key)]
        if not matches or (key != "all" and len({one.key for one in matches}) > 1):
            wrong = "no cache here has that key" if not matches else f"{len(matches)} caches have keys that begin so"
            raise ConfigError(f"--remove {key}: {wrong}; nothing is removed")
        result += [one for one in matches if one not in result]
    return result


def line_of(arrays: CachedArrays) -> str:
    """Return one set of arrays as a line: key, what it is of, size, age."""
    fields = arrays.fields
    parts = [f"{fields['class']} {fields['split']}"]
    names = {
        "num_samples": "samples",
        "size": "samples",
        "seq_length": "seq-length",
        "max_length": "tokens",
        "seed": "seed",
    }
    for name, word in names.items():
        if fields.get(name) is not None:
            parts.append(f"{word} {fields[name]}")
    if fields.get("ids_range") is not None:
        first, past = fields["ids_range"]
        parts.append(f"elements {first} to {past}")
    if isinstance(fields.get("shares"), list):
        parts.append(f"{len(fields['shares'])} data sets")
    days = (time.time() - arrays.written) / _DAY
    return f"{arrays.key[:_SHOWN_OF_KEY]}  {', '.join(parts)}: {arrays.nbytes:,} bytes, {days:.1f} days old"


def run(config: IndexCacheConfig) -> None:
    """List the caches, and remove those that are chosen."""
    arrays_of = {folder: cached_arrays_in(folder) for folder in folders_of(config)}
    arrays = [one for found in arrays_of.values() for one in found]
    removed = chosen(arrays, config)
    for folder, found in arrays_of.items():
        if found:
            print(f"{folder}:")
        for one in found:
            print(f"  {'removed ' if one in removed else ''}{line_of(one)}")
    freed = sum(one.nbytes for one in removed)
    total = sum(one.nbytes for one in arrays)
    for one in removed:
        one.remove()
    print(
        f"{len(arrays)} cache(s), {total:,} bytes" + (f"; removed {len(removed)}, {freed:,} bytes" if removed else "")
    )


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 if the caches were listed."""
    return run_tool(
        __file__, __doc__, [IndexCacheConfig], run, arguments, "what is listed as removed may be there still"
    )


if __name__ == "__main__":
    sys.exit(main())
