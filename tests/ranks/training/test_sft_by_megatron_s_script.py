"""A script that builds SFTDataset and reads batches as Megatron's pretrain_gpt.py does with --sft trains as ours does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_ranks import run_ranks
from script_run import trainer_of
from sft_folder import chats, write_lines, write_tokenizer

import pretrain_gpt
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.tokenizers import build_tokenizer
from megatron.core.utils import get_batch_on_this_tp_rank
from megatron.training import get_args, get_runtime
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split

FLAGS = (
    "--sft --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --data-path chats.jsonl --split 8,2,0 --num-layers 4 "
    "--hidden-size 16 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 2 --eval-iters 0 --lr 1e-2 --num-workers 0 --device cpu --fp64 "
)


def datasets(num_samples: list[int]) -> Any:
    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        tokenizer=build_tokenizer(get_runtime().config.tokenizer),
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(SFTDataset, num_samples, lambda: True, config).build()


def forward_step(data_iterator: Any, model: Any) -> Any:
    if not (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()):
        return model(None, None), None
    batch = next(data_iterator) if parallel_state.get_tensor_model_parallel_rank() == 0 else {}
    batch = get_batch_on_this_tp_rank(batch, is_sft=True, has_cu_seqlens=True)
    assert batch["cu_seqlens"] is None and batch["attention_mask"] is not None
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, lambda losses: pretrain_gpt.loss_func(batch["loss_mask"], losses)


MEGATRON_S = SimpleNamespace(
    train_valid_test_datasets_provider=datasets, model_provider=pretrain_gpt.model_provider, forward_step=forward_step
)


def losses_of(script: Any, layout: dict[str, int], flags: str = "") -> list[float]:
    def train_rank(mesh: Mesh) -> list[float]:
        losses: list[float] = []
        with trainer_of(script, mesh, FLAGS + flags, predicts=False) as trainer:
            trainer._report = lambda result, batch_size: losses.append(sum(result.losses.values()))
            trainer._train()
        return losses

    return max(run_ranks(layout, train_rank), key=sum)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokenizer(Path("tokenizer"))
    write_lines(Path("chats.jsonl"), chats(20))


@pytest.mark.full
def test_the_losses_are_those_of_our_script():
    expected = losses_of(pretrain_gpt, {})
    assert len(expected) == 2
    assert losses_of(MEGATRON_S, {}) == pytest.approx(expected, abs=1e-12)
    two = losses_of(MEGATRON_S, {"tp": 2, "pp": 2}, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    assert two == pytest.approx(expected, abs=1e-12)


@pytest.mark.sweep
def test_middle_stages_which_would_have_no_mask_are_refused():
    with pytest.raises(Exception, match="take at most 2 stages"):
        losses_of(MEGATRON_S, {"pp": 4}, "--pipeline-model-parallel-size 4")
