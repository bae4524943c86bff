"""Write the source text of Python's standard library as JSON lines, as a corpus that is on every machine.

    python tools/stdlib_corpus.py --output corpus.jsonl --max-mb 16

A line is {"text": ...} of a file, sorted by name; with --docstrings of a distinct docstring. Tests, installed packages, empty
files, files that are not UTF-8, and code point tables are left out. The same Python release gives the same bytes.
"""

import ast
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import FlagConfig, Positive, option
from megatron.core.storage.atomic_file import atomic_file
from tools.errors import missing, run_tool

# Folders of test data, installed packages and tables.
_SKIPPED_FOLDERS = set(
    ["test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "lib2to3"]
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "pydoc_data/")  # generated files


@dataclass(frozen=True)
class StdlibCorpusConfig(FlagConfig):
    """Standard-library corpus."""

    output: str | None = option(None, "JSON-lines file to write", metavar="FILE", required=True)
    max_mb: Positive = option(32.0, "stop at this many megabytes (10^6 bytes) of text")
    docstrings: bool = option(False, "docstrings only, one per document")

    def problems(self) -> list[str]:
        return missing(self, "output")


def source_files(library: Path) -> list[Path]:
    """Return the corpus's files, sorted by name, in the same order on every machine."""
    names = sorted(path.relative_to(library).as_posix() for path in library.rglob("*.py"))
    return [library / name for name in names if is_wanted(name)]


def is_wanted(name: str) -> bool:
    """Whether a file, named relative to the library, is in the corpus: `json/decoder.py`, not `test/test_json.py`."""
    *folders, _ = name.split("/")
    return not _SKIPPED_FOLDERS & set(folders) and not name.startswith(_SKIPPED_PREFIXES)


def texts(files: list[Path], max_bytes: float) -> Iterator[str]:
    """Yield the files' texts, up to `max_bytes` in total."""
    total = 0
    for path in files:
        content = path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip():
            continue
        total += len(content)
        if total > max_bytes:
            return
        yield text


def docstrings(sources: Iterable[str]) -> Iterator[str]:
    """Yield each docstring of the modules, classes and functions of `sources` once.

    A source that this release of Python cannot parse has none.
    """
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    seen: set[str] = set()
    for source in sources:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes, which later releases refuse
            try:
                tree = ast.parse(source)
            except SyntaxError:
                continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and text not in seen:
                seen.add(text)
                yield text


def run(config: StdlibCorpusConfig) -> None:
    """Write the corpus and print its size."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = texts(source_files(library), config.max_mb * 1e6)
    corpus = list(docstrings(sources) if config.docstrings else sources)
    if not corpus:
        raise ValueError(f"no source text in {library}, or none below --max-mb ({config.max_mb})")
    Path(config.output).absolute().parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(config.output) as file:
        file.writelines(json.dumps({"text": text}).encode() + b"\n" for text in corpus)
    megabytes = sum(len(text.encode()) for text in corpus) / 1e6
    kind = "docstrings" if config.docstrings else "files"
    print(f"wrote {config.output}: {len(corpus)} {kind}, {megabytes:.1f} MB of text", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [StdlibCorpusConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())
