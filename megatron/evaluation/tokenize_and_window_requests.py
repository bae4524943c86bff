"""Texts to requests of token ids, as lm-evaluation-harness and Megatron's tasks cut them. Without torch.

A request is (context, continuation), both ids; the model is asked for log p of the continuation.
"""

from collections.abc import Iterator, Sequence

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.tokenizers.tokenizer_registry import Tokenizer

Request = tuple[Sequence[int], Sequence[int]]


class TextEncoder:
    """The ids of texts, by a tokenizer.

    prefix_id: the token before a text that has no context: the tokenizer's first token (bos), else the one that ends
    documents. Raises ConfigError where there is neither.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        bos = getattr(tokenizer, "bos", None)
        self.prefix_id = tokenizer.eod if bos is None or bos < 0 else bos
        if self.prefix_id is None:
            raise ConfigError(
                f"{tokenizer.name} has no token that begins or ends a text, which the first token of a text is predicted from"
            )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text; special: with those that the tokenizer's template adds, unless the text has them."""
        if special and self._begins_with_prefix(text):
            special = False
        try:
            if special or not hasattr(self.tokenizer, "tokenize_sentences"):
                return self.tokenizer.tokenize(text)
            return self.tokenizer.tokenize_sentences([text])[0]
        except (ValueError, UnicodeEncodeError) as error:
            raise ConfigError(f"the text {text!a:.60} cannot be read by {self.tokenizer.name}: {error}") from None

    def _begins_with_prefix(self, text: str) -> bool:
        names = getattr(self.tokenizer, "inv_vocab", None)
        name = None if names is None else names.get(self.prefix_id)
        return bool(name) and text.startswith(name)

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and of what follows it.

        Both are encoded together: the continuation is what the whole has beyond the context's own ids. Spaces at the end
        of the context belong to the continuation, whose words begin with them. An empty context is the prefix token.
        """
        if not context:
            ids = self.encode(continuation, special=False)
            if ids and ids[0] == self.prefix_id:
                return ids[:1], ids[1:]
            return [self.prefix_id], ids
        kept = context.rstrip()
        if kept != context:
            continuation = context[len(kept) :] + continuation
        if not kept:  # nothing but spaces
            return self.pair("", continuation)
        context_ids = self.encode(kept)
        return context_ids, self.encode(kept + continuation)[len(context_ids) :]

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.detokenize(list(ids))


def rolling_windows(ids: Sequence[int], prefix_id: int, max_length: int) -> Iterator[Request]:
    """Yield requests that predict each id once, of at most `max_length` ids each, as lm-evaluation-harness does.

    The first begins with the prefix token. The last is filled up with earlier ids as its context.

        ids a b c d e, max_length 3     p | a b c       c | d e with b before it, since there is room
    """
    if not ids:
        return
    first = min(max_length, len(ids))
    yield [prefix_id], ids[:first]
    done = first
    while done < len(ids):
        stop = min(done + max_length, len(ids))
        begin = max(0, stop - max_length - 1)
        yield ids[begin:done], ids[done:stop]
        done = stop


def overlapping_windows(ids: Sequence[int], length: int, step: int) -> Iterator[Request]:
    """Yield requests that predict each id but the first once, as Megatron's WikiText-103 task does.

    Windows of `length` ids begin every `step` ids, and of all but the first the last `step` predictions count.

        ids 0 .. 8, length 4, step 2    0 | 1 2 3 4     2 3 4 | 5 6     4 5 6 | 7 8
    """
    done = min(length, len(ids) - 1)
    if done < 1:
        return
    yield ids[:1], ids[1 : done + 1]
    begin = step
    while done < len(ids) - 1:
        stop = min(begin + length, len(ids) - 1)
        yield ids[begin : done + 1], ids[done + 1 : stop + 1]
        done = stop
        begin += step
