"""Read the values of a pickle without running it: its opcodes only ever make plain data. No torch.

    None, bool, int, float, str, bytes, list, dict, tuple     as they are; a set is a list
    GlobalName(module, name)                                  a class or function that the pickle names
    PickledObject(constructor, arguments, state, items)       what a call would have made; nothing is called
    PersistentId(pid)                                         a value outside the pickle, such as a tensor's storage

A pickle is a program: an unpickler imports what the file names and calls it. Here a name stays a name, and one
that no checkpoint needs is refused. A file may be hostile: its bytes and opcodes are bounded, and no value is
built by recursion.
Opcodes: https://docs.python.org/3/library/pickletools.html
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

MOST_BYTES = 64 << 20  # of a pickle; that of a rank's file with 100 layers has one or two
_MOST_STEPS = 10_000_000  # opcodes: a value takes about ten
_MOST_DIGITS = 32  # bytes of a whole number

# Modules whose names are harmless, and that checkpoints use: in a namespace of arguments, a state of random numbers, ...
_MODULES = (
    *("torch", "numpy", "collections", "argparse", "enum", "pathlib", "signal", "datetime", "types"),
    *("_codecs", "_io", "io", "megatron", "apex", "transformer_engine", "fp16", "copyreg", "copy_reg", "functools"),
)
_BUILTINS = (
    *("set", "frozenset", "list", "dict", "tuple", "int", "float", "complex", "bool", "str"),
    *("bytes", "bytearray", "slice", "range", "object"),
)


class PickleError(ValueError):
    """A pickle that is damaged, or asks for what no checkpoint needs."""


class GlobalName(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class PickledObject:
    """An object that a pickle would construct; equal to itself alone."""

    __slots__ = ("arguments", "constructor", "items", "state")

    def __init__(self, constructor: Any, arguments: Any):
        self.constructor = constructor
        self.arguments = arguments
        self.state: Any = None
        self.items: list[Any] = []  # appended to a list, or pairs set in a dictionary

    def is_a(self, *names: str) -> bool:
        """Return whether its class or function is one of these, such as "argparse.Namespace"."""
        return isinstance(self.constructor, GlobalName) and str(self.constructor) in names


class PersistentId(NamedTuple):
    """A value outside the pickle, and what the pickle says of its place."""

    pid: Any


def read_pickle(data: bytes) -> tuple[Any, int]:
    """Return (the value of the pickle at the start of `data`, the number of its bytes). Raises PickleError."""
    unpickler = _Unpickler(data[:MOST_BYTES])
    try:
        return unpickler.run(), unpickler.position
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise PickleError(
            f"is not a valid pickle from byte {unpickler.position} on ({type(error).__name__})"
        ) from error


class _Unpickler:
    """The stack machine of pickle: position in the data, stack, marks, memo."""

    def __init__(self, data: bytes):
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []  # lengths of the stack
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MOST_STEPS):
            opcode = self.take(1)
            if opcode == b".":
                return self.pop()
            if opcode not in _OPCODES:
                raise PickleError(
                    f"has the pickle instruction {opcode!r} at byte {self.position - 1}, which no checkpoint needs"
                )
            _OPCODES[opcode](self)
        raise PickleError(f"has more than {_MOST_STEPS} instructions")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if not 0 <= count <= len(self.data) - self.position:
            raise PickleError(f"ends too early: at byte {self.position} its pickle needs {count} more bytes")
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, code: str) -> Any:
        """Return the next number, of a `struct` format code, little-endian."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def counted(self, code: str) -> bytes:
        """Return bytes that follow their number."""
        return self.take(self.number(code))

    def line(self) -> str:
        stop = self.data.find(b"\n", self.position, self.position + 1000)
        if stop < 0:
            raise PickleError(f"has a pickle with a name that never ends, from byte {self.position} on")
        return self.take(stop + 1 - self.position)[:-1].decode()

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise PickleError(
                f"has a pickle instruction before byte {self.position} that takes a value from an empty stack"
            )
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        """Remove and return the values since the last mark."""
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def name(self, module: Any, name: Any) -> GlobalName:
        """Return a class or function of an allowed module."""
        are_texts = isinstance(module, str) and isinstance(name, str)
        is_allowed = False
        if are_texts and module.isprintable() and name.isprintable():
            is_builtin = module in ("builtins", "__builtin__") and name in _BUILTINS
            is_allowed = module.split(".")[0] in _MODULES or is_builtin
        if not is_allowed:
            what = f"{module:.60}.{name:.60}" if are_texts else "no text"
            raise PickleError(f"has a pickle that names {what!r}, a class or function that no checkpoint needs")
        return GlobalName(module, name)


def _construct(constructor: Any, arguments: Any) -> Any:
    if not isinstance(constructor, GlobalName) or not isinstance(arguments, tuple):
        raise PickleError("has a pickle that calls an object that is not a class or function")
    if str(constructor) in ("collections.OrderedDict", "builtins.dict") and not arguments:
        return {}
    return PickledObject(constructor, arguments)


def _call(unpickler: _Unpickler) -> None:
    arguments = unpickler.pop()
    unpickler.stack.append(_construct(unpickler.pop(), arguments))


def _call_with_keywords(unpickler: _Unpickler) -> None:
    keywords = unpickler.pop()
    arguments = unpickler.pop()
    value = _construct(unpickler.pop(), arguments)
    if keywords and isinstance(value, PickledObject):
        value.state = keywords
    unpickler.stack.append(value)


def _build(unpickler: _Unpickler) -> None:
    """Set the state of an object."""
    state = unpickler.pop()
    target = unpickler.pop()
    if isinstance(target, PickledObject):
        target.state = state
    elif not isinstance(target, dict):  # attributes of a dictionary, as `_metadata` of a state_dict, are not read
        raise PickleError("has a pickle that sets the state of a value that cannot have a state")
    unpickler.stack.append(target)


def _append(target: Any, values: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, PickledObject):
        target.items.extend(values)
    else:
        raise PickleError("has a pickle that appends to a value that is not a list")


def _set_items(target: Any, values: list[Any]) -> None:
    """values: key, value, key, value, ..."""
    if len(values) % 2 or not isinstance(target, dict | PickledObject):
        raise PickleError("has a pickle that sets items of a value that is not a dictionary")
    pairs = list(zip(values[::2], values[1::2]))
    if isinstance(target, PickledObject):
        target.items.extend(pairs)
        return
    for key, value in pairs:
        if not _is_key(key):
            raise PickleError(f"has a dictionary key of type {type(key).__name__}, which no checkpoint needs")
        target[key] = value


def _is_key(key: Any) -> bool:
    plain = str | int | float | bytes | PickledObject | None
    if isinstance(key, plain):
        return True
    return isinstance(key, tuple) and all(isinstance(item, plain) for item in key)


def _change_top(
    change: Callable[[Any, list[Any]], None], take_values: Callable[[_Unpickler], list[Any]]
) -> Callable[[_Unpickler], None]:
    """Return the opcode that takes values, and changes the value below them."""

    def run(unpickler: _Unpickler) -> None:
        values = take_values(unpickler)
        target = unpickler.pop()
        change(target, values)
        unpickler.stack.append(target)

    return run


def _last(count: int) -> Callable[[_Unpickler], list[Any]]:
    return lambda unpickler: [unpickler.pop() for _ in range(count)][::-1]


def _push(value_of: Callable[[_Unpickler], Any]) -> Callable[[_Unpickler], None]:
    return lambda unpickler: unpickler.stack.append(value_of(unpickler))


def _memoize(key_of: Callable[[_Unpickler], int]) -> Callable[[_Unpickler], None]:
    def run(unpickler: _Unpickler) -> None:
        value = unpickler.pop()
        unpickler.stack.append(value)
        unpickler.memo[key_of(unpickler)] = value

    return run


def _integer(data: bytes) -> int:
    if len(data) > _MOST_DIGITS:
        raise PickleError(f"has a whole number of {len(data)} bytes, which is too long")
    return int.from_bytes(data, "little", signed=True)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _protocol(unpickler: _Unpickler) -> None:
    protocol = unpickler.number("B")
    if protocol > 5:
        raise PickleError(f"has pickle protocol {protocol}; only protocols up to 5 can be read")


def _mark(unpickler: _Unpickler) -> None:
    unpickler.marks.append(len(unpickler.stack))


def _frame(unpickler: _Unpickler) -> None:
    unpickler.number("Q")  # how many bytes to buffer


def _drop(unpickler: _Unpickler) -> None:
    unpickler.pop()


def _drop_to_mark(unpickler: _Unpickler) -> None:
    unpickler.pop_mark()


def _global(unpickler: _Unpickler) -> GlobalName:
    module = unpickler.line()
    return unpickler.name(module, unpickler.line())


def _stack_global(unpickler: _Unpickler) -> GlobalName:
    name = unpickler.pop()
    return unpickler.name(unpickler.pop(), name)


_OPCODES: dict[bytes, Callable[[_Unpickler], None]] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"(": _mark,
    b"0": _drop,
    b"1": _drop_to_mark,
    b"N": _push(lambda unpickler: None),
    b"\x88": _push(lambda unpickler: True),
    b"\x89": _push(lambda unpickler: False),
    b"J": _push(lambda unpickler: unpickler.number("i")),
    b"K": _push(lambda unpickler: unpickler.number("B")),
    b"M": _push(lambda unpickler: unpickler.number("H")),
    b"\x8a": _push(lambda unpickler: _integer(unpickler.counted("B"))),
    b"\x8b": _push(lambda unpickler: _integer(unpickler.counted("I"))),
    b"G": _push(lambda unpickler: struct.unpack(">d", unpickler.take(8))[0]),
    b"X": _push(lambda unpickler: _text(unpickler.counted("I"))),
    b"\x8c": _push(lambda unpickler: _text(unpickler.counted("B"))),
    b"\x8d": _push(lambda unpickler: _text(unpickler.counted("Q"))),
    b"U": _push(lambda unpickler: unpickler.counted("B").decode("latin-1")),  # text of Python 2
    b"T": _push(lambda unpickler: unpickler.counted("I").decode("latin-1")),
    b"C": _push(lambda unpickler: unpickler.counted("B")),
    b"B": _push(lambda unpickler: unpickler.counted("I")),
    b"\x8e": _push(lambda unpickler: unpickler.counted("Q")),
    b"\x96": _push(lambda unpickler: unpickler.counted("Q")),
    b")": _push(lambda unpickler: ()),
    b"t": _push(lambda unpickler: tuple(unpickler.pop_mark())),
    b"\x85": _push(lambda unpickler: tuple(_last(1)(unpickler))),
    b"\x86": _push(lambda unpickler: tuple(_last(2)(unpickler))),
    b"\x87": _push(lambda unpickler: tuple(_last(3)(unpickler))),
    b"]": _push(lambda unpickler: []),
    b"l": _push(_Unpickler.pop_mark),
    b"\x8f": _push(lambda unpickler: []),
    b"\x91": _push(_Unpickler.pop_mark),
    b"a": _change_top(_append, _last(1)),
    b"e": _change_top(_append, _Unpickler.pop_mark),
    b"\x90": _change_top(_append, _Unpickler.pop_mark),
    b"}": _push(lambda unpickler: {}),
    b"s": _change_top(_set_items, _last(2)),
    b"u": _change_top(_set_items, _Unpickler.pop_mark),
    b"c": _push(_global),
    b"\x93": _push(_stack_global),
    b"R": _call,
    b"\x81": _call,
    b"\x92": _call_with_keywords,
    b"b": _build,
    b"q": _memoize(lambda unpickler: unpickler.number("B")),
    b"r": _memoize(lambda unpickler: unpickler.number("I")),
    b"\x94": _memoize(lambda unpickler: len(unpickler.memo)),
    b"h": _push(lambda unpickler: unpickler.memo[unpickler.number("B")]),
    b"j": _push(lambda unpickler: unpickler.memo[unpickler.number("I")]),
    b"Q": _push(lambda unpickler: PersistentId(unpickler.pop())),
}
