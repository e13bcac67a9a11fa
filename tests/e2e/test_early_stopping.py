"""Best checkpoint and early stopping, as users run them: in one process, killed and resumed, and in two processes."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from preheat.core.run_records import Finished, NewBest, PutBack, SetAside
from preheat.engine import checkpoint
from preheat.evaluation.run_evaluator import RunEvaluator
from preheat.hardware.interrupts import Interrupted
from preheat.run.reader import Reader
from preheat.training.session import Session

from ..fork_server import Fork, command
from .conftest import RECIPE, Command, losses, write_text

MIN_DELTA = 0.1
SETTINGS = [
    part
    for item in (
        *("optimizer.lr=0.05", "stop.max_steps=40", "stop.patience=2", f"stop.min_delta={MIN_DELTA}"),
        *("evaluate={every: 2, rows: 8}", "checkpoint={best: validation_loss, keep: 1, asynchronous: true}"),
    )
    for part in ("--set", item)
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Command:
    """A folder with the run `whole`, which has stopped early."""
    folder = tmp_path_factory.mktemp("early")
    write_text(folder)
    (folder / "r.yaml").write_text(RECIPE)
    preheat = Command(folder, cache)
    preheat.here("train", "r.yaml", "--out", "whole", *SETTINGS)
    return preheat


def by_hand(run: Path) -> tuple[int, int]:
    """The best step and the last one of a run with these settings, from its logged evaluations."""
    best, best_step, without = math.inf, 0, 0
    for evaluation in Reader(run).evaluations():
        assert evaluation.validation_loss is not None
        if evaluation.validation_loss < best - MIN_DELTA:
            best, best_step, without = evaluation.validation_loss, evaluation.step, 0
        else:
            without += 1
        if without == 2:
            return best_step, evaluation.step
    raise AssertionError("the run did not stop early")


def end(run: Path) -> Finished:
    (event,) = Reader(run).events(Finished)
    return event


def saved(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_a_run_stops_early_and_keeps_its_best_checkpoint(stopped: Command) -> None:
    run = stopped.folder / "whole"
    best, last = by_hand(run)
    assert 2 < best < last < 40
    event = end(run)
    assert event.best is not None
    assert (event.reason, event.steps, event.best.step) == ("patience", last, best)
    assert max(losses(run)) == last
    assert (run / "checkpoints/best").read_text() == f"step-{best}\n"
    assert saved(run) == {"best", f"step-{best}", f"step-{last}"}
    assert [event.step for event in Reader(run).events(NewBest)][-1] == best
    # No evaluation is repeated.
    assert (run / "metrics.jsonl").read_text().count("validation_loss") == last // 2
    again, _ = stopped.here("train", "r.yaml", "--out", "whole", "--resume", *SETTINGS)
    assert f"is finished already, at step {last}" in again.replace("\n", " ")
    assert "larger stop.patience" in again.replace("\n", " ")


def test_commands_load_the_best_checkpoint(stopped: Command) -> None:
    run = stopped.folder / "whole"
    best, last = by_hand(run)
    logged = {evaluation.step: evaluation.validation_loss for evaluation in Reader(run).evaluations()}
    for choice, step in (("best", best), ("last", last), (str(best), best)):
        loss = stopped.here.json("eval", "whole", "--rows", "8", "--checkpoint", choice)["loss"]
        assert loss == pytest.approx(logged[step], rel=1e-4)
    assert logged[best] != pytest.approx(logged[last], rel=1e-3)
    assert stopped.here.json("generate", "whole", "--checkpoint", "best", "--tokens", "2")["texts"][0]["step"] == best
    made = stopped.here.json("export", "whole", "--checkpoint", "best")
    assert made["path"].endswith(f"whole/export-hf-step-{best}")
    error = stopped.here("eval", "whole", "--checkpoint", "newest", code=1)[1]
    assert "--checkpoint 'newest': write best, last or a step" in error


def test_a_run_goes_back_to_its_best_checkpoint(stopped: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped.folder / "back"
    shutil.copytree(stopped.folder / "whole", run)
    best, last = by_hand(run)
    error = stopped.here("train", "r.yaml", "--out", "back", "--checkpoint", "best", *SETTINGS, code=2)[1]
    assert "add --resume" in error
    back = ("train", "r.yaml", "--out", "back", "--resume", "--checkpoint", "best", *SETTINGS)
    before = saved(run)
    error = stopped.here(*back, "--skip-rows", "0..1", code=1)[1]
    assert f"not resumed: renamed back to step-{last}" in error
    assert (saved(run), checkpoint.best_step(run / "checkpoints")) == (before, best)
    (event,) = Reader(run).events(PutBack)
    assert event.checkpoints == (f"step-{last}",)

    def interrupt(session: Session, *, resume: bool) -> None:
        raise Interrupted(signal.SIGTERM)

    # The command that is said goes back, too: the run has not.
    with monkeypatch.context() as patched:
        patched.setattr(Session, "assemble", interrupt)
        error = stopped.here(*back, code=143)[1]
    assert f"to resume: preheat {shlex.join(back)}" in " ".join(error.split())
    assert saved(run) == before
    stopped.here(*back)
    event = Reader(run).events(SetAside)[-1]
    assert (event.step, event.checkpoints) == (best, (f"step-{last}.aside-1",))
    assert saved(run) == {"best", f"step-{best}", f"step-{last}", f"step-{last}.aside-1"}
    assert by_hand(run) == (best, last)
    assert losses(run) == losses(stopped.folder / "whole")


def killed(phase: str, step: str, *arguments: str) -> None:
    """Runs preheat and kills it at a phase of the evaluation and the checkpoint of a step."""

    def dies(function: Any, *, before: bool, at: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if at(*args) != int(step):
                return function(*args, **kwargs)
            if not before:
                function(*args, **kwargs)
            return os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    owner, name, before, at = {
        "not evaluated": (RunEvaluator, "take", True, lambda evaluator, build, writer, step: step),
        "evaluated": (RunEvaluator, "take", False, lambda evaluator, build, writer, step: step),
        "not saved": (checkpoint, "write", True, lambda build, content, folder: content.step),
        "saved": (checkpoint, "write", False, lambda build, content, folder: content.step),
        "marked": (checkpoint, "mark_best", False, lambda folder, step: step),
    }[phase]
    with mock.patch.object(owner, name, dies(getattr(owner, name), before=before, at=at)):
        command(*arguments)


def test_killed_around_its_best_step_it_ends_alike(stopped: Command) -> None:
    whole, run = stopped.folder / "whole", stopped.folder / "killed"
    best, last = by_hand(whole)
    arguments = ("train", "r.yaml", "--out", "killed", *SETTINGS)
    phases = [("not evaluated", best), ("evaluated", best), ("not saved", best), ("saved", best), ("marked", best)]
    for phase, step in [*phases, ("evaluated", last)]:
        process = Fork(
            [phase, str(step), *arguments, "--auto-resume"],
            function=f"{__name__}:killed",
            folder=stopped.folder,
            environment=stopped.environment,
        )
        out = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL, (phase, out)
    stopped.here(*arguments, "--resume")
    assert by_hand(run) == (best, last)
    assert losses(run) == losses(whole)
    assert saved(run) == saved(whole)
    assert (run / "checkpoints/best").read_text() == f"step-{best}\n"
    assert (end(run).reason, end(run).steps, end(run).loss, end(run).validation_loss, end(run).best) == (
        *(end(whole).reason, end(whole).steps, end(whole).loss, end(whole).validation_loss, end(whole).best),
    )


def test_two_processes_stop_together(stopped: Command) -> None:
    made = stopped.json(
        "train", "r.yaml", "--out", "two", "--nproc", "2", *SETTINGS, "--set", "techniques.data_parallel={}"
    )
    run = stopped.folder / "two"
    best, last = by_hand(run)
    assert (made["steps"], made["reason"], made["best"]["step"]) == (last, "patience", best)
    assert max(losses(run)) == last
    assert saved(run) == {"best", f"step-{best}", f"step-{last}"}


def test_a_target_loss_ends_the_run_and_is_timed(stopped: Command) -> None:
    evaluations = Reader(stopped.folder / "whole").evaluations()
    target = evaluations[-1].validation_loss
    assert target is not None
    step = next(e.step for e in evaluations if (e.validation_loss or math.inf) <= target)
    settings = [*SETTINGS, "--set", f"stop.target_loss={target}", "--set", "checkpoint.best=null"]
    made = stopped.here.json("train", "r.yaml", "--out", "target", *settings)
    assert (made["reason"], made["steps"]) == ("target_loss", step)
    (event,) = Reader(stopped.folder / "target").events(Finished)
    assert made["target"] == {"loss": target, "steps": step, "tokens": event.tokens, "seconds": event.seconds}
    assert event.tokens == step * 4 * 32
    again = stopped.here.json("train", "r.yaml", "--out", "target", "--resume", *settings)
    assert (again["already_finished"], again["target"]) == (True, made["target"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["stop.patience=2"], "stop.patience: 2 changes nothing: it is decided at evaluations during the run"),
        (["checkpoint.best=validation_loss"], "checkpoint.best: 'validation_loss' changes nothing: it is decided at"),
        (
            ["stop.min_delta=0.1", "evaluate.every=2"],
            "stop.min_delta: 0.1 changes nothing: it is for stop.patience and",
        ),
        (
            ["checkpoint.best=accuracy", "evaluate={every: 2, tasks: [recall]}"],
            "checkpoint.best: no evaluation of this recipe gives 'accuracy'; it gives: validation_loss, "
            "recall/accuracy, recall/loss",
        ),
        (
            ["stop.target_loss=1", "evaluate={every: 2, tasks: [recall]}", "data.validation=0"],
            "stop.target_loss: no evaluation of this recipe gives 'validation_loss'; it gives: recall/accuracy, recall/loss",
        ),
    ],
)
def test_settings_without_an_evaluation_are_errors(preheat: Command, settings: list[str], message: str) -> None:
    error = preheat.here(
        "train", "r.yaml", "--out", "run", *(part for item in settings for part in ("--set", item)), code=2
    )[1]
    assert message in " ".join(error.split())
    assert not (preheat.folder / "run").exists()


def test_a_run_without_a_best_checkpoint_says_so(preheat: Command) -> None:
    preheat.here("train", "r.yaml", "--out", "run", "--set", "stop.max_steps=1")
    error = preheat.here("generate", "run", "--checkpoint", "best", code=1)[1]
    assert "has no best checkpoint; a run keeps it if its recipe sets checkpoint.best" in error
