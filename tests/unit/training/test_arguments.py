"""Command lines of Megatron's kind become settings; what cannot be is refused, all at once and with a reason."""

import ast
import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from said import tells, tells_each

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.models.common.model_rules import missing_text_settings
from megatron.core.pipeline_parallel.schedule.registry import SCHEDULES
from megatron.training.arguments.command_line import Arguments, parse_args
from megatron.training.arguments.config import COMPONENTS, Config
from megatron.training.arguments.unused_settings import without_effect_on_few_ranks
from megatron.training.arguments.validation import check

MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
SMALL = MOCK + "--micro-batch-size 2 --train-iters 10 --seq-length 32 --lr 1e-3 --num-layers 4 "


def config_of(line: str, **options) -> Config:
    return parse_args(shlex.split(line), **options)[0]


def problems_of(line: str, **options) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_args(shlex.split(line), **options)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


def fields_of(text: str) -> dict[str, Any]:
    """Settings by name, from name=value name=value ..."""
    return {name: ast.literal_eval(value) for name, value in (word.split("=", 1) for word in text.split())}


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
GPT_345M_FIELDS = fields_of("""
    num_layers=24 hidden_size=1024 num_attention_heads=16 seq_length=1024 max_position_embeddings=1024
    micro_batch_size=4 global_batch_size=16 train_iters=500000 lr=0.00015 min_lr=1e-05 lr_decay_style='cosine'
    lr_decay_iters=320000 lr_warmup_fraction=0.01 weight_decay=0.01 clip_grad=1.0 bf16=True
    tensor_model_parallel_size=2 pipeline_model_parallel_size=2 sequence_parallel=True distributed_backend='nccl'
    data_path=['data/my-gpt2_text_document'] vocab_file='gpt2-vocab.json' merge_file='gpt2-merges.txt'
    split='949,50,1' log_interval=100 save_interval=10000 eval_interval=1000 eval_iters=10 save='checkpoints'
    load='checkpoints' local_rank=3 tokenizer_type='GPT2BPETokenizer' position_embedding_type='learned_absolute'
    swiglu=False add_bias_linear=True
""")
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
LLAMA_8B_FIELDS = fields_of("""
    num_layers=32 hidden_size=4096 ffn_hidden_size=14336 num_attention_heads=32 group_query_attention=True
    num_query_groups=8 kv_channels=128 position_embedding_type='rope' rotary_base=1000000.0 rotary_percent=1.0
    attention_dropout=0.0 hidden_dropout=0.0 swiglu=True init_method_std=0.0134 normalization='RMSNorm'
    add_bias_linear=False untie_embeddings_and_output_weights=True attention_backend='fused' lr_warmup_iters=100
    lr_warmup_fraction=None weight_decay=0.1 adam_beta1=0.9 adam_beta2=0.95 seed=42 context_parallel_size=1
    distributed_timeout_minutes=60 tokenizer_type='HuggingFaceTokenizer' tokenizer_model='tokenizer'
    data_cache_path='cache' load_optim=False exit_interval=500 finetune=True save=None
""")
MIXED = """
    --layernorm-epsilon 1e-6 --use-rotary-position-embeddings --no-position-embedding --eod-mask-loss --mock-data
    --exit-on-missing-checkpoint --no-check-for-nan-in-loss-and-grad --use-tp-pp-dp-mapping --device cpu
    --make-vocab-size-divisible-by 64 --adam-eps 1e-6 --lr-warmup-init 1e-7 --local-rank 0
"""
MIXED_FIELDS = fields_of("""
    norm_epsilon=1e-06 position_embedding_type='rope' eod_mask_loss=True mock_data=True
    exit_on_missing_checkpoint=True check_for_nan_in_loss_and_grad=False use_tp_pp_dp_mapping=True device='cpu'
    make_vocab_size_divisible_by=64 adam_eps=1e-06 lr_warmup_init=1e-07 local_rank=0
""")


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
        (MIXED, MIXED_FIELDS, {"--lr-warmup-init", "--use-tp-pp-dp-mapping"}),  # there is no warm-up, and one rank
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
    lines = config_of("--num-experts 4 --moe-aux-loss-coeff 0.02").changed_lines()
    assert "    moe_aux_loss_coeff  0.02  (default 0.0)" in lines, "lists are written as on the command line"


# ---------------------------------------------------------------- other spellings


LINES_AND_KINDS = [
    ("", "learned_absolute"),
    ("--use-rotary-position-embeddings", "rope"),
    ("--use-rotary-position-embeddings --no-position-embedding", "rope"),
    ("--no-position-embedding --use-rotary-position-embeddings", "rope"),
    ("--no-position-embedding", "none"),
    ("--position-embedding-type rope --no-position-embedding", "rope"),
    ("--position-embedding-type none", "none"),
]


@pytest.mark.parametrize(("line", "kind"), LINES_AND_KINDS)
def test_position_embeddings_have_several_spellings(line: str, kind: str):
    assert config_of(line).transformer.position_embedding_type == kind


CONTRADICTIONS = """
    --recompute-activations --recompute-granularity full --recompute-method block
    --checkpoint-activations --recompute-activations
    --use-rotary-position-embeddings --position-embedding-type none
"""


@pytest.mark.parametrize("line", CONTRADICTIONS.strip().splitlines())
def test_spellings_that_contradict_each_other_are_refused(line: str):
    """Whichever comes first on the line."""
    words, (one, other) = line.split(), re.findall("--[^ ]+", line)[:2]
    for order in [words, *([[words[-1], *words[:-1]]] if words[-1] == other else [])]:
        assert any(tells(problem, f"{one} {other}") for problem in problems_of(" ".join(order)))


def test_spellings_that_say_the_same_may_stand_together():
    parse_args(shlex.split("--recompute-activations --recompute-granularity selective"))
    parse_args(shlex.split("--checkpoint-activations --recompute-granularity full"))


def test_a_flag_given_twice_is_noted_and_the_last_one_counts():
    config, _, notes = parse_args(["--seed", "1", "--bf16", "--seed", "2"])
    assert config.training.seed == 2
    assert tells_each(notes, "--seed 2")


def test_flags_without_effect_are_listed_by_reason():
    _, _, notes = parse_args(["--no-bias-gelu-fusion", "--data-impl", "mmap", "--no-rope-fusion"])
    assert tells_each(sorted(notes), "--data-impl | --no-bias-gelu-fusion --no-rope-fusion")


def test_what_other_flags_leave_nothing_to_do_is_noted():
    """Megatron's scripts give both splits and made-up data, and switch sequence parallelism off without a word."""
    *_, notes = parse_args(["--mock-data", "--split", "949,50,1", "--sequence-parallel"])
    assert tells_each(notes, "--sequence-parallel --tensor-model-parallel-size 1 | --split")
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
    assert tells_each(problems_of("", args_defaults={"num_layers": 0}), "--num-layers 0 1")
    for bad in ({"position_embedding_type": "alibi"}, {"hidden_dropout": "much"}, {"num_layers": "two"}):
        (name, value), *_ = bad.items()
        assert tells_each(problems_of("", args_defaults=bad), f"args_defaults --{name.replace('_', '-')} {value}")
    assert config_of("--num-layers 3", args_defaults={"num_layers": "two"}).transformer.num_layers == 3


def test_a_default_of_the_script_may_have_any_name_that_a_flag_has():
    """Those of Megatron's attributes that are no settings' names: a line with the same flags is the oracle."""
    defaults = {"layernorm_epsilon": 1e-3, "encoder_num_layers": 5, "disable_bias_linear": True, "hidden_size": "96"}
    defaults |= {"use_rotary_position_embeddings": True, "recompute_activations": True, "no_load_optim": True}
    line = (
        "--layernorm-epsilon 1e-3 --encoder-num-layers 5 --disable-bias-linear --hidden-size 96 "
        "--use-rotary-position-embeddings --recompute-activations --no-load-optim"
    )
    assert config_of("", args_defaults=defaults) == config_of(line) != config_of("")
    assert config_of("--encoder-num-layers 7", args_defaults=defaults).transformer.num_layers == 7
    unset = {"no_load_optim": None, "disable_bias_linear": False, "num_experts": None, "fp8": None}
    assert config_of("", args_defaults=unset) == config_of("")


@pytest.mark.parametrize(
    ("defaults", "told"),
    [
        ({"moe_latent_size": 8}, "args_defaults --moe-latent-size"),
        ({"multi_latent_attention": True}, "args_defaults --multi-latent-attention"),
        ({"fp8": "hybrid"}, "args_defaults --fp8-format"),
        ({"model_parallel_size": 2}, "args_defaults --tensor-model-parallel-size"),
    ],
)
def test_a_default_of_the_script_is_refused_as_its_flag_is(defaults: dict, told: str):
    assert tells_each(problems_of("", args_defaults=defaults), told)


def test_defaults_that_the_script_sets_of_the_parser_are_those_of_args_defaults():
    """They too give way to the command line, and are refused by the names of flags that are."""

    def sets(**defaults):
        def provider(parser):
            parser.add_argument("--mine", type=int)
            parser.set_defaults(**defaults)

        return provider

    def parsed(provider, line: str = "", **more):
        return parse_args(line.split(), provider, **more)

    config, args, notes = parsed(sets(num_layers=3, swiglu=True, mine=5))
    assert (config.transformer.num_layers, config.transformer.swiglu, args.mine, notes) == (3, True, 5, [])
    assert parsed(sets(num_layers=3), "--num-layers 2").config.transformer.num_layers == 2
    assert parsed(sets(num_layers=3), args_defaults={"num_layers": 4}).config.transformer.num_layers == 4
    with pytest.raises(ConfigError, match="--moe-latent-size"):
        parsed(sets(moe_latent_size=8))


def test_defaults_of_the_script_without_effect_are_named():
    notes = parse_args([], args_defaults={"bias_gelu_fusion": False, "DDP_impl": "torch"})[2]
    assert tells_each(notes, "--no-bias-gelu-fusion|--DDP-impl")


def few_ranks(config):
    return without_effect_on_few_ranks(config, 1)


@pytest.mark.parametrize(
    ("line", "defaults", "flag"),
    [
        ("", {"save_frozen": False}, "--no-save-frozen"),
        ("--mock-data", {"allow_missing_tensors": True}, "--allow-missing-tensors"),
        ("", {"use_distributed_optimizer": True}, "--use-distributed-optimizer"),
        ("--sft --position-embedding-type none", {}, "--reset-position-ids"),
    ],
)
def test_a_note_about_a_flag_without_effect_is_only_of_what_the_command_line_gives(line, defaults, flag):
    """Neither of a setting that a script's defaults have, nor of one that another flag implies."""
    assert parse_args(line.split(), args_defaults=defaults, without_effect=few_ranks)[2] == []
    (note,) = parse_args([*line.split(), flag], args_defaults=defaults, without_effect=few_ranks)[2]
    assert tells(note, f"{flag}")


def test_a_note_about_a_flag_without_effect_is_not_of_what_a_config_json_gives(tmp_path: Path):
    saved = {"model_type": "mixtral", "router_aux_loss_coef": 0.5, "output_router_logits": True, "rope_theta": 1e4}
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
    saved |= sizes | {
        "rms_norm_eps": 1e-5,
        "intermediate_size": 8,
        "vocab_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(saved))
    line = ["--hf-config", str(tmp_path), "--moe-router-load-balancing-type", "none"]
    config, _, notes = parse_args(line)
    assert config.transformer.moe_aux_loss_coeff and not [note for note in notes if "no effect here" in note]
    (note,) = (note for note in parse_args([*line, "--moe-aux-loss-coeff", "0.5"])[2] if "no effect here" in note)
    assert tells(note, "--moe-aux-loss-coeff")


def test_flags_that_the_script_declares_take_its_defaults_as_they_are():
    """Also under a name of a flag of Megatron's that is refused."""
    own = lambda parser: parser.add_argument("--moe-latent-size", type=int) and None  # noqa: E731
    args = parse_args([], own, args_defaults={"moe_latent_size": 3, "anything": "x"}).args
    assert (args.moe_latent_size, args.anything) == (3, "x")


# ---------------------------------------------------------------- mistakes


# line | what each problem names
MISTAKES = """
    --num-layer 3             | --num-layer --num-layers
    --num-layer=3             | --num-layer=3 --num-layers
    --xyzzy                   | --xyzzy --help
    --tensor-model-parallel 2 | --tensor-model-parallel --tensor-model-parallel-size
    --micro-batch 3           | --micro-batch --micro-batch-size
    here there                | here there
    --num-layers 2 3          | 3
    --hidden-size two         | --hidden-size two
    --hidden-size two --data-path a --rampup-batch-size 1 b c --lr | --hidden-size two | --rampup-batch-size b | --lr
    --bf16 --fp64             | --bf16 --fp64
"""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines(), ids=lambda row: row.split("|")[0].strip())
def test_a_mistake_on_the_line_is_named(mistake: str):
    line, named = mistake.split("|", 1)
    assert tells_each(problems_of(line), named)


def test_problems_of_all_kinds_come_at_once():
    line = "--num-layer 3 --batch-size 5 --warmup 1 --hidden-size 0 --lr -1 --seed -2 --log-interval 0 --adam-beta1 1"
    named = """--num-layer --num-layers|--batch-size --micro-batch-size|--warmup --lr-warmup-fraction|--hidden-size 0 1|--lr -1.0
        |--min-lr 0.0 0 --lr -1.0|--seed -2 0 2^32|--log-interval 0 1|--adam-beta1 1.0 0 1"""
    problems = problems_of(line)
    assert len(problems) == 9 and all(any(tells(p, part) for p in problems) for part in named.split("|"))


# A row for each message of one component: line | what the message names.
RULES = """
    --num-layers 0                                            | --num-layers 0 1
    --num-attention-heads -1                                  | --num-attention-heads -1 1
    --num-query-groups 0                                      | --num-query-groups 0 1
    --hidden-dropout 1                                        | --hidden-dropout 1.0 0 1
    --attention-dropout -0.1                                  | --attention-dropout -0.1 0 1
    --rotary-percent 0                                        | --rotary-percent 0.0 0 1
    --hidden-size 100                                         | --hidden-size 100 --num-attention-heads 12 --kv-channels
    --group-query-attention --num-query-groups 5              | --num-attention-heads 12 --num-query-groups 5
    --num-query-groups 4                                      | --num-query-groups --group-query-attention
    --position-embedding-type rope --kv-channels 3            | 3 --rotary-percent
    --micro-batch-size 0                                      | --micro-batch-size 0 1
    --global-batch-size 0                                     | --global-batch-size 0 1
    --train-iters 0                                           | --train-iters 0 1
    --eval-interval -1                                        | --eval-interval -1
    --train-samples 0                                         | --train-samples 0 1
    --exit-duration-in-mins -1                                | --exit-duration-in-mins -1.0
    --rampup-batch-size 4 4                                   | --rampup-batch-size 4 START INCREMENT SAMPLES
    --exit-interval 0                                         | --exit-interval 0 1
    --eval-iters -1                                           | --eval-iters -1
    --seed 4294967296                                         | --seed 4294967296 0 2^32
    --save-interval 0                                         | --save-interval 0 1
    --log-interval 0                                          | --log-interval 0 1
    --adam-beta2 -0.5                                         | --adam-beta2 -0.5 0 1
    --weight-decay-incr-style linear --start-weight-decay 0.1 | --weight-decay-incr-style --start-weight-decay --end-weight-decay
    --end-weight-decay 0.1                                    | --end-weight-decay --weight-decay-incr-style --weight-decay
    --weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1 | --start-weight-decay 0.2 --end-weight-decay 0.1
    --weight-decay -1                                         | --weight-decay -1.0
    --adam-eps -1                                             | --adam-eps -1.0
    --adam-eps 0                                              | --adam-eps 0.0
    --clip-grad -1                                            | --clip-grad -1.0
    --lr 1e-3 --min-lr 1e-2                                   | --min-lr 0.01 0 --lr 0.001
    --lr-warmup-fraction 0.1 --lr-warmup-iters 5              | --lr-warmup-fraction --lr-warmup-iters
    --lr-decay-style WSD                                      | --lr-decay-style WSD --lr-wsd-decay-iters --train-samples --lr-wsd-decay-samples
    --lr-wsd-decay-samples 9                                  | --lr-wsd-decay-samples --lr-decay-style WSD
    --lr 0.1 --lr-warmup-init 0.2                             | --lr-warmup-init 0.2 --lr 0.1
    --override-opt_param-scheduler --use-checkpoint-lr-scheduler | --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler
    --lr-warmup-fraction 1.5                                  | --lr-warmup-fraction 1.5 0 1
    --lr-warmup-iters -5                                      | --lr-warmup-iters -5
    --lr-decay-iters 0                                        | --lr-decay-iters 0 1
    --distributed-timeout-minutes 0                           | --distributed-timeout-minutes 0 1
    --data-path 0 a                                           | --data-path 0.0
    --seq-length 0                                            | --seq-length 0 1
    --tokenizer-type NullTokenizer                            | --tokenizer-type NullTokenizer --vocab-size
    --tokenizer-type GPT2BPETokenizer --vocab-file v          | --tokenizer-type GPT2BPETokenizer --merge-file
    --tokenizer-type HuggingFaceTokenizer                     | --tokenizer-type HuggingFaceTokenizer --tokenizer-model
    --vocab-size 0                                            | --vocab-size 0 1
    --vocab-size 9 --null-tokenizer-eod-id 10                 | --null-tokenizer-eod-id 10 0 --vocab-size 9
"""


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES.strip().splitlines(), ids=lambda rule: rule.split("|")[0].strip())
def test_a_rule_of_one_component_is_explained(rule: str):
    line, named = rule.split("|")
    assert tells_each(problems_of(line), named)


SENSELESS = """
    --ffn-hidden-size 0
    --ffn-hidden-size -8
    --kv-channels -2
    --max-position-embeddings 0
    --make-vocab-size-divisible-by 0
    --init-method-std -1
    --norm-epsilon -1
    --rotary-base 0
    --lr 1e-3 --lr-warmup-init -1
    --lr inf
    --loss-scale nan
    --loss-scale inf
    --initial-loss-scale inf
    --initial-loss-scale 3
    --min-loss-scale 1.5
    --local-rank -1
    --save ''
    --load ''
    --split 1e3,1
    --split 1,nan,0
    --split 1,,x
    --clip-grad nan
"""


@pytest.mark.parametrize("line", SENSELESS.strip().splitlines())
def test_a_number_that_makes_no_sense_is_refused(line: str):
    assert tells(problems_of(line)[0], line.split()[-2])


# ---------------------------------------------------------------- rules across components


# What is given -> (flags, world size, what each problem names). The last two of nothing are those of a script whose data are text.
TOGETHER = {
    "nothing": (
        "",
        1,
        "--micro-batch-size | --lr | --seq-length | --train-iters --train-samples | --data-path --mock-data "
        "| --tokenizer-type --vocab-file --merge-file NullTokenizer --vocab-size",
    ),
    "much": (
        SMALL + "--data-path x --max-position-embeddings 16 --tensor-model-parallel-size 5 --sequence-parallel "
        "--pipeline-model-parallel-size 3 --keep-checkpoints 5 --group-query-attention --num-query-groups 4",
        15,
        "--data-path --mock-data | --num-attention-heads 12 --tensor-model-parallel-size 5 "
        "| 3072 --tensor-model-parallel-size 5 | --num-query-groups 4 --tensor-model-parallel-size 5 "
        "| --sequence-parallel --seq-length 32 --tensor-model-parallel-size 5 | 4 3 --num-layers "
        "--pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage "
        "| --max-position-embeddings 16 --seq-length 32 | --keep-checkpoints --save",
    ),
    "batch": (SMALL + "--global-batch-size 12", 8, "--global-batch-size 12 16 --micro-batch-size 2 8"),
    "batch and positions": (
        SMALL + "--global-batch-size 12 --max-position-embeddings 16",
        8,
        "--max-position-embeddings 16 --seq-length 32 | --global-batch-size 12 16 --micro-batch-size 2 8",
    ),
    "warm-up": (
        SMALL + "--lr-warmup-iters 10 --keep-checkpoints 5",
        1,
        "--lr-warmup-iters 10 | --keep-checkpoints --save",
    ),
    "world": (
        SMALL + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --keep-checkpoints 5",
        6,
        "6 4 2 | --keep-checkpoints --save",
    ),
    "no token for a tile": (
        SMALL + "--seq-length 1 --tiled-mlp 2 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "--sequence-parallel --seq-length (1)",
    ),
    "no token for a tile of the loss": (
        SMALL + "--seq-length 1 --tiled-loss 2 --context-parallel-size 2",
        2,
        "--seq-length (1) 4 --context-parallel-size",
    ),
    "layers": (SMALL + "--pipeline-model-parallel-size 8", 8, "4 8 --num-layers --pipeline-model-parallel-size"),
    "schedule": (SMALL + "--pipeline-schedule 1b1f", 1, f"--pipeline-schedule 1b1f {' '.join(SCHEDULES)}"),
}


@pytest.mark.parametrize(("line", "world_size", "named"), TOGETHER.values(), ids=TOGETHER)
def test_all_problems_between_components_come_at_once(line: str, world_size: int, named: str):
    with pytest.raises(ConfigError) as error:
        check(config_of(line), world_size)
    assert tells_each(error.value.problems + missing_text_settings(config_of(line)), named)


LINES_AND_WORLD_SIZES = [
    (SMALL, 1),
    (SMALL + "--global-batch-size 32", 8),
    (SMALL + "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4", 16),
    (SMALL + "--save x --save-interval 5 --max-position-embeddings 32", 1),
]


@pytest.mark.parametrize(("line", "world_size"), LINES_AND_WORLD_SIZES)
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


def test_a_script_may_add_to_args_and_is_told_that_the_run_keeps_its_settings(capsys):
    args = Arguments({"lr": 0.1, "data_path": ["a"], "spec": None}, fixed=["lr", "data_path"])
    args.momentum, args.spec, args.lr = 0.5, "local", 0.1
    assert (args.momentum, args.spec, "momentum" in args, "eps" in args) == (0.5, "local", True, False)
    assert not capsys.readouterr().out
    args.lr = 0.2
    assert args.lr == 0.2 and tells(capsys.readouterr().out, "args.lr 0.2 0.1")
    assert vars(args).keys() == {"lr", "data_path", "spec", "momentum"}
    assert getattr(args, "eps", None) is None


def test_flags_without_a_setting_have_megatrons_names_types_and_defaults():
    line = "--no-bias-gelu-fusion --use-mcore-models --moe-router-topk 4 --moe-aux-loss-coeff 0.1 --no-rope-fusion --num-experts 0"
    plain, given = (parse_args(shlex.split(flags))[1] for flags in ("", line))
    names = [
        "bias_gelu_fusion",
        "use_mcore_models",
        "moe_router_topk",
        "moe_aux_loss_coeff",
        "apply_rope_fusion",
        "num_experts",
    ]
    assert [getattr(plain, name) for name in names] == [True, False, 2, 0.0, True, None]
    assert [getattr(given, name) for name in names] == [False, True, 4, 0.1, False, 0]
    assert (plain.layernorm_epsilon, plain.no_load_optim, plain.encoder_num_layers) == (1e-5, None, plain.num_layers)
    assert (plain.masked_softmax_fusion, plain.mmap_warmup, plain.data_impl, plain.spec) == (True, False, "mmap", None)


def test_the_view_may_be_copied():
    args = Arguments({"lr": 0.1})
    assert copy.copy(args).lr == copy.deepcopy(args).lr == 0.1
