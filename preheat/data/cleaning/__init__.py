"""Cleaning of rows by the recipe's `data.clean`. Importing this imports no torch.

quality.py      published quality rules: each measures a text and has a threshold
personal.py     e-mail addresses, telephone numbers, IP addresses, card numbers and IBANs
overlap.py      sequences of words that rows share with evaluation data
duplicates.py   exact and near duplicates
corpus.py       applies all of these to the sources, with counts; cached
"""
