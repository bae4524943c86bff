"""Figures of lm-evaluation-harness's Hugging Face backend and of our adapter, of the same folder and definitions. Run with lm_eval.

    python tests/support/lm_eval_compare.py FOLDER          writes a random Llama and its tokenizer into FOLDER, and compares

Prints a JSON object: the figures of both by task and metric, and the largest difference of a request's log-likelihood.
"""

import json
import os
import random
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron.convert import open_any
from megatron.core.inference import load_gpt, read_saved_settings
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.tokenizers import build_tokenizer
from megatron.evaluation.tokenize_and_window_requests import TextEncoder
from tools.evaluating.lm_eval_adapter import MegatronLM
from tools.evaluating.model import EvaluatedModel

WORDS = [
    "the",
    "a",
    "of",
    "in",
    "tensor",
    "pipeline",
    "stage",
    "rank",
    "layer",
    "model",
    "train",
    "token",
    "loss",
    "step",
    "gradient",
    "parallel",
    "window",
    "batch",
    "and",
    "it",
    "is",
    "to",
    "naïve",
    "grüße",
    "日本",
    "word",
    "with",
    "over",
    "under",
    "between",
    "before",
    "after",
    "first",
    "last",
    "every",
    "each",
    "12",
    "345",
    ",",
    ".",
    ";",
    "(",
    ")",
    "\n",
]


def text(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def write_folder(folder: Path, *, hidden: int = 32, layers: int = 2, vocab: int = 400, length: int = 128) -> None:
    """Write a Llama of random weights, with scores of some width, and a byte-level tokenizer."""
    rng = random.Random(7)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text(rng, 20, 40) for _ in range(200)], trainer)
    end = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **end, model_max_length=length).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=length,
        initializer_range=0.1 if hidden < 128 else 0.02,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def definitions(folder: Path, samples: int) -> list[dict]:
    """Local files, and definitions of three tasks over them in the form of arc_easy, lambada_openai and wikitext."""
    rng = random.Random(3)
    files = {
        "choices": [
            {
                "question": text(rng, 1, 60),
                "options": [text(rng, 1, 8) for _ in range(rng.randint(2, 5))],
                "answer": rng.randint(0, 1),
            }
            for _ in range(samples)
        ],
        "words": [{"text": text(rng, 2, 60) + " end"} for _ in range(samples)],
        "pages": [{"page": text(rng, 30, 300)} for _ in range(samples // 5)],
    }
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def task(name: str, **more: object) -> dict:
        data = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
        return {"task": f"local_{name}", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **more}

    def metrics(*names: str) -> list[dict]:
        aggregations = {"perplexity": {"aggregation": "perplexity", "higher_is_better": False}}
        return [{"metric": name, **aggregations.get(name, {})} for name in names]

    texts = {"until": [",", "over"], "max_gen_toks": 12, "do_sample": False}
    return [
        task(
            "choices",
            output_type="multiple_choice",
            doc_to_text="Question: {{question}}\nAnswer:",
            doc_to_choice="{{options}}",
            doc_to_target="answer",
            metric_list=metrics("acc", "acc_norm", "acc_bytes"),
        ),
        task(
            "words",
            output_type="loglikelihood",
            doc_to_text="{{text.split(' ')[:-1]|join(' ')}}",
            doc_to_target="{{' '+text.split(' ')[-1]}}",
            metric_list=metrics("perplexity", "acc"),
        ),
        task(
            "pages",
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{page}}",
            metric_list=metrics("word_perplexity", "byte_perplexity", "bits_per_byte"),
        ),
        task(
            "words",
            output_type="generate_until",
            doc_to_text="{{text[:40]}}",
            doc_to_target="{{text}}",
            generation_kwargs=texts,
            metric_list=metrics("exact_match"),
        )
        | {"task": "local_texts"},
    ]


def our_model(folder: Path, max_length: int) -> MegatronLM:
    """The folder as the adapter asks it, one process."""
    checkpoint = open_any(folder)
    saved = read_saved_settings(checkpoint.state, str(folder))
    sizes = {"vocab_size": saved.vocab_size, "positions": saved.positions}
    stage = load_gpt(checkpoint, saved.transformer, **sizes, restarts_positions=True)
    evaluated = EvaluatedModel(stage, single_rank_mesh(), max_length, 2048)
    return MegatronLM(evaluated, TextEncoder(build_tokenizer(saved.tokenizer)))


class Recorded:
    """What a backend answers, by request."""

    def __init__(self, backend: object):
        self.answers: list[list[tuple[float, bool]]] = []
        score = backend._loglikelihood_tokens

        def recording(requests: list, **options: object) -> list[tuple[float, bool]]:
            answers = score(requests, **options)
            self.answers.append([*answers])
            return answers

        backend._loglikelihood_tokens = recording
        self.texts: list[str] = []
        generate = backend.generate_until

        def recording_texts(requests: list, **options: object) -> list[str]:
            self.texts = generate(requests, **options)
            return self.texts

        backend.generate_until = recording_texts


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    write_folder(folder)
    backends = {
        "hf": HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=8),
        "megatron": our_model(folder, 128),
    }
    said: dict[str, dict] = {}
    answers = {}
    texts = {}
    for name, backend in backends.items():
        recorded = Recorded(backend)
        options = {"task_manager": TaskManager(include_defaults=False), "log_samples": False, "bootstrap_iters": 0}
        results = lm_eval.simple_evaluate(model=backend, tasks=definitions(folder, 60), **options)["results"]
        said[name] = {
            task: {key: value for key, value in values.items() if isinstance(value, float) and "stderr" not in key}
            for task, values in results.items()
        }
        # both kinds of task answer in the order of the requests; rolling windows are not compared one by one
        answers[name] = recorded.answers
        texts[name] = recorded.texts
    by_request = {name: [pair for call in calls[:1] for pair in call] for name, calls in answers.items()}
    differences = [abs(a - b) for (a, _), (b, _) in zip(by_request["hf"], by_request["megatron"], strict=True)]
    greedy = {name: [pair[1] for pair in pairs] for name, pairs in by_request.items()}
    said["likelihoods"] = {"requests": len(differences), "largest difference": max(differences)}
    said["greedy"] = {"equal": greedy["hf"] == greedy["megatron"], "share": sum(greedy["hf"]) / len(greedy["hf"])}
    equal = sum(a == b for a, b in zip(texts["hf"], texts["megatron"], strict=True))
    said["texts"] = {"equal": equal, "of": len(texts["hf"]), "different ones": len(set(texts["hf"]))}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
