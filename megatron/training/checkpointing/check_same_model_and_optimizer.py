"""Checks before a run resumes from a checkpoint: same model, same optimizer.

Other settings that have changed are printed.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.convert.hf_provenance_and_tokenizer_files import provenance_problems
from megatron.convert.missing_params_and_absent_heads import (
    ABSENT_HEADS,
    ALLOW_FLAG,
    binary_head_parameters,
    describe_heads,
    missing_tensors_advice,
    parameter_names,
    recorded_absent_head_params,
    with_hf_names,
)
from megatron.core.base.dataclass_flags import ConfigError, build, flags_of, option_fields, type_mismatches
from megatron.core.base.registry_with_checked_entries import FUNCTIONS
from megatron.core.dist_checkpointing import Checkpoint, CheckpointError, LocalTensor
from megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint import (
    BUFFERS,
    BUFFERS_AT_START,
    FROZEN,
    LOST_BUFFERS,
)
from megatron.core.ops import dropout_masks
from megatron.core.optimizer.loss_scaler import problems_of_scaler
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.training.arguments.compare_settings_with_checkpoint import (
    BEGINS_AT_ZEROS,
    BY_DATA,
    BY_TOKENIZER,
    OF_WIDTHS,
    Change,
    Changes,
    advice_of_conversion,
    compare,
    precision_of,
)
from megatron.training.arguments.config import Config, shown
from megatron.training.checkpointing.compare_registry_functions_on_resume import (
    attention_problem,
    optimizer_problem,
    rotary_restart_began,
    tokenizer_type_problem,
)
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.global_vars import Runtime, print_rank_0

_MODEL = "model/"
_INNER_LAYER = re.compile(r"(\.layers\.\d+)\.layer\.")  # a script's own layer, as it was named inside of one of ours
_LAYER_NUMBER = re.compile(r"\.\d+\.")
_POSITIONS = "embedding.position_embeddings.weight"
_MAX_SHOWN = 3  # parameters in a message


# ---------------------------------------------------------------- parameters


def with_current_names(
    model: dict[str, LocalTensor], checkpoint: Checkpoint, world: Axis, device: torch.device
) -> Checkpoint:
    """Return the checkpoint with the names that a script's own layers, built from a spec, have today.

        saved before    decoder.layers.3.layer.mlp.weight
        today           decoder.layers.3.mlp.weight

    A name is changed if no rank's model has it and some rank's has today's. model: name -> this rank's part. One
    all-reduce if there are such names; every rank must call.
    """
    renamed = {name: _INNER_LAYER.sub(r"\1.", name) for name in checkpoint.names}
    before = sorted(name for name, now in renamed.items() if now != name and name.startswith(_MODEL))
    if not before:
        return checkpoint
    has = [[name in model, renamed[name] in model] for name in before]
    holders = torch.tensor(has, dtype=torch.int32, device=device)  # [names, (before, now)]
    collectives.all_reduce(holders, world)
    if not all(count_now and not count_before for count_before, count_now in holders.tolist()):
        return checkpoint  # the layers of a script that calls a part of its own `layer`
    tensors = {renamed[name]: record for name, record in checkpoint.manifest.tensors.items()}
    return replace(checkpoint, manifest=replace(checkpoint.manifest, tensors=tensors))


def refuse_unexpected_parameters(
    config: Config, model: dict[str, LocalTensor], checkpoint: Checkpoint, world: Axis, device: torch.device
) -> None:
    """Refuse a checkpoint with parameters that this run's model lacks on all ranks, or warn of them.

    model: name -> this rank's part. Raises ConfigError under --dist-ckpt-strictness raise_all, the default. One
    all-reduce; every rank must call.
    """
    names = sorted(name for name in checkpoint.names if name.startswith(_MODEL))
    holders = torch.tensor([name in model for name in names], dtype=torch.int32, device=device)  # [names]
    collectives.all_reduce(holders, world)
    lacking = [name.removeprefix(_MODEL) for name, count in zip(names, holders.tolist()) if not count]
    if not lacking:
        return
    shown = ", ".join(lacking[:_MAX_SHOWN])
    if len(lacking) > _MAX_SHOWN:
        shown += f" and {len(lacking) - _MAX_SHOWN} more"
    problem = f"{checkpoint.folder} contains parameters that this run's model lacks: {shown}"
    if config.checkpoint.loads_more_parameters:
        strictness = config.checkpoint.dist_ckpt_strictness
        print_rank_0(f"WARNING: {problem}; they are not read, as --dist-ckpt-strictness {strictness} asks")
        return
    advice = "it was written by another model, or with other model flags"
    if any("tokentype_embeddings" in name for name in lacking):  # every published BERT has them, a BertForMaskedLM too
        advice = "leave out --bert-no-binary-head: without it a model has no token types"
    raise ConfigError(f"{problem}; {advice}")


def absent_parameters(
    config: Config,
    model: dict[str, LocalTensor],
    checkpoint: Checkpoint,
    source: str,
    world: Axis,
    device: torch.device,
    *,
    load_optimizer: bool,
    adapters: Collection[str] = (),
) -> set[str]:
    """Return the parameters that a checkpoint lacks and that keep their initial values, by their names in a checkpoint.

    model: name -> this rank's part. adapters: this rank's parameters that a base cannot have. Every rank must call.
    Parameters of heads that the checkpoint's architecture does not have, and adapters if all of them and nothing else
    are absent, are named in one line. Any other is refused with CheckpointError, unless --allow-missing-tensors is given
    and no optimizer state is loaded, or --dist-ckpt-strictness says that it gets new state too. Then one WARNING names
    them, those of all layers once.
    """
    state = checkpoint.state
    saved_names = {*checkpoint.names}
    own_lacking = [name for name in model if name not in saved_names]
    texts = collectives.all_gather_texts(json.dumps([own_lacking, sorted(adapters)]), world, device)
    ranks = [json.loads(text) for text in texts]
    lacking = list(dict.fromkeys(name.removeprefix(_MODEL) for names, _ in ranks for name in names))
    if not lacking:
        return set()
    all_adapters = {name.removeprefix(_MODEL) for _, names in ranks for name in names}

    head_names = {*recorded_absent_head_params(state)}
    missing_of_heads = [name for name in lacking if name in head_names]
    others = [name for name in lacking if name not in head_names]
    if others and not _may_lack(config, load_optimizer=load_optimizer):
        raise _lacks(checkpoint, others, load_optimizer=load_optimizer)
    if missing_of_heads:
        print_rank_0(f"{source} has no {describe_heads(missing_of_heads)}, as its architecture: they get first values")
    with_state = ", and new optimizer state" if load_optimizer else ""
    if others and {*others} == all_adapters:
        print_rank_0(f"{source} has no adapters, as their base: the {len(others)} parameters of them get first values")
    elif len(others) == 1:
        print_rank_0(f"WARNING: {source} lacks {with_hf_names(state, others[0])}: it gets first values{with_state}")
    elif others:
        by_layer: dict[str, list[str]] = {}
        for name in others:
            shown_name = with_hf_names(state, name)
            by_layer.setdefault(_LAYER_NUMBER.sub(".*.", shown_name), []).append(shown_name)
        listed = ", ".join(f"{key} ({len(names)})" if len(names) > 1 else names[0] for key, names in by_layer.items())
        print_rank_0(f"WARNING: {source} lacks {len(others)} parameters, which get first values{with_state}: {listed}")
    return {f"{_MODEL}{name}" for name in lacking}


def refuse_lacking_import(config: Config, checkpoint: Checkpoint, *, load_optimizer: bool, is_folder: bool) -> None:
    """Refuse weights of another project, as they came in, without a parameter of this run's model, by names alone.

    is_folder: the checkpoint is that project's folder. A checkpoint of ours may have been converted from one. What a run
    has written, a model that is not known by its settings, and the binary head of a BERT, which a run need not have, are
    left to `absent_parameters`. Raises CheckpointError.
    """
    state = checkpoint.state
    names = parameter_names(state.get("model", ""), config.transformer) or ()
    if not is_folder:
        of_checkpoint = {name.removeprefix(_MODEL) for name in checkpoint.names if name.startswith(_MODEL)}
        has_current_names = of_checkpoint <= {*names}
        if checkpoint.iteration > 0 or state.get("origin") is None or not has_current_names:
            return
    optional = {*recorded_absent_head_params(state)}
    if state.get("model") == "BertModel":
        optional |= {*binary_head_parameters(config.transformer)}
    lacking = [name for name in names if _MODEL + name not in checkpoint.names and name not in optional]
    if lacking and not _may_lack(config, load_optimizer=load_optimizer):
        raise _lacks(checkpoint, lacking, load_optimizer=load_optimizer)


def _may_lack(config: Config, *, load_optimizer: bool) -> bool:
    """Return whether a run goes on without parameters that its checkpoint lacks."""
    return config.checkpoint.loads_fewer_parameters or (config.checkpoint.allow_missing_tensors and not load_optimizer)


def _lacks(checkpoint: Checkpoint, names: Sequence[str], *, load_optimizer: bool) -> CheckpointError:
    """Return the error of a checkpoint without these parameters."""
    state = checkpoint.state
    advice = missing_tensors_advice(state)
    if load_optimizer:
        advice = (
            "load it with the settings of the model that was saved; with --finetune or --no-load-optim "
            f"{ALLOW_FLAG} loads the weights that are there"
        )
    return CheckpointError(checkpoint.folder, [f"lacks {with_hf_names(state, name)}" for name in names], advice)


def check_position_table_rows(
    config: Config, model: dict[str, LocalTensor], checkpoint: Checkpoint, world: Axis, device: torch.device
) -> None:
    """Refuse a learned position table [positions, h] with another number of rows. Raises ConfigError.

    model: name -> this rank's part. One all-reduce; every rank must call.
    """
    with collectives.raise_together(world, device):
        for name, tensor in model.items():
            if not name.endswith(_POSITIONS) or name not in checkpoint.names:
                continue
            saved_rows = checkpoint.manifest.tensors[name].shape[0]
            rows = tensor.shape[0]
            if saved_rows != rows and rows == config.positions:
                advice = _other_positions(config, saved_rows)
                raise ConfigError(f"{checkpoint.folder} has {saved_rows} learned positions, {advice}")


def _other_positions(config: Config, saved: int) -> str:
    """Return this run's number of positions, and the flags that keep the `saved` number."""
    length = config.data.seq_length
    rows = config.transformer.max_position_embeddings
    has = f"this run {rows} (--max-position-embeddings)" if rows else f"this run {length} (--seq-length)"
    shorter = f" with --seq-length {saved} or less, which is now {length}" if length > saved else ""
    return f"{has}; --max-position-embeddings {saved} keeps the saved table{shorter}"


# ---------------------------------------------------------------- is the state one that a run has written?

_NUMBER = (int, float)
_Types = dict[str, tuple[type, ...]]


def _typed(kinds: tuple[type, ...], *paths: str) -> _Types:
    return dict.fromkeys(paths, kinds)


# The entries of a checkpoint's state that a run reads, and their types. `*`: every entry of that object.
_NEEDED: _Types = {
    **_typed((dict,), "config", "config/*", "config/optimizer", "config/checkpoint", "train"),
    **_typed((int,), "train/iteration", "train/consumed_train_samples", "optimizer_steps"),
    **_typed((dict, type(None)), "log"),
}
_OPTIONAL: _Types = {
    **_typed((dict,), "train/schedules", "train/schedules/*", "train/guard", "train/guard/*"),
    **_typed((dict,), "log/sums", "log/counts", "grad_scaler"),
    **_typed((int,), "train/scheduled_train_samples", "train/samples_per_iter", "train/requested_train_samples"),
    **_typed((list,), "checkpoints", ABSENT_HEADS, LOST_BUFFERS),
    **_typed((dict,), FUNCTIONS),
    **_typed((str,), f"{FUNCTIONS}/*"),
    **_typed((dict,), BUFFERS, BUFFERS_AT_START, FROZEN),
    **_typed((int,), f"{FROZEN}/elements"),
    **_typed((str,), f"{FROZEN}/hash"),
    **_typed((list,), f"{BUFFERS}/*"),
    **_typed((str,), f"{BUFFERS_AT_START}/*"),
    **_typed((int,), "train/guard/*/seen"),
    **_typed(_NUMBER, "train/guard/*/largest"),
    **_typed((int,), "dropout_masks", "log/steps", "log/nan_steps", "log/skipped_steps", "log/counts/*"),
    **_typed((int, type(None)), "global_batch_size", *(f"config/transformer/{name}" for name in OF_WIDTHS)),
}
_TYPE_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a number from 0 up", type(None): "null"}


def check_state(state: dict[str, Any], iteration: int, source: str) -> None:
    """Refuse an invalid state before anything reads it: a manifest may come from anywhere. Raises ConfigError.

    source: the flag and folder. Everything that is read later is checked here, or where it is read, so that an error of
    another type is this program's and not the file's.
    """
    config = state.get("config")
    if not isinstance(config, dict) or "transformer" not in config or "vocab_size" not in state:
        raise ConfigError(f"{source} does not name its model; it was not written by a pretraining run")

    # types first: the further checks need them
    problems = []
    for path, kinds in (_NEEDED | _OPTIONAL).items():
        problems += _type_problems(state, path, kinds)
    if not problems:
        for number in state.get("checkpoints", ()):
            if not re.fullmatch("[0-9]{1,18}", repr(number)):
                problems.append(f"checkpoints holds {number!r:.40}")
    if not problems:
        problems = [*_problems_of_sums(state["log"] or {}), *problems_of_scaler(state.get("grad_scaler", {}))]
    if not problems and state["train"]["iteration"] != iteration:
        problems = [f"train/iteration is {state['train']['iteration']}, in a checkpoint of iteration {iteration}"]
    problems += provenance_problems(state.get("origin"))
    if problems:
        raise ConfigError([f"{source} holds a state that no run has written: {problem}" for problem in problems])


def _type_problems(state: Any, path: str, kinds: tuple[type, ...]) -> Iterator[str]:
    """Yield the problems of the entries at `path`: missing, or of another type.

    A faulty parent is reported on its own path.
    """
    *parents, last = path.split("/")

    # the objects that hold these entries: more than one if a parent is `*`
    objects: list[tuple[str, Any]] = [("", state)]  # (path with a slash at the end, value)
    for parent in parents:
        children = []
        for prefix, value in objects:
            children += [(f"{prefix}{key}/", inner) for key, inner in _entries(value, parent)]
        objects = children

    for prefix, value in objects:
        if not isinstance(value, dict):
            continue
        if path in _NEEDED and last != "*" and last not in value:
            yield f"{prefix}{last} is missing"
        for key, entry in _entries(value, last):
            is_out_of_range = isinstance(entry, int) and not 0 <= entry < 1 << 63
            if not isinstance(entry, kinds) or is_out_of_range:
                allowed = " or ".join(_TYPE_NAMES[kind] for kind in kinds if kind in _TYPE_NAMES)
                yield f"{prefix}{key} is {entry!r:.40}, not {allowed}"


def _entries(value: Any, name: str) -> list[tuple[str, Any]]:
    """Return the entry of this name, or every entry for `*`; none if `value` is no object."""
    if not isinstance(value, dict):
        return []
    if name == "*":
        return list(value.items())
    return [(name, value[name])] if name in value else []


def _problems_of_sums(log: dict[str, Any]) -> Iterator[str]:
    """Yield the sums of losses that are neither a number nor, as text, one that JSON lacks."""
    for name, total in log.get("sums", {}).items():
        if total not in ("nan", "inf", "-inf") and not _is_number(total):
            yield f"log/sums/{name} is {total!r:.40}; it must be a number"


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and abs(value) < 1 << 1000


@contextlib.contextmanager
def naming_source(source: str) -> Iterator[None]:
    """Make a ConfigError of the block name `source`, the checkpoint's flag and folder. Other errors pass unchanged."""
    try:
        yield
    except ConfigError as error:
        problems = [problem if source in problem else f"{source}: {problem}" for problem in error.problems]
        raise ConfigError(problems) from error


# ---------------------------------------------------------------- the same model?


def check_same_model(
    runtime: Runtime, saved: dict[str, Any], models: Sequence[str], source: str, *, resumes: bool, resizes: bool = False
) -> None:
    """Refuse a checkpoint of another model or tokenizer, and if `resumes` of another precision; names all differences.

    models: names that the checkpoint's model may have, this run's `model_name` first. The others: as in
    `problems_of_settings`. Raises ConfigError.
    """
    problems = problems_of_settings(runtime, saved, source, resumes=resumes, resizes=resizes)
    saved_model = saved.get("model", models[0])
    if saved_model not in models:
        problems.append(
            f"{source} holds another model; the checkpoint has a {saved_model}, this run a {models[0]}: run the script of the "
            f'saved model. A class that computes the same as {saved_model} declares it: model_name = "{saved_model}"'
        )
    if problems:
        raise ConfigError(problems)


def problems_of_settings(
    runtime: Runtime,
    saved: dict[str, Any],
    source: str,
    *,
    resumes: bool,
    resizes: bool = False,
    are_taken: bool = False,
) -> list[str]:
    """Return how the checkpoint's model, tokenizer and, if `resumes`, precision differ from this run's settings.

    No model is needed. source: the checkpoint's flag and folder. resizes: the vocabulary is resized, so its size and
    the tokenizer may differ. are_taken: the run takes the checkpoint's settings also without --use-checkpoint-args.
    """
    config = runtime.config
    are_taken = are_taken or config.checkpoint.use_checkpoint_args
    leave_out = "; leave its flag out" if are_taken else ""
    changes = _changes(runtime, saved)
    problems = []
    for change in changes.model:
        if change.is_new and not resumes:
            continue  # a flag of this script alone, such as an adapter's rank: the weights do not depend on it
        begins = BEGINS_AT_ZEROS.get(change.name)
        why = f"; {begins.why}" if begins else ""
        advice = "" if change.is_unknown else leave_out
        advice = advice_of_conversion(change, source.partition(" ")[2]) or advice
        problems.append(f"{source} holds another model; {_difference(change)}{why}{advice}")
    for change in changes.turned_on:
        if BEGINS_AT_ZEROS[change.name].is_parameter and not _takes_new_parameters(config, resumes=resumes):
            problems.append(
                f"{source} holds another model; {_difference(change)}; it would begin at zeros with --finetune {ALLOW_FLAG}"
            )
    if not config.checkpoint.allow_rope_change:
        for change in changes.rope:
            advice = "leave the flag out, or give --allow-rope-change to rotate so from now on, as for a longer context"
            problems.append(f"{source} holds another model; {_difference(change)}; {advice}")
    attention = attention_problem(config, saved, source)  # what it computes
    if attention is not None:
        problems.append(attention)

    # vocabulary and tokenizer
    if not resizes:
        tokenizer = _vocabulary_problem(runtime, saved, source, resumes=resumes)
        if tokenizer is not None:
            problems.append(tokenizer)

    # one flag takes them all from the checkpoint
    if problems and not are_taken:
        problems.insert(
            0,
            f"{source} holds a model of other settings than the flags describe: --use-checkpoint-args takes those of the "
            "model and the tokenizer from the checkpoint; leave out the flags that contradict it. The differences follow",
        )

    # precision
    if resumes and changes.precision and not config.checkpoint.allow_precision_change:
        before, now = _precisions(saved, config)
        problems.append(
            f"{source} was trained in {before}, this run is in {now}; give the flags of that precision, or "
            "--allow-precision-change to go on in this one"
        )
    return problems


def _takes_new_parameters(config: Config, *, resumes: bool) -> bool:
    """Return whether parameters that the checkpoint lacks get first values, as `absent_parameters` decides."""
    return _may_lack(config, load_optimizer=config.checkpoint.load_optim and resumes)


def buffers_that_begin(runtime: Runtime, saved: dict[str, Any]) -> tuple[str, ...]:
    """Return the ends of the names of the buffers that this run's settings add to the checkpoint's model."""
    return tuple(BEGINS_AT_ZEROS[change.name].name for change in _changes(runtime, saved).turned_on)


def _vocabulary_problem(runtime: Runtime, saved: dict[str, Any], source: str, *, resumes: bool) -> str | None:
    """Return how the checkpoint's vocabulary or tokenizer differs from this run's; None if they are the same."""
    if saved["vocab_size"] != runtime.vocab_size_if_any:
        weights = (
            "" if resumes else "; --resize-token-embeddings tokens starts from the rows of the words that both have"
        )
        return (
            f"{source} holds another model; vocabulary: the checkpoint has {saved['vocab_size']} words, this run's tokenizer "
            f"{runtime.vocab_size_if_any}{weights}"
        )
    if runtime.config.checkpoint.allow_tokenizer_change:
        return None
    if _is_other(saved, "tokenizer_sha256", runtime.tokenizer_sha256):
        return (
            f"{source} holds a model of another tokenizer: {_flags_then_and_now(runtime, saved, 'tokenizer', BY_TOKENIZER)}; "
            "give that tokenizer. If each id stands for the same token in both tokenizers, or the run is to learn the "
            "meaning of the ids anew, give --allow-tokenizer-change"
        )
    return tokenizer_type_problem(runtime.config, saved, source)


def _changes(runtime: Runtime, saved: dict[str, Any]) -> Changes:
    """Return all settings that differ.

    Tokenizer and data are compared by content if the checkpoint holds their hashes.
    """
    compared_by_content = set()
    if saved.get("tokenizer_sha256") and runtime.tokenizer_sha256:
        compared_by_content.update(BY_TOKENIZER)
    if saved.get("data_sha256") and runtime.data_sha256:
        compared_by_content.update(BY_DATA)
    own_defaults = {flag.name: flag.default for flag in runtime.config.own.flags}
    return compare(runtime.config.as_json(), saved["config"], own_defaults, compared_by_content)


def _precisions(saved: dict[str, Any], config: Config) -> tuple[str, str]:
    """Return the precision of the checkpoint's run, and of this run."""
    return precision_of(saved["config"]["transformer"]), precision_of(config.as_json()["transformer"])


def _is_other(saved: dict[str, Any], name: str, own: str | None) -> bool:
    """Return whether a hash differs from the checkpoint's; False if either is unknown."""
    before = saved.get(name)
    return own is not None and before is not None and before != own


def _difference(change: Change) -> str:
    if change.is_new:
        return f"{change.name}: the checkpoint has none, this run has {change.now}"
    before = f"{change.name}: the checkpoint has {change.before}"
    if change.is_unknown:
        return f"{before}; this code has no such setting: use the code that wrote it"
    return f"{before}, this run has {change.now}"


def _flags_then_and_now(runtime: Runtime, saved: dict[str, Any], part: str, names: Sequence[str]) -> str:
    """Return the flags of tokenizer or data that differ, before and now, in words.

    If none does, the files have changed.
    """
    before = saved["config"].get(part, {})
    now = runtime.config.as_json()[part]
    differing = [name for name in names if before.get(name) != now[name]]
    if differing:
        return ", ".join(f"{name} {shown(before.get(name))} before, {shown(now[name])} now" for name in differing)
    given = ", ".join(shown(now[name]) for name in names if now[name] is not None)
    return f"the files have changed since ({given})"


# ---------------------------------------------------------------- the same optimizer?


def check_same_optimizer(runtime: Runtime, saved: dict[str, Any]) -> None:
    """Refuse a checkpoint without optimizer state, or with other moments. Raises ConfigError."""
    problem = _optimizer_state_problem(runtime.config, saved["config"]) or optimizer_problem(runtime.config, saved)
    if problem:
        load = runtime.config.checkpoint.load
        raise ConfigError(f"--load {load} has {problem}; --no-load-optim loads only the weights")


def _optimizer_state_problem(config: Config, saved: dict[str, Any]) -> str | None:
    """Return how the checkpoint's optimizer state differs from this run's, in words; None if it fits."""
    if not saved["checkpoint"].get("save_optim", True):
        return "no optimizer state (saved with --no-save-optim)"
    now = config.as_json()["optimizer"]
    before = {"optimizer": "adam"} | saved["optimizer"]
    wrong = type_mismatches(OptimizerConfig, before)
    if wrong:
        raise ConfigError([f"holds a state that no run has written: config/optimizer/{problem}" for problem in wrong])
    if now["optimizer"] != before["optimizer"]:
        return f"the state of --optimizer {before['optimizer']}, but this run uses {now['optimizer']}"

    # Compare part by part: Muon's momentum_buffer is of matrices alone, and sgd beside it has one of the other parameters.
    lacking: list[str] = []
    saved_config = build(OptimizerConfig, before)
    for moments, saved_moments in zip(config.optimizer.moments_by_part, saved_config.moments_by_part):
        lacking += [kind for kind in moments if kind not in saved_moments and kind not in lacking]
    if not lacking:
        return None
    changed = []
    for field in option_fields(OptimizerConfig):
        if before.get(field.name, now[field.name]) != now[field.name]:
            changed.append(f"{flags_of(field)[0]} was {before[field.name]}")
    return f"no {', '.join(lacking)} ({', '.join(changed)})"


# ---------------------------------------------------------------- what has changed, for the log


def print_changed_settings(runtime: Runtime, saved: dict[str, Any], *, resumes: bool = True) -> None:
    """Print the settings that differ from the checkpoint's and change the course of the run.

    resumes: False for a run that loads the weights alone; then only the script's own flags, and what changes the model, are
    printed.
    """
    config = runtime.config
    changes = _changes(runtime, saved)
    what = "resumed" if resumes else "weights are of a run"

    # what the checkpoint does not say
    if "model" not in saved:
        print_rank_0("the checkpoint does not name its model: assuming this run's model")
    if config.own.flags and "own" not in saved["config"]:
        print_rank_0("the checkpoint holds no flags of its script: they are not compared")

    # settings
    if resumes and changes.precision:
        before, now = _precisions(saved, config)
        print_rank_0(f"resumed with another precision: {before} before, {now} now")
    for change in changes.rope + changes.turned_on:
        print_rank_0(f"{what} with another {change.name}: {shown(change.before)} before, {shown(change.now)} now")
    own_names = {*saved["config"].get("own", ()), *(flag.name for flag in config.own.flags)}
    for change in changes.course:
        if resumes or (change.name in own_names and not change.is_new):
            before = "none" if change.is_new else shown(change.before)
            now = "unknown now" if change.is_unknown else f"{shown(change.now)} now"
            print_rank_0(f"{what} with another {change.name}: {before} before, {now}")

    # tokenizer, rotary angles, data, dropout masks
    if _is_other(saved, "tokenizer_sha256", runtime.tokenizer_sha256):
        print_rank_0(f"{what} with another tokenizer: {_flags_then_and_now(runtime, saved, 'tokenizer', BY_TOKENIZER)}")
    if resumes and rotary_restart_began(config, saved):
        print_rank_0(
            f"{what} with rotary angles that restart, by --reset-position-ids; in the checkpoint's run they did not"
        )
    if resumes and _is_other(saved, "data_sha256", runtime.data_sha256):
        print_rank_0(f"resumed with other data: {_flags_then_and_now(runtime, saved, 'data', BY_DATA)}")
    masks = saved.get("dropout_masks", 1)
    has_dropout = config.transformer.hidden_dropout or config.transformer.attention_dropout
    if resumes and masks != dropout_masks.MASKS_VERSION and has_dropout:
        print_rank_0(
            f"resumed with other dropout masks: drawn by version {masks} before, {dropout_masks.MASKS_VERSION} now"
        )

    # batch size; older checkpoints hold only the samples of an iteration
    batch_before = saved.get("global_batch_size") or TrainState.from_json(saved["train"]).samples_per_iter
    if resumes and runtime.global_batch_size != batch_before:
        print_rank_0(f"resumed with another global_batch_size: {batch_before} before, {runtime.global_batch_size} now")
