"""The folder of a run's checkpoints: which iterations are whole, which one is loaded, and what a killed save left there.

    iter_N.partial/     being written: never read, and removed by whoever saves next
    iter_N/             whole, since a folder gets this name only when it is
    iter_N.replaced/    whole too: iteration N before it was saved again; removed once iter_N/ is whole, else it comes back
    iter_N.1.partial/   what could not be removed of another folder and stood in a save's way; removed likewise

Paths only; no torch in this file.
"""

import itertools
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from megatron.core.checkpoint import format
from megatron.core.checkpoint.format import CheckpointError, Manifest
from megatron.core.storage.atomic import sync_folder, write_synced

_MOST_POINTER = 64  # bytes: a number of 18 digits, and room for spaces that an editor leaves
_MOST_MANIFEST = 1 << 30  # bytes: some four million pieces


class Found(NamedTuple):
    """The iteration to load."""

    iteration: int
    folder: Path
    warning: str = ""  # what is odd about the choice


def find(root: Path, iteration: int | None = None) -> Found:
    """Where `iteration` lies below `root`: by default the one that the pointer names, or the newest where there is no pointer."""
    if not root.is_dir():
        raise CheckpointError(root, "is not a folder", f"give --load the folder that holds {format.LATEST}")
    if iteration is not None:
        return Found(iteration, _folder_of(root, iteration))
    named, newest = latest_iteration(root), newest_iteration(root)
    if named is None and newest is None:
        raise CheckpointError(root, f"holds no {format.LATEST}, so no checkpoint was finished in it", _which(root))
    if named is None:
        return Found(
            newest,
            _folder_of(root, newest),
            f"{root} holds no {format.LATEST}, as when a run is killed while it saves its first checkpoint: iteration {newest} "
            "is loaded, the newest that is complete",
        )
    warning = ""
    if newest is not None and newest > named:
        warning = (
            f"{root / format.LATEST} names iteration {named}, and iteration {newest} is there too: {named} is loaded. To go on "
            f"from {newest}, write its number into that file before a run saves over it"
        )
    return Found(named, _folder_of(root, named), warning)


def saved_iterations(root: Path) -> list[int]:
    """The iterations whose folders hold a manifest, in order."""
    found = ((format.iteration_of(path.name.removesuffix(format.REPLACED)), path) for path in root.glob("iter_*"))
    return sorted({number for number, path in found if number is not None and (path / format.MANIFEST).is_file()})


def newest_iteration(root: Path) -> int | None:
    """The last of the iterations that are there, whatever the pointer names."""
    return max(saved_iterations(root), default=None)


def latest_iteration(root: Path) -> int | None:
    """The iteration that the pointer names; None where there is no pointer."""
    path = root / format.LATEST
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        text = file.read(_MOST_POINTER + 1).decode(errors="replace").strip()
    if not re.fullmatch("[0-9]{1,18}", text):
        raise CheckpointError(path, f"says {text!r:.60}, not the number of an iteration", _which(root))
    return int(text)


def _folder_of(root: Path, iteration: int) -> Path:
    final = root / format.folder_name(iteration)
    for folder in (final, _aside(final)):  # the second: killed while it was saved again
        if (folder / format.MANIFEST).is_file():
            return folder
    if final.is_dir():
        advice = "if it is of another format, convert it; else load another iteration"
        raise CheckpointError(final, f"has no {format.MANIFEST}", advice)
    raise CheckpointError(final, "does not exist", _which(root))


def _which(root: Path) -> str:
    there = ", ".join(str(number) for number in saved_iterations(root))
    return f"name one of the iterations that are there: {there}" if there else "no iteration is there; check the path"


# ---------------------------------------------------------------- one iteration


def read_manifest(folder: Path) -> str:
    """The text of a folder's manifest, not yet checked."""
    path = folder / format.MANIFEST
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MOST_MANIFEST:
                wrong = f"has {size} bytes, and a manifest has at most {_MOST_MANIFEST}"
                raise CheckpointError(path, wrong, format.DAMAGED)
            return file.read(size).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"cannot be read ({error})", format.DAMAGED) from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise unless the folder is the one that the manifest speaks of, with all its files in their length."""
    if format.iteration_of(folder.name.removesuffix(format.REPLACED)) != manifest.iteration:
        raise CheckpointError(folder, f"holds iteration {manifest.iteration}", "give the folder its old name back")
    sizes = {name: size_of_file(folder / name) for name in manifest.files}
    problems = [
        f"{name} " + ("is missing" if sizes[name] is None else f"has {sizes[name]} bytes, not {expected}")
        for name, expected in manifest.files.items()
        if sizes[name] != expected
    ]
    if problems:
        raise CheckpointError(folder, problems, format.DAMAGED)


def size_of_file(path: Path) -> int | None:
    """Its bytes; None where no file is, or none that can be looked at."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _is_whole(folder: Path) -> bool:
    try:
        check_files(folder, format.parse_manifest(read_manifest(folder), folder))
    except CheckpointError:
        return False
    return True


# ---------------------------------------------------------------- whoever saves


def publish(partial: Path, iteration: int) -> None:
    """Make the complete folder `partial` the latest checkpoint; wherever this is killed, a whole one is found.

    An older folder of the same iteration stays, set aside: `clear_leftovers` removes it.
    """
    root, final = partial.parent, partial.parent / format.folder_name(iteration)
    pointer = root / (format.LATEST + format.PARTIAL)
    write_synced(pointer, f"{iteration}\n")  # first, so that a full disk is found while nothing is renamed
    if final.exists():
        if (_aside(final) / format.MANIFEST).is_file():  # whole, and `final` damaged, or it would have been cleared
            make_way(final)
        else:
            make_way(_aside(final))
            final.rename(_aside(final))  # a load between this line and the next finds it there
    partial.rename(final)
    sync_folder(root)
    os.replace(pointer, root / format.LATEST)
    sync_folder(root)


def make_way(path: Path) -> None:
    """Remove a folder that nobody reads; where it cannot be removed, as when another user owns it, give it another name."""
    if not path.exists():
        return
    try:
        _remove(path)
    except OSError:
        final = path.parent / path.name.partition(".")[0]
        names = (final.with_name(f"{final.name}.{number}{format.PARTIAL}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


def clear_leftovers(root: Path) -> list[str]:
    """Undo what a save left that was killed; -> what could not be removed, for a warning. Never the only whole folder of an
    iteration.

    Only for a process that alone saves below `root`.
    """
    problems = []
    for path in [
        root / (format.LATEST + format.PARTIAL),
        *_named(root, format.PARTIAL),
        *_named(root, format.REPLACED),
    ]:
        try:
            if not _bring_back(path):
                _remove(path)
        except OSError as error:
            problems.append(
                f"{path}, which a save left that did not end, cannot be removed ({error}); remove it by hand"
            )
    return problems


def _bring_back(left: Path) -> bool:
    """Whether `left` holds the only whole folder of its iteration, which then has its name again unless a damaged one has it."""
    if left.suffix != format.REPLACED or not (left / format.MANIFEST).is_file() or _is_whole(left.with_suffix("")):
        return False
    if not left.with_suffix("").exists():
        left.rename(left.with_suffix(""))
    return True


def _named(root: Path, suffix: str) -> list[Path]:
    """The folders `iter_N` with this suffix, numbered ones (`make_way`) included."""
    paths = root.glob(f"iter_*{suffix}")
    return [path for path in paths if re.fullmatch(r"iter_[0-9]{7,}(\.[0-9]+)?", path.name.removesuffix(suffix))]


def _aside(final: Path) -> Path:
    return final.with_name(final.name + format.REPLACED)


def _remove(path: Path) -> None:
    """A file or folder, if it is there; the manifest first, so that what is left half-way is never taken for whole."""
    if path.is_dir() and not path.is_symlink():
        (path / format.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
