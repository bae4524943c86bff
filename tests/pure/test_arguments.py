"""Command lines of Megatron's kind become settings; what cannot be is refused, all at once and with a reason."""

import copy
import shlex

import pytest
from said import tells

from megatron.core.config import ConfigError
from megatron.core.pipeline_parallel.schedule import SCHEDULES
from megatron.training.arguments import Arguments, parse_args
from megatron.training.settings.config import COMPONENTS, Config
from megatron.training.settings.model_rules import text_problems
from megatron.training.settings.rules import check

MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
SMALL = MOCK + "--micro-batch-size 2 --train-iters 10 --seq-length 32 --lr 1e-3 --num-layers 4 "


def config_of(line: str, **options) -> Config:
    return parse_args(shlex.split(line), **options)[0]


def problems_of(line: str, **options) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_args(shlex.split(line), **options)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


# ---------------------------------------------------------------- command lines as scripts have them

GPT_345M = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 16 --train-iters 500000
    --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01
    --weight-decay 1e-2 --clip-grad 1.0 --bf16 --attention-softmax-in-fp32
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --distributed-backend nccl
    --data-path data/my-gpt2_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1
    --data-impl mmap --no-masked-softmax-fusion --DDP-impl local
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --save checkpoints --load checkpoints --local_rank=3
"""
GPT_345M_FIELDS = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "micro_batch_size": 4,
    "global_batch_size": 16,
    "train_iters": 500_000,
    "lr": 1.5e-4,
    "min_lr": 1e-5,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 320_000,
    "lr_warmup_fraction": 0.01,
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "bf16": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "sequence_parallel": True,
    "distributed_backend": "nccl",
    "data_path": ["data/my-gpt2_text_document"],
    "vocab_file": "gpt2-vocab.json",
    "merge_file": "gpt2-merges.txt",
    "split": "949,50,1",
    "log_interval": 100,
    "save_interval": 10_000,
    "eval_interval": 1000,
    "eval_iters": 10,
    "save": "checkpoints",
    "load": "checkpoints",
    "local_rank": 3,
    "tokenizer_type": "GPT2BPETokenizer",
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "add_bias_linear": True,
}
LLAMA_8B = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --transformer-impl transformer_engine --use-flash-attn
    --attention-backend fused --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 0.00015
    --min-lr 0.00001 --lr-decay-style cosine --lr-warmup-iters 100 --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95 --clip-grad 1.0 --seed 42 --bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
    --tensor-model-parallel-size 4 --context-parallel-size 1 --distributed-timeout-minutes 60
    --data-path corpus --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --split 99,1,0
    --data-cache-path cache --no-mmap-bin-files --no-create-attention-mask-in-dataloader --num-workers 1
    --no-load-optim --no-load-rng --exit-interval 500 --finetune
"""
LLAMA_8B_FIELDS = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "kv_channels": 128,
    "position_embedding_type": "rope",
    "rotary_base": 1e6,
    "rotary_percent": 1.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "swiglu": True,
    "init_method_std": 0.0134,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_backend": "fused",
    "lr_warmup_iters": 100,
    "lr_warmup_fraction": None,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "seed": 42,
    "context_parallel_size": 1,
    "distributed_timeout_minutes": 60,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "tokenizer",
    "data_cache_path": "cache",
    "load_optim": False,
    "exit_interval": 500,
    "finetune": True,
    "save": None,
}
MIXED = """
    --layernorm-epsilon 1e-6 --use-rotary-position-embeddings --no-position-embedding --eod-mask-loss --mock-data
    --exit-on-missing-checkpoint --no-check-for-nan-in-loss-and-grad --use-tp-pp-dp-mapping --device cpu
    --make-vocab-size-divisible-by 64 --adam-eps 1e-6 --lr-warmup-init 1e-7 --local-rank 0
"""
MIXED_FIELDS = {
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "eod_mask_loss": True,
    "mock_data": True,
    "exit_on_missing_checkpoint": True,
    "check_for_nan_in_loss_and_grad": False,
    "use_tp_pp_dp_mapping": True,
    "device": "cpu",
    "make_vocab_size_divisible_by": 64,
    "adam_eps": 1e-6,
    "lr_warmup_init": 1e-7,
    "local_rank": 0,
}


@pytest.mark.parametrize(
    ("line", "expected", "without_effect"),
    [
        (
            GPT_345M,
            GPT_345M_FIELDS,
            {"--attention-softmax-in-fp32", "--data-impl", "--no-masked-softmax-fusion", "--DDP-impl"},
        ),
        (
            LLAMA_8B,
            LLAMA_8B_FIELDS,
            {
                *("--use-mcore-models", "--use-flash-attn", "--cross-entropy-loss-fusion"),
                *("--transformer-impl", "transformer_engine"),  # in a WARNING
                *("--calculate-per-token-loss", "--no-create-attention-mask-in-dataloader"),
                *("--no-load-rng", "--no-load-optim"),  # there is no --load
            },
        ),
        (MIXED, MIXED_FIELDS, set()),
    ],
    ids=["gpt-345m", "llama-8b", "the rest"],
)
def test_a_classic_script_parses_into_the_right_fields(line: str, expected: dict, without_effect: set[str]):
    defaults = {"tokenizer_type": "GPT2BPETokenizer"} if "--vocab-file" in line else None
    config, args, notes = parse_args(line.split(), args_defaults=defaults)
    flat = {name: value for part in config.as_json().values() for name, value in part.items()}
    assert {name: flat[name] for name in expected} == expected
    assert {name: getattr(args, name) for name in expected} == expected
    assert {flag for note in notes for flag in note.split(": ")[1].split()} == without_effect


def test_a_line_without_flags_is_all_defaults():
    config, args, notes = parse_args([])
    assert config == Config(**{name: component() for name, component in COMPONENTS.items()})
    assert config.changed_lines() == []
    assert notes == []
    assert args.hidden_size == 768


def test_what_was_changed_is_listed_with_its_default():
    assert config_of("--num-layers 4 --no-load-optim --lr 1e-3").changed_lines() == [
        "  Model",
        "    num_layers  4  (default 12)",
        "  Learning rate",
        "    lr          0.001",
        "  Checkpoints",
        "    load_optim  False  (default True)",
    ]


# ---------------------------------------------------------------- other spellings


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("", "learned_absolute"),
        ("--use-rotary-position-embeddings", "rope"),
        ("--use-rotary-position-embeddings --no-position-embedding", "rope"),
        ("--no-position-embedding --use-rotary-position-embeddings", "rope"),
        ("--no-position-embedding", "none"),
        ("--position-embedding-type rope --no-position-embedding", "rope"),
        ("--position-embedding-type none", "none"),
    ],
)
def test_position_embeddings_have_several_spellings(line: str, kind: str):
    assert config_of(line).transformer.position_embedding_type == kind


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ("--recompute-activations --recompute-granularity selective", []),
        ("--checkpoint-activations --recompute-granularity full", []),
        (
            "--recompute-activations --recompute-granularity full --recompute-method block",
            [
                "--recompute-activations stands for --recompute-granularity selective, which contradicts "
                "--recompute-granularity full; give one"
            ],
        ),
        (
            "--checkpoint-activations --recompute-activations",
            [
                "--checkpoint-activations stands for --recompute-granularity full, which contradicts "
                "--recompute-activations; give one"
            ],
        ),
        (
            "--use-rotary-position-embeddings --position-embedding-type none",
            [
                "--use-rotary-position-embeddings stands for --position-embedding-type rope, which contradicts "
                "--position-embedding-type none; give one"
            ],
        ),
    ],
)
def test_spellings_that_contradict_each_other_are_refused(line: str, problems: list[str]):
    """Whichever comes first on the line."""
    words = line.split()
    both = [words, *([[words[-1], *words[:-1]]] if words[-1].startswith("--") else [])]
    for order in both:
        if problems:
            assert set(problems) <= set(problems_of(" ".join(order)))
        else:
            parse_args(order)


def test_a_flag_given_twice_is_noted_and_the_last_one_counts():
    config, _, notes = parse_args(["--seed", "1", "--bf16", "--seed", "2"])
    assert config.training.seed == 2
    assert notes == ["--seed is given 2 times: the last one counts"]


def test_flags_without_effect_are_listed_by_reason():
    _, _, notes = parse_args(["--no-bias-gelu-fusion", "--data-impl", "mmap", "--no-rope-fusion", "--num-experts", "1"])
    assert sorted(notes) == [
        "no effect here: --data-impl --num-experts: the value asks for what happens anyway",
        "no effect here: --no-bias-gelu-fusion --no-rope-fusion: kernels are chosen by what the device can do",
    ]


def test_what_other_flags_leave_nothing_to_do_is_noted():
    """Megatron's scripts give both splits and made-up data, and switch sequence parallelism off without a word."""
    *_, notes = parse_args(["--mock-data", "--split", "949,50,1", "--sequence-parallel"])
    assert notes == [
        "no effect here: --sequence-parallel: it divides work of tensor-parallel ranks, and --tensor-model-parallel-size is 1",
        "no effect here: --split: made-up data have as many samples of each kind as are asked for",
    ]
    words = ["--data-path", "x", "--split", "949,50,1", "--sequence-parallel", "--tensor-model-parallel-size", "2"]
    assert parse_args(words)[2] == []


# ---------------------------------------------------------------- defaults and flags of the script's own


def test_defaults_of_the_script_apply_only_where_the_line_is_silent():
    defaults = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "a", "num_layers": 3, "load_optim": False}
    config, args, _ = parse_args(["--tokenizer-model", "b"], args_defaults=defaults)
    assert (config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model) == ("HuggingFaceTokenizer", "b")
    assert config.transformer.num_layers == args.num_layers == 3
    assert config.checkpoint.load_optim is False
    assert config_of("--num-layers 12", args_defaults={"num_layers": 3}).transformer.num_layers == 12, (
        "a value that is given counts, even when it is the default"
    )


@pytest.mark.parametrize("spelling", ["opt_param-scheduler", "opt-param-scheduler", "lr-scheduler"])
def test_what_a_resumed_run_follows_has_several_spellings(spelling: str):
    assert config_of(f"--override-{spelling}").learning_rate.override_opt_param_scheduler
    assert config_of(f"--use-checkpoint-{spelling}").learning_rate.use_checkpoint_opt_param_scheduler


def test_a_bad_default_of_the_script_is_found_like_a_flag():
    assert problems_of("", args_defaults={"num_layers": 0}) == ["--num-layers is 0; it must be at least 1"]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ("--num-layer 3", ["unknown flag --num-layer; did you mean --num-layers?"]),
        ("--num-layer=3", ["unknown flag --num-layer=3; did you mean --num-layers?"]),
        ("--xyzzy", ["unknown flag --xyzzy; --help lists the known ones"]),
        (
            "--tensor-model-parallel 2",
            ["unknown flag --tensor-model-parallel; did you mean --tensor-model-parallel-size?"],
        ),
        ("here there", ["here there does not belong to any flag"]),
        ("--num-layers 2 3", ["3 does not belong to any flag"]),
        ("--hidden-size two", ["--hidden-size: 'two' is not a whole number"]),
        (
            "--hidden-size two --data-path a --rampup-batch-size 1 b c --lr",
            [
                "--hidden-size: 'two' is not a whole number",
                "--rampup-batch-size: 'b' is not a whole number",
                "--lr: expected one argument",
            ],
        ),
        ("--bf16 --fp64", ["--bf16 and --fp64 exclude each other; give one"]),
    ],
)
def test_a_mistake_on_the_line_is_named(line: str, problems: list[str]):
    assert problems_of(line) == problems


def test_a_flag_may_not_be_abbreviated():
    assert problems_of("--micro-batch 3") == ["unknown flag --micro-batch; did you mean --micro-batch-size?"]


def test_problems_of_all_kinds_come_at_once():
    line = "--num-layer 3 --batch-size 5 --warmup 1 --hidden-size 0 --lr -1 --seed -2 --log-interval 0 --adam-beta1 1"
    assert set(problems_of(line)) == {
        "unknown flag --num-layer; did you mean --num-layers?",
        "--batch-size: was renamed; use --micro-batch-size",
        "--warmup: was renamed; use --lr-warmup-fraction",
        "--hidden-size is 0; it must be at least 1",
        "--lr is -1.0; it must be positive",
        "--min-lr is 0.0; it must be between 0 and --lr (-1.0)",
        "--seed is -2; it must be in [0, 2^32)",
        "--log-interval is 0; it must be at least 1",
        "--adam-beta1 is 1.0; it must be in [0, 1)",
    }


# one row per message of one component:  line, problem
RULES = [
    ("--num-layers 0", "--num-layers is 0; it must be at least 1"),
    ("--num-attention-heads -1", "--num-attention-heads is -1; it must be at least 1"),
    ("--num-query-groups 0", "--num-query-groups is 0; it must be at least 1"),
    ("--hidden-dropout 1", "--hidden-dropout is 1.0; it must be in [0, 1)"),
    ("--attention-dropout -0.1", "--attention-dropout is -0.1; it must be in [0, 1)"),
    ("--rotary-percent 0", "--rotary-percent is 0.0; it must be in (0, 1]"),
    (
        "--hidden-size 100",
        "--hidden-size 100 is not a multiple of --num-attention-heads 12; change one or give --kv-channels",
    ),
    (
        "--group-query-attention --num-query-groups 5",
        "--num-attention-heads 12 is not a multiple of --num-query-groups 5; change one",
    ),
    ("--num-query-groups 4", "--num-query-groups needs --group-query-attention"),
    (
        "--position-embedding-type rope --kv-channels 3",
        "rotary positions need an even width; heads of 3 x --rotary-percent give 3",
    ),
    ("--micro-batch-size 0", "--micro-batch-size is 0; it must be at least 1"),
    ("--global-batch-size 0", "--global-batch-size is 0; it must be at least 1"),
    ("--train-iters 0", "--train-iters is 0; it must be at least 1"),
    ("--eval-interval -1", "--eval-interval is -1; it must not be negative"),
    ("--train-samples 0", "--train-samples is 0; it must be at least 1"),
    ("--exit-duration-in-mins -1", "--exit-duration-in-mins is -1.0; it must not be negative"),
    ("--rampup-batch-size 4 4", "--rampup-batch-size 4 4: it takes three numbers, START INCREMENT SAMPLES"),
    ("--exit-interval 0", "--exit-interval is 0; it must be at least 1"),
    ("--eval-iters -1", "--eval-iters is -1; it must not be negative"),
    ("--seed 4294967296", "--seed is 4294967296; it must be in [0, 2^32)"),
    ("--save-interval 0", "--save-interval is 0; it must be at least 1"),
    ("--log-interval 0", "--log-interval is 0; it must be at least 1"),
    ("--adam-beta2 -0.5", "--adam-beta2 is -0.5; it must be in [0, 1)"),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.1",
        "--weight-decay-incr-style linear needs --start-weight-decay and --end-weight-decay",
    ),
    (
        "--end-weight-decay 0.1",
        "--end-weight-decay needs --weight-decay-incr-style linear or cosine; a constant one is --weight-decay",
    ),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1",
        "--start-weight-decay (0.2) must not be negative, nor above --end-weight-decay (0.1)",
    ),
    ("--weight-decay -1", "--weight-decay is -1.0; it must not be negative"),
    ("--adam-eps -1", "--adam-eps is -1.0; it must be positive"),
    ("--adam-eps 0", "--adam-eps is 0.0; it must be positive"),
    ("--clip-grad -1", "--clip-grad is -1.0; it must not be negative"),
    ("--lr 1e-3 --min-lr 1e-2", "--min-lr is 0.01; it must be between 0 and --lr (0.001)"),
    (
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 5",
        "--lr-warmup-fraction and --lr-warmup-iters exclude each other; give one",
    ),
    (
        "--lr-decay-style WSD",
        "--lr-decay-style WSD needs --lr-wsd-decay-iters, or with --train-samples --lr-wsd-decay-samples",
    ),
    ("--lr-wsd-decay-samples 9", "--lr-wsd-decay-samples needs --lr-decay-style WSD, not linear"),
    ("--lr 0.1 --lr-warmup-init 0.2", "--lr-warmup-init is 0.2; it must not be above --lr (0.1)"),
    (
        "--override-opt_param-scheduler --use-checkpoint-lr-scheduler",
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; give one",
    ),
    ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction is 1.5; it must be in [0, 1]"),
    ("--lr-warmup-iters -5", "--lr-warmup-iters is -5; it must not be negative"),
    ("--lr-decay-iters 0", "--lr-decay-iters is 0; it must be at least 1"),
    ("--distributed-timeout-minutes 0", "--distributed-timeout-minutes is 0; it must be at least 1"),
    (
        "--data-path 0 a",
        "--data-path: weight 0.0 of a must be a positive number; leave the data set out or give it a share",
    ),
    ("--seq-length 0", "--seq-length is 0; it must be at least 1"),
    ("--tokenizer-type NullTokenizer", "--tokenizer-type NullTokenizer needs --vocab-size"),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file v", "--tokenizer-type GPT2BPETokenizer needs --merge-file"),
    ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model"),
    ("--vocab-size 0", "--vocab-size is 0; it must be at least 1"),
    (
        "--vocab-size 9 --null-tokenizer-eod-id 10",
        "--null-tokenizer-eod-id (10) must lie between 0 and --vocab-size (9)",
    ),
]


@pytest.mark.parametrize(("line", "problem"), RULES, ids=[line for line, _ in RULES])
def test_a_rule_of_one_component_is_explained(line: str, problem: str):
    assert problems_of(line) == [problem]


@pytest.mark.parametrize(
    "line",
    [
        "--ffn-hidden-size 0",
        "--ffn-hidden-size -8",
        "--kv-channels -2",
        "--max-position-embeddings 0",
        "--make-vocab-size-divisible-by 0",
        "--init-method-std -1",
        "--norm-epsilon -1",
        "--rotary-base 0",
        "--lr 1e-3 --lr-warmup-init -1",
        "--lr inf",
        "--loss-scale nan",
        "--loss-scale inf",
        "--initial-loss-scale inf",
        "--initial-loss-scale 3",
        "--min-loss-scale 1.5",
        "--local-rank -1",
        "--save ''",
        "--load ''",
        "--split 1e3,1",
        "--split 1,nan,0",
        "--split 1,,x",
        "--clip-grad nan",
    ],
)
def test_a_number_that_makes_no_sense_is_refused(line: str):
    assert line.split(" ")[-2] in problems_of(line)[0]


# ---------------------------------------------------------------- rules across components


@pytest.mark.parametrize(
    ("line", "world_size", "problems"),
    [
        (
            "",
            1,
            [
                "--micro-batch-size is required",
                "--lr is required",
                "--seq-length is required",
                "--train-iters (or --train-samples) is required",
                "no data: give --data-path PREFIX, or --mock-data to try things out",
                "--tokenizer-type is required, or the files of the script's own choice (--vocab-file, and --merge-file for a "
                "GPT); NullTokenizer with --vocab-size is for data without text",
            ],
        ),
        (
            SMALL + "--data-path x --max-position-embeddings 16 --tensor-model-parallel-size 5 --sequence-parallel "
            "--pipeline-model-parallel-size 3 --save-interval 5 --group-query-attention --num-query-groups 4",
            15,
            [
                "--data-path and --mock-data exclude each other; give one",
                "--num-attention-heads (12) must be a multiple of --tensor-model-parallel-size (5); change one",
                "ffn hidden size (3072) must be a multiple of --tensor-model-parallel-size (5); change one",
                "--num-query-groups (4) must be a multiple of --tensor-model-parallel-size (5), so that ranks have whole groups, "
                "or divide it, so that groups have whole ranks; change one",
                "--sequence-parallel divides --seq-length (32) over --tensor-model-parallel-size (5), which does not "
                "divide it; change one",
                "pipeline: the number of layers (4) must be a multiple of the number of stages (3: pipeline ranks "
                "times chunks per rank); change --num-layers, --pipeline-model-parallel-size or "
                "--num-layers-per-virtual-pipeline-stage",
                "--max-position-embeddings (16) must be at least --seq-length (32)",
                "--save-interval needs --save, the folder to write to",
            ],
        ),
        (
            SMALL + "--global-batch-size 12",
            8,
            ["--global-batch-size (12) must be a multiple of 16 = --micro-batch-size (2) x data-parallel size (8)"],
        ),
        (
            SMALL + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --save-interval 5",
            6,
            [
                "world size 6 is not a multiple of 4 = tensor-model-parallel-size (2) x pipeline-model-parallel-size "
                "(2); start another number of processes or change the sizes",
                "--save-interval needs --save, the folder to write to",
            ],
        ),
        (
            SMALL + "--pipeline-model-parallel-size 8",
            8,
            [
                "pipeline: the number of layers (4) must be a multiple of the number of stages (8: pipeline ranks "
                "times chunks per rank); change --num-layers, --pipeline-model-parallel-size or "
                "--num-layers-per-virtual-pipeline-stage"
            ],
        ),
        (
            SMALL + "--pipeline-schedule 1b1f",
            1,
            [f"--pipeline-schedule is 1b1f; it must be one of {', '.join(SCHEDULES)}"],
        ),
    ],
    ids=["nothing given", "much at once", "batch", "world", "layers", "schedule"],
)
def test_all_problems_between_components_come_at_once(line: str, world_size: int, problems: list[str]):
    """The last ones are those of a script whose data are text."""
    with pytest.raises(ConfigError) as error:
        check(config_of(line), world_size)
    assert error.value.problems + text_problems(config_of(line)) == problems


def test_a_warm_up_that_outlasts_the_decay_is_found_with_the_other_problems():
    with pytest.raises(ConfigError) as error:
        check(config_of(SMALL + "--lr-warmup-iters 10 --save-interval 5"), 1)
    assert any("warm-up" in problem for problem in error.value.problems)


def test_a_batch_that_does_not_fit_is_found_with_the_other_problems():
    with pytest.raises(ConfigError) as error:
        check(config_of(SMALL + "--global-batch-size 12 --max-position-embeddings 16"), 8)
    assert error.value.problems == [
        "--max-position-embeddings (16) must be at least --seq-length (32)",
        "--global-batch-size (12) must be a multiple of 16 = --micro-batch-size (2) x data-parallel size (8)",
    ]


@pytest.mark.parametrize(
    ("line", "world_size"),
    [
        (SMALL, 1),
        (SMALL + "--global-batch-size 32", 8),
        (SMALL + "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4", 16),
        (SMALL + "--save x --save-interval 5 --max-position-embeddings 32", 1),
    ],
)
def test_settings_that_fit_pass(line: str, world_size: int):
    check(config_of(line), world_size)


# ---------------------------------------------------------------- batch arithmetic


# micro batch, global batch (0: not given), tensor, pipeline, world -> data-parallel size, global batch, microbatches
BATCHES = [
    (2, 0, 1, 1, 1, 1, 2, 1),
    (2, 0, 1, 1, 8, 8, 16, 1),
    (2, 0, 2, 2, 8, 2, 4, 1),
    (2, 16, 1, 1, 1, 1, 16, 8),
    (2, 16, 1, 1, 8, 8, 16, 1),
    (4, 256, 2, 4, 16, 2, 256, 32),
    (1, 24, 2, 2, 8, 2, 24, 12),
    (3, 24, 1, 4, 8, 2, 24, 4),
]


@pytest.mark.parametrize(("micro", "given", "t", "p", "world", "dp", "total", "microbatches"), BATCHES)
def test_a_step_has_its_samples_whatever_the_layout(micro, given, t, p, world, dp, total, microbatches):
    line = f"--micro-batch-size {micro} --tensor-model-parallel-size {t} --pipeline-model-parallel-size {p}"
    config = config_of(line + (f" --global-batch-size {given}" if given else ""))
    assert config.data_parallel_size(world) == dp
    assert config.global_batch_size(world) == total
    assert config.num_microbatches(world) == microbatches
    assert microbatches * micro * dp == total


def test_the_position_table_is_as_long_as_asked_for():
    assert config_of("--seq-length 32").positions == 32
    assert config_of("--seq-length 32 --max-position-embeddings 48").positions == 48


def test_derived_sizes_follow_the_model():
    plain, gated = config_of("").transformer, config_of("--swiglu").transformer
    assert (plain.ffn_size, gated.ffn_size, plain.head_width, plain.query_groups) == (3072, 2048, 64, 12)
    assert config_of("--hidden-size 1024 --num-attention-heads 16 --swiglu").transformer.ffn_size == 2688
    padded = {(50257, 1): 50304, (50257, 2): 50432, (50257, 8): 51200, (61, 4): 512, (512, 4): 512}
    assert {key: plain.padded_vocab_size(*key) for key in padded} == padded


# ---------------------------------------------------------------- the view for scripts


def test_settings_are_read_only_for_scripts():
    args = Arguments({"lr": 0.1, "data_path": ["a"]})
    assert args.lr == 0.1
    assert "lr" in args
    assert "momentum" not in args
    with pytest.raises(AttributeError) as error:
        args.lr = 0.2
    assert tells(error.value, "0.2")
    with pytest.raises(AttributeError) as error:
        _ = args.momentum
    assert tells(error.value, "momentum")
    assert getattr(args, "momentum", None) is None
    assert args.lr == 0.1


def test_the_view_may_be_copied():
    args = Arguments({"lr": 0.1})
    assert copy.copy(args).lr == copy.deepcopy(args).lr == 0.1
