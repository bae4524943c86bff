"""Evaluation: what a model's log-probabilities say of it, by the formulas of Megatron's tasks and of lm-evaluation-harness.

    perplexity_and_mean_stderr         means, perplexities and their standard errors, of numbers alone
    tokenize_and_window_requests       texts to requests of token ids: pairs, rolling windows, windows that overlap
    wikitext_detokenizer               the text of WikiText as it was before its tokenization
    eval_task_requests_and_metrics     a data set's requests, and its metrics from their scores
    read_tasks_by_first_line           data files, of several formats, to tasks
    read_simple_harness_yaml           definitions of lm-evaluation-harness to tasks
    results                            the results as JSON in lm-evaluation-harness's shape, and as a table

The scores come from `megatron.core.inference.score`. A new kind of task is a class with `requests` and `metrics`.
"""
