"""Saving where nothing can be renamed: objects are written where they stay, and the manifest makes a checkpoint of them.

    iter_N.partial/save.json         written first, removed last: the mark of this save, and the objects that go with its end
    iter_N.partial/rank_R.json       the lists of pieces, and manifest.json made of them
    iter_N/rank_R.MARK.bin           the objects of a save; each draws its mark, so none writes where another has written
    iter_N/manifest.json             one request, after all others: from here on iteration N is complete, or is the new one
    iter_N.damaged/manifest.json     that of a checkpoint found damaged, whose objects stay in iter_N/

Then the pointer is replaced, in one request. What a killed save or removal leaves is known by its save.json: objects that it
marks or names, and no manifest lists. No other object is ever removed. Paths only, no torch.
"""

import itertools
import json
import re
import secrets
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import checkpoint_folder, format
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.storage import file_layer

_SAVE = "save.json"
_MOST_SAVE = 1 << 28  # bytes of it: it may name the objects of a million ranks
_OBJECT = re.compile(r"rank_[0-9]{5,}\.[0-9a-f]{16}\.bin")
_PARTIAL = re.compile(r"iter_[0-9]{7,}" + re.escape(format.PARTIAL))


def begin_in_place(partial: Path) -> None:
    """Says that a save of an iteration is going on, so that whatever becomes of it can be cleared away."""
    final = partial.with_suffix("")
    _say(partial, secrets.token_hex(8), [name for name in _listed(final) or () if _OBJECT.fullmatch(name)])


def object_for(partial: Path, rank: int) -> Path:
    """Where a rank writes its pieces. Raises OSError where `begin_in_place` is not seen."""
    return partial.with_suffix("") / format.file_name(rank, f".{_said(partial)['mark']}.bin")


def are_objects_of_saves(final: Path) -> bool:
    """Whether all in a folder was written by saves of ours."""
    return all(_OBJECT.fullmatch(name) for name in file_layer.at(final).names(final))


def publish_in_place(partial: Path, iteration: int) -> None:
    """Makes the manifest in `partial` that of its iteration, and the iteration the latest."""
    text = checkpoint_folder.read_manifest(partial)
    file_layer.write_synced(partial.with_suffix("") / format.MANIFEST, text)
    file_layer.write_synced(partial.parent / format.LATEST, checkpoint_folder.pointer_text(iteration))


def set_aside_in_place(final: Path) -> Path:
    """Takes the manifest of a damaged checkpoint away; the folder where it is now. The objects stay where they are."""
    numbers = itertools.chain([""], (f".{i}" for i in itertools.count(1)))
    names = (final.with_name(f"{final.name}{number}{format.SPOILED}") for number in numbers)
    free = next(path for path in names if not file_layer.exists(path))
    manifest = final / format.MANIFEST
    found = file_layer.read_start(manifest, file_layer.size_of_file(manifest) or 0)
    with file_layer.at(free).open(free / format.MANIFEST, "wb") as file:
        file_layer.write_all(file, found, free)
    file_layer.at(final).remove(manifest)
    return free


def delete_in_place(final: Path) -> None:
    """Removes a checkpoint: first its manifest, then the objects that it lists, or all that saves wrote if it is damaged."""
    names = _listed(final)
    if names is None:
        names = [name for name in file_layer.at(final).names(final) if _OBJECT.fullmatch(name)]
    partial = final.with_name(final.name + format.PARTIAL)
    _say(partial, "", names)
    file_layer.remove_if_there(final / format.MANIFEST)
    _clear(partial)


def clear_in_place(root: Path) -> list[str]:
    """Removes what killed saves and removals have left; returns problems for a warning."""
    try:
        names = file_layer.at(root).names(root)
        if format.LATEST + format.PARTIAL in names:  # by which a start has found out whether it may write
            file_layer.remove_if_there(root / (format.LATEST + format.PARTIAL))
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
    """Removes the objects that a save.json marks or names and the manifest does not list, then all in its folder."""
    final = partial.with_suffix("")
    if file_layer.exists(partial / _SAVE):
        said, kept = _said(partial), _listed(final)
        if kept is not None or not file_layer.exists(
            final / format.MANIFEST
        ):  # else: nobody knows what a damaged manifest lists
            going = set(said["remove"]).difference(kept or ())
            mark = f".{said['mark']}." if said["mark"] else None
            there = file_layer.at(final).names(final)
            going |= {name for name in there if mark and mark in name and name not in (kept or ())}
            file_layer.at(final).remove_all(final / name for name in there if name in going)
    rest = [name for name in file_layer.at(partial).names(partial) if name != _SAVE]
    file_layer.at(partial).remove_all(partial / name for name in rest)
    file_layer.remove_if_there(partial / _SAVE)


def _listed(final: Path) -> list[str] | None:
    """The objects of a checkpoint; None without an undamaged manifest."""
    if not file_layer.is_file(final / format.MANIFEST):
        return None
    try:
        return list(format.parse_manifest(checkpoint_folder.read_manifest(final), final / format.MANIFEST).files)
    except CheckpointError as error:
        if error.advice != format.DAMAGED:
            raise
        return None


def _say(partial: Path, mark: str, remove: list[str]) -> None:
    file_layer.write_synced(partial / _SAVE, json.dumps({"mark": mark, "remove": remove}))


def _said(partial: Path) -> dict[str, Any]:
    said = json.loads(file_layer.read_start(partial / _SAVE, _MOST_SAVE))
    if not isinstance(said, dict) or not isinstance(said.get("mark"), str) or not isinstance(said.get("remove"), list):
        raise CheckpointError(partial / _SAVE, "does not say which save it belongs to", "remove it by hand")
    return said
