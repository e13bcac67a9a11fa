"""The plan that `preheat plan` shows: the best of a search with its alternatives, and the data of its plots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from preheat import recipe as recipes
from preheat.core import STEP
from preheat.core.plan import (
    Alternative,
    Candidate,
    Cost,
    Energy,
    Plan,
    PlanFigures,
    Price,
    Rejection,
    RooflineFigure,
    RooflinePoint,
    Searched,
    Startup,
    Timeline,
)
from preheat.core.units import format_memory, format_percent
from preheat.hardware.rates import Rates
from preheat.planning.observation import Observation
from preheat.planning.observation_cache import observe_cached
from preheat.planning.plan import GIB
from preheat.planning.request import Request
from preheat.planning.search.candidates import describe_techniques
from preheat.planning.search.cost_model import estimate_seconds
from preheat.planning.search.result import EvaluatedPlan, SearchResult
from preheat.planning.speed.roofline import Roofline

__all__ = ["add_cost", "build_figures", "estimate_cost", "estimate_energy", "explain"]


def estimate_cost(plan: Plan, devices: int, price: float | None) -> Cost | None:
    """Returns the cost of a plan, given a price per device-hour; None without a price."""
    if price is None:
        return None
    # Price of a million tokens = price per second / (tokens per second) * 1e6.
    hourly = price * devices
    run = plan.seconds_total / 3600 * hourly if plan.seconds_total else None
    return Cost(hourly, hourly / 3600 / plan.tokens_per_second * 1e6, run)


def estimate_energy(plan: Plan, devices: int) -> Energy | None:
    """Returns an upper bound of a plan's energy; None if the power of its device is unknown."""
    if plan.watts is None:
        return None
    kilowatts = plan.watts * devices / 1000
    run = plan.seconds_total / 3600 * kilowatts if plan.seconds_total else None
    return Energy(kilowatts, kilowatts / 3600 / plan.tokens_per_second * 1e6, run)


def add_cost(plan: Plan, devices: int, price: Price | None) -> Plan:
    """Returns a plan with its cost, if there is a price, and its energy, if the power of its device is known."""
    if price is not None:
        plan = replace(plan, cost=estimate_cost(plan, devices, price.per_hour), currency=price.currency)
    return replace(plan, energy=estimate_energy(plan, devices))


def explain(result: SearchResult, *, devices: int, price: float | None = None) -> Plan:
    """Returns the plan of the best candidate, with the other results of the search, cost and energy.

    Args:
        price: per device-hour.
    """
    best = result.best

    def build_alternative(s: EvaluatedPlan) -> Alternative:
        return Alternative(
            what=describe_techniques(s.added, s.micro),
            recipe=recipes.to_values(s.recipe)["techniques"],
            peak_gib=s.plan.peak_gib,
            tokens_per_second=s.plan.tokens_per_second,
            seconds_per_step=s.plan.seconds_per_step,
            mfu=s.plan.mfu,
            tradeoff=_compare(s, best),
            cost=estimate_cost(s.plan, devices, price),
            energy=estimate_energy(s.plan, devices),
        )

    startup = result.startup
    return replace(
        best.plan,
        cost=estimate_cost(best.plan, devices, price),
        energy=estimate_energy(best.plan, devices),
        devices=devices,
        chosen=describe_techniques(best.added, best.micro),
        numerics=best.trades,
        startup=startup and Startup(startup.techniques, startup.pays_from_steps()),
        recipe=recipes.to_values(best.recipe),
        alternatives=tuple(build_alternative(s) for s in result.alternatives),
        rejected=tuple(Rejection(*reason) for reason in result.rejected),
        searched=Searched(result.guessed, len(result.evaluated), result.confirmed, result.interrupted),
    )


def _compare(s: EvaluatedPlan, best: EvaluatedPlan) -> str:
    """Describes what an alternative gives up in comparison with the best."""
    speed = s.plan.tokens_per_second / best.plan.tokens_per_second - 1
    more = s.plan.peak_gib - best.plan.peak_gib
    parts = [f"{format_percent(abs(speed))} {'slower' if speed < 0 else 'faster'}"]
    if abs(speed) < 0.005:
        parts = [f"{'slower' if speed < 0 else 'faster'} by less than 1 %" if speed else "as fast"]
    # Differences that no device would notice are none.
    alike = abs(more) < 0.01 * best.plan.peak_gib
    parts.append("as much memory" if alike else f"{format_memory(abs(more))} {'more' if more > 0 else 'less'}")
    if (later := s.plan.seconds_to_start - best.plan.seconds_to_start) > 0:
        parts.append(f"starts {later:.0f} s later")
    if s.trades != best.trades:
        parts.append(
            {"exact": "unchanged numerics", "rounding": "numerics rounded", "different": "other numerics"}[s.trades]
        )
    return ", ".join(parts)


_POINTS = 600  # points of the timeline plot


def build_figures(result: SearchResult, request: Request) -> PlanFigures:
    """Returns the data of the report's plots; observes the best candidate again, for its log of allocations.

    Args:
        request: what was searched.
    """
    rates = request.rates
    assert rates is not None, "a plot needs the rates of its device"
    observation = observe_cached(replace(request, recipe=result.best.recipe), how="whole", logged=True)
    return PlanFigures(
        timeline=_build_timeline(observation),
        roofline=_build_roofline(observation, rates, result.best.plan.matrix_rate),
        guesses=tuple(result.guesses),
        tried=tuple(
            Candidate(
                describe_techniques(s.added, s.micro),
                describe_techniques(s.added),
                s.plan.peak_gib,
                s.plan.tokens_per_second,
                s.plan.verdict,
                best=s is result.best,
                recipe=recipes.to_values(s.recipe)["techniques"],
            )
            for s in result.evaluated
        ),
    )


def _build_timeline(observation: Observation) -> Timeline:
    """Returns the allocated memory over the events of a step, downsampled to the extremes of each window."""
    alive, sizes, phases = 0, list[float](), list[tuple[int, str]]()
    for _, size, phase in observation.log:
        alive += size
        if phase in STEP:
            if not phases or phases[-1][1] != phase:
                phases.append((len(sizes), phase))
            sizes.append(alive / GIB)
    return Timeline(tuple(_find_visible_phases(phases, len(sizes))), tuple(_downsample(sizes)))


def _find_visible_phases(phases: Sequence[tuple[int, str]], count: int) -> list[tuple[int, str]]:
    """Returns the phases that are long enough to be visible in the plot, when there are many micro-batches."""
    ends = [*(start for start, _ in phases[1:]), count]
    # A phase of less than 2 % of the events would be an unreadable label.
    visible = [(start, phase) for (start, phase), end in zip(phases, ends, strict=True) if end - start > count / 50]
    return [p for n, p in enumerate(visible) if n == 0 or visible[n - 1][1] != p[1]]


def _downsample(values: Sequence[float]) -> list[tuple[int, float]]:
    # Two points per window, its minimum and maximum, so that no peak is lost.
    stretch = max(1, len(values) // (_POINTS // 2))
    indices: set[int] = set()
    for start in range(0, len(values), stretch):
        window = range(start, min(start + stretch, len(values)))
        indices |= {min(window, key=values.__getitem__), max(window, key=values.__getitem__)}
    return [(n, values[n]) for n in sorted(indices)]


def _build_roofline(observation: Observation, rates: Rates | Roofline, peak: float) -> RooflineFigure:
    """Returns operators by arithmetic intensity, under the recipe's matmul rate; without collectives."""
    flops: dict[str, float] = defaultdict(float)
    moved: dict[str, float] = defaultdict(float)
    time: dict[str, float] = defaultdict(float)
    for kernel, count in observation.kernels.items():
        if not kernel.flops or kernel.group is not None:
            continue
        name = "attention" if "attention" in kernel.operator else f"products in {kernel.dtype}"
        flops[name] += kernel.unmasked_flops * count
        moved[name] += (kernel.bytes_read + kernel.bytes_written) * count
        # An observation of this kernel alone, so that the same model gives its seconds.
        only = type(observation.kernels)({kernel: count})
        one = Observation({}, {}, only, {}, 0, 0, 0, 0, groups=observation.groups, cudnn=observation.cudnn)
        time[name] += estimate_seconds(one, rates)
    total = sum(time.values()) or 1.0
    # FLOPs per byte: left of peak / bandwidth, memory bounds an operator; right of it, compute does.
    points = tuple(
        RooflinePoint(name, flops[name] / max(moved[name], 1), flops[name] / time[name], time[name] / total)
        for name in flops
    )
    bandwidth = rates.device.bandwidth if isinstance(rates, Roofline) else rates.bandwidth
    assert bandwidth is not None, "a device to plan for has a bandwidth"
    return RooflineFigure(peak, bandwidth, points)
