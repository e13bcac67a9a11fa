"""Model evaluation: losses of texts and scores of tasks with confidence intervals, before and after training.

Importing this package does not import torch.

bootstrap.py      metrics as sums over rows, their intervals, and differences of two
metrics.py        exact match, token F1, numbers, macro F1: plain functions of text
tasks.py          a task's settings (YAML), and those that come with preheat
prompts.py        a task's rows from a file or a `datasets` name, and their prompts
scoring.py        likelihoods of continuations and greedy answers of a build
run_task.py       metrics of a task
lm_eval.py        a build as a model of lm-eval
run_evaluator.py  evaluations during a run

The package is a layer between engine and training, because runs evaluate, too; it is independent of planning.
"""
