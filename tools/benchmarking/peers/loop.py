"""Peers in a plain training loop: float32 weights, optional bfloat16 autocast, torch's fused AdamW, clipping."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from megatron.core import parallel_state
from megatron.core.parallel.accelerator import Device, set_malloc
from tools.benchmarking.batches import CLIP, LR, SEED, WEIGHT_DECAY, Batches, Phases
from tools.benchmarking.peers import parallel
from tools.benchmarking.peers.plain import PlainModel
from tools.benchmarking.peers.weights import as_plain, load_plain, our_weights
from tools.benchmarking.work import Contender, Work

KEEPS_FREED = 2**31 - 1  # bytes: as a run of ours, which sets it by --empty-unused-memory-level 0
Scores = Tensor | tuple[Tensor, Tensor]


def loss_of(scores: Scores, batch: dict[str, Tensor], words: int | None = None, *, with_order: bool = True) -> Tensor:
    """Mean loss of a batch. words: of the vocabulary without padding, for a loss that can be compared. with_order: add that of a
    BERT's order of sentences."""
    if isinstance(scores, Tensor):
        return _cross_entropy(scores, batch["labels"], words)
    mask = batch["loss_mask"] == 0
    labels = batch["labels"].masked_fill(mask, -100)  # cross_entropy ignores -100
    loss = _cross_entropy(scores[0], labels, words)
    return loss + functional.cross_entropy(scores[1].float(), batch["is_random"]) if with_order else loss


def _cross_entropy(scores: Tensor, labels: Tensor, words: int | None) -> Tensor:
    if isinstance(scores, DTensor):
        scores = scores if words is None else scores.full_tensor()
    if words is not None:
        scores = scores[..., :words].float()
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def clip(parameters: list[nn.Parameter]) -> None:
    """Clip by the norm of all gradients, of sharded parameters and of whole ones, which torch does not take together."""
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    kinds = [kind for kind in (sharded, [p for p in parameters if not isinstance(p, DTensor)]) if kind]
    norms = [nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, CLIP, total)


def make_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not. torch's fused kernel takes either sharded parameters or whole ones."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault((p.dim() > 1, isinstance(p, DTensor)), []).append(p)
    decays = [{"params": some, "weight_decay": WEIGHT_DECAY * matrices} for (matrices, _), some in groups.items()]
    return torch.optim.AdamW(decays, lr=LR, fused=True)


class Plain:
    """A `PlainModel`, on several ranks wrapped by torch's means for the same layout."""

    def __init__(self, contender: Contender, work: Work, device_name: str):
        self.work, self.device = work, Device.select(device_name, local_rank=parallel_state.launched_local_rank())
        self.where = self.device.torch_device
        self.autocast = work.bf16 if contender.bf16 is None else contender.bf16
        if contender.same_allocator:
            set_malloc(KEEPS_FREED)
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
        self.batches, self.phases = Batches(work, self.replica), Phases(self.device)

    def make_model(self) -> nn.Module:
        model = PlainModel(self.work, fused=self.work.parallel != "tp")
        load_plain(model, as_plain(our_weights(self.work), self.work))
        return model

    def wrap(self, *, compiled: bool) -> nn.Module:
        """What a step calls. One process compiles the whole model, several compile each block, as torch's examples do."""
        if self.work.ranks == 1:
            return torch.compile(self.model) if compiled else self.model
        wrapped = parallel.WRAPPED[self.work.parallel](self.model, self.work, self.autocast)
        for block in self.model.blocks.values() if compiled else ():
            block.compile()
        return wrapped

    def scores(self, model: nn.Module, batch: dict[str, Tensor]) -> Scores:
        if "tokens" in batch:
            return model(batch["tokens"])
        return model(batch["text"], batch["types"], batch["padding_mask"].bool()[:, None, None, :])

    def _precision(self) -> AbstractContextManager:
        return torch.autocast(self.device.name, torch.bfloat16, enabled=self.autocast)

    def _next(self, batches: Batches) -> dict[str, Tensor]:
        return {name: value.to(self.where) for name, value in next(batches).items()}

    @torch.no_grad()
    def loss(self) -> float:
        """Of the first batch, without dropout; of the words alone where a BERT trains with it: after two steps the loss of a few
        samples' order is 0.6 to 1.3, by the masks. Every rank must call."""
        batches, losses = Batches(self.work, self.replica), []
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
        """Over the replicas."""
        if self.work.replicas > 1:
            dist.all_reduce(loss)
        return loss.item() / self.work.replicas

    def step(self) -> None:
        work, timed = self.work, self.phases.timed
        for i in range(work.num_microbatches):
            batch = self._next(self.batches)
            parallel.sums_gradients(self.wrapped, i == work.num_microbatches - 1)
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
        """torch.compile raises where it cannot; a graph break would leave a part to eager code."""
        if self.compiled and (breaks := torch._dynamo.utils.counters["graph_break"]):
            raise RuntimeError(f"compiled in parts: {dict(breaks)}")

    def meet(self) -> None:
        """Wait for all ranks."""
        if self.work.ranks > 1:
            dist.barrier()

    def take_phases(self) -> dict[str, float]:
        return self.phases.take()
