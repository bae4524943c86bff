"""The names of `megatron` that the Python files of a fork use, read from their syntax trees; nothing of it is imported."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ARGS = "get_args()"  # the name that attributes of the flags' namespace begin with


@dataclass(frozen=True)
class Use:
    """One use of a name.

    where: file:line. call: the keywords and the number of positional arguments of a call; None for any other use.
    is_guarded: an ImportError of it is caught, or only a type checker sees it.
    """

    name: str
    where: str
    keywords: tuple[str, ...] | None = None
    constants: tuple[tuple[str, object], ...] = ()  # keywords with a literal value
    num_positional: int = 0
    is_open: bool = False  # the call has *args or **options
    is_guarded: bool = False
    module: str = ""  # of an import: the module that must be importable


@dataclass
class NamesOfFile:
    """The uses of a file, the flags that it adds to a parser, and the attributes of `get_args()` that it assigns."""

    uses: list[Use] = field(default_factory=list)
    added_flags: set[str] = field(default_factory=set)
    set_attributes: set[str] = field(default_factory=set)


def names_of_file(path: Path, root: Path) -> NamesOfFile:
    """Return what a file uses. Raises SyntaxError or ValueError for a file that is not Python."""
    tree = ast.parse(path.read_bytes())
    place = str(path.relative_to(root))
    found = NamesOfFile()
    guarded = _guarded(tree)
    bound = _bind(tree, place, guarded, found)
    namespaces = _namespaces(tree, bound)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    hidden = _local_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) in namespaces:
            found.set_attributes.add(node.attr)
        if isinstance(node, ast.Call):
            found.added_flags |= _flags_added(node)
        if not isinstance(node, ast.Attribute | ast.Name) or not isinstance(node.ctx, ast.Load) or id(node) in inner:
            continue
        parts = dotted(node).split(".")
        where = f"{place}:{node.lineno}"
        if parts[0] in namespaces and len(parts) > 1:
            if parts[1] not in namespaces[parts[0]] and not parts[1].startswith("_"):
                found.uses.append(Use(f"{ARGS}.{parts[1]}", where, is_guarded=id(node) in guarded))
            continue
        if parts[0] not in bound or parts[0] in hidden.get(id(node), ()):
            continue
        name = ".".join([bound[parts[0]], *parts[1:]])
        call = calls.get(id(node))
        if call is None and len(parts) == 1:
            continue  # the import has been noted
        found.uses.append(_use(name, where, call, is_guarded=id(node) in guarded))
    return found


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of an expression of names; "" for any other, as for one that begins with a call."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def _guarded(tree: ast.AST) -> set[int]:
    """Return the nodes whose ImportError or AttributeError is caught, and those for type checkers."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        body: list[ast.stmt] = []
        if isinstance(node, ast.Try):
            caught = [ast.unparse(handler.type) if handler.type else "Exception" for handler in node.handlers]
            if any(
                kind in text
                for text in caught
                for kind in ("ImportError", "ModuleNotFound", "Exception", "AttributeError")
            ):
                body = node.body
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            body = node.body
        inside |= {id(inner) for statement in body for inner in ast.walk(statement)}
    return inside


def _bind(tree: ast.AST, place: str, guarded: set[int], found: NamesOfFile) -> dict[str, str]:
    """Note the imports; return what each imported name stands for."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "megatron":
                    bound[alias.asname or "megatron"] = alias.name if alias.asname else "megatron"
                    use = Use(alias.name, f"{place}:{node.lineno}", is_guarded=id(node) in guarded, module=alias.name)
                    found.uses.append(use)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "megatron":
            for alias in node.names:
                name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                use = Use(name, f"{place}:{node.lineno}", is_guarded=id(node) in guarded, module=node.module)
                found.uses.append(use)
                if alias.name != "*":
                    bound[alias.asname or alias.name] = name
    return bound


def _local_names(tree: ast.AST) -> dict[int, frozenset[str]]:
    """Return the names that functions bind themselves, by the nodes in which they hide imported ones."""
    hidden: dict[int, frozenset[str]] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
        names = {argument.arg for argument in every}
        nodes = list(ast.walk(function))
        names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for node in nodes:
            hidden[id(node)] = hidden.get(id(node), frozenset()) | names
    return hidden


def _namespaces(tree: ast.AST, bound: dict[str, str]) -> dict[str, set[str]]:
    """Return the variables that hold `get_args()`, each with the attributes that the file itself sets."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            function = dotted(node.value.func)
            full = bound.get(function.split(".")[0], "")
            if full and f"{full}.{function}".endswith("get_args"):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    own: dict[str, set[str]] = {name: set() for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) in own:
            own[dotted(node.value)].add(node.attr)
        elif (
            isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "hasattr", "getattr") and len(node.args) > 1
        ):
            name, attribute = dotted(node.args[0]), node.args[1]
            if name in own and isinstance(attribute, ast.Constant):
                own[name].add(str(attribute.value))
    return own


def _use(name: str, where: str, call: ast.Call | None, *, is_guarded: bool) -> Use:
    if call is None:
        return Use(name, where, is_guarded=is_guarded)
    keywords = tuple(keyword.arg for keyword in call.keywords if keyword.arg)
    constants = tuple((k.arg, k.value.value) for k in call.keywords if k.arg and isinstance(k.value, ast.Constant))
    is_open = len(keywords) < len(call.keywords) or any(isinstance(argument, ast.Starred) for argument in call.args)
    return Use(name, where, keywords, constants, len(call.args), is_open, is_guarded)


def _flags_added(call: ast.Call) -> set[str]:
    """Return the flags of a call of `add_argument`."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
        return set()
    texts = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and text.startswith("-")}


class OwnPackage:
    """The package `megatron` of a fork: where it defines what a script takes from it."""

    def __init__(self, files: Sequence[Path], root: Path) -> None:
        self.modules: dict[str, str] = {}
        self.flags: dict[str, str] = {}
        self._files = {}
        for file in files:
            parts = file.relative_to(root).with_suffix("").parts
            module = ".".join(parts[parts.index("megatron") :]).removesuffix(".__init__")
            place = str(file.relative_to(root))
            self.modules.setdefault(module, place)
            self._files[place] = file
            text = file.read_text(encoding="utf-8", errors="replace")
            for flag in re.findall(r"add_argument\(\s*[\"'](--[\w-]+)", text):
                self.flags.setdefault(flag, place)

    def home_of(self, name: str) -> str | None:
        """Return the file that defines a full name, or the file of its module; None if there is neither."""
        module, _, last = name.rpartition(".")
        if name in self.modules:
            return self.modules[name]
        while module:
            if module in self.modules:
                place = self.modules[module]
                text = self._files[place].read_text(encoding="utf-8", errors="replace")
                return place if re.search(rf"\b{re.escape(last)}\b", text) else None
            module, _, last = module.rpartition(".")
        return None
