"""Publishing a saved iteration, and removing what is not needed any more or was left by a killed save.

    iter_N.partial/     being written: never read; the next save removes it
    iter_N/             complete: a folder gets this name only then
    iter_N.replaced/    complete: the previous save of iteration N; removed once iter_N/ is complete, else renamed back
    iter_N.damaged/     found damaged by a run that then resumed from an older one; never read or removed
    iter_N.1.partial/   the rest of a folder that could not be removed; the next save removes it

An object store cannot rename; there `object_store_commit.py` does the work of each function. Paths only, no torch.
"""

import errno
import itertools
import re
from pathlib import Path

from megatron.core.dist_checkpointing import manifest_format, object_store_commit
from megatron.core.dist_checkpointing.checkpoint_folder import (
    damaged_folder,
    is_complete,
    paths_with_iter_prefix,
    pointer_text_with_check_digit,
    remove,
    replaced_folder,
)
from megatron.core.storage import file_layer


def begin(partial: Path) -> None:
    """Make the empty folder into which all ranks of a save write."""
    if file_layer.is_object(partial):
        object_store_commit.write_save_record(partial)
        return
    remove_or_rename(partial)
    file_layer.backend_of(partial).make_folder(partial)


def rank_data_file(partial: Path, rank: int) -> Path:
    """Return the path to which a rank writes its pieces.

    Raises OSError if the rank does not see what `begin` has made.
    """
    if file_layer.is_object(partial):
        return object_store_commit.object_path(partial, rank)
    if not file_layer.is_folder(partial):
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(partial))
    return partial / manifest_format.file_name(rank, ".bin")


def rank_data_folder(partial: Path) -> Path:
    """Return the folder of all ranks' `rank_data_file`."""
    return partial.with_suffix("") if file_layer.is_object(partial) else partial


def is_ours(final: Path) -> bool:
    """Return whether an iteration's folder holds a checkpoint, or objects of unfinished saves.

    A save may replace it then.
    """
    if file_layer.is_file(final / manifest_format.MANIFEST):
        return True
    return file_layer.is_object(final) and object_store_commit.holds_only_saved_objects(final)


def publish(partial: Path, iteration: int) -> None:
    """Make the complete folder `partial` the latest checkpoint. A kill at any point leaves a complete checkpoint.

    A previous folder of the same iteration is renamed; `try_clear_leftovers` removes it.
    """
    if file_layer.is_object(partial):
        object_store_commit.publish_objects(partial, iteration)
        return
    root = partial.parent
    final = root / manifest_format.folder_name(iteration)
    backend = file_layer.backend_of(root)

    # write the new pointer under a temporary name: a full disk must fail before anything is renamed
    pointer = root / (manifest_format.LATEST + manifest_format.PARTIAL)
    file_layer.write_and_sync_content(pointer, pointer_text_with_check_digit(iteration))

    # free the final name
    if file_layer.exists(final):
        replaced = replaced_folder(final)
        if file_layer.is_file(replaced / manifest_format.MANIFEST):
            # `replaced` is complete and `final` is damaged; otherwise `try_clear_leftovers` had removed `replaced`.
            remove_or_rename(final)
        else:
            remove_or_rename(replaced)
            backend.rename(final, replaced)  # a load between this line and the next finds it under this name

    # publish: the folder, then the pointer to it
    backend.rename(partial, final)
    backend.sync_folder(root)
    backend.rename(pointer, root / manifest_format.LATEST)
    backend.sync_folder(root)


def remove_or_rename(path: Path) -> None:
    """Remove a folder that is not read any more; rename it if it cannot be removed, for example another user's."""
    if not file_layer.exists(path):
        return
    try:
        remove(path)
    except OSError:
        rename_to_leftover(path)


def rename_to_leftover(path: Path) -> Path:
    """Rename a folder so that it is never read and the next save removes it; return its new path."""
    final = path.parent / path.name.partition(".")[0]
    candidates = (final.with_name(f"{final.name}.{number}{manifest_format.PARTIAL}") for number in itertools.count(1))
    free = next(path for path in candidates if not file_layer.exists(path))
    file_layer.backend_of(path).rename(path, free)
    return free


def delete(folder: Path) -> None:
    """Delete a checkpoint. After a kill at any point nothing looks complete, and the next save removes the rest."""
    if file_layer.is_object(folder):
        object_store_commit.delete_objects(folder)
    else:
        remove(rename_to_leftover(folder))


def set_aside_damaged(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is never read and its iteration can be saved again.

    Return its new path.
    """
    if file_layer.is_object(folder):
        return object_store_commit.set_aside_damaged_manifest(folder)
    free = damaged_folder(folder)
    file_layer.backend_of(folder).rename(folder, free)
    return free


def try_clear_leftovers(root: Path) -> list[str]:
    """Remove the leftovers of killed saves; return problems for a warning.

    The only complete folder of an iteration stays. Only one process may save below `root`.
    """
    if file_layer.is_object(root):
        return object_store_commit.try_clear_leftover_objects(root)
    pointer = root / (manifest_format.LATEST + manifest_format.PARTIAL)
    problems = []
    for path in [
        pointer,
        *_folders_with(root, manifest_format.PARTIAL),
        *_folders_with(root, manifest_format.REPLACED),
    ]:
        try:
            if not _restore(path):
                remove(path)
        except OSError as error:
            problems.append(
                f"{path}, which a save left that did not end, cannot be removed ({error}); remove it by hand"
            )
    return problems


def _restore(leftover: Path) -> bool:
    """Return whether `leftover` is the only complete folder of its iteration and must stay.

    It gets the iteration's name back, unless a damaged folder has that name.
    """
    final = leftover.with_suffix("")
    if leftover.suffix != manifest_format.REPLACED or not file_layer.is_file(leftover / manifest_format.MANIFEST):
        return False
    if is_complete(final):
        return False
    if not file_layer.exists(final):
        file_layer.backend_of(leftover).rename(leftover, final)
    return True


def _folders_with(root: Path, suffix: str) -> list[Path]:
    """Return the folders `iter_N` with this suffix, and the numbered ones of `rename_to_leftover`."""
    name = re.compile(rf"iter_[0-9]{{7,}}(\.[0-9]+)?{re.escape(suffix)}")
    return [path for path in paths_with_iter_prefix(root) if name.fullmatch(path.name)]
