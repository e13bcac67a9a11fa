"""The demo: the plan chooses how many steps it trains, from rates that are measured at the sizes of its step only."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from preheat import recipe as recipes
from preheat.cli import demo
from preheat.core import Device, MachineUse
from preheat.core.plan import Plan
from preheat.errors import RunError
from preheat.files import to_plain_data
from preheat.hardware import benchmark_rates
from preheat.hardware.benchmark_rates import Grid, _Parts, calibrate, measure_sizes, rates_for
from preheat.hardware.probe import probe
from preheat.hardware.rates import LAYOUTS, MOVERS, Present, Rates, load, parse
from preheat.planning.layer_extrapolation import observe_few_layers
from preheat.planning.plan_request import choose_step_rates
from preheat.planning.request import Request
from preheat.planning.speed import step_time
from preheat.planning.speed.step_time import collect_grids, estimate_step_seconds
from tests.unit.plans import plan_of, values_of

TINY = Grid(
    shapes=((8, 16, 4), (32, 16, 4), (8, 4, 16)),
    products=(32,),
    elements=(256, 512),
    width=16,
    vocabulary=32,
    attention=((1, 2, 16, 8),),
    parameters=64,
    large=2**16,
    dtypes=("fp32",),
    limit=0,
)


def test_the_steps_take_as_long_as_asked_by_the_plan() -> None:
    assert demo.count_steps_within(60, 0.3) == 200
    assert demo.count_steps_within(45, 0.112) == 400
    assert 45 - 5 * 0.113 < demo.count_steps_within(45, 0.113) * 0.113 <= 45
    # Neither a model that learned nothing, nor one that reads the standard library many times.
    assert demo.count_steps_within(60, 30) == 60
    assert demo.count_steps_within(45, 1e-9) == 2000


def _one_layer() -> recipes.Recipe:
    """Returns the demo in fp32 with one layer, whose sizes are those of two."""
    return recipes.load("demo", ["techniques.mixed_precision.mode=fp32", "model.num_layers=1", "hardware.device=cpu"])


class Trains(Exception):
    """Instead of training, with what would be trained."""


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What the demo would train is raised instead; a step takes 0.3 s by the plan, and nothing is measured."""

    def stop(recipe: recipes.Recipe, **options: object) -> None:
        raise Trains(recipe, options)

    monkeypatch.setattr("preheat.cli.train.run", stop)
    plan = plan_of(values_of(1.0, 8.0, seconds_per_step=0.3, seconds_to_start=0.0))
    monkeypatch.setattr(demo, "_plan_demo", lambda recipe, quiet: ("rates", plan))
    monkeypatch.setattr("preheat.cli.views.console.build_answer", lambda plan, name: f"{plan.steps} steps planned")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("slow", "steps"), [(True, 200), (False, 150)])
def test_the_demo_trains_for_a_minute_by_its_plan_and_says_so(
    slow: bool, steps: int, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_is_slow_in_bf16", lambda: slow)
    with pytest.raises(Trains) as raised:
        demo.demo()
    recipe, options = raised.value.args
    assert recipe.stop.max_steps == steps
    assert (recipe.evaluate.every, recipe.checkpoint.every) == (-(-steps // 3), steps // 2)
    # Without them `preheat train`, which resumes the demo, would train another number of steps.
    assert f"stop.max_steps={steps}" in options["again"]
    assert recipe.techniques["mixed_precision"].mode == "auto"
    assert options["rates"] == "rates"
    assert (
        f"training {steps} steps of 0.3 s each, {steps * 0.3:.0f} s by the plan; the demo trains for about"
        in " ".join(capsys.readouterr().out.split())
    )


def test_the_demo_beside_other_work_trains_for_a_minute_too(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(now: float) -> Plan:
        busy = {
            "tokens_per_second": 9.0,
            "seconds_per_step": now,
            "machine": to_plain_data(MachineUse(0.3, 0.5, 1.5, 2, 2)),
        }
        return plan_of(values_of(1.0, 8.0, seconds_per_step=0.05, seconds_to_start=0.0, now=busy))

    monkeypatch.setattr(demo, "_plan_demo", lambda recipe, quiet: ("rates", planned(0.3)))
    monkeypatch.setattr(demo, "_is_slow_in_bf16", lambda: True)
    with pytest.raises(Trains) as raised:
        demo.demo()
    assert raised.value.args[0].stop.max_steps == 200
    assert "training 200 steps of 0.3 s each, 60 s by the plan; the demo trains for about 60 s" in " ".join(
        capsys.readouterr().out.split()
    )
    monkeypatch.setattr(demo, "_plan_demo", lambda recipe, quiet: ("rates", planned(2.0)))
    with pytest.raises(Trains):
        demo.demo()
    assert "training 60 steps of 2 s each, 120 s by the plan; more than the demo's 60 s" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize("share", [0.2, 0.95])
@pytest.mark.parametrize("contended", [True, False])  # measured beside other work, or stored by an earlier plan
def test_a_demo_beside_other_work_says_the_speed_now(
    share: float, contended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_known = dataclasses.replace(calibrate(probe("cpu"), 1, grid=TINY), contended=contended)
    use = MachineUse(0.3, 0.5, 1.5, 2, 2)
    monkeypatch.setattr(
        benchmark_rates, "rates_for", lambda device, threads, choose, progress: (rates_known, contended)
    )
    monkeypatch.setattr("preheat.hardware.rate_probe.probe_rates", lambda known, threads: Present(share, use))
    rates, plan = demo._plan_demo(_one_layer(), quiet=True)
    assert plan.contended is contended
    if share > 0.9:  # as fast as measured: a plan's error
        assert rates.now is plan.now is None
        return
    assert rates.now == Present(share, use)
    assert plan.now is not None
    assert plan.now.seconds_per_step == pytest.approx(plan.seconds_per_step / share)


@pytest.mark.parametrize("stop", ["stop.max_steps=7", "stop.tokens=10000"])
def test_the_users_own_end_of_the_demo_wins(stop: str, trained: Path) -> None:
    with pytest.raises(Trains) as raised:
        demo.demo(set=[stop])
    recipe, options = raised.value.args
    assert recipe == recipes.load("demo", [part for part in options["again"][2:] if part != "--set"])
    assert recipe.stop == recipes.load("demo", [stop]).stop
    assert recipe.evaluate.every == recipes.load("demo").evaluate.every


def test_the_demo_samples_its_text() -> None:
    # A model of this size repeats one line when it takes the likeliest token each time.
    sample = recipes.load("demo").sample
    assert sample.temperature > 0
    assert sample.repetition_penalty > 1


@pytest.fixture(scope="module")
def request_of_demo() -> Request:
    return Request(_one_layer(), Device("cpu", "made up", 2**34), vocabulary=4096)


def test_only_the_sizes_of_the_step_are_measured(request_of_demo: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    observation = observe_few_layers(request_of_demo)
    (grid,) = collect_grids(observation, request_of_demo.device, width=256, vocabulary=4096)
    # A micro-batch of 4 rows of 256 tokens; the head by 512 rows.
    assert {(1024, 256, 256), (1024, 256, 128), (1024, 256, 768), (1024, 768, 256), (512, 256, 4096)} <= set(
        grid.shapes
    )
    assert (4, 4, 256, 64) in grid.attention
    # Each matmul of the step is at a measured size, in each layout: none of its rates is interpolated.
    asked: list[tuple[int, int, int]] = []
    made = dataclasses.replace(calibrate(probe("cpu"), 1, grid=TINY), threads=1)
    monkeypatch.setattr(
        Rates, "matrix_rate", lambda self, dtype, layout, n, k, m: asked.append((n, k, m)) or self.matrix[0].flops
    )
    assert estimate_step_seconds(observation, made) > 0
    assert {*asked} <= {*grid.shapes}
    # Fewer by far than a calibration of everything.
    assert len(grid.shapes) < len(benchmark_rates.FULL.rows) * len(benchmark_rates.FULL.layers) / 2


def test_a_calibration_of_some_sizes_measures_those_and_answers_every_plan() -> None:
    # A limit, since without one a single call that another process preempts leaves sizes out.
    rates = calibrate(Device("cpu", "made up", 2**30), 1, grid=dataclasses.replace(TINY, limit=60.0))
    assert {(r.n, r.k, r.m) for r in rates.matrix} == {*TINY.shapes}
    assert {r.layout for r in rates.matrix} == set(LAYOUTS)
    assert (
        {r.dtype for r in (*rates.matrix, *rates.moved, *rates.attention)} == rates.peak_matrix_rate.keys() == {"fp32"}
    )
    # No operator is missing, whatever the user's techniques or a fallback of the run add to the step.
    assert {r.operator for r in rates.moved} >= MOVERS.keys() - {"to_fp32"}
    assert parse(json.loads(json.dumps(rates.values()))) == rates


class Counting:
    """In place of the stopwatch: counts measurements, each a millisecond."""

    count = 0

    def __init__(self, cuda: bool, *, strict: bool = False):
        self.strict, self.was_late = strict, False

    def is_late(self) -> bool:
        return False

    def __call__(self, call: Any, budget: float = 0.0) -> float:
        call()
        type(self).count += 1
        return 1e-3


@pytest.mark.parametrize("precision", ["", "mixed_precision: {}"])
def test_a_card_is_measured_at_the_sizes_of_the_step_alone_and_once(
    precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    monkeypatch.setattr(benchmark_rates, "Stopwatch", Counting)
    monkeypatch.setattr(benchmark_rates, "other_processes_bytes", lambda device: device.memory - (3 << 30))
    monkeypatch.setattr(_Parts, "most_disturbed", MachineUse(1.0, 1.0, 0.0, 2, 2))
    # Smaller tensors than a card's, for this CPU.
    monkeypatch.setattr(step_time, "grid_of", lambda _: dataclasses.replace(whole, large=2**20, elements=(2**12,)))
    monkeypatch.setattr(step_time, "_GPU_ELEMENTS", (2**10, 2**11))
    whole = benchmark_rates.GPU
    card = Device("cuda", "a card", 80 << 30, (9, 0), at_hand=False, driver="570.1")
    grids: list[Grid] = []

    def measured_in_process(device: Device, threads: int, _: object, choose: Any, **options: Any) -> Rates:
        grids[:] = choose()
        # The same code on tensors of this CPU, which has neither a link to the host nor TF32.
        cpu = dataclasses.replace(device, kind="cpu")
        monkeypatch.setattr(benchmark_rates, "calibrate", lambda _, threads, tell, grid: as_card(cpu, threads, grid))
        return measure_sizes(device, threads, grids, lambda *_: None, **options)

    def as_card(cpu: Device, threads: int, grid: Grid) -> Rates:
        return dataclasses.replace(calibrate(cpu, threads, grid=grid), near=None, to_host=1e9, to_device=1e9)

    monkeypatch.setattr(benchmark_rates, "_measure_in_process", measured_in_process)

    def request(width: int) -> Request:
        recipe = recipes.parse(
            f"model: {{num_layers: 2, hidden_size: {width}, num_heads: 4, vocab_size: 512}}\nstop: {{max_steps: 1}}\n"
            f"batch: {{size: 4, seq_len: 64}}\ntechniques: {{{precision}}}"
        )
        return Request(recipe, card, vocabulary=512)

    Counting.count = 0
    first, measured = choose_step_rates(request(64), 1)
    assert measured
    of_first = Counting.count
    # Each matmul of the plan was measured at its own size, with the attention and the optimizer: far fewer than all.
    asked: list[tuple[Any, ...]] = []
    observation, rate = observe_few_layers(request(64)), Rates.matrix_rate
    monkeypatch.setattr(Rates, "matrix_rate", lambda self, *at: asked.append(at) or rate(self, *at))
    assert estimate_step_seconds(observation, first) > 0
    assert asked
    assert all(first.holds(*at) for at in asked), asked
    assert of_first < (len(whole.layers) * len(whole.rows) * 3 * 4 + len(MOVERS) * len(whole.elements) * 3) / 4
    # A second run, of the same recipe, measures nothing.
    assert choose_step_rates(request(64), 1) == (first, False)
    assert Counting.count == of_first
    # A run of another recipe measures its own matmuls, and few others.
    second, measured = choose_step_rates(request(128), 1)
    assert measured
    assert 0 < Counting.count - of_first < of_first / 2
    assert {*first.matrix} < {*second.matrix}
    assert choose_step_rates(request(64), 1) == choose_step_rates(request(128), 1) == (second, False)
    # With another driver, all is measured anew.
    assert load("a card", torch.__version__, 1, "580.2") is None
    assert load("a card", torch.__version__, 1, "570.1") == second


def test_rates_of_some_sizes_are_stored_and_only_what_is_missing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    device = Device("cpu", "made up", 2**30)
    one, other = [dataclasses.replace(TINY, shapes=(shape,), limit=60) for shape in TINY.shapes[:2]]
    # The child measures what it is asked, in a moment and undisturbed.
    asked: list[Grid] = []

    def measured_in_process(
        device: Device, threads: int, _: object, choose: Any, *, partial: bool, known: Rates | None = None
    ) -> Rates:
        (grid,) = choose()
        asked.append(grid)
        return measure_sizes(device, threads, [grid], lambda *_: None, partial=partial, known=known)

    monkeypatch.setattr(benchmark_rates, "_measure_in_process", measured_in_process)
    monkeypatch.setattr(benchmark_rates, "Stopwatch", Counting)
    monkeypatch.setattr(_Parts, "most_disturbed", MachineUse(1.0, 1.0, 0.0, 2, 2))
    assert rates_for(device, 1, lambda: [one])[1]
    assert asked == [one]
    # Again: nothing is measured.
    assert rates_for(device, 1, lambda: [one]) == (load("made up", torch.__version__, 1), False)
    assert asked == [one]
    # Another recipe: only its matmul, since operators, attention and AdamW were measured.
    made, measured = rates_for(device, 1, lambda: [one, other])
    assert measured
    (rest,) = asked[1:]
    assert (rest.shapes, rest.elements, rest.attention, rest.products, rest.parameters) == (other.shapes, (), (), (), 0)
    assert {(row.n, row.k, row.m) for row in made.matrix} == {*one.shapes, *other.shapes}
    assert made == load("made up", torch.__version__, 1)
    # They are not taken for those of the whole machine.
    with pytest.raises(RunError, match="are not measured yet"):
        benchmark_rates.rates(device, 1, measure=False)
    # Rates of all sizes are enough, except those of a busy machine.
    whole = dataclasses.replace(made, partial=False)
    whole.store()
    assert rates_for(device, 1, lambda: pytest.fail("measured again")) == (whole, False)
    dataclasses.replace(whole, contended=True).store()
    assert rates_for(device, 1, lambda: [one])[1]


def test_a_child_measures_and_stores_the_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path))
    told: list[float] = []
    start = time.perf_counter()
    made, measured = rates_for(
        Device("cpu", "made up", 2**30), 1, lambda: [TINY, TINY], lambda what, done: told.append(done)
    )
    assert measured
    assert made.partial
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert made.seconds < time.perf_counter() - start
    # Rates of a busy machine are measured again by the next run.
    assert load("made up", torch.__version__, 1) == (None if made.contended else made)
