"""Runs the published megatron-core package on the cases of a JSON file and writes what it makes of them as .npz files.

    python -I oracle.py MEGATRON_CORE_PATH CASES.json OUTPUT

A script of its own, in a process of its own: that package is called `megatron`, as ours is. Cases are lists [kind, {..}],
kinds are the functions of this file; case i gives OUTPUT/i.npz.
"""

import importlib.util
import json
import os
import sys
import types
import warnings

core_path, cases_path, output = sys.argv[1:4]
sys.path[:] = [core_path] + [p for p in sys.path if not os.path.exists(os.path.join(p, "megatron", "__init__.py"))]
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron.core.datasets.blended_dataset import BlendedDataset  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402


class Tokenizer:
    """What the data sets ask of a tokenizer: numbers, and the vocabulary of a BERT."""

    def __init__(self, vocab_size: int, eod: int, pad: int, words: list[str] | None = None):
        self.vocab_size, self.eod, self.pad = vocab_size, eod, pad
        words = words or [str(i) for i in range(vocab_size)]
        self.inv_vocab = dict(enumerate(words))
        self.vocab = {word: i for i, word in enumerate(words)}
        self.unique_identifiers = {"class": "Tokenizer"}
        self.cls, self.sep, self.mask, self.bos, self.eos = 1, 2, 3, 4, 5
        self.additional_special_tokens_ids = list(range(vocab_size - 100, vocab_size))


def gpt_config(seed: int, seq_length: int, cache: str, tokenizer: dict | None = None, **options) -> GPTDatasetConfig:
    defaults = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, "split": "1"}
    settings = defaults | {"blend": (["unused"], None)} | options
    tokenizer = Tokenizer(**(tokenizer or {"vocab_size": 1000, "eod": 999, "pad": 998}))
    return GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, path_to_cache=cache, tokenizer=tokenizer, **settings
    )


def items_of(dataset, count: int) -> dict[str, np.ndarray]:
    rows = [dataset[i] for i in range(min(count, len(dataset)))]
    return {f"item_{key}": np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]} if rows else {}


def gpt(prefix, ids, num_samples, split="train", items=0, **config):
    ids = np.arange(*ids, dtype=np.int32)
    dataset = GPTDataset(IndexedDataset(prefix), prefix, ids, num_samples, Split[split], gpt_config(**config))
    arrays = {name: getattr(dataset, name) for name in ("document_index", "sample_index", "shuffle_index")}
    return arrays | items_of(dataset, items)


def batches(prefix, ids, num_samples, consumed, micro_batch_size, rank, size, **config):
    """The micro-batches of one data-parallel rank. The sampler is no part of the package; its rule: of every
    micro_batch_size * size numbers in a row, from the consumed ones on, the rank takes its slice; a last, short block is left out."""
    ids = np.arange(*ids, dtype=np.int32)
    dataset = GPTDataset(IndexedDataset(prefix), prefix, ids, num_samples, Split.train, gpt_config(**config))
    mine, block = [], []
    for number in range(consumed, len(dataset)):
        block.append(number)
        if len(block) == micro_batch_size * size:
            mine.append(block[rank * micro_batch_size : (rank + 1) * micro_batch_size])
            block = []
    read = list(torch.utils.data.DataLoader(dataset, batch_sampler=mine))
    return {f"batch_{name}": torch.stack([batch[name] for batch in read]).numpy() for name in read[0]}


def fim(path, rules, **case):
    """Items of Megatron-LM's own GPTFIMDataset, in the file `path`; its one generator is set anew for each item, as ours is."""
    spec = importlib.util.spec_from_file_location("fim_dataset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ids, config = np.arange(*case["ids"], dtype=np.int32), case["config"]
    tokenizer = Tokenizer(**config.pop("tokenizer"))
    names = {name: i for i, name in enumerate(tokenizer.inv_vocab.values())}
    tokenizer._tokenizer = types.SimpleNamespace(  # a token is a letter
        tokens_to_ids=lambda words: names[words] if isinstance(words, str) else [names[word] for word in words],
        ids_to_text=lambda ids: "".join(chr(i) for i in ids),
        text_to_ids=lambda text: [ord(letter) for letter in text],
    )
    settings = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, "split": "1"}
    config = module.GPTFIMDatasetConfig(
        random_seed=config["seed"],
        sequence_length=config["seq_length"],
        path_to_cache=config["cache"],
        tokenizer=tokenizer,
        blend=(["unused"], None),
        allow_ambiguous_pad_tokens=True,
        **settings,
        **rules,
    )
    prefix = case["prefix"]
    dataset = module.GPTFIMDataset(IndexedDataset(prefix), prefix, ids, case["num_samples"], Split.train, config)
    rows = []
    for i in range(case["items"]):
        dataset.np_rng = np.random.RandomState([config.random_seed, i, 0])
        rows.append({key: np.asarray(value) for key, value in dataset[i].items()})
    return {f"item_{key}": np.stack([row[key] for row in rows]) for key in ("tokens", "labels")}


def blending(weights, size):
    """The bare selection order."""
    from megatron.core.datasets import helpers

    weights = np.array(weights, np.float64)
    weights = weights / sum(weights.tolist())
    chosen, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(chosen, numbers, weights, len(weights), size, False)
    return {"dataset_index": chosen, "dataset_sample_index": numbers}


def normalize(weights):
    from megatron.core.datasets.utils import normalize

    return {"shares": np.array(normalize(weights))}


def exhaustive_blending(sizes):
    from megatron.core.datasets import helpers

    total = sum(sizes)
    chosen, numbers = np.zeros(total, np.int16), np.zeros(total, np.int64)
    helpers.build_exhaustive_blending_indices(chosen, numbers, np.array(sizes, np.int64), len(sizes))
    return {"dataset_index": chosen, "dataset_sample_index": numbers}


def blended_run(sizes, items, blend=None, blend_per_split=None, **config):
    """Whole data sets as a training script builds them: of each split its length and its first items."""
    with_processes()
    given = {}
    if blend:
        given = {"blend": (blend[0], blend[1])}
    else:
        per_split = [None if b is None else (b[0], b[1]) for b in blend_per_split]
        given = {"blend": None, "blend_per_split": per_split, "split": None}
    datasets = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, gpt_config(**config, **given)).build()
    result = {}
    for name, dataset in zip(("train", "valid", "test"), datasets):
        result[f"{name}_length"] = np.array(-1 if dataset is None else len(dataset))
        if dataset is not None:
            tokens = [np.asarray(dataset[i]["tokens"]) for i in range(min(items, len(dataset)))]
            result[f"{name}_tokens"] = np.stack(tokens)
        if isinstance(dataset, BlendedDataset):
            result[f"{name}_dataset_index"] = dataset.dataset_index
    return result


def write(prefix, documents, dtype, modes=None):
    """A pair of files written there."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type, multimodal=modes is not None)
    for d, sequences in enumerate(documents):
        for s, tokens in enumerate(sequences):
            builder.add_item(torch.tensor(tokens), *([] if modes is None else [modes[d][s]]))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return {}


def read(prefix, multimodal=False):
    dataset = IndexedDataset(prefix, multimodal=multimodal)
    items = [dataset[i] for i in range(len(dataset))]
    tokens = [item[0] if multimodal else item for item in items]
    whole = np.concatenate(tokens) if tokens else np.empty(0)
    modes = np.array([item[1] for item in items]) if multimodal else np.empty(0)
    return {"tokens": whole, "modes": modes, "lengths": dataset.sequence_lengths, "documents": dataset.document_indices}


def masked_config(cls, seed, seq_length, cache, vocab_words, pad=0, **options):
    tokenizer = Tokenizer(len(vocab_words), 6, pad, vocab_words)
    settings = {"split": "1", "blend": (["unused"], None)} | options
    return cls(random_seed=seed, sequence_length=seq_length, path_to_cache=cache, tokenizer=tokenizer, **settings)


def with_processes():
    """Blends and masked data sets ask torch.distributed for their rank, even alone."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(os.path.join(output, "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def masked(cls, config_cls, prefix, ids, num_samples, items, config):
    with_processes()
    indexed = IndexedDataset(prefix)
    ids = np.arange(*ids, dtype=np.int32)
    dataset = cls(indexed, prefix, ids, num_samples, Split.train, masked_config(config_cls, **config))
    return {"sample_index": np.asarray(dataset.sample_index)} | items_of(dataset, items)


def bert(**case):
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig

    return masked(BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, **case)


def t5(**case):
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

    arrays = masked(T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig, **case)
    names = ("text_enc", "text_dec", "enc_mask", "dec_mask")
    given = (torch.from_numpy(arrays[f"item_{name}"]) for name in names)
    masks = T5MaskedWordPieceDataset.config_attention_mask(*given, use_local=True)
    return arrays | {f"attention_{name}": mask.numpy() for name, mask in zip(("enc", "dec", "cross"), masks)}


KINDS: dict[str, types.FunctionType] = {
    f.__name__: f
    for f in (gpt, batches, fim, blending, normalize, exhaustive_blending, blended_run, write, read, bert, t5)
}
with open(cases_path) as file:
    for number, (kind, case) in enumerate(json.load(file)):
        np.savez(os.path.join(output, f"{number}.npz"), **KINDS[kind](**case))
