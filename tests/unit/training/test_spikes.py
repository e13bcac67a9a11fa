"""Spikes stand out from noise, a resumed run sees the same ones, and samples that are left out are nowhere in the order."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from preheat.data.loader import _Stream
from preheat.errors import RecipeError
from preheat.recipe import parse
from preheat.techniques.difficulty_curriculum import order_by_difficulty
from preheat.training.loop import train
from preheat.training.spikes import HISTORY, Spike, SpikeDetector, advance, iterate_around


def steps(count: int, seed: int = 0) -> list[tuple[float, float]]:
    """Losses that fall from 10 to 3 with noise, and norms that vary by a factor of about 2."""
    draw = random.Random(seed)
    return [(3 + 7 * math.exp(-n / 50) + draw.gauss(0, 0.1), math.exp(draw.gauss(0, 0.3))) for n in range(count)]


def observed(values: list[tuple[float, float]], history: int = 0) -> dict[int, Spike]:
    """Step -> the spike that begins there, if the session began after `history` steps."""
    detector = SpikeDetector(values[:history][-HISTORY:])
    spikes = ((n, detector.observe(*values[n])) for n in range(history, len(values)))
    return {n: spike for n, spike in spikes if spike is not None}


def test_noise_is_no_spike() -> None:
    assert not any(observed(steps(1000, seed)) for seed in range(5))


def test_a_spike_is_reported_once_against_the_median_before_it() -> None:
    values = steps(400)
    values[300:303] = [(8.0, 9.0), (7.5, 9.0), (7.0, 9.0)]
    values[350] = (values[350][0], 50.0)
    spikes = observed(values)
    assert list(spikes) == [300, 350]
    assert (spikes[300].score, spikes[300].value) == ("loss", 8.0)
    assert spikes[300].median == pytest.approx(float(np.median([loss for loss, _ in values[236:300]])))
    assert spikes[350].score == "gradient_norm"


def test_a_lasting_change_of_the_level_is_one_spike() -> None:
    values = steps(400)
    values[200:] = [(loss + 3, norm) for loss, norm in values[200:]]
    assert list(observed(values)) == [200]


@pytest.mark.parametrize("history", [299, 300, 301, 302, 340])
def test_a_resumed_run_sees_the_same_spikes(history: int) -> None:
    values = steps(400)
    values[300:303] = [(8.0, 9.0)] * 3
    values[340] = (8.0, 9.0)
    assert observed(values, history) == {n: spike for n, spike in observed(values).items() if n >= history}


def test_samples_that_are_left_out_are_in_no_batch() -> None:
    """Against a list; ranges that overlap, that cut a batch, and one that begins where a batch ends."""
    for ranges in ([(8, 12)], [(3, 6), (5, 9), (20, 21)], [(0, 4), (4, 5)], [(6, 7), (9, 30)]):
        expected = [n for n in range(100) if not any(a <= n < b for a, b in ranges)]
        assert list(itertools.islice(iterate_around(itertools.count, 0, ranges), 60)) == expected[:60]
        position = 0
        for batch in range(10):
            read = list(itertools.islice(iterate_around(itertools.count, position, ranges), 4))
            assert read == expected[4 * batch : 4 * batch + 4]
            position = advance(position, 4, ranges)
            assert position == read[-1] + 1


@pytest.mark.parametrize("rows", [(5, 2), (3, 3), (-1, 2)])
def test_ranges_that_are_none_are_refused(rows: tuple[int, int], tmp_path: Path) -> None:
    recipe = parse("model: {size: 15M}\nstop: {max_steps: 1}\n")
    with pytest.raises(RecipeError, match=r"^skip_rows: .* must be A\.\.B with A from 0 and below B"):
        train(recipe, out=tmp_path / "run", skip_rows=[rows])


def test_a_curriculum_has_samples_after_its_end() -> None:
    """A run that leaves samples out reads beyond the number that the curriculum was made for."""
    order = order_by_difficulty(np.array([0.9, 0.1, 0.5, 0.3]), total=8, seed=0, start=0.5)
    assert set(itertools.islice(order, 8, 16)) == {0, 1, 2, 3}


def test_a_stream_leaves_samples_out() -> None:
    rows = SimpleNamespace(read=lambda committed: ((n, f"row {n}") for n in itertools.count(committed)))
    stream = _Stream(rows, 3, [(5, 7), (8, 9)])  # type: ignore[arg-type]
    assert [item[0] for item in itertools.islice(stream, 4)] == [3, 4, 7, 9]  # type: ignore[index]
