"""Which checkpoints a run may start from, or why it cannot start. Reads manifests, no tensors."""

from pathlib import Path
from typing import NamedTuple

from megatron.convert import is_foreign, why_unreadable
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folder import find, latest_iteration, read_manifest, saved_iterations
from megatron.core.dist_checkpointing.commit import is_ours
from megatron.core.dist_checkpointing.format import (
    LATEST,
    MANIFEST,
    CheckpointError,
    folder_name,
    iteration_of,
    parse_manifest,
)
from megatron.core.storage.file_layer import backend_of, exists, is_file, is_folder
from megatron.core.storage.paths import is_url, path_of, same_folder
from megatron.training.arguments.config import CheckpointConfig


class Start(NamedTuple):
    """A checkpoint to start from."""

    flag: str  # that gave `root`
    root: str
    weights_only: bool
    iterations: list[int]  # the one to load, then older ones to go back to; of another project none, or --ckpt-step
    warning: str = ""  # why the first may surprise
    spoiled: tuple[int, ...] = ()  # iterations whose folder is there and holds no checkpoint


def where_to_start(config: CheckpointConfig) -> Start | None:
    """The checkpoint to start from; None if --load has no checkpoint yet and the run may start anew.

    Raises ConfigError otherwise, with the folder's content: a run that starts anew by mistake costs more than a refused
    run. Call
    on one rank for all, since a shared file system may look different to each.
    """
    try:
        return _choose(config)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:  # for example a folder of another user
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; check --load") from error


def _choose(config: CheckpointConfig) -> Start | None:
    step = config.ckpt_step
    if config.load is not None and is_foreign(config.load, step):
        _check_not_saved_into("--load", config.load, config.save)
        return Start("--load", config.load, True, [] if step is None else [step])
    if config.load is not None and _load_holds_checkpoint(config):
        return Start("--load", config.load, config.finetune, *_iterations(config))
    root = config.pretrained_checkpoint
    if root is None:
        return None
    if is_foreign(root):
        _check_not_saved_into("--pretrained-checkpoint", root, config.save)
        return Start("--pretrained-checkpoint", root, True, [])
    if not is_file(path_of(root) / LATEST):
        mistake = mistake_in(path_of(root)) or f"holds no checkpoint ({_content(path_of(root))})"
        raise ConfigError(f"--pretrained-checkpoint {root} {mistake}")
    found = find(path_of(root))
    return Start("--pretrained-checkpoint", root, True, [found.iteration], found.warning)


def _check_not_saved_into(flag: str, root: str, save: str | None) -> None:
    """Raises ConfigError for a folder of another project that is --save too: with checkpoints of ours it is read as ours."""
    if save is not None and same_folder(root, save):
        raise ConfigError(
            f"{flag} and --save are both {root}, a model of another project; give it as --pretrained-checkpoint, and another "
            "folder as --load and --save"
        )


def _iterations(config: CheckpointConfig) -> tuple[list[int], str, tuple[int, ...]]:
    """(the iteration of --load to start from, then those to go back to where it is damaged; a warning; spoiled ones)."""
    root, step = path_of(config.load), config.ckpt_step
    saved, goes_back = saved_iterations(root)[::-1], not (config.finetune or config.exit_on_damaged_checkpoint)
    if step is not None and loads_what_it_saves(config):
        since = next((number for number in saved if number > step and _ckpt_step_of(root, number) == step), None)
        if since is not None:
            told = f"iteration {since} of {root} was saved by a run with --ckpt-step {step}, and is gone on from; "
            told += f"to begin again from {step}, give another --save"
            return [since, *(number for number in saved if step <= number < since and goes_back)], told, ()
    if step is not None:
        return [find(root, step).iteration], "", ()
    try:
        found = find(root)
    except CheckpointError as error:
        left, spoiled = _beside_the_pointer(root, saved)
        if not goes_back or not left:
            raise
        told = f"{error.file}: {error.wrong}; iteration {left[0]} is loaded, the newest that is complete"
        return left, told, spoiled
    return [found.iteration, *(number for number in saved if number < found.iteration and goes_back)], found.warning, ()


def _beside_the_pointer(root: Path, saved: list[int]) -> tuple[list[int], tuple[int, ...]]:
    """(the iterations to choose from where the pointer is damaged, or names no complete checkpoint; the one that is
    spoiled)."""
    try:
        named = latest_iteration(root)
    except CheckpointError:
        named = None
    if named is None or not is_folder(root / folder_name(named)):
        return saved, ()
    return [number for number in saved if number < named], (named,)  # later ones are those of another branch


def _ckpt_step_of(root: Path, iteration: int) -> int | None:
    """The --ckpt-step of the run that saved an iteration; None if it had none, or the manifest is unreadable."""
    try:
        state = parse_manifest(read_manifest(folder := find(root, iteration).folder), folder / MANIFEST).state
    except CheckpointError:
        return None
    config = state.get("config")
    saved = config.get("checkpoint") if isinstance(config, dict) else None
    return saved.get("ckpt_step") if isinstance(saved, dict) else None


def _load_holds_checkpoint(config: CheckpointConfig) -> bool:
    root, alone = path_of(config.load), config.pretrained_checkpoint is None
    is_save = loads_what_it_saves(config)
    # A run may be killed between completing its first checkpoint and writing the pointer file.
    if is_file(root / LATEST) or ((is_save or config.ckpt_step is not None) and saved_iterations(root)):
        return True
    if problem := mistake_in(root):
        raise ConfigError(f"--load {config.load} {problem}")
    reasons = {
        "--finetune needs weights to load": config.finetune and alone,
        "--exit-on-missing-checkpoint is given": config.exit_on_missing_checkpoint and alone,
        f"--ckpt-step {config.ckpt_step} names one": config.ckpt_step is not None,
    }
    for reason in (text for text, given in reasons.items() if given):
        raise ConfigError(f"--load {config.load} holds no checkpoint ({_content(root)}), and {reason}")
    if is_save:
        return False
    if not is_folder(root):
        raise ConfigError(
            f"--load {config.load} does not exist; give the folder that --save wrote to, or leave --load out to start anew "
            "(only this run's --save folder may be missing)"
        )
    if backend_of(root).names(root):
        raise ConfigError(
            f"--load {config.load} holds no checkpoint (no {LATEST}), but {_content(root)}; give the folder that --save wrote "
            "to, or leave --load out to start anew"
        )
    return False


def loads_what_it_saves(config: CheckpointConfig) -> bool:
    """Whether --load and --save are the same folder, by any path."""
    if config.load is None or config.save is None:
        return False
    return same_folder(config.load, config.save)


def latest_in(root: str) -> str | None:
    """The iteration that --load `root` would resume from; None if there is no checkpoint."""
    try:
        return str(find(path_of(root)).iteration)
    except (OSError, CheckpointError):
        return None


def where_to_go_on(save: str | None) -> str:
    """How to resume a run that ended early, for its last message."""
    if save is None:
        return "nothing is saved without --save"
    saved = latest_in(save)
    if saved is None:
        return f"there is no checkpoint in {save} yet"
    return f"the last checkpoint is that of iteration {saved}: --load {save} goes on from there"


def mistake_in(root: Path) -> str | None:
    """Why `root` cannot be a folder of checkpoints, and which folder to give; None if it can."""
    if exists(root) and not is_folder(root):
        folder = next((p for p in root.absolute().parents if is_file(p / LATEST)), None)
        return "is a file; give the folder that --save wrote to" + (f": {folder}" if folder else "")
    if iteration_of(root.name) is not None or is_file(root / MANIFEST):
        if not is_folder(root):
            return f"does not exist; give the folder that --save wrote to: {root.parent}"
        return f"is the folder of one iteration; give its parent: --load {root.absolute().parent}"
    names = backend_of(root).names(root) if is_folder(root) else []
    if is_url(root):  # where a save that was killed leaves objects under the iteration's own name
        names = [name for name in names if is_file(root / name / MANIFEST) or not is_ours(root / name)]
    if names and not is_url(root) and (said := why_unreadable(root)) is not None:
        return said
    iterations = sorted(number for name in names if (number := iteration_of(name)) is not None)
    if iterations and not is_url(root) and is_foreign(root / folder_name(iterations[-1])):
        return f"holds folders that --save-hf has written; give one of them: {root / folder_name(iterations[-1])}"
    if iterations:
        return (
            f"holds the iterations {', '.join(map(str, iterations))}, but no {root / LATEST}, which names the one to resume "
            f"from; give one of them: --ckpt-step {iterations[-1]}"
        )
    return None


def _content(root: Path) -> str:
    """The folder's content, for a message."""
    if not is_folder(root):
        return "it does not exist"
    names = backend_of(root).names(root)
    if not names:
        return "it is empty"
    return f"it holds {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
