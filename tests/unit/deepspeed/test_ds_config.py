"""The keys of ds_config, its batch sizes and schedules, and hostfiles."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from deepspeed_doc import PAGE, document

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.optimizer.deepspeed_lr_schedules import WarmupCosineLR
from megatron.core.parallel.hostfile_to_torchrun import filtered, main, read_hostfile, torchrun_lines
from megatron.deepspeed.ds_config_scheduler import make_schedule
from megatron.deepspeed.optimizer import make_groups
from megatron.deepspeed.settings import KEYS, load_ds_config, read_settings

# The sections and values of the examples in the documentation of ds_config.
DOCUMENTED = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "fp16": {"enabled": True, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000}
    | {"hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1, "fp16_master_weights_and_grads": False},
    "zero_optimization": {
        "stage": 3,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "offload_param": {
            "device": "cpu",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3, "buffer_count": 4, "fast_init": False},
        "stage3_max_live_parameters": 1e9,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e6,
        "sub_group_size": 1e12,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
    },
    "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
    "wall_clock_breakdown": False,
}


def test_every_key_of_the_documented_examples_is_answered():
    settings = read_settings(DOCUMENTED, ranks=2)
    assert (settings.micro_batch, settings.accumulation, settings.precision) == (4, 1, "float16")
    assert settings.data_parallel.stage == 3 and settings.offload_optimizer.optimizer_offload_fraction == 0.3
    assert settings.loss_scale.initial_loss_scale == 2**16
    assert any(note.startswith("without effect: aio: ") for note in settings.notes)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"zero_optimisation": {"stage": 1}}, "unknown key zero_optimisation; did you mean zero_optimization"),
        ({"stage": 3}, "did you mean zero_optimization.stage"),
        ({"zero_optimization": {"stge": 1}}, "did you mean zero_optimization.stage"),
        ({"zero_optimization": {"stage": 4}}, "it must be a whole number from 0 to 3"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "communication is not quantized"),
        ({"gradient_clipping": "auto"}, "only transformers' Trainer replaces"),
        ({"fp16": {"enabled": "yes"}}, "it must be true or false"),
        ({"elasticity": {"enabled": True}}, "a job has one size"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "enable one"),
        ({"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 3}, "is 18"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "offload_param needs two things: stage 3",
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "needs nvme_path"),
        ({"fp16": 7}, "must be a section"),
    ],
)
def test_what_is_refused_says_what_to_do(given: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        read_settings({"train_batch_size": 8} | given, ranks=2)


NUMBERS = [key for key, working in KEYS.working.items() if working.kind in (int, float)]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 10**400])
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_that_are_not_finite_are_refused_by_their_key(key: str, value: float):
    """Infinity is read by two keys, where it means never and no clipping; JSON has it as Infinity or 1e999."""
    config = {"train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    section = config
    *names, last = key.split(".")
    for name in names:
        section = section.setdefault(name, {})
    section[last] = value
    if value == math.inf and KEYS.working[key].may_be_infinite:
        settings = read_settings(config, ranks=2)
        assert settings.steps_per_print is None and settings.clipping == 0
        return
    with pytest.raises(ConfigError, match=f"ds_config: {key} is "):
        read_settings(config, ranks=2)


@pytest.mark.parametrize("switch", [{"enabled": False}, {}, {"enabled": None}])
@pytest.mark.parametrize(
    "values",
    [
        {"initial_scale_power": 0, "min_loss_scale": 1000},
        {"min_loss_scale": 1e-10, "loss_scale": "auto"},
        {"loss_scale_window": 0, "hysteresis": math.inf, "consecutive_hysteresis": True},
        {"fp16_master_weights_and_grads": True},
    ],
)
def test_a_section_that_is_off_is_not_read(switch: dict, values: dict):
    plain = read_settings({"train_batch_size": 8}, ranks=2)
    assert read_settings({"train_batch_size": 8, "fp16": switch | values}, ranks=2) == plain
    bf16 = {"bf16": switch | {"bf16_optimizer_states": True, "immediate_grad_update": False}}
    assert read_settings({"train_batch_size": 8} | bf16, ranks=2) == plain


def test_the_keys_of_a_section_that_is_off_must_be_known():
    with pytest.raises(ConfigError, match=r"did you mean fp16\.min_loss_scale"):
        read_settings({"train_batch_size": 8, "fp16": {"enabled": False, "min_los_scale": 1}}, ranks=2)


@pytest.mark.parametrize(
    ("least", "floor"), [(1e-10, 2.0**-33), (1000, 1024.0), (0, 2.0**-126), (3.0, 4.0), (4096, 4096.0)]
)
def test_a_floor_of_the_loss_scale_is_rounded_up_to_a_power_of_two_and_says_so(least: float, floor: float):
    settings = read_settings({"train_batch_size": 8, "fp16": {"enabled": True, "min_loss_scale": least}}, ranks=2)
    assert settings.loss_scale.min_loss_scale == floor
    assert any("min_loss_scale" in note for note in settings.notes) == (floor != least)


def test_a_floor_above_the_first_scale_is_refused_by_the_keys_of_the_file():
    section = {"enabled": True, "min_loss_scale": 1000, "initial_scale_power": 9}
    with pytest.raises(ConfigError) as error:
        read_settings({"train_batch_size": 8, "fp16": section}, ranks=2)
    assert "fp16.initial_scale_power (9)" in str(error.value) and "--" not in str(error.value)
    read_settings({"train_batch_size": 8, "fp16": section | {"loss_scale": 128}}, ranks=2)


@pytest.mark.parametrize(
    ("section", "name", "decay"),
    [
        ({"type": "Adam", "params": {"torch_adam": True}}, "adam", 0.01),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "adam", 0.01),
        ({"type": "AdamW", "params": {"torch_adam": True, "adam_w_mode": False}}, "adam", 0.01),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}, "adam-l2", 0.0),
        ({"type": "Adam", "params": {"torch_adam": True, "weight_decay": 0.5}}, "adam", 0.5),
        ({"type": "Adam"}, "adam", 0.0),
        ({"type": "adamw"}, "adam", 0.0),
        ({"type": "SGD"}, "sgd", 0.0),
    ],
)
def test_an_optimizer_decays_by_what_deepspeed_decays_by(section: dict, name: str, decay: float):
    """DeepSpeed: torch_adam is torch.optim.AdamW, or with adam_w_mode false and the type Adam torch.optim.Adam."""
    found, groups = make_groups(section, [torch.zeros(1)])
    assert (found, groups[0]["weight_decay"]) == (name, decay)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_the_clipping_of_an_optimizer_is_a_key_of_the_file(kind: str):
    with pytest.raises(ConfigError, match="give gradient_clipping"):
        make_groups({"type": kind, "params": {"lr": 0.1, "max_grad_norm": 1.0}}, [torch.zeros(1)])


def test_every_answer_has_a_reason_and_all_problems_are_told_at_once():
    assert {answer.status for answer in KEYS.answers.values()} == {"works", "no effect", "refused"}
    assert all(answer.text for answer in KEYS.answers.values())
    with pytest.raises(ConfigError) as error:
        KEYS.check({"trian_batch_size": 8, "autotuning": {"enabled": True}})
    assert len(error.value.args[0].splitlines()) >= 2


@pytest.mark.parametrize(
    "given, sizes",
    [
        ({"train_batch_size": 12}, (6, 1)),
        ({"train_micro_batch_size_per_gpu": 3}, (3, 1)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, (2, 3)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, (2, 3)),
    ],
)
def test_the_third_of_the_batch_sizes_follows(given: dict, sizes: tuple[int, int]):
    settings = read_settings(given, ranks=2)
    assert (settings.micro_batch, settings.accumulation) == sizes


def test_the_short_form_of_zero_is_stage_1():
    assert read_settings({"train_batch_size": 8, "zero_optimization": True}, ranks=2).data_parallel.stage == 1
    assert read_settings({"train_batch_size": 8, "zero_optimization": False}, ranks=2).data_parallel.stage == 0


def test_a_file_that_names_a_key_twice_is_refused(tmp_path):
    (path := tmp_path / "ds.json").write_text('{"train_batch_size": 8, "train_batch_size": 16}')
    with pytest.raises(ConfigError, match="train_batch_size is there twice"):
        load_ds_config(path)
    path.write_text(json.dumps(DOCUMENTED))
    assert load_ds_config(path) == DOCUMENTED


def rates(kind: str, steps: int, **params: float) -> list[float]:
    """The rates of the first updates."""
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    schedule, found = make_schedule({"type": kind, "params": params}, optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


def test_schedules_have_their_published_rates():
    log3 = math.log(2) / math.log(3)
    warm = {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}
    assert rates("WarmupLR", 6, **warm) == pytest.approx([1e-3, 1e-3, 1e-3 + 9e-3 * log3, 1e-2, 1e-2, 1e-2])
    linear = rates("WarmupDecayLR", 8, total_num_steps=6, warmup_type="linear", **warm)
    assert linear == pytest.approx([1e-3, 1e-3, 4e-3, 7e-3, 1e-2, 7e-3, 4e-3, 1e-3])
    cosine = rates("WarmupCosineLR", 6, total_num_steps=4, warmup_num_steps=2, cos_min_ratio=0.1)
    assert cosine == pytest.approx([0, 0, 0.1, 0.055, 0.01, 0.01])
    ranged = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 5}
    assert rates("LRRangeTest", 4, **ranged) == pytest.approx([1e-4, 3.5e-4, 6e-4, 8.5e-4])
    assert rates("LRRangeTest", 4, lr_range_test_staircase=True, **ranged) == pytest.approx([1e-4, 1e-4, 6e-4, 6e-4])
    cycle = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 2, "cycle_second_step_size": 3}
    cycle |= {"decay_step_size": 10, "decay_lr_rate": 0.5, "cycle_first_stair_count": 500, "decay_mom_rate": 0.0}
    wanted = [1e-4, 5.5e-4, 1e-3, 6.994e-4, 3.988e-4, 1e-4, 1e-4 / 1.05, 1e-4 / 1.1]
    assert rates("OneCycle", 8, **cycle) == pytest.approx(wanted)
    few = {
        "cycle_first_step_size": 4,
        "cycle_first_stair_count": 3,
        "cycle_second_step_size": 5,
        "cycle_second_stair_count": 2,
    }
    wanted = [1e-4, 1e-4, 4e-4, 7e-4, 1e-3, 5.5e-4, 5.5e-4, 1e-4, 1e-4]
    assert rates("OneCycle", 9, **cycle | few) == pytest.approx(wanted)
    for kind, params, message in (
        ("StepLR", {}, "use LRRangeTest, OneCycle, WarmupLR"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, "warmup_num_steps = 'auto' must be a number"),
        ("OneCycle", cycle | {"cycle_first_step_size": 0}, "a cycle rises for 0 updates"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "give 1 or more"),
        (
            "WarmupDecayLR",
            {"total_num_steps": 4, "warmup_num_steps": 5},
            r"total_num_steps is 4; it must be at least warmup_num_steps \(5\)",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            rates(kind, 1, **params)


def test_one_cycle_moves_the_first_beta_against_the_rate():
    optimizer, found = SimpleNamespace(param_groups=[{"lr": 0.1, "betas": (0.8, 0.999)}]), []
    sizes = {"cycle_first_step_size": 2, "cycle_min_mom": 0.85, "cycle_max_mom": 0.95}
    schedule = make_schedule({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1} | sizes}, optimizer)
    for _ in range(7):
        found.append(optimizer.param_groups[0]["betas"])
        schedule.step()
    assert [beta for _, beta in found] == [0.99] * 7
    assert [beta for beta, _ in found] == pytest.approx([0.85, 0.9, 0.85, 0.9, 0.95, 0.95, 0.95])


def test_a_schedule_goes_on_from_its_state():
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    first, second = (WarmupCosineLR(optimizer, 10, warmup_num_steps=2) for _ in range(2))
    optimizer.param_groups[0]["lr"] = 0.1
    second = WarmupCosineLR(optimizer, 10, warmup_num_steps=2)
    first = WarmupCosineLR(SimpleNamespace(param_groups=[{"lr": 0.1}]), 10, warmup_num_steps=2)
    for _ in range(5):
        first.step()
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr() == [optimizer.param_groups[0]["lr"]]


HOSTS = "# nodes\nworker-0 slots=4\nworker-1 slots=4\n\nworker-2 slots=4\n"


def test_a_hostfile_becomes_torchruns_lines(tmp_path, capsys):
    nodes = filtered(read_hostfile(HOSTS), include="worker-1:0,2@worker-2:1,3")
    lines = torchrun_lines(nodes, ["train.py", "--x", "a b"])
    assert lines["worker-2"] == (
        "CUDA_VISIBLE_DEVICES=1,3 torchrun --nnodes=2 --nproc-per-node=2 --node-rank=1 --master-addr=worker-1 "
        "--master-port=29500 train.py --x 'a b'"
    )
    (path := tmp_path / "hosts").write_text(HOSTS)
    assert main([str(path), "--exclude", "worker-0", "--", "train.py"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("worker-1: torchrun --nnodes=2 --nproc-per-node=4") and len(out) == 2


@pytest.mark.parametrize(
    "text, options, message",
    [
        ("worker-0 4\nworker-0 slots=0", {}, "line 1 .* line 2|line 1"),
        (HOSTS, {"include": "worker-9"}, "no such node"),
        (HOSTS, {"exclude": "worker-0:4"}, "no such node or slot"),
        (HOSTS, {"include": "worker-0", "exclude": "worker-1"}, "--include and --exclude cannot be combined"),
        (HOSTS, {"exclude": "worker-0:1"}, "the same number of slots"),
    ],
)
def test_hostfiles_and_filters_that_say_nothing_are_refused(text: str, options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        torchrun_lines(filtered(read_hostfile(text), **options), [])


def test_the_page_has_the_table_of_the_code():
    assert PAGE.read_text() == document(PAGE.read_text()), "run: python tests/campaigns/deepspeed_doc.py"
