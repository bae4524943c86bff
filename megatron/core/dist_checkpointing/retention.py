"""Deleting a run's older checkpoints once a newer one is complete. Paths only, no torch.

    saved by the run   100  200  300  400  500     keep 2, retain every multiple of 200
    deleted            100       300               400 and 500 are the newest two, and 200 is never deleted

A folder is renamed to `iter_N.1.partial` before it is removed; in an object store its manifest is removed first. So a
kill in between leaves nothing that looks complete, and the next start or save removes the rest.
"""

from collections.abc import Collection
from pathlib import Path

from megatron.core.dist_checkpointing import manifest_format
from megatron.core.dist_checkpointing.checkpoint_folder import is_complete
from megatron.core.dist_checkpointing.publish_by_rename_and_cleanup import delete
from megatron.core.storage import file_layer


def delete_older(
    root: Path,
    own_iterations: Collection[int],
    keep: int,
    retain_interval: int | None = None,
    spared: Collection[int] = (),
) -> tuple[list[int], list[str]]:
    """Delete older checkpoints of a run; return (the iterations deleted, problems for a warning).

    own_iterations: those that the run itself has saved or resumed from, of which the newest has just been published; no
    other is deleted. The newest `keep` that are complete stay (sealed manifest, every file of its size), and so do
    multiples of `retain_interval`, `spared` ones, and links.
    """
    _, *older = sorted(own_iterations, reverse=True)
    kept = 1  # the newest; it was published just now, so it is complete
    deleted = []
    problems = []
    for iteration in older:
        folder = root / manifest_format.folder_name(iteration)
        if kept < keep:
            if is_complete(folder):
                kept += 1
            continue
        if iteration in spared or (retain_interval is not None and iteration % retain_interval == 0):
            continue
        if file_layer.backend_of(folder).is_link(folder) or not file_layer.exists(folder):
            continue
        try:
            delete(folder)
        except OSError as error:
            problems.append(
                f"{folder}, which newer checkpoints replace, cannot be deleted ({error}); the next save tries again"
            )
        else:
            deleted.append(iteration)
    return deleted, problems
