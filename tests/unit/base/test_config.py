"""One dataclass field gives one flag: every kind of option, every mistake on a command line."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest
from said import tells, tells_each

from megatron.core.base.dataclass_flags import (
    ConfigError,
    FlagParser,
    add_flags,
    build,
    changes,
    default_of,
    default_text,
    flag_of,
    flags_of,
    option as declare,
    option_fields,
    read_flags,
    repeated_flags,
    unknown_flag_message,
)
from megatron.core.models.common.model_rules import ModelRules
from megatron.core.optimizer import OPTIMIZERS, UpdateRule
from megatron.core.peft.lora_config import LoRAConfig
from megatron.core.transformer.moe.moe_config import MoEConfig
from megatron.training.arguments.command_line import make_parser, parse_args
from megatron.training.arguments.config import COMPONENTS
from megatron.training.arguments.ignored_and_refused_flags import NO_EFFECT, REFUSED, SHORTHAND
from megatron.training.arguments.unused_settings import without_effect_on_few_ranks
from megatron.training.num_samples import notes_of_no_validation


@dataclass(frozen=True)
class Oven:
    """How to bake.

    Only this docstring's first line is a title.
    """

    loaves: int = declare(2, "loaves at once")
    hours: float = declare(0.5, "hours in the oven, 100% of them hot")
    flour: str = declare("rye", "what it is made of")
    fan: bool = declare(False, "blow the air about")
    light: bool = declare(True, "leave the lamp off")
    door_open: bool = declare(True, "shut the door", flags=("--shut-door",))
    shelf: int | None = declare(None, "shelf from below")
    note: str | None = declare(None, "what to write on it", metavar="TEXT")
    heat: Literal["top", "bottom"] = declare("top", "where it is hot")
    level: Literal[1, 2, 3] | None = declare(None, "how hot")
    seeds: list[str] = declare(["sesame"], "on the crust")
    times: list[int] | None = declare(None, "when to look")
    yeast: float = declare(1e-3, "grams", flags=("--yeast", "--old-yeast"))
    guests: int | None = declare(None, "how many come", required=True)
    derived: int = 7  # a field that is no option has no flag


def read(line: str) -> Oven:
    parser = FlagParser()
    add_flags(parser, Oven)
    return build(Oven, read_flags(parser, line.split()))


# one row per kind of option:  command line, field, value
KINDS = [
    ("", "loaves", 2),
    ("--loaves 5", "loaves", 5),
    ("--loaves=5", "loaves", 5),
    ("--loaves -5", "loaves", -5),
    ("--hours 1e-2", "hours", 0.01),
    ("--hours 3", "hours", 3.0),
    ("--hours -1e5", "hours", -1e5),
    ("--hours -2.5E-3", "hours", -0.0025),
    ("--yeast -.5", "yeast", -0.5),
    ("--yeast -3.", "yeast", -3.0),
    ("--flour spelt", "flour", "spelt"),
    ("", "fan", False),
    ("--fan", "fan", True),
    ("", "light", True),
    ("--no-light", "light", False),
    ("", "door_open", True),
    ("--shut-door", "door_open", False),
    ("", "shelf", None),
    ("--shelf 3", "shelf", 3),
    ("", "note", None),
    ("--note None", "note", "None"),
    ("--heat bottom", "heat", "bottom"),
    ("", "level", None),
    ("--level 2", "level", 2),
    ("", "seeds", ["sesame"]),
    ("--seeds poppy flax", "seeds", ["poppy", "flax"]),
    ("", "times", None),
    ("--times 10 20 30", "times", [10, 20, 30]),
    ("--yeast 2", "yeast", 2.0),
    ("--old-yeast 2", "yeast", 2.0),
    ("--loaves 3 --loaves 4", "loaves", 4),
    ("--fan --loaves 9", "derived", 7),
]


@pytest.mark.parametrize(("line", "field", "value"), KINDS)
def test_a_knob_reads_its_kind(line: str, field: str, value):
    got = getattr(read(line), field)
    assert got == value
    assert type(got) is type(value)


def test_a_flag_is_spelt_like_its_field_unless_it_says_otherwise():
    spelt = {field.name: flags_of(field) for field in option_fields(Oven)}
    plain = ["loaves", "hours", "flour", "fan", "shelf", "note", "heat", "level", "seeds", "times", "guests"]
    own = {"light": ("--no-light",), "door_open": ("--shut-door",), "yeast": ("--yeast", "--old-yeast")}
    assert spelt == {name: (f"--{name}",) for name in plain} | own


LINES_AND_MESSAGES = [
    ("--loaves two", "--loaves two"),
    ("--loaves 2.5", "--loaves 2.5"),
    ("--loaves", "--loaves"),
    ("--seeds", "--seeds"),
    ("--fan=yes", "--fan yes"),
    ("--old-yeast much", "--yeast/--old-yeast much"),
    ("--hours inf", "--hours"),
    ("--hours nan", "--hours"),
    ("--hours -inf", "--hours -inf is not a finite number"),
    ("--hours -Infinity", "--hours -Infinity is not a finite number"),
    ("--yeast -nan", "--yeast/--old-yeast -nan is not a finite number"),
    ("--loaves -inf", "--loaves '-inf' is not a whole number"),
    ("--times 1 -inf", "--times '-inf' is not a whole number"),
    ("--fan -inf", "-inf does not belong to any flag"),
    ("--hours -fan", "--hours expected one argument"),
    ("--flour=", "--flour"),
    ("--heat left", "--heat left"),
    ("--level 4", "--level 4 1 2 3"),
    ("--loav 3", "--loav --loaves"),
    ("--light", "--light --no-light"),
    ("--derived 3", "--derived --help"),
    ("-1", "-1"),
    ("bread butter", "bread butter does not belong to any flag"),
]


@pytest.mark.parametrize(("line", "message"), LINES_AND_MESSAGES)
def test_a_mistake_on_the_command_line_is_a_config_error(line: str, message: str):
    with pytest.raises(ConfigError) as error:
        read(line)
    assert tells(error.value, message)


FLAGS_AND_MESSAGES = [
    ("--loavs", "--loavs --loaves"),
    ("--hour=3", "--hour=3 --hours"),
    ("--no-fan", "unknown flag --no-fan; did you mean --fan?"),
    ("-loaves", "unknown flag -loaves; did you mean --loaves?"),
    ("--door_open", "unknown flag --door_open; --help lists the known ones"),
    ("--shut_door", "unknown flag --shut_door; did you mean --shut-door?"),
    ("--old", "unknown flag --old; did you mean --old-yeast?"),
    ("--xyzzy", "unknown flag --xyzzy; --help lists the known ones"),
    ("--hat", "unknown flag --hat; did you mean --heat?"),
    ("--float", "unknown flag --float; --help lists the known ones"),
]


@pytest.mark.parametrize(("flag", "message"), FLAGS_AND_MESSAGES)
def test_an_unknown_flag_comes_with_the_nearest_known_one(flag: str, message: str):
    parser = FlagParser()
    add_flags(parser, Oven)
    assert tells(unknown_flag_message(flag, parser.known_flags()), message)


def test_a_flag_that_may_abbreviate_several_comes_with_them():
    known = ["--vocab-file", "--vocab-size", "--vocabulary", "--seed"]
    assert tells(unknown_flag_message("--vocab", known), "--vocab --vocab-file --vocab-size")


@pytest.mark.parametrize("component", [Oven, *COMPONENTS.values()], ids=lambda c: c.__name__)
def test_a_config_is_frozen(component: type):
    config = component()
    for field in dataclasses.fields(component):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, None)


def test_a_list_default_is_not_shared():
    assert Oven().seeds == Oven().seeds == ["sesame"]
    assert Oven().seeds is not Oven().seeds
    (field,) = (f for f in option_fields(Oven) if f.name == "seeds")
    assert default_of(field) == ["sesame"]


def test_changes_are_the_differences_from_the_defaults():
    assert changes(Oven()) == {}
    baked = read("--loaves 2 --no-light --seeds flax --level 3 --old-yeast 1e-3")
    assert changes(baked) == {"light": (True, False), "seeds": (["sesame"], ["flax"]), "level": (None, 3)}
    assert changes(Oven(derived=8)) == {}, "what is no option is no setting"


def test_build_passes_over_what_belongs_to_others():
    assert build(Oven, {"loaves": 4, "bicycles": 3}) == Oven(loaves=4)


def test_problems_are_one_line_each():
    assert ConfigError("one").problems == ["one"]
    assert str(ConfigError(["one", "two"])) == "one\ntwo"


def test_help_gives_each_knob_with_its_default_under_the_first_line_of_the_docstring():
    parser = FlagParser()
    add_flags(parser, Oven)
    text = " ".join(parser.format_help().split())
    assert "How to bake: " in text
    assert "Only this docstring" not in text
    for words in (
        "--loaves N loaves at once (default: 2)",
        "--hours X hours in the oven, 100% of them hot (default: 0.5)",
        "--flour TEXT what it is made of (default: rye)",
        "--note TEXT what to write on it --heat",
        "--guests N how many come (required)",
        "--fan blow the air about --no-light leave the lamp off",
        "--heat {top,bottom} where it is hot (default: top)",
        "on the crust (default: sesame)",
        "grams (default: 0.001)",
    ):
        assert words in text


LINES_AND_NAMED = [
    ("", ""),
    ("--loaves 3 --fan", ""),
    ("--loaves 3 --loaves 4", "--loaves 2"),
    ("--loaves=3 --fan --loaves=4 --fan", "--loaves 2|--fan 2"),
    ("--yeast 1 --old-yeast 2 --yeast 3", "--yeast/--old-yeast 3"),
]


@pytest.mark.parametrize(("line", "named"), LINES_AND_NAMED)
def test_flags_given_twice_are_noted(line: str, named: str):
    parser = FlagParser()
    add_flags(parser, Oven)
    assert tells_each(repeated_flags(parser, line.split()), named)


def test_help_lists_every_knob_of_a_run():
    text = make_parser().format_help()
    listed = {word.rstrip(",").split("=")[0] for word in text.split() if word.startswith("--")}
    declared = {flag for c in COMPONENTS.values() for field in option_fields(c) for flag in flags_of(field)}
    assert declared | set(SHORTHAND) | {"--help", "--help-all"} <= listed
    unwrapped = "".join(text.split())  # lines break at hyphens too
    for component in COMPONENTS.values():
        for field in option_fields(component):
            default = default_text(field)
            shown = f"({default})" if default == "required" else f"(default: {default})" if default else ""
            assert "".join(f"{field.metadata['help']}{shown}".split()) in unwrapped
    assert "None" not in text
    assert "default: )" not in text


def test_no_two_knobs_share_a_name_or_a_flag():
    fields = [field for component in COMPONENTS.values() for field in option_fields(component)]
    names = [field.name for field in fields]
    flags = [flag for field in fields for flag in flags_of(field)] + [*NO_EFFECT, *REFUSED, *SHORTHAND]
    assert len(names) == len(set(names))
    assert len(flags) == len(set(flags))


def test_every_knob_says_what_it_does():
    for component in COMPONENTS.values():
        assert component.__doc__.strip().split("\n")[0].endswith(".")
        assert all(field.metadata["help"].strip() for field in option_fields(component))


_OF_A_FILE = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model x"


FLAGS_AND_SAID = [
    ("--ddp-bucket-size 9 --zero-stage 3", None, "--ddp-bucket-size ZeRO 3"),
    ("--ddp-bucket-size 9", "--overlap-grad-reduce", "--ddp-bucket-size --overlap-grad-reduce"),
    (
        "--offload-dir x --optimizer-offload-fraction 0",
        "--cpu-offloading-num-layers 1",
        "--offload-dir: --optimizer-offload-fraction 0",
    ),
    (
        "--optimizer-cpu-offload --optimizer-offload-fraction 0",
        None,
        "--optimizer-cpu-offload: --optimizer-offload-fraction 0",
    ),
    (f"--vocab-size 9 {_OF_A_FILE}", None, "--vocab-size --tokenizer-type HuggingFaceTokenizer"),
    ("--rotary-base 5e5", "--position-embedding-type rope", "--rotary-base --position-embedding-type rope"),
    ("--rotary-percent 0.5", "--position-embedding-type rope", "--rotary-percent --position-embedding-type rope"),
    ("--reset-position-ids --position-embedding-type none", None, "--reset-position-ids positions"),
    ("--reset-position-ids --position-embedding-type rope --no-rope-freq 1", None, "--reset-position-ids positions"),
    ("--sgd-momentum 0.5", "--optimizer sgd", "--sgd-momentum --optimizer adam"),
    ("--adam-beta1 0.5 --optimizer sgd", None, "--adam-beta1 --optimizer sgd"),
    ("--muon-momentum 0.5", "--optimizer muon", "--muon-momentum --optimizer adam"),
    ("--optimizer muon --muon-scalar-optimizer sgd --adam-eps 1e-6", None, "--adam-eps --optimizer muon"),
    ("--lr-warmup-init 1e-7 --lr 1", "--lr-warmup-fraction 0.1", "--lr-warmup-init warm-up"),
    ("--lr-warmup-style log", "--lr-warmup-iters 1", "--lr-warmup-style warm-up"),
    (
        "--lr-wsd-decay-style linear",
        "--lr-decay-style WSD --lr-wsd-decay-iters 1",
        "--lr-wsd-decay-style --lr-decay-style WSD",
    ),
    ("--lr 1 --min-lr 0.5 --lr-decay-style constant", None, "--min-lr --lr-decay-style constant"),
    (
        "--lr-decay-iters 9 --lr-decay-style constant",
        "--lr-warmup-fraction 0.5",
        "--lr-decay-iters --lr-decay-style constant",
    ),
    ("--hysteresis 3", "--fp16", "--hysteresis --fp16"),
    ("--loss-scale-window 3 --fp16 --loss-scale 4", None, "--loss-scale-window --loss-scale 4"),
    ("--use-checkpoint-opt_param-scheduler", "--load no-such-folder", "--use-checkpoint-opt_param-scheduler --load"),
    (
        "--use-checkpoint-opt_param-scheduler --pretrained-checkpoint no-such-folder",
        None,
        "--use-checkpoint-opt_param-scheduler weights --load",
    ),
    ("--rotary-base 5e5 --position-embedding-type rope --no-rope-freq 1", None, "--rotary-base --no-rope-freq 1"),
    (
        "--use-rope-scaling --rope-scaling-factor 4 --position-embedding-type rope --no-rope-freq 1",
        None,
        "--use-rope-scaling --rope-scaling-factor --no-rope-freq 1",
    ),
    ("--window-size 3,0 --window-attn-skip-freq 1", None, "--window-size: --window-attn-skip-freq 1"),
    ("--no-scale-decoder-outputs --untie-embeddings-and-output-weights", None, "--no-scale-decoder-outputs word table"),
    ("--cpu-half-products native", "--bf16", "--cpu-half-products --bf16 --fp16"),
    ("--cp-comm-type a2a", "--context-parallel-size 2", "--cp-comm-type --context-parallel-size"),
    ("--exit-signal SIGUSR2", "--exit-signal-handler", "--exit-signal --exit-signal-handler"),
    ("--override-opt_param-scheduler", "--load no-such-folder", "--override-opt_param-scheduler --load"),
    ("--no-save-optim", "--save x", "--no-save-optim --save"),
    (f"--vocab-file x {_OF_A_FILE}", None, "--vocab-file --tokenizer-type HuggingFaceTokenizer"),
    (
        "--tokenizer-type GPT2BPETokenizer --vocab-file x --merge-file x --tokenizer-model x",
        None,
        "--tokenizer-model: --tokenizer-type GPT2BPETokenizer",
    ),
    (
        "--tokenizer-type NullTokenizer --vocab-size 9 --tokenizer-model x --merge-file x",
        None,
        "--tokenizer-model --merge-file --tokenizer-type NullTokenizer",
    ),
    (
        f"--tiktoken-pattern v1 --tiktoken-num-special-tokens 9 {_OF_A_FILE}",
        None,
        "--tiktoken-pattern --tiktoken-num-special-tokens HuggingFaceTokenizer",
    ),
    (
        "--weight-decay 0.1 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.2",
        None,
        "--weight-decay: --weight-decay-incr-style linear --end-weight-decay",
    ),
    (
        "--init-method-std 0.1 --init-method-xavier-uniform",
        "--softmax-type learnable",
        "--init-method-std: --init-method-xavier-uniform",
    ),
    ("--mock-data --epoch-stable-order", None, "--epoch-stable-order made-up"),
    ("--mock-data --data-cache-path x --no-mmap-bin-files", None, "--data-cache-path --no-mmap-bin-files made-up"),
    (
        "--log-batch-size-to-tensorboard --log-world-size-to-tensorboard",
        "--tensorboard-dir x",
        "--log-batch-size-to-tensorboard --log-world-size-to-tensorboard --tensorboard-dir",
    ),
    ("--log-validation-ppl-to-tensorboard", "--metrics-file x", "--log-validation-ppl-to-tensorboard --metrics-file"),
    (
        "--log-timers-to-tensorboard --timing-log-level 1",
        "--metrics-file x",
        "--log-timers-to-tensorboard --metrics-file",
    ),
    ("--save-interval 5", "--save x", "--save-interval --save"),
    ("--dist-ckpt-strictness log_all", "--load x", "--dist-ckpt-strictness --load"),
    (
        "--log-timers-to-tensorboard --metrics-file x",
        "--timing-log-level 1",
        "--log-timers-to-tensorboard --timing-log-level 0",
    ),
    (
        "--error-injection-rate 5 --error-injection-type correct_result",
        "--rerun-interval 1",
        "--error-injection-rate --error-injection-type --rerun-interval",
    ),
    (
        "--recompute-method uniform --recompute-num-layers 2",
        "--recompute-granularity full",
        "--recompute-method --recompute-num-layers --recompute-granularity",
    ),
    (
        "--add-qkv-bias --add-attention-output-bias --add-mlp-bias",
        "--disable-bias-linear",
        "--add-qkv-bias --add-attention-output-bias --add-mlp-bias --disable-bias-linear",
    ),
    # settings that only say more about a flag that is absent
    (
        "--tensorboard-log-interval 5 --no-log-loss-scale-to-tensorboard",
        "--tensorboard-dir x",
        "--tensorboard-log-interval --no-log-loss-scale-to-tensorboard --tensorboard-dir",
    ),
    ("--tensorboard-queue-size 5", "--tensorboard-dir x", "--tensorboard-queue-size --tensorboard-dir"),
    (
        "--profile-step-start 2 --profile-step-end 3 --use-pytorch-profiler",
        "--profile --save x",
        "--profile-step-start --profile-step-end --use-pytorch-profiler --profile",
    ),
    ("--memory-snapshot-path x", "--record-memory-history", "--memory-snapshot-path --record-memory-history"),
    ("--straggler-minmax-count 2", "--log-straggler", "--straggler-minmax-count --log-straggler"),
    (
        "--timing-log-option max --barrier-with-level-1-timing",
        "--timing-log-level 1",
        "--timing-log-option --barrier-with-level-1-timing --timing-log-level",
    ),
    (
        "--error-injection-type correct_result --rerun-interval 1",
        "--error-injection-rate 5",
        "--error-injection-type --error-injection-rate 0",
    ),
    ("--eval-interval 5 --eval-iters 0", None, "--eval-interval --eval-iters 0"),
    (
        "--no-scatter-gather-tensors-in-pipeline --account-for-loss-in-pipeline-split --use-tp-pp-dp-mapping",
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
        "--no-scatter-gather-tensors-in-pipeline --account-for-loss-in-pipeline-split --use-tp-pp-dp-mapping "
        "--pipeline-model-parallel-size 1",
    ),
    (
        "--no-scatter-gather-tensors-in-pipeline --pipeline-model-parallel-size 2",
        None,
        "--no-scatter-gather-tensors-in-pipeline one tensor-parallel rank",
    ),
    # training that is skipped
    ("--skip-train --save x --save-interval 5", None, "--save --save-interval --skip-train"),
    ("--skip-train --exit-interval 5 --eval-interval 7", None, "--exit-interval --eval-interval --skip-train"),
    (
        "--skip-train --check-for-spiky-loss --rerun-interval 3",
        None,
        "--check-for-spiky-loss --rerun-interval --skip-train",
    ),
    # the inputs of recomputed layers are offloaded whatever their size
    (
        "--recompute-granularity full --recompute-method uniform --cpu-offloading-num-layers 2 --min-offloaded-tensor-size 5",
        None,
        "--min-offloaded-tensor-size every offloaded layer is recomputed",
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2 --min-offloaded-tensor-size 5 "
        "--cpu-offloading-num-layers 2",
        None,
        "--min-offloaded-tensor-size every offloaded layer is recomputed",
    ),
]


@pytest.mark.parametrize(("flags", "with_effect", "said"), FLAGS_AND_SAID)
def test_a_setting_that_the_others_leave_without_effect_is_noted(flags: str, with_effect: str | None, said: str):
    (note,) = parse_args(flags.split())[2]
    assert tells(note, said)
    assert with_effect is None or parse_args(f"{flags} {with_effect}".split())[2] == []


@pytest.mark.parametrize(
    "flags",
    [
        "--adam-beta1 0.5 --optimizer adam-l2",
        "--adam-eps 1e-6 --muon-momentum 0.5 --optimizer muon",
        "--sgd-momentum 0.5 --optimizer muon --muon-scalar-optimizer sgd",
        "--lr 1 --min-lr 0.5 --lr-decay-style cosine --lr-decay-iters 9",
        "--loss-scale-window 3 --fp16",
        "--reset-position-ids",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2 --min-offloaded-tensor-size 5 "
        "--cpu-offloading-num-layers 3",
        "--window-size 3,0 --window-attn-skip-freq 2",
        "--window-size=-1,0",
        "--rotary-base 5e5 --position-embedding-type rope --no-rope-freq 2",
    ],
)
def test_settings_that_are_read_are_not_noted(flags: str):
    assert parse_args(flags.split())[2] == []


@pytest.mark.parametrize(
    "words",
    [
        "--moe-ffn-hidden-size 8",
        "--moe-shared-expert-intermediate-size 8",
        "--moe-router-topk 1 --moe-router-pre-softmax",
    ],
)
def test_one_expert_is_a_dense_mlp_and_nothing_that_asks_for_more_is_taken(words: str):
    """Megatron makes a layer of one expert; scripts of DeepSpeed's fork say 1 for a dense MLP."""
    assert parse_args(["--num-experts", "1"])[2] == []
    (note,) = parse_args(["--num-experts", "1", "--moe-grouped-gemm"])[2]
    assert note == "no effect here: --moe-grouped-gemm: --num-experts 1 is a dense MLP"
    with pytest.raises(ConfigError, match=f"--num-experts 1 is a dense MLP here.*{words.split()[0]}"):
        parse_args(f"--num-experts 1 {words}".split())


@pytest.mark.parametrize("experts", ["", "--num-experts 0"])
def test_without_experts_every_setting_of_experts_is_named(experts: str):
    """None of those that a later class adds can be forgotten."""
    words = (
        "--moe-layer-freq 2 --moe-ffn-hidden-size 8 --moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate "
        "--moe-shared-expert-overlap --moe-router-topk 3 --moe-router-score-function sigmoid --moe-router-pre-softmax "
        "--moe-router-topk-scaling-factor 2 --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-bias "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.5 --moe-router-dtype fp64 "
        "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 --moe-input-jitter-eps 0.1 "
        "--moe-router-force-load-balancing --moe-enable-routing-replay --moe-expert-capacity-factor 1 "
        "--moe-pad-expert-input-to-capacity --moe-token-drop-policy position --moe-token-dispatcher-type flex "
        "--moe-grouped-gemm --moe-apply-probs-on-input --moe-layer-recompute --moe-enable-deepep "
        "--moe-router-topk-limited-devices 2"
    )
    (note,) = parse_args(f"{words} {experts}".split())[2]
    named, reason = note.removeprefix("no effect here: ").split(": ")
    of_experts = {flag_of(name) for name in vars(MoEConfig)["__annotations__"]} - {"--num-experts"}
    assert {*named.split()} == of_experts and "--num-experts" in reason


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--moe-router-bias-update-rate 0.5", "--moe-router-bias-update-rate"),
        ("--moe-router-bias-update-rate 0.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias", ""),
        ("--moe-token-drop-policy position", "--moe-token-drop-policy"),
        (
            "--moe-token-drop-policy position --moe-expert-capacity-factor=-1",
            "--moe-expert-capacity-factor --moe-token-drop-policy",
        ),
        ("--moe-token-drop-policy position --moe-expert-capacity-factor 1", ""),
        ("--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1", "--moe-pad-expert-input-to-capacity"),
        ("--moe-router-load-balancing-type seq_aux_loss", "--moe-router-load-balancing-type"),
        ("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1", ""),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff"),
        ("--moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 1 --moe-router-pre-softmax", ""),
        ("--moe-router-num-groups 2 --moe-router-group-topk 2", "--moe-router-group-topk --moe-router-num-groups"),
        # Megatron accepts these and reads them nowhere
        ("--moe-router-num-groups 3", "--moe-router-num-groups"),
        ("--moe-router-pre-softmax --moe-router-score-function sigmoid", "--moe-router-pre-softmax"),
        ("--moe-router-pre-softmax --moe-router-load-balancing-type sinkhorn", "--moe-router-pre-softmax"),
        ("--moe-router-pre-softmax", ""),
        ("--moe-shared-expert-gate", "--moe-shared-expert-gate"),
        ("--moe-shared-expert-overlap", "--moe-shared-expert-overlap"),
        (
            "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 8 --moe-token-dispatcher-type alltoall",
            "",
        ),
        (
            "--moe-router-force-load-balancing --moe-router-num-groups 4 --moe-router-group-topk 2",
            "--moe-router-group-topk --moe-router-num-groups",
        ),
        ("--ffn-hidden-size 8", ""),
        ("--ffn-hidden-size 8 --moe-ffn-hidden-size 4 --tiled-mlp 2", "--tiled-mlp"),  # the width is exported
        ("--ffn-hidden-size 8 --moe-ffn-hidden-size 4 --tiled-mlp 2 --moe-layer-freq 2", ""),
    ],
)
def test_a_setting_of_experts_that_another_makes_idle_is_named(flags: str, named: str):
    notes = parse_args(f"--num-layers 4 --num-experts 8 {flags}".split())[2]
    assert sorted(named_in(notes)) == named.split()


def test_ranks_that_only_experts_use_are_named_for_a_model_known_to_have_none():
    rules = ModelRules(model="GPTModel", reads_num_experts=True)
    for flags, named in {
        "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2": ["--expert-tensor-parallel-size"],
        "--expert-tensor-parallel-size 1 --num-experts 4": [],
        "": [],
    }.items():
        config = parse_args(flags.split()).config
        assert list(rules.without_effect(config)) == named
        assert ModelRules().without_effect(config) == {}, "a script's own model may have experts of its own"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--lora-alpha 8 --lora-rank 2", ""),
        ("--sft --chat-template x", ""),
        ("--sft --chat-template x --data-path a_sft_document", "--chat-template"),
        ("--sft --sft-split-turns --data-path a.jsonl --valid-data-path a_sft_document", ""),
        ("--sft --eod-mask-loss --fim-data", "--eod-mask-loss --fim-data"),
        ("--eval-tasks-limit 3", "--eval-tasks-limit"),
        ("--eval-tasks-limit 3 --eval-tasks x", ""),
        ("--eval-iters 0 --eval-interval 3", "--eval-interval"),
        ("--eval-iters 0 --eval-interval 3 --eval-tasks x", ""),
        ("--eval-iters 0 --eval-global-batch-size 3 --eval-tasks x", "--eval-global-batch-size"),
    ],
)
def test_a_setting_of_fine_tuning_or_tasks_without_what_uses_it_is_named(flags: str, named: str):
    notes = parse_args(flags.split(), lambda parser: add_flags(parser, LoRAConfig))[2]
    assert sorted(named_in(notes)) == named.split()


def test_a_config_of_the_script_is_checked_before_anything_is_built():
    for flags, problem in {
        "--lora-target-modules nothing": "there is no such linear",
        "--lora-alpha 8 --lora-dropout 0.5": "--lora-alpha needs --lora-rank: without it all weights are trained",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            parse_args(flags.split(), lambda parser: add_flags(parser, LoRAConfig))


def named_in(notes: list[str]) -> set[str]:
    """The flags of which lines say that they have no effect."""
    return {word for note in notes for word in note.removeprefix("no effect here: ").split(": ")[0].split()}


def test_of_an_optimizer_of_a_script_no_setting_is_called_unread(monkeypatch):
    """It may read any of them."""
    monkeypatch.setitem(OPTIMIZERS, "own", UpdateRule(lambda config: None, lambda config: ()))
    assert parse_args(["--optimizer", "own", "--adam-beta1", "0.5", "--sgd-momentum", "0.3"])[2] == []


@pytest.mark.parametrize("tokenizer", ["NullTokenizer", "TikTokenizer --tokenizer-model x"])
def test_a_vocabulary_size_that_is_read_is_not_noted(tokenizer: str):
    assert parse_args(f"--vocab-size 9000 --tokenizer-type {tokenizer}".split())[2] == []


@pytest.mark.parametrize(
    ("flags", "valid", "test", "said"),
    [
        ("--split 100,0,0 --eval-iters 5", None, None, "--eval-iters 5 --split 100,0,0"),
        ("--split 90,0,10", None, [1], "--eval-iters 100 --split 90,0,10"),
        ("--train-data-path x", None, None, "--eval-iters 100"),
        ("--split 100,0,0 --eval-iters 0", None, None, ""),
        ("--split 99,1,0", [1], None, ""),
    ],
)
def test_a_run_without_a_validation_set_says_so(flags: str, valid: list | None, test: list | None, said: str):
    config = parse_args(flags.split())[0]
    notes = notes_of_no_validation(config, {"valid": valid, "test": test})
    assert tells_each(notes, said)
    assert ("--split" in "".join(notes)) == ("--split" in (said or ""))


@pytest.mark.parametrize(
    ("flags", "ranks", "named"),
    [
        ("--overlap-grad-reduce --grad-reduce-in-bf16", 1, "--overlap-grad-reduce --grad-reduce-in-bf16"),
        ("--use-distributed-optimizer --overlap-param-gather", 1, "--use-distributed-optimizer --overlap-param-gather"),
        ("--use-distributed-optimizer --tensor-model-parallel-size 2", 2, "--use-distributed-optimizer"),
        ("--use-distributed-optimizer --context-parallel-size 2", 2, ""),  # its ranks share the optimizer's state too
        ("--use-distributed-optimizer --overlap-grad-reduce", 2, ""),
        ("--zero-stage 3", 1, ""),  # parameters leave the model between their uses
        ("--zero-stage 0", 1, ""),
        (
            "--test-mode --check-weight-hash-across-dp-replicas-interval 5",
            1,
            "--check-weight-hash-across-dp-replicas-interval --test-mode",
        ),
        ("--test-mode", 2, ""),
    ],
)
def test_flags_that_need_more_ranks_are_named(flags: str, ranks: int, named: str):
    config = parse_args(f"--micro-batch-size 1 {flags}".split())[0]
    assert sorted(without_effect_on_few_ranks(config, ranks)) == sorted(named.split())
