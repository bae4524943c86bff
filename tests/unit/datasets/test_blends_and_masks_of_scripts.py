"""The words of --data-path and T5's masks, as scripts of Megatron read them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.core.datasets.bert_and_t5_samples import batched_attention_masks
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, WithCrossAttentionMask
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.tokenizers import MegatronTokenizer
from megatron.training.batch_utils import get_blend_and_blend_per_split


@pytest.mark.parametrize(
    "words, blend",
    [
        (None, None),
        (["a"], (["a"], None)),
        (["1", "a", "3", "b"], (["a", "b"], [1.0, 3.0])),
        (["a", "b"], (["a", "b"], None)),
        (["a", "b", "c"], (["a", "b", "c"], None)),
    ],
)
def test_a_blend_is_weights_and_prefixes_or_prefixes(words, blend):
    assert get_blend_from_list(words) == blend


def test_the_data_of_the_arguments_come_from_flags_or_files(tmp_path):
    names = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path")
    args = dict.fromkeys((*names, "per_split_data_args_path"))
    of = lambda **given: get_blend_and_blend_per_split(SimpleNamespace(**args | given))  # noqa: E731
    assert of() == (None, None)
    assert of(data_path=["1", "a"]) == ((["a"], [1.0]), None)
    (tmp_path / "words").write_text("2 a\n3 b")
    assert of(data_args_path=tmp_path / "words") == ((["a", "b"], [2.0, 3.0]), None)
    assert of(train_data_path=["a"]) == (None, [(["a"], None), None, None])
    (tmp_path / "splits").write_text(json.dumps({"train": "a", "valid": ["b"], "test": None}))
    assert of(per_split_data_args_path=tmp_path / "splits") == (None, [(["a"], None), (["b"], None), None])
    with pytest.raises(ValueError, match="both name the data"):
        of(data_path=["a"], data_args_path=tmp_path / "words")


def test_the_masks_of_a_t5s_batch_are_those_of_its_pairs():
    enc, dec = np.array([[1, 1, 1, 0], [1, 1, 0, 0]]), np.array([[1, 1, 0], [1, 1, 1]])
    padding = (torch.from_numpy(enc) < 0.5, torch.from_numpy(dec) < 0.5)
    masks = T5MaskedWordPieceDataset.config_attention_mask(torch.empty(2, 4), torch.empty(2, 3), *padding, True)
    for mask, expected in zip(masks, batched_attention_masks(enc, dec), strict=True):
        assert torch.equal(mask, torch.from_numpy(expected))
    item = WithCrossAttentionMask([{"enc_mask": enc[0], "dec_mask": dec[0]}])[0]
    assert np.array_equal(item["enc_dec_mask"] == 0, batched_attention_masks(enc, dec)[2][0, 0])


def test_a_wrong_result_is_refused_and_a_large_one_is_known_after_its_samples():
    machine = RerunStateMachine()
    machine.validate_result(torch.tensor(1.0), torch.isnan, "NaN")
    with pytest.raises(RuntimeError, match="unexpected result nan: NaN"):
        machine.validate_result(torch.tensor(float("nan")), torch.isnan, "NaN")
    with pytest.warns(UserWarning, match="spiky"):
        machine.validate_result(torch.tensor(2.0), lambda x: x > 1, "spiky", fatal=False)
    large = [machine.is_unexpectedly_large(torch.tensor(x), 10, "loss", num_samples=2) for x in (1.0, 2.0, 19.0, 20.0)]
    assert large == [False, False, False, True]
    assert not machine.is_unexpectedly_large(torch.tensor(float("nan")), 10, "loss")
    assert [machine.should_run_forward_backward(None) for _ in range(4)] == [True, False, True, False]


def test_a_tokenizer_is_read_by_the_library_beside_it(tmp_path):
    assert MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=7).vocab_size == 8
    words = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhere\n"
    (tmp_path / "vocab.txt").write_text(words)
    found = MegatronTokenizer.from_pretrained(
        "BertWordPieceLowerCase", {"library": "megatron"}, vocab_file=str(tmp_path / "vocab.txt")
    )
    assert found.tokenize("here") == [5]
    MegatronTokenizer.write_metadata(str(tmp_path), "of its own")
    with pytest.raises(ValueError, match="library 'of its own' is not known; use one of huggingface"):
        MegatronTokenizer.from_pretrained(str(tmp_path))
