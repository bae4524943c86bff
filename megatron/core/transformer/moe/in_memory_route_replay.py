"""Recording the choices of the routers, and replaying them: another forward then sends each token to the same experts.

    replay = RouteReplay(chunks)          needs --moe-enable-routing-replay
    with replay.recording():
        ...                                forwards: the choices of each layer and sample are kept
    with replay.replaying():
        ...                                forwards of the same samples take them; weights follow from the present scores

Choices are kept by layer and by the number of the sample in the run, so recomputation, schedules and the order of microbatches
do not matter. A rank has those of its own rows: a replay needs as many ranks for each sample as the recording.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, nn

from megatron.core.transformer.moe.router import ParallelRouter
from megatron.core.transformer.transformer_block import TransformerBlock


class ReplayAction(Enum):
    """What the routers of a `RouteReplay` do."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"


class RouteReplay:
    """The choices of all routers in these modules: chunks of a model.

    routes: (layer number from 1, sample) -> int64 [s, K], this rank's rows.
    """

    def __init__(self, chunks: Iterable[nn.Module]):
        """Raises ValueError for a model without experts, or if --moe-enable-routing-replay is not given.

        A pipeline stage may have no router, if its layers are all dense: there is nothing to keep then.
        """
        self.routes: dict[tuple[int, int], Tensor] = {}
        self.action: ReplayAction | None = None
        modules = [module for chunk in chunks for module in chunk.modules()]
        routers = [module for module in modules if isinstance(module, ParallelRouter)]
        configs = [module.settings for module in modules if isinstance(module, ParallelRouter | TransformerBlock)]
        of_experts = next((config for config in configs if config.has_experts), None)
        if of_experts is None:
            raise ValueError("RouteReplay: the modules have no router; give --num-experts")
        if not of_experts.moe_enable_routing_replay:
            raise ValueError("RouteReplay: give --moe-enable-routing-replay, which says that a run may replay choices")
        for router in routers:
            router.replay = self

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, keep the choices of every forward, the last one of each sample."""
        with self._doing(ReplayAction.RECORD):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, take the choices that were recorded. A forward raises ValueError for a sample that was not."""
        with self._doing(ReplayAction.REPLAY_FORWARD):
            yield

    @contextmanager
    def _doing(self, action: ReplayAction) -> Iterator[None]:
        before, self.action = self.action, action
        try:
            yield
        finally:
            self.action = before

    def take(self, layer_number: int, samples: tuple[int, ...]) -> Tensor | None:
        """Return the recorded choices of a layer, int64 [s, b, K]; None outside of `replaying`."""
        if self.action is not ReplayAction.REPLAY_FORWARD:
            return None
        missing = [sample for sample in samples if (layer_number, sample) not in self.routes]
        if missing:
            raise ValueError(f"RouteReplay: no choices of sample {missing[0]} were recorded for layer {layer_number}")
        return torch.stack([self.routes[layer_number, sample] for sample in samples], dim=1)

    def put(self, layer_number: int, samples: tuple[int, ...], ids: Tensor) -> None:
        """Keep the choices of a layer inside of `recording`. ids: int64 [s, b, K]"""
        if self.action is ReplayAction.RECORD:
            for i, sample in enumerate(samples):
                self.routes[layer_number, sample] = ids[:, i].clone()
