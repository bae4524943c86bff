"""EleutherAI's lm-evaluation-harness over our models, in this process: its tasks, our scores. Needs the package lm_eval.

    lm = MegatronLM(model, encoder)                             as an `lm_eval.api.model.TemplateLM`
    lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"])      every rank, with the same arguments

In a layout of several ranks every rank runs the harness, with the same requests: they follow from the tasks and its seeds.
Log-likelihoods are computed together by all ranks, and texts by the ranks of each replica for a part of the prompts.
"""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import make_table

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.inference import chooser
from megatron.core.inference.generate import generate_batch
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel import collectives
from megatron.core.sharding.initial_values import seed_of
from megatron.evaluation.tokenize_and_window_requests import TextEncoder, rolling_windows
from tools.evaluating.model import EvaluatedModel

_MAX_GEN_TOKS = 256  # new tokens of a text whose task does not say how many, as the harness's other models have it
_TEXTS_AT_ONCE = 16
_NAMES_OF_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class MegatronLM(TemplateLM):
    """A model of ours for lm-evaluation-harness: `loglikelihood`, `loglikelihood_rolling`, `generate_until`.

    model: this rank's stage; encoder: its tokenizer. Every rank must make one and call alike. Chat templates are not
    applied: `--apply_chat_template` raises NotImplementedError.
    """

    def __init__(self, model: EvaluatedModel, encoder: TextEncoder, *, is_first: bool = True):
        super().__init__()
        self.model = model
        self.encoder = encoder
        self.is_first = is_first  # prints

    @property
    def eot_token_id(self) -> int:
        eod = self.encoder.tokenizer.eod
        return self.encoder.prefix_id if eod is None else eod

    @property
    def prefix_token_id(self) -> int:
        return self.encoder.prefix_id

    @property
    def max_length(self) -> int:
        return self.model.max_length

    @property
    def max_gen_toks(self) -> int:
        return _MAX_GEN_TOKS

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.encoder.tokenizer, "path", self.encoder.tokenizer.name)).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness writes beside the results."""
        parameters = sum(parameter.numel() for parameter in self.model.stage.parameters())
        return {"model_num_parameters_of_rank": parameters, "model_dtype": str(self.model.dtype)}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.encoder.encode(string, special=add_special_tokens is not False)

    # ---------------------------------------------------------------- log-likelihoods

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scores = self.model.score([(context, continuation) for _, context, continuation in requests], self._log)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows = []
        text_of_window = []
        for number, (text,) in enumerate(request.args for request in requests):
            of_text = list(rolling_windows(self.tok_encode(text), self.prefix_token_id, self.max_length))
            windows += of_text
            text_of_window += [number] * len(of_text)
        sums = [0.0] * len(requests)
        for number, score in zip(text_of_window, self.model.score(windows, self._log), strict=True):
            sums[number] += score.logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    # ---------------------------------------------------------------- texts

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        samples = self.model.mesh.samples
        device = next(self.model.stage.parameters()).device
        own = range(samples.rank, len(requests), samples.size)

        # prompts of equal settings share batches
        by_settings: dict[str, list[int]] = {}
        for number in own:
            settings = json.dumps(requests[number].args[1], sort_keys=True, default=str)
            by_settings.setdefault(settings, []).append(number)
        texts: dict[int, str] = {}
        for numbers in by_settings.values():
            for first in range(0, len(numbers), _TEXTS_AT_ONCE):
                batch = numbers[first : first + _TEXTS_AT_ONCE]
                prompts = [requests[number].args[0] for number in batch]
                texts |= zip(batch, self._generate(batch, prompts, dict(requests[batch[0]].args[1])), strict=True)

        # every rank needs all texts
        for of_replica in collectives.all_gather_texts(json.dumps(list(texts.items())), samples, device):
            texts |= dict(json.loads(of_replica))
        return [texts[number] for number in range(len(requests))]

    def _generate(self, numbers: list[int], prompts: list[str], settings: dict[str, Any]) -> list[str]:
        """Return what follows each prompt, up to the first of its stop texts. numbers: of the prompts, which seed sampling."""
        until = settings.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        given = [settings.pop(name, None) for name in _NAMES_OF_NEW_TOKENS]
        max_new_tokens = next((count for count in given if count is not None), _MAX_GEN_TOKS)
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"a task asks for {max_new_tokens} new tokens, and the model sees {self.max_length} at once; raise --max-length"
            )

        # greedy unless the task asks for samples
        temperature = settings.pop("temperature", 0.0) or 0.0
        do_sample = settings.pop("do_sample", temperature > 0)
        if do_sample and temperature > 0:
            sampling = SamplingConfig(
                temperature=temperature, top_k=settings.pop("top_k", 0), top_p=settings.pop("top_p", 0.0)
            )
        else:
            sampling = SamplingConfig(greedy=True)
        choose = [
            chooser(sampling, torch.Generator().manual_seed(seed_of(1234, "lm_eval", number, 0))) for number in numbers
        ]

        steps = generate_batch(
            self.model.stage,
            [(self.tok_encode(prompt) or [self.prefix_token_id])[-room:] for prompt in prompts],
            max_new_tokens=max_new_tokens,
            max_length=self.max_length,
            stop_id=self.eot_token_id,
            choose=choose,
            mesh=self.model.mesh,
        )
        ids: list[list[int]] = [[] for _ in prompts]
        texts = [""] * len(prompts)
        ended = [False] * len(prompts)
        for step in steps:
            for row, new_id in enumerate(step):
                if ended[row] or new_id is None:
                    ended[row] = True
                    continue
                ids[row].append(new_id)
                texts[row] = self.encoder.text(ids[row])
                ended[row] = any(stop and stop in texts[row] for stop in until)
            if all(ended):
                break
        for stop in filter(None, until):
            texts = [text.split(stop)[0] for text in texts]
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        raise NotImplementedError("chat templates are not applied here; leave out apply_chat_template")

    def _log(self, text: str) -> None:
        if self.is_first:
            logging.getLogger("lm_eval").info(text)


def run_lm_eval(
    model: EvaluatedModel,
    encoder: TextEncoder,
    tasks: Sequence[str],
    num_fewshot: int | None,
    limit: int | None,
    *,
    is_first: bool,
) -> tuple[dict[str, Any], str]:
    """Run tasks of the harness; return its results and their table. Every rank must call. Raises ConfigError.

    tasks: names of its catalogue, or paths of definitions.
    """
    manager = TaskManager()
    chosen: list[Any] = []
    for task in tasks:
        if Path(task).suffix in (".yaml", ".yml"):
            if not Path(task).is_file():
                raise ConfigError(f"--lm-eval-tasks {task}: there is no such file")
            chosen.append(load_yaml(task, resolve_func=True))
        elif manager.match_tasks([task]):
            chosen.append(task)
        else:
            raise ConfigError(
                f"--lm-eval-tasks {task}: lm-evaluation-harness has no such task; `lm-eval ls tasks` lists them"
            )
    with _silent(not is_first), warnings.catch_warnings():
        results = lm_eval.simple_evaluate(
            model=MegatronLM(model, encoder, is_first=is_first),
            tasks=chosen,
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=False,
            bootstrap_iters=1000,
            task_manager=manager,
        )
    if results is None:  # only the first process of a machine has them
        return {}, ""
    printed = make_table(results)
    if results.get("groups"):
        printed += "\n" + make_table(results, "groups")
    return json.loads(json.dumps(results, default=str)), printed


@contextlib.contextmanager
def _silent(is_silent: bool) -> Iterator[None]:
    """Print nothing in the block: one rank of several does."""
    if not is_silent:
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield
