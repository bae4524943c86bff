"""The folder of a run's checkpoints: finding an iteration to load, and what there is to say of one.

    iter_N/manifest.json    iteration N is complete
    iter_N.replaced/        complete: the previous save of iteration N, while it is saved again

`commit.py` has the other names. Paths only, no torch.
"""

import re
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing import format
from megatron.core.dist_checkpointing.format import CheckpointError, Manifest
from megatron.core.storage import file_layer

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
    if not file_layer.is_folder(root):
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
    found = ((format.iteration_of(path.name.removesuffix(format.REPLACED)), path) for path in iterations_in(root))
    return sorted(
        {number for number, path in found if number is not None and file_layer.is_file(path / format.MANIFEST)}
    )


def newest_iteration(root: Path) -> int | None:
    """The newest iteration with a manifest, whatever the pointer says."""
    return max(saved_iterations(root), default=None)


def latest_iteration(root: Path) -> int | None:
    """The iteration in the pointer file; None without the file."""
    path = root / format.LATEST
    if not file_layer.is_file(path):
        return None
    text = file_layer.read_start(path, _MOST_POINTER + 1).decode(errors="replace")
    match = re.fullmatch("[ \t]*([0-9]{1,18})[ \t\r]*(\n[ \t\r\n]*)?", text)
    if match is None:
        raise CheckpointError(path, f"says {text.strip()!r:.60}, not the number of an iteration", _which(root))
    iteration, ends = int(match[1]), text.count("\n")
    if ends >= _CHECKED and text != pointer_text(iteration):
        wrong = f"is damaged: it says {iteration}, and its {ends} line ends are the check digit of another number"
        raise CheckpointError(path, wrong, _which(root))
    return iteration


def pointer_text(iteration: int) -> str:
    """The pointer to an iteration. The number of its line ends is a check digit, in which any one flipped bit shows;
    programs
    and shells that read the number do not see them. A pointer written by hand has fewer."""
    return str(iteration) + "\n" * (_CHECKED + sum(map(int, str(iteration))) % 5)


def _folder_of(root: Path, iteration: int) -> Path:
    final = root / format.folder_name(iteration)
    for folder in (final, aside_of(final)):  # the second: killed while it was saved again
        if file_layer.is_file(folder / format.MANIFEST):
            return folder
    if file_layer.is_folder(final):
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
        if (size := file_layer.size_of_file(path) or 0) > _MOST_MANIFEST:
            wrong = f"has {size} bytes, and a manifest has at most {_MOST_MANIFEST}"
            raise CheckpointError(path, wrong, format.DAMAGED)
        return file_layer.read_start(path, size).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"cannot be read ({error})", format.advice_after(error)) from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError unless the folder's name has the manifest's iteration and all files have their sizes."""
    if format.iteration_of(folder.name.removesuffix(format.REPLACED)) != manifest.iteration:
        raise CheckpointError(folder, f"holds iteration {manifest.iteration}", "give the folder its old name back")
    try:
        sizes = file_layer.sizes_of(folder, manifest.files)
    except OSError as error:
        raise CheckpointError(folder, f"cannot be read ({error})", format.advice_after(error)) from error
    problems = [
        f"{name} " + ("is missing" if sizes[name] is None else f"has {sizes[name]} bytes, not {expected}")
        for name, expected in manifest.files.items()
        if sizes[name] != expected
    ]
    if problems:
        raise CheckpointError(folder, problems, format.DAMAGED)


def is_whole(folder: Path) -> bool:
    """Whether the manifest is undamaged and every file has its size; reads no tensors."""
    try:
        check_files(folder, format.parse_manifest(read_manifest(folder), folder))
    except CheckpointError:
        return False
    return True


def iterations_in(root: Path) -> list[Path]:
    """What is below `root` under the name of an iteration, in the order of names; none without a folder."""
    if not file_layer.is_folder(root):
        return []
    return [root / name for name in file_layer.at(root).names(root) if name.startswith("iter_")]


def aside_of(final: Path) -> Path:
    """Where the previous save of an iteration lies while it is saved again."""
    return final.with_name(final.name + format.REPLACED)


def remove(path: Path) -> None:
    """Removes a file or folder if it exists; the manifest first, so that a half-removed folder never looks complete."""
    if file_layer.is_folder(path) and not file_layer.at(path).is_link(path):
        file_layer.remove_if_there(path / format.MANIFEST)
        file_layer.remove_tree(path)
    else:
        file_layer.remove_if_there(path)
