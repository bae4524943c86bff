"""Generation token by token over the ranks of one replica, with a key/value cache.

    prefill     one forward of all prompts, of any lengths; each stage caches its keys and values. Ranks that share
                samples each compute a part of the prompts, and then exchange keys and values
    each step   the last stage samples a token for each text and broadcasts them; one forward takes only these tokens

Beyond `max_length` a text is a window of its last `max_length` tokens, with positions from 0 again. Every step then
shifts all positions, so the cache is of no use: each token costs a forward over the whole window.

    max_length 4    a b c d | e           the logits of e from a b c d at positions 0 1 2 3
                      b c d e | f         the logits of f from b c d e at positions 0 1 2 3
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from inspect import signature

import torch
from torch import Tensor, nn

from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.inference.top_k_top_p_sampling import Choose
from megatron.core.ops.attention.kv_cache import CACHES, AttentionCache
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.stage_transport import TensorSpec, Transport
from megatron.core.tokenizers.tokenizer_registry import Tokenizer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TAKES_NO_CACHE

_UNFINISHED = "\ufffd"  # a tokenizer's output for an incomplete character
_FAILED = -1  # sent in place of ids if the last stage fails to sample


def generate(
    model: nn.Module,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    max_length: int,
    stop_id: int | Collection[int] | None,
    choose: Choose,
) -> Iterator[int]:
    """Yield the ids that follow one prompt, from a whole model in this process; arguments as in `generate_batch`."""
    steps = generate_batch(
        model, [prompt_ids], max_new_tokens=max_new_tokens, max_length=max_length, stop_id=stop_id, choose=[choose]
    )
    return (new_id for (new_id,) in steps)


def generate_batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_length: int,
    stop_id: int | Collection[int] | None,
    choose: Sequence[Choose],
    mesh: Mesh | None = None,
    use_cache: bool = True,
    cache: str = "contiguous",
) -> Iterator[list[int | None]]:
    """Yield the next id of each prompt, for at most `max_new_tokens` steps or until every text has reached `stop_id`.

    model: this rank's stage of a `GPTModel` without sequence parallelism; its training mode is kept.
    max_length: tokens of a text that the model sees; at most its positions, with rotary positions the sequence length
        of training.
    stop_id: an id or several; a text that has reached one yields None from that step on. None: no text ends.
    choose: choose[i] samples for prompt i.
    mesh: default: a whole model in this process; otherwise all ranks of one replica must call with equal arguments and
        iterate together.
    use_cache: False: each token costs a forward over the whole text. cache: a name in `CACHES`
        (`ops/attention/kv_cache.py`), which a script may extend.

    Raises ValueError before the first step. If a rank fails later, it raises its own error and the others `PeerError`.
    """
    limits = {"max_new_tokens": max_new_tokens, "max_length": max_length}
    problems = [f"{name} is {value}; it must be at least 1" for name, value in limits.items() if value < 1]
    if not prompts:
        problems.append("there is no prompt")
    for number, ids in enumerate(prompts, 1):
        subject = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        problems += [f"{subject} {problem}" for problem in prompt_problems(ids, model.vocab_size, max_length)]
    problems += cache_problems(cache) + generation_problems(model)
    if problems:
        raise ValueError("; ".join(problems))
    stage = Stage(model, mesh or single_rank_mesh(), choose, cache=cache)
    return generate_tokens(stage, prompts, **limits, stop_id=stop_id, use_cache=use_cache)


def generation_problems(model: nn.Module) -> list[str]:
    """Return why a model, or a part of it, cannot generate text: what a script has built may take no cache."""
    if "cache" not in signature(model.forward).parameters:
        return [
            f"{type(model).__name__} cannot generate text, since its forward takes no argument `cache`; one that inherits the "
            "GPTModel of megatron.core.models.gpt.gpt_stage does"
        ]
    without = [
        part for block in model.modules() if isinstance(block, TransformerBlock) for part in block.parts_without_cache
    ]
    kinds = sorted({type(part).__name__ for part in without})
    return [f"{kind} {TAKES_NO_CACHE}" for kind in kinds]


def cache_problems(cache: str) -> list[str]:
    """Return what is wrong with the name of a cache."""
    if cache in CACHES:
        return []
    return [f"there is no cache {cache!r}; CACHES has {', '.join(CACHES)}"]


def prompt_problems(ids: Sequence[int], vocab_size: int, max_length: int) -> list[str]:
    """Return what is wrong with a prompt, as ends of sentences about it."""
    if not ids:
        return ["has no token; begin with the one that ends documents"]
    problems = []
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        problems.append(f"has ids from {min(ids)} to {max(ids)}, the model those from 0 to {vocab_size - 1}")
    if len(ids) > max_length > 0:
        problems.append(f"has {len(ids)} tokens, and the model sees {max_length} at once; shorten it")
    return problems


def generate_tokens(
    stage: "Stage",
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    max_length: int,
    stop_id: int | Collection[int] | None,
    use_cache: bool,
) -> Iterator[list[int | None]]:
    """Yield the ids that follow the texts, as `generate_batch`, from the logits of a stage."""
    texts = [list(ids) for ids in prompts]
    active = [True] * len(prompts)  # texts that have not reached a stop id
    stop_ids = {stop_id} if stop_id is None or isinstance(stop_id, int) else {*stop_id}
    cache = None
    for _ in range(max_new_tokens):
        if cache is None or not use_cache or max(map(len, texts)) > cache.capacity:
            # prefill: the last tokens of each text, padded on the left to one length
            windows = [ids[-max_length:] for ids in texts]
            columns = max(map(len, windows))
            padding = [columns - len(ids) for ids in windows]
            cache = stage.cache(padding, stage.capacity(columns, min(max_length, columns + max_new_tokens)))
            tokens = [[0] * left + ids for left, ids in zip(padding, windows)]
        else:
            tokens = [ids[-1:] for ids in texts]
        chosen = stage.choose_next(torch.tensor(tokens, device=stage.device), cache, active)
        active = [was_active and id not in stop_ids for was_active, id in zip(active, chosen)]
        if not any(active):
            return
        for ids, id in zip(texts, chosen):
            ids.append(id)  # a finished text keeps its row in the batch until the last text ends
        yield [id if is_active else None for id, is_active in zip(chosen, active)]


def next_logits(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """Return the logits [v] of the token after `ids`, without vocabulary padding.

    model: whole, in evaluation mode.
    """
    stage = Stage(model, single_rank_mesh())
    return stage.logits(torch.tensor([ids], device=stage.device), stage.cache([0], len(ids)))[0]


class Stage:
    """This rank's stage of the model, its transfers to the neighbouring stages, and the texts' sampling functions."""

    receives_tuple = False  # whether the model's set_input_tensor takes a tuple of tensors

    def __init__(self, model: nn.Module, mesh: Mesh, choose: Sequence[Choose] = (), *, cache: str = "contiguous"):
        self.kind_of_cache = cache  # a name in CACHES
        self.model = model
        self.mesh = mesh
        self.choose = choose
        (self.stage,) = mesh.stages.of_rank(mesh["pp"].rank)
        self.device = next(model.parameters()).device

    def cache(self, starts: Sequence[int], capacity: int) -> AttentionCache:
        """Return an empty cache. starts: the column in which each text begins. capacity: in columns."""
        return self.model.context.cache(starts, capacity, self.device, self.kind_of_cache)

    def capacity(self, columns: int, max_columns: int) -> int:
        """Return the columns of a cache for texts that have `columns` now: at most `max_columns`.

        A cache ends where a rope has other frequencies for longer texts, since its keys would have to be rotated again.
        """
        capacity = max_columns
        for rope in self.model.config.ropes:
            if rope.scaling is None or not rope.scaling.changes_after:
                continue
            if columns <= rope.scaling.changes_after:
                capacity = min(capacity, rope.scaling.changes_after)
        return capacity

    @torch.no_grad()
    def logits(self, tokens: Tensor, cache: AttentionCache) -> Tensor | None:
        """Return the logits [b, v] of each text's next token, without vocabulary padding; None before the last stage.

        tokens: [b, new], after those of the cache. Every rank of the replica must call.
        """
        config = self.model.config
        tokens = cache.take(tokens)  # ranks that share samples each take a part of the prompts' columns
        was_shared = cache.shares
        b, new = tokens.shape
        spec = TensorSpec((new, b, config.hidden_size), config.residual_dtype)
        positions = cache.positions(new)
        logits = self.run_stage((spec,), lambda: self.model(tokens, positions, cache=cache))
        if was_shared and logits is not None:
            logits = cache.broadcast_last_column(logits)
        return logits

    def run_stage(
        self, boundary: tuple[TensorSpec, ...], forward: Callable[[], Tensor | tuple[Tensor, ...]]
    ) -> Tensor | None:
        """Receive from the previous stage, run `forward`, send to the next stage.

        boundary: shape and dtype of the tensors between stages, such as hidden states [new, b, h]; `forward` returns
        them, or on the last stage logits [b, new, v/t]. Returns as `logits`: [b, v] on the last stage, of the last
        column, else None. Every rank of the replica must call.
        """
        stages = self.mesh.stages
        transport = Transport(self.mesh, boundary, self.device, copies_over=self.mesh["tp"])
        if self.stage > 0:
            received = transport.post("forward", stages.ranks[self.stage - 1]).wait()
            self.model.set_input_tensor(received if self.receives_tuple else received[0])
        with _evaluating(self.model):
            out = forward()
        self.model.set_input_tensor(None)
        if self.stage < stages.last:
            outputs = out if isinstance(out, tuple) else (out,)
            transport.send("forward", stages.ranks[self.stage + 1], outputs).wait()
            return None
        logits = collectives.all_gather(out[:, -1], self.mesh["tp"], dim=-1)  # [b, padded vocabulary]
        return logits[:, : self.model.vocab_size]

    def choose_next(self, tokens: Tensor, cache: AttentionCache, active: Sequence[bool]) -> list[int]:
        """Return the next id of each text, on every rank; 0 for a finished text.

        All ranks of the last stage draw the same ids. If sampling fails on one of them, it raises its error and all
        others PeerError. Every rank of the replica must call. tokens: int64 [b, new], as of `logits`.
        """
        model_ranks = self.mesh["mp"]
        error = None
        logits = self.logits(tokens, cache)
        chosen = [0] * len(active)
        if logits is not None:
            try:
                chosen = [
                    choose(row) if is_active else 0 for choose, row, is_active in zip(self.choose, logits, active)
                ]
            except Exception as caught:
                error = caught
                chosen = [_FAILED] * len(active)
        ids = torch.tensor(chosen, device=self.device)
        chosen = collectives.broadcast(ids, model_ranks, source=self.mesh.reporter("mp")).tolist()
        if _FAILED in chosen:
            with collectives.raise_together(model_ranks, self.device):
                if error is not None:
                    raise error
        return chosen


def text_pieces(tokenizer: Tokenizer, before: Sequence[int], new_ids: Iterable[int]) -> Iterator[str]:
    """Yield the text that `new_ids` append to the ids `before`, in pieces of whole characters.

    A character may take several ids, and the text of an id may depend on earlier ids.
    """
    ids = list(before)
    text = tokenizer.detokenize(ids)
    shown = len(text)
    for new_id in new_ids:
        ids.append(new_id)
        text = tokenizer.detokenize(ids)
        if not text.endswith(_UNFINISHED):
            yield text[shown:]
            shown = len(text)
    yield text[shown:]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the block, and restore each module's mode after it.

    It is for one forward at a time, since a caller may stop iterating between two ids.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
