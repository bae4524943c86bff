"""Train a plain model over pipeline ranks by torch.distributed.pipelining, 1F1B: the peer of --parallel pp."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tools.benchmarking.batches import CLIP, Batches
from tools.benchmarking.peers.loop import Plain, loss_of
from tools.benchmarking.peers.plain import PlainModel
from tools.benchmarking.peers.weights import as_plain, load_plain, our_weights


class Pipelined(Plain):
    """Trainer of one stage on each rank. A tied embedding is on the first and the last; its gradients are summed."""

    def make_model(self) -> nn.Module:
        """Build this rank's stage with our initial weights."""
        work = self.work
        self.rank = dist.get_rank()
        layers_per_stage = work.num_layers // work.ranks
        first_layer = self.rank * layers_per_stage
        model = PlainModel(work, layers=range(first_layer, first_layer + layers_per_stage))
        load_plain(model, as_plain(our_weights(work), work))
        return model

    def wrap(self, *, compiled: bool) -> nn.Module:
        """Build the stage and the schedule."""
        if compiled:
            for block in self.model.blocks.values():
                block.compile()
        stage = PipelineStage(self.model, self.rank, self.work.ranks, self.where)
        self.schedule = Schedule1F1B(stage, self.work.num_microbatches, loss_fn=self._loss_of, scale_grads=True)
        embedding_group = dist.new_group([0, self.work.ranks - 1])  # every rank must call
        has_tied_embedding = self.model.tied and (self.model.is_first or self.model.is_last)
        self.embedding_group = embedding_group if has_tied_embedding else None
        return self.model

    def _loss_of(self, scores: Tensor, labels: Tensor) -> Tensor:
        return loss_of(scores, {"labels": labels}, None if self.model.training else self.work.vocab_size)

    def _run(self, batches: Batches, *, trains: bool) -> float | None:
        """Run the schedule over one batch; return the mean loss on the last rank, None on the others."""
        microbatches = [self._next(batches) for _ in range(self.work.num_microbatches)]
        # The schedule itself splits a batch [m * b, s] into microbatches.
        tokens = torch.cat([microbatch["tokens"] for microbatch in microbatches])
        labels = torch.cat([microbatch["labels"] for microbatch in microbatches])
        run = self.schedule.step if trains else self.schedule.eval
        losses: list[Tensor] = []  # filled by the schedule
        inputs = (tokens,) if self.model.is_first else ()
        targets = {"target": labels, "losses": losses} if self.model.is_last else {}
        run(*inputs, **targets)
        return torch.stack(losses).mean().item() if losses else None

    @torch.no_grad()
    def loss(self) -> float | None:
        """Return the loss of the first batch without dropout; None on ranks without it. Every rank must call."""
        self.model.eval()
        with self._precision(), torch.compiler.set_stance("force_eager"):
            loss = self._run(Batches(self.work), trains=False)
        self.model.train()
        return loss

    def step(self) -> None:
        """Train one step."""
        timed = self.phases.timed
        with timed("forward and backward"), self._precision():
            self._run(self.batches, trains=True)
        with timed("clipping"):
            if self.embedding_group is not None:
                dist.all_reduce(self._embedding_weight().grad, group=self.embedding_group)
            self._clip()
        with timed("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _embedding_weight(self) -> nn.Parameter:
        return self.model.words.weight if self.model.is_first else self.model.scores.weight

    def _clip(self) -> None:
        """Clip by the norm over all ranks. A tied embedding counts on the first rank alone."""
        counted = self.parameters
        if self.embedding_group is not None and not self.model.is_first:
            counted = [p for p in self.parameters if p is not self._embedding_weight()]
        squared_norm = nn.utils.get_total_norm([p.grad for p in counted]).square()
        dist.all_reduce(squared_norm)
        nn.utils.clip_grads_with_norm_(self.parameters, CLIP, squared_norm.sqrt())
