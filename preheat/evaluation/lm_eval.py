"""Runs tasks of lm-eval (EleutherAI's lm-evaluation-harness) on a build: by name, or from a local YAML file."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import remote_code
from preheat.data.rows.file_readers import expand_path
from preheat.data.sources import compute_digest
from preheat.errors import DataError, RecipeError, suggest_nearest
from preheat.evaluation import bootstrap
from preheat.evaluation.results import Result
from preheat.evaluation.scoring import Scorer
from preheat.recipe.yaml_io import parse_nodes, read_text

if TYPE_CHECKING:
    from types import ModuleType

    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from yaml import Node

    from preheat.core.json_types import JsonObject

__all__ = ["measure_by_harness", "build_harness_model", "require_harness"]

WRITTEN = 256
"""Maximum tokens of an answer if the task sets none (lm-eval's own default)."""


def require_harness() -> ModuleType:
    """Imports lm-eval and returns it.

    Raises:
        RecipeError: it is not installed.
    """
    try:
        import lm_eval
    except ModuleNotFoundError as error:
        # A dependency of an installed lm-eval is missing: its own error says which.
        if error.name != "lm_eval":
            raise
        raise RecipeError(
            "--tasks lm-eval:…: needs lm-eval, which is not installed: pip install 'preheat[lm-eval]'"
        ) from None
    return lm_eval


def build_harness_model(scorer: Scorer) -> TemplateLM:
    """Returns the build as a model of lm-eval; `scorer` answers its requests, with the same precision and memory."""
    require_harness()
    from lm_eval.api.model import TemplateLM

    # Defined here, since its base class is imported only if lm-eval is used.
    class Opened(TemplateLM):
        tokenizer = scorer.tokenizer
        rank, world_size = 0, 1

        @property
        def eot_token_id(self) -> int:
            return scorer.encoder.end

        @property
        def prefix_token_id(self) -> int:
            # The token before the first one that is scored, as in training.
            return scorer.encoder.begin[0] if scorer.encoder.begin else scorer.encoder.end

        @property
        def max_length(self) -> int:
            return scorer.length

        @property
        def tokenizer_name(self) -> str:
            return str(scorer.tokenizer.name_or_path).replace("/", "__")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
            # A chat template may have written the token already: a second one would be a text never seen in training.
            has_bos = bool(scorer.tokenizer.bos_token) and string.startswith(scorer.tokenizer.bos_token)
            return scorer.encode(
                string, complete=add_special_tokens is False or (add_special_tokens is None and has_bos)
            )

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return str(
                scorer.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[object, list[int], list[int]]], **_: object
        ) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            return [(score.loglikelihood, score.greedy) for score in scorer.score(pairs)]

        def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
            from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

            sums = []
            for request in requests:
                (text,) = request.args
                tokens = scorer.encode(text, complete=True)
                # Windows that score each token once, with one token of context, as lm-eval's own models do.
                windows = get_rolling_token_windows(
                    tokens, prefix_token=self.prefix_token_id, max_seq_len=scorer.length, context_len=1
                )
                pairs = [make_disjoint_window(window) for window in windows]
                sums.append(sum(score.loglikelihood for score in scorer.score(pairs)))
            return sums

        def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
            answers = []
            for request in requests:
                context, settings = request.args
                if settings.get("do_sample") and settings.get("temperature", 1.0):
                    raise RecipeError(
                        "lm-eval: a task that draws its answers at a temperature; only greedy answers can be compared"
                    )
                until = settings.get("until") or []
                ids = self.tok_encode(context)
                tokens = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or WRITTEN)
                answers += scorer.write(
                    [ids],
                    # At least half of a row is left to the question.
                    tokens=min(tokens, scorer.length // 2),
                    stop=[until] if isinstance(until, str) else until,
                    strip=False,
                )
            return answers

    return Opened()


def measure_by_harness(name: str, scorer: Scorer, *, limit: int | None = None) -> dict[str, Result]:
    """Measures a task of lm-eval, or of a YAML file in its format.

    Args:
        name: task or group of lm-eval, or a file.
        limit: maximum number of rows.

    Returns:
        Results by task; a group has several. Only metrics that are means over rows have values per row.

    Raises:
        RecipeError: no such task, or lm-eval is not installed.
        DataError: its rows cannot be loaded.
    """
    lm_eval = require_harness()
    from lm_eval.tasks import TaskManager

    with _silence_harness():
        if Path(name).suffix in (".yaml", ".yml"):
            file = expand_path("--tasks", name)
            # The file needs none of lm-eval's own tasks, thousands of files to index.
            manager, task = TaskManager(include_path=str(file.parent), include_defaults=False), _name_task(file)
        else:
            manager, task = TaskManager(), name
        known = list(manager.all_tasks)
        if task not in known:
            raise RecipeError(
                f"--tasks lm-eval:{name}: no such task; "
                f"{suggest_nearest(task, known) if len(known) < 50 else _suggest_task(task, known)}"
            )
        try:
            loaded = manager.load([task])
            _refuse_unsafe(name, loaded)
            # No bootstrap of lm-eval: intervals are computed from the values per row, as for all tasks.
            # Seeds of None leave the process's generators unchanged, so that a run stays reproducible.
            output = lm_eval.simple_evaluate(
                model=build_harness_model(scorer), tasks=_list_loaded(task, loaded), task_manager=manager,
                limit=limit, bootstrap_iters=0, log_samples=True,
                random_seed=None, numpy_random_seed=None, torch_random_seed=None,
            )  # fmt: skip
        except (OSError, ConnectionError, FileNotFoundError) as error:
            message = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise DataError(
                f"--tasks lm-eval:{name}: its rows cannot be loaded ({message}); download them on a machine with "
                "a network"
            ) from None
    assert output is not None, "only ranks above 0 get nothing"
    return {key: _build_result(values, output["samples"].get(key, [])) for key, values in output["results"].items()}


def _refuse_unsafe(name: str, loaded: JsonObject) -> None:
    """Raises RecipeError for a task that runs generated programs: lm-eval runs them without protection."""
    if unsafe := next((key for key, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)), None):
        raise RecipeError(
            f"--tasks lm-eval:{name}: lm-eval runs the programs of {unsafe} without a sandbox; use preheat's own "
            "humaneval=FILE or mbpp=FILE, or a task of kind execution"
        )


def _list_loaded(task: str, loaded: JsonObject) -> list[object]:
    """Returns the loaded tasks in the form of `simple_evaluate`, so that their rows are not read twice."""
    return [loaded["groups"][task]] if task in loaded["groups"] else list(loaded["tasks"].values())


def _name_task(file: Path) -> str:
    import yaml

    if not file.is_file():
        raise RecipeError(f"--tasks lm-eval:{file}: no such file")
    where = f"--tasks lm-eval:{file}"
    node = parse_nodes(read_text(file, where), where)  # parses only: constructing would run lm-eval's !function
    remote_code.may_run("--tasks", f"lm-eval:{file}", _find_code(node))
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    named = ((key.value, value.value) for key, value in pairs if isinstance(value, yaml.ScalarNode))
    task = next((name for key, name in named if key in ("task", "group")), None)
    if task is None:
        raise RecipeError(f"--tasks lm-eval:{file}: has no key 'task', so it is not a task of lm-eval")
    return task


def _find_code(node: Node | None) -> list[str]:
    """Lists the code that lm-eval would run for a task's file: its functions, and included files, which may have
    more."""
    import yaml

    code: list[str] = []
    # An explicit stack: `nodes` has bounded the depth and the number of values, aliases included.
    todo = [node]
    while todo:
        part = todo.pop()
        if isinstance(part, yaml.MappingNode):
            code += [f"include: {value.value}" for key, value in part.value if key.value == "include"]
            todo += [inner for pair in part.value for inner in pair]
        elif isinstance(part, yaml.SequenceNode):
            todo += part.value
        if part is not None and part.tag.startswith("!"):
            code.append(f"{part.tag} {part.value if isinstance(part.value, str) else ''}")
    return code


def _suggest_task(task: str, known: list[str]) -> str:
    suggestion = suggest_nearest(task, known)
    return (
        suggestion if suggestion.startswith("did") else f"lm-eval knows {len(known):,}: `lm-eval ls tasks` lists them"
    )


def _build_result(values: JsonObject, samples: Sequence[JsonObject]) -> Result:
    metrics, alone = {}, {}
    for key, value in values.items():
        # lm-eval's keys are `metric,filter`; others (`alias`) are no metrics.
        name, _, filtered = key.partition(",")
        if not filtered or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        shown = name if filtered == "none" else key
        # In the order of documents, so that two builds are compared row by row.
        each = [s.get(name) for s in sorted(samples, key=lambda s: s["doc_id"]) if s.get("filter", "none") == filtered]
        rows = [float(v) for v in each if isinstance(v, int | float)]
        # Any other function of the rows cannot be resampled from their own values.
        if rows and len(rows) == len(each) and abs(sum(rows) / len(rows) - value) < 1e-9:
            metrics[shown] = bootstrap.mean_metric(rows)
        else:
            alone[shown] = float(value)
    # The identity of the rows: equal documents make two results comparable.
    documents = sorted({(s["doc_id"], s.get("doc_hash")) for s in samples})
    return Result(metrics, len(documents), compute_digest(documents), alone=alone)


@contextlib.contextmanager
def _silence_harness() -> Iterator[None]:
    """Context manager that silences lm-eval's logger and redirects what it prints to standard error."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)
