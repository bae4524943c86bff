"""Log-probabilities of given continuations, over the ranks of one or several replicas, in any layout.

    score(model, [(context, continuation), ...], mesh)     for each: sum of log p(token | what precedes it), is_greedy

Continuations of one context (the choices of a question) are one row of tokens: the context is computed once, and no
continuation sees another. Rows are packed one behind the other, so that nothing is padded:

    tokens       c c c | x x | y | d d | z            two contexts, c with the choices x x . and y ., d with z z .
    positions    0 1 2   3 4   3   0 1   2            the last token of a choice is predicted, never read

The last layer's queries, projection and MLP, and logits, are computed for the tokens that predict alone; logits stay sharded
over the vocabulary. Where a model cannot be packed (`packs`), each continuation is a row of its own, and rows of similar
lengths share a batch, padded on the right.

The plan of batches depends on the requests alone; batches are dealt to the replicas, each of which runs its own.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.attention.document_and_window_masks import Mask, PrefixTrees
from megatron.core.ops.shard_sequence import positions_of
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard
from megatron.core.pipeline_parallel.stage_transport import TensorSpec, Transport
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

Request = tuple[Sequence[int], Sequence[int]]  # ids of the context, of which there is one at least, and of what follows

BATCH_TOKENS = 2048  # tokens of a batch: on accelerators matrices are large enough
_BATCH_TOKENS_OF_CPU = (
    1024  # at most: larger batches leave the cache, and their memory goes back to the system each time
)
_LOGITS_AT_ONCE = 2**26  # elements of a rank's logits


class Score(NamedTuple):
    """What a model says of one continuation."""

    logprob: float  # the sum of its tokens' log-probabilities, natural logarithm
    is_greedy: bool  # whether each of its tokens has the highest logit; of equal ones the smallest id counts


# ---------------------------------------------------------------- the plan, of integers alone


@dataclass
class Row:
    """A context and its continuations, of which the last tokens are left out: nothing is predicted from them."""

    context: tuple[int, ...]
    branches: list[tuple[int, ...]] = field(default_factory=list)  # the whole continuations
    requests: list[int] = field(default_factory=list)  # the request of each branch

    @property
    def length(self) -> int:
        return len(self.context) + sum(len(branch) - 1 for branch in self.branches)


def rows_of(requests: Sequence[Request], max_length: int, *, shares: bool) -> list[Row]:
    """Return the rows of the requests that have a continuation, the longest first.

    A request of more than `max_length` + 1 tokens loses tokens on its left. shares: equal contexts make one row.
    """
    by_context: dict[object, Row] = {}
    for number, (context, continuation) in enumerate(requests):
        if not continuation:
            continue
        kept = tuple(context)[max(0, len(context) + len(continuation) - 1 - max_length) :]
        row = by_context.setdefault(kept if shares else number, Row(kept))
        row.branches.append(tuple(continuation))
        row.requests.append(number)
    # stable, so that the plan is the same on every rank
    return sorted(by_context.values(), key=lambda row: -row.length)


def packed_batches(rows: Sequence[Row], batch_tokens: int) -> list[list[Row]]:
    """Return batches of rows with at most `batch_tokens` tokens each, or one longer row: the first that has room takes it."""
    batches: list[list[Row]] = []
    room: list[int] = []
    first_open = 0
    for row in rows:
        for index in range(first_open, len(batches)):
            if room[index] >= row.length:
                batches[index].append(row)
                room[index] -= row.length
                break
        else:
            batches.append([row])
            room.append(max(0, batch_tokens - row.length))
        while first_open < len(room) and room[first_open] == 0:
            first_open += 1
    return batches


def padded_batches(rows: Sequence[Row], batch_tokens: int, borders: Sequence[int]) -> list[list[Row]]:
    """Return batches of rows that follow one another by length, of at most `batch_tokens` tokens with the padding.

    At most a tenth of a batch is padding. borders: no batch has a row of at most so many tokens and one of more.
    """
    batches: list[list[Row]] = []
    for row in rows:
        longest = batches[-1][0].length if batches else 0
        joins = batches and (len(batches[-1]) + 1) * longest <= batch_tokens
        joins = joins and row.length >= 0.9 * longest
        joins = joins and all((row.length <= border) == (longest <= border) for border in borders)
        if joins:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def deal(batches: Sequence[Sequence[Row]], replicas: int) -> list[list[int]]:
    """Return the batches of each replica: each next batch goes to the one with the fewest tokens so far."""
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    tokens = [0] * replicas
    for index, batch in enumerate(batches):
        replica = tokens.index(min(tokens))
        dealt[replica].append(index)
        tokens[replica] += sum(row.length for row in batch)
    return dealt


class BatchPlan(NamedTuple):
    """A batch as lists: tokens [b, s], and which token of the batch predicts which."""

    tokens: list[list[int]]
    positions: list[list[int]]
    numbers: list[list[int]]  # the row of each token within the batch row
    branches: list[list[int]]  # 0: the context
    sources: list[int]  # of each prediction the index in [b s] of the token that predicts, ascending in each row
    targets: list[int]  # the id that is predicted
    requests: list[int]  # the request that it belongs to


def plan_packed(rows: Sequence[Row]) -> BatchPlan:
    """Return a batch of one row, in which the rows follow one another."""
    plan = BatchPlan([[]], [[]], [[]], [[]], [], [], [])
    (tokens,), (positions,), (numbers,), (branches,) = plan[:4]
    for number, row in enumerate(rows):
        start = len(tokens)
        context_length = len(row.context)
        tokens += row.context
        positions += range(context_length)
        branches += [0] * context_length
        for branch_number, (branch, request) in enumerate(zip(row.branches, row.requests, strict=True), 1):
            first = len(tokens)
            inputs = branch[:-1]
            tokens += inputs
            positions += range(context_length, context_length + len(inputs))
            branches += [branch_number] * len(inputs)
            plan.sources.append(start + context_length - 1)
            plan.sources.extend(range(first, first + len(inputs)))
            plan.targets.extend(branch)
            plan.requests.extend([request] * len(branch))
        numbers += [number] * (len(tokens) - start)
    return plan


def padded_length(rows: Sequence[Row], multiple: int) -> int:
    """Return the length of the longest row, rounded up to a multiple of `multiple`."""
    longest = max(row.length for row in rows)
    return -(-longest // multiple) * multiple


def plan_padded(rows: Sequence[Row], length: int) -> BatchPlan:
    """Return a batch with a line for each row of one continuation, padded on the right to `length`."""
    plan = BatchPlan([], [], [], [], [], [], [])
    for line, row in enumerate(rows):
        (branch,) = row.branches
        ids = [*row.context, *branch[:-1]]
        plan.tokens.append(ids + [0] * (length - len(ids)))
        plan.positions.append(list(range(length)))
        first = line * length + len(row.context) - 1
        plan.sources.extend(range(first, first + len(branch)))
        plan.targets.extend(branch)
        plan.requests.extend(row.requests * len(branch))
    return plan


# ---------------------------------------------------------------- what a model allows


def packs(model: nn.Module) -> bool:
    """Return whether rows of a model may be packed: its positions follow `position_ids`, and masks are documents.

    It was loaded with `restarts_positions=True`, its layers have no relative positions and no frequencies that depend on
    the length of the whole row, and no other rank has a part of the sequence.
    """
    if type(model) is not GPTModel or not model.context.restarts_positions:
        return False
    if model.context.rows.global_length(1) > 1:  # other ranks have a part
        return False
    config = model.settings
    return config.position_embedding_type != "relative" and not _borders(config)


def _borders(config: object) -> list[int]:
    """Return the lengths after which a model's ropes have other frequencies."""
    scalings = [rope.scaling for rope in config.ropes if rope.scaling is not None]
    return [scaling.changes_after for scaling in scalings if scaling.changes_after]


def _has_window(config: object) -> bool:
    return any(config.window_left(layer) is not None for layer in range(config.all_layers))


def scoring_problems(model: nn.Module) -> list[str]:
    """Return why a model cannot score text."""
    if isinstance(model, GPTModel):
        return []
    return [f"{type(model).__name__} is no GPTModel: log-probabilities of text need a causal language model"]


# ---------------------------------------------------------------- the scores


def score(
    model: nn.Module,
    requests: Sequence[Request],
    *,
    max_length: int,
    mesh: Mesh | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Return the score of each request, on every rank. Every rank of the mesh must call with equal requests.

    model: this rank's stage of a GPTModel without sequence parallelism; its training mode is kept.
    max_length: tokens that the model sees at once; a longer request loses tokens on its left.
    mesh: default: a whole model in this process.
    batch_tokens: tokens of a batch at most, on a CPU no more than 1024; a longer row is a batch of its own.
    progress(tokens done, all tokens): called after each batch, of this rank's replica.

    Raises ValueError before anything is computed: an empty context, ids that the model does not have, a continuation
    longer than `max_length`, another model.
    """
    problems = scoring_problems(model) or request_problems(requests, model.vocab_size, max_length)
    if problems:
        raise ValueError("; ".join(problems))
    mesh = mesh or single_rank_mesh()
    scorer = _Scorer(model, mesh)
    is_packed = packs(model)
    if scorer.device.type == "cpu":
        batch_tokens = min(batch_tokens, _BATCH_TOKENS_OF_CPU)

    # plan; what only differs in windows by columns is not shared
    if is_packed:
        rows = rows_of(requests, max_length, shares=not _has_window(model.settings))
        batches = packed_batches(rows, batch_tokens)
    else:
        rows = rows_of(requests, max_length, shares=False)
        batches = padded_batches(rows, batch_tokens, _borders(model.settings))
    # Replicas that share experts must enter them together, so they run the same batches, and the first of them counts.
    sharers = mesh.replicas_sharing_experts
    own = deal(batches, mesh.samples.size // sharers)[mesh.samples.rank // sharers]
    counts = mesh.samples.rank % sharers == 0
    all_tokens = sum(row.length for index in own for row in batches[index])

    # run this replica's batches; only the last stage has results
    sums = torch.zeros(len(requests), dtype=torch.float64)  # of log-probabilities
    misses = torch.zeros(len(requests), dtype=torch.float64)  # tokens without the highest logit
    done = 0
    with torch.no_grad(), _evaluating(model):
        for index in own:
            rows = batches[index]
            plan = plan_packed(rows) if is_packed else plan_padded(rows, padded_length(rows, scorer.multiple))
            results = scorer.run(plan, is_packed=is_packed)
            if results is not None and counts:
                predicted, logprobs, is_best = results
                of_request = torch.tensor(plan.requests)[predicted]
                sums.index_add_(0, of_request, logprobs)
                misses.index_add_(0, of_request, 1 - is_best)
            done += sum(row.length for row in rows)
            if progress is not None:
                progress(done, all_tokens)

    # share them: parts of samples, replicas, then stages
    shared = torch.stack((sums, misses)).to(scorer.device)
    if mesh.has_last_stage:
        collectives.all_reduce(shared, mesh.tokens)
    shared = collectives.broadcast(shared, mesh["mp"], source=mesh.reporter("mp")).cpu()
    return [Score(logprob, missed == 0) for logprob, missed in zip(*shared.tolist(), strict=True)]


def request_problems(requests: Sequence[Request], vocab_size: int, max_length: int) -> list[str]:
    """Return what is wrong with the first request that cannot be scored, as one sentence."""
    for number, (context, continuation) in enumerate(requests, 1):
        if not continuation:
            continue
        ids = (*context, *continuation)
        if not context:
            return [f"request {number} has no context; begin with the token that begins or ends documents"]
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            return [
                f"request {number} has ids from {min(ids)} to {max(ids)}, the model those from 0 to {vocab_size - 1}; is it "
                "of another tokenizer?"
            ]
        if len(continuation) > max_length:
            return [
                f"request {number} has a continuation of {len(continuation)} tokens, and the model sees {max_length} at "
                "once; shorten it"
            ]
    return []


class _Scorer:
    """Runs batches through this rank's stage."""

    def __init__(self, model: nn.Module, mesh: Mesh):
        self.model = model
        self.mesh = mesh
        self.device = next(model.parameters()).device
        self.multiple = 2 * mesh.sequence.size if mesh.sequence.size > 1 else 1
        (self.stage,) = mesh.stages.of_rank(mesh["pp"].rank)

    def run(self, plan: BatchPlan, *, is_packed: bool) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the predictions of this rank's tokens, on the last stage: their indices in the plan, float64 log p, 0 or 1.

        Every rank of the replica must call.
        """
        tokens = torch.tensor(plan.tokens, device=self.device)  # [b, s]
        positions = torch.tensor(plan.positions, device=self.device)
        mask = None
        if is_packed:
            numbers = torch.tensor(plan.numbers, device=self.device)
            mask = PrefixTrees(numbers, torch.tensor(plan.branches, device=self.device))

        columns = local_columns(tokens.shape[1], self.mesh.sequence, self.device)
        predicted, sources, targets = local_predictions(plan, columns, self.device)
        last_layer = self.last_layer_of_rows if is_packed else None
        if last_layer is None:
            hidden_or_logits = self._forward(tokens[:, columns], positions[:, columns], mask)
        else:
            rows, sources = sources.unique(return_inverse=True)  # choices share the last token of their context
            with last_layer.wanting(rows):
                hidden_or_logits = self._forward(tokens[:, columns], positions[:, columns], mask)
        if hidden_or_logits is None:
            return None
        logprobs, is_best = self._predictions(hidden_or_logits.flatten(0, 1), sources, targets)
        return predicted.cpu(), logprobs.double().cpu(), is_best.double().cpu()

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Mask) -> Tensor | None:
        """Run the stage on tokens and positions [b, s].

        Returns on the last stage hidden states [s, b, h] or, of a script's own forward, logits [s, b, v/t].
        """
        model = self.model
        b, s = tokens.shape
        stages = self.mesh.stages
        config = model.settings
        spec = TensorSpec((s, b, config.hidden_size), config.residual_dtype)
        transport = Transport(self.mesh, (spec,), self.device, copies_over=self.mesh["tp"])
        if self.stage > 0:
            (received,) = transport.post("forward", stages.ranks[self.stage - 1]).wait()
            model.set_input_tensor(received)
        forward = model if self.has_own_forward else model.language_model
        out = forward(tokens, positions, mask)  # [s, b, h], or a script's logits
        model.set_input_tensor(None)
        if self.stage < stages.last:
            transport.send("forward", stages.ranks[self.stage + 1], (out,)).wait()
            return None
        return out.transpose(0, 1) if self.has_own_forward else out

    @cached_property
    def last_layer_of_rows(self) -> TransformerLayer | None:
        """The model's last layer, if it is here and can be asked for some rows alone."""
        if self.stage < self.mesh.stages.last or self.has_own_forward:
            return None
        decoder = self.model.language_model.decoder
        layer = decoder.layers[-1] if type(decoder) is TransformerBlock and len(decoder.layers) else None
        return layer if isinstance(layer, TransformerLayer) and layer.can_want_rows else None

    @property
    def has_own_forward(self) -> bool:
        """Whether a script's class computes something else than our GPT, of which logits are known alone."""
        return type(self.model).forward is not GPTModel.forward

    def _predictions(self, x: Tensor, sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log p, is highest) of each prediction, [predictions] each.

        x: [s b, h or v/t]. sources: rows of x that predict. Every rank of tp must call.
        """
        model = self.model
        rows, row_of = sources.unique(return_inverse=True)  # choices share the last token of their context
        order = row_of.argsort(stable=True)
        if self.has_own_forward:
            columns = x.shape[1]
        else:
            weight = model.language_model.output_layer.weight
            columns = len(model.language_model.embedding.word_embeddings.weight if weight is None else weight)
        rows_at_once = max(1, _LOGITS_AT_ONCE // columns)
        logprobs = torch.empty(len(targets), dtype=torch.float64, device=x.device)
        is_best = torch.empty(len(targets), dtype=torch.float64, device=x.device)
        for first in range(0, len(rows), rows_at_once):
            chosen = x[rows[first : first + rows_at_once]]  # [m, h or v/t]
            logits = chosen if self.has_own_forward else model.language_model.logits(chosen[:, None])[:, 0]  # [m, v/t]
            own = order[(row_of[order] >= first) & (row_of[order] < first + rows_at_once)]
            logprobs[own], is_best[own] = log_probabilities(
                logits, row_of[own] - first, targets[own], model.axis, model.vocab_size
            )
        return logprobs, is_best


def local_columns(length: int, sequence: Axis, device: torch.device | str) -> Tensor:
    """Return the columns of samples of `length` tokens that this rank of the sequence's ranks has, in its order."""
    if sequence.size == 1:
        return torch.arange(length, device=device)
    shard = SequenceShard(sequence)
    return positions_of(shard, shard.local_length(length), device)


def local_predictions(plan: BatchPlan, columns: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Return (their indices in the plan, row in [columns b], target) of the predictions from these columns, [n] each."""
    b, s = len(plan.tokens), len(plan.tokens[0])
    rows = torch.full((b, s), -1, device=device)
    rows[:, columns] = torch.arange(b * len(columns), device=device).view(len(columns), b).t()
    sources = rows.flatten()[torch.tensor(plan.sources, dtype=torch.int64, device=device)]
    predicted = (sources >= 0).nonzero().squeeze(1)
    targets = torch.tensor(plan.targets, dtype=torch.int64, device=device)[predicted]
    return predicted, sources[predicted], targets


def log_probabilities(
    logits: Tensor, rows: Tensor, targets: Tensor, axis: Axis, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return (log softmax of row `rows[i]` at `targets[i]`, 1 where it is the highest, else 0): float64 [n] each.

    logits: [m, v/t], this rank's part of the vocabulary, in which columns from `vocab_size` on are padding. The softmax is
    in float32 or wider. Every rank of the axis must call.
    """
    width = logits.shape[1]
    first_id = axis.rank * width
    own_width = min(max(vocab_size - first_id, 0), width)
    wide = logits[:, :own_width].to(torch.promote_types(logits.dtype, torch.float32))  # [m, own]

    # the highest logit, and the smallest id that has it
    if own_width:
        own_largest, own_best = wide.max(dim=-1)
        own_best = (wide == own_largest[:, None]).to(torch.uint8).argmax(dim=-1) if len(wide) else own_best
    else:
        own_largest = wide.new_full((len(wide),), float("-inf"))
        own_best = own_largest.new_zeros(len(wide), dtype=torch.int64)
    largest = collectives.all_reduce(own_largest.clone(), axis, "max")  # [m]
    is_elsewhere = own_largest != largest
    best = -(own_best + first_id).masked_fill(is_elsewhere, vocab_size).double()
    best = -collectives.all_reduce(best, axis, "max")  # [m]

    # log sum exp, and the logit of each target
    sum_exp = collectives.all_reduce((wide - largest[:, None]).exp().sum(dim=-1), axis)  # [m]
    local_targets = targets - first_id
    has_target = (local_targets >= 0) & (local_targets < own_width)
    at_target = largest.new_zeros(len(targets))
    at_target[has_target] = (wide[rows[has_target], local_targets[has_target]] - largest[rows[has_target]]).to(
        largest.dtype
    )
    collectives.all_reduce(at_target, axis)
    logprobs = at_target.double() - sum_exp.log().double()[rows]
    return logprobs, (best[rows] == targets).double()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the block, and restore each module's mode after it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
