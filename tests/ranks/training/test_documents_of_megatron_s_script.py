"""A script of Megatron's form, whose middle stages read no batch, keeps attention within documents as one process does, or is refused."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_ranks import run_ranks
from said import tells
from script_run import settings_of, trainer_of
from token_files import write

import pretrain_gpt
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.utils import get_batch_on_this_tp_rank as broadcast_on_this_tp_rank
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank, get_blend_and_blend_per_split

END = 59  # of the null tokenizer below
FLAGS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --vocab-size 59 "
    "--make-vocab-size-divisible-by 4 --tokenizer-type NullTokenizer --data-path data --split 100,0,0 --init-method-std 0.4 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --eval-iters 0 --lr 1e-2 --num-workers 0 --device cpu --fp64 "
    "--hidden-dropout 0 --attention-dropout 0 "
)
STAGES = {
    "pp 4": ({"pp": 4}, "--pipeline-model-parallel-size 4"),
    "interleaved": ({"pp": 2}, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lengths = torch.randint(3, 9, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    write(tmp_path / "data", [[[*((number * 7 + k) % 50 for k in range(n)), END]] for number, n in enumerate(lengths)])


def datasets(num_samples: list[int]) -> Any:
    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()


def forward_step(get_batch: Any, data_iterator: Any, model: Any) -> Any:
    batch = dict.fromkeys(("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))
    if mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage():
        batch = get_batch_on_this_cp_rank(get_batch(data_iterator))
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(pretrain_gpt.loss_func, batch["loss_mask"])


def newer(data_iterator: Any) -> dict[str, Any]:
    return broadcast_on_this_tp_rank(next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else {})


SCRIPTS = {
    name: SimpleNamespace(
        train_valid_test_datasets_provider=datasets,
        model_provider=pretrain_gpt.model_provider,
        forward_step=partial(forward_step, get_batch),
    )
    for name, get_batch in {"older": get_batch_on_this_tp_rank, "newer": newer}.items()
}


def losses_of(script: Any, flags: str, sizes: dict[str, int] | None = None) -> list[float]:
    def train_rank(mesh: Mesh) -> list[float]:
        losses: list[float] = []
        with trainer_of(script, mesh, FLAGS + flags, predicts=False) as trainer:
            trainer._report = lambda result, batch_size: losses.append(sum(result.losses.values()))
            trainer._train()
        return losses

    stages = settings_of(script, FLAGS + flags)[0].stages
    return max(run_ranks(sizes or {}, train_rank, stages=stages), key=sum)


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_two_stages_and_context_parallel_ranks_have_the_losses_of_one_process(name: str):
    flags = "--reset-attention-mask --reset-position-ids --eod-mask-loss "
    expected = losses_of(pretrain_gpt, flags)
    more = "--pipeline-model-parallel-size 2 --context-parallel-size 2"
    assert losses_of(SCRIPTS[name], flags + more, {"pp": 2, "cp": 2}) == pytest.approx(expected, abs=1e-12)
    assert losses_of(pretrain_gpt, "") != pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("stages", STAGES)
def test_middle_stages_without_a_mask_are_refused(stages: str):
    sizes, flags = STAGES[stages]
    with pytest.raises(Exception) as error:
        losses_of(SCRIPTS["older"], f"--reset-attention-mask {flags}", sizes)
    assert tells(str(error.value), "--reset-attention-mask attention_mask none 2 stages forward_step")


@pytest.mark.parametrize("name", SCRIPTS)
def test_data_that_know_no_documents_are_refused(name: str):
    with pytest.raises(Exception) as error:
        losses_of(SCRIPTS[name], "--dataloader-inter-document-masking")
    assert tells(str(error.value), "--dataloader-inter-document-masking document_ids tokens reset_attention_mask leave")


@pytest.mark.full
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("flags", ["--reset-attention-mask --eod-mask-loss", "--dataloader-inter-document-masking"])
def test_every_stage_of_our_script_masks_documents(flags: str, stages: str):
    sizes, more = STAGES[stages]
    expected = losses_of(pretrain_gpt, flags)
    assert losses_of(pretrain_gpt, f"{flags} {more}", sizes) == pytest.approx(expected, abs=1e-12)
