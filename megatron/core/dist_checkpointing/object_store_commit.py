"""Commit in an object store, where nothing can be renamed: writing the manifest turns objects into a checkpoint.

    iter_N.partial/save.json       written first, removed last: this save's mark, and the objects to remove when it ends
    iter_N.partial/rank_R.json     the ranks' manifests, and manifest.json made of them
    iter_N/rank_R.MARK.bin         the objects of a save; MARK is drawn for each save, so no object is written twice
    iter_N/manifest.json           written last, in one request: iteration N is complete now, or is the new one
    iter_N.damaged/manifest.json   the manifest of a damaged checkpoint, whose objects stay in iter_N/

Then the pointer is replaced, in one request. Leftovers of a killed save or removal are known by its save.json: objects
that it marks or names and that no manifest lists. No other object is ever removed. Paths only, no torch.
"""

import json
import re
import secrets
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import checkpoint_folder, manifest_format
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.storage import file_layer

_SAVE = "save.json"
_MAX_SAVE_BYTES = 1 << 28  # of a save.json, which may name the objects of a million ranks
_OBJECT = re.compile(r"rank_[0-9]{5,}\.[0-9a-f]{16}\.bin")
_PARTIAL = re.compile(r"iter_[0-9]{7,}" + re.escape(manifest_format.PARTIAL))


def write_save_record(partial: Path) -> None:
    """Write the record of a new save, by which its objects can be removed if it does not end."""
    final = partial.with_suffix("")
    # If the iteration is saved again, the objects of its present manifest go when this save ends.
    replaced = [name for name in _objects_in_manifest(final) or () if _OBJECT.fullmatch(name)]
    _write_record(partial, secrets.token_hex(8), replaced)


def object_path(partial: Path, rank: int) -> Path:
    """Return the path to which a rank writes its pieces.

    Raises OSError if it does not see what `write_save_record` wrote.
    """
    mark = _read_record(partial)["mark"]
    return partial.with_suffix("") / manifest_format.file_name(rank, f".{mark}.bin")


def holds_only_saved_objects(final: Path) -> bool:
    """Return whether everything in a folder was written by saves of ours."""
    return all(_OBJECT.fullmatch(name) for name in file_layer.backend_of(final).names(final))


def publish_objects(partial: Path, iteration: int) -> None:
    """Make the manifest in `partial` the one of its iteration, and the iteration the latest."""
    text = checkpoint_folder.read_manifest(partial)
    file_layer.write_and_sync_content(partial.with_suffix("") / manifest_format.MANIFEST, text)
    file_layer.write_and_sync_content(
        partial.parent / manifest_format.LATEST, checkpoint_folder.pointer_text_with_check_digit(iteration)
    )


def set_aside_damaged_manifest(final: Path) -> Path:
    """Move the manifest of a damaged checkpoint to a folder of its own, and return that. The objects stay."""
    free = checkpoint_folder.damaged_folder(final)
    manifest = final / manifest_format.MANIFEST
    content = file_layer.read_start(manifest, file_layer.size_of_file(manifest) or 0)
    with file_layer.backend_of(free).open(free / manifest_format.MANIFEST, "wb") as file:
        file_layer.write_all(file, content, free)
    file_layer.backend_of(final).remove(manifest)
    return free


def delete_objects(final: Path) -> None:
    """Delete a checkpoint: first its manifest, then its objects.

    Its objects are those that the manifest lists; if the manifest is damaged, all that saves wrote there.
    """
    names = _objects_in_manifest(final)
    if names is None:
        names = [name for name in file_layer.backend_of(final).names(final) if _OBJECT.fullmatch(name)]
    partial = final.with_name(final.name + manifest_format.PARTIAL)
    _write_record(partial, "", names)
    file_layer.remove_if_there(final / manifest_format.MANIFEST)
    _clear(partial)


def try_clear_leftover_objects(root: Path) -> list[str]:
    """Remove the leftovers of killed saves and removals; return problems for a warning."""
    try:
        names = file_layer.backend_of(root).names(root)
        # a run writes it at its start, to see that it may write
        if manifest_format.LATEST + manifest_format.PARTIAL in names:
            file_layer.remove_if_there(root / (manifest_format.LATEST + manifest_format.PARTIAL))
    except OSError as error:
        return [f"{root} cannot be cleared of what killed saves left ({error})"]
    problems = []
    for partial in (root / name for name in names if _PARTIAL.fullmatch(name)):
        try:
            _clear(partial)
        except (OSError, ValueError) as error:
            problems.append(f"{partial}, which a save left that did not end, cannot be removed ({error})")
    return problems


def _clear(partial: Path) -> None:
    """End a save or removal: remove its objects that no manifest lists, then all in its folder, save.json last."""
    final = partial.with_suffix("")
    if file_layer.exists(partial / _SAVE):
        record = _read_record(partial)
        listed = _objects_in_manifest(final)
        # With a damaged manifest nobody knows which objects it lists: then nothing is removed.
        if listed is not None or not file_layer.exists(final / manifest_format.MANIFEST):
            _remove_unlisted(final, record, listed or ())
    rest = [name for name in file_layer.backend_of(partial).names(partial) if name != _SAVE]
    file_layer.backend_of(partial).remove_all(partial / name for name in rest)
    file_layer.remove_if_there(partial / _SAVE)


def _remove_unlisted(final: Path, record: dict[str, Any], listed: list[str] | tuple[()]) -> None:
    """Remove the objects that a save's record names or marks, except those that the manifest lists."""
    present = file_layer.backend_of(final).names(final)
    obsolete = set(record["remove"])
    if record["mark"]:
        obsolete |= {name for name in present if f".{record['mark']}." in name}
    obsolete.difference_update(listed)
    file_layer.backend_of(final).remove_all(final / name for name in present if name in obsolete)


def _objects_in_manifest(final: Path) -> list[str] | None:
    """Return the names of a checkpoint's objects; None without an undamaged manifest."""
    if not file_layer.is_file(final / manifest_format.MANIFEST):
        return None
    try:
        manifest = manifest_format.parse_manifest(
            checkpoint_folder.read_manifest(final), final / manifest_format.MANIFEST
        )
    except CheckpointError as error:
        if error.advice != manifest_format.DAMAGED:
            raise
        return None
    return list(manifest.files)


def _write_record(partial: Path, mark: str, remove: list[str]) -> None:
    file_layer.write_and_sync_content(partial / _SAVE, json.dumps({"mark": mark, "remove": remove}))


def _read_record(partial: Path) -> dict[str, Any]:
    record = json.loads(file_layer.read_start(partial / _SAVE, _MAX_SAVE_BYTES))
    is_valid = (
        isinstance(record, dict) and isinstance(record.get("mark"), str) and isinstance(record.get("remove"), list)
    )
    if not is_valid:
        raise CheckpointError(partial / _SAVE, "does not say which save it belongs to", "remove it by hand")
    return record
