"""What a top-level script may hand to `pretrain`, and how it is told what is wrong. One process: nothing here depends on ranks."""

from functools import partial
from shlex import join, split
from types import SimpleNamespace

import pytest
import torch
from local_ranks import run_ranks
from said import tells
from script_run import trainer_of
from torch import nn

import pretrain_gpt
from megatron.core import mpu, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.aux_loss_collector import AuxLosses
from megatron.core.pipeline_parallel.loss_func_results import read_step
from megatron.core.sharding.placement import Placement
from megatron.core.transformer.transformer_config import model_config
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.arguments.command_line import parse_args
from megatron.training.build_model_optimizer_and_data import name_problems
from megatron.training.make_chunks_optimizer_and_pipeline import model_problems

FLAGS = split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 20 --device cpu --log-interval 1 "
    "--make-vocab-size-divisible-by 1 --eval-interval 2 --eval-iters 1"
)
PROVIDER, MODEL, STEP = (
    pretrain_gpt.train_valid_test_datasets_provider,
    pretrain_gpt.model_provider,
    pretrain_gpt.forward_step,
)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    yield
    mpu.destroy_model_parallel()
    if torch.distributed.is_initialized():  # by a run; it would be the world of the tests after these
        torch.distributed.destroy_process_group()


def losses(printed: str) -> list[str]:
    return [line.split("lm loss")[1].split("|")[0] for line in printed.splitlines() if "lm loss" in line]


@pytest.mark.full
def test_version_2_has_no_model_type(capsys):
    """pretrain(datasets, model, forward_step, extra_args_provider, args_defaults), by position or by name."""
    pretrain(PROVIDER, MODEL, ModelType.encoder_or_decoder, STEP, argv=FLAGS)
    expected = losses(capsys.readouterr().out)
    seen = []

    def extra(parser):
        parser.add_argument("--own", type=int, default=None)
        return parser

    def step(data, model):
        seen.append((get_args().own, get_args().weight_decay))
        return STEP(data, model)

    pretrain(PROVIDER, MODEL, step, extra, {"own": 3, "weight_decay": 0.01}, argv=FLAGS)
    assert losses(capsys.readouterr().out) == expected
    pretrain(PROVIDER, MODEL, step, extra_args_provider=extra, args_defaults={"own": 3}, argv=[*FLAGS, "--own", "4"])
    assert losses(capsys.readouterr().out) == expected
    assert set(seen) == {(3, 0.01), (4, 0.01)}, "a default holds where the command line says nothing, and only there"


EXPERTS = [
    "--moe-router-topk 3 --moe-layer-freq [0,1] --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall --moe-grouped-gemm",
    "--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2 --moe-z-loss-coeff 0.1",
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2",
    "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate --moe-router-dtype fp64 --moe-router-pre-softmax",
    "--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position --moe-router-topk-scaling-factor 2.5",
    "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1 --moe-layer-freq 2 --moe-enable-routing-replay",
]


@pytest.mark.parametrize("flags", EXPERTS)
def test_the_config_of_the_arguments_has_the_experts_of_the_flags(flags: str):
    sizes = "--num-experts 8 --ffn-hidden-size 64 --kv-channels 8 --make-vocab-size-divisible-by 128"
    expected, args, _ = parse_args([*FLAGS, *split(sizes), *split(flags)])
    assert model_config(core_transformer_config_from_args(args)) == expected.transformer


def test_a_model_by_megatrons_config_and_spec_has_the_experts_of_the_flags():
    """As Megatron's own pretrain_gpt.py builds it. Without experts it would train as well, with other losses."""

    def provider(pre_process=True, post_process=True):
        args = get_args()
        config = core_transformer_config_from_args(args)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization=args.normalization)
        parts = {"pre_process": pre_process, "post_process": post_process, "share_embeddings_and_output_weights": True}
        return GPTModel(config, spec, args.padded_vocab_size, args.max_position_embeddings, **parts)

    def train(mesh, model, more=""):
        flags = f"{join(FLAGS)} --num-experts 4 --moe-aux-loss-coeff 0.1 --max-position-embeddings 8 --fp64 {more}"
        script = SimpleNamespace(**vars(pretrain_gpt) | {"model_provider": model})
        steps = []
        with trainer_of(script, mesh, flags, predicts=False) as trainer:
            report = trainer._report
            trainer._report = lambda result, *rest, **options: (
                steps.append(dict(result.losses)),
                report(result, *rest, **options),
            )
            trainer._train()
        return steps

    (expected,) = run_ranks({}, partial(train, model=pretrain_gpt.model_provider))
    ranks = run_ranks({"dp": 2, "ep": 2}, partial(train, model=provider, more="--expert-model-parallel-size 2"))
    assert len(expected) == 2
    for found, step in zip(ranks[-1], expected, strict=True):
        assert set(step) == {"lm loss", "load_balancing_loss"} and found == pytest.approx(step, rel=1e-10)


def test_a_flag_of_the_scripts_own_may_not_be_one_of_ours(capsys):
    with pytest.raises(SystemExit):
        pretrain(
            PROVIDER, MODEL, ModelType.encoder_or_decoder, STEP, None, lambda p: p.add_argument("--lr"), argv=FLAGS
        )
    assert tells(capsys.readouterr().err, "extra_args_provider --lr")


def test_no_forward_step_is_an_error():
    with pytest.raises(TypeError, match="pretrain\\(\\) needs forward_step"):
        pretrain(PROVIDER, MODEL, ModelType.encoder_or_decoder)


@pytest.mark.full
def test_every_rank_builds_its_data_sets_with_and_without_is_distributed(capsys):
    def provider(sizes):
        provider.calls.append(sizes)
        return PROVIDER(sizes)

    for is_distributed in (False, True):
        provider.calls, provider.is_distributed = [], is_distributed
        pretrain(provider, MODEL, ModelType.encoder_or_decoder, STEP, argv=FLAGS)
        assert provider.calls == [[8, 8, 4]], "samples of 2 steps, of 2 validations, of 1 test"


@pytest.mark.full
def test_non_loss_data_are_shown_after_each_validation():
    """Once by the loss function, told `non_loss_data=True`; once by a function of the model."""
    shown = []

    def step(data, model):
        output, loss = STEP(data, model)
        return output, lambda y, non_loss_data=False: y.shape if non_loss_data else loss(y)

    show = lambda data, iteration, writer: shown.append((data, iteration, writer))  # noqa: E731
    run = partial(pretrain, PROVIDER, MODEL, ModelType.encoder_or_decoder, step, show, argv=FLAGS)
    run()
    assert shown == [([(2, 8), (2, 8)], 2, None)] * 2, "at the end, on both sets; two microbatches of [2, 8]"
    shown.clear()
    run(non_loss_data_func=lambda chunks: [type(chunk.module).__name__ for chunk in chunks])
    assert shown == [(["GPTModel"], 2, None)] * 2


def test_args_hold_what_megatrons_hold():
    seen = {}

    def model(pre_process=True, post_process=True):
        args = get_args()
        names = (
            "rank",
            "world_size",
            "data_parallel_size",
            "padded_vocab_size",
            "global_batch_size",
            "ffn_hidden_size",
            "kv_channels",
        )
        seen.update({name: getattr(args, name) for name in names})
        seen["config"] = core_transformer_config_from_args(args)
        return MODEL(pre_process, post_process)

    pretrain(PROVIDER, model, ModelType.encoder_or_decoder, STEP, argv=[*FLAGS, "--sequence-parallel"])
    config = seen.pop("config")
    assert seen == {
        "rank": 0,
        "world_size": 1,
        "data_parallel_size": 1,
        "padded_vocab_size": 21,
        "global_batch_size": 4,
        "ffn_hidden_size": 64,
        "kv_channels": 8,
    }
    assert (config.hidden_size, config.sequence_parallel, config.params_dtype) == (16, True, torch.float32)
    assert config.init_method.std == 0.02 and config.output_layer_init_method.std == 0.02 / 2


def test_a_pipelines_ends_may_be_named_by_the_script():
    calls = []

    def ranks(pipeline):
        calls.append(pipeline)
        return pipeline

    pretrain(
        PROVIDER,
        MODEL,
        ModelType.encoder_or_decoder,
        STEP,
        get_embedding_ranks=ranks,
        get_position_embedding_ranks=ranks,
        argv=FLAGS,
    )
    assert calls == [[0], [0]]


# ---------------------------------------------------------------- what is wrong is said

WRONG_MODELS = {
    "none": (
        lambda: None,
        True,
        ["model_provider returned NoneType, not a torch.nn.Module; return the model of this stage"],
    ),
    "a list": (lambda: [], False, ["model_provider returned list"]),
    "torch's own layers": (
        lambda: nn.Linear(2, 2),
        True,
        ["parameters without a placement: weight, bias", "replicated_over", "Linear has no method set_input_tensor(x)"],
    ),
    "in one process": (lambda: nn.Linear(2, 2, bias=False), False, ["parameters without a placement: weight"]),
}


@pytest.mark.parametrize("make, in_pipeline, said", WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_a_model_that_cannot_be_trained(make, in_pipeline, said):
    problems = "\n".join(model_problems(make(), in_pipeline=in_pipeline))
    assert all(text in problems for text in said)
    assert ("set_input_tensor" in problems) == (in_pipeline and "set_input_tensor" in "".join(said))


def test_a_model_of_our_layers_has_no_problem():
    def work(mesh):
        return model_problems(tensor_parallel.ColumnParallelLinear(4, 4), in_pipeline=False)

    assert run_ranks({}, work) == [[]]


def test_a_model_provider_that_returns_nothing_stops_the_run_in_words(capsys):
    with pytest.raises(SystemExit) as stopped:
        pretrain(PROVIDER, lambda pre_process, post_process: None, ModelType.encoder_or_decoder, STEP, argv=FLAGS)
    assert stopped.value.code == 2
    assert tells(capsys.readouterr().err, "1 model_provider NoneType")


X = torch.ones(1)
WRONG_STEPS = {
    "a lone tensor": (X, True, "forward_step loss_func Tensor"),
    "three": ((X, X, X), True, "tuple 3"),
    "nothing": (None, False, "NoneType"),
    "no loss function": ((X, None), True, "forward_step None"),
    "nothing to hand on": ((None, None), False, "forward_step NoneType"),
    "a number among tensors": (((X, 1.0), None), False, "forward_step Tensor float"),
}


@pytest.mark.parametrize("result, is_last, said", WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_a_forward_step_that_cannot_be_used(result, is_last, said):
    with pytest.raises(TypeError) as refused:
        read_step(result, is_last=is_last)
    assert tells(refused.value, said)


@pytest.mark.parametrize(
    "result", [lambda out, loss: out, lambda out, loss: (out, None)], ids=["lone", "no loss function"]
)
def test_the_run_says_so_and_where(result):
    with pytest.raises(TypeError, match="forward_step") as refused:
        pretrain(
            PROVIDER, MODEL, ModelType.encoder_or_decoder, lambda data, model: result(*STEP(data, model)), argv=FLAGS
        )
    assert tells("".join(refused.value.__notes__), "F0.0")


@pytest.mark.parametrize("names", ["by place", "by number"])
def test_stages_whose_parameters_have_one_name_are_refused(names: str):
    """The usual ModuleList of a fork: both stages have a layer 0."""

    class Stage(torch.nn.Module):
        def __init__(self, stage: int):
            super().__init__()
            self.layers = torch.nn.ModuleDict({str(stage if names == "by number" else 0): torch.nn.Linear(2, 2)})
            for parameter in self.parameters():
                parameter.placement = Placement(tuple(parameter.shape), init=None)

    def work(mesh):
        return name_problems(
            {mesh["pp"].rank: Stage(mesh["pp"].rank), mesh["pp"].rank + 2: Stage(mesh["pp"].rank + 2)},
            mesh["pp"],
            "cpu",
        )

    for problems in run_ranks({"pp": 2}, work):
        if names == "by number":
            assert problems == []
        else:
            (problem,) = problems
            assert tells(problem, "2 layers.0.weight 0 1 3")
            assert "nn.ModuleDict({str(first_layer + i)" in problem


def test_stages_that_declare_other_auxiliary_losses_are_refused():
    """Their ranks would wait for each other in vain, since they sum the losses by their place."""

    class Stage(torch.nn.Module):
        def __init__(self, *names: str):
            super().__init__()
            self.aux_losses = AuxLosses(*names, num_layers=4)

    def work(mesh):
        rank = mesh["pp"].rank
        of_two_chunks = {rank: Stage("one"), rank + 2: Stage("one" if rank else "two")}
        same, other, none = {rank: Stage("one")}, {rank: Stage("one", *["two"] * rank)}, {rank: Stage(*["one"] * rank)}
        return [name_problems(chunks, mesh["pp"], "cpu") for chunks in (same, other, none, of_two_chunks)]

    for same, (other,), (none,), of_two_chunks in run_ranks({"pp": 2}, work):
        assert same == []
        assert tells(other, "['one'] ['one', 'two'] aux_losses.declare")
        assert tells(none, "[] ['one'] aux_losses.declare")
        assert of_two_chunks
