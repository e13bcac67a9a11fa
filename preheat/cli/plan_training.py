"""Plans training: a recipe as it is, or by a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

from preheat.cli.options.subject import METHODS, count_devices, find_subject
from preheat.cli.options.unused import FOR_ANOTHER_DEVICE, note_unread
from preheat.cli.plan_output import finish, render_recipe, text_part_note
from preheat.cli.views.config_reading import describe_reading
from preheat.cli.views.next_command import build_next_command, list_assumed_settings
from preheat.cli.views.output import print_progress, say
from preheat.errors import DoesNotFit, RecipeError
from preheat.interop.own_techniques import add_own_techniques
from preheat.model_folder import PACKED, keeps_quantization, quantization_of, read_object

if TYPE_CHECKING:
    from preheat.cli.options.plan_options import Aim, TrainingPlanOptions
    from preheat.cli.options.subject import Subject
    from preheat.cli.plan_solving import Solution
    from preheat.core import Numerics
    from preheat.core.plan import Alternative, Improvements, Plan, PlanFigures
    from preheat.interop.reading import ForeignConfig
    from preheat.planning.answer_cache import Answer
    from preheat.planning.prices import Offer
    from preheat.planning.request import Request
    from preheat.planning.search.result import EvaluatedPlan, SearchResult
    from preheat.recipe import Recipe

__all__ = ["plan_as_written", "plan_for_prices", "plan_training"]


@dataclass(frozen=True)
class _Question:
    """The options of a plan, with the recipe and the devices that follow from them."""

    options: TrainingPlanOptions
    subject: Subject
    devices: int
    per_host: int

    @property
    def is_search(self) -> bool:
        """A recipe is planned as it is unless a search is asked for."""
        return not self.subject.from_user or self.options.aim is not None or self.options.allow is not None

    @property
    def aim(self) -> Aim:
        return self.options.aim or "fastest"

    @property
    def allow(self) -> Numerics:
        return self.options.allow or ("exact" if self.subject.from_user else "rounding")

    @property
    def key(self) -> str | None:
        """Key of the stored answer; None if it is not stored."""
        # A plan of this machine is always made anew: its memory and its speed change with what else runs.
        if self.options.gpu is None:
            return None
        from preheat.planning.answer_cache import compute_key

        # The options of the output change no answer.
        options = asdict(
            replace(self.options, out=None, html=None, figures=None, write=None, verbose=False, json=False)
        )
        hosts = [self.devices, self.per_host]
        return compute_key(
            self.subject.recipe,
            {
                "plan": options,
                "hosts": hosts,
                "from_user": self.subject.from_user,
                "absent": self.subject.absent,
                "reads_data": self.subject.reads_data,
                "text": self.subject.config and self.subject.config.file.text,
            },
        )


def plan_training(options: TrainingPlanOptions, again: Sequence[str]) -> None:
    """Plans a recipe, or searches for one; prints the answer, with exit code 3 if it does not fit.

    Args:
        again: the command that was typed, without its output options.
    """
    question = _read_question(options)
    subject = question.subject
    if subject.reading is not None and not options.json:
        for line in describe_reading(subject.reading, details=options.verbose):
            say(line)
        say()
    question, answer = _find_answer(question)
    _print(question, again, answer.plan, answer.recipe, answer.figures)


def _find_answer(question: _Question) -> tuple[_Question, Answer]:
    """Returns the stored answer or plans; the returned question has the recipe of `--solve`."""
    from preheat.planning import answer_cache

    options, subject, key = question.options, question.subject, question.key
    stored = answer_cache.load(key) if key is not None else None
    if stored is not None and (not options.has_plots or stored.figures is not None):
        return question, stored
    if not options.json:
        print_progress("dry run: starting")  # the imports take seconds
    solution = None if options.solve is None else _solve(question, options.solve)
    if solution is not None:
        subject = replace(subject, recipe=solution.subject.recipe)
        question = replace(question, subject=subject)
    result, page = _plan_or_search(question)
    currency = options.price.currency if options.price is not None else result.currency
    result = replace(
        result,
        text_part=text_part_note(subject.recipe),
        currency=currency,
        absent=subject.absent,
        largest_value=None if solution is None else solution.largest,
    )
    text = render_recipe(result, subject, options.set)
    if result.searched.interrupted:
        # The best so far is no answer to store, and the page takes another dry run.
        return question, answer_cache.Answer(result, text, None)
    answer = answer_cache.Answer(result, text, page() if options.has_plots else None)
    if key is not None:
        answer_cache.store(key, answer)
    return question, answer


def plan_for_prices(
    options: TrainingPlanOptions, offers: Sequence[tuple[Offer, list[int]]], again: Sequence[str]
) -> None:
    """Plans a recipe for each offer; prints them by cost, and the plan of the cheapest.

    Args:
        offers: each with its numbers of devices (`plan_cheapest.choose_offers`).
        again: the command that was typed, without the devices, the aim and its output options.
    """
    from preheat.cli.plan_cheapest import build_prices_table, describe_priced, find_cheapest
    from preheat.cli.views.console import build_console, emit

    _choose_subject(options)  # errors of the recipe itself, before any plan

    def ask(offer: Offer, count: int) -> TrainingPlanOptions:
        return replace(options, gpu=offer.device, count=count, price=offer.price, aim="fastest", json=True)

    def tell(message: str) -> None:
        if not options.json:
            print_progress(message)

    entries = find_cheapest(offers, lambda offer, count: _find_answer(_read_question(ask(offer, count)))[1].plan, tell)
    tell("")
    figures = [describe_priced(entry) for entry in entries]
    best = next((entry for entry in entries if not entry.problem), None)
    if best is None:
        raise DoesNotFit(f"--aim cheapest: fits on none of the {len(entries)} choices: {entries[0].problem}")
    chosen = ask(best.offer, best.count)
    if options.json:
        emit({"offers": figures, "cheapest": _find_answer(_read_question(chosen))[1].plan})
        return
    build_console().print(build_prices_table(figures))
    build_console().print()
    stated = ("--gpu", best.offer.device.name, "--count", str(best.count), "--aim", "fastest")
    plan_training(replace(chosen, json=False), [*again, *stated])


def _read_question(options: TrainingPlanOptions) -> _Question:
    """Finds the recipe and the devices.

    Raises:
        RecipeError: there is no such recipe or model, or the options contradict the recipe.
    """
    if options.solve is not None and options.aim == "longest-context":
        raise RecipeError("--solve: --aim longest-context solves for batch.seq_len by itself; leave one of the two out")
    subject = _choose_subject(options)
    if options.write is not None:
        _check_write(options.write, options, subject)
    if subject.from_user and options.method is not None:
        raise RecipeError(
            f"--method: {options.method}: a recipe's techniques define how it trains; leave --method out, or name a "
            "model"
        )
    devices, per_host = count_devices(options, subject)
    if subject.from_user and options.gpu is not None:
        besides = ("parallel.devices",) if devices > 1 else ()
        note_unread([FOR_ANOTHER_DEVICE], subject.recipe, besides=besides)
    return _Question(options, subject, devices, per_host)


def _check_write(file: Path, options: TrainingPlanOptions, subject: Subject) -> None:
    """Raises PreheatError if the improved file cannot be written."""
    from preheat.cli.plan_improving import require_writable

    typed = {"--solve": options.solve, "--aim": options.aim, "--allow": options.allow}
    for option, value in typed.items():
        if value is not None:
            raise RecipeError(f"--write: writes the changes that help the file as it is; leave {option} {value} out")
    require_writable(file, subject.config)


def _choose_subject(
    options: TrainingPlanOptions,
    *,
    method: str | None = None,
    devices: int | None = None,
    overrides: Sequence[str] = (),
    changes: Mapping[tuple[str, ...], object] | None = None,
) -> Subject:
    """Returns the recipe that is asked for, or that of another method, number of devices, or value of some keys."""
    subject = find_subject(
        options.what,
        [*options.set, *overrides],
        method=method or options.method or "full",
        length=options.length,
        batch_tokens=options.batch_tokens,
        devices=devices or options.devices,
        foreign=replace(options.foreign, changes=changes or {}),
    )
    if method is None and not subject.from_user:
        _require_method_for(subject.recipe, options.method)
    return subject


def _require_method_for(recipe: Recipe, method: str | None) -> None:
    """Raises RecipeError if the method trains, or quantizes again, weights that a named folder stores in few bits."""
    from preheat.core import Tag

    folder = Path(recipe.model.path or "")
    if recipe.model.path is None or not folder.is_dir():
        return
    stored = quantization_of(read_object(folder / "config.json", "model.path")).get("quant_method")
    if stored not in PACKED or not keeps_quantization(stored, recipe.model.quantized_weights):
        return
    if method == "qlora":
        raise RecipeError(f"--method qlora: {folder} is stored in {stored} already; use --method lora")
    if not any(Tag.FROZEN_BASE in t.provided() for t in recipe.techniques.values()):
        raise RecipeError(
            f"{folder}: is stored in {stored}, and packed weights cannot be trained; use --method lora, or --set "
            "model.quantized_weights=dequantized to train all weights in full precision"
        )


def _solve(question: _Question, key: str) -> Solution:
    """Finds the largest value of a key with which the recipe fits, as it is or by a search for each value."""
    from preheat.cli.plan_solving import solve
    from preheat.planning.plan import plan, resolve_auto
    from preheat.planning.plan_request import request_of
    from preheat.planning.search.candidates import Space
    from preheat.planning.search.search import count_passes, search

    options, subject = question.options, question.subject
    world = None if options.gpu is None and not question.is_search else question.devices
    request = request_of(subject.recipe, options.gpu, world=world, per_host=question.per_host, count_rows=False)

    def plan_request(request: Request) -> Plan:
        if not question.is_search:
            return plan(resolve_auto(request))
        space, aim = Space(request, question.allow), question.aim
        assert aim != "longest-context", "refused with the options"
        return search(space, aim=aim, passes=count_passes(request.devices) // 3, confirm=False).best.plan

    return solve(
        key,
        subject,
        lambda overrides, changes: _choose_subject(options, overrides=overrides, changes=changes),
        request,
        plan_request,
        quiet=options.json,
    )


def _improve(question: _Question, config: ForeignConfig, request: Request, planned: Plan) -> Improvements:
    """Returns the changes that help the run of another trainer's file most."""
    from preheat.cli.plan_improving import find_file_improvements

    options = question.options
    return find_file_improvements(
        question.subject,
        config,
        request,
        planned,
        lambda changes: _choose_subject(options, changes=changes),
        quiet=options.json,
    )


def _write_improved(question: _Question, file: Path, result: Plan) -> bool:
    """Writes another trainer's file with the changes that help together; returns False if none does."""
    from preheat.cli.plan_improving import write_improved
    from preheat.interop.reading import read_config

    config, options = question.subject.config, question.options
    assert config is not None, "checked with the options"
    if result.improvements is None or result.improvements.together is None:
        return False

    def read(path: Path, text: str, changes: Mapping[tuple[str, ...], object]) -> Recipe:
        return read_config(
            text,
            path,
            config.file.format,
            overrides=options.set,
            changes=changes,
            deepspeed=options.deepspeed,
            accelerate=options.accelerate,
        ).recipe

    write_improved(file, config, result.improvements.together, read)
    return True


def _print(question: _Question, again: Sequence[str], result: Plan, text: str, figures: PlanFigures | None) -> None:
    """Writes the files that are asked for, and prints the answer.

    Args:
        text: its recipe as YAML.
        figures: of its page; None if no page is asked for, or the search was interrupted.
    """
    options, subject, per_host = question.options, question.subject, question.per_host
    if largest := result.largest_value:
        options = replace(options, set=(*options.set, *largest.overrides))
    result = replace(result, reading=subject.reading)
    assumed = [] if subject.from_user else list_assumed_settings(subject, result, again, per_host=per_host)
    command = build_next_command(result, subject, options, again, per_host=per_host)
    if options.out is not None:
        from preheat.files import write_generated

        so_far = "; the search was interrupted, this is the best so far" if result.searched.interrupted else ""
        write_generated(options.out, text, f"# written by preheat plan{so_far}")
    if options.html is not None and figures is not None:
        from preheat.cli.views.plan_answer import build_page_texts
        from preheat.report.plan_page import write_plan

        write_plan(result, figures, build_page_texts(result, assumed=assumed, command=command), text, options.html)
    if options.figures is not None and figures is not None:
        from preheat.files import to_json, write_user_file

        write_user_file(options.figures, to_json(figures) + "\n", marks=['{"timeline": '])
    written = options.write is not None and _write_improved(question, options.write, result)
    if options.write is not None and not written:
        # Before the answer, which ends the command if nothing fits.
        say(f"note: {options.write} was not written: no change of the file helps", error=True)
    finish(
        result,
        subject,
        json=options.json,
        verbose=options.verbose,
        out=options.out,
        html=options.html,
        improved=options.write if written else None,
        assumed=assumed,
        command=command,
    )


def _plan_or_search(question: _Question) -> tuple[Plan, Callable[[], PlanFigures]]:
    """Returns the plan, and a function that computes the figures of its page."""
    from preheat.planning.plan_request import request_of

    options, subject, devices, per_host = question.options, question.subject, question.devices, question.per_host
    gpu, price = options.gpu, None if options.price is None else options.price.per_hour
    if not question.is_search:
        request = request_of(
            subject.recipe,
            gpu,
            world=None if gpu is None else devices,
            per_host=per_host,
            count_rows=subject.reads_data,
        )
        own = (add_own_techniques(subject.recipe), add_own_techniques(subject.recipe, fused=False))
        instead = () if subject.reading is None else own
        result, page = plan_as_written(request, devices, price, instead=instead)
        if subject.config is not None and options.solve is None:
            result = replace(result, improvements=_improve(question, subject.config, request, result))
        return result, page
    request = request_of(
        subject.recipe, gpu, world=devices, per_host=per_host, count_rows=subject.from_user and subject.reads_data
    )
    return _search_recipe(
        request,
        _find_fixes(question),
        aim=question.aim,
        allow=question.allow,
        price=price,
        quiet=options.json,
    )


def plan_as_written(
    request: Request, devices: int, price: float | None, *, instead: Sequence[Recipe] = ()
) -> tuple[Plan, Callable[[], PlanFigures]]:
    """Plans a recipe without a search, after resolving the settings that it leaves `auto`.

    Args:
        devices: number of devices, for cost, energy and figures.
        price: of a device-hour; None: unknown.
        instead: other recipes of the same model: the first whose techniques go with it is the alternative.

    Returns:
        The plan (`settled` has the resolved settings), and a function that computes the figures of its page.
    """
    from preheat.core import Tag
    from preheat.planning.explain import build_figures, explain
    from preheat.planning.plan import find_settled, plan, resolve_auto
    from preheat.planning.search.max_context import find_longest_as_stated
    from preheat.planning.search.result import SearchResult

    as_written = request.recipe
    request = resolve_auto(request)
    recipe, prediction = request.recipe, plan(request)
    added = tuple(recipe.techniques.values())
    extended = any(Tag.EXTENDED_CONTEXT in t.provided() for t in added)  # also report the longest context that fits
    result = SearchResult(_evaluate(request, prediction))
    result.alternatives += _evaluate_alternative([replace(request, recipe=other) for other in instead], result.best)

    def build_page() -> PlanFigures:
        return build_figures(replace(result, evaluated=[result.best]), replace(request, world=devices))

    return replace(
        explain(result, devices=devices, price=price),
        chosen=prediction.chosen,
        longest_context=find_longest_as_stated(request) if extended else None,
        settled=find_settled(as_written, recipe),
    ), build_page


def _evaluate(request: Request, prediction: Plan) -> EvaluatedPlan:
    from preheat.planning.search.candidates import worst_numerics
    from preheat.planning.search.result import EvaluatedPlan

    recipe = request.recipe
    added = tuple(recipe.techniques.values())
    return EvaluatedPlan(recipe, prediction, worst_numerics(added), recipe.batch.size, ())


def _evaluate_alternative(requests: Sequence[Request], best: EvaluatedPlan) -> list[EvaluatedPlan]:
    """Returns the plan of the first request whose techniques go with the model, if it is better in something."""
    from preheat.planning.plan import plan, resolve_auto
    from preheat.planning.search.result import is_better_in_something

    for request in requests:
        try:
            resolved = resolve_auto(request)
            alternative = _evaluate(resolved, plan(resolved))
        except RecipeError:  # a technique does not go with the model, or with another one
            continue
        return [alternative] if is_better_in_something(alternative, best) else []
    return []


@dataclass(frozen=True)
class _Fixes:
    """Alternatives to try if nothing fits.

    Attributes:
        methods: recipes of the same model by method.
        request_on: returns the request for another number of devices; None if the recipe does not go with it.
        length: arguments that set the length of sequences, up to the number.
    """

    methods: Mapping[str, Recipe]
    request_on: Callable[[int], Request | None]
    length: Sequence[str]


def _find_fixes(question: _Question) -> _Fixes:
    """Returns what to try if nothing fits."""
    from preheat.planning.plan_request import request_of

    options, subject = question.options, question.subject
    methods: dict[str, Recipe] = {}
    if not subject.from_user:
        names = list(METHODS)
        fewer = names[names.index(options.method or "full") + 1 :]
        methods = {name: _choose_subject(options, method=name).recipe for name in fewer}

    def request_on(devices: int) -> Request | None:
        if options.gpu is None:  # more processes share this machine's memory
            return None
        try:
            recipe = _choose_subject(options, devices=devices).recipe
            per_host = question.per_host if options.nodes > 1 else min(devices, 8)
            return request_of(recipe, options.gpu, world=devices, per_host=per_host, count_rows=False)
        except RecipeError:  # the recipe is for a stated number of devices
            return None

    return _Fixes(methods, request_on, ("--set", "batch.seq_len=") if subject.from_user else ("--length", ""))


def _search_recipe(
    request: Request, fixes: _Fixes, *, aim: Aim, allow: Numerics, price: float | None, quiet: bool
) -> tuple[Plan, Callable[[], PlanFigures]]:
    """Searches for the best recipe; if nothing fits, the alternatives are what does.

    Args:
        quiet: do not print progress.
    """
    from preheat.core.plan import Alternative
    from preheat.hardware.interrupts import Interrupted
    from preheat.planning.explain import build_figures, explain
    from preheat.planning.observation_cache import observe_for_others
    from preheat.planning.search.candidates import Space
    from preheat.planning.search.max_context import find_longest
    from preheat.planning.search.nearest_miss import find_more_devices, find_shorter_rows
    from preheat.planning.search.result import SearchResult
    from preheat.planning.search.search import count_passes, search
    from preheat.planning.worker_pool import start_worker_pool

    devices, passes = request.devices, count_passes(request.devices)

    def tell(message: str) -> None:
        if not quiet:
            print_progress(f"dry run: {message}")

    def search_for(request: Request, *, passes: int = passes, confirm: bool = True) -> SearchResult:
        space = Space(request, allow)
        if aim == "longest-context":
            return find_longest(space, passes=passes, tell=tell)
        return search(space, aim=aim, passes=passes, confirm=confirm, tell=tell)

    def iterate_fitting(result: SearchResult) -> Iterator[Alternative]:
        """Yields what fits instead, as alternatives."""

        def build_alternative(
            options: Sequence[str], instead: SearchResult, tradeoff: str, devices: int = devices
        ) -> Alternative:
            would = explain(instead, devices=devices, price=price)
            assert would.recipe is not None
            return Alternative(
                what=f"{' '.join(options)}: {would.chosen}",
                recipe=would.recipe["techniques"],
                peak_gib=would.peak_gib,
                tokens_per_second=would.tokens_per_second,
                seconds_per_step=would.seconds_per_step,
                mfu=would.mfu,
                tradeoff=tradeoff,
                cost=would.cost,
                energy=would.energy,
                options=tuple(options),
            )

        for name, other in fixes.methods.items():
            instead = search_for(replace(request, recipe=other), passes=passes // 2, confirm=False)
            if instead.best.plan.fits_safely:
                base = " on a base in 4 bits" if name == "qlora" else ""
                yield build_alternative(["--method", name], instead, f"trains an adapter{base}")
        space = Space(request, allow)
        if shorter := find_shorter_rows(result.best, space):
            length = shorter.recipe.batch.seq_len
            yield build_alternative(
                [*fixes.length[:-1], f"{fixes.length[-1]}{length}"],
                SearchResult(shorter),
                f"sequences of {length:,} tokens",
            )
        if more := find_more_devices(result.best, space, fixes.request_on, passes=passes // 2, tell=tell):
            count, instead = more
            hosts = [] if count <= 8 else ["--nodes", str(count // 8)]
            yield build_alternative(["--count", str(min(count, 8)), *hosts], instead, f"{count} devices", count)

    with start_worker_pool(observe_for_others):
        result = search_for(request)
        explained = explain(result, devices=devices, price=price)
        if not explained.fits_safely and not result.interrupted:
            instead: list[Alternative] = []
            try:
                instead.extend(iterate_fitting(result))
            except Interrupted as signal:
                if signal.number != SIGINT:
                    raise
                explained = replace(explained, searched=replace(explained.searched, interrupted=True))
            explained = replace(explained, alternatives=(*explained.alternatives, *instead))
        if not quiet:
            print_progress()

    def build_page() -> PlanFigures:
        return build_figures(result, request)

    return explained, build_page
