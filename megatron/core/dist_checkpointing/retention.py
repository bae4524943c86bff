"""Deleting a run's older checkpoints once a newer one is complete. Paths only, no torch.

    saved by the run   100  200  300  400  500     keep 2, keep every multiple of 200
    deleted            100       300               400 and 500 are the newest two, and 200 is kept for ever

A folder is renamed to `iter_N.1.partial` before it is removed; in an object store its manifest goes first. So a kill in
between
leaves nothing that looks complete, and the next start or save removes the rest.
"""

from collections.abc import Collection
from pathlib import Path

from megatron.core.dist_checkpointing import format
from megatron.core.dist_checkpointing.checkpoint_folder import is_whole
from megatron.core.dist_checkpointing.commit import delete
from megatron.core.storage import file_layer


def delete_older(
    root: Path, mine: Collection[int], keep: int, retain_interval: int | None = None, spared: Collection[int] = ()
) -> tuple[list[int], list[str]]:
    """Deletes iterations of `mine`, whose newest has just been published; returns (those deleted, problems for a warning).

    mine: the iterations that the run itself has saved or resumed from; no other is deleted. The newest `keep` that are
    whole stay
    (sealed manifest, every file of its size), and so do multiples of `retain_interval`, `spared` ones, and links.
    """
    newest, *older = sorted(mine, reverse=True)
    whole = [newest]
    deleted, problems = [], []
    for iteration in older:
        folder = root / format.folder_name(iteration)
        if len(whole) < keep:
            whole += [iteration] if is_whole(folder) else []
            continue
        is_retained = retain_interval is not None and iteration % retain_interval == 0
        if is_retained or iteration in spared or file_layer.at(folder).is_link(folder) or not file_layer.exists(folder):
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
