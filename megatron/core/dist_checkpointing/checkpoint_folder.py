"""The folder of a run's checkpoints: choosing the iteration to load, and reading and checking one of them.

    iter_N/manifest.json    iteration N is complete
    iter_N.replaced/        complete: the previous save of iteration N, while it is saved again

`publish_by_rename_and_cleanup.py` has the other names. Paths only, no torch.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing import manifest_format
from megatron.core.dist_checkpointing.manifest_format import CheckpointError, Manifest
from megatron.core.storage import file_layer

_MAX_POINTER_BYTES = 64  # a number of 18 digits, and room for spaces that an editor leaves
_MIN_CHECKED_ENDS = 3  # line ends, at least, of a pointer whose line ends are a check digit; an editor leaves fewer
_MAX_MANIFEST_BYTES = 1 << 30  # some four million pieces


class CheckpointChoice(NamedTuple):
    """The iteration to load."""

    iteration: int
    folder: Path
    warning: str = ""  # why the choice may surprise


def find(root: Path, iteration: int | None = None) -> CheckpointChoice:
    """Return the folder of `iteration` below `root`; by default of the pointer's, or of the newest without a pointer.

    Raises CheckpointError if there is none.
    """
    if not file_layer.is_folder(root):
        advice = f"give --load a folder of --save, which holds {manifest_format.LATEST}, or one of a Hugging Face model"
        raise CheckpointError(root, "is not a folder" if file_layer.exists(root) else "does not exist", advice)
    if iteration is not None:
        return CheckpointChoice(iteration, _folder_of(root, iteration))
    latest = iteration_in_pointer_file(root)
    newest = newest_iteration(root)
    if latest is None and newest is None:
        wrong = f"holds no {manifest_format.LATEST}, so no checkpoint was finished in it"
        raise CheckpointError(root, wrong, _other_iterations(root))
    if latest is None:
        warning = (
            f"{root} holds no {manifest_format.LATEST}, as when a run is killed while it saves its first checkpoint: "
            f"iteration {newest} is loaded, the newest that is complete"
        )
        return CheckpointChoice(newest, _folder_of(root, newest), warning)
    warning = ""
    if newest is not None and newest > latest:
        warning = (
            f"{root / manifest_format.LATEST} names iteration {latest}, and iteration {newest} is there too: "
            f"{latest} is loaded. --ckpt-step {newest} goes on from {newest}, before a run saves over it"
        )
    return CheckpointChoice(latest, _folder_of(root, latest), warning)


def saved_iterations(root: Path) -> list[int]:
    """Return the iterations with a manifest, ascending."""
    iterations = set()
    for path in paths_with_iter_prefix(root):
        iteration = manifest_format.iteration_of(path.name.removesuffix(manifest_format.REPLACED))
        if iteration is not None and file_layer.is_file(path / manifest_format.MANIFEST):
            iterations.add(iteration)
    return sorted(iterations)


def newest_iteration(root: Path) -> int | None:
    """Return the newest iteration with a manifest, whatever the pointer says."""
    return max(saved_iterations(root), default=None)


def iteration_in_pointer_file(root: Path) -> int | None:
    """Return the iteration in the pointer file; None without the file.

    Raises CheckpointError if the file is damaged.
    """
    path = root / manifest_format.LATEST
    if not file_layer.is_file(path):
        return None
    text = file_layer.read_start(path, _MAX_POINTER_BYTES + 1).decode(errors="replace")
    match = re.fullmatch("[ \t]*([0-9]{1,18})[ \t\r]*(\n[ \t\r\n]*)?", text)
    if match is None:
        wrong = f"says {text.strip()!r:.60}, not the number of an iteration"
        raise CheckpointError(path, wrong, _other_iterations(root))
    iteration = int(match[1])
    line_ends = text.count("\n")
    if line_ends >= _MIN_CHECKED_ENDS and text != pointer_text_with_check_digit(iteration):
        wrong = f"is damaged: it says {iteration}, and its {line_ends} line ends are the check digit of another number"
        raise CheckpointError(path, wrong, _other_iterations(root))
    return iteration


def pointer_text_with_check_digit(iteration: int) -> str:
    """Return the content of the pointer to an iteration: the number, and line ends as a check digit.

    Any one flipped bit shows in the number of line ends; programs and shells that read the number do not see them. A
    pointer written by hand has fewer line ends.
    """
    check_digit = sum(map(int, str(iteration))) % 5
    return str(iteration) + "\n" * (_MIN_CHECKED_ENDS + check_digit)


def _folder_of(root: Path, iteration: int) -> Path:
    final = root / manifest_format.folder_name(iteration)
    for folder in (final, replaced_folder(final)):  # the second: a save of the same iteration was killed
        if file_layer.is_file(folder / manifest_format.MANIFEST):
            return folder
    if file_layer.is_folder(final):
        advice = "if it is of another format, convert it; else load another iteration"
        raise CheckpointError(final, f"has no {manifest_format.MANIFEST}", advice)
    raise CheckpointError(final, "does not exist", _other_iterations(root))


def _other_iterations(root: Path) -> str:
    """Return the advice to load another iteration."""
    iterations = ", ".join(str(number) for number in saved_iterations(root))
    if iterations:
        return f"name one of the iterations that are there: {iterations}"
    return "no iteration is there; check the path"


# ---------------------------------------------------------------- one iteration


def read_manifest(folder: Path) -> str:
    """Return the text of a folder's manifest, unchecked. Raises CheckpointError if it cannot be read."""
    path = folder / manifest_format.MANIFEST
    try:
        size = file_layer.size_of_file(path) or 0
        if size > _MAX_MANIFEST_BYTES:
            wrong = f"has {size} bytes, and a manifest has at most {_MAX_MANIFEST_BYTES}"
            raise CheckpointError(path, wrong, manifest_format.DAMAGED)
        return file_layer.read_start(path, size).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"cannot be read ({error})", manifest_format.advice_after(error)) from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless the folder's name has the manifest's iteration and all files have their sizes."""
    if manifest_format.iteration_of(folder.name.removesuffix(manifest_format.REPLACED)) != manifest.iteration:
        raise CheckpointError(folder, f"holds iteration {manifest.iteration}", "give the folder its old name back")
    try:
        sizes = file_layer.sizes_of(folder, manifest.files)
    except OSError as error:
        raise CheckpointError(folder, f"cannot be read ({error})", manifest_format.advice_after(error)) from error
    problems = []
    for name, expected in manifest.files.items():
        if sizes[name] is None:
            problems.append(f"{name} is missing")
        elif sizes[name] != expected:
            problems.append(f"{name} has {sizes[name]} bytes, not {expected}")
    if problems:
        raise CheckpointError(folder, problems, manifest_format.DAMAGED)


def is_complete(folder: Path) -> bool:
    """Return whether the manifest is undamaged and every file has its size; reads no tensors."""
    try:
        check_files(folder, manifest_format.parse_manifest(read_manifest(folder), folder))
    except CheckpointError:
        return False
    return True


def paths_with_iter_prefix(root: Path) -> list[Path]:
    """Return all paths below `root` whose names begin like an iteration's, sorted by name; none without a folder."""
    if not file_layer.is_folder(root):
        return []
    return [root / name for name in file_layer.backend_of(root).names(root) if name.startswith("iter_")]


def replaced_folder(final: Path) -> Path:
    """Return the name of an iteration's previous save while it is saved again: iter_N.replaced."""
    return final.with_name(final.name + manifest_format.REPLACED)


def damaged_folder(final: Path) -> Path:
    """Return the name for an iteration that was found damaged: iter_N.damaged.

    If that exists, the name is the first free one of iter_N.1.damaged, iter_N.2.damaged, ...
    """
    numbers = itertools.chain([""], (f".{number}" for number in itertools.count(1)))
    candidates = (final.with_name(f"{final.name}{number}{manifest_format.SPOILED}") for number in numbers)
    return next(path for path in candidates if not file_layer.exists(path))


def remove(path: Path) -> None:
    """Remove a file or folder if it exists; the manifest first, so that a half-removed folder never looks complete."""
    if file_layer.is_folder(path) and not file_layer.backend_of(path).is_link(path):
        file_layer.remove_if_there(path / manifest_format.MANIFEST)
        file_layer.remove_tree(path)
    else:
        file_layer.remove_if_there(path)
