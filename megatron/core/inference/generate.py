"""Generation token by token over the ranks of one replica, with a key/value cache.

    prefill     one forward of all prompts, of any lengths; each stage caches its keys and values. Ranks that share
                samples each
                compute a part, and then have the keys and values of all
    each step   the last stage samples a token per text, broadcasts them, and one forward takes only these tokens

Beyond `max_length` a text is a window of its last `max_length` tokens, with positions from 0 again. Every step then
shifts all
positions, so the cache is of no use: each token costs a forward over the whole window.

    max_length 4    a b c d | e           the scores of e from a b c d at positions 0 1 2 3
                      b c d e | f         the scores of f from b c d e at positions 0 1 2 3
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.inference.load_model import lone_mesh
from megatron.core.inference.sampling import Choose
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.stage_transport import TensorSpec, Transport
from megatron.core.tokenizers.tokenizer_registry import Tokenizer

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
    """The ids that follow one prompt, from a whole model in this process; arguments as in `generate_batch`."""
    limits = {"max_new_tokens": max_new_tokens, "max_length": max_length}
    steps = generate_batch(model, [prompt_ids], **limits, stop_id=stop_id, choose=[choose])
    return (new for (new,) in steps)


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
) -> Iterator[list[int | None]]:
    """Yields the next id of each prompt for at most `max_new_tokens` steps; stops when every text has reached `stop_id`.

    A text that has reached `stop_id`, or one of several, yields None from that step on; with None no text ends. choose[i]
    samples for prompt i. model: this rank's stage of a `GPTModel` without sequence parallelism; its training mode is kept.
    mesh: default a whole model in this process; otherwise all ranks of one replica must call with equal arguments and
    iterate
    together. max_length: at most the model's positions; with rotary positions the sequence length of training. Without
    `use_cache` each token costs a forward over the whole text. Raises ValueError before the first step; if a rank fails
    later,
    it raises its own error and the others `comm.PeerError`.
    """
    limits = {"max_new_tokens": max_new_tokens, "max_length": max_length}
    problems = [f"{name} is {value}; it must be at least 1" for name, value in limits.items() if value < 1]
    if not prompts:
        problems.append("there is no prompt")
    for number, ids in enumerate(prompts, 1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        problems += [f"{which} {problem}" for problem in prompt_problems(ids, model.vocab_size, max_length)]
    if problems:
        raise ValueError("; ".join(problems))
    stage = Stage(model, mesh or lone_mesh(), choose)
    return continued(stage, prompts, **limits, stop_id=stop_id, use_cache=use_cache)


def prompt_problems(ids: Sequence[int], vocab_size: int, max_length: int) -> list[str]:
    """What is wrong with a prompt."""
    if not ids:
        return ["has no token; begin with the one that ends documents"]
    problems = []
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        problems.append(f"has ids from {min(ids)} to {max(ids)}, the model those from 0 to {vocab_size - 1}")
    if len(ids) > max_length > 0:
        problems.append(f"has {len(ids)} tokens, and the model sees {max_length} at once; shorten it")
    return problems


def continued(
    stage: "Stage",
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    max_length: int,
    stop_id: int | Collection[int] | None,
    use_cache: bool,
) -> Iterator[list[int | None]]:
    """The ids that follow the texts, as `generate_batch` says, by the scores of a stage's `scores`."""
    texts, going = [list(ids) for ids in prompts], [True] * len(prompts)
    stops = {stop_id} if stop_id is None or isinstance(stop_id, int) else {*stop_id}
    cache = None
    for _ in range(max_new_tokens):
        if cache is None or not use_cache or max(map(len, texts)) > cache.capacity:
            windows = [ids[-max_length:] for ids in texts]
            columns = max(map(len, windows))
            padding = [columns - len(ids) for ids in windows]
            cache = stage.cache(padding, stage.capacity(columns, min(max_length, columns + max_new_tokens)))
            new = [[0] * before + ids for before, ids in zip(padding, windows)]
        else:
            new = [ids[-1:] for ids in texts]
        chosen = stage.choose_next(torch.tensor(new, device=stage.device), cache, going)
        going = [was and id not in stops for was, id in zip(going, chosen)]
        if not any(going):
            return
        for ids, id in zip(texts, chosen):
            ids.append(id)  # a finished text keeps its row in the batch until the last text ends
        yield [id if goes else None for id, goes in zip(chosen, going)]


def next_scores(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """Logits [v] of the token after `ids`, without vocabulary padding, from a whole model in evaluation mode."""
    stage = Stage(model, lone_mesh())
    return stage.scores(torch.tensor([ids], device=stage.device), stage.cache([0], len(ids)))[0]


class Stage:
    """This rank's stage of the model, its transfers to the neighbouring stages, and the sampling functions of the texts."""

    takes_several = False  # whether the model takes a tuple of what the stage before hands on

    def __init__(self, model: nn.Module, mesh: Mesh, choose: Sequence[Choose] = ()):
        self.model, self.mesh = model, mesh
        self.choose = choose
        (self.stage,) = mesh.stages.of_rank(mesh["pp"].rank)
        self.device = next(model.parameters()).device

    def cache(self, starts: Sequence[int], capacity: int) -> KeyValueCache:
        return self.model.context.cache(starts, capacity, self.device)

    def capacity(self, columns: int, most: int) -> int:
        """Columns of a cache for texts of so many, and at most `most`: up to where all keys would have to be rotated
        anew."""
        scalings = [rope.scaling for rope in self.model.config.ropes if rope.scaling is not None]
        ends = [one.changes_after for one in scalings if one.changes_after and columns <= one.changes_after]
        return min([most, *ends])

    @torch.no_grad()
    def scores(self, tokens: Tensor, cache: KeyValueCache) -> Tensor | None:
        """Logits [b, v] of each text's next token, without vocabulary padding, on the last stage; else None. tokens:
        [b, new]"""
        config = self.model.config
        tokens, was_shared = cache.take(tokens), cache.shares
        b, new = tokens.shape
        spec = TensorSpec((new, b, config.hidden_size), config.residual_dtype)
        positions = cache.positions(new)
        scores = self.passed((spec,), lambda: self.model(tokens, positions, cache=cache))
        return cache.of_last_column(scores) if was_shared and scores is not None else scores

    def passed(
        self, boundary: tuple[TensorSpec, ...], forward: Callable[[], Tensor | tuple[Tensor, ...]]
    ) -> Tensor | None:
        """What `scores` says, of this stage's forward between the transfers from the stage before and to the next."""
        stages = self.mesh.stages
        transport = Transport(self.mesh, boundary, self.device, copies_over=self.mesh["tp"])
        if self.stage > 0:
            received = transport.post("forward", stages.ranks[self.stage - 1]).wait()
            self.model.set_input_tensor(received if self.takes_several else received[0])
        with _evaluating(self.model):
            out = forward()
        self.model.set_input_tensor(None)
        if self.stage < stages.last:
            handed_on = out if isinstance(out, tuple) else (out,)
            transport.send("forward", stages.ranks[self.stage + 1], handed_on).wait()
            return None
        return collectives.all_gather(out[:, -1], self.mesh["tp"], dim=-1)[:, : self.model.vocab_size]

    def choose_next(self, tokens: Tensor, cache: KeyValueCache, going: Sequence[bool]) -> list[int]:
        """The next id of each text, on every rank; 0 for a finished text. All ranks of the last stage draw the same ids."""
        model_ranks, error = self.mesh["mp"], None
        scores = self.scores(tokens, cache)
        chosen = [0] * len(going)
        if scores is not None:
            try:
                chosen = [draw(row) if goes else 0 for draw, row, goes in zip(self.choose, scores, going)]
            except Exception as caught:
                error, chosen = caught, [_FAILED] * len(going)
        ids = torch.tensor(chosen, device=self.device)
        chosen = collectives.broadcast(ids, model_ranks, source=self.mesh.reporter("mp")).tolist()
        if _FAILED in chosen:
            with collectives.together(model_ranks, self.device):
                if error is not None:
                    raise error
        return chosen


def text_pieces(tokenizer: Tokenizer, before: Sequence[int], new_ids: Iterable[int]) -> Iterator[str]:
    """The text that `new_ids` append to the ids `before`, in pieces of whole characters.

    A character may take several ids, and the text of an id may depend on earlier ids.
    """
    ids = list(before)
    shown = len(text := tokenizer.detokenize(ids))
    for new in new_ids:
        ids.append(new)
        text = tokenizer.detokenize(ids)
        if not text.endswith(_UNFINISHED):
            yield text[shown:]
            shown = len(text)
    yield text[shown:]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; restores each module's mode. Per forward, since a caller may stop between two
    ids."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
