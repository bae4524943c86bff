"""SentencePiece models that tests train."""

import io

import numpy as np


def train_pieces(path, **options):
    """A small sentencepiece model with byte fallback."""
    import sentencepiece

    model = io.BytesIO()
    sentence = "the cat sat on the mat and the dogs ate their fish near a river with stones while it rained"
    words = sentence.split()
    rng = np.random.default_rng(1)
    lines = [" ".join(rng.choice(words, 8)) for _ in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=290, byte_fallback=True, minloglevel=3, **options
    )
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_file=str(path))
