"""The checkpoint that a run starts from is chosen here, or the run is refused. Reads manifests, no tensors."""

from pathlib import Path
from typing import NamedTuple

from megatron.convert import is_foreign, unsupported_format_hint
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folder import (
    find,
    iteration_in_pointer_file,
    read_manifest,
    saved_iterations,
)
from megatron.core.dist_checkpointing.manifest_format import (
    LATEST,
    MANIFEST,
    CheckpointError,
    folder_name,
    iteration_of,
    parse_manifest,
)
from megatron.core.dist_checkpointing.publish_by_rename_and_cleanup import is_ours
from megatron.core.storage.file_layer import backend_of, exists, is_file, is_folder
from megatron.core.storage.path_or_url import is_url, path_of, same_folder
from megatron.training.arguments.config import CheckpointConfig


class Start(NamedTuple):
    """A checkpoint to start from."""

    flag: str  # that gave `root`
    root: str
    weights_only: bool
    iterations: list[
        int
    ]  # the one to load, then older ones to fall back to; in another project's folder none, or --ckpt-step
    warning: str = ""  # about the first, if the user may expect another
    spoiled: tuple[int, ...] = ()  # iterations whose folder exists and holds no checkpoint


def where_to_start(config: CheckpointConfig) -> Start | None:
    """Return the checkpoint to start from; None if --load has no checkpoint yet and the run may start anew.

    Raises ConfigError otherwise, with the folder's content: a run that starts anew by mistake costs more than a refused
    run. Call it on one rank for all, since a shared file system may look different to each.
    """
    try:
        return _choose(config)
    except CheckpointError as error:
        raise ConfigError(error.problems) from error
    except OSError as error:  # for example a folder of another user
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; check --load") from error


def _choose(config: CheckpointConfig) -> Start | None:
    # --load, a folder of another project, or ours
    step = config.ckpt_step
    if config.load is not None and is_foreign(config.load, step):
        _check_not_saved_into("--load", config.load, config.save)
        return Start("--load", config.load, True, [] if step is None else [step])
    if config.load is not None and _load_holds_checkpoint(config):
        return Start("--load", config.load, config.finetune, *_iterations(config))

    # --pretrained-checkpoint, which counts while --load has no checkpoint
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
    """Raise ConfigError if a folder of another project is --save too.

    Once it has our checkpoints it is read as ours.
    """
    if save is not None and same_folder(root, save):
        raise ConfigError(
            f"{flag} and --save are both {root}, which has a model of another project; give it as "
            "--pretrained-checkpoint, and another folder as --load and --save"
        )


def _iterations(config: CheckpointConfig) -> tuple[list[int], str, tuple[int, ...]]:
    """Return (iterations, warning, spoiled iterations): the one of --load to start from, then older ones.

    An older one is loaded if those before it are damaged.
    """
    root = path_of(config.load)
    step = config.ckpt_step
    saved = saved_iterations(root)[::-1]  # newest first
    falls_back = not (config.finetune or config.exit_on_damaged_checkpoint)

    # --ckpt-step: a restarted job continues from what it has saved since, not from that iteration again
    if step is not None:
        later = None
        if loads_what_it_saves(config):
            later = next((number for number in saved if number > step and _ckpt_step_of(root, number) == step), None)
        if later is None:
            return [find(root, step).iteration], "", ()
        older = [number for number in saved if step <= number < later]
        warning = (
            f"iteration {later} of {root} was saved by a run with --ckpt-step {step}, and is gone on from; "
            f"to begin again from {step}, give another --save"
        )
        return [later, *(older if falls_back else [])], warning, ()

    # the iteration that the pointer file names, or another complete one if that is damaged
    try:
        latest = find(root)
    except CheckpointError as error:
        complete, spoiled = _beside_the_pointer(root, saved)
        if not falls_back or not complete:
            raise
        warning = f"{error.file}: {error.wrong}; iteration {complete[0]} is loaded, the newest that is complete"
        return complete, warning, spoiled
    older = [number for number in saved if number < latest.iteration]
    return [latest.iteration, *(older if falls_back else [])], latest.warning, ()


def _beside_the_pointer(root: Path, saved: list[int]) -> tuple[list[int], tuple[int, ...]]:
    """Return (the iterations to choose from, the spoiled iteration).

    The pointer file is damaged, or names no complete checkpoint.
    """
    try:
        named = iteration_in_pointer_file(root)
    except CheckpointError:
        named = None
    if named is None or not is_folder(root / folder_name(named)):
        return saved, ()
    return [number for number in saved if number < named], (named,)  # later ones are those of another branch


def _ckpt_step_of(root: Path, iteration: int) -> int | None:
    """Return the --ckpt-step of the run that saved an iteration; None if it had none, or the manifest is unreadable."""
    try:
        folder = find(root, iteration).folder
        state = parse_manifest(read_manifest(folder), folder / MANIFEST).state
    except CheckpointError:
        return None
    config = state.get("config")
    saved = config.get("checkpoint") if isinstance(config, dict) else None
    return saved.get("ckpt_step") if isinstance(saved, dict) else None


def _load_holds_checkpoint(config: CheckpointConfig) -> bool:
    """Whether --load has a checkpoint. Raises ConfigError if it has none and needs one, or is the wrong folder."""
    root = path_of(config.load)
    is_save = loads_what_it_saves(config)
    if is_file(root / LATEST):
        return True
    # A run may be killed between completing its first checkpoint and writing the pointer file.
    if (is_save or config.ckpt_step is not None) and saved_iterations(root):
        return True
    if problem := mistake_in(root):
        raise ConfigError(f"--load {config.load} {problem}")

    # no checkpoint: flags may need one
    reason = None
    has_other_weights = config.pretrained_checkpoint is not None
    if config.finetune and not has_other_weights:
        reason = "--finetune needs weights to load"
    elif config.exit_on_missing_checkpoint and not has_other_weights:
        reason = "--exit-on-missing-checkpoint is given"
    elif config.ckpt_step is not None:
        reason = f"--ckpt-step {config.ckpt_step} names one"
    if reason is not None:
        raise ConfigError(f"--load {config.load} has no checkpoint ({_content(root)}), and {reason}")

    # the run may start anew in its own --save folder, or in an empty one
    if is_save:
        return False
    if not is_folder(root):
        raise ConfigError(
            f"--load {config.load} does not exist; give a folder that --save wrote, or leave out --load to start a "
            "new run (only this run's --save folder may be missing)"
        )
    if backend_of(root).names(root):
        raise ConfigError(
            f"--load {config.load} has no checkpoint (no {LATEST}), but {_content(root)}; give a folder that --save "
            "wrote, or leave out --load to start a new run"
        )
    return False


def loads_what_it_saves(config: CheckpointConfig) -> bool:
    """Whether --load and --save are the same folder, by any path."""
    if config.load is None or config.save is None:
        return False
    return same_folder(config.load, config.save)


def latest_iteration_in(root: str) -> str | None:
    """Return the iteration that --load `root` would resume from; None if there is no checkpoint."""
    try:
        return str(find(path_of(root)).iteration)
    except (OSError, CheckpointError):
        return None


def resume_hint(save: str | None) -> str:
    """Return a sentence on how to resume a run that ended early, for its last message."""
    if save is None:
        return "nothing is saved without --save"
    saved = latest_iteration_in(save)
    if saved is None:
        return f"there is no checkpoint in {save} yet"
    return f"the last checkpoint is that of iteration {saved}: --load {save} goes on from there"


def mistake_in(root: Path) -> str | None:
    """Return why `root` cannot be a folder of checkpoints, and which folder to give; None if it can."""
    # a file, perhaps one of a checkpoint
    if exists(root) and not is_folder(root):
        problem = "is a file; give the folder that --save wrote to"
        for parent in root.absolute().parents:
            if is_file(parent / LATEST):
                return f"{problem}: {parent}"
        return problem

    # the folder of one iteration
    if iteration_of(root.name) is not None or is_file(root / MANIFEST):
        if not is_folder(root):
            return f"does not exist; give the folder that --save wrote to: {root.parent}"
        return f"is the folder of one iteration; give its parent: --load {root.absolute().parent}"

    # a folder that training can not read, or one without a pointer file
    names = backend_of(root).names(root) if is_folder(root) else []
    if is_url(root):  # there a killed save leaves objects under the iteration's own name
        names = [name for name in names if is_file(root / name / MANIFEST) or not is_ours(root / name)]
    if names and not is_url(root):
        problem = unsupported_format_hint(root)
        if problem is not None:
            return problem
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
    """Return the folder's content, for a message."""
    if not is_folder(root):
        return "it does not exist"
    names = backend_of(root).names(root)
    if not names:
        return "it is empty"
    text = f"it holds {', '.join(names[:5])}"
    if len(names) > 5:
        text += f" and {len(names) - 5} more"
    return text
