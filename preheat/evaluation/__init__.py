"""How good a model is: losses of texts and scores of tasks, each with an interval, before and after. Importing this imports no torch.

bootstrap.py      a metric as sums over rows, its interval, and the difference of two
metrics.py        exact match, token F1, numbers, macro F1: plain functions of text
task_rows.py      rows of a task from JSONL, JSON, Parquet, CSV or a `datasets` name
tasks.py          a task's settings (YAML), and those that come with preheat
prompts.py        a row as the text that the model sees
scoring.py        likelihoods of continuations and answers, through a build
run_task.py       a task or a text over a build: its metrics
lm_eval.py        the same build under lm-eval
run_evaluator.py  what a run measures beside its steps

It stands between engine and training, since a run evaluates too; planning and this know nothing of each other.
"""
