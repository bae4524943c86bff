"""Checks of a checkpoint before a run resumes from it: same model, same optimizer; other changed settings are reported."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.convert.check_missing_keys import ABSENT_HEADS, ALLOW, advice_of, both_names, heads_in_state, shown_heads
from megatron.convert.hf_origin import origin_problems
from megatron.core.base.dataclass_flags import ConfigError, build, flags_of, misfits, option_fields
from megatron.core.base.registry import FUNCTIONS
from megatron.core.dist_checkpointing import Checkpoint, CheckpointError, LocalTensor
from megatron.core.dist_checkpointing.lost_buffers import BUFFERS_AT_START, LOST_BUFFERS
from megatron.core.ops import dropout_masks
from megatron.core.optimizer.loss_scaler import problems_of_scaler
from megatron.core.optimizer.optimizer_registry import OptimizerConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.training.arguments.config import Config, shown
from megatron.training.arguments.config_diff import (
    BY_DATA,
    BY_TOKENIZER,
    OF_WIDTHS,
    Change,
    Changes,
    compare,
    precision_of,
)
from megatron.training.checkpointing.registry_compatibility import (
    attention_problem,
    began_to_restart,
    optimizer_problem,
    tokenizer_problem,
)
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.global_vars import Runtime, print_rank_0

_POSITIONS = "embedding.position_embeddings.weight"


def check_same_parameters(
    mine: dict[str, LocalTensor], checkpoint: Checkpoint, world: Axis, device: torch.device
) -> None:
    """Refuse a checkpoint with parameters that this run's model lacks on all ranks. One all-reduce; every rank must call."""
    names = sorted(name for name in checkpoint.names if name.startswith("model/"))
    holders = torch.tensor([name in mine for name in names], dtype=torch.int32, device=device)
    collectives.all_reduce(holders, world)
    lacking = [name.removeprefix("model/") for name, count in zip(names, holders.tolist()) if not count]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ConfigError(
            f"{checkpoint.folder} holds parameters that this run's model lacks: {', '.join(lacking[:3])}{more}; it was written "
            "by another model, or with other model flags"
        )


def absent_parameters(
    config: Config,
    mine: dict[str, LocalTensor],
    checkpoint: Checkpoint,
    given: str,
    world: Axis,
    device: torch.device,
    *,
    goes_on: bool,
) -> set[str]:
    """The parameters of this run's model that a checkpoint does not hold, and that keep their first values. Every rank
    must call.

    Those of heads that its architecture lacks are named in one line. Any other is refused, unless --allow-missing-tensors is
    given, which names each. Names are those of a checkpoint. goes_on: with the optimizer's state, which nobody could
    make up.
    """
    state, there = checkpoint.state, {*checkpoint.names}
    texts = collectives.all_gather_texts(json.dumps([name for name in mine if name not in there]), world, device)
    lacking = list(dict.fromkeys(name.removeprefix("model/") for text in texts for name in json.loads(text)))
    if not lacking:
        return set()
    heads = {*heads_in_state(state)}
    drawn = [name for name in lacking if name in heads]
    absent = [name for name in lacking if name not in heads]
    if absent and (goes_on or not config.checkpoint.allow_missing_tensors):
        advice = advice_of(state)
        if goes_on:
            advice = "load it with the settings of the model that was saved; with --finetune or --no-load-optim "
            advice += f"{ALLOW} loads the weights that are there"
        raise CheckpointError(checkpoint.folder, [f"lacks {both_names(state, name)}" for name in absent], advice)
    if drawn:
        print_rank_0(f"{given} has no {shown_heads(drawn)}, as its architecture: they get first values")
    for name in absent:
        print_rank_0(f"WARNING: {given} lacks {both_names(state, name)}: it gets first values")
    return {f"model/{name}" for name in lacking}


_NUMBER = (int, float)
# The entries of a checkpoint's state that a run reads, and their types. `*`: every entry of that object.
_NEEDED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("config", "config/*", "config/optimizer", "config/checkpoint", "train"), (dict,)),
    **dict.fromkeys(("train/iteration", "train/consumed_train_samples", "optimizer_steps"), (int,)),
    "log": (dict, type(None)),
}
_COUNTS = ("scheduled_train_samples", "samples_per_iter", "requested_train_samples")  # of the train state
_OPTIONAL: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        (
            "train/schedules",
            "train/schedules/*",
            "train/guard",
            "train/guard/*",
            "log/sums",
            "log/counts",
            "grad_scaler",
        ),
        (dict,),
    ),
    **dict.fromkeys((f"train/{name}" for name in _COUNTS), (int,)),
    **dict.fromkeys(("checkpoints", ABSENT_HEADS, LOST_BUFFERS), (list,)),
    FUNCTIONS: (dict,),
    f"{FUNCTIONS}/*": (str,),
    BUFFERS_AT_START: (dict,),
    f"{BUFFERS_AT_START}/*": (str,),
    "train/guard/*/seen": (int,),
    "train/guard/*/largest": _NUMBER,
    **dict.fromkeys(("dropout_masks", "log/steps", "log/nan_steps", "log/skipped_steps", "log/counts/*"), (int,)),
    **dict.fromkeys(("global_batch_size", *(f"config/transformer/{name}" for name in OF_WIDTHS)), (int, type(None))),
}


def check_state(state: dict[str, Any], iteration: int, given: str) -> None:
    """Refuse an invalid state before anything reads it: a manifest may come from anywhere. given: its flag and folder.

    What is read later is checked here, or where it is read: an error of another type is this program's, not the file's.
    """
    config = state.get("config")
    if not isinstance(config, dict) or "transformer" not in config or "vocab_size" not in state:
        raise ConfigError(f"{given} names no model; it was not written by a pretraining run")
    problems = [problem for where, kinds in (_NEEDED | _OPTIONAL).items() for problem in _misfits(state, where, kinds)]
    saved_before = [] if problems else map(repr, state.get("checkpoints", ()))
    problems += [f"checkpoints holds {text:.40}" for text in saved_before if not re.fullmatch("[0-9]{1,18}", text)]
    if not problems:
        problems = [*_problems_of_sums(state["log"] or {}), *problems_of_scaler(state.get("grad_scaler", {}))]
    if not problems and state["train"]["iteration"] != iteration:
        problems = [f"train/iteration is {state['train']['iteration']}, in a checkpoint of iteration {iteration}"]
    problems += origin_problems(state.get("origin"))
    if problems:
        raise ConfigError([f"{given} holds a state that no run has written: {problem}" for problem in problems])


def _misfits(state: Any, where: str, kinds: tuple[type, ...]) -> Iterator[str]:
    """The problems of the entry `where`: missing, or of another type. If a parent is at fault, only the parent is
    reported."""
    found: list[tuple[str, Any]] = [("", state)]
    *parents, last = where.split("/")
    for name in parents:
        found = [(f"{at}{key}/", inner) for at, held in found for key, inner in _entries(held, name)]
    for at, held in found:
        if not isinstance(held, dict):
            continue
        if where in _NEEDED and last != "*" and last not in held:
            yield f"{at}{last} is missing"
        for key, value in _entries(held, last):
            if not isinstance(value, kinds) or (isinstance(value, int) and not 0 <= value < 1 << 63):
                wanted = {
                    dict: "an object",
                    list: "a list",
                    str: "a text",
                    int: "a number from 0 up",
                    type(None): "null",
                }
                allowed = " or ".join(wanted[kind] for kind in kinds if kind in wanted)
                yield f"{at}{key} is {value!r:.40}, not {allowed}"


def _entries(held: Any, name: str) -> list[tuple[str, Any]]:
    """The entry of this name, or every entry for `*`; none of what is no object."""
    if not isinstance(held, dict):
        return []
    return list(held.items()) if name == "*" else [(name, held[name])] if name in held else []


def _problems_of_sums(log: dict[str, Any]) -> Iterator[str]:
    """A sum of losses is a number, or one that JSON lacks, as text."""
    for name, total in log.get("sums", {}).items():
        if total not in ("nan", "inf", "-inf") and not _is_number(total):
            yield f"log/sums/{name} is {total!r:.40}, not a number"


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and abs(value) < 1 << 1000


@contextlib.contextmanager
def naming(given: str) -> Iterator[None]:
    """Makes a ConfigError of the block name the checkpoint. given: its flag and folder. Other errors are not the file's."""
    try:
        yield
    except ConfigError as error:
        problems = [problem if given in problem else f"{given}: {problem}" for problem in error.problems]
        raise ConfigError(problems) from error


def check_same_model(
    runtime: Runtime, saved: dict[str, Any], model: str, given: str, *, goes_on: bool, resizes: bool = False
) -> None:
    """Refuse a checkpoint of another model or tokenizer, and if `goes_on` of another precision. Names all settings that
    differ.

    model: `model_name` of this run. given: the checkpoint's flag and folder. resizes: to another vocabulary, so that
    words and
    tokenizer may differ.
    """
    changes, config = _changes(runtime, saved), runtime.config
    problems = [f"{given} holds another model; {_difference(change)}" for change in changes.model]
    for change in changes.rope if not config.checkpoint.allow_rope_change else ():
        advice = "leave the flag out, or give --allow-rope-change to rotate so from now on, as for a longer context"
        problems.append(f"{given} holds another model; {_difference(change)}; {advice}")
    if (theirs := saved.get("model", model)) != model:
        problems.append(
            f"{given} holds another model; the checkpoint has a {theirs}, this run a {model}: run the script of the saved model. "
            f'A class that computes the same as {theirs} declares it: model_name = "{theirs}"'
        )
    problems += filter(None, [attention_problem(config, saved, given)])
    if resizes:
        pass
    elif saved["vocab_size"] != runtime.vocab_size_if_any:
        weights = (
            "" if goes_on else "; --resize-token-embeddings tokens starts from the rows of the words that both have"
        )
        problems.append(
            f"{given} holds another model; vocabulary: the checkpoint has {saved['vocab_size']} words, this run's tokenizer "
            f"{runtime.vocab_size_if_any}{weights}"
        )
    elif not config.checkpoint.allow_tokenizer_change and _is_other(
        saved, "tokenizer_sha256", runtime.tokenizer_sha256
    ):
        problems.append(
            f"{given} holds a model of another tokenizer: {_flags_then_and_now(runtime, saved, 'tokenizer', BY_TOKENIZER)}; "
            "give that tokenizer, or --allow-tokenizer-change if its ids mean the same or will be learned anew"
        )
    elif not config.checkpoint.allow_tokenizer_change:
        problems += filter(None, [tokenizer_problem(config, saved, given)])
    if goes_on and changes.precision and not config.checkpoint.allow_precision_change:
        then, now = _precisions(saved, config)
        problems.append(
            f"{given} was trained in {then}, this run is in {now}; give the flags of that precision, or "
            "--allow-precision-change to go on in this one"
        )
    if problems:
        raise ConfigError(problems)


def _changes(runtime: Runtime, saved: dict[str, Any]) -> Changes:
    """All settings that differ. Tokenizer and data are compared by content if the checkpoint holds their hashes."""
    mine, config = runtime.config.as_json(), saved["config"]
    by_content = {
        *(BY_TOKENIZER if saved.get("tokenizer_sha256") and runtime.tokenizer_sha256 else ()),
        *(BY_DATA if saved.get("data_sha256") and runtime.data_sha256 else ()),
    }
    defaults = {flag.name: flag.default for flag in runtime.config.own.flags}
    return compare(mine, config, defaults, by_content)


def _precisions(saved: dict[str, Any], config: Config) -> Iterator[str]:
    return (precision_of(parts["transformer"]) for parts in (saved["config"], config.as_json()))


def _is_other(saved: dict[str, Any], name: str, mine: str | None) -> bool:
    return None not in (mine, theirs := saved.get(name)) and theirs != mine


def _difference(change: Change) -> str:
    unknown = "; this code has no such setting: use the code that wrote it"
    now = unknown if change.is_unknown else f", this run has {change.now}"
    return f"{change.name}: the checkpoint has {change.before}{now}"


def _flags_then_and_now(runtime: Runtime, saved: dict[str, Any], part: str, names: Sequence[str]) -> str:
    """The flags of tokenizer or data that differ, then and now; if none does, the files have changed."""
    now, before = runtime.config.as_json()[part], saved["config"].get(part, {})
    differ = [name for name in names if before.get(name) != now[name]]
    texts = [f"{name} {shown(before.get(name))} before, {shown(now[name])} now" for name in differ]
    given = ", ".join(shown(now[name]) for name in names if now[name] is not None)
    return ", ".join(texts) or f"the files have changed since ({given})"


def check_same_positions(
    config: Config, mine: dict[str, LocalTensor], checkpoint: Checkpoint, world: Axis, device: torch.device
) -> None:
    """Refuse a learned position table with another number of rows. One all-reduce; every rank must call."""
    with collectives.raise_together(world, device):
        for name in (name for name in mine if name.endswith(_POSITIONS) and name in checkpoint.names):
            saved, rows = checkpoint.manifest.tensors[name].shape[0], mine[name].shape[0]
            if saved != rows and rows == config.positions:
                others = _other_positions(config, saved)
                raise ConfigError(f"{checkpoint.folder} has {saved} learned positions, {others}")


def _other_positions(config: Config, saved: int) -> str:
    """This run's number of positions, and the flags that keep the `saved` number."""
    length, rows = config.data.seq_length, config.transformer.max_position_embeddings
    has = f"this run {rows} (--max-position-embeddings)" if rows else f"this run {length} (--seq-length)"
    shorter = f" with --seq-length {saved} or less, which is now {length}" if length > saved else ""
    return f"{has}; --max-position-embeddings {saved} keeps the saved table{shorter}"


def check_same_optimizer(runtime: Runtime, saved: dict[str, Any]) -> None:
    """Refuse a checkpoint without optimizer state, or with other moments."""
    if found := _optimizer_at_fault(runtime.config, saved["config"]) or optimizer_problem(runtime.config, saved):
        load = runtime.config.checkpoint.load
        raise ConfigError(f"--load {load} holds {found}; --no-load-optim loads the weights alone")


def _optimizer_at_fault(config: Config, saved: dict[str, Any]) -> str | None:
    """The optimizer state that the checkpoint lacks or has too much, in words; None if it fits."""
    if not saved["checkpoint"].get("save_optim", True):
        return "no optimizer state (saved with --no-save-optim)"
    mine, theirs = config.as_json()["optimizer"], {"optimizer": "adam"} | saved["optimizer"]
    if wrong := misfits(OptimizerConfig, theirs):
        raise ConfigError([f"holds a state that no run has written: config/optimizer/{problem}" for problem in wrong])
    if mine["optimizer"] != theirs["optimizer"]:
        return f"the state of --optimizer {theirs['optimizer']}, this run has {mine['optimizer']}"
    before = build(OptimizerConfig, theirs)
    # Part by part: Muon's momentum_buffer is of matrices alone, and sgd beside it has one of the other parameters.
    parts = zip(config.optimizer.moments_by_part, before.moments_by_part)
    lacking = list(dict.fromkeys(kind for now, then in parts for kind in now if kind not in then))
    differ = [
        field
        for field in option_fields(OptimizerConfig)
        if theirs.get(field.name, mine[field.name]) != mine[field.name]
    ]
    was = ", ".join(f"{flags_of(field)[0]} was {theirs[field.name]}" for field in differ)
    return f"no {', '.join(lacking)} ({was})" if lacking else None


def note_changes(runtime: Runtime, saved: dict[str, Any], *, goes_on: bool = True) -> None:
    """Print the settings that differ from the checkpoint's and change the course of the run.

    goes_on: False for a run that loads the weights alone; then only the script's own flags are printed.
    """
    changes = _changes(runtime, saved)
    names_of_own = {*saved["config"].get("own", ()), *(flag.name for flag in runtime.config.own.flags)}
    what = "resumed" if goes_on else "weights are of a run"
    if "model" not in saved:
        print_rank_0("the checkpoint does not name its model: assuming this run's model")
    if runtime.config.own.flags and "own" not in saved["config"]:
        print_rank_0("the checkpoint holds no flags of its script: they are not compared")
    if goes_on and changes.precision:
        then, now = _precisions(saved, runtime.config)
        print_rank_0(f"resumed with another precision: {then} before, {now} now")
    for change in changes.rope:
        print_rank_0(f"{what} with another {change.name}: {shown(change.before)} before, {shown(change.now)} now")
    for change in changes.course:
        if not goes_on and change.name not in names_of_own:
            continue
        now = "unknown now" if change.is_unknown else f"{shown(change.now)} now"
        print_rank_0(f"{what} with another {change.name}: {shown(change.before)} before, {now}")
    if _is_other(saved, "tokenizer_sha256", runtime.tokenizer_sha256):
        print_rank_0(f"{what} with another tokenizer: {_flags_then_and_now(runtime, saved, 'tokenizer', BY_TOKENIZER)}")
    if goes_on and began_to_restart(runtime.config, saved):
        print_rank_0(
            f"{what} with rotary angles that restart, by --reset-position-ids; in the checkpoint's run they did not"
        )
    if goes_on and _is_other(saved, "data_sha256", runtime.data_sha256):
        print_rank_0(f"resumed with other data: {_flags_then_and_now(runtime, saved, 'data', BY_DATA)}")
    masks, model = saved.get("dropout_masks", 1), runtime.config.transformer
    if goes_on and masks != dropout_masks.MASKS_VERSION and (model.hidden_dropout or model.attention_dropout):
        print_rank_0(
            f"resumed with other dropout masks: drawn by version {masks} before, {dropout_masks.MASKS_VERSION} now"
        )
    before = saved.get("global_batch_size")  # older checkpoints lack it
    before = before or TrainState.from_json(saved["train"]).samples_per_iter
    if goes_on and runtime.global_batch_size != before:
        print_rank_0(f"resumed with another global_batch_size: {before} before, {runtime.global_batch_size} now")
