"""Does transformers read the tokenizers that are carried? python tests/support/exchange/tokenizer_folders.py FOLDER

Run in an environment with transformers (5.x, then 4.57), sentencepiece and protobuf. FOLDER: made before by `python
tests/support/exchange/tokenizer_folders.py write FOLDER`, in the project's own environment. AutoTokenizer must give the ids of the folder that
came in, and those of the package `tokenizers`, for mixed texts and a chat. Exit code 1 if one differs.
"""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

import cases  # noqa: E402

TEXTS = (
    "Hello world, grüße 日本語 🙂 <s> </s> [SEP] [MASK]",
    "<|endoftext|>x  two  spaces\n\ttab ﬁ e\u0301",
    "hello [CLS] the cat<|tool|>",
)
CHAT = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
_WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "hello",
    "Hello",
    "the",
    "cat",
    "wor",
    "##ld",
    ",",
    "日",
    "e",
    "##e",
]


def _fast(root: Path) -> None:
    """A tokenizer.json with the tokenizer_config.json of transformers 5."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<s>", "</s>", "<|tool|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    made.save(str(root / "tokenizer.json"))
    config = {"backend": "tokenizers", "bos_token": "<s>", "eos_token": "<|endoftext|>", "model_max_length": 32}
    config |= {"extra_special_tokens": ["</s>", "<|tool|>"], "tokenizer_class": "TokenizersBackend"}
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    (root / "chat_template.jinja").write_text(CHAT)
    (root / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5}))
    (root.parents[1] / "ids.json").write_text(json.dumps([made.encode(text).ids for text in TEXTS]))


def _bert(root: Path) -> None:
    (root / "vocab.txt").write_text("\n".join(_WORDS) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (root / "tokenizer_config.json").write_text(json.dumps(config))


def _pieces(root: Path) -> None:
    import sentencepiece

    texts, model = (["the cat sat on the mat", "grüße an alle", "日本語 🙂", *TEXTS] * 20), io.BytesIO()
    options = {"vocab_size": 360, "hard_vocab_limit": False, "byte_fallback": True, "minloglevel": 3}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="bpe", **options
    )
    (root / "tokenizer.model").write_bytes(model.getvalue())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (root / "tokenizer_config.json").write_text(json.dumps(config))


# name -> (the model that the folder holds, what writes its tokenizer)
FOLDERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "tokenizer.json": ("llama", _fast),
    "vocab.txt": ("bert", _bert),
    "tokenizer.model": ("llama", _pieces),
}


def write_in(root: Path, name: str) -> Path:
    """The folder in/NAME below `root`, with a model and this tokenizer."""
    folder, (case, write) = root / "in" / name, FOLDERS[name]
    cases.write_folder(folder, cases.read_record(case))
    write(folder)
    return folder


def write(root: Path) -> None:
    from tools import checkpoint_convert

    for name in FOLDERS:
        words = ["--load", str(write_in(root, name)), "--save-hf", str(root / "out" / name)]
        assert checkpoint_convert.main(words) == 0


def _ids(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    chat = [{"role": "user", "content": "hello"}]
    said = tokenizer.apply_chat_template(chat, tokenize=False) if tokenizer.chat_template else None
    return found, sorted(map(str, tokenizer.all_special_tokens)), said


def check(root: Path) -> int:
    import transformers

    print(f"transformers {transformers.__version__}")
    wrong = 0
    for name in FOLDERS:
        found = _ids(root / "out" / name)
        try:
            expected = _ids(root / "in" / name)
        except (ValueError, AttributeError) as error:  # 4.57, of a file that 5 has written
            print(f"{name}: the folder that came in is not read: {str(error)[:80]}")
            expected = found
        if name == "tokenizer.json":
            expected = json.loads((root / "ids.json").read_text()), *expected[1:]
            wrong += found[2] != "<s>hello</s>" or "<|tool|>" not in found[1]
        print(f"{name}: {sum(map(len, found[0]))} ids, {'equal' if found == expected else 'they differ'}")
        wrong += found != expected
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        sys.exit(check(Path(sys.argv[1])))
