"""BERT: against transformers' Megatron BERT, and every layout against one process."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from local_ranks import run_ranks
from tiny_bert import BERT, CONFIGS, SHARED_BERT, make, sample
from tiny_run import SEQ, TINY_GPT2, VOCAB, Layout, Outcome, Texts, assert_equal, run
from torch import Tensor
from torch.nn import functional

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_parallel_context import LayerContext

MICROBATCH = (
    2  # samples: the mean over a microbatch's masked words is no mean over all, so that all layouts must agree on it
)
OVERLAP = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=1500)
ZERO = replace(OVERLAP, use_distributed_optimizer=True, overlap_param_gather=True)
LAYOUTS = [
    Layout(tp=2, m=4),
    Layout(tp=2, sp=True, m=4),
    Layout(tp=4, sp=True, m=4, recompute="selective", delayed=True),
    Layout(pp=2, m=4),
    Layout(pp=4, m=4, schedule="zb-h1"),
    Layout(pp=2, v=2, m=4, schedule="interleaved", recompute="uniform 1"),
    Layout(dp=4, m=1, data_parallel=OVERLAP, delayed=True),
    Layout(dp=2, m=2, data_parallel=ZERO, delayed=True),
    Layout(tp=2, sp=True, pp=2, dp=2, m=2, delayed=True),
    Layout(tp=2, sp=True, pp=2, dp=2, m=2, schedule="zb-h1", data_parallel=ZERO, delayed=True),
    Layout(dp=2, m=2, data_parallel=DataParallelConfig(zero_stage=3), delayed=True),
    Layout(
        tp=2, sp=True, pp=2, dp=2, m=2, schedule="zb-h1", data_parallel=DataParallelConfig(zero_stage=2), delayed=True
    ),
    Layout(tp=2, pp=2, v=2, dp=2, m=2, schedule="interleaved", data_parallel=OVERLAP, recompute="block 1"),
    Layout(tp=2, sp=True, pp=2, v=2, dp=2, m=2, schedule="zb-v", data_parallel=ZERO, recompute="uniform 1"),
]


@cache
def one_process(name: str) -> Outcome:
    return run(CONFIGS[name], Layout(m=4), global_batch=4 * MICROBATCH, subject=BERT)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[pytest.mark.full] * (i % 3 > 0 or x.v > 1)) for i, x in enumerate(LAYOUTS)],
    ids=str,
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n != "bert")) for n in CONFIGS])
def test_every_layout_equals_one_process(name: str, layout: Layout):
    got = run(CONFIGS[name], layout, global_batch=4 * MICROBATCH, subject=BERT)
    assert_equal(got, one_process(name), 1e-10)


KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
ZERO_2 = DataParallelConfig(zero_stage=2, overlap_grad_reduce=True, ddp_bucket_size=1500)
SHARED = {
    **{kind: Layout(cp=2, cp_heads=2, cp_types=(kind,), m=2) for kind in KINDS},
    "mixed": Layout(
        tp=2, sp=True, pp=2, cp=2, cp_heads=2, cp_types=KINDS, m=2, schedule="zb-h1", data_parallel=ZERO_2, delayed=True
    ),
    "of 4": Layout(cp=4, dp=2, m=2, recompute="uniform 2", data_parallel=DataParallelConfig(zero_stage=3)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ["p2p", *(pytest.param(n, marks=pytest.mark.full) for n in SHARED if n != "p2p")])
def test_a_shared_text_gives_the_numbers_of_one_process(name: str):
    """Padding, attention to both sides, the first token's order of sentences, and dropout, under context parallelism."""
    got = run(CONFIGS["bert"], SHARED[name], steps=1, global_batch=4 * MICROBATCH, subject=SHARED_BERT)
    assert_equal(got, sums_of_one_process(), 1e-10)


@cache
def sums_of_one_process() -> Outcome:
    return run(CONFIGS["bert"], Layout(m=4), steps=1, global_batch=4 * MICROBATCH, subject=SHARED_BERT)


def whole_model(config, **more) -> BertModel:
    """The model of one process, with its initial weights."""

    def work(mesh):
        parts = {
            "vocab_size": VOCAB,
            "layers": range(config.num_layers),
            "context": LayerContext.from_mesh(mesh, config.params_dtype),
        }
        model = make(config, **parts, **more)
        initialize_parameters(model, 1, mesh)
        return model.eval()

    return run_ranks({}, work)[0]


def test_scores_and_gradients_equal_transformers_megatron_bert():
    transformers = pytest.importorskip("transformers")
    h, config = (
        TINY_GPT2.hidden_size,
        transformers.MegatronBertConfig(
            vocab_size=VOCAB,
            hidden_size=TINY_GPT2.hidden_size,
            num_hidden_layers=TINY_GPT2.num_layers,
            num_attention_heads=4,
            intermediate_size=4 * TINY_GPT2.hidden_size,
            hidden_act="gelu_new",
            max_position_embeddings=SEQ,
            layer_norm_eps=TINY_GPT2.norm_epsilon,
        ),
    )
    theirs = transformers.MegatronBertForPreTraining(config).double().eval()
    mine, own = whole_model(TINY_GPT2), {}
    for name, p in mine.named_parameters():
        with torch.no_grad():  # biases and norms that are not zero and one
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)), dtype=p.dtype) * 0.05)
        own[name] = p
    for name, p in theirs.named_parameters():
        p.data.copy_(own_tensor(name, lambda n: own[n].data, h)[: p.shape[0]])
    rows = [sample(number, Texts()) for number in range(3)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    losses, order = mine(batch["text"], batch["padding_mask"], batch["types"], batch["labels"])
    (
        (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        + functional.cross_entropy(order, batch["is_random"])
    ).backward()
    result = theirs(
        batch["text"],
        attention_mask=batch["padding_mask"],
        token_type_ids=batch["types"],
        labels=torch.where(batch["loss_mask"] > 0, batch["labels"], -100),
        next_sentence_label=batch["is_random"],
    )
    result.loss.backward()
    torch.testing.assert_close(order, result.seq_relationship_logits, rtol=1e-10, atol=1e-10)
    for name, p in theirs.named_parameters():
        got = own_tensor(name, lambda n: own[n].grad, h)[: p.shape[0]]
        torch.testing.assert_close(got, p.grad, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def own_tensor(name: str, of, h: int) -> Tensor:
    """What transformers calls `name`, in the fused tensors of ours: of(our name) -> tensor."""
    stem, kind = name.rsplit(".", 1)
    model, heads = "language_model.", {"query": 0, "key": 1, "value": 2}
    tables = {"word": "word_embeddings", "position": "position_embeddings", "token_type": "tokentype_embeddings"}
    if stem.startswith("bert.embeddings."):
        return of(f"{model}embedding.{tables[stem.split('.')[-1].removesuffix('_embeddings')]}.weight")
    if ".layer." in stem:
        layer, part = stem.split(".layer.")[1].split(".", 1)
        ours = f"{model}decoder.layers.{layer}."
        if part.startswith("attention.self."):
            fused = of(f"{ours}self_attention.linear_qkv.{kind}")  # per head: query, key, value
            return fused.view(4, 3, h // 4, *fused.shape[1:])[:, heads[part.split(".")[-1]]].reshape(
                h, *fused.shape[1:]
            )
        return of(
            ours
            + {
                "attention.ln": "input_layernorm",
                "attention.output.dense": "self_attention.linear_proj",
                "ln": "pre_mlp_layernorm",
                "intermediate.dense": "mlp.linear_fc1",
                "output.dense": "mlp.linear_fc2",
            }[part]
            + f".{kind}"
        )
    return of(
        {
            "bert.encoder.ln": f"{model}decoder.final_layernorm",
            "bert.pooler.dense": "pooler.dense",
            "cls.predictions.transform.dense": "lm_head.dense",
            "cls.predictions.transform.LayerNorm": "lm_head.norm",
            "cls.predictions": "word_bias",
            "cls.predictions.decoder": "word_bias",
            "cls.seq_relationship": "binary_head",
        }[stem]
        + f".{kind}"
    )


def test_padding_changes_nothing():
    """A sample alone, and the same with words behind it that are padding."""
    model = whole_model(TINY_GPT2)
    row = {key: value[None] for key, value in sample(3, Texts()).items() if value.dim()}
    length = int(row["padding_mask"].sum())
    assert length < SEQ
    short, short_order = model(row["text"][:, :length], row["padding_mask"][:, :length], row["types"][:, :length])
    for filler in (0, 7):
        row["text"][:, length:] = filler
        scores, order = model(row["text"], row["padding_mask"], row["types"])
        torch.testing.assert_close(scores[:, :length], short, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(order, short_order, rtol=1e-12, atol=1e-12)


def test_both_sides_are_looked_at():
    """A word changes the scores before it and behind it: this is no causal model."""
    model = whole_model(TINY_GPT2)
    row = {key: value[None] for key, value in sample(3, Texts()).items() if value.dim()}
    everything = torch.ones_like(row["text"])
    before, _ = model(row["text"], everything, row["types"])
    row["text"][0, SEQ // 2] = (row["text"][0, SEQ // 2] + 1) % VOCAB
    after, _ = model(row["text"], everything, row["types"])
    assert bool(((before - after).abs().amax(dim=-1) > 0).all())


def test_without_a_binary_head_there_is_no_second_answer():
    model = whole_model(TINY_GPT2, add_binary_head=False)
    _, order = model(torch.zeros(1, SEQ, dtype=torch.long), torch.ones(1, SEQ), torch.zeros(1, SEQ, dtype=torch.long))
    assert order is None and model.pooler is None
