"""--reset-position-ids under rotary positions: the angles restart with each document, in every layout."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from local_ranks import run_ranks
from plain_model import plain_scores
from said import tells
from script_run import settings_of, trainer_of

import pretrain_gpt
from megatron.core.datasets.gpt_dataset_and_builder import TokenRules, training_item
from megatron.core.dist_checkpointing import manifest_format
from megatron.core.parallel.mesh import Mesh

END = 5  # the token that ends a document
FLAGS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 14 --make-vocab-size-divisible-by 2 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --fp64 "
    "--init-method-std 0.4 --micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-2 --eval-iters 0 --num-workers 0 "
    "--device cpu "
)


class Packed:
    """Samples of several documents, as `training_item` lays them out."""

    def __init__(self, settings):
        self.rules = TokenRules(
            14, END, reset_position_ids=settings.reset_position_ids, reset_attention_mask=settings.reset_attention_mask
        )

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        text = np.random.default_rng(number).integers(0, 13, 9)
        text[[1 + number % 3, 5]] = END
        return training_item(text, self.rules)


def packed_script(flags: str) -> SimpleNamespace:
    data = Packed(settings_of(pretrain_gpt, flags)[0].data)
    return SimpleNamespace(
        **vars(pretrain_gpt) | {"train_valid_test_datasets_provider": lambda sizes: (data, None, None)}
    )


def losses_of(flags: str, sizes: dict[str, int]) -> list[float]:
    """Of both steps, from the rank that knows them."""
    flags = FLAGS + flags
    script = packed_script(flags)

    def train(mesh: Mesh) -> list[float]:
        losses = []
        with trainer_of(script, mesh, flags, predicts=False) as trainer:
            trainer._report = lambda result, size: losses.append(sum(result.losses.values()))
            trainer._train()
        return losses

    stages = settings_of(script, flags)[0].stages
    return max(run_ranks(sizes, train, stages=stages), key=sum)


@pytest.mark.full
@pytest.mark.parametrize(
    "how", ["", "--rotary-percent 0.5 --rotary-interleaved", "--no-rope-freq [0,1,0,0] --window-size 3,0"]
)
def test_the_scores_are_those_of_a_plain_model_whose_rotations_restart(how: str):
    flags = f"{FLAGS} --reset-position-ids {how}"
    script = packed_script(flags)

    def scores(mesh: Mesh) -> tuple:
        with trainer_of(script, mesh, flags, predicts=False) as trainer, torch.no_grad():
            items = [trainer.datasets["train"][number] for number in range(3)]
            given = [torch.from_numpy(np.stack([item[key] for item in items])) for key in ("tokens", "position_ids")]
            model = trainer.model[0].module.eval()
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            return model(*given), weights, trainer.config.transformer, given

    ((got, weights, config, (tokens, positions)),) = run_ranks({}, scores)
    assert (positions.diff() < 0).sum() >= 3
    torch.set_default_dtype(torch.float64)
    try:
        expected = plain_scores(weights, config, tokens, positions)
        of_one_document = plain_scores(weights, config, tokens)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    assert (got - of_one_document).abs().max() > 1e-3


LAYOUTS = {
    "tp": ({"tp": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp": ({"pp": 4}, "--pipeline-model-parallel-size 4"),
    "cp": ({"cp": 2}, "--context-parallel-size 2"),
    "recomputed": ({}, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_restarts_as_one_process_does(name: str):
    sizes, flags = LAYOUTS[name]
    restarted = losses_of(f"--reset-position-ids {flags}", sizes)
    torch.testing.assert_close(restarted, losses_of("--reset-position-ids", {}), rtol=1e-10, atol=0)


@pytest.mark.full
def test_within_documents_alone_a_restart_changes_nothing():
    """Scores depend on distances, so nothing is rotated by positions of one's own, which takes room for each sample."""
    one, other = (losses_of(f"--reset-attention-mask {more}", {}) for more in ("", "--reset-position-ids"))
    assert one == other != losses_of("--reset-position-ids", {})


def test_a_stage_without_positions_says_what_to_do():
    """As under a script whose middle stages read no batch."""
    flags = f"{FLAGS} --reset-position-ids"

    def forward(mesh: Mesh) -> None:
        with trainer_of(packed_script(flags), mesh, flags, predicts=False) as trainer:
            trainer.model[0].module(torch.zeros(1, 8, dtype=torch.int64), None)

    with pytest.raises(Exception) as error:
        run_ranks({}, forward)
    assert tells(str(error.value), "--reset-position-ids position_ids none forward_step")


@pytest.mark.full
def test_a_run_that_goes_on_from_angles_that_did_not_restart_says_so(said, tmp_path):
    """Of a version in which the flag did nothing under rotary positions."""
    flags = f"--position-embedding-type rope --kv-channels 8 --reset-position-ids --save {tmp_path} --load {tmp_path} "
    said(f"{flags} --train-iters 1")
    more = f"{flags} --override-opt_param-scheduler --train-iters"
    assert "angles" not in said(f"{more} 2")
    path = tmp_path / "iter_0000002" / "manifest.json"
    manifest = manifest_format.parse_manifest(path.read_text(), path)
    assert manifest.state["functions"].pop("reset_position_ids") == "rotary angles restart"
    path.write_text(manifest_format.to_json(manifest))
    assert "resumed with rotary angles that restart, by --reset-position-ids" in said(f"{more} 3")
