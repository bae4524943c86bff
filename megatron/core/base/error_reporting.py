"""Error reports: whose fault an error is, torchrun's error file, and a hint for lengths that differ by sequence
parallelism."""

import contextlib
import dis
import json
import os
import sysconfig
import time

_LONGEST = 20_000  # characters: torchrun prints all of them


_RAISE = dis.opmap["RAISE_VARARGS"]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_told_to_user(error: ValueError) -> bool:
    """Whether a `raise` of this project or of a script made this error, as it does for what a user gave.

    Python and libraries raise ValueError too, for `a, b = [1]` or `max([])`. In the middle of our own code that is a bug,
    and must be shown with its traceback. Code that reads a user's file catches it there, and raises one that names the file.
    """
    traceback = error.__traceback__
    if traceback is None:  # made, and never raised
        return True
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    is_ours = str(frame.f_globals.get("__name__")).split(".")[0] == __name__.split(".")[0]
    is_of_library = frame.f_code.co_filename.startswith(_LIBRARIES) and not is_ours
    return frame.f_code.co_code[traceback.tb_lasti] == _RAISE and not is_of_library


def write_error_file(text: str, *, follows: bool = False) -> None:
    """Writes `text` to torchrun's error file, unless this process has written it before. A no-op without torchrun.

    follows: another rank's error caused this one. torchrun shows the earliest error in whole seconds, so it is dated later.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    text = text.rstrip()[:_LONGEST]
    stamp = str(int(time.time()) + follows)
    content = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": stamp}}}
    with contextlib.suppress(OSError), open(path, "w") as file:  # torchrun removes its folder when it is killed
        json.dump(content, file)


def sequence_parallel_hint(given: int, expected: int) -> str:
    """A hint for hidden states of `given` tokens instead of `expected`, if one is a multiple of the other; else "".

    The usual cause is a model that ignores that sequence parallelism shards the sequence.
    """
    if given > expected and given % expected == 0:
        return (
            f"; that is {given // expected} times as long: --sequence-parallel shards hidden states along the sequence "
            "between layers; scatter them once after the embedding (scatter_to_sequence_parallel_region of "
            "megatron.core.tensor_parallel, or VocabParallelEmbedding with reduce_scatter_embeddings=True), or omit the flag"
        )
    if given < expected and expected % given == 0:
        return (
            f"; that is 1/{expected // given} of it: the model scatters the sequence over tensor-parallel ranks; give "
            "--sequence-parallel, or scatter only if config.sequence_parallel is set"
        )
    return ""
