"""Evaluation: what a model's log-probabilities say of it, by the formulas of Megatron's tasks and of lm-evaluation-harness.

    metrics          means, perplexities and their standard errors, of numbers alone
    text_requests    texts to requests of token ids: pairs, rolling windows, windows that overlap
    wikitext         the text of WikiText as it was before its tokenization
    tasks            a data set's requests, and its metrics from their scores
    read_tasks       data files, of several formats, to tasks
    harness_yaml     definitions of lm-evaluation-harness to tasks
    results          the results as JSON in lm-evaluation-harness's shape, and as a table

The scores come from `megatron.core.inference.score`. A new kind of task is a class in `tasks` with `requests` and `metrics`.
"""
