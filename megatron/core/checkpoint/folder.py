"""The folder of a run's checkpoints: finding an iteration to load, publishing a saved one, cleaning up after a killed save.

    iter_N.partial/     being written: never read; the next save removes it
    iter_N/             complete: a folder gets this name only then
    iter_N.replaced/    complete: the previous save of iteration N; removed once iter_N/ is complete, else renamed back
    iter_N.damaged/     found damaged by a run that then went back to an older one; never read or removed
    iter_N.1.partial/   the rest of a folder that could not be removed; the next save removes it

Paths only, no torch.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

from megatron.core.checkpoint import format
from megatron.core.checkpoint.format import CheckpointError, Manifest
from megatron.core.storage import files

_MOST_POINTER = 64  # bytes: a number of 18 digits, and room for spaces that an editor leaves
_CHECKED = 3  # line ends, at least, of a pointer whose line ends are a check digit; fewer are those of an editor
_MOST_MANIFEST = 1 << 30  # bytes: some four million pieces


class Found(NamedTuple):
    """The iteration to load."""

    iteration: int
    folder: Path
    warning: str = ""  # why the choice may surprise


def find(root: Path, iteration: int | None = None) -> Found:
    """The folder of `iteration` below `root`; default: the pointer's iteration, or the newest without a pointer."""
    if not files.is_folder(root):
        raise CheckpointError(root, "is not a folder", f"give --load the folder that holds {format.LATEST}")
    if iteration is not None:
        return Found(iteration, _folder_of(root, iteration))
    named, newest = latest_iteration(root), newest_iteration(root)
    if named is None and newest is None:
        raise CheckpointError(root, f"holds no {format.LATEST}, so no checkpoint was finished in it", _which(root))
    chosen, warning = newest if named is None else named, ""
    if named is None:
        warning = (
            f"{root} holds no {format.LATEST}, as when a run is killed while it saves its first checkpoint: iteration {newest} "
            "is loaded, the newest that is complete"
        )
    elif newest is not None and newest > named:
        warning = (
            f"{root / format.LATEST} names iteration {named}, and iteration {newest} is there too: {named} is loaded. "
            f"--ckpt-step {newest} goes on from {newest}, before a run saves over it"
        )
    return Found(chosen, _folder_of(root, chosen), warning)


def saved_iterations(root: Path) -> list[int]:
    """The iterations with a manifest, ascending."""
    found = ((format.iteration_of(path.name.removesuffix(format.REPLACED)), path) for path in _iterations(root))
    return sorted({number for number, path in found if number is not None and files.is_file(path / format.MANIFEST)})


def newest_iteration(root: Path) -> int | None:
    """The newest iteration with a manifest, whatever the pointer says."""
    return max(saved_iterations(root), default=None)


def latest_iteration(root: Path) -> int | None:
    """The iteration in the pointer file; None without the file."""
    path = root / format.LATEST
    if not files.is_file(path):
        return None
    text = files.read_start(path, _MOST_POINTER + 1).decode(errors="replace")
    match = re.fullmatch("[ \t]*([0-9]{1,18})[ \t\r]*(\n[ \t\r\n]*)?", text)
    if match is None:
        raise CheckpointError(path, f"says {text.strip()!r:.60}, not the number of an iteration", _which(root))
    iteration, ends = int(match[1]), text.count("\n")
    if ends >= _CHECKED and text != pointer_text(iteration):
        wrong = f"is damaged: it says {iteration}, and its {ends} line ends are the check digit of another number"
        raise CheckpointError(path, wrong, _which(root))
    return iteration


def pointer_text(iteration: int) -> str:
    """The pointer to an iteration. The number of its line ends is a check digit, in which any one flipped bit shows; programs
    and shells that read the number do not see them. A pointer written by hand has fewer."""
    return str(iteration) + "\n" * (_CHECKED + sum(map(int, str(iteration))) % 5)


def _folder_of(root: Path, iteration: int) -> Path:
    final = root / format.folder_name(iteration)
    for folder in (final, _aside(final)):  # the second: killed while it was saved again
        if files.is_file(folder / format.MANIFEST):
            return folder
    if files.is_folder(final):
        advice = "if it is of another format, convert it; else load another iteration"
        raise CheckpointError(final, f"has no {format.MANIFEST}", advice)
    raise CheckpointError(final, "does not exist", _which(root))


def _which(root: Path) -> str:
    there = ", ".join(str(number) for number in saved_iterations(root))
    return f"name one of the iterations that are there: {there}" if there else "no iteration is there; check the path"


# ---------------------------------------------------------------- one iteration


def read_manifest(folder: Path) -> str:
    """The text of a folder's manifest, unchecked."""
    path = folder / format.MANIFEST
    try:
        if (size := size_of_file(path) or 0) > _MOST_MANIFEST:
            wrong = f"has {size} bytes, and a manifest has at most {_MOST_MANIFEST}"
            raise CheckpointError(path, wrong, format.DAMAGED)
        return files.read_start(path, size).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"cannot be read ({error})", format.advice_after(error)) from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError unless the folder's name has the manifest's iteration and all files have their sizes."""
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
    """The size in bytes; None if there is no readable file."""
    try:
        found = files.at(path).stat(path)
    except OSError:
        return None
    return found.size if found is not None and found.is_file else None


def is_whole(folder: Path) -> bool:
    """Whether the manifest is undamaged and every file has its size; reads no tensors."""
    try:
        check_files(folder, format.parse_manifest(read_manifest(folder), folder))
    except CheckpointError:
        return False
    return True


# ---------------------------------------------------------------- whoever saves


def publish(partial: Path, iteration: int) -> None:
    """Makes the complete folder `partial` the latest checkpoint. If it is killed at any point, a complete checkpoint is found.

    A previous folder of the same iteration is renamed; `clear_leftovers` removes it.
    """
    root, final = partial.parent, partial.parent / format.folder_name(iteration)
    pointer = root / (format.LATEST + format.PARTIAL)
    files.write_synced(pointer, pointer_text(iteration))  # first: a full disk must fail before anything is renamed
    on = files.at(root)
    if files.exists(final):
        if files.is_file(_aside(final) / format.MANIFEST):  # whole, and `final` damaged, or it would have been cleared
            make_way(final)
        else:
            make_way(_aside(final))
            on.rename(final, _aside(final))  # a load between this line and the next finds it there
    on.rename(partial, final)
    on.sync_folder(root)
    on.rename(pointer, root / format.LATEST)
    on.sync_folder(root)


def make_way(path: Path) -> None:
    """Removes a folder that is not read any more; renames it if it cannot be removed, for example another user's."""
    if not files.exists(path):
        return
    try:
        remove(path)
    except OSError:
        take_name_away(path)


def take_name_away(path: Path) -> Path:
    """Renames a folder to one that is never read and goes with the next save; returns its new path."""
    final = path.parent / path.name.partition(".")[0]
    names = (final.with_name(f"{final.name}.{number}{format.PARTIAL}") for number in itertools.count(1))
    free = next(name for name in names if not files.exists(name))
    files.at(path).rename(path, free)
    return free


def set_aside(folder: Path) -> Path:
    """Renames a damaged folder, so that nothing takes it for a checkpoint and its iteration can be saved again; its new path."""
    names = (
        f"{folder.name}{number}{format.SPOILED}"
        for number in itertools.chain([""], (f".{i}" for i in itertools.count(1)))
    )
    free = next(path for path in map(folder.with_name, names) if not files.exists(path))
    files.at(folder).rename(folder, free)
    return free


def clear_leftovers(root: Path) -> list[str]:
    """Removes the leftovers of killed saves; returns problems for a warning. Keeps the only complete folder of an iteration.

    Only one process may save below `root`.
    """
    problems, folders = [], _named(root, format.PARTIAL) + _named(root, format.REPLACED)
    for path in [root / (format.LATEST + format.PARTIAL), *folders]:
        try:
            if not _bring_back(path):
                remove(path)
        except OSError as error:
            problems.append(
                f"{path}, which a save left that did not end, cannot be removed ({error}); remove it by hand"
            )
    return problems


def _bring_back(left: Path) -> bool:
    """Whether `left` is the only complete folder of its iteration; renames it back unless a damaged folder has the name."""
    final = left.with_suffix("")
    if left.suffix != format.REPLACED or not files.is_file(left / format.MANIFEST) or is_whole(final):
        return False
    if not files.exists(final):
        files.at(left).rename(left, final)
    return True


def _named(root: Path, suffix: str) -> list[Path]:
    """The folders `iter_N` with this suffix, including the numbered ones of `make_way`."""
    name = re.compile(rf"iter_[0-9]{{7,}}(\.[0-9]+)?{re.escape(suffix)}")
    return [path for path in _iterations(root) if name.fullmatch(path.name)]


def _iterations(root: Path) -> list[Path]:
    """What is below `root` under the name of an iteration, in the order of names; none without a folder."""
    if not files.is_folder(root):
        return []
    return [root / name for name in files.at(root).names(root) if name.startswith("iter_")]


def _aside(final: Path) -> Path:
    return final.with_name(final.name + format.REPLACED)


def remove(path: Path) -> None:
    """Removes a file or folder if it exists; the manifest first, so that a half-removed folder never looks complete."""
    if files.is_folder(path) and not files.at(path).is_link(path):
        files.remove_if_there(path / format.MANIFEST)
        files.remove_tree(path)
    else:
        files.remove_if_there(path)
