"""Reports of errors: whether the user caused one, torchrun's error file, and a hint about sequence parallelism."""

import contextlib
import dis
import json
import os
import sysconfig
import time

_MAX_CHARACTERS = 20_000  # of an error file: torchrun prints all of them
_RAISE = dis.opmap["RAISE_VARARGS"]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_user_error(error: ValueError) -> bool:
    """Return whether a `raise` of this project or of a script made this error: then it is about the user's input.

    Python and libraries raise ValueError too, for `a, b = [1]` or `max([])`. In the middle of our own code that is a
    bug, and must be shown with its traceback. Code that reads a user's file catches it there, and raises one that names
    the file.
    """
    traceback = error.__traceback__
    if traceback is None:  # made, and never raised
        return True
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    package = str(frame.f_globals.get("__name__")).split(".")[0]
    is_ours = package == __name__.split(".")[0]  # even if it is installed among the libraries
    is_library = frame.f_code.co_filename.startswith(_LIBRARIES) and not is_ours
    is_raise = frame.f_code.co_code[traceback.tb_lasti] == _RAISE  # not an operation of Python's that failed
    return is_raise and not is_library


def write_error_file(text: str, *, follows: bool = False) -> None:
    """Write `text` to torchrun's error file, unless this process has written it before. A no-op without torchrun.

    follows: another rank's error caused this one. torchrun shows the earliest error in whole seconds, so it is dated
    later.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    text = text.rstrip()[:_MAX_CHARACTERS]
    stamp = str(int(time.time()) + follows)
    content = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": stamp}}}
    with contextlib.suppress(OSError), open(path, "w") as file:  # torchrun removes its folder when it is killed
        json.dump(content, file)


def sequence_parallel_hint(length: int, expected: int) -> str:
    """Return a hint for hidden states of `length` tokens instead of `expected`, or "".

    There is one if either number is a multiple of the other.

    The usual cause is a model that ignores that sequence parallelism shards the sequence.
    """
    if length > expected and length % expected == 0:
        return (
            f"; that is {length // expected} times as long: --sequence-parallel shards hidden states along the sequence "
            "between layers; scatter them once after the embedding (scatter_to_sequence_parallel_region of "
            "megatron.core.tensor_parallel, or VocabParallelEmbedding with reduce_scatter_embeddings=True), or omit the flag"
        )
    if length < expected and expected % length == 0:
        return (
            f"; that is 1/{expected // length} of it: the model scatters the sequence over tensor-parallel ranks; give "
            "--sequence-parallel, or scatter only if config.sequence_parallel is set"
        )
    return ""
