"""Error reports: torchrun's error file, and a hint for lengths that differ by sequence parallelism."""

import contextlib
import json
import os
import time

_LONGEST = 20_000  # characters: torchrun prints all of them


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
