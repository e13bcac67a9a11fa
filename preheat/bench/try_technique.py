"""Compares one technique with the baseline on a standard model and real text, for `preheat try`.

Sizes, steps and turns are chosen so that a trial ends within minutes, based on the planned step time. What would take
too long or needs more than 16 GiB is not run; its prediction is shown instead.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from preheat.bench.compare import Contender, compute_cosine, median_speed, take_turn
from preheat.bench.explanation import NOISE, describe_slow_bf16, explain_slowdown, note_busy_machine
from preheat.bench.messages import TurnJob, ZeroJob, ZeroTurn
from preheat.bench.zero_trial import run_processes
from preheat.core import Device, Phase, Technique, registry
from preheat.core.bench import MeasuredTrialRow, TrialBatch, TrialResult, TrialRow
from preheat.core.plan import Plan
from preheat.core.units import format_memory, format_percent
from preheat.errors import RecipeError, RunError
from preheat.recipe import Batch, Data, Hardware, Model, Recipe, Stop, check, dump

__all__ = ["PRECISIONS", "SIZES", "TECHNIQUES", "Size", "TrialOptions", "run_trial"]

GIB = 2**30
TECHNIQUES = ("gradient_accumulation", "mixed_precision", "zero", "efficient_attention", "integration")
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "bf16_weights", "bf16_master", "fp16_master", "fp8")
MEMORY = 16 * GIB
"""Memory limit of a trial."""
ACCUMULATED = (4, 2)
"""Default micro-batches of a step; the first that can be run is used."""
PROCESSES = 2
"""Processes across which ZeRO shards."""
STARTUP = 9.0
"""Seconds reserved for the start of a contender's process."""
LEAST = 12.0
"""Minimum seconds of training steps, regardless of the time spent before them."""
LIMIT = {False: 240.0, True: 140.0}
"""Seconds of a trial, alone and with --benchmark: below the documented 300 and 180, because plans are inexact."""


@dataclass(frozen=True)
class Size:
    """A standard model, and the rows of its micro-batch at 256 tokens."""

    model: Model
    rows: int
    words: str


SIZES = {
    "tiny": Size(
        Model(num_layers=2, hidden_size=128, num_heads=4, intermediate_size=384),
        8,
        "2 layers of 128: 0.4 M parameters and 1.0 M in embedding and head",
    ),
    "small": Size(Model(size="15M"), 4, "7 layers of 448: 15 M parameters and 3.7 M in embedding and head"),
    "medium": Size(Model(size="110M"), 2, "13 layers of 832: 110 M parameters and 6.8 M in embedding and head"),
    "large": Size(Model(size="350M"), 1, "19 layers of 1,216: 350 M parameters and 10 M in embedding and head"),
}
"""Llama models with a vocabulary of 4,096 tokens, trained on Python's standard library."""


@dataclass(frozen=True)
class TrialOptions:
    """The technique, the model and the settings of a trial.

    Attributes:
        batch_size: rows of a micro-batch; None: depends on the model's size and `seq_len`.
        accumulation_steps: micro-batches per step of gradient_accumulation and integration; None: 4, or 2 if the batch
            of 4 micro-batches does not fit or takes too long without the technique.
        precision: one of PRECISIONS, for mixed_precision and integration.
        zero_stage, cpu_offload: for zero.
        benchmark: try all techniques, alone and together.
    """

    technique: str
    model_size: str = "tiny"
    batch_size: int | None = None
    accumulation_steps: int | None = None
    precision: str = "auto"
    zero_stage: int = 1
    cpu_offload: bool = False
    seq_len: int = 256
    benchmark: bool = False

    @property
    def micro_batches(self) -> int:
        return self.accumulation_steps or ACCUMULATED[0]

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.batch_size or max(1, SIZES[self.model_size].rows * 256 // self.seq_len)


@dataclass
class _Group:
    """Contenders with the same batch; the first one is the baseline."""

    contenders: list[Contender]
    plans: list[Plan | None] = field(default_factory=list)


def _build_recipe(wish: TrialOptions, rows: int) -> Recipe:
    from preheat.hardware.probe import probe

    # The recipe states the limit as its device's memory, so that the plan decides what fits.
    most = min(probe().memory, MEMORY)
    recipe = Recipe(
        name="try",
        seed=1,
        model=SIZES[wish.model_size].model,
        data=Data(source="stdlib", vocab_size=4096, limit=400),  # 400 files are enough text and take seconds to read
        batch=Batch(size=rows, seq_len=wish.seq_len),
        stop=Stop(max_steps=100),
        hardware=Hardware(memory=f"{most}B"),
    )
    # Options such as --seq-len may contradict the model; the error comes before any work.
    check(recipe)
    return recipe


def _list_techniques(wish: TrialOptions, name: str) -> dict[str, Technique]:
    """Returns the techniques of a recipe for a technique of the command."""
    known = registry()
    if name == "gradient_accumulation":
        return {name: known[name](steps=wish.micro_batches)}  # type: ignore[call-arg]
    # fp8 casts the inputs of matmuls, on top of a bf16 mixed precision.
    if name == "mixed_precision" and wish.precision == "fp8":
        return {name: known[name](), "fp8": known["fp8"]()}
    if name == "mixed_precision":
        return {name: known[name](mode=wish.precision)}  # type: ignore[call-arg]
    if name == "efficient_attention":
        return {name: known[name]()}
    assert name == "integration", name
    # zero is left out, since its processes run a loop of their own.
    parts = ["mixed_precision", "efficient_attention"] + (["gradient_accumulation"] if wish.micro_batches > 1 else [])
    return {k: t for part in parts for k, t in _list_techniques(wish, part).items()}


def _build_group(wish: TrialOptions) -> _Group | None:
    """Returns the contenders that are recipes; None for ZeRO, which needs several processes."""
    if wish.technique == "zero" and not wish.benchmark:
        return None
    accumulates = wish.benchmark or wish.technique in ("gradient_accumulation", "integration")
    # The baseline takes the accumulated batch at once: the same gradient, with the memory of all rows.
    baseline = _build_recipe(wish, wish.rows * (wish.micro_batches if accumulates else 1))
    # One micro-batch accumulates nothing.
    names = [n for n in TECHNIQUES if n != "zero" and not (n == "gradient_accumulation" and wish.micro_batches < 2)]
    chosen = names if wish.benchmark else [wish.technique]
    return _Group(
        [
            Contender("without", baseline),
            *(Contender(n, dataclasses.replace(baseline, techniques=_list_techniques(wish, n))) for n in chosen),
        ]
    )


def run_trial(wish: TrialOptions, say: Callable[[str], None] = lambda line: None) -> TrialResult:
    """Trains a few steps without and with a technique, each in a process of its own.

    Raises:
        RecipeError: the options contradict each other.
        RunError: nothing could be run.
    """
    from preheat.data import prepare

    start = time.monotonic()
    limit = LIMIT[wish.benchmark]
    for key, value, known in (
        ("--technique", wish.technique, TECHNIQUES),
        ("--model-size", wish.model_size, tuple(SIZES)),
        ("--precision", wish.precision, PRECISIONS),
        ("--zero-stage", wish.zero_stage, (1, 2, 3)),
    ):
        if value not in known:
            raise RecipeError(f"{key}: {value!r} is not known; use {', '.join(map(str, known))}")
    if wish.technique == "gradient_accumulation" and (wish.accumulation_steps or 2) < 2:
        raise RecipeError(
            f"--accumulation-steps {wish.accumulation_steps}: there is nothing to accumulate; use 2 or more"
        )
    say("reading data")
    plain = _build_recipe(wish, wish.rows)
    # Builds the cached tokenizer and rows, so that no contender's time includes it.
    prepare(plain.data, length=wish.seq_len, seed=plain.seed)
    rows: list[TrialRow] = []
    steps = 0
    zero = wish.benchmark or wish.technique == "zero"
    # Time that ZeRO needs after the other contenders.
    reserved = 2 * STARTUP + LEAST if zero else 0.0
    # Without an explicit number, the first whose baseline can be run is used.
    for accumulated in ACCUMULATED if wish.accumulation_steps is None else (wish.accumulation_steps,):
        wish = dataclasses.replace(wish, accumulation_steps=accumulated)
        group = _build_group(wish)
        if group is None:
            break
        say("planning")
        _check_plan(group)
        steps = _count_steps(group, limit - (time.monotonic() - start) - reserved)
        if not group.contenders[0].failed:
            break
    if group is not None:
        rows += _run(group, steps, start + limit - reserved, say)
    if zero:
        zero_rows, steps_of_zero = _run_zero(wish, plain, limit - (time.monotonic() - start), say)
        rows, steps = [*rows, *zero_rows], steps or steps_of_zero
    # Rows that did not run are results as long as at least one row has figures.
    if not any(isinstance(row, MeasuredTrialRow) for row in rows):
        raise RunError("nothing could be run: " + "; ".join(f"{row.name}: {row.not_run}" for row in rows))
    plans = {c.name: plan for c, plan in zip(group.contenders, group.plans, strict=True)} if group else {}
    busy = note_busy_machine([turn.use for c in group.contenders for turn in c.turns]) if group else ""
    say("dry run for a GPU")
    gpu, more = _predict_gpu(wish, group, plain)
    return TrialResult(
        technique=wish.technique,
        model_size=wish.model_size,
        model=SIZES[wish.model_size].words,
        batch=TrialBatch(wish.rows, wish.seq_len, wish.accumulation_steps),
        steps=steps,
        rows=tuple(rows),
        verdicts=tuple(summary for row in rows if (summary := _describe_change(row, rows, plans))),
        notes=(*_list_precision_notes(wish, plans), *_list_limits(wish), *([busy] * bool(busy)), *more),
        gpu=gpu,
        seconds=time.monotonic() - start,
    )


def _check_plan(group: _Group) -> None:
    from preheat.planning.plan_request import plan_on_this_machine

    for c in group.contenders:
        try:
            planned = plan_on_this_machine(c.recipe)
        except RecipeError as error:
            c.failed = str(error).splitlines()[0]
            group.plans.append(None)
            continue
        group.plans.append(planned)
        if not planned.fits:
            needed, room = format_memory(planned.peak_gib), format_memory(planned.available_gib)
            c.failed = f"needs {needed}, more than the {room} that a trial may use"


def _count_steps(group: _Group, left: float) -> int:
    """Returns the steps of each contender within `left` seconds, from 2 to 10; marks those that cannot take two as
    failed."""
    running = [(c, p) for c, p in zip(group.contenders, group.plans, strict=True) if p and not c.failed]
    # Slowest last: it is the first to be left out if not all can take two steps.
    running.sort(key=lambda pair: pair[1].seconds_per_step)
    while running:
        # LEAST seconds remain however long planning took. A turn needs two steps, as the first is not timed.
        room = max(left - STARTUP * len(running), LEAST)
        steps = int(room / sum(plan.seconds_per_step for _, plan in running))
        if steps >= 2:
            return min(steps, 10)
        c, plan = running.pop()
        reason = "" if c is group.contenders[0] else explain_slowdown(plan, group.plans[0])
        c.failed = (
            f"a step would take {plan.seconds_per_step:.0f} s{f' ({reason})' if reason else ''}, longer than a trial "
            "may take; lower --batch-size, --seq-len or --model-size"
        )
    return 2


def _run(group: _Group, steps: int, until: float, say: Callable[[str], None]) -> list[TrialRow]:
    """Runs the contenders one after the other until about `until`; on a busy machine with fewer steps, but at least
    two."""
    with tempfile.TemporaryDirectory() as folder:
        left = sum(not c.failed for c in group.contenders)
        for number, c in enumerate(group.contenders):
            if not c.failed:
                say(f"{c.name}: {steps} steps")
                # Time left over by one contender is divided among those after it.
                seconds = max((until - time.monotonic()) / left - STARTUP, LEAST / left)
                gradient = str(Path(folder) / f"{number}.safetensors")
                take_turn(c, TurnJob(dump(c.recipe), steps, gradient, seconds), Path(folder))
                left -= 1
        files = [Path(folder) / f"{number}.safetensors" for number in range(len(group.contenders))]
        cosines = [compute_cosine(files[0], file) for file in files]
    # A slow contender may take fewer steps: losses are compared at a step that all have taken.
    common = min((len(turn.losses) for c in group.contenders for turn in c.turns), default=0)
    return compare(
        [
            _build_row(c, plan, cosine, common)
            for c, plan, cosine in zip(group.contenders, group.plans, cosines, strict=True)
        ]
    )


def _build_row(c: Contender, plan: Plan | None, cosine: float | None, common: int) -> TrialRow:
    """Returns the row of a contender, with the loss of step `common`."""
    predicted = plan.predicted if plan else None
    if not c.turns:
        return TrialRow(name=c.name, against="without", predicted=predicted, not_run=c.failed)
    turn = c.turns[0]
    return MeasuredTrialRow(
        name=c.name,
        against="without",
        predicted=predicted,
        not_run=c.failed,
        tokens_per_second=median_speed(turn, 1),
        peak_gib=turn.memory["peak_gib"],
        allocated_gib=turn.memory.get("allocated_gib"),
        reserved_gib=turn.memory.get("reserved_gib"),
        context_gib=turn.memory.get("context_gib"),
        loss=turn.losses[common - 1],
        gradient_cosine=cosine,
        changes={technique: tuple(texts) for technique, texts in turn.changes.items()},
        notices=tuple(turn.notices),
    )


def compare(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Returns the rows with the ratio of their speed to that of their baseline."""
    by_name = {row.name: row for row in rows}
    compared: list[TrialRow] = []
    for row in rows:
        base = by_name[row.against]
        if isinstance(row, MeasuredTrialRow) and isinstance(base, MeasuredTrialRow):
            row = dataclasses.replace(row, ratio=row.tokens_per_second / base.tokens_per_second)
        compared.append(row)
    return compared


def _describe_change(row: TrialRow, rows: Sequence[TrialRow], plans: Mapping[str, Plan | None]) -> str:
    """Summarizes the comparison of a row with its baseline, and explains it if the row is slower; "" for baselines."""
    if row.name == row.against:
        return ""
    base = next(r for r in rows if r.name == row.against)
    name = row.name
    if not isinstance(row, MeasuredTrialRow):
        return f"{name} was not run: {row.not_run}"
    if not isinstance(base, MeasuredTrialRow):
        return (
            f"{name}: {row.tokens_per_second:,.0f} tokens/s in {format_memory(row.peak_gib)}; without it "
            f"nothing runs: {base.not_run}"
        )
    speed, freed = row.tokens_per_second / base.tokens_per_second, base.peak_gib - row.peak_gib
    # One turn of each does not allow a verdict.
    fast = f"{format_percent(abs(speed - 1))} {'faster' if speed > 1 else 'slower'} in one turn"
    if speed < 1 and (reason := explain_slowdown(plans.get(name), plans.get(row.against))):
        fast += f" ({reason})"
    if abs(speed - 1) < NOISE:
        fast = "no difference in speed seen"
    share = freed / base.peak_gib if base.peak_gib else 0.0
    space = (
        "no difference in memory seen"
        if abs(share) < 0.02
        else f"{format_percent(abs(share))} {'less' if freed > 0 else 'more'} memory"
    )
    return f"{name}: {fast}, {space}, loss {row.loss:.3f} against {base.loss:.3f}"


def _list_precision_notes(wish: TrialOptions, plans: Mapping[str, Plan | None]) -> list[str]:
    """Says which precision `auto` is on this machine, and why."""
    import torch

    from preheat.hardware.benchmark_rates import rates

    plan = plans.get("mixed_precision") or plans.get("integration")
    if wish.precision != "auto" or plan is None:
        return []
    assert plan.recipe is not None  # as `plan_on_this_machine` returns it
    device, mode = plan.device, plan.recipe["techniques"]["mixed_precision"]["mode"]
    text = f"mixed_precision: auto is {mode} on this machine"
    if mode == "fp32":
        # Measured for the plans.
        speeds = rates(device, torch.get_num_threads(), measure=False).peak_matrix_rate
        text += f": {describe_slow_bf16(speeds['bf16'], speeds['fp32'], device.kind)}"
    return [text]


def _list_limits(wish: TrialOptions) -> list[str]:
    """Lists what this device cannot show about the technique."""
    from preheat.hardware.probe import probe

    if probe().kind != "cpu":
        return []
    notes = []
    tried = set(TECHNIQUES) if wish.benchmark else {wish.technique}
    if tried & {"mixed_precision", "integration"} and wish.precision.startswith("fp16"):
        notes.append("fp16 matmuls are slower than fp32's on a CPU: fp16 is only faster on a GPU")
    if tried & {"mixed_precision", "integration"} and wish.precision == "fp8":
        notes.append("a CPU has no fp8 matmuls; the memory predicted for a GPU is that of bf16, without fp8's casts")
    if tried & {"efficient_attention", "integration"}:
        notes.append(
            "the fused kernels here are the CPU's; a GPU uses others (flash), whose speed this does not measure"
        )
    if "zero" in tried:
        notes.append(
            f"{PROCESSES} processes share this CPU's cores: this shows the memory of each of several GPUs, not their "
            "speed"
        )
        if wish.cpu_offload:
            notes.append("--cpu-offload: the states are already on the host, so it has no effect here")
    return notes


def _predict_gpu(wish: TrialOptions, group: _Group | None, plain: Recipe) -> tuple[dict[str, float], list[str]]:
    """Predicts the peak of the tensors of a step on one GPU, by a dry run with the GPU's attention kernel; returns
    notes, too.

    No speed is predicted, and the context and workspaces of a GPU (about 0.5 GiB) are not included.
    """
    from preheat.planning.dry_run import observe
    from preheat.planning.plan_request import find_vocabulary_size
    from preheat.planning.request import Request

    # The dry run traces operators, so the attention operator of a GPU has to be named on a CPU.
    flash = registry()["efficient_attention"](kernel="flash")  # type: ignore[call-arg]
    here = Device("cpu", "dry run", MEMORY)
    peaks: dict[str, float] = {}
    request = Request(plain, here, vocabulary=find_vocabulary_size(plain))
    for c in group.contenders if group else []:
        # Without fp8, which the CPU of the dry run does not have; the notes of the trial say so.
        named = {n: flash if n == "efficient_attention" else t for n, t in c.recipe.techniques.items() if n != "fp8"}
        observation = observe(dataclasses.replace(request, recipe=dataclasses.replace(c.recipe, techniques=named)))
        peaks[c.name] = max(observation.peak.values()) / GIB
    notes = []
    if wish.benchmark or wish.technique == "zero":
        observation = observe(request)
        # In the optimizer's phase weights, gradients and states are all in memory.
        at = observation.categories[Phase.UPDATE]
        # The stages of ZeRO by what they shard (Rajbhandari et al. 2020, arXiv:1910.02054).
        shared = {1: ("optimizer",), 2: ("optimizer", "gradients"), 3: ("optimizer", "gradients", "parameters")}[
            wish.zero_stage
        ]
        one = sum(at[k] for k in ("optimizer", "gradients", "parameters"))
        eight = sum(at[k] / (8 if k in shared else 1) for k in ("optimizer", "gradients", "parameters"))
        notes.append(
            f"dry run: weights, gradients and states take {format_memory(one / GIB)} of a GPU alone, "
            f"{format_memory(eight / GIB)} of each of 8 GPUs with ZeRO stage {wish.zero_stage}"
        )
        if wish.cpu_offload:
            notes.append(
                f"dry run: offloading the states would free {format_memory(at['optimizer'] / GIB)} of a single GPU"
            )
    return peaks, notes


def _run_zero(wish: TrialOptions, plain: Recipe, left: float, say: Callable[[str], None]) -> tuple[list[TrialRow], int]:
    """Returns the rows of ZeRO and its baseline, each on several processes, and their steps within about `left`
    seconds."""
    from preheat.planning.plan_request import plan_on_this_machine

    rows = wish.rows * PROCESSES
    recipe = dataclasses.replace(plain, batch=Batch(size=rows, seq_len=wish.seq_len))
    flash = {"efficient_attention": registry()["efficient_attention"](kernel="flash")}  # type: ignore[call-arg]
    # The plan of one process; each holds a replica of the model, so memory and time scale with their number.
    one = plan_on_this_machine(dataclasses.replace(plain, techniques=flash))
    names = (f"{PROCESSES} processes", f"zero, stage {wish.zero_stage}")
    seconds = one.seconds_per_step * PROCESSES * 1.5  # 1.5: shared cores, and communication of gradients and weights
    steps = min(10, int(max(left - 2 * STARTUP, LEAST) / (2 * seconds)))
    why = ""
    if one.peak_gib * PROCESSES * GIB > MEMORY:
        why = (
            f"{PROCESSES} processes need {format_memory(one.peak_gib * PROCESSES)}, more than the "
            f"{MEMORY / GIB:.0f} GiB that a trial may use"
        )
    elif steps < 2:
        why = (
            f"a step would take {seconds:.0f} s, longer than a trial may take; lower --batch-size, --seq-len or "
            "--model-size"
        )
    turns: list[list[ZeroTurn] | str] = []
    for name, stage in zip(names, (0, wish.zero_stage), strict=True):
        if why:
            turns.append(why)
            continue
        say(f"{name}: {steps} steps")
        seconds = max(left / 2 - STARTUP, LEAST / 2)
        turns.append(run_processes(ZeroJob(dump(recipe), steps, PROCESSES, stage, wish.cpu_offload, seconds)))
    common = min((len(turn[0].losses) for turn in turns if not isinstance(turn, str)), default=0)
    results = [_build_zero_row(name, names[0], turn, common) for name, turn in zip(names, turns, strict=True)]
    return compare(results), steps


def _build_zero_row(name: str, against: str, processes: list[ZeroTurn] | str, common: int) -> TrialRow:
    """Returns the row of a contender on several processes, with the loss of step `common`."""
    if isinstance(processes, str):
        return TrialRow(name=name, against=against, predicted=None, not_run=processes, changes={})
    first = processes[0]
    states = [f"{format_memory(p.optimizer_gib)} of states on process {rank}" for rank, p in enumerate(processes)]
    return MeasuredTrialRow(
        name=name,
        against=against,
        predicted=None,
        not_run="",
        # The first step includes allocations. Collectives keep the ranks in step, so one rank's times are enough.
        tokens_per_second=first.tokens / median(first.seconds[1:]),
        peak_gib=max(process.peak_gib for process in processes),
        loss=first.losses[common - 1],  # at the last step that both took
        gradient_cosine=None,
        optimizer_gib=max(process.optimizer_gib for process in processes),
        changes={"zero": tuple(states)},
    )
