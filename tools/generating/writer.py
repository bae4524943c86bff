"""Where tools/generate.py writes its texts."""

import json
import os
import sys
from collections.abc import Iterable
from typing import TextIO

from megatron.core import parallel_state
from megatron.core.inference.generate import text_pieces
from megatron.core.tokenizers import Tokenizer


class Writer:
    """Writes texts to stdout or --genfile on the first rank; discards them on the others."""

    def __init__(self, tokenizer: Tokenizer | None, genfile: TextIO | None, *, numbered: bool):
        self.tokenizer, self.genfile = tokenizer, genfile
        self.numbered = numbered
        self.prints = tokenizer is not None and genfile is None

    def write(
        self, which: tuple[int, int], prompt: str, ids: list[int] | None, new_ids: Iterable[int], limit: int
    ) -> int:
        """Write one text, streaming `new_ids`; returns their number. ids: of the prompt; None: it is no part of the text. limit:
        --max-new-tokens."""
        new: list[int] = []
        counted = (new.append(id) or id for id in new_ids)
        if self.tokenizer is None:
            return sum(1 for _ in counted)
        if self.prints and self.numbered:
            self._print(f"=== prompt {which[0] + 1}, sample {which[1] + 1}\n")
        begin = "" if ids is None else prompt
        self._print(begin)
        pieces = []
        for piece in text_pieces(self.tokenizer, ids or [], counted):
            self._print(piece)
            pieces.append(piece)
        self._print("\n")
        if self.genfile is not None:
            text, length = begin + "".join(pieces), len(new)
            record = {"prompt": prompt, "text": text, "length": length, "finished": length < limit}
            self.genfile.write(json.dumps(record, ensure_ascii=False) + "\n")
            self.genfile.flush()
        return len(new)

    def _print(self, text: str) -> None:
        if not self.prints:
            return
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:  # stdout was closed; nothing may be flushed into it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.prints = False
            if parallel_state.launched_world_size() == 1:  # other ranks need this one to the end
                raise
