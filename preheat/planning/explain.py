"""Output of `preheat plan`: the JSON of a search, and the data of its plots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.core import STEP
from preheat.hardware.rates import Rates
from preheat.planning.observation import Observation
from preheat.planning.observation_cache import observe_cached
from preheat.planning.plan import GIB
from preheat.planning.request import Request
from preheat.planning.search.candidates import describe_techniques
from preheat.planning.search.ranking import seconds
from preheat.planning.search.result import EvaluatedPlan, SearchResult
from preheat.planning.speed.roofline import Roofline
from preheat.sanitize import memory, percent

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["cost_of", "energy_of", "explain", "figures"]


def cost_of(plan: JsonObject, devices: int, price: float | None) -> dict[str, float | None] | None:
    """Returns the cost of a plan in dollars, given a price per device hour; None without a price.

    `run` is None if the length of the run is unknown.
    """
    if price is None:
        return None
    # Dollars per million tokens = dollars per second / (tokens per second) * 1e6.
    hourly = price * devices
    run = plan["seconds_total"] / 3600 * hourly if plan["seconds_total"] else None
    return {"hour": hourly, "million_tokens": hourly / 3600 / plan["tokens_per_second"] * 1e6, "run": run}


def energy_of(plan: JsonObject, devices: int) -> dict[str, float | None] | None:
    """Returns an upper bound of a plan's energy in kWh, with the boards at full power; None if their power is unknown.

    `run` is None if the length of the run is unknown. Hosts, network and cooling are not included.
    """
    if plan["watts"] is None:
        return None
    kilowatts = plan["watts"] * devices / 1000
    run = plan["seconds_total"] / 3600 * kilowatts if plan["seconds_total"] else None
    return {"kilowatts": kilowatts, "million_tokens": kilowatts / 3600 / plan["tokens_per_second"] * 1e6, "run": run}


def explain(result: SearchResult, *, devices: int, price: float | None = None) -> JsonObject:
    """Returns the JSON of a search: the keys of a plan, and cost, energy, recipe, alternatives, rejected.

    `startup` is {techniques, pays_from_steps}: the techniques that delay the first step, and the number of steps from
    which a run with them ends sooner (None: never). It is None if no other plan can be compared.

    Args:
        price: dollars per device hour.
    """
    best = result.best

    def alternative(s: EvaluatedPlan) -> JsonObject:
        return {
            "what": describe_techniques(s.added, s.micro),
            "recipe": recipes.as_values(s.recipe)["techniques"],
            **{key: s.plan[key] for key in ("peak_gib", "tokens_per_second", "seconds_per_step", "mfu")},
            "cost": cost_of(s.plan, devices, price),
            "energy": energy_of(s.plan, devices),
            "tradeoff": _compare(s, best),
        }

    return {
        **best.plan,
        "cost": cost_of(best.plan, devices, price),
        "energy": energy_of(best.plan, devices),
        "devices": devices,
        "chosen": describe_techniques(best.added, best.micro),
        "numerics": best.trades,
        "startup": result.startup
        and {"techniques": list(result.startup.techniques), "pays_from_steps": result.startup.pays_from_steps()},
        "recipe": recipes.as_values(best.recipe),
        "alternatives": [alternative(s) for s in result.alternatives],
        "rejected": [{"recipe": what, "reason": why} for what, why in result.rejected],
        "searched": {
            "candidates": result.guessed,
            "dry_runs": len(result.evaluated),
            "confirmed": result.confirmed,
            "interrupted": result.interrupted,
        },
    }


def _compare(s: EvaluatedPlan, best: EvaluatedPlan) -> str:
    """Describes what an alternative gives up in comparison with the best."""
    speed = s.plan["tokens_per_second"] / best.plan["tokens_per_second"] - 1
    more = s.plan["peak_gib"] - best.plan["peak_gib"]
    parts = [f"{percent(abs(speed))} {'slower' if speed < 0 else 'faster'}"]
    if abs(speed) < 0.005:
        parts = [f"{'slower' if speed < 0 else 'faster'} by less than 1 %" if speed else "as fast"]
    # Differences that no device would notice are none.
    alike = abs(more) < 0.01 * best.plan["peak_gib"]
    parts.append("as much memory" if alike else f"{memory(abs(more))} {'more' if more > 0 else 'less'}")
    if (later := s.plan["seconds_to_start"] - best.plan["seconds_to_start"]) > 0:
        parts.append(f"starts {later:.0f} s later")
    if s.trades != best.trades:
        parts.append(
            {"exact": "unchanged numerics", "rounding": "numerics rounded", "different": "other numerics"}[s.trades]
        )
    return ", ".join(parts)


_POINTS = 600  # points of the timeline plot


def figures(result: SearchResult, request: Request) -> JsonObject:
    """Returns the data of the report's plots; observes the best candidate again, for its log of allocations.

    Args:
        request: what was searched.

    Returns:
        timeline: {phases: [(first event, phase)], bytes: [(event, GiB alive)]} of a step.
        roofline: {peak, bandwidth, points: [{operator, intensity, flops, share}]}.
        guesses: [{what, techniques, peak_gib, tokens_per_second}] of the estimated candidates.
        pareto: [{what, techniques, peak_gib, tokens_per_second, fits, best}] of the dry-run candidates.
    """
    rates = request.rates
    assert rates is not None, "a plot needs the rates of its device"
    observation = observe_cached(replace(request, recipe=result.best.recipe), how="whole", logged=True)
    return {
        "timeline": _timeline(observation),
        "roofline": _roofline(observation, rates, result.best.plan["matrix_rate"]),
        "guesses": [guess._asdict() for guess in result.guesses],
        "pareto": [
            {
                "what": describe_techniques(s.added, s.micro),
                "techniques": describe_techniques(s.added),
                **{key: s.plan[key] for key in ("peak_gib", "tokens_per_second", "fits")},
                "best": s is result.best,
            }
            for s in result.evaluated
        ],
    }


def _timeline(observation: Observation) -> JsonObject:
    """Returns the allocated memory over the events of a step, downsampled to the extremes of each window."""
    alive, sizes, phases = 0, list[float](), list[tuple[int, str]]()
    for _, size, phase in observation.log:
        alive += size
        if phase in STEP:
            if not phases or phases[-1][1] != phase:
                phases.append((len(sizes), phase))
            sizes.append(alive / GIB)
    return {"phases": _visible_phases(phases, len(sizes)), "bytes": _downsample(sizes)}


def _visible_phases(phases: Sequence[tuple[int, str]], count: int) -> list[tuple[int, str]]:
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


def _roofline(observation: Observation, rates: Rates | Roofline, peak: float) -> JsonObject:
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
        time[name] += seconds(one, rates)
    total = sum(time.values()) or 1.0
    points = [
        {
            "operator": name,
            # FLOPs per byte: left of peak / bandwidth, memory bounds an operator; right of it, compute does.
            "intensity": flops[name] / max(moved[name], 1),
            "flops": flops[name] / time[name],
            "share": time[name] / total,
        }
        for name in flops
    ]
    bandwidth = rates.device.bandwidth if isinstance(rates, Roofline) else rates.bandwidth
    return {"peak": peak, "bandwidth": bandwidth, "points": points}
