"""Rows against a slow reference that builds each document's labels and positions token by token."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from preheat.data.packing import IGNORED, Rows, Tokens, cut, pack_best_fit, permutation


def documents(seed: int, masked: bool) -> Tokens:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 23, 60)
    trained = (draw.random(sizes.sum()) < 0.3).astype(np.uint8) if masked else None
    return Tokens(draw.integers(0, 999, sizes.sum()).astype(np.uint16), np.cumsum(sizes), trained)


def reference(tokens: Tokens) -> list[list[tuple[int, int]]]:
    """(token, label) of each document."""
    made, start = [], 0
    for end in tokens.offsets:
        ids = tokens.ids[start:end].tolist()
        on = tokens.loss_mask[start:end].tolist() if tokens.loss_mask is not None else [1] * len(ids)
        made.append([(t, ids[i + 1] if i + 1 < len(ids) and on[i + 1] else IGNORED) for i, t in enumerate(ids)])
        start = end
    return made


def by_document(row, values):
    return [v.tolist() for v in np.split(values, np.cumsum(row.documents)[:-1])]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [2, 7, 16, 64])
def test_stream_rows_equal_the_reference(length, masked):
    tokens = documents(length, masked)
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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [9, 22, 50])
def test_whole_rows_hold_each_example_once_and_uncut(length, masked):
    tokens = documents(length, masked)
    rows = Rows(tokens, length, "whole", pad=1000)
    wanted = []
    for document in reference(tokens):
        cut = [*document[: length - 1], (document[:length][-1][0], IGNORED)] if len(document) >= length else document
        if tokens.loss_mask is None or any(label >= 0 for _, label in cut):
            wanted.append(cut)
    found = []
    for index in range(len(rows)):
        row = rows.row(index)
        assert sum(row.documents) == length
        blank = row.padding if row.padding is not None else np.zeros(length, bool)
        assert blank.tolist() == (row.tokens == 1000).tolist()
        for ids, labels, positions in zip(*(by_document(row, v) for v in row[:3]), strict=True):
            assert positions == list(range(len(ids)))
            if ids[0] == 1000:
                assert set(ids) == {1000}
                assert set(labels) == {IGNORED}
            else:
                found.append(list(zip(ids, labels, strict=True)))
    assert sorted(found) == sorted(wanted)
    assert rows.no_room == 60 - len(wanted)
    lost = [
        d
        for d in reference(tokens)
        if tokens.loss_mask is not None and not any(label >= 0 for _, label in d[: length - 1])
    ]
    assert rows.truncated == sum(len(d) > length for d in reference(tokens)) - sum(len(d) > length for d in lost)
    assert rows.tokens_total == sum(map(len, wanted))
    assert rows.trained_total == sum(label >= 0 for d in wanted for _, label in d)


def test_what_is_compared_stands_side_by_side_and_is_cut_alike():
    sizes = np.array([3, 4, 9, 2, 5, 5])  # three pairs
    tokens = Tokens(np.arange(1, 29), np.cumsum(sizes), np.tile([0, 1, 1, 1], 7).astype(np.uint8), group=2)
    rows = Rows(tokens, 10, "whole")
    pairs = {(a, b) for i in range(len(rows)) for a, b in zip(*[iter(rows.row(i).documents)] * 2, strict=False)}
    assert pairs == {(3, 4), (5, 2), (5, 5)}, "of 9 + 2 tokens each is cut to half a row"
    assert rows.truncated == 1
    assert rows.trained_total == sum(int((rows.row(i).labels >= 0).sum()) for i in range(len(rows)))
    nothing = Tokens(tokens.ids, tokens.offsets, np.r_[np.zeros(3), np.ones(25)].astype(np.uint8), group=2)
    assert Rows(nothing, 10, "whole").no_room == 1, "one of the two has nothing to train on: the pair goes"


def test_padding_stays_marked_in_rows_cut_to_other_lengths():
    rows = Rows(documents(3, False), 50, "whole", pad=1000)
    pieces = cut([rows.row(n) for n in range(len(rows))], 32, pad=1000)
    blank = [np.zeros(32, bool) if piece.padding is None else piece.padding for piece in pieces]
    assert np.array_equal(np.stack(blank), np.stack([piece.tokens == 1000 for piece in pieces]))
    assert 0 < np.sum(blank) == len(pieces) * 32 - rows.tokens_total


@pytest.mark.parametrize(("packing", "partial"), [("stream", False), ("stream", True), ("whole", False)])
def test_every_token_keeps_its_source(packing, partial):
    # Tokens of three sources, the second of which has no document: 1, 2, 3, ... and then 101, 102, 103, ...
    sizes = np.array([5, 30, 9, 14, 3, 41])
    ids = np.concatenate([np.arange(1, 45), np.arange(101, 159)]).astype(np.uint16)
    rows = Rows(Tokens(ids, np.cumsum(sizes), source_ends=(3, 3, 6)), 44, packing, partial=partial)
    rows = pickle.loads(pickle.dumps(rows))
    read = [rows.row(n) for n in range(len(rows))]
    for row in [*read, *cut(read, 10), *cut(read, 10, skip=3)]:
        assert row.sources.dtype == np.int16
        expected = np.where(row.tokens > 100, 2, 0)
        assert np.array_equal(row.sources, expected), "0 at padding too"
    assert Rows(Tokens(ids, np.cumsum(sizes)), 44, packing).row(0).sources is None


def test_a_class_is_the_label_of_the_last_place():
    tokens = Tokens(np.arange(1, 13), np.array([3, 12]), labels=np.array([7, 0]))
    rows = Rows(tokens, 6, "whole")
    found = {int(row.tokens[0]): row.labels.tolist() for row in (rows.row(i) for i in range(len(rows)))}
    assert found == {1: [-100, -100, 7, -100, -100, -100], 4: [-100, -100, -100, -100, -100, 0]}
    assert rows.trained_total == 2


def test_best_fit_wastes_little_and_never_overfills():
    sizes = np.random.default_rng(0).integers(1, 257, 5000)
    bins = pack_best_fit(sizes, 256)
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
    np.save(tmp_path / "train-ends.npy", tokens.offsets)
    tokens.loss_mask.tofile(tmp_path / "train.trained")
    rows = Rows(Tokens.open(tmp_path, "train"), 16)
    sent = pickle.dumps(rows)
    assert len(sent) < 1500
    for a, b in zip(pickle.loads(sent).row(3), Rows(tokens, 16).row(3), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_that_were_read_do_not_stay_resident(tmp_path):
    np.arange(2**20, dtype=np.uint32).tofile(tmp_path / "train.uint32")
    np.ones(2**20, np.uint8).tofile(tmp_path / "train.trained")
    np.save(tmp_path / "train-ends.npy", np.array([2**20]))
    rows = Rows(Tokens.open(tmp_path, "train"), 1024)

    def resident() -> int:
        regions = Path("/proc/self/smaps").read_text().split("VmFlags:")
        return sum(int(region.split("Rss:")[1].split()[0]) for region in regions if f"{tmp_path}/" in region)

    assert rows.tokens.ids.sum() > 0
    assert resident() >= 4096  # KiB: reading the array itself maps all of it
    assert [rows.row(n).tokens[0] for n in (0, 512, 1023)] == [0, 512 * 1024, 1023 * 1024]
    assert resident() == 0
