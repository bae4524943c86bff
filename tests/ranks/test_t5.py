"""T5: against transformers (tests/exchange/record.py), and every layout against one process."""

import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import SEQ, Layout, Outcome, Subject, Texts, TinyTrainer, assert_equal, run
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.boxes import slices
from megatron.core.checkpoint import placed_tensor
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.inference.load import lone_mesh
from megatron.core.interchange import open_foreign
from megatron.core.interchange.config_json import family_of
from megatron.core.interchange.hf_folder import read_json
from megatron.core.interchange.mapped import heads_of, rows_of
from megatron.core.interchange.written import their_tensors, write_hf_folder
from megatron.core.models.t5_model import T5Model
from megatron.core.optimizer.settings import OptimizerConfig
from megatron.core.pipeline_parallel.stage import split_layers
from megatron.core.placement import pieces
from megatron.core.transformer.context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.relative_positions import bucket_of
from megatron.training.watch.flops import ModelShape, TwoStackShape

sys.path.append(str(Path(__file__).parent.parent / "exchange"))
from cases import T5_CASES, read_record, read_tensors, texts, weight, write_folder, write_folders

# ---------------------------------------------------------------- against transformers


def model_of(root: Path, mesh=None, **options) -> T5Model:
    """This rank's stage of the folder's model, read from where it lies."""
    mesh = mesh or lone_mesh()
    checkpoint = open_foreign(root, mesh["world"])
    settings = checkpoint.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8}
    config, stage = ModelConfig(**settings | options), mesh["pp"].rank
    model = T5Model(
        config,
        vocab_size=checkpoint.state["vocab_size"],
        positions=32,
        decoder_seq_length=10,
        layers=split_layers(config.all_layers, mesh["pp"].size, first=3 if mesh["pp"].size > 1 else None)[stage],
        context=LayerContext.on(mesh, config.params_dtype, fills=False),
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
    for row in rows_of(family_of(read_json(root / "config.json"), ""), config):
        if row.ours in ours:
            found |= dict(zip(row.theirs, their_tensors(row.operation, heads_of(config), ours[row.ours])))
    return found


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
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW([*groups, {"params": vectors, "weight_decay": 0.0}], lr=0.01, eps=1e-8)
    for expected in record["losses"]:
        optimizer.zero_grad()
        loss = loss_of(model)
        assert abs(loss.item() - expected) < 1e-9
        loss.backward()
        optimizer.step()
    assert abs(loss_of(model_of(folders[case], fp64=False)).item() - record["losses"][0]) < 1e-4


@pytest.mark.parametrize("case", T5_CASES)
def test_training_on_real_text_follows_transformers(case: str, tmp_path: Path):
    """Ten steps on sentences of a play, spans left out by the data set (tests/exchange/real_text.py): each step's loss."""
    record = read_record("t5-text")
    write_folder(tmp_path / "hf", record[case])
    model, single = model_of(tmp_path / "hf"), model_of(tmp_path / "hf", fp64=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-8, weight_decay=0.1)
    for step, (batch, expected) in enumerate(zip(record["batches"], record[case]["losses"], strict=True)):
        given = {key: torch.tensor(value) for key, value in batch.items()}
        texts = given["text_enc"], given["text_dec"], given["enc_mask"], given["labels"].clamp(min=0)
        mean = lambda model: (model(*texts) * given["loss_mask"]).sum() / given["loss_mask"].sum()  # noqa: B023, E731
        optimizer.zero_grad()
        loss = mean(model)
        assert abs(loss.item() - expected) < 1e-9, step
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
    left = {"classifier_dropout", "dropout_rate", "initializer_factor", "is_decoder", "use_cache"} | own
    assert {k: v for k, v in written.items() if k not in own} == {
        k: v for k, v in given.items() if k not in left | {"transformers_version"}
    }
    assert written["tie_word_embeddings"] == written["scale_decoder_outputs"] == (case == "t5")


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

DECODER = 4  # tokens
PLAIN = ModelConfig(
    num_layers=4,
    decoder_num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    kv_channels=6,
    ffn_hidden_size=24,
    make_vocab_size_divisible_by=8,
    fp64=True,
    position_embedding_type="relative",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=6,
    normalization="RMSNorm",
    add_bias_linear=False,
    activation="relu",
    softmax_scale=1.0,
    init_method_std=0.1,
)
CONFIGS = {
    "t5": PLAIN,
    "gated": replace(
        PLAIN,
        gated=True,
        activation="gelu-tanh",
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "learned": replace(
        PLAIN,
        position_embedding_type="learned_absolute",
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        add_bias_linear=True,
        normalization="LayerNorm",
        num_layers=6,
        decoder_num_layers=2,
    ),
}


def sample(number: int, texts: Texts) -> dict[str, Tensor]:
    """A text with padding, and a shorter one to be said, with padding too."""
    generator = torch.Generator().manual_seed(3000 + number)
    length, asked = (int(torch.randint(n // 2, n + 1, (), generator=generator)) for n in (SEQ, DECODER))
    said = torch.randint(0, texts.vocab, (DECODER + 1,), generator=generator)
    return {
        "text": torch.randint(0, texts.vocab, (SEQ,), generator=generator),
        "seen": (torch.arange(SEQ) < length).long(),
        "decoder": said[:-1],
        "labels": torch.where(torch.arange(DECODER) < asked, said[1:], -1),
    }


def loss_func(labels: Tensor, losses: Tensor):
    mask = (labels >= 0).to(losses.dtype)
    total, count = (losses * mask).sum(), mask.sum()
    return total, count, {"lm loss": torch.stack((total.detach().double(), count))}


def forward_step(data, model):
    batch = next(data)
    output = model(batch["text"], batch["decoder"], batch["seen"], batch["labels"])
    return output, partial(loss_func, batch["labels"])


T5 = Subject(
    lambda config, **parts: T5Model(config, positions=SEQ, decoder_seq_length=DECODER, **parts),
    forward_step,
    sample,
    ("seen",),
)
OVERLAP = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=1500)
ZERO = replace(OVERLAP, use_distributed_optimizer=True, overlap_param_gather=True)
LAYOUTS = [
    Layout(tp=2, sp=True, pp=2, m=2, schedule="zb-h1", data_parallel=ZERO, delayed=True),
    Layout(tp=2, sp=True, pp=2, dp=2, m=2, schedule="zb-h1", data_parallel=ZERO, delayed=True),
    Layout(tp=2, m=4),
    Layout(tp=4, sp=True, m=4, recompute="selective", delayed=True),
    Layout(pp=2, m=4),
    Layout(pp=4, m=4, schedule="zb-h1"),
    Layout(tp=2, pp=4, m=4, delayed=True),
    Layout(tp=2, pp=4, m=4, scatter=False),
    Layout(pp=2, v=2, m=4, schedule="interleaved", recompute="uniform 1"),
    Layout(pp=2, v=4, m=4, schedule="zb-interleaved", recompute="block 1"),
    Layout(dp=4, m=1, data_parallel=OVERLAP, delayed=True),
    Layout(dp=2, m=2, data_parallel=replace(ZERO, zero_stage=2), delayed=True),
    Layout(dp=2, m=2, data_parallel=DataParallelConfig(zero_stage=3), delayed=True),
    Layout(tp=2, pp=2, dp=2, m=2, data_parallel=DataParallelConfig(zero_stage=3), recompute="uniform 2"),
    Layout(tp=2, sp=True, pp=2, v=2, m=4, schedule="zb-v", data_parallel=ZERO, recompute="uniform 1"),
]


@cache
def one_process(name: str) -> Outcome:
    return run(CONFIGS[name], Layout(m=4), steps=2, global_batch=8, subject=T5)


def cases():
    """The first layout always, two more in the whole test command, all of all models in the sweep."""
    for name in CONFIGS:
        for i, layout in enumerate(LAYOUTS):
            covering = (name, i) in (("t5", 6), ("gated", 12), ("learned", 14))
            marks = [] if (name, i) == ("t5", 0) else [pytest.mark.full if covering else pytest.mark.sweep]
            yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")


@pytest.mark.parametrize("name, layout", list(cases()))
def test_every_layout_equals_one_process(name: str, layout: Layout):
    got = run(CONFIGS[name], layout, steps=2, global_batch=8, subject=T5)
    assert_equal(got, one_process(name), 1e-10)


KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
SHARED = {
    **{kind: Layout(cp=2, cp_heads=2, cp_types=(kind,), m=2) for kind in KINDS},
    "mixed": Layout(
        tp=2,
        sp=True,
        pp=2,
        cp=2,
        cp_heads=2,
        cp_types=2 * KINDS,
        m=2,
        schedule="zb-h1",
        data_parallel=ZERO,
        delayed=True,
    ),
    "stage 3": Layout(cp=2, dp=2, m=2, recompute="uniform 2", data_parallel=DataParallelConfig(zero_stage=3)),
    "core": Layout(cp=2, tp=2, cp_types=("all_gather",), m=2, recompute="selective"),
}


@pytest.mark.parametrize("name", ["p2p", *(pytest.param(n, marks=pytest.mark.full) for n in SHARED if n != "p2p")])
def test_shared_texts_give_the_numbers_of_one_process(name: str):
    """Both texts cut under context parallelism: relative positions, padding, attention to the encoder's text, dropout."""
    model = "gated" if name in ("stage 3", "core") else "t5"
    got = run(CONFIGS[model], SHARED[name], steps=1, global_batch=8, subject=T5)
    assert_equal(got, one_step_of_one_process(model), 1e-10)


@cache
def one_step_of_one_process(name: str) -> Outcome:
    return run(CONFIGS[name], Layout(m=4), steps=1, global_batch=8, subject=T5)


def test_flops_are_those_that_torch_counts():
    """Of a forward, three times; the plain kernel computes the scores that a causal mask hides too."""
    for config in (replace(config, attention_backend="unfused") for config in CONFIGS.values()):
        parts = {"vocab_size": 40, "positions": 9, "decoder_seq_length": 5, "layers": range(config.all_layers)}
        model = T5Model(config, context=LayerContext.on(lone_mesh(), config.params_dtype), **parts)
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
    expected = run(config, Layout(), steps=3, global_batch=8, subject=T5).losses[2]

    def before(mesh):
        tiny = TinyTrainer(mesh, config, Layout(tp=2, sp=True, pp=2, m=2, data_parallel=ZERO), **trained)
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
