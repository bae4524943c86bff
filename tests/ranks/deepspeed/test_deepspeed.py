"""`deepspeed.initialize` over ranks as threads: the weights of plain torch in one process, in every stage and option."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from local_ranks import run_ranks
from torch import Tensor, nn

from megatron import deepspeed
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.optimizer.deepspeed_lr_schedules import WarmupLR
from megatron.core.parallel.collectives import PeerError
from megatron.core.parallel.mesh import Mesh
from megatron.deepspeed import comm, zero

STEPS = 4
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}}
CPU = {"device": "cpu"}


def plain_model(seed: int = 0) -> nn.Module:
    """With a buffer, and a table that two modules use."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(9, 6), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 9)
    )
    model[5].weight = model[0].weight
    return model.double()


DATA = torch.randint(0, 9, (STEPS, 12), generator=torch.Generator().manual_seed(1))


def loss_of(output: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, (ids + 1) % 9)


@functools.cache
def in_one_process(kind: type = torch.optim.AdamW, clip: float = 0.1) -> tuple[dict[str, Tensor], float]:
    """(weights, last norm) of plain torch: the oracle."""
    model = plain_model()
    optimizer = kind(model.parameters(), lr=1e-2, betas=(0.8, 0.999), weight_decay=0.1)
    schedule = WarmupLR(optimizer, 1e-3, 1e-2, 3)
    for ids in DATA:
        optimizer.zero_grad()
        loss_of(model(ids), ids).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
    return model.state_dict(), norm.item()


def config(stage: int = 0, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    zero_section = {"stage": stage} | more.pop("zero", {})
    sizes = {"train_batch_size": 12, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.1}
    return sizes | {"optimizer": ADAM, "scheduler": WARMUP, "zero_optimization": zero_section} | more


def train(engine: Any, mesh: Mesh, steps: range = range(STEPS)) -> None:
    for step in steps:
        mine = DATA[step].chunk(mesh.samples.size)[mesh.samples.rank]
        for ids in mine.chunk(engine.gradient_accumulation_steps()):
            engine.backward(loss_of(engine(ids), ids))
            engine.step()


def trained(given: dict[str, Any], ranks: int = 2, make: Callable[[], nn.Module] = plain_model, **options: Any) -> list:
    """[(weights, norm)] of each rank."""

    def work(mesh: Mesh) -> tuple[dict[str, Tensor], float]:
        engine, *_ = deepspeed.initialize(model=make(), config=given)
        train(engine, mesh)
        assert (engine.global_steps, engine.global_samples) == (STEPS, STEPS * 12)
        return engine.module_state_dict(), engine.get_global_grad_norm()

    return run_ranks({"dp": ranks}, work, **options)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].to(value.dtype), value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "zero_section, accumulation",
    [({}, 1), ({"overlap_comm": True, "reduce_bucket_size": 50}, 3), ({"offload_optimizer": CPU | {"ratio": 0.5}}, 2)],
    ids=["plain", "overlap", "offload"],
)
def test_two_ranks_have_the_weights_of_one_process(stage: int, zero_section: dict, accumulation: int):
    weights, norm = in_one_process()
    for found, last in trained(config(stage, accumulation, zero=zero_section), delayed=True):
        assert_same(found, weights)
        assert last == pytest.approx(norm, abs=1e-10)


@pytest.mark.full
def test_parameters_and_state_in_files(tmp_path: Path):
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    for found, _ in trained(config(3, zero={"offload_optimizer": files, "offload_param": files})):
        assert_same(found, in_one_process()[0])


def test_adam_with_decay_in_the_gradient():
    params = ADAM["params"] | {"adam_w_mode": False}
    for found, _ in trained(config(1, optimizer={"type": "Adam", "params": params})):
        assert_same(found, in_one_process(torch.optim.Adam)[0])


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("half", [{"fp16": {"enabled": True, "loss_scale_window": 2}}, {"bf16": {"enabled": True}}])
def test_half_precision_is_near(stage: int, half: dict):
    """fp16 of two ranks is near fp16 of one: 2e-3."""
    make = lambda: plain_model().float()  # noqa: E731
    [(alone, _)] = trained(config(stage, **half), 1, make)
    for found, _ in trained(config(stage, **half), 2, make):
        assert_same(found, alone, 2e-3)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    def work(mesh: Mesh) -> None:
        given = config(2, 1, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
        engine, optimizer, _, schedule = deepspeed.initialize(model=plain_model(), config=given)
        before, ids = engine.module_state_dict(), DATA[0]
        engine.backward(loss_of(engine(ids), ids) * (float("inf") if mesh.samples.rank == 0 else 1.0))
        engine.step()
        assert optimizer.overflow and optimizer.loss_scale == 8 and engine.skipped_steps == engine.global_steps == 1
        assert schedule.last_batch_iteration == -1
        assert_same(engine.module_state_dict(), before, 0)

    run_ranks({"dp": 2}, work)


@pytest.mark.full
@pytest.mark.parametrize("stage, then, place", [(1, 3, "folder"), (3, 0, "memory://bucket/run")])
def test_a_checkpoint_goes_on_in_another_stage_and_number_of_ranks(stage: int, then: int, place: str, tmp_path: Path):
    root = place if "://" in place else tmp_path
    fsspec.filesystem("memory").store.clear()

    def first(mesh: Mesh) -> None:
        engine, *_ = deepspeed.initialize(model=plain_model(), config=config(stage))
        train(engine, mesh, range(2))
        engine.save_checkpoint(root, client_state={"epoch": 7})

    def second(mesh: Mesh) -> dict[str, Tensor]:
        engine, *_ = deepspeed.initialize(model=plain_model(seed=3), config=config(then, 1))
        assert engine.load_checkpoint(tmp_path / "other") == (None, {})
        folder, client = engine.load_checkpoint(root)
        assert client == {"epoch": 7} and "global_step2" in folder and engine.global_steps == 2
        engine.micro_steps = 0
        train(engine, mesh, range(2, STEPS))
        return engine.module_state_dict()

    run_ranks({"dp": 2}, first)
    for found in run_ranks({"dp": 3}, second):
        assert_same(found, in_one_process()[0])


def bytes_of(model: nn.Module) -> int:
    """Resident bytes of a model's parameters, each storage once."""
    with torch._C.DisableTorchFunctionSubclass():
        storages = [p.untyped_storage() for p in model.parameters()]
        return sum({s.data_ptr() or id(s): s.nbytes() for s in storages}.values())


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4).double()


@pytest.mark.full
def test_stage_3_of_a_model_of_torch_holds_a_shard_and_the_largest_module():
    x = torch.randn(4, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = sum(p.nbytes for p in encoder().parameters())
    largest = whole // 4
    given = {"train_batch_size": 4, "optimizer": ADAM, "zero_optimization": {"stage": 3}}

    def work(mesh: Mesh) -> tuple[int, dict[str, Tensor]]:
        with zero.Init():
            model = encoder()
        made = bytes_of(model)
        for mine, theirs in zip(model.parameters(), encoder().parameters()):
            with zero.GatheredParameters(mine, modifier_rank=0):
                mine.data.copy_(theirs.data)
        engine, *_ = deepspeed.initialize(model=model, config=given)
        seen = []
        for layer in model.layers:
            layer.linear1.register_forward_hook(lambda *_: seen.append(bytes_of(model)))
            layer.linear1.register_full_backward_hook(lambda *_: seen.append(bytes_of(model)))
        for _ in range(2):
            mine = x.chunk(2)[mesh.samples.rank]
            engine.backward((engine(mine) * mine).mean())
            engine.step()
        with torch.no_grad():
            engine.eval()
            engine(x)
        assert len(seen) == 4 * 5
        shards = sum(t.nbytes for buffer in engine.chunk.buffers for t in buffer.param_shard.tensors)
        assert shards <= whole / 2 * 1.1 and made == 0
        return max(seen), engine.module_state_dict()

    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.999), weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (model(x) * x).mean().backward()
        optimizer.step()
    for most, found in run_ranks({"dp": 2}, work):
        assert most <= largest * 1.05, (most, largest)  # beside the shards, whose memory is apart
        assert_same(found, model.state_dict())


def test_parameters_made_in_shards_can_be_read_and_changed():
    def work(mesh: Mesh) -> tuple[Tensor, Tensor]:
        with zero.Init(dtype=torch.float64):
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        assert bytes_of(model) == 0 and model[0].weight.shape == (3, 3)
        with zero.GatheredParameters(model[0].weight, modifier_rank=0):
            model[0].weight.data.fill_(float(mesh.samples.rank + 1))
        assert bytes_of(model) == 0
        engine, *_ = deepspeed.initialize(model=model, config=config(3, 1) | {"train_batch_size": 2})
        with zero.GatheredParameters(model[1].bias, modifier_rank=1):
            model[1].bias.data.fill_(float(mesh.samples.rank + 1))
        state = engine.module_state_dict()
        return state["0.weight"], state["1.bias"]

    for first, second in run_ranks({"dp": 2}, work):
        assert bool((first == 1).all()) and second.item() == 2


def test_groups_and_optimizers_of_torch():
    """A group with a rate of its own, a schedule of torch's, and the loader's samples, each once."""

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [model[0].weight], "lr": 0.1},
            {"params": [model[1].weight, model[1].bias], "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1)

    alone = plain_model()
    optimizer = make_optimizer(alone)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for ids in DATA:
        optimizer.zero_grad()
        loss_of(alone(ids), ids).backward()
        optimizer.step()
        schedule.step()

    def work(mesh: Mesh) -> dict[str, Tensor]:
        model = plain_model()
        own = make_optimizer(model)
        given = {"train_batch_size": 12, "zero_optimization": {"stage": 2}}
        engine, _, loader, _ = deepspeed.initialize(
            model=model,
            optimizer=own,
            lr_scheduler=torch.optim.lr_scheduler.StepLR(own, 2),
            training_data=list(range(24)),
            config=given,
        )
        assert [len(batch) for batch in loader] == [6, 6]
        train(engine, mesh)
        return engine.module_state_dict()

    for found in run_ranks({"dp": 2}, work):
        assert_same(found, alone.state_dict())


def test_a_function_makes_a_schedule_of_torchs_over_the_files_optimizer():
    """Adam's betas, too."""
    cycle = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=len(DATA) + 1)
    alone = plain_model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.0)
    schedule = cycle(optimizer)
    for ids in DATA:
        optimizer.zero_grad()
        loss_of(alone(ids), ids).backward()
        optimizer.step()
        schedule.step()

    def work(mesh: Mesh) -> dict[str, Tensor]:
        given = {"train_batch_size": 12, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
        engine, *_ = deepspeed.initialize(model=plain_model(), lr_scheduler=cycle, config=given)
        train(engine, mesh)
        return engine.module_state_dict()

    for found in run_ranks({"dp": 2}, work):
        assert_same(found, alone.state_dict())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"config": config(optimizer={"type": "Lamb", "params": {}})}, "use Adam, AdamW or SGD"),
        ({"config": config(optimizer={"type": "Adam", "params": {"amsgrad": True}})}, "amsgrad"),
        ({"config": config(optimizer={"type": "Adam", "params": {"rate": 1}})}, "known are lr"),
        ({"config": config(optimizer={"type": "Adam", "params": {"lr": "auto"}})}, "lr is 'auto'; it must be a number"),
        ({"config": config(optimizer={"type": "Adam", "params": {"betas": [0.9]}})}, "betas is .* two numbers"),
        ({"config": config(), "model_parameters": []}, "it is empty"),
        ({"config": config(), "model": "gpt2"}, "model is a str"),
        ({"config": [config()]}, "config is a list"),
        ({"config": config(), "mpu": object()}, None),
        ({}, "0 configurations"),
        ({"config": config(), "config_params": config()}, "2 configurations"),
        ({"config": {"train_batch_size": 2}}, "names no optimizer"),
    ],
)
def test_what_initialize_refuses(options: dict[str, Any], message: str | None):
    def work(mesh: Mesh) -> None:
        given = {"model": plain_model()} | options
        if message is None:
            deepspeed.initialize(**given)
            return
        with pytest.raises(ConfigError, match=message):
            deepspeed.initialize(**given)

    run_ranks({"dp": 1}, work)


def test_a_step_without_a_backward_and_a_loss_of_many_numbers_are_errors():
    def work(mesh: Mesh) -> None:
        engine, *_ = deepspeed.initialize(model=plain_model(), config=config())
        with pytest.raises(RuntimeError, match="without a backward"):
            engine.step()
        with pytest.raises(ValueError, match="must be one number"):
            engine.backward(engine(DATA[0]))

    run_ranks({"dp": 1}, work)


@pytest.mark.parametrize("op", ["median", 3, None, "SUM "])
def test_an_unknown_operation_is_refused_not_summed(op: Any):
    with pytest.raises(ValueError, match=r"give one of torch\.distributed\.ReduceOp"):
        comm._operation(op)


@pytest.mark.parametrize(
    "environment, options, message",
    [
        ({}, {"dist_backend": "mpi"}, "mpi is not available; leave dist_backend out, or give 'gloo'"),
        ({}, {"dist_backend": "cpu:gloo,cuda:ccl"}, "ccl is not available"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "MASTER_ADDR": "here"},
            {"auto_mpi_discovery": False},
            "started by Open MPI",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "MASTER_ADDR": "here"}, {"auto_mpi_discovery": False}, "started by PMI"),
    ],
    ids=str,
)
def test_an_argument_of_init_distributed_that_cannot_be_followed_is_refused(
    environment: dict[str, str], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(comm, "cdb", None)
    with pytest.raises(ConfigError, match=message):
        comm.init_distributed(verbose=False, **options)


def test_a_tag_is_its_text_whatever_its_type(tmp_path: Path):
    def work(mesh: Mesh) -> None:
        engine, *_ = deepspeed.initialize(model=plain_model(), config=config(1, 1))
        for step, tag in enumerate((0, 7, 2.5, Path("best"), "last")):
            train(engine, mesh, range(1))
            assert engine.save_checkpoint(tmp_path, tag, {"step": step})
            assert (tmp_path / "latest").read_text() == str(tag)
        for step, tag in enumerate((0, "7", 2.5, "best", Path("last"))):
            folder, state = engine.load_checkpoint(tmp_path, tag)
            assert state == {"step": step} and engine.global_steps == step + 1
            assert Path(folder).parent == tmp_path / str(tag)
        assert engine.load_checkpoint(tmp_path, None)[1] == {"step": 4}
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(CheckpointError, match="the tag '' names no folder"):
                call(tmp_path, "")
        with pytest.raises((CheckpointError, PeerError), match="there is no checkpoint of the tag '1'"):
            engine.load_checkpoint(tmp_path, 1)

    run_ranks({"dp": 2}, work)


def test_a_load_that_is_asked_to_pass_over_missing_weights_says_that_it_does_not(tmp_path: Path, capfd):
    def work(mesh: Mesh) -> None:
        engine, *_ = deepspeed.initialize(model=plain_model(), config=config(1, 1))
        engine.save_checkpoint(tmp_path, 1)
        engine.load_checkpoint(tmp_path, 1)
        engine.load_checkpoint(tmp_path, 1, load_module_strict=False)

    run_ranks({"dp": 2}, work)
    assert capfd.readouterr().out.count("WARNING: load_module_strict=False") == 1


def test_a_tag_that_would_load_something_else_is_said(tmp_path: Path, capfd: pytest.CaptureFixture):
    def work(mesh: Mesh) -> None:
        engine, *_ = deepspeed.initialize(model=plain_model(), config=config(1, 1))
        assert engine.load_checkpoint(tmp_path / "new") == (None, {})
        for tag in ("latest", "./latest"):  # the file with the newest tag has this name
            with pytest.raises(CheckpointError, match="is the name of the file"):
                engine.save_checkpoint(tmp_path, tag)
        for step, tag in enumerate((" with spaces ", "0", "1")):
            train(engine, mesh, range(1))
            engine.save_checkpoint(tmp_path, tag, {"step": step})
            assert engine.load_checkpoint(tmp_path)[1] == {"step": step}
        for tag in (mesh["dp"].rank, mesh["dp"].rank or None):
            with pytest.raises(CheckpointError, match=r"ranks give different tags: .*, 1;"):
                engine.load_checkpoint(tmp_path, tag)
        (tmp_path / "latest").write_text("\n")
        with pytest.raises((CheckpointError, PeerError), match="its file latest is empty"):
            engine.load_checkpoint(tmp_path)

    run_ranks({"dp": 2}, work)
    assert capfd.readouterr().out.count("new has no file latest: nothing is loaded; give a tag") == 1


schedules = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "make",
    [
        lambda of: schedules.SequentialLR(of, [schedules.LinearLR(of), schedules.MultiStepLR(of, [2])], [1]),
        lambda of: schedules.ChainedScheduler([schedules.ConstantLR(of), schedules.MultiStepLR(of, [3])]),
        lambda of: schedules.SequentialLR(of, [schedules.LinearLR(of), schedules.StepLR(of, 2)], [1]),
    ],
    ids=["sequential", "chained", "of plain numbers"],
)
def test_a_schedule_made_of_others_goes_on_after_a_resume(make: Callable, tmp_path: Path):
    """Its state has the others' in a list, where JSON turns the milestones' steps into texts."""

    def work(mesh: Mesh) -> None:
        def engine() -> Any:
            return deepspeed.initialize(model=plain_model(), lr_scheduler=make, config=config(1, 1))[0]

        alone, before = engine(), engine()
        train(before, mesh, range(1))
        before.save_checkpoint(tmp_path)
        train(after := engine(), mesh, range(0))
        after.load_checkpoint(tmp_path)
        for step in range(STEPS):
            train(alone, mesh, range(step, step + 1))
            if step > 0:
                train(after, mesh, range(step, step + 1))
                assert after.get_lr() == alone.get_lr()

    run_ranks({"dp": 1}, work)


def test_what_of_a_checkpoint_is_not_loaded_stays_as_it_was(tmp_path: Path):
    def work(mesh: Mesh) -> None:
        engine, *_ = deepspeed.initialize(model=plain_model(), config=config(2, 1))
        train(engine, mesh, range(3))
        engine.save_checkpoint(tmp_path)
        counters = (3, 36, 3)
        for options, wanted, step, updates in (
            ({"load_optimizer_states": False}, counters, 3, 0),  # the schedule goes on, and so do the counters
            ({"load_lr_scheduler_states": False}, counters, 0, 3),
            ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, counters, 0, 0),
            ({"load_module_only": True}, (0, 0, 0), 0, 0),
        ):
            other, *_ = deepspeed.initialize(model=plain_model(1), config=config(2, 1))
            fresh = other.lr_scheduler.last_batch_iteration
            other.load_checkpoint(tmp_path, **options)
            assert (other.global_steps, other.global_samples, other.micro_steps) == wanted, options
            assert other.lr_scheduler.last_batch_iteration == fresh + step, options
            assert other.optimizer.flat.step_count == updates, options
            assert_same(other.module_state_dict(), engine.module_state_dict())
        with pytest.raises(NotImplementedError, match="custom_load_fn"):
            other.load_checkpoint(tmp_path, custom_load_fn=print)
        with pytest.raises(NotImplementedError, match="exclude_frozen_parameters"):
            other.save_checkpoint(tmp_path, exclude_frozen_parameters=True)

    run_ranks({"dp": 2}, work)


class Block(nn.Module):
    """A layer that answers with a dict, as models of transformers do, with an attention of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x + self.attention(self.norm(x), x, x, need_weights=False)[0]}


class TiedModel(nn.Module):
    """The head has the table's weights; the blocks stand in no list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(9, 6), Block(), Block()
        self.position = nn.Parameter(torch.randn(3, 6))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.table(ids) + self.position
        return {"logits": self.head(self.second(**{"x": self.first(x)["hidden"]})["hidden"])}


def test_stage_3_of_a_model_with_a_tied_table_and_answers_in_dicts():
    def loss_on(model: Callable[[Tensor], dict[str, Tensor]], ids: Tensor) -> Tensor:
        ids = ids.view(-1, 3)
        return nn.functional.cross_entropy(model(ids)["logits"].flatten(0, 1), (ids.flatten() + 1) % 9)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return TiedModel().double()

    alone = made()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for ids in DATA:
        optimizer.zero_grad()
        loss_on(alone, ids).backward()
        optimizer.step()

    def work(mesh: Mesh) -> tuple[int, dict[str, Tensor]]:
        given = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        model, seen = made(), []
        engine, *_ = deepspeed.initialize(model=model, config=given | {"zero_optimization": {"stage": 3}})
        for block in (model.first, model.second):
            block.norm.register_full_backward_hook(lambda *_: seen.append(bytes_of(model)))
        for ids in DATA:
            engine.backward(loss_on(engine, ids.chunk(2)[mesh.samples.rank]))
            engine.step()
        return max(seen), engine.module_state_dict()

    block = sum(p.nbytes for p in alone.first.parameters()) + alone.position.nbytes
    for most, found in run_ranks({"dp": 2}, work):
        assert most <= block, "the tied table is resident while a block's backward runs"
        assert_same(found, alone.state_dict())


@pytest.mark.parametrize("scales", [True, False])
def test_the_line_of_steps_per_print_has_the_mean_loss_of_the_step(scales: bool, capsys):
    """Over micro batches and ranks; the oracle is one process. A step of 12 samples is 2 ranks x 2 micro batches x 3."""
    given = config(optimizer={"type": "SGD", "params": {"lr": 1e-30}}, scheduler=None, steps_per_print=2)

    def work(mesh: Mesh) -> None:
        engine, *_ = deepspeed.initialize(model=plain_model(), config=given)
        for ids in DATA:
            mine = ids.chunk(mesh.samples.size)[mesh.samples.rank]
            for part in mine.chunk(2):
                loss = loss_of(engine(part), part)
                engine.backward(loss if scales else loss / 2, scale_wrt_gas=scales)
                engine.step()

    run_ranks({"dp": 2}, work)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step=")]
    model = plain_model()
    expected = [loss_of(model(DATA[step - 1]), DATA[step - 1]).item() for step in (2, 4)]
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4"]
    assert [float(line.split("loss=")[1]) for line in lines] == pytest.approx(expected, rel=1e-4)
