"""Folders whose special tokens stand beside tokenizer.json, and what transformers gives for them: records/special_tokens.json.

    python tests/support/exchange/special_token_folders.py FOLDER    in an environment with transformers 5.23, then in one with 4.57

writes the folders below FOLDER, opens each with AutoTokenizer, and puts the version's answers into the record. The tests compare our
ids with the record. Texts are single words and single tokens: how text is cut is another matter.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "records" / "special_tokens.json"
WORDS = ["cat", "dog", "mat"]
TEXTS = ["cat", "", "<|im_end|>", "<|im_start|>", "<|tool|>", "<extra>", "<s>", "</s>", "<img>", "<pad>"]
_CLASSES = ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer", "GemmaTokenizer", "GPTNeoXTokenizer"]
_CLASSES += ["Qwen2Tokenizer", "GPT2Tokenizer", None]
_TOKENS = ["<|im_start|>", "<|im_end|>", "<|tool|>", "<extra>", "<s>", "</s>", "<pad>", "<unk>"]


def library_of(kind: str | None, byte_level: bool, special: list[str], template: str | None) -> Any:
    """A BPE of whole words, of bytes or of pieces as Llama's or Gemma's, with `special` as its added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else ["\u2581", *"acdgmot<>|_/seimnrtxlpu"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*special, *letters]))}
    merges = []
    for word in WORDS if byte_level or kind == "GemmaTokenizer" else ["\u2581" + word for word in WORDS]:
        for k in range(2, len(word) + 1):
            if word[:k] not in vocab:
                vocab[word[:k]] = len(vocab)
                merges.append((word[: k - 1], word[k - 1]))
    made = Tokenizer(models.BPE(vocab, merges, fuse_unk=True))
    if byte_level:
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif kind == "GemmaTokenizer":
        made.normalizer = normalizers.Replace(" ", "\u2581")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if template:
        tokens = [(token, vocab[token]) for token in special if token in template.split()]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    return made


def smallest(folder: Path) -> None:
    """500 words, and two tokens of a chat that tokenizer_config.json alone names, one of them the end of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, 500)}}, "<|endoftext|>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    chat = {"500": {"content": "<|im_start|>", "special": True}, "501": {"content": "<|im_end|>", "special": True}}
    config = {"added_tokens_decoder": chat, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _drawn(number: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        rng = random.Random(number)
        kind = _CLASSES[number % len(_CLASSES)]
        byte_level = kind in ("Qwen2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer") or rng.random() < 0.4
        byte_level = byte_level and kind != "GemmaTokenizer"
        there = [token for token in ("<s>", "</s>", "<unk>", "<pad>") if rng.random() < 0.6]
        template = "<s> $A" if "<s>" in there and rng.random() < 0.5 else None
        library_of(kind, byte_level, there, template).save(str(folder / "tokenizer.json"))

        def described(token: str) -> Any:
            if rng.random() < 0.5:
                return token
            flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": rng.random() < 0.3}
            return {"__type": "AddedToken", "content": token, **flags, "special": rng.random() < 0.8}

        def drawn(chance: float) -> dict[str, Any]:
            said: dict[str, Any] = {}
            for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
                if rng.random() < chance:
                    said[key] = rng.choice([described(rng.choice(_TOKENS)), rng.choice(_TOKENS), None])
            if rng.random() < chance:
                said["additional_special_tokens"] = rng.sample(_TOKENS, rng.randint(0, 3))
            return said

        config = drawn(0.6) | ({} if kind is None else {"tokenizer_class": kind})
        if rng.random() < 0.4:
            config["add_bos_token"] = rng.random() < 0.5
            config["add_eos_token"] = rng.random() < 0.4
        if rng.random() < 0.3:
            config["extra_special_tokens"] = rng.choice([{"image_token": "<img>"}, ["<extra>", "<|tool|>"], {}])
        if rng.random() < 0.15:
            config["image_token"] = "<img>"
        if rng.random() < 0.5:
            start = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
            tokens = list(
                dict.fromkeys([*there, *rng.sample(_TOKENS, rng.randint(1, 5))])
            )  # published ones list them all
            ids = [start.get(token, len(start) + rng.randint(0, 9) * 10 + k) for k, token in enumerate(tokens)]
            special = [rng.random() < 0.8 for _ in tokens]
            config["added_tokens_decoder"] = {
                str(i): {
                    "content": token,
                    **{
                        "lstrip": False,
                        "rstrip": False,
                        "single_word": False,
                        "normalized": False,
                        "special": is_special,
                    },
                }
                for i, token, is_special in zip(ids, tokens, special)
            }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if rng.random() < 0.4:
            (folder / "special_tokens_map.json").write_text(json.dumps(drawn(0.5)))
        if rng.random() < 0.2:
            size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
            added = {token: size + k for k, token in enumerate(["<extra>", "<|tool|>"])}
            (folder / "added_tokens.json").write_text(json.dumps(added))

    return write


def chat_template(folder: Path) -> None:
    """A chat template may begin with the begin token; the ids of plain text do not depend on it."""
    smallest(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"bos_token": "<|begin|>", "chat_template": "{{ bos_token }}{{ messages }}"}
    path.write_text(json.dumps(config))


FOLDERS: dict[str, Callable[[Path], None]] = {
    "smallest": smallest,
    "chat template": chat_template,
    **{f"drawn {number}": _drawn(number) for number in range(160)},
}


def write_folder(root: Path, name: str) -> Path:
    folder = root / name.replace(" ", "-")
    folder.mkdir(parents=True)
    FOLDERS[name](folder)
    return folder


def answers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever it raises, this version does not read the folder
        return f"{type(error).__name__}: {str(error)[:60]}"
    found = {"size": len(tokenizer), "ids": [tokenizer(text)["input_ids"] for text in TEXTS]}
    return found | {key: getattr(tokenizer, f"{key}_token_id") for key in ("bos", "eos", "pad")}


def main(root: Path) -> None:
    import transformers

    version = transformers.__version__
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in FOLDERS:
        record.setdefault(name, {})[version] = answers(write_folder(root, name))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(record[name])}" for name in FOLDERS)
    RECORD.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
