"""Plain training loop of the peers: float32 weights, optional bfloat16 autocast, clipping, torch's fused AdamW."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from megatron.core import parallel_state
from megatron.core.parallel.accelerator import Device, let_malloc_keep_freed_blocks
from tools.benchmarking.batches import CLIP, LR, SEED, WEIGHT_DECAY, Batches, Phases
from tools.benchmarking.peers import parallel
from tools.benchmarking.peers.plain import PlainModel
from tools.benchmarking.peers.weights import as_plain, load_plain, our_weights
from tools.benchmarking.work import Contender, Work

KEEPS_FREED = 2**31 - 1  # bytes of freed memory that malloc keeps, as in a run of ours (--empty-unused-memory-level 0)
Scores = Tensor | tuple[Tensor, Tensor]


def loss_of(scores: Scores, batch: dict[str, Tensor], words: int | None = None, *, with_order: bool = True) -> Tensor:
    """Return the mean loss of a batch, [].

    scores: logits [b, s, v], or a BERT's pair of them and the logits of the sentence order [b, 2]. batch: labels
    [b, s], of a BERT also loss_mask [b, s] and is_random [b]. words: size of the vocabulary without padding, for a loss
    that can be compared. with_order: add the loss of the sentence order.
    """
    if isinstance(scores, Tensor):
        return _cross_entropy(scores, batch["labels"], words)
    mask = batch["loss_mask"] == 0
    labels = batch["labels"].masked_fill(mask, -100)  # cross_entropy ignores -100
    loss = _cross_entropy(scores[0], labels, words)
    if with_order:
        loss = loss + functional.cross_entropy(scores[1].float(), batch["is_random"])
    return loss


def _cross_entropy(scores: Tensor, labels: Tensor, words: int | None) -> Tensor:
    """Return the mean cross entropy. scores [b, s, v], labels [b, s]."""
    if words is not None:
        if isinstance(scores, DTensor):
            scores = scores.full_tensor()
        scores = scores[..., :words].float()  # without padding
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def clip(parameters: list[nn.Parameter]) -> None:
    """Clip by the norm of all gradients, in place.

    parameters: of any shapes. torch's functions take sharded or unsharded parameters, not both at once. With sharded
    parameters every rank must call.
    """
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    unsharded = [p for p in parameters if not isinstance(p, DTensor)]
    groups = [group for group in (sharded, unsharded) if group]
    norms = []
    for group in groups:
        norm = nn.utils.get_total_norm([p.grad for p in group])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total_norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, CLIP, total_norm)


def make_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay of matrices, and none of vectors.

    parameters: of any shapes; those of two or more dimensions are matrices. A group has either sharded or unsharded
    parameters, since torch's fused kernel does not take both.
    """
    params_of: dict[tuple[bool, bool], list[nn.Parameter]] = {}  # (is a matrix, is sharded) -> parameters
    for p in parameters:
        params_of.setdefault((p.dim() > 1, isinstance(p, DTensor)), []).append(p)
    groups = []
    for (is_matrix, _), params in params_of.items():
        groups.append({"params": params, "weight_decay": WEIGHT_DECAY if is_matrix else 0.0})
    return torch.optim.AdamW(groups, lr=LR, fused=True)


class Plain:
    """Trainer of a `PlainModel`, on several ranks wrapped by torch's parallelism for the same layout."""

    def __init__(self, contender: Contender, work: Work, device_name: str):
        self.work = work
        self.device = Device.select(device_name, local_rank=parallel_state.launched_local_rank())
        self.where = self.device.torch_device
        self.autocast = work.bf16 if contender.bf16 is None else contender.bf16
        if contender.same_allocator:
            let_malloc_keep_freed_blocks(KEEPS_FREED)
        self.replica = 0
        if work.ranks > 1:
            parallel_state.start_distributed(self.device.backend, 2)
            self.replica = dist.get_rank() if work.replicas > 1 else 0
        torch.manual_seed(SEED + self.replica)  # dropout of replicated activations is the same on tensor-parallel ranks
        self.model = self.make_model().to(self.where).train()
        self.compiled = contender.compile != "off"
        self.wrapped = self.wrap(compiled=self.compiled)
        self.parameters = list(self.model.parameters())
        self.optimizer = make_adamw(self.parameters)
        self.batches = Batches(work, self.replica)
        self.phases = Phases(self.device)

    def make_model(self) -> nn.Module:
        """Build the model with our initial weights."""
        model = PlainModel(self.work, fused=self.work.parallel != "tp")
        load_plain(model, as_plain(our_weights(self.work), self.work))
        return model

    def wrap(self, *, compiled: bool) -> nn.Module:
        """Return the module that a step calls.

        One process compiles the whole model, several compile each block, as torch's examples do.
        """
        if self.work.ranks == 1:
            return torch.compile(self.model) if compiled else self.model
        wrapped = parallel.WRAPPED[self.work.parallel](self.model, self.work, self.autocast)
        if compiled:
            for block in self.model.blocks.values():
                block.compile()
        return wrapped

    def scores(self, model: nn.Module, batch: dict[str, Tensor]) -> Scores:
        """Return the logits of a batch, as `loss_of` takes them.

        batch: tokens, or text, types and padding_mask, [b, s] each.
        """
        if "tokens" in batch:
            return model(batch["tokens"])
        return model(batch["text"], batch["types"], batch["padding_mask"].bool()[:, None, None, :])

    def _precision(self) -> AbstractContextManager:
        return torch.autocast(self.device.name, torch.bfloat16, enabled=self.autocast)

    def _next(self, batches: Batches) -> dict[str, Tensor]:
        return {name: value.to(self.where) for name, value in next(batches).items()}

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss of the first batch without dropout. Every rank must call.

        If a BERT trains with dropout, the loss of the sentence order is left out: after two steps it is 0.6 to 1.3 for
        the few samples, depending on the dropout masks.
        """
        batches = Batches(self.work, self.replica)
        losses = []
        self.model.eval()
        for _ in range(self.work.num_microbatches):
            batch = self._next(batches)
            with self._precision(), torch.compiler.set_stance("force_eager"):
                losses.append(self._comparable_loss(batch))
        self.model.train()
        return self._mean(torch.stack(losses).mean())

    def _comparable_loss(self, batch: dict[str, Tensor]) -> Tensor:
        with_order = not self.work.has_dropout
        return loss_of(self.scores(self.model, batch), batch, self.work.vocab_size, with_order=with_order)

    def _mean(self, loss: Tensor) -> float:
        """Return the mean over the replicas."""
        if self.work.replicas > 1:
            dist.all_reduce(loss)
        return loss.item() / self.work.replicas

    def step(self) -> None:
        """Train one step."""
        work = self.work
        timed = self.phases.timed
        for i in range(work.num_microbatches):
            batch = self._next(self.batches)
            is_last = i == work.num_microbatches - 1
            parallel.set_gradient_sync(self.wrapped, is_last)
            with loss_parallel() if work.parallel == "tp" else nullcontext():
                with timed("forward"), self._precision():
                    loss = loss_of(self.scores(self.wrapped, batch), batch) / work.num_microbatches
                with timed("backward"):
                    loss.backward()
        with timed("clipping"):
            clip(self.parameters)
        with timed("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._mean(loss.detach().clone())  # ours reports the mean over the replicas, and reading it synchronizes

    def check_compiled(self) -> None:
        """Raise RuntimeError if a graph break has left a part to eager code. Other failures of torch.compile raise."""
        if not self.compiled:
            return
        breaks = torch._dynamo.utils.counters["graph_break"]
        if breaks:
            raise RuntimeError(f"compiled in parts: {dict(breaks)}")

    def meet(self) -> None:
        """Wait for all ranks."""
        if self.work.ranks > 1:
            dist.barrier()

    def take_phases(self) -> dict[str, float]:
        return self.phases.take()
