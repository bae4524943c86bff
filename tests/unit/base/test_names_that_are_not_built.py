"""A name of Megatron's that is not built harms nothing until it is used, and then says what to use instead."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Optional, TypeVar

import pytest
from torch import nn

from megatron.core.base.lazy_imports import is_refused
from megatron.core.transformer.moe.router import Router

T = TypeVar("T")


class Abstract(ABC):
    @abstractmethod
    def route(self): ...


class OfAScript(Router):
    def __init__(self, config):
        super().__init__(config)


class WithAModule(Router, nn.Module): ...


class WithAnAbstract(Router, Abstract): ...


class OfAType(Router, Generic[T]): ...


@dataclass
class WithFields(Router):
    topk: int = 2


@pytest.mark.parametrize(
    "use",
    [
        lambda: Router(None, topk=2),
        lambda: OfAScript(None),
        WithAModule,
        WithAnAbstract,
        OfAType,
        WithFields,
        lambda: Router.topk,
        lambda: OfAScript.topk,
        lambda: Router["aux_loss"],
        lambda: list(Router),
        lambda: "aux_loss" in Router,
    ],
)
def test_a_use_says_what_to_use_instead(use):
    with pytest.raises(NotImplementedError, match=r"^Router: not built; experts are asked for by num_moe_experts"):
        use()


def test_an_import_an_annotation_and_a_question_are_no_use():
    def route(router: Router | None, others: list[Optional[Router]]) -> Router: ...  # noqa: UP045

    assert not isinstance(nn.Linear(1, 1), Router) and not issubclass(nn.Linear, Router)
    assert issubclass(OfAScript, Router) and not hasattr(Router, "topk")
    assert Router.__name__ == "Router" and is_refused(Router) and not is_refused(nn.Linear)


def test_a_name_is_one_object_at_all_imports():
    from megatron.core.transformer.moe import router

    assert router.Router is Router
