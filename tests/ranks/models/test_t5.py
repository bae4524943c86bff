"""T5: against transformers (tests/support/exchange/record.py), and every layout against one process."""

from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from adamw_steps import assert_losses
from cases import T5_CASES, read_record, read_tensors, texts, weight, write_folder, write_folders
from local_ranks import run_ranks
from parity_cases import TOLERANCE
from t5_cases import DIMENSIONS, RANKS, T5Case, beyond_rounding, half_cases, outcomes, t5_cases
from tiny_run import Layout, TinyTrainer, assert_equal, run
from tiny_t5 import CONFIGS, T5
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.convert import open_foreign
from megatron.convert.families.read_and_write_hf_config import family_of
from megatron.convert.formats.hf_config_and_safetensors_headers import read_json
from megatron.convert.open_any_format import settings_of_foreign_folder
from megatron.convert.open_hf_safetensors_folder import head_counts_of, param_mappings
from megatron.convert.plan_hf_folder import to_hf_tensors
from megatron.convert.stream_checkpoint_to_hf_folder import write_hf_folder
from megatron.core.dist_checkpointing import placed_tensor
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.optimizer.param_groups import default_group, non_matrices_to, without_embedding_decay
from megatron.core.pipeline_parallel.layer_split import split_layers
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.placement import Normal, Placement, pieces
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.relative_position_bias import bucket_of
from megatron.training.model_flops_of_unbuilt_layouts import ModelShape, TwoStackShape


# ---------------------------------------------------------------- against transformers
def model_of(root: Path, mesh=None, **options) -> T5Model:
    """This rank's stage of the folder's model, read from where it lies."""
    mesh = mesh or single_rank_mesh()
    checkpoint = open_foreign(root, mesh["world"])
    settings = checkpoint.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8}
    config, stage = ModelConfig(**settings | options), mesh["pp"].rank
    model = T5Model(
        config,
        vocab_size=checkpoint.state["vocab_size"],
        positions=32,
        decoder_seq_length=10,
        layers=split_layers(config.all_layers, mesh["pp"].size, first=3 if mesh["pp"].size > 1 else None)[stage],
        context=LayerContext.from_mesh(mesh, config.params_dtype, fills=False),
        pre_process=stage == 0,
        post_process=stage == mesh["pp"].size - 1,
    )
    wanted = {}
    for name, parameter in model.named_parameters():
        parameter.data.zero_()
        wanted[f"model/{name}"] = placed_tensor(parameter.data, parameter.placement, mesh)
    checkpoint.read_into(wanted, mesh["world"], convert=True)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("hf"), T5_CASES)


def scores_of(model: T5Model) -> Tensor:
    encoder, seen, decoder, _ = map(torch.tensor, texts())
    return model(encoder, decoder, seen)[..., :31]


def loss_of(model: T5Model) -> Tensor:
    encoder, seen, decoder, asked = map(torch.tensor, texts())
    return model(encoder, decoder, seen, asked).mean()


def theirs(root: Path, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of ours under their names."""
    config, found = ModelConfig(**open_foreign(root).state["config"]["transformer"]), {}
    for row in param_mappings(family_of(read_json(root / "config.json"), ""), config):
        if row.param in ours:
            found |= dict(zip(row.hf_params, to_hf_tensors(row.operation, head_counts_of(config), ours[row.param])))
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", T5_CASES)
def test_scores_losses_and_gradients_equal_transformers(case: str, folders: dict[str, Path]):
    record, model = read_record(case), model_of(folders[case])
    assert (scores_of(model) - torch.tensor(record["scores"], dtype=torch.float64)).abs().max() < 1e-10
    loss = loss_of(model)
    assert abs(loss.item() - record["losses"][0]) < 1e-9
    loss.backward()
    gradients = {name: p.grad[:31] if "word_emb" in name else p.grad for name, p in model.named_parameters()}
    found = {
        name: (x * torch.tensor(weight(f"direction of {name}", tuple(x.shape)))).sum()
        for name, x in theirs(folders[case], gradients).items()
    }
    assert found.keys() == record["gradients"].keys()
    for name, value in record["gradients"].items():
        assert abs(found[name] - value) < 1e-10 * max(1, abs(value)), name


@pytest.mark.full
@pytest.mark.parametrize("case", T5_CASES)
def test_five_steps_and_float32_follow_transformers(case: str, folders: dict[str, Path]):
    record, model = read_record(case), model_of(folders[case])
    assert_losses(model, loss_of, record["losses"])
    assert abs(loss_of(model_of(folders[case], fp64=False)).item() - record["losses"][0]) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("case", T5_CASES)
def test_training_on_real_text_follows_transformers(case: str, tmp_path: Path):
    """Ten steps on sentences of a play, spans left out by the data set (tests/support/exchange/real_text.py): each step's loss.

    At a rate of 0.001 a change of all weights in their last bit moves the tenth loss by 4e-12; at 0.01 it would move it by 8e-10.
    """
    record = read_record("t5-text")
    write_folder(tmp_path / "hf", record[case])
    model, single = model_of(tmp_path / "hf"), model_of(tmp_path / "hf", fp64=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, eps=1e-8, weight_decay=0.1)
    for step, (batch, expected) in enumerate(zip(record["batches"], record[case]["losses"], strict=True)):
        given = {key: torch.tensor(value) for key, value in batch.items()}
        texts = given["text_enc"], given["text_dec"], given["enc_mask"], given["labels"].clamp(min=0)
        mean = lambda model: (model(*texts) * given["loss_mask"]).sum() / given["loss_mask"].sum()  # noqa: B023, E731
        optimizer.zero_grad()
        loss = mean(model)
        assert abs(loss.item() - expected) < 1e-10, step
        if step == 0:
            assert abs(mean(single).item() - expected) < 1e-4
        loss.backward()
        optimizer.step()


@pytest.mark.full
@pytest.mark.parametrize("case", T5_CASES)
def test_a_folder_is_written_as_it_was_to_the_bit(case: str, folders: dict[str, Path], tmp_path: Path):
    assert write_hf_folder(open_foreign(folders[case]), tmp_path / "out", most_bytes=20_000) == "t5"
    assert read_tensors(tmp_path / "out") == read_tensors(folders[case])
    written, given = read_json(tmp_path / "out" / "config.json"), read_record(case)["config"]
    own = {"tie_word_embeddings", "scale_decoder_outputs", "torch_dtype", "bos_token_id", "decoder_start_token_id"}
    left = {"classifier_dropout", "initializer_factor", "is_decoder", "use_cache"} | own
    assert {k: v for k, v in written.items() if k not in own} == {
        k: v for k, v in given.items() if k not in left | {"transformers_version"}
    }
    assert written["tie_word_embeddings"] == (case != "t5-gated") and written["scale_decoder_outputs"] == (case == "t5")


@pytest.mark.parametrize("is_tied", [False, True], ids=["a head of its own", "the table again"])
def test_a_config_of_transformers_5_ties_a_head_that_is_the_table_alone(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It says of every model that it is tied; one that has been read with another head is not."""
    record = read_record("t5-tied")
    shapes = record["shapes"] | {"lm_head.weight": record["shapes"]["shared.weight"]}
    drawn_as = {"lm_head.weight": "shared.weight"} if is_tied else {}
    monkeypatch.setattr("cases.weight", lambda name, shape: weight(drawn_as.get(name, name), shape))
    write_folder(tmp_path, {"config": record["config"], "shapes": shapes})
    checkpoint, settings = open_foreign(tmp_path), settings_of_foreign_folder(tmp_path)["transformer"]
    assert settings["untie_embeddings_and_output_weights"] is not is_tied
    assert settings["scale_decoder_outputs"] is not is_tied
    assert checkpoint.state["config"]["transformer"] == settings
    assert ("model/language_model.output_layer.weight" in checkpoint.manifest.tensors) is not is_tied


@pytest.mark.full
@pytest.mark.parametrize("case", T5_CASES)
def test_every_rank_reads_its_boxes_of_a_folder(case: str, folders: dict[str, Path]):
    """TP 2 x PP 2: each parameter is the part of the whole that its placement says."""
    whole = dict(model_of(folders[case]).named_parameters())

    def work(mesh):
        for name, mine in model_of(folders[case], mesh).named_parameters():
            for box, local in pieces(mine.placement, tuple(mine.shape), mesh):
                assert torch.equal(mine[slices(local)], whole[name][slices(box)]), name

    run_ranks({"tp": 2, "pp": 2}, work)


def test_buckets_are_those_of_the_paper():
    """Rows as transformers computes them for 32 buckets and a distance of 128, from its float32 logarithm."""
    both = [bucket_of(d, 32, 128, bidirectional=True) for d in (-300, -128, -127, -20, -8, -7, -1, 0, 1, 8, 20, 127)]
    assert both == [15, 15, 15, 10, 8, 7, 1, 0, 17, 24, 26, 31]
    back = [bucket_of(d, 32, 128, bidirectional=False) for d in (-300, -127, -40, -17, -16, -15, -1, 0, 5)]
    assert back == [31, 31, 23, 16, 16, 15, 1, 0, 0]


# ---------------------------------------------------------------- layouts
def cases():
    """Every choice in the test command, every pair in the sweep; every triple by tests/campaigns/parity_sweep.py --t5."""
    fast = min((case for case in t5_cases(1) if case.ranks == 4), key=str)
    for case in t5_cases(2):
        marks = [] if case == fast else [pytest.mark.full if case in t5_cases(1) else pytest.mark.sweep]
        yield pytest.param(case, marks=marks, id=str(case))


@pytest.mark.parametrize("case", list(cases()))
def test_every_layout_and_feature_equals_one_process(case: T5Case):
    assert_equal(*outcomes(case), TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.full if case in half_cases(1) else pytest.mark.sweep, id=str(case))
        for case in half_cases(2)
    ],
)
def test_in_half_precision_a_layout_is_as_near_to_float64_as_rounding_allows(case: T5Case):
    beyond, where = beyond_rounding(case)
    assert beyond == 0, where


@pytest.mark.full
def test_the_cases_have_every_choice_and_pair_that_fits():
    """Which pairs cannot be, written here by hand once more."""
    pairs = {pair for case in t5_cases(2) for pair in combinations(zip(DIMENSIONS, case.choices), 2)}
    beside = lambda *names: [("beside", name) for name in names]  # noqa: E731
    apart = [{("zero", stage), what} for stage in (2, 3) for what in beside("muon", "fixed order")]
    apart += [{("zero", 0), what} for what in beside("offload", "files")]
    apart += [{("recompute", "all parts"), what} for what in beside("offload", "tiled", "packed inputs")]
    apart += [{("recompute", kind), *beside("packed inputs")} for kind in ("none", "selective")]
    apart += [{("tp", tp), *beside("packed inputs")} for tp in ("1", "2sp", "4sp")]
    apart += [{("tp", "4sp"), ("cp", kind)} for kind in ("p2p", "all_gather")] + [{("tp", "4sp"), *beside("tiled")}]
    apart += [{("tp", tp), ("cp", kind)} for tp in ("4", "4sp") for kind in ("a2a", "a2a+p2p", "mixed")]
    apart += [{("tp", tp), ("scatter", False)} for tp in ("1", "2sp", "4sp")]
    apart += [{("pipeline", "1 stage"), ("scatter", False)}, {("overlap", True), ("dp", 1)}]
    apart += [{("overlap", True), *beside("fixed order")}]
    apart += [
        {("pipeline", split), ("stacks", stacks)}
        for split in ("split 2 of 3", "split 1 of 3")
        for stacks in ("3 and 1", "1 and 3")
    ]
    every = (
        pair
        for names in combinations(DIMENSIONS, 2)
        for pair in product(*([(n, c) for c in DIMENSIONS[n]] for n in names))
    )
    possible = {pair for pair in every if not any(refused <= set(pair) for refused in apart)}
    assert possible - pairs == set() and pairs - possible == set()
    assert max(case.ranks for case in t5_cases(3)) == RANKS
    assert len({str(case) for case in t5_cases(3)}) == len(t5_cases(3))


def test_tables_of_relative_positions_are_no_matrices_to_muon():
    """They follow the optimizer of the other tables, and are left out of weight decay with them."""
    name, placement = "language_model.encoder_relative_pos_emb.weight", Placement((8, 4), Normal(0.02))
    assert non_matrices_to("adam", default_group)(name, placement).optimizer == "adam"
    assert without_embedding_decay(default_group)(name, placement).weight_decay_multiplier == 0.0


@pytest.mark.full
def test_flops_are_those_that_torch_counts():
    """Of a forward, three times; the plain kernel computes the scores that a causal mask hides too."""
    for config in (replace(config, attention_backend="unfused") for config in CONFIGS.values()):
        parts = {"vocab_size": 40, "positions": 9, "decoder_seq_length": 5, "layers": range(config.all_layers)}
        model = T5Model(config, context=LayerContext.from_mesh(single_rank_mesh(), config.params_dtype), **parts)
        ids = torch.ones(1, 9, dtype=torch.long)
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            model(ids, ids[:, :5], ids)
        shape = TwoStackShape(ModelShape.of(config, 40, 9), config.decoder_layers, 5)
        assert 3 * counted.get_total_flops() == shape.count_flops(full_attention=True)
        fewer = shape.count_flops(full_attention=True) - shape.flops_per_sample
        assert fewer == 6 * config.decoder_layers * 5 * 5 * config.num_attention_heads * config.head_width


@pytest.mark.full
def test_a_checkpoint_goes_on_in_any_layout(tmp_path: Path):
    """Two steps over TP, SP and PP with ZeRO 1, then one over more stages, and one over ZeRO 3."""
    config = CONFIGS["t5"]
    zero = DataParallelConfig(
        overlap_grad_reduce=True, ddp_bucket_size=1500, use_distributed_optimizer=True, overlap_param_gather=True
    )
    expected = run(config, Layout(), steps=3, global_batch=8, subject=T5).losses[2]

    def before(mesh):
        tiny = TinyTrainer(mesh, config, Layout(tp=2, sp=True, pp=2, m=2, data_parallel=zero), **trained)
        for step in range(2):
            tiny.step(step)
        tiny.finish_param_gather()
        tiny.save(tmp_path, 2)

    def after(mesh, layout):
        tiny = TinyTrainer(mesh, config, layout, **trained)
        tiny.load(tmp_path)
        return tiny.step(2).losses.get("lm loss")

    trained = {"global_batch": 8, "subject": T5, "optimizer": OptimizerConfig(clip_grad=0.5, weight_decay=0.1)}
    run_ranks({"tp": 2, "pp": 2}, before)
    for layout in (Layout(pp=4, m=2), Layout(dp=2, m=2, data_parallel=DataParallelConfig(zero_stage=3)), Layout(m=4)):
        got = run_ranks(layout.sizes, partial(after, layout=layout))[-1]
        assert abs(got - expected) < 1e-10 * expected, layout
