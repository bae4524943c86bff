"""Settings that differ from layer to layer, as Megatron-LM reads them: N, or a list of a 1 or a 0 for each layer. Pure."""

import argparse
import ast
from functools import cache

LONGEST = 10_000  # layers in a list


def is_exception(pattern: str | None, layer: int, *, marked: int) -> bool:
    """Whether a pattern leaves this layer out. layer: from 0, over the whole model.

    pattern: as `read_pattern` returns it: N leaves out layers N - 1, 2 N - 1, ..., a list those with the number
    `marked`; None
    leaves out no layer.
    """
    if pattern is None:
        return False
    parsed = _parsed(str(pattern))  # a script may give a list
    return layer % parsed == parsed - 1 if isinstance(parsed, int) else parsed[layer] == marked


def read_pattern(text: str) -> str:
    """ "4" from that; "[1,1,0,1,1,0]" from that, "[1,1,0]*2" or "([1]*2+[0])*2"."""
    try:
        value = layer_pattern(text)
    except (SyntaxError, ValueError, RecursionError):
        value = 0
    if not (value >= 1 if isinstance(value, int) else value and {*value} <= {0, 1}):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither N, a whole number from 1 on (each Nth layer is the exception), nor a list of a 1 or a 0 for "
            "each layer, such as [1,1,0]*4"
        )
    return str(value).replace(" ", "")


def layer_pattern(skip_freq: str | int | list[int]) -> int | list[int]:
    """N, or a list: of itself and of each of its spellings. Raises ValueError or SyntaxError for others."""
    text = str(skip_freq).strip()
    return _list(ast.parse(text, mode="eval").body) if "[" in text else int(text)


def _list(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=parts):
            return [_number(part) for part in parts]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list(left) + _list(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            repeated, times = (right, left) if isinstance(left, ast.Constant) else (left, right)
            if (entries := _list(repeated)) and len(entries) * _number(times) <= LONGEST:
                return entries * _number(times)
    raise ValueError(ast.dump(node))


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(ast.dump(node))


_parsed = cache(layer_pattern)  # asked for by each layer
