"""Ten batches of a T5's training, cut from a text in English, and the losses of transformers on them, step by step.

    python tests/support/exchange/real_text.py batches TEXT      with the product: words learned from TEXT, sentences, spans left out
    python tests/support/exchange/real_text.py losses            with transformers, in an environment of its own: adds its losses

Both write records/t5-text.json, which holds the batches, so that the tests need neither.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RECORD, ROOT = HERE / "records" / "t5-text.json", HERE.parents[1]
ENCODER, DECODER, SAMPLES, STEPS, SENTINELS = 32, 16, 4, 10, 20
KEYS = ("text_enc", "enc_mask", "text_dec", "labels", "loss_mask")


def batches(text: Path) -> None:
    """TEXT: speeches with an empty line between them; eight are a document."""
    sys.path.insert(0, str(ROOT))
    from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
    from megatron.core.datasets.data_config import DataConfig
    from megatron.core.datasets.t5_dataset_builder import build_t5_datasets
    from megatron.core.tokenizers import build_tokenizer
    from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig

    speeches = text.read_text().split("\n\n")[:800]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        documents = ["\n".join(speeches[i : i + 8]) for i in range(0, len(speeches), 8)]
        (place / "docs.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
        words = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", f"{folder}/vocab.txt"]
        learn = ["--kind", "wordpiece", "--input", f"{folder}/docs.jsonl", "--vocab-size", "400"]
        run("train_tokenizer", *learn, "--output", f"{folder}/vocab.txt")
        cut = ["--input", f"{folder}/docs.jsonl", "--output-prefix", f"{folder}/docs", "--split-sentences"]
        run("preprocess_data", *cut, *words)
        tokenizer = build_tokenizer(
            TokenizerConfig(tokenizer_type=words[1], vocab_file=words[3], vocab_extra_ids=SENTINELS)
        )
        data = DataConfig(
            data_path=[f"{folder}/docs_text_sentence"], split="1", seq_length=ENCODER, decoder_seq_length=DECODER
        )
        train, _, _ = build_t5_datasets(data, MaskedDataConfig(), tokenizer, [SAMPLES * STEPS, 0, 0], 1234)
        items = [train[i] for i in range(SAMPLES * STEPS)]
    made = [
        {key: [items[i][key].tolist() for i in range(start, start + SAMPLES)] for key in KEYS}
        for start in range(0, SAMPLES * STEPS, SAMPLES)
    ]
    record = {"text": text.name, "vocab_size": tokenizer.vocab_size, "batches": made}
    RECORD.write_text(json.dumps(record) + "\n")


def run(tool: str, *words: str) -> None:
    subprocess.run([sys.executable, f"tools/{tool}.py", *words], cwd=ROOT, check=True)


def losses() -> None:
    """Of each model of `T5_CASES`, with as many words as the text has: those of ten steps of AdamW, dropout 0, in float64."""
    sys.path.insert(0, str(HERE))
    import record as ours  # in which float32 means float64
    import torch

    found = json.loads(RECORD.read_text())
    for name, wanted in ours.cases.T5_CASES.items():
        config = wanted | {"vocab_size": found["vocab_size"]}
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            ours.filled(config).save_pretrained(root)
            written, shapes = json.loads((root / "config.json").read_text()), ours.tensors_of(root)
            if config.get("tie_word_embeddings") is False:
                written["tie_word_embeddings"], shapes["lm_head.weight"] = False, shapes["shared.weight"]
            ours.cases.write_folder(root, {"config": written, "shapes": shapes})
            (root / "model.safetensors").unlink()
            model = ours.loaded(root, config)
        optimizer, steps = torch.optim.AdamW(model.parameters(), lr=0.001, eps=1e-8, weight_decay=0.1), []
        for batch in found["batches"]:
            optimizer.zero_grad()
            given = {key: torch.tensor(value) for key, value in batch.items()}
            scores = model(
                input_ids=given["text_enc"], attention_mask=given["enc_mask"], decoder_input_ids=given["text_dec"]
            ).logits
            each = torch.nn.functional.cross_entropy(
                scores.flatten(0, 1), given["labels"].flatten(), ignore_index=-1, reduction="none"
            )
            mask = given["loss_mask"].flatten().double()
            loss = (each * mask).sum() / mask.sum()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        found[name] = {"config": written, "shapes": shapes, "losses": steps}
        print(name, steps)
    found["versions"] = {"transformers": ours.transformers.__version__, "torch": torch.__version__.split("+")[0]}
    RECORD.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    batches(Path(sys.argv[2])) if sys.argv[1:2] == ["batches"] else losses()
