"""Whether a fork's names and flags are here, and what to change, asked of the modules and the parser themselves."""

import argparse
import ast
import difflib
import importlib
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron
from megatron.core.base.dataclass_flags import ConfigError, nearest_flag
from megatron.core.base.lazy_imports import is_refused
from megatron.core.base.moved_or_unbuilt_megatron_names import ELSEWHERE, REASONS, reason_of
from megatron.porting.flags_in_launch_scripts import FlagUse
from megatron.porting.names_used_by_fork import ARGS, OwnPackage, Use
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.ignored_and_refused_flags import NO_EFFECT, OTHERS, REFUSED, SILENT, WARNED
from megatron.training.arguments.parser import make_parser

PACKAGE = Path(megatron.__file__).resolve().parent
_PAGE = "docs/coming_from_megatron.md"
_REFUSING = ("others", "backend_options")  # catch-all parameters of functions that refuse most of what they catch
_MAY_LACK = {"pretrain": {"model_type"}}  # calls in the order of an older release, which the function recognises
# flags of launchers, which torch.distributed and DeepSpeed put before the script or the script must take
_OF_LAUNCHERS = {"--local_rank", "--local-rank"}
# what `get_args()` has besides flags: `derived_settings` of megatron/training/initialize.py
_DERIVED = set(
    [
        "rank",
        "world_size",
        "data_parallel_size",
        "params_dtype",
        "padded_vocab_size",
        "virtual_pipeline_model_parallel_size",
        "global_batch_size",
        "max_position_embeddings",
        "ffn_hidden_size",
        "kv_channels",
        "transformer_pipeline_model_parallel_size",
        "iteration",
        "curr_iteration",
        "consumed_train_samples",
        "skipped_train_samples",
        "consumed_valid_samples",
        "do_train",
        "do_valid",
        "do_test",
    ]
)
_FIRST_FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 8"
)


@dataclass
class Entry:
    """A name or a flag, its state ("there", "other" or "missing"), where it stands, and what to change."""

    name: str
    state: str
    change: str = ""
    where: list[str] = field(default_factory=list)
    is_optional: bool = False  # the fork catches its ImportError


# ---- names


def find(name: str) -> Any:
    """Return the object of a full name. Raises AttributeError or ImportError if there is none."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def only_raises(thing: Any) -> bool:
    """Return whether a call of a function or a class does nothing but raise."""
    if is_refused(thing):
        return True
    thing = thing.__init__ if inspect.isclass(thing) else thing
    if not inspect.isfunction(thing):
        return False
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, SyntaxError, TypeError):  # made by a lambda or without a source
        return False
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    body = node.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def judge_names(
    uses: Sequence[Use],
    flags_of_fork: Collection[str] = (),
    own: OwnPackage | None = None,
    set_attributes: Collection[str] = (),
) -> list[Entry]:
    """Return the names that are used, each with the worst state of its uses.

    set_attributes: those that the fork's files assign to `get_args()`.
    """
    entries: dict[str, Entry] = {}
    gone: set[str] = set()  # imports that fail: what is reached through them is theirs
    own_attributes = {flag.lstrip("-").replace("-", "_") for flag in flags_of_fork} | set(set_attributes)
    for use in uses:
        before = next((name for name in _prefixes(use.name) if name in gone), None)
        if before is not None and not use.module:
            if use.where not in entries[before].where:
                entries[before].where.append(use.where)
            continue
        if use.name.startswith(ARGS):
            name, state, change = _judge_attribute(use.name, own_attributes, own)
        else:
            name, state, change = _judge_use(use, own)
        entry = entries.setdefault(name, Entry(name, "there", is_optional=True))
        rank = ("there", "other", "missing").index
        if rank(state) > rank(entry.state):
            entry.state, entry.change, entry.where = state, change, []
        if state == entry.state and use.where not in entry.where:
            entry.where.append(use.where)
        entry.is_optional &= use.is_guarded
        if use.module and state == "missing":
            gone.add(name)
    for entry in entries.values():
        if entry.is_optional and entry.state == "missing":
            entry.change += "; the fork catches this"
    return [entries[name] for name in sorted(entries)]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _judge_attribute(name: str, own_attributes: Collection[str], own: OwnPackage | None) -> tuple[str, str, str]:
    attribute = name.removeprefix(f"{ARGS}.")
    if attribute in attributes_of_args() or attribute in own_attributes or hasattr(argparse.Namespace, attribute):
        return name, "there", ""
    homes = own.flags if own else {}
    flag = next((flag for flag in homes if flag.lstrip("-").replace("-", "_") == attribute), None)
    if flag:
        return name, "missing", f"the fork's own flag ({homes[flag]}): add {flag} by extra_args_provider of pretrain()"
    near = difflib.get_close_matches(attribute, attributes_of_args(), 1, 0.8)
    hint = f"the nearest is args.{near[0]}" if near else "set it in the script, or add the flag by extra_args_provider"
    return name, "missing", f"get_args() has no {attribute}; {hint}"


@cache
def attributes_of_args() -> frozenset[str]:
    """Return the names of `get_args()` in a run."""
    return frozenset(vars(parse_args(_FIRST_FLAGS.split()).args)) | _DERIVED


def _judge_use(use: Use, own: OwnPackage | None) -> tuple[str, str, str]:
    """Return the name up to where it is known, its state, and what to change."""
    if use.module:
        problem = _import_problem(use.module)
        if problem:
            return use.name, "missing", f"{problem}; {_instead_of(use.name, own)}"
    path, *parts = use.name.split(".")
    thing: Any = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        if not isinstance(thing, ModuleType | type) or is_refused(thing):
            return path.rpartition(".")[0], *_judge_call(use, thing, is_whole=False)
        try:
            thing = getattr(thing, part)
        except AttributeError:
            if not isinstance(thing, ModuleType) or _import_problem(path):
                return path, "missing", _instead_of(path, own)
            thing = importlib.import_module(path)
        except ImportError as error:
            return path, "missing", f"{error}"
    return path, *_judge_call(use, thing, is_whole=True)


def _import_problem(module: str) -> str:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"there is no module {error.name}"
    except Exception as error:
        return f"{module} cannot be imported: {error}"
    return ""


def _judge_call(use: Use, thing: Any, *, is_whole: bool) -> tuple[str, str]:
    if only_raises(thing):
        return "missing", f"it is importable, and raises when it is called: {_reason_of(use.name, thing)}"
    if use.keywords is None or not is_whole or not (inspect.isroutine(thing) or inspect.isclass(thing)):
        return "there", ""
    try:
        signature = inspect.signature(thing)
    except (ValueError, TypeError):
        return "there", ""
    lacking = _MAY_LACK.get(thing.__name__, set())
    defaults_only, ignored = _further_arguments(thing, signature)
    problem = call_problem(use, signature, defaults_only, ignored, lacking)
    return ("other", problem) if problem else ("there", "")


def _further_arguments(thing: Any, signature: inspect.Signature) -> tuple[dict[str, Any], set[str] | None]:
    """Return the arguments that a function takes at one value only, and the names that its **others takes.

    None: it takes any name. A function of ours that is written `**others` refuses all names but those of its module's tables.
    """
    holder = thing.__init__ if isinstance(thing, type) else thing
    defaults_only = dict(getattr(holder, "__defaults_only__", {}))
    catch_all = [p.name for p in signature.parameters.values() if p.kind == inspect.Parameter.VAR_KEYWORD]
    if not catch_all:
        return defaults_only, set()
    if catch_all[0] not in _REFUSING:
        return defaults_only, None
    tables = vars(importlib.import_module(inspect.unwrap(holder).__module__))
    names = {"tp_comm_buffer_name", "tp_group"}
    for table in ("_WITHOUT_EFFECT", "_IGNORED_VALUES", "_NOT_BUILT"):
        names.update(tables.get(table, ()))
    if isinstance(tables.get("_NOT_BUILT"), dict):
        defaults_only |= tables["_NOT_BUILT"]
    return defaults_only, names


def call_problem(
    use: Use,
    signature: inspect.Signature,
    defaults_only: dict[str, Any],
    further: Collection[str] | None = (),
    may_lack: Collection[str] = (),
) -> str:
    """Return what a call gives that the function does not take, or leaves out that it needs; "" if nothing.

    defaults_only: arguments that are taken at these values only. further: names that it takes besides; None: any.
    may_lack: arguments that a call may leave out nevertheless.
    """
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    by_place = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    takes_many = any(p.kind == kinds.VAR_POSITIONAL for p in parameters)
    by_name = {p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    unknown = [name for name in use.keywords or () if further is not None and name not in {*by_name, *further}]
    if unknown:
        taken = ", ".join(p.name for p in parameters)
        return f"it does not take {', '.join(f'{name}=' for name in unknown)}; leave it out. It takes: {taken}"
    if use.num_positional > len(by_place) and not takes_many:
        return (
            f"{use.num_positional} arguments are given by place, and it takes {len(by_place)}: give the others by name"
        )
    needed = [p.name for p in by_place[use.num_positional :] if p.default is p.empty]
    needed += [p.name for p in parameters if p.kind == kinds.KEYWORD_ONLY and p.default is p.empty]
    lacking = [name for name in needed if name not in (use.keywords or ()) and name not in may_lack]
    if lacking and not use.is_open:
        return f"it needs {', '.join(f'{name}=' for name in lacking)}"
    for name, value in use.constants:
        if name in defaults_only and value != defaults_only[name]:
            return f"{name}={value!r} is not built; leave it at its default, {defaults_only[name]!r}"
    return ""


def _reason_of(name: str, thing: Any) -> str:
    try:
        needed = [p for p in inspect.signature(thing).parameters.values() if p.default is p.empty]
        by_name = {p.name: None for p in needed if p.kind == p.KEYWORD_ONLY}
        by_place = [None for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        thing(*by_place, **by_name)
    except NotImplementedError as error:
        return str(error)
    except Exception:
        pass
    return _page_of(name.rpartition(".")[0])


def _page_of(module: str) -> str:
    """Return the reason why names of a module are not here, with its page."""
    while module and module not in REASONS:
        module = module.rpartition(".")[0]
    return reason_of(module) if module and module != "megatron.core" else f"see {_PAGE}"


def _instead_of(name: str, own: OwnPackage | None) -> str:
    """Return what to write in place of a missing name."""
    last = name.rpartition(".")[2]
    common = {"megatron", "core", "training", "legacy", last}
    parts = set(name.split(".")) - common
    is_telling = not last.islower() or last.count("_") > 1  # build, setup, ... are names of many things
    homes = [
        home
        for home in homes_of_name(last)
        if f"{home}.{last}" != name and (is_telling or parts & set(home.split(".")))
    ]
    place = own.home_of(name) if own else None
    copy = f"the fork's own ({place}): keep it in a module beside the script" if place else ""
    if homes:
        nearest = min(homes, key=lambda home: (-len(parts & set(home.split("."))), home))
        return f"{last} is in {nearest}: import it from there{f'; or, {copy}' if copy else ''}"
    if copy:
        return f"{copy}; {_page_of(name)}"
    module = name.rpartition(".")[0]
    if not _import_problem(module):
        near = difflib.get_close_matches(last, dir(importlib.import_module(module)), 1, 0.75)
        if near:
            return f"the nearest is {module}.{near[0]}; {_page_of(module)}"
    return _page_of(name)


@cache
def _definitions() -> dict[str, list[str]]:
    """Return the public functions and classes of this package, each with its modules."""
    found: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[1] not in ("core", "training", "legacy", "deepspeed"):
            continue
        module = ".".join(parts).removesuffix(".__init__")
        for name in re.findall(r"^(?:def|class) ([A-Za-z]\w*)", file.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, []).append(module)
    for module, homes in ELSEWHERE.items():
        for names in homes.values():
            for name in names.split():
                found.setdefault(name, []).append(module)
    return found


def homes_of_name(name: str) -> list[str]:
    """Return the modules here that define a public function or class of this name."""
    return _definitions().get(name, []) if len(name) > 3 else []


# ---- flags


def judge_flags(
    uses: Sequence[FlagUse], flags_of_fork: Collection[str] = (), own: OwnPackage | None = None
) -> list[Entry]:
    """Return the flags that are passed, each with the worst state of its uses."""
    parser = make_parser()
    actions = parser.actions_by_flag()
    entries: dict[str, Entry] = {}
    for use in uses:
        if use.flag in _OF_LAUNCHERS:
            continue
        state, change = _judge_flag(use, parser, actions, flags_of_fork, own)
        entry = entries.setdefault(use.flag, Entry(use.flag, "there", change))
        rank = ("there", "other", "missing").index
        if rank(state) > rank(entry.state):
            entry.state, entry.change, entry.where = state, change, []
        if state == entry.state and use.where not in entry.where:
            entry.where.append(use.where)
    return [entries[flag] for flag in sorted(entries)]


def _judge_flag(
    use: FlagUse, parser: Any, actions: dict[str, Any], flags_of_fork: Collection[str], own: OwnPackage | None
) -> tuple[str, str]:
    flag = use.flag
    if flag in flags_of_fork:
        return "there", "a flag of the fork's own"
    if flag not in actions:
        near = nearest_flag(flag, list(actions), parser.refused)
        if own and flag in own.flags:
            place = f"the fork's own flag ({own.flags[flag]}): leave it out, or add it by extra_args_provider"
            return "missing", f"{place}{f'; the nearest here is {near}' if near else ''}"
        return (
            "missing",
            f"the nearest is {near}" if near else "leave it out, or add it by extra_args_provider of pretrain()",
        )
    other = OTHERS.get(flag)
    if other is not None:
        value = list(use.value) if use.value else []
        if flag in REFUSED:
            if value and other.is_harmless(value if other.values == "*" else value[0]):
                return "there", "its value asks for the only behaviour there is"
            return ("other" if other.harmless else "missing"), f"refused: {other.reason}"
        kind = "WARNING" if flag in WARNED else "no effect"
        return "there", f"{kind}: {other.reason}" if flag in {**NO_EFFECT, **WARNED, **SILENT} else ""
    if use.value is None or (not use.value and actions[flag].nargs != 0):  # a variable, which may be empty here
        return "there", ""
    try:
        read = parser.read([flag, *use.value])
    except ConfigError as error:
        return "other", "; ".join(error.problems)
    if read.unreadable:
        return "other", "; ".join(read.unreadable.values())
    return "there", ""


def wrong(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the entries that must change."""
    return (entry for entry in entries if entry.state != "there")
