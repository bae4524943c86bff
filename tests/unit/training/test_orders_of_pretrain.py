"""`pretrain` takes its arguments in each of Megatron's orders, which it tells apart by what they are."""

from types import SimpleNamespace

import pytest

from megatron.core.enums import ModelType
from megatron.training import training
from megatron.training.argument_utils import PretrainConfigContainer, pretrain_cfg_container_from_args
from megatron.training.arguments.args_namespace import Arguments
from megatron.training.global_vars import ParsedFirst, get_args, set_parsed_first, with_args

GPT = ModelType.encoder_or_decoder


def datasets(sizes):
    return sizes


def provider(pre_process=True, post_process=True):
    return pre_process, post_process


def step(data_iterator, model):
    return data_iterator, model


def embedding_ranks(ranks):
    return ranks[:1]


@pytest.fixture
def called(monkeypatch) -> list[training.Script]:
    """The scripts that `pretrain` would have run."""
    scripts: list[training.Script] = []
    monkeypatch.setattr(training, "run_script", scripts.append)
    return scripts


CONTAINER = PretrainConfigContainer(SimpleNamespace(), None, ParsedFirst(Arguments({}), None, {"lr": 1.0}))
OF_MODEL = PretrainConfigContainer(SimpleNamespace(), SimpleNamespace(provide=provider), CONTAINER.parsed)


@pytest.mark.parametrize(
    "positional, named",
    [
        ((datasets, provider, step), {}),
        ((datasets, provider, GPT, step), {}),
        ((CONTAINER, datasets, provider, GPT, step), {"get_embedding_ranks": embedding_ranks}),
        ((CONTAINER, datasets, GPT, step, provider), {"get_embedding_ranks": embedding_ranks}),
        ((OF_MODEL, datasets, GPT, step), {"get_embedding_ranks": embedding_ranks, "store": None}),
        ((OF_MODEL, datasets, GPT), {"forward_step_func": step}),
        ((), {"cfg_container": CONTAINER, "train_valid_test_dataset_provider": datasets, "model_provider": provider}),
    ],
)
def test_an_order_is_told_by_its_arguments(positional, named, called):
    if not positional:
        named = named | {"model_type": GPT, "forward_step_func": step}
    training.pretrain(*positional, **named)
    (script,) = called
    assert (script.train_valid_test_datasets_provider, script.model_provider, script.forward_step) == (
        datasets,
        provider,
        step,
    )
    if "get_embedding_ranks" in named:
        assert script.ranks_of["get_embedding_ranks"] is embedding_ranks
    if positional[:1] != (datasets,):
        assert script.args_defaults == {"lr": 1.0} and script.parsed is CONTAINER.parsed


@pytest.mark.parametrize(
    "positional, message",
    [
        ((CONTAINER, datasets, GPT, step), "needs a model_provider, or a model's config"),
        (
            (CONTAINER, datasets, GPT, step, provider, *[None] * 7),
            "takes train_valid_test_dataset_provider, model_type",
        ),
    ],
)
def test_a_wrong_order_is_refused(positional, message, called):
    with pytest.raises(TypeError, match=message):
        training.pretrain(*positional)
    assert not called


def test_arguments_parsed_first_are_read_until_there_is_a_run_and_pass_on_what_a_script_changed():
    args = Arguments({"lr": 1.0, "spec": None})
    set_parsed_first(ParsedFirst(args))
    try:
        assert get_args() is args
        args.own = 3
        args.spec = ["a", "b"]
        of_run = Arguments({"lr": 2.0, "spec": None})
        pretrain_cfg_container_from_args(args).parsed.copy_changes_to(of_run)
        assert vars(of_run) == {"lr": 2.0, "spec": ["a", "b"], "own": 3}
        other = Arguments({"lr": 5.0})
        assert with_args(other, lambda: get_args())() is other and get_args() is args
        assert with_args(other, None) is None
    finally:
        set_parsed_first(None)
