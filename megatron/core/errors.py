"""What an error says beyond itself: a hint at the flag to change, and the file in which torchrun looks for it."""

import contextlib
import json
import os
import time

_LONGEST = 20_000  # characters: torchrun prints all of them


def write_error_file(text: str, *, follows: bool = False) -> None:
    """Leave `text` for torchrun's last block, unless this process has left something already. Without torchrun nothing happens.

    follows: the error is another rank's. torchrun shows the earliest error it finds, and counts whole seconds.
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
    """What to change where hidden states are `given` tokens long instead of `expected`, if one is a multiple of the other, as
    it is where a model forgets that sequence parallelism divides them; else nothing."""
    if given > expected and given % expected == 0:
        return (
            f"; that is {given // expected} times as long: under --sequence-parallel each tensor-parallel rank holds its part of "
            "the sequence between the layers, so scatter it once, after the embedding (scatter_to_sequence_parallel_region of "
            "megatron.core.tensor_parallel, or its VocabParallelEmbedding with reduce_scatter_embeddings=True), or leave out "
            "--sequence-parallel"
        )
    if given < expected and expected % given == 0:
        return (
            f"; that is one part of {expected // given}: the model scatters the sequence over the tensor-parallel ranks; give "
            "--sequence-parallel, so that the layers know, or scatter only where config.sequence_parallel says so"
        )
    return ""
