"""Publishing a saved iteration, and removing what is not needed any more or was left by a killed save.

    iter_N.partial/     being written: never read; the next save removes it
    iter_N/             complete: a folder gets this name only then
    iter_N.replaced/    complete: the previous save of iteration N; removed once iter_N/ is complete, else renamed back
    iter_N.damaged/     found damaged by a run that then went back to an older one; never read or removed
    iter_N.1.partial/   the rest of a folder that could not be removed; the next save removes it

An object store renames nothing: there `object_store_commit.py` does what these functions say. Paths only, no torch.
"""

import errno
import itertools
import re
from pathlib import Path

from megatron.core.dist_checkpointing import format, object_store_commit
from megatron.core.dist_checkpointing.checkpoint_folder import aside_of, is_whole, iterations_in, pointer_text, remove
from megatron.core.storage import file_layer


def begin(partial: Path) -> None:
    """Makes the empty folder in which the ranks of a save meet."""
    if file_layer.is_object(partial):
        object_store_commit.begin_in_place(partial)
        return
    make_way(partial)
    file_layer.at(partial).make_folder(partial)


def file_for(partial: Path, rank: int) -> Path:
    """Where a rank writes its pieces. Raises OSError where it does not see what `begin` has made."""
    if file_layer.is_object(partial):
        return object_store_commit.object_for(partial, rank)
    if not file_layer.is_folder(partial):
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(partial))
    return partial / format.file_name(rank, ".bin")


def folder_of_pieces(partial: Path) -> Path:
    """The folder of all that `file_for` says."""
    return partial.with_suffix("") if file_layer.is_object(partial) else partial


def is_ours(final: Path) -> bool:
    """Whether the folder of an iteration may be replaced: it holds a checkpoint, or objects of saves that have not ended."""
    if file_layer.is_file(final / format.MANIFEST):
        return True
    return file_layer.is_object(final) and object_store_commit.are_objects_of_saves(final)


def publish(partial: Path, iteration: int) -> None:
    """Makes the complete folder `partial` the latest checkpoint. If it is killed at any point, a complete checkpoint is
    found.

    A previous folder of the same iteration is renamed; `clear_leftovers` removes it.
    """
    if file_layer.is_object(partial):
        object_store_commit.publish_in_place(partial, iteration)
        return
    root, final = partial.parent, partial.parent / format.folder_name(iteration)
    pointer = root / (format.LATEST + format.PARTIAL)
    file_layer.write_synced(pointer, pointer_text(iteration))  # first: a full disk must fail before anything is renamed
    on = file_layer.at(root)
    if file_layer.exists(final):
        if file_layer.is_file(
            aside_of(final) / format.MANIFEST
        ):  # whole, and `final` damaged, or it would have been cleared
            make_way(final)
        else:
            make_way(aside_of(final))
            on.rename(final, aside_of(final))  # a load between this line and the next finds it there
    on.rename(partial, final)
    on.sync_folder(root)
    on.rename(pointer, root / format.LATEST)
    on.sync_folder(root)


def make_way(path: Path) -> None:
    """Removes a folder that is not read any more; renames it if it cannot be removed, for example another user's."""
    if not file_layer.exists(path):
        return
    try:
        remove(path)
    except OSError:
        take_name_away(path)


def take_name_away(path: Path) -> Path:
    """Renames a folder to one that is never read and goes with the next save; returns its new path."""
    final = path.parent / path.name.partition(".")[0]
    names = (final.with_name(f"{final.name}.{number}{format.PARTIAL}") for number in itertools.count(1))
    free = next(name for name in names if not file_layer.exists(name))
    file_layer.at(path).rename(path, free)
    return free


def delete(folder: Path) -> None:
    """Removes a checkpoint that is not wanted any more. If it is killed at any point, nothing looks complete, and the
    next save
    removes the rest."""
    if file_layer.is_object(folder):
        object_store_commit.delete_in_place(folder)
    else:
        remove(take_name_away(folder))


def set_aside(folder: Path) -> Path:
    """Renames a damaged folder, so that nothing takes it for a checkpoint and its iteration can be saved again; its
    new path."""
    if file_layer.is_object(folder):
        return object_store_commit.set_aside_in_place(folder)
    names = (
        f"{folder.name}{number}{format.SPOILED}"
        for number in itertools.chain([""], (f".{i}" for i in itertools.count(1)))
    )
    free = next(path for path in map(folder.with_name, names) if not file_layer.exists(path))
    file_layer.at(folder).rename(folder, free)
    return free


def clear_leftovers(root: Path) -> list[str]:
    """Removes the leftovers of killed saves; returns problems for a warning. Keeps the only complete folder of an iteration.

    Only one process may save below `root`.
    """
    if file_layer.is_object(root):
        return object_store_commit.clear_in_place(root)
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
    if left.suffix != format.REPLACED or not file_layer.is_file(left / format.MANIFEST) or is_whole(final):
        return False
    if not file_layer.exists(final):
        file_layer.at(left).rename(left, final)
    return True


def _named(root: Path, suffix: str) -> list[Path]:
    """The folders `iter_N` with this suffix, including the numbered ones of `make_way`."""
    name = re.compile(rf"iter_[0-9]{{7,}}(\.[0-9]+)?{re.escape(suffix)}")
    return [path for path in iterations_in(root) if name.fullmatch(path.name)]
