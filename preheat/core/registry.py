"""The registry of techniques and the rules for combining them. No torch.

The registry imports every module of `preheat/techniques/`, and the modules that other packages name in the entry-point
group `preheat.techniques`:

    [project.entry-points."preheat.techniques"]
    my_technique = "my_package.my_technique"

A module that is not installed is named with `preheat --plugin`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points

from preheat import plugins
from preheat.core.problems import MissingPackage, Problem, ProblemCode
from preheat.core.slots import Slot
from preheat.core.tags import Tag
from preheat.core.technique import _REGISTRY, Context, Searchable, Technique
from preheat.errors import RunError, suggest_nearest
from preheat.sanitize import shorten

__all__ = [
    "GROUP",
    "conflicts_of",
    "incompatibilities",
    "single_device",
    "problems_of",
    "registry",
    "parallel_tags",
]

GROUP = "preheat.techniques"
"""Our package of techniques, and the entry-point group of those in other packages."""


@functools.cache
def _load() -> None:
    """Imports and checks all techniques.

    Raises:
        RunError: a module cannot be imported or is incomplete; the message has its file and the reason.
    """
    package = importlib.import_module(GROUP)  # by name, because techniques import this package
    modules = [f"{GROUP}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    # Our own first: a foreign technique that takes one of their names is then the one to be reported.
    for module in [*modules, *sorted(point.value for point in entry_points(group=GROUP))]:
        before = len(_REGISTRY)
        try:
            importlib.import_module(module)
            # The second test: a module that was imported earlier registers nothing now.
            if module not in modules and len(_REGISTRY) == before and module not in _modules():
                raise ImportError("it defines no technique")
        except plugins.IMPORT_ERRORS as error:
            reason = f"{type(error).__name__}: {shorten(str(error), 300)}"
            # `Tag.MISSPELLED` in a class body: names the nearest tag instead of Python's message.
            if isinstance(error, AttributeError) and error.obj is Tag and error.name:
                reason = f"there is no tag {error.name}; {suggest_nearest(error.name, list(Tag.__members__))}"
            raise RunError(f"{_file_of(module)}: cannot be imported ({reason})") from error
    plugins.load()
    # At the first use of the registry, so that no run begins with an incomplete technique.
    for name, cls in _REGISTRY.items():
        if reason := _declaration_fault(cls):
            raise RunError(f"{_file_of(cls.__module__)}: technique {name}: {reason}")


_SEARCH = (
    "last_resort",
    "searched_on",
    "memory_saving",
    "is_memory_saving",
    "search_numerics",
    "options",
    "fallbacks",
    "resolve_auto",
)


def _file_of(module: str) -> str:
    """The file of a module, which need not be importable; its dotted name if there is none."""
    loaded = sys.modules.get(module)
    try:
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a package above it is absent, or it is no module's name
        spec = None
    return (spec.origin if spec is not None else None) or module


def _modules() -> set[str]:
    return {cls.__module__ for cls in _REGISTRY.values()}


def _declaration_fault(cls: type[Technique]) -> str:
    """Returns what a technique's declaration lacks or has wrong; empty if it is complete."""
    # The docstring is the technique's page in the documentation.
    document = sys.modules[cls.__module__].__doc__
    if not (document or "").strip():
        return "has no docstring; describe in its module what it does, when it helps, when it hurts, and its source"
    for attribute in ("stage", "numerics"):
        if not hasattr(cls, attribute):
            return f"states no {attribute}; see preheat.core.Technique"
    if cls.__abstractmethods__:
        return f"does not define {', '.join(sorted(cls.__abstractmethods__))}; see preheat.core.Technique"
    # A method that only a search calls would never run, without any message.
    if not issubclass(cls, Searchable) and (lost := [name for name in _SEARCH if name in vars(cls)]):
        return f"defines {lost[0]}, which only a preheat.core.Searchable has; extend that"
    for attribute in ("provides", "needs", "conflicts"):
        for tag in getattr(cls, attribute):
            if not isinstance(tag, Tag):
                return f"{attribute} has {tag!r}, which is not a Tag; use a member of preheat.core.Tag"
    for slot in cls.owns:
        if not isinstance(slot, Slot):
            return f"owns has {slot!r}, which is not a Slot; use a member of preheat.core.Slot"
    return ""


def registry() -> Mapping[str, type[Technique]]:
    """Returns every technique that is a key of `techniques` by name, in alphabetical order."""
    _load()
    return {name: cls for name, cls in sorted(_REGISTRY.items()) if not cls.selected_by}


def problems_of(t: Technique, context: Context) -> list[Problem]:
    """Returns why a technique cannot be used here, whatever else the recipe has; empty if it can."""
    # Settings that do nothing are excused from general rules, but their own check still runs.
    if not t.acts():
        reasons = t.check(context)
    elif context.model.encoder and not t.supports_encoder_decoder:
        reasons = [f"was made for decoder-only models, and {context.model.family} has an encoder; leave it out"]
    elif context.model.quantized and Tag.QUANTIZED_BASE in t.conflicts:
        reasons = [
            f"cannot go with weights that stay packed in {context.model.quantized}; leave it out, or set "
            "model.quantized_weights: dequantized"
        ]
    else:
        reasons = ([t.unsupported_for_images] if t.unsupported_for_images and context.model.vision else []) + t.check(
            context
        )
    return [
        Problem(
            t.name(),
            ProblemCode.UNSUPPORTED,
            reason,
            t.selected_by,
            reason.install if isinstance(reason, MissingPackage) else "",
        )
        for reason in reasons
    ]


def single_device(techniques: Mapping[str, Technique]) -> dict[str, Technique]:
    """Returns the techniques that apply to one device: neither parallel ones nor those that need them."""
    return {name: t for name, t in techniques.items() if not t.is_parallel() and not t.needs & parallel_tags()}


def parallel_tags() -> frozenset[Tag]:
    """Returns the tags that only parallel techniques provide."""
    return frozenset(tag for cls in registry().values() if cls.is_parallel() for tag in cls.provides)


def incompatibilities(techniques: Iterable[Technique], tags: frozenset[Tag]) -> list[Problem]:
    """Returns why these techniques cannot be combined, whatever the model.

    Args:
        tags: all that the recipe and the device provide.
    """
    problems: list[Problem] = []
    owner: dict[Slot, Technique] = {}
    # In the order of application, so that messages do not depend on the recipe's order.
    chosen = sorted((t for t in techniques if t.acts()), key=lambda t: (t.stage, t.name()))
    for t in chosen:
        name = t.name()
        for slot in sorted(t.claimed()):
            # The first owner: further ones are each reported against it.
            if (first := owner.setdefault(slot, t)) is not t:
                text = f"owns the slot '{slot}', which {first.name()} owns already; leave one out"
                problems.append(_engine_conflict(t, first) or Problem(name, ProblemCode.SLOT_TAKEN, text))
        for tag in sorted(t.needs - tags):
            text = f"needs {tag}, which nothing in this recipe provides; {_providers(tag)}"
            problems.append(Problem(name, ProblemCode.MISSING_TAG, text))
        for other in chosen:
            # One-sided: it is enough that one of the two declares the conflict. A technique may exclude a tag of its
            # own, so that no second one provides it.
            if other is not t and (shared := t.conflicts & other.provided()):
                text = f"cannot go with {other.name()} ({', '.join(sorted(shared))})"
                problems.append(_engine_conflict(t, other) or Problem(name, ProblemCode.CONFLICT, text))
    return list(dict.fromkeys(problems))  # several slots may be taken by the engine


def _engine_conflict(one: Technique, other: Technique) -> Problem | None:
    """Returns the problem of the technique that an engine excludes; None if neither is an engine."""
    engine, technique = (one, other) if one.selected_by else (other, one)
    if not engine.selected_by:
        return None
    key = engine.selected_by.partition(":")[0]
    text = f"replaces what {engine.selected_by} does by itself; {technique.beside_engine()}, or choose another {key}"
    return Problem(technique.name(), ProblemCode.ENGINE, text)


def _providers(tag: Tag) -> str:
    """Returns how to provide a missing tag."""
    names = [name for name, cls in registry().items() if tag in cls.provides]
    return f"add {' or '.join(names)}" if names else f"only a {tag} device has it"


def conflicts_of(techniques: Iterable[Technique], context: Context) -> list[Problem]:
    """Returns why these techniques cannot be used together here, including their own checks."""
    chosen = sorted(techniques, key=lambda t: (t.stage, t.name()))
    # Together with each technique's own reasons, so that the user sees all problems of a technique in one place.
    together = incompatibilities(chosen, context.tags)
    problems: list[Problem] = []
    for t in chosen:
        problems.extend(problem for problem in together if problem.technique == t.name())
        problems.extend(problems_of(t, context))
    return problems
