"""The order of samples: a pure function of seed, samples committed and shape, at any number of workers."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from preheat.core import Shape
from preheat.data import loader
from preheat.data.loader import batches, evaluation_batches, sample_rows
from preheat.data.packing import Rows, Tokens
from preheat.errors import RunError


@pytest.fixture
def rows():
    ends = np.cumsum(np.random.default_rng(1).integers(1, 9, 40))
    ids = np.arange(ends[-1]).astype(np.uint16)
    rows = Rows(Tokens(ids, ends), 8)
    assert len(rows) > 15
    return rows


def growing(step: int) -> Shape:
    return Shape(4, 8, 3) if step < 2 else Shape(7, 8, 2)


def take(rows, count, *, step=0, committed=0, workers=0, seed=3, shape=growing):
    source = batches(rows, seed=seed, committed=committed, step=step, shape=shape, workers=workers)
    made = [next(source) for _ in range(count)]
    source.close()
    return made


def flat(steps):
    return [
        (b.rows, b.tokens.tolist(), b.labels.tolist(), b.positions.tolist(), b.mask, b.weight)
        for step in steps
        for b in step
    ]


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_resuming_gives_what_an_uninterrupted_run_gives(rows, workers):
    whole = take(rows, 7)
    assert [len(step) for step in whole] == [2, 2, 4, 4, 4, 4, 4]
    assert flat(take(rows, 7, workers=workers)) == flat(whole)
    for step, committed in ((1, 4), (3, 15), (5, 29)):
        assert flat(take(rows, 7 - step, step=step, committed=committed, workers=workers)) == flat(whole[step:])
    assert flat(take(rows, 2, step=1, committed=4, seed=4)) != flat(whole[1:3])


def test_an_epoch_has_every_row_once_and_the_next_another_order(rows):
    total = len(rows)
    epochs = [sample_rows(total, 5, e * total, total) for e in range(2)]
    assert [sorted(e) for e in epochs] == [list(range(total))] * 2
    assert epochs[0] != epochs[1]
    assert sample_rows(total, 5, total - 2, 4) == epochs[0][-2:] + epochs[1][:2]


def test_a_batch_holds_its_rows(rows):
    batch = take(rows, 1)[0][0]
    for place, index in enumerate(batch.rows):
        row = rows.row(index)
        assert batch.tokens[place].tolist() == row.tokens.tolist()
        assert batch.mask.documents[place] == row.documents
    assert batch.tokens.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
    assert batch.weight == int((batch.labels != -100).sum())
    assert batch.padding is None


def test_padding_is_that_of_the_rows_and_all_of_a_device_without_rows():
    rows = Rows(Tokens(np.arange(20).astype(np.uint16), np.array([5, 9, 15, 20])), 8, "whole", pad=99)
    shape = Shape(3, 8, 1)
    steps = [next(batches(rows, seed=0, committed=0, shape=lambda _: shape, share=(n, 2))) for n in range(2)]
    assert [len(step) for step in steps] == [2, 2]
    assert [b.weight > 0 for step in steps for b in step].count(False) == 1
    for batch in (b for step in steps for b in step):
        assert batch.padding is not None
        assert torch.equal(batch.padding, batch.tokens == 99 if batch.weight else torch.ones(1, 8, dtype=torch.bool))


def test_workers_leave_the_generators_alone_and_end_with_the_iterator(rows):
    torch.manual_seed(0)
    np_state, state = np.random.get_state()[1].copy(), torch.get_rng_state()
    source = batches(rows, seed=0, committed=0, shape=growing, workers=2)
    next(source)
    children = multiprocessing.active_children()
    assert len(children) == 2
    for child in children:  # as Ctrl-C does: the main process decides when its workers end
        os.kill(child.pid, signal.SIGINT)
    for _ in range(5):
        next(source)
    del child, children
    del source
    gc.collect()
    until = time.time() + 10
    while multiprocessing.active_children() and time.time() < until:
        time.sleep(0.02)
    assert not multiprocessing.active_children()
    assert torch.equal(state, torch.get_rng_state())
    assert (np_state == np.random.get_state()[1]).all()


KILLED = """
import multiprocessing, os, numpy, sys
from preheat.data.loader import batches
from preheat.data.packing import Rows, Tokens
from preheat.core import Shape
if __name__ == "__main__":
    source = batches(Rows(Tokens(numpy.arange(64), numpy.array([64])), 8), seed=0, committed=0, shape=lambda n: Shape(2, 8, 1), workers=2)
    next(source)
    print(*(child.pid for child in multiprocessing.active_children()), file=open(sys.argv[1], "w"))
    os.kill(os.getpid(), 9)
"""


def test_workers_end_when_the_main_process_is_killed(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    here = {**os.environ, "PYTHONPATH": os.getcwd()}
    assert (
        subprocess.run([sys.executable, tmp_path / "killed.py", tmp_path / "pids"], env=here, check=False).returncode
        == -9
    )
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    until = time.time() + 10
    while any(alive(p) for p in pids) and time.time() < until:
        time.sleep(0.05)
    assert not any(alive(p) for p in pids)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_evaluation_reads_rows_of_the_whole_split_in_order(rows):
    made = list(evaluation_batches(rows, micro=3, limit=7))
    numbers = [n for b in made for n in b.rows]
    assert [len(b.rows) for b in made] == [3, 3, 1]
    assert numbers == sorted(set(numbers))
    assert np.ptp(np.diff([*numbers, len(rows)])) <= 1, (
        "a few rows stand for all: the first ones are of the first files alone"
    )
    assert [len(b.rows) for b in evaluation_batches(rows, micro=64, limit=10**6)] == [len(rows)]


@pytest.mark.parametrize(
    ("number", "how"), [(9, "was ended by SIGKILL"), (19, "returned nothing for 2 s, and was ended,")]
)
def test_a_reader_that_ends_or_hangs_is_one_line(rows, monkeypatch, number, how):
    monkeypatch.setattr(loader, "PATIENCE", 1.5)
    source = batches(rows, seed=3, committed=0, shape=growing, workers=2)
    next(source)
    readers = multiprocessing.active_children()
    for reader in readers:
        os.kill(reader.pid, number)
    with pytest.raises(
        RunError,
        match=rf"^data\.workers: a reader process {how}.* while reading sequences \d+ to \d+ .*; set data\.workers=0",
    ):
        [next(source) for _ in range(50)]
    assert not any(reader.is_alive() for reader in readers)


def test_what_a_terminal_sends_to_all_its_processes_does_not_end_readers(rows):
    whole = flat(take(rows, 8))
    source = batches(rows, seed=3, committed=0, shape=growing, workers=1)
    got = [next(source)]
    (child,) = multiprocessing.active_children()
    server = int(
        subprocess.run(["ps", "-o", "ppid=", str(child.pid)], capture_output=True, text=True, check=True).stdout
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(child.pid, number)
        os.kill(server, number)
    time.sleep(0.3)
    assert flat([*got, *(next(source) for _ in range(7))]) == whole
