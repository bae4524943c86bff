"""A plain model over pipeline ranks by torch.distributed.pipelining, 1F1B: the peer of --parallel pp."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tools.benchmarking.batches import CLIP, Batches
from tools.benchmarking.peers.loop import Plain, loss_of
from tools.benchmarking.peers.plain import PlainModel
from tools.benchmarking.peers.weights import as_plain, load_plain, our_weights


class Pipelined(Plain):
    """One stage a rank. A tied table is on the first and the last, whose gradients are summed."""

    def make_model(self) -> nn.Module:
        work, self.rank = self.work, dist.get_rank()
        each = work.num_layers // work.ranks
        model = PlainModel(work, layers=range(self.rank * each, (self.rank + 1) * each))
        load_plain(model, as_plain(our_weights(work), work))
        return model

    def wrap(self, *, compiled: bool) -> nn.Module:
        for block in self.model.blocks.values() if compiled else ():
            block.compile()
        stage = PipelineStage(self.model, self.rank, self.work.ranks, self.where)
        self.schedule = Schedule1F1B(stage, self.work.num_microbatches, loss_fn=self._loss_of, scale_grads=True)
        ends = dist.new_group([0, self.work.ranks - 1])
        self.ends = ends if self.model.tied and (self.model.is_first or self.model.is_last) else None
        return self.model

    def _loss_of(self, scores: Tensor, labels: Tensor) -> Tensor:
        return loss_of(scores, {"labels": labels}, None if self.model.training else self.work.vocab_size)

    def _run(self, batches: Batches, *, trains: bool) -> float | None:
        """The mean loss, on the last rank."""
        found = [self._next(batches) for _ in range(self.work.num_microbatches)]
        tokens, labels = (torch.cat([batch[name] for batch in found]) for name in ("tokens", "labels"))
        run, losses = self.schedule.step if trains else self.schedule.eval, []
        given = (tokens,) if self.model.is_first else ()
        run(*given, **({"target": labels, "losses": losses} if self.model.is_last else {}))
        return torch.stack(losses).mean().item() if losses else None

    @torch.no_grad()
    def loss(self) -> float | None:
        self.model.eval()
        with self._precision(), torch.compiler.set_stance("force_eager"):
            found = self._run(Batches(self.work), trains=False)
        self.model.train()
        return found

    def step(self) -> None:
        timed = self.phases.timed
        with timed("forward and backward"), self._precision():
            self._run(self.batches, trains=True)
        with timed("clipping"):
            if self.ends is not None:
                dist.all_reduce(self._table().grad, group=self.ends)
            self._clip()
        with timed("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _table(self) -> nn.Parameter:
        return (self.model.words if self.model.is_first else self.model.scores).weight

    def _clip(self) -> None:
        """By the norm over all ranks, with a shared table counted once."""
        mine = [p for p in self.parameters if self.model.is_first or self.ends is None or p is not self._table()]
        square = nn.utils.get_total_norm([p.grad for p in mine]).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self.parameters, CLIP, square.sqrt())
