"""The text of WikiText as it was before its tokenization: `@-@`, spaces around punctuation, quotes, headings.

The replacements are those of Megatron's `tasks/zeroshot_gpt/detokenizer.py` and of lm-evaluation-harness's task
`wikitext`, in their order: another one gives another perplexity.
"""

import re

_NUMBER_MARKS = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))
_PUNCTUATION = tuple((f" {mark} ", f"{mark} ") for mark in ":;.!?,")
# an opening mark, what stands between, a closing one: the spaces inside go
_ENCLOSED = (
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
)
_HEADINGS = (("= = = =", "===="), ("= = =", "==="), ("= =", "=="))
_REST = ((" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"))


def detokenized(text: str) -> str:
    """Return WikiText's text as it was written."""
    text = text.replace("s '", "s'")
    text = re.sub(r"/' [0-9]/", r"/'[0-9]/", text)
    for old, new in (*_NUMBER_MARKS, *_PUNCTUATION):
        text = text.replace(old, new)
    for pattern, new in _ENCLOSED:
        text = re.sub(pattern, new, text)
    for old, new in (*_HEADINGS, *_REST):
        text = text.replace(old, new)
    return text
