"""Output of tools/generate.py: texts to standard output, or records to a JSONL file."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from megatron.core import parallel_state
from megatron.core.inference.generate import text_pieces
from megatron.core.tokenizers import Tokenizer


class Writer:
    """Writes texts to stdout or --genfile on the first rank; discards them on the others."""

    def __init__(self, tokenizer: Tokenizer | None, genfile: TextIO | None, *, numbered: bool):
        self.tokenizer = tokenizer  # None on every rank but the first
        self.genfile = genfile
        self.numbered = numbered  # print a heading above each text
        self.prints = tokenizer is not None and genfile is None

    def write(
        self,
        prompt_and_sample: tuple[int, int],
        prompt: str,
        ids: list[int] | None,
        new_ids: Iterable[int],
        max_new_tokens: int,
    ) -> int:
        """Write one text while its ids are generated; return the number of new ids.

        prompt_and_sample: the numbers of the prompt and of the sample, from 0. ids: the prompt's; None: the text
        does not contain the prompt (T5). new_ids: must be consumed on every rank, since each next one takes a
        forward of all ranks.
        """
        num_new = 0

        def counted() -> Iterator[int]:
            nonlocal num_new
            for new_id in new_ids:
                num_new += 1
                yield new_id

        if self.tokenizer is None:
            for _ in counted():
                pass
            return num_new

        if self.prints and self.numbered:
            self._print(f"=== prompt {prompt_and_sample[0] + 1}, sample {prompt_and_sample[1] + 1}\n")
        beginning = "" if ids is None else prompt
        self._print(beginning)
        pieces = []
        for piece in text_pieces(self.tokenizer, ids or [], counted()):
            self._print(piece)
            pieces.append(piece)
        self._print("\n")

        if self.genfile is not None:
            text = beginning + "".join(pieces)
            is_finished = num_new < max_new_tokens
            record = {"prompt": prompt, "text": text, "length": num_new, "finished": is_finished}
            self.genfile.write(json.dumps(record, ensure_ascii=False) + "\n")
            self.genfile.flush()
        return num_new

    def _print(self, text: str) -> None:
        if not self.prints:
            return
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:
            # The reader has closed stdout. Python flushes stdout at exit, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.prints = False
            if parallel_state.launched_world_size() == 1:  # other ranks need this rank until the last text
                raise
