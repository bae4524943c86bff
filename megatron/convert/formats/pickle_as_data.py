"""The values of a pickle, read without running it: its instructions only ever make plain data. No torch.

    None, bool, int, float, str, bytes, list, dict, tuple     as they are; a set is a list
    Named(module, name)                                       a class or function that the pickle names
    Made(of, arguments, state, items)                         what that would have made; nothing is called
    Beside(place)                                             what lies beside the pickle

A pickle is a program: an unpickler imports what the file names and calls it. Here a name stays a name, and one that no
checkpoint
needs is refused. A file may be hostile: its bytes and instructions are bounded, and no value is built by recursion.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

MOST_BYTES = 64 << 20  # of a pickle; that of a rank's file with 100 layers has one or two
_MOST_STEPS = 10_000_000  # instructions: a value takes about ten
_MOST_DIGITS = 32  # bytes of a whole number

# Modules whose names are harmless, and that checkpoints name: in a dictionary of arguments, a state of random numbers, ...
_MODULES = (
    *(
        "torch",
        "numpy",
        "collections",
        "argparse",
        "enum",
        "pathlib",
        "signal",
        "datetime",
        "types",
        "_codecs",
        "_io",
        "io",
    ),
    *("megatron", "apex", "transformer_engine", "fp16", "copyreg", "copy_reg", "functools"),
)
_BUILTINS = [
    "set",
    "frozenset",
    "list",
    "dict",
    "tuple",
    "int",
    "float",
    "complex",
    "bool",
    "str",
    "bytes",
    "bytearray",
    "slice",
    "range",
    "object",
]


class PickleError(ValueError):
    """A pickle that is damaged, or asks for what no checkpoint needs."""


class Named(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """An object that a pickle asks for; equal to itself alone."""

    __slots__ = ("arguments", "items", "of", "state")

    def __init__(self, of: Any, arguments: Any):
        self.of, self.arguments = of, arguments
        self.state: Any = None
        self.items: list[Any] = []  # appended to a list, or pairs set in a dictionary

    def is_a(self, *names: str) -> bool:
        return isinstance(self.of, Named) and str(self.of) in names


class Beside(NamedTuple):
    """A value beside the pickle, and what the pickle says of its place."""

    place: Any


def read_pickle(data: bytes) -> tuple[Any, int]:
    """(the value of the pickle at the start of `data`, the bytes that it takes). Raises PickleError."""
    reader = _Reader(data[:MOST_BYTES])
    try:
        return reader.run(), reader.at
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise PickleError(f"is no pickle from byte {reader.at} on ({type(error).__name__})") from error


class _Reader:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MOST_STEPS):
            code = self.take(1)
            if code == b".":
                return self.pop()
            if code not in _INSTRUCTIONS:
                raise PickleError(f"has the instruction {code!r} at byte {self.at - 1}, which no checkpoint needs")
            _INSTRUCTIONS[code](self)
        raise PickleError(f"has more than {_MOST_STEPS} instructions")

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.data) - self.at:
            raise PickleError(f"ends within {count} bytes at byte {self.at}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str) -> Any:
        """A number of a `struct` kind."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def counted(self, kind: str) -> bytes:
        """Bytes after their number."""
        return self.take(self.number(kind))

    def line(self) -> str:
        stop = self.data.find(b"\n", self.at, self.at + 1000)
        if stop < 0:
            raise PickleError(f"has a name without an end at byte {self.at}")
        return self.take(stop + 1 - self.at)[:-1].decode()

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise PickleError(f"takes a value that is not there at byte {self.at}")
        return self.stack.pop()

    def above_mark(self) -> list[Any]:
        """The values since the last mark, removed."""
        mark = self.marks.pop()
        found = self.stack[mark:]
        del self.stack[mark:]
        return found

    def name(self, module: Any, name: Any) -> Named:
        known = isinstance(module, str) and isinstance(name, str) and module.isprintable() and name.isprintable()
        if not known or not (
            module.split(".")[0] in _MODULES or (module in ("builtins", "__builtin__") and name in _BUILTINS)
        ):
            what = f"{module:.60}.{name:.60}" if isinstance(module, str) and isinstance(name, str) else "no text"
            raise PickleError(f"names {what!r}, which no checkpoint needs")
        return Named(module, name)


def _made(of: Any, arguments: Any) -> Any:
    if not isinstance(of, Named) or not isinstance(arguments, tuple):
        raise PickleError("calls what is no name")
    if str(of) in ("collections.OrderedDict", "builtins.dict") and not arguments:
        return {}
    return Made(of, arguments)


def _call(reader: _Reader) -> None:
    arguments = reader.pop()
    reader.stack.append(_made(reader.pop(), arguments))


def _call_with_names(reader: _Reader) -> None:
    named, arguments = reader.pop(), reader.pop()
    made = _made(reader.pop(), arguments)
    if named and isinstance(made, Made):
        made.state = named
    reader.stack.append(made)


def _build(reader: _Reader) -> None:
    state, target = reader.pop(), reader.pop()
    if isinstance(target, Made):
        target.state = state
    elif not isinstance(target, dict):  # whose attributes, as `_metadata` of a state_dict, nobody reads
        raise PickleError("gives a state to what has none")
    reader.stack.append(target)


def _append(target: Any, values: list[Any]) -> None:
    if not isinstance(target, list | Made):
        raise PickleError("appends to what is no list")
    (target if isinstance(target, list) else target.items).extend(values)


def _set(target: Any, values: list[Any]) -> None:
    if len(values) % 2 or not isinstance(target, dict | Made):
        raise PickleError("sets items of what is no dictionary")
    pairs = list(zip(values[::2], values[1::2]))
    if isinstance(target, Made):
        target.items.extend(pairs)
        return
    for key, value in pairs:
        if not _is_key(key):
            raise PickleError(f"has a key of type {type(key).__name__}")
        target[key] = value


def _is_key(key: Any) -> bool:
    plain = str | int | float | bytes | Made | None
    return isinstance(key, plain) or (isinstance(key, tuple) and all(isinstance(one, plain) for one in key))


def _onto_top(
    change: Callable[[Any, list[Any]], None], take: Callable[[_Reader], list[Any]]
) -> Callable[[_Reader], None]:
    """Changes the value below those that `take` removes."""

    def run(reader: _Reader) -> None:
        values = take(reader)
        target = reader.pop()
        change(target, values)
        reader.stack.append(target)

    return run


def _last(count: int) -> Callable[[_Reader], list[Any]]:
    return lambda reader: [reader.pop() for _ in range(count)][::-1]


def _pushed(value: Callable[[_Reader], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(value(reader))


def _remember(number: Callable[[_Reader], int]) -> Callable[[_Reader], None]:
    def run(reader: _Reader) -> None:
        reader.stack.append(value := reader.pop())
        reader.memo[number(reader)] = value

    return run


def _whole_number(data: bytes) -> int:
    if len(data) > _MOST_DIGITS:
        raise PickleError(f"has a whole number of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _bounded_protocol(reader: _Reader) -> None:
    if (protocol := reader.number("B")) > 5:
        raise PickleError(f"has protocol {protocol}; read are those up to 5")


def _global(reader: _Reader) -> Named:
    module = reader.line()
    return reader.name(module, reader.line())


def _global_of_stack(reader: _Reader) -> Named:
    name = reader.pop()
    return reader.name(reader.pop(), name)


_Instruction = Callable[[_Reader], None]
_INSTRUCTIONS: dict[bytes, _Instruction] = {
    b"\x80": _bounded_protocol,
    b"\x95": lambda reader: reader.number("Q") and None,  # a frame: how much to read at once
    b"(": lambda reader: reader.marks.append(len(reader.stack)),
    b"0": lambda reader: reader.pop() and None,
    b"1": lambda reader: reader.above_mark() and None,
    b"N": _pushed(lambda reader: None),
    b"\x88": _pushed(lambda reader: True),
    b"\x89": _pushed(lambda reader: False),
    b"J": _pushed(lambda reader: reader.number("i")),
    b"K": _pushed(lambda reader: reader.number("B")),
    b"M": _pushed(lambda reader: reader.number("H")),
    b"\x8a": _pushed(lambda reader: _whole_number(reader.counted("B"))),
    b"\x8b": _pushed(lambda reader: _whole_number(reader.counted("I"))),
    b"G": _pushed(lambda reader: struct.unpack(">d", reader.take(8))[0]),
    b"X": _pushed(lambda reader: _text(reader.counted("I"))),
    b"\x8c": _pushed(lambda reader: _text(reader.counted("B"))),
    b"\x8d": _pushed(lambda reader: _text(reader.counted("Q"))),
    b"U": _pushed(lambda reader: reader.counted("B").decode("latin-1")),  # text of Python 2
    b"T": _pushed(lambda reader: reader.counted("I").decode("latin-1")),
    b"C": _pushed(lambda reader: reader.counted("B")),
    b"B": _pushed(lambda reader: reader.counted("I")),
    b"\x8e": _pushed(lambda reader: reader.counted("Q")),
    b"\x96": _pushed(lambda reader: reader.counted("Q")),
    b")": _pushed(lambda reader: ()),
    b"t": _pushed(lambda reader: tuple(reader.above_mark())),
    b"\x85": _pushed(lambda reader: tuple(_last(1)(reader))),
    b"\x86": _pushed(lambda reader: tuple(_last(2)(reader))),
    b"\x87": _pushed(lambda reader: tuple(_last(3)(reader))),
    b"]": _pushed(lambda reader: []),
    b"l": _pushed(_Reader.above_mark),
    b"\x8f": _pushed(lambda reader: []),
    b"\x91": _pushed(_Reader.above_mark),
    b"a": _onto_top(_append, _last(1)),
    b"e": _onto_top(_append, _Reader.above_mark),
    b"\x90": _onto_top(_append, _Reader.above_mark),
    b"}": _pushed(lambda reader: {}),
    b"s": _onto_top(_set, _last(2)),
    b"u": _onto_top(_set, _Reader.above_mark),
    b"c": _pushed(_global),
    b"\x93": _pushed(_global_of_stack),
    b"R": _call,
    b"\x81": _call,
    b"\x92": _call_with_names,
    b"b": _build,
    b"q": _remember(lambda reader: reader.number("B")),
    b"r": _remember(lambda reader: reader.number("I")),
    b"\x94": _remember(lambda reader: len(reader.memo)),
    b"h": _pushed(lambda reader: reader.memo[reader.number("B")]),
    b"j": _pushed(lambda reader: reader.memo[reader.number("I")]),
    b"Q": _pushed(lambda reader: Beside(reader.pop())),
}
