"""Rows against a slow reference that builds each document's labels and positions token by token."""

import pickle

import numpy as np
import pytest

from preheat.data.packing import IGNORED, Rows, Tokens, best_fit, permutation


def documents(seed: int, prompts: bool) -> Tokens:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 23, 60)
    begins = np.array([draw.integers(0, size) for size in sizes]) if prompts else None
    return Tokens(draw.integers(0, 999, sizes.sum()).astype(np.uint16), np.cumsum(sizes), begins)


def reference(tokens: Tokens) -> list[list[tuple[int, int]]]:
    """(token, label) of each document."""
    made, start = [], 0
    for n, end in enumerate(tokens.ends):
        prompt = int(tokens.prompts[n]) if tokens.prompts is not None else 0
        ids = tokens.ids[start:end].tolist()
        made.append([(t, ids[i + 1] if i + 1 < len(ids) and i + 1 >= prompt else IGNORED) for i, t in enumerate(ids)])
        start = end
    return made


def by_document(row, values):
    return [v.tolist() for v in np.split(values, np.cumsum(row.documents)[:-1])]


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("length", [2, 7, 16, 64])
def test_stream_rows_equal_the_reference(length, prompts):
    tokens = documents(length, prompts)
    flat = [(pair, n) for n, document in enumerate(reference(tokens)) for pair in document]
    rows = Rows(tokens, length)
    assert len(rows) == len(flat) // length
    for index in range(len(rows)):
        row, part = rows.row(index), flat[index * length : (index + 1) * length]
        assert list(zip(row.tokens.tolist(), row.labels.tolist(), strict=True)) == [pair for pair, _ in part]
        owners = [n for _, n in part]
        assert row.documents == tuple(owners.count(n) for n in dict.fromkeys(owners))
        assert row.positions.tolist() == [i - owners.index(n) for i, n in enumerate(owners)]
    assert rows.trained_total == sum(int((rows.row(i).labels >= 0).sum()) for i in range(len(rows)))


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("length", [9, 22, 50])
def test_whole_rows_hold_each_example_once_and_uncut(length, prompts):
    tokens = documents(length, prompts)
    rows = Rows(tokens, length, "whole", pad=1000)
    wanted = []
    for n, document in enumerate(reference(tokens)):
        if tokens.prompts is not None and tokens.prompts[n] >= length:
            continue
        cut = document[:length]
        wanted.append([*cut[:-1], (cut[-1][0], IGNORED)])
    found = []
    for index in range(len(rows)):
        row = rows.row(index)
        assert sum(row.documents) == length
        for ids, labels, positions in zip(*(by_document(row, v) for v in row[:3]), strict=True):
            assert positions == list(range(len(ids)))
            if ids[0] == 1000:
                assert set(ids) == {1000}
                assert set(labels) == {IGNORED}
            else:
                found.append(list(zip(ids, labels, strict=True)))
    assert sorted(found) == sorted(wanted)
    assert rows.no_room == 60 - len(wanted)
    assert rows.truncated == sum(
        len(d) > length for n, d in enumerate(reference(tokens)) if tokens.prompts is None or tokens.prompts[n] < length
    )
    assert rows.tokens_total == sum(map(len, wanted))
    assert rows.trained_total == sum(label >= 0 for d in wanted for _, label in d)


def test_best_fit_wastes_little_and_never_overfills():
    sizes = np.random.default_rng(0).integers(1, 257, 5000)
    bins = best_fit(sizes, 256)
    assert sorted(n for b in bins for n in b) == list(range(5000))
    assert max(sizes[b].sum() for b in bins) <= 256
    assert sizes.sum() / (len(bins) * 256) > 0.98


def test_permutation_is_one_and_follows_its_key():
    orders = [permutation(1000, *key) for key in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(o.tolist()) == list(range(1000)) for o in orders)
    assert len({tuple(o.tolist()) for o in orders}) == 3
    assert permutation(6, 0, 0).tolist() == [0, 3, 5, 1, 2, 4]  # pinned: a resumed run depends on it


def test_rows_on_disk_travel_as_a_path(tmp_path):
    tokens = documents(0, True)
    tokens.ids.tofile(tmp_path / "train.uint16")
    np.save(tmp_path / "train-ends.npy", tokens.ends)
    np.save(tmp_path / "train-prompts.npy", tokens.prompts)
    rows = Rows(Tokens.open(tmp_path, "train"), 16)
    sent = pickle.dumps(rows)
    assert len(sent) < 1500
    for a, b in zip(pickle.loads(sent).row(3), Rows(tokens, 16).row(3), strict=True):
        np.testing.assert_array_equal(a, b)
