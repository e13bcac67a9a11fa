"""The run folder: nothing of the user's is lost, nothing is read that is not this run's, and what is damaged is named."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import preheat as package
from preheat import recipe as recipes
from preheat.core.run_records import Fallback, Finished, OtherEvent
from preheat.engine import checkpoint
from preheat.errors import PreheatError, RecipeError, RunError
from preheat.files import parse_json, to_json, write_generated
from preheat.inference.load import load_model
from preheat.report import write as write_report
from preheat.run.layout import MARK, claim_folder
from preheat.run.reader import Reader
from preheat.run.writer import Writer
from preheat.training.recovery.fallback_log import effective, find_oom_records
from preheat.training.recovery.oom_report import diagnose

from ..conftest import within
from .conftest import Command, losses

RECIPE = """\
name: small
model: {num_layers: 1, hidden_size: 32, num_heads: 2, vocab_size: 320}
data: {source: text, vocab_size: 300, validation: 0.2}
batch: {size: 4, seq_len: 32}
optimizer: {lr: 0.01}
stop: {max_steps: 6}
schedule: {kind: constant}
evaluate: {rows: 4, forgetting: held.txt}
sample: {prompts: ["the quick"], max_new_tokens: 3}
checkpoint: {every: 2, keep: 9}
hardware: {threads: 1}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A folder with a recipe, and runs of it with two seeds: a and b."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").mkdir()
    draw = random.Random(1)
    for n in range(12):
        words = " ".join(
            draw.choice(["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "by", "night"])
            for _ in range(200)
        )
        (folder / "text" / f"{n}.txt").write_text(words)
    (folder / "held.txt").write_text((folder / "text" / "1.txt").read_text())
    (folder / "r.yaml").write_text(RECIPE)
    command = Command(folder, cache).here
    command("train", "r.yaml", "--out", "a")
    command("train", "r.yaml", "--out", "b", "--set", "seed=2")
    return folder


@pytest.fixture
def command(trained: Path, tmp_path: Path, cache: Path) -> Command:
    """The same in a folder of the test's own."""
    shutil.copytree(trained, tmp_path / "own")
    return Command(tmp_path / "own", cache)


def tree(folder: Path) -> dict[str, str]:
    """Path -> checksum of all files below a folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()
    }


# Nothing of the user's is lost


def test_a_run_begins_only_in_a_new_or_empty_folder(command: Command) -> None:
    mine = command.folder / "mine"
    for name in (
        "checkpoints/step-8/w.bin",
        "tokenizer/t.json",
        "plan.json",
        "report.html",
        "tokenizer.writing/x",
        "lock",
    ):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("mine")
    before = tree(mine)
    for more in ((), ("--auto-resume",), ("--dry-run",), ("--set", "data.source=nowhere")):
        error = command.here("train", "r.yaml", "--out", "mine", *more, code=1)[1]
        assert "name an empty or new folder with --out" in error
        assert tree(mine) == before
    shutil.rmtree(mine / "tokenizer.writing")
    shutil.copy(command.folder / "r.yaml", mine / "recipe.yaml")
    before = tree(mine)
    assert "holds files of something else" in command.here("train", "r.yaml", "--out", "mine", code=1)[1]
    assert f"has no {MARK}" in command.here("train", "r.yaml", "--out", "mine", "--resume", code=1)[1]
    assert "preheat did not write it" in command.here("report", "mine", code=1)[1]
    assert tree(mine) == before
    (command.folder / "empty").mkdir()
    command.here(
        "train", "r.yaml", "--out", "empty", "--set", "data.checks={short: block}", "--set", "model.num_heads=3", code=2
    )
    assert list((command.folder / "empty").iterdir()) == []


def test_an_interrupted_beginning_does_not_block_the_next_try(command: Command) -> None:
    half = command.folder / "half"
    writer = Writer(half)
    writer.write_folder("tokenizer", lambda folder: (folder / "tokenizer.json").write_text("{}"))
    (half / "tokenizer.writing").mkdir()
    (half / "tokenizer.writing" / "cut").write_text("{")
    (half / "plan.json.0123abcd.writing").write_text("{")
    writer.write_event(Fallback(step=0, changed=(), set=()))
    writer.close()
    (half / "tokenizer" / "notes.txt").write_text("mine")
    assert "(tokenizer)" in command.here("train", "r.yaml", "--out", "half", code=1)[1]
    assert (half / "tokenizer" / "notes.txt").read_text() == "mine"
    (half / "tokenizer" / "notes.txt").unlink()
    command.here("train", "r.yaml", "--out", "half")
    assert tree(half / "tokenizer") == tree(command.folder / "a" / "tokenizer")
    assert Reader(half).events()[0].kind == "started"
    assert not list(half.glob("*.writing"))
    bare = command.folder / "bare"
    bare.mkdir()
    (bare / "lock").touch()  # a process that ended right after its first file
    Writer(bare).remove_unstarted()
    assert list(bare.iterdir()) == [], "the folder was there before"
    Writer(command.folder / "new").remove_unstarted()
    assert not (command.folder / "new").exists()


def test_checkpoints_without_their_recipe_are_no_place_to_begin(command: Command) -> None:
    (command.folder / "a" / "recipe.yaml").unlink()
    before = tree(command.folder / "a")
    assert (
        "holds files of something else" in command.here("train", "r.yaml", "--out", "a", "--set", "seed=2", code=1)[1]
    )
    assert tree(command.folder / "a") == before


def test_two_processes_and_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    code = "import sys, time; from preheat.run.writer import Writer; w = Writer(sys.argv[1]); print('locked', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="another process is writing this run"):
            Writer(path)
    finally:
        other.kill()
        other.communicate()
    Writer(path).remove_unstarted()  # the lock of a process that is gone holds nobody up
    assert path.exists(), "it was made by the other"


def test_pages_and_folders_of_results_replace_only_their_own(command: Command) -> None:
    (command.folder / "rows.jsonl").write_text('{"context": "the quick brown", "continuation": "fox"}\n')
    for name in ("p.html", "p.yaml", "s.jsonl"):
        (command.folder / name).write_text("mine: 1\n")
    for arguments in (
        ("plan", "r.yaml", "--html", "p.html"),
        ("plan", "r.yaml", "--out", "p.yaml"),
        ("data", "r.yaml", "--html", "p.html"),
        ("eval", "a", "--tasks", "cloze=rows.jsonl", "--samples", "s.jsonl"),
    ):
        assert "preheat did not write it" in command.here(*arguments, code=1)[1]
    assert {(command.folder / name).read_text() for name in ("p.html", "p.yaml", "s.jsonl")} == {"mine: 1\n"}
    for _ in range(2):
        command.here("data", "r.yaml", "--html", "own.html")
    claim_folder(command.folder / "bench", "bench", ("bench.json", "bench.html"))
    claim_folder(command.folder / "bench", "bench", ("bench.json", "bench.html"))
    with pytest.raises(RunError, match="holds a bench of preheat"):
        claim_folder(command.folder / "bench", "inference", ("inference.json",))
    with pytest.raises(RunError, match=r"holds files that preheat did not write \(0\.txt"):
        claim_folder(command.folder / "text", "bench", ("bench.json",))


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "/tmp/x", "a\nb", "a\x1b[31m", "a\0", "n" * 300, ".hidden", "ä" * 60, 3]
)
def test_a_name_does_not_lead_out_of_its_folder(name: Any) -> None:
    with pytest.raises(RecipeError, match=r"name|NUL") as caught:
        recipes.parse(json.dumps({**recipes.to_values(recipes.parse(RECIPE)), "name": name}))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "\x1b" not in str(caught.value)


# Nothing is read that is not this run's


def weights(path: Path) -> float:
    """A number that two models do not share."""
    return float(
        sum(p.detach().double().abs().sum() for part in load_model(path).build.trained for p in part.parameters())
    )


def test_a_checkpoint_of_another_run_is_neither_read_nor_pruned(command: Command) -> None:
    a, b = command.folder / "a", command.folder / "b"
    whole, wanted = losses(a), weights(a)
    for step in ("step-6", "step-4"):
        shutil.rmtree(a / "checkpoints" / step)
    for step in ("step-4", "step-6"):
        shutil.copytree(b / "checkpoints" / step, a / "checkpoints" / step)
    shutil.copytree(b / "checkpoints/step-6", a / "checkpoints/step-40")
    shutil.copytree(a / "checkpoints/step-2", a / "checkpoints/step-5")  # its name is not its step
    (a / "checkpoints/step-²").mkdir()
    mine = a / "checkpoints" / "mine.writing" / "w.bin"
    mine.parent.mkdir()
    mine.write_text("mine")
    foreign = tree(b / "checkpoints/step-6")
    with pytest.raises(RunError, match="step-4: it belongs to another run"):
        load_model(a, checkpoint=4)
    assert load_model(a).step == 2
    # A run keeps its two newest, whoever else's lie beside them.
    text = (a / "recipe.yaml").read_text()
    (a / "recipe.yaml").write_text(text.replace("keep: 9", "keep: 2"))
    out, _ = command.here("train", "r.yaml", "--out", "a", "--resume", "--set", "checkpoint.keep=2")
    said = out.replace("\n", "")
    assert "step-40: damaged (it belongs to another run)" in said
    assert "step-5: damaged (it holds step 2)" in said
    assert losses(a) == whole
    assert weights(a) == wanted
    assert (a / "checkpoints/step-4").is_dir()
    assert not (a / "checkpoints/step-2").exists()
    assert tree(a / "checkpoints/step-40") == tree(a / "checkpoints/step-6.aside-1") == foreign
    assert mine.read_text() == "mine"


def test_only_files_of_the_manifest_are_read_and_removed(command: Command) -> None:
    a, b = command.folder / "a", command.folder / "b"
    wanted = weights(a)
    (theirs,) = (b / "checkpoints/step-6").glob("*.safetensors")
    shutil.copy(theirs, a / "checkpoints/step-6/zzz.safetensors")
    shutil.copy(theirs, a / "checkpoints/step-4/zzz.safetensors")
    assert weights(a) == wanted
    checkpoint._remove(a / "checkpoints/step-4")
    assert [p.name for p in (a / "checkpoints/step-4").iterdir()] == ["zzz.safetensors"]
    manifest = a / "checkpoints/step-6/manifest.json"
    whole = json.loads(manifest.read_text())
    for name in ("../../recipe.yaml", "/etc/hostname", "..", ""):
        manifest.write_text(json.dumps(whole | {name: {"bytes": 1, "sha256": "x"}}))
        with pytest.raises(RunError, match=r"not a file next to it"):
            load_model(a, checkpoint=6)
    manifest.write_text(json.dumps({name: entry for name, entry in whole.items() if not name.endswith(".safetensors")}))
    with pytest.raises(RunError, match="cannot be read") as caught:
        load_model(a, checkpoint=6)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_identity_is_refused(command: Command) -> None:
    a = command.folder / "a"
    state, manifest = a / "checkpoints/step-6/state.json", a / "checkpoints/step-6/manifest.json"
    values = json.loads(state.read_text())
    del values["run"]
    state.write_text(json.dumps(values | {"format": 2}))
    sums = json.loads(manifest.read_text())
    sums["state.json"] = {"bytes": state.stat().st_size, "sha256": hashlib.sha256(state.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps(sums))
    with pytest.raises(RunError, match="another version of preheat"):
        load_model(a, checkpoint=6)
    assert load_model(a).step == 4
    (a / MARK).unlink()
    with pytest.raises(RunError, match=f"has no {MARK}"):
        load_model(a)


def test_a_copied_run_goes_on(command: Command) -> None:
    shutil.copytree(command.folder / "a", command.folder / "copy")
    (command.folder / "a").rename(command.folder / "renamed")
    for name in ("copy", "renamed"):
        command.here("train", "r.yaml", "--out", name, "--resume", "--set", "stop.max_steps=8")
    assert losses(command.folder / "copy") == losses(command.folder / "renamed")
    assert max(losses(command.folder / "copy")) == 8


class Rapl:
    """Half a kWh in each session."""

    source, measured = "rapl", True

    def read_joules(self) -> float:
        return 1.8e6


def test_a_run_sums_what_its_sessions_used_at_the_price_it_was_given(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.training.usage.count_cpu_energy", Rapl)
    train = ("train", "r.yaml", "--out", "paid/run")
    first = command.here.json(*train, "--price", "7.3USD/h", "--set", "stop.max_steps=2")
    assert (first["currency"], first["price_per_hour"]) == ("USD", 7.3)
    assert first["cost"] == pytest.approx(7.3 * first["device_hours"])
    seconds = Reader(command.folder / "paid/run").metrics()[-1].elapsed
    assert seconds is not None
    assert seconds < 3600 * first["device_hours"] < 300
    assert first["predicted"]["cost"] > 0
    # The price of the first session stays.
    out, _ = command.here(*train, "--resume", "--set", "stop.max_steps=4")
    assert "cost, USD" in out
    assert re.search(r"energy, kWh \(rapl\) +- +1 ", out)
    usage = Reader(command.folder / "paid/run").usage()
    assert usage is not None
    assert usage.cost == pytest.approx(7.3 * usage.device_hours)
    assert usage.device_hours > first["device_hours"]
    error = command.here(*train, "--resume", "--set", "stop.max_steps=6", "--price", "1EUR/h", code=2)[1]
    assert "--price 1EUR/h: the earlier sessions of the run are priced in USD" in error
    command.here(*train, "--resume", "--set", "stop.max_steps=6", "--price", "73USD/h")
    last = Reader(command.folder / "paid/run").usage()
    assert last is not None
    assert last.cost is not None
    assert last.cost - usage.cost == pytest.approx(73 * (last.device_hours - usage.device_hours))
    (total,) = command.here.json("report", "paid")["usage"]
    assert (total["total"]["cost"], total["total"]["energy_kwh"]) == ({"USD": last.cost}, 1.5)
    assert json.loads((command.folder / "paid/run/report.json").read_text())["usage"]["cost"] == last.cost


# A run that has finished


def test_a_finished_run_is_left_as_it_is(command: Command) -> None:
    a = command.folder / "a"
    before = tree(a)
    for more in (
        ("--resume",),
        ("--auto-resume",),
        ("--resume", "--set", "stop.max_steps=4"),
        ("--resume", "--set", "stop.epochs=0.1"),
    ):
        out, error = command.here("train", "r.yaml", "--out", "a", *more)
        assert "is finished already, at step 6" in out
        assert "stop.max_steps=12" in out
        assert "nan" not in (out + error).lower()
        assert tree(a) == before
    made = command.here.json("train", "r.yaml", "--out", "a", "--resume")
    assert (made["already_finished"], made["steps"], made["loss"]) == (True, 6, losses(a)[6])
    # One that was killed between its last checkpoint and its last word says its end with the numbers of its last step.
    events = (a / "events.jsonl").read_text().splitlines(keepends=True)
    (a / "events.jsonl").write_text("".join(line for line in events if '"finished"' not in line))
    measured = Reader(a).measured()
    command.here("train", "r.yaml", "--out", "a", "--resume")
    (end,) = Reader(a).events(Finished)
    assert (end.steps, end.loss) == (6, losses(a)[6])
    assert Reader(a).measured() == measured


def test_json_never_holds_nan(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.write_event(OtherEvent(kind="odd", values={"loss": math.nan, "parts": [math.inf, {"x": -math.inf}]}))
    writer.write_json("plan.json", {"peak_gib": math.nan, "name": "\ud800"})
    writer.close()
    for name in ("events.jsonl", "plan.json"):
        json.loads((tmp_path / "run" / name).read_text(), parse_constant=lambda word: pytest.fail(word))
    assert parse_json('[NaN, 1e999, {"a": -Infinity}]') == [None, None, {"a": None}]
    assert to_json({"ä": math.nan}) == '{"ä": null}'


def test_every_writer_of_json_is_strict() -> None:
    """`json.dumps` elsewhere makes keys of caches, and messages between processes of ours; what is written or printed is strict."""
    loose = []
    for path in sorted(Path(package.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not re.fullmatch(
                r"(.*\.)?(write|write_text|write_atomic|print)", ast.unparse(node.func)
            ):
                continue
            for inner in ast.walk(node):
                is_dump = isinstance(inner, ast.Call) and ast.unparse(inner.func).endswith(
                    ("json.dumps", "json.dump", "text.dumps")
                )
                if is_dump and not any(k.arg == "allow_nan" for k in inner.keywords):
                    loose.append(f"{path.relative_to(Path(package.__file__).parent)}:{inner.lineno}")
    messages = (
        "bench/inference.py",
        "bench/inference_worker.py",
        "bench/zero_trial.py",
        "bench/compare.py",
        "bench/worker.py",
        "cli/__init__.py",
        "compress/llm_compressor_worker.py",
        "hardware/benchmark_rates.py",
        "hardware/nettest.py",
    )
    assert [place for place in loose if not place.startswith(messages)] == []


# Damaged files

VALUES: tuple[Any, ...] = (None, 3, -1, "x", [], {}, [[1]], True, 1e999, 2**70, "\ud800", {"a": {"b": [None]}})
NAMES = ("events.jsonl", "metrics.jsonl", "plan.json", "environment.json", "changes.json", "data.json", "evaluation.json", MARK, "recipe.yaml", "report.json", "before.json", "checkpoints/step-6/manifest.json", "checkpoints/step-6/state.json")  # fmt: skip


def damage(run: Path, draw: random.Random) -> str:
    """Damages one file of a run, and says how."""
    name = draw.choice(NAMES)
    file = run / name
    whole = file.read_bytes()
    kind = draw.choice(
        ("cut", "empty", "bytes", "value", "value", "value", "key", "key", "line", "folder", "deep", "missing")
    )
    if kind == "cut":
        file.write_bytes(whole[: draw.randrange(len(whole))])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "bytes":
        at = draw.randrange(len(whole))
        file.write_bytes(whole[:at] + bytes(draw.randrange(256) for _ in range(3)) + whole[at + 3 :])
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "deep" and name != "recipe.yaml":
        file.write_bytes(b"[" * 50_000 + b"\n")
    elif kind == "missing":
        file.unlink()
    elif kind == "line" or name == "recipe.yaml":
        lines = whole.split(b"\n")
        lines.insert(
            draw.randrange(len(lines)), draw.choice((b"3", b"null", b"[]", b"{}", b'"x"', b"\xff", b"9" * 5000, b"{"))
        )
        file.write_bytes(b"\n".join(lines))
    else:
        lines = whole.decode().splitlines() if name.endswith(".jsonl") else [whole.decode()]
        at = draw.randrange(len(lines))
        value = json.loads(lines[at])
        inner: Any = value
        while isinstance(inner, dict | list) and inner:
            key = draw.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            if draw.random() < 0.5 or not isinstance(inner[key], dict | list) or not inner[key]:
                if kind == "value":
                    inner[key] = draw.choice(VALUES)
                else:
                    del inner[key]
                break
            inner = inner[key]
        lines[at] = json.dumps(value)
        file.write_text("\n".join(lines) + "\n")
    if name.startswith("checkpoints") and draw.random() < 0.5 and (run / "checkpoints/step-6/state.json").is_file():
        _sum_again(run / "checkpoints/step-6")  # by somebody who makes a checkpoint, not by chance
    return f"{name}: {kind}"


def _sum_again(path: Path) -> None:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in path.iterdir() if p.name != "manifest.json" and p.is_file()}  # fmt: skip
    if not (path / "manifest.json").is_dir():
        (path / "manifest.json").write_text(json.dumps(files))


def resumes(run: Path) -> None:
    """What `train --resume` reads of a run before it builds."""
    reader = Reader(run)
    recipe = recipes.parse(reader.recipe_text)
    found, _ = checkpoint.find(run / "checkpoints", run=reader.id)
    effective(recipe, reader.events(), 6)
    find_oom_records(run)
    reader.find_damage()
    if found is not None:
        checkpoint.read_progress(found)


def chats(run: Path) -> None:
    opened = load_model(run)
    assert opened.template is None


READERS: tuple[Callable[[Path], Any], ...] = (write_report, chats, diagnose)


def answers(whole: Path, place: Path, seed: int) -> str:
    """Damages a copy of a run and reads it in two ways: each must give a result, or one line."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(whole, place)
    how = damage(place, random.Random(seed))
    for reader in (resumes, READERS[seed % len(READERS)]):
        try:
            with within(20):
                reader(place)
        except PreheatError as error:
            words = str(error)
            assert len(words) < 900, f"{seed}: {how}: {words[:200]}"
            assert reader is not chats or "\n" not in words or "recipe.yaml" in how, f"{seed}: {how}: {words[:300]}"
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", words), f"{seed}: {how}: {words!r}"
        except Exception as error:
            raise AssertionError(f"{seed}: {how}: {reader.__name__}: {type(error).__name__}: {error}") from error
    return how


def test_forty_damaged_runs(trained: Path, tmp_path: Path) -> None:
    seen = {answers(trained / "a", tmp_path / "run", seed) for seed in range(40)}
    assert len({how.split(":")[0] for how in seen}) > 8


@pytest.mark.slow
def test_a_thousand_damaged_runs(trained: Path, tmp_path: Path) -> None:
    for seed in range(1000, 2000):
        answers(trained / "a", tmp_path / "run", seed)


@pytest.mark.slow
def test_sixteen_damaged_runs_as_commands(command: Command) -> None:
    for seed in range(3000, 3016):
        run = command.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(command.folder / "a", run)
        how = damage(run, random.Random(seed))
        commands = (("train", "r.yaml", "--out", "run", "--resume"), ("report", "run"), ("eval", "run", "--data", "text/1.txt"), ("export", "run", "--to", "hf", "--out", f"e{seed}"))  # fmt: skip
        process = command.start(*commands[seed % len(commands)])
        _out, error = process.communicate(timeout=120)
        assert process.returncode in (0, 1, 2, 4), f"{how}: {error[-400:]}"
        assert "Traceback" not in error, f"{how}: {error[-400:]}"
        if process.returncode:
            assert len(error.strip().splitlines()[-1]) < 700, how


def test_a_run_goes_on_beside_its_damaged_lines(command: Command) -> None:
    a = command.folder / "a"
    shutil.rmtree(a / "checkpoints/step-6")
    text = (a / "events.jsonl").read_text()
    (a / "events.jsonl").write_text(text.replace('"kind"', '"kinf"', 1) + "3\nnull\n")
    (a / "metrics.jsonl").write_text((a / "metrics.jsonl").read_text().replace('"step"', '"step2"', 1))
    (a / "plan.json").write_text("{")
    wanted = weights(command.folder / "a")
    out, _ = command.here("train", "r.yaml", "--out", "a", "--resume")
    said = " ".join(out.split())
    assert "plan.json: left out" in said
    assert "events.jsonl: left out line 1" in said
    assert "metrics.jsonl: left out line 1" in said
    assert weights(a) != wanted
    assert sorted(losses(a)) == [2, 3, 4, 5, 6] if "step2" not in (a / "metrics.jsonl").read_text() else True
    assert json.loads((a / "plan.json").read_text())["steps"] == 6
    os.mkfifo(a / "samples.fifo")
    (a / "data.json").write_text("{")
    with pytest.raises(RunError, match=r"data\.json: is damaged"):
        load_model(a)


def test_a_link_in_a_folder_leads_to_nothing_that_is_removed(tmp_path: Path) -> None:
    """A folder from somebody else may claim that preheat wrote what its links lead to."""
    docs, folder = tmp_path / "docs", tmp_path / "theirs"
    docs.mkdir()
    folder.mkdir()
    (docs / "thesis.txt").write_text("mine")
    (folder / "preheat.json").write_text(json.dumps({"kind": "run", "id": "x", "files": ["tokenizer/thesis.txt"]}))
    (folder / "tokenizer").symlink_to(docs)
    with pytest.raises(RunError, match="holds files of something else"):
        Writer(folder)
    own = tmp_path / "own"
    (own / "tokenizer.writing").mkdir(parents=True)
    (own / "tokenizer.writing" / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="holds files of something else"):
        Writer(own)
    assert (docs / "thesis.txt").read_text() == (own / "tokenizer.writing" / "mine.txt").read_text() == "mine"


def test_a_written_file_that_was_edited_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    for text in ("#!/bin/sh\necho 1\n", "#!/bin/sh\necho 2\n"):
        write_generated(path, text, "# written by preheat launch")
        assert path.read_text().splitlines()[::2] == text.splitlines()
    path.write_text(path.read_text() + "echo 3\n")
    with pytest.raises(RunError, match="was edited since"):
        write_generated(path, "#!/bin/sh\n", "# written by preheat launch")
    (tmp_path / "mine").write_text("a note\n# written by preheat launch\n")
    with pytest.raises(RunError, match="preheat did not write it"):
        write_generated(tmp_path / "mine", "x", "# written by preheat launch")
