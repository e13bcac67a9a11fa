"""The commands, their exit codes and messages, and what they leave behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from preheat.core.run_records import Finished, Unevaluated
from preheat.run.reader import Reader

from .conftest import RECIPE, Command, losses


def test_plan_train_report_eval_generate_export(preheat: Command) -> None:
    plan = preheat.here.json("plan", "r.yaml")
    jsonschema.validate(plan, preheat.here.json("plan", "--schema"))
    assert plan["fits"] is True
    assert sum(plan["memory"].values()) == pytest.approx(plan["peak_gib"], rel=1e-6)
    made = preheat.json("train", "r.yaml")
    assert set(made) >= {"run", "steps", "loss", "validation_loss", "tokens_per_second", "peak_gib", "predicted"}
    assert (made["run"], made["steps"], made["stopped"]) == ("runs/small", 12, None)
    run = preheat.folder / "runs" / "small"
    for name in (
        "recipe.yaml",
        "plan.json",
        "environment.json",
        "changes.json",
        "metrics.jsonl",
        "events.jsonl",
        "report.html",
        "report.json",
    ):
        assert (run / name).stat().st_size > 0, name
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-10", "step-12"]
    assert preheat.here.json("eval", "runs/small")["loss"] == pytest.approx(made["validation_loss"], rel=1e-4)
    text = preheat.here.json("generate", "runs/small", "--prompt", "the quick", "--tokens", "8")
    assert text["tokens"] >= 1
    # A run of a GPU is read without one: offload is for training alone.
    shutil.copytree(run, preheat.folder / "gpu")
    recipe = (run / "recipe.yaml").read_text()
    assert "\ntechniques:\n" in recipe
    offloaded = recipe.replace("\ntechniques:\n", "\ntechniques:\n  activation_offload: {}\n")
    (preheat.folder / "gpu/recipe.yaml").write_text(offloaded)
    assert preheat.here.json("generate", "gpu", "--prompt", "the quick", "--tokens", "8")["text"] == text["text"]
    exported = preheat.here.json("export", "runs/small", "--to", "hf")
    assert exported["max_logit_difference"] < 1e-5
    assert preheat.here.json("eval", exported["path"], "--data", "text", "--length", "32")["loss"] < 6
    # The resolved recipe reruns the run, loss for loss.
    again = preheat.json("train", "runs/small/recipe.yaml", "--out", "again")
    assert (again["loss"], again["validation_loss"]) == (made["loss"], made["validation_loss"])
    assert losses(run) == losses(preheat.folder / "again")


def test_a_dry_run_looks_at_all_and_writes_nothing(preheat: Command) -> None:
    before = sorted(preheat.folder.rglob("*"))
    said, _ = preheat.here("train", "r.yaml", "--dry-run")
    assert "sequences of 32 tokens" in said
    assert ": fits\n" in said
    one = preheat.here.json("train", "r.yaml", "--dry-run")
    two = preheat.here.json("train", "r.yaml", "--dry-run", "--nproc", "2", "--set", "techniques={fsdp: {}}")
    assert two["devices"] == 2
    assert two["available_gib"] < 0.6 * one["available_gib"]  # processes share the host's memory
    on_gpu = preheat.here.json("train", "r.yaml", "--dry-run", "--gpu", "H100")
    assert (on_gpu["fits"], on_gpu["device"]["name"]) == (True, "H100")
    assert preheat.here.json("train", "r.yaml", "--dry-run", "--set", "hardware.memory=1MiB", code=3)["fits"] is False
    for more, words, code in (
        (["--set", "data.source=nowhere.txt", "--dry-run"], "nowhere.txt", 4),
        (["--gpu", "H100"], "add --dry-run", 2),
    ):
        assert words in preheat.here("train", "r.yaml", *more, code=code)[1]
    assert "preheat plan gpt2 --out r.yaml writes one" in preheat.here("train", "gpt2", "--dry-run", code=2)[1]
    assert sorted(preheat.folder.rglob("*")) == before


_WITHOUT_TORCH = """
import sys
sys.modules.update(torch=None, transformers=None)  # importing them fails
from preheat.cli import main
main(sys.argv[1:])
"""


def test_a_plan_asked_again_is_printed_without_torch(preheat: Command) -> None:
    plan = ("plan", "r.yaml", "--gpu", "T4", "--allow", "rounding")
    said, progress = preheat.here(*plan, "--html", "first.html", "--out", "first.yaml")
    assert progress.startswith("dry run: starting\n")
    as_json, _ = preheat.here(*plan, "--json")

    def again(*arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-c", _WITHOUT_TORCH, *arguments]
        result = subprocess.run(command, cwd=preheat.folder, env=preheat.environment, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (code, ""), result.stderr
        return result.stdout

    assert again(*plan, "--html", "second.html", "--out", "second.yaml") == said.replace("first.", "second.")
    for kind in ("html", "yaml"):
        first, second = ((preheat.folder / f"{name}.{kind}").read_text() for name in ("first", "second"))
        assert second == first.replace("first.", "second.")  # the page names the next command
    assert again(*plan, "--json") == as_json
    # The data of the page's plots: the chosen candidate is the plan, with the techniques of its recipe.
    again(*plan, "--figures", "figures.json")
    figures, planned = json.loads((preheat.folder / "figures.json").read_text()), json.loads(as_json)
    (best,) = [candidate for candidate in figures["tried"] if candidate["best"]]
    assert (best["peak_gib"], best["recipe"]) == (planned["peak_gib"], planned["recipe"]["techniques"])
    # A device that is too small: the exit code is that of the first answer.
    small = ("plan", "r.yaml", "--gpu", "name=X,memory=1MiB,bandwidth=1,bf16=1,fp32=1", "--allow", "exact", "--json")
    refusal, _ = preheat.here(*small, code=3)
    assert again(*small, code=3) == refusal
    # With another recipe torch is needed, and its absence noticed.
    recipe = preheat.folder / "r.yaml"
    recipe.write_text(recipe.read_text().replace("size: 4", "size: 8"))
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        again(*plan, "--json")


def test_a_planned_recipe_is_looked_at_where_its_checkpoint_is_not(preheat: Command) -> None:
    how = ("--gpu", "T4", "--set", "batch={size: 2, seq_len: 64}")
    planned = preheat.here.json("plan", "gpt2", *how, "--out", "plan.yaml")
    assert "path: openai-community/gpt2" in (preheat.folder / "plan.yaml").read_text()
    for command in (("train", "plan.yaml", "--dry-run"), ("plan", "plan.yaml")):
        said, _ = preheat.here(*command, "--gpu", "T4")
        assert "openai-community/gpt2 is not on this machine" in said
        again = preheat.here.json(*command, "--gpu", "T4")
        assert again["absent"] == "openai-community/gpt2"
        assert again["peak_gib"] == pytest.approx(planned["peak_gib"], rel=0.02)
        tuned = ("--set", "model={preset: qwen2.5-0.5b, path: Qwen/Qwen2.5-0.5B-Instruct}")
        assert preheat.here.json(*command, "--gpu", "H200", *tuned)["absent"] == "Qwen/Qwen2.5-0.5B-Instruct"
        # Any other place is the user's own, and a slip in it no reason to plan something else.
        error = preheat.here(*command, "--gpu", "T4", "--set", "model.path=./gpt", code=2)[1]
        assert "model.path: ./gpt: no such folder" in error


def test_lora_run_exports_merged(preheat: Command) -> None:
    preheat.here.json("train", "r.yaml", "--set", "techniques={lora: {rank: 4}}", "--set", "stop.max_steps=4")
    exported = preheat.here.json("export", "runs/small")
    assert exported["merged"] == 14
    assert exported["max_logit_difference"] < 1e-5
    config = json.loads((preheat.folder / exported["path"] / "config.json").read_text())
    assert "preheat" not in json.dumps(config)


def test_help_is_fast_and_every_command_has_an_example(preheat: Command) -> None:
    before = os.times()
    out, _ = preheat.start_alone("--help").communicate()
    used = os.times()
    # 0.4 s; the time that passes is longer on a busy machine.
    assert used.children_user + used.children_system - before.children_user - before.children_system < 1.5
    assert "train" in out
    for command in ("plan", "train", "report", "eval", "generate", "export", "demo", "init", "calibrate"):
        assert "Example" in preheat.here(command, "--help")[0], command


def test_recipes_techniques_and_init(preheat: Command) -> None:
    assert "demo" in preheat.here("recipes")[0]
    assert "techniques:" in preheat.here("recipes", "show", "demo")[0]
    assert json.loads(preheat.here("recipes", "schema")[0])["title"] == "preheat recipe"
    assert "Helps:" in preheat.here("techniques", "show", "lora")[0]
    preheat.here("init", "demo")
    assert (preheat.folder / "demo.yaml").exists()
    assert "already exists" in preheat.here("init", "demo", code=2)[1]
    assert "did you mean 'demo'" in preheat.here("recipes", "show", "dmeo", code=2)[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "nothing.yaml"], 2, "no such file"),
        (["train", "r.yaml", "--set", "batch.sise=3"], 2, "did you mean 'size'"),
        (["train", "r.yaml", "--set", "batch.size=many"], 2, "whole number"),
        (["train", "r.yaml", "--set", "data.source=nowhere.txt"], 4, "nowhere.txt"),
        (["train", "r.yaml", "--set", "data.source=empty.txt"], 4, "empty"),
        (["train", "r.yaml", "--set", "data.source=binary.txt"], 4, "binary.txt"),
        (["train", "r.yaml", "--set", "data.source=broken.jsonl"], 4, "broken.jsonl:3"),
        (["train", "r.yaml", "--set", "data.source=fields.jsonl"], 4, "fields.jsonl:2"),
        (["train", "r.yaml", "--set", "model.max_positions=16"], 2, "16 positions"),
        (
            ["train", "r.yaml", "--set", "techniques={preference: {}}"],
            4,
            "techniques.preference reads pairs of answers",
        ),
        (["train", "r.yaml", "--set", "techniques={preference: {loss: xpo}}"], 2, "apo_zero"),
        (
            ["train", "r.yaml", "--set", "model.vocab_size=200"],
            2,
            "data.vocab_size: 300: the tokenizer that is trained would have more",
        ),
        (["train", "r.yaml", "--set", "hardware.memory=1MiB"], 3, "does not fit: needs"),
        (["plan", "r.yaml", "--set", "hardware.memory=1MiB"], 3, ""),
        (["train", "r.yaml", "--set", "hardware.memory=lots"], 2, "hardware.memory"),
        (["train", "r.yaml", "--set", "hardware.device=cuda"], 2, "cuda"),
        (["train", "r.yaml", "--resume"], 1, "no run to resume"),
        (["train", "r.yaml", "--out", "r.yaml/x"], 1, "cannot write there"),
        (["report", "text"], 1, "is not a run"),
        (["eval", "text"], 1, "neither a run"),
        (["trian", "r.yaml"], 2, "train"),
        (
            ["data", "fields.jsonl"],
            2,
            "fields.jsonl: is data, not a recipe; name it in one: preheat init fine-tune, then data.source: fields.jsonl",
        ),
        (
            ["train", "r.yaml", "--lr", "1e-3"],
            2,
            "No such option: '--lr'; a recipe's key is set by --set optimizer.lr=VALUE",
        ),
        (["bench", "r.yaml", "--max-steps", "3"], 2, "--set stop.max_steps=VALUE"),
        (["train", "r.yaml", "--lora"], 2, "--set techniques.lora={}"),
        (
            ["train", "r.yaml", "optimizer.lr=1e-3"],
            2,
            "(optimizer.lr=1e-3); a recipe's key is set by --set optimizer.lr=VALUE",
        ),
        (["train", "r.yaml", "--output-dir", "x"], 2, "preheat train RECIPE --out FOLDER"),
        (
            ["train", "r.yaml", "--otu", "x"],
            2,
            "No such option: '--otu'; did you mean --out?; see: preheat train --help",
        ),
        (["plan", "demo", "--method", "ful"], 2, "'--method': 'ful' is not one of 'full', 'lora', 'qlora'"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_clear_line_and_leaves_nothing(
    preheat: Command, arguments: list[str], code: int, words: str
) -> None:
    (preheat.folder / "empty.txt").write_text("")
    (preheat.folder / "binary.txt").write_bytes(bytes(range(256)) * 8)
    (preheat.folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": \n')
    (preheat.folder / "fields.jsonl").write_text('{"text": "a"}\n{"txet": "b"}\n')
    _, error = preheat.here(*arguments, code=code)
    assert words in error
    assert "Traceback" not in error
    if error.startswith("error:"):
        assert len(error.strip().splitlines()) == 1, error
    assert not (preheat.folder / "runs" / "small" / "recipe.yaml").exists()
    assert not list(preheat.folder.glob("runs/*/*")), "nothing half-written"


def test_a_run_is_not_overwritten_and_not_resumed_otherwise(preheat: Command) -> None:
    preheat.here("train", "r.yaml", "--set", "stop.max_steps=6")
    for more in ((), ("--dry-run",)):
        assert "--resume" in preheat.here("train", "r.yaml", *more, code=1)[1]
    for changed in (
        "batch.size=8",
        "optimizer.lr=0.02",
        "model.hidden_size=64",
        "data.validation=0.3",
        "techniques.mixed_precision.mode=bf16",
    ):
        error = preheat.here("train", "r.yaml", "--resume", "--set", changed, code=1)[1]
        assert changed.partition("=")[0] in error, error
    # What only spares memory may be set otherwise; it is said, and holds from there on.
    out, _ = preheat.here(
        "train", "r.yaml", "--resume", "--set", "stop.max_steps=8", "--set", "techniques.chunked_loss.rows=32"
    )
    assert "agree up to rounding" in out
    run = preheat.folder / "runs" / "small"
    assert "rows: 32" in json.loads((run / "checkpoints" / "step-8" / "state.json").read_text())["recipe"]
    (preheat.folder / "text" / "00.txt").write_text("another text\n" * 50)
    assert (
        "the data (the source, tokenizer or packing) changed" in preheat.here("train", "r.yaml", "--resume", code=1)[1]
    )


def test_dropout_is_drawn_alike_in_each_run(preheat: Command) -> None:
    model = "model={family: gpt2, num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 320, config: {resid_pdrop: 0.3}}"
    found = [
        preheat.here.json(
            "train", "r.yaml", "--out", f"run{n}", "--set", model, "--set", "stop.max_steps=3", "--set", f"seed={seed}"
        )
        for n, seed in enumerate((1, 1, 2))
    ]
    assert found[0]["loss"] == found[1]["loss"] != found[2]["loss"]


def test_a_run_can_be_lengthened(preheat: Command) -> None:
    preheat.here("train", "r.yaml", "--set", "schedule.kind=constant", "--set", "stop.max_steps=6")
    made = preheat.here.json("train", "r.yaml", "--set", "schedule.kind=constant", "--resume")
    assert made["steps"] == 12
    preheat.here("train", "r.yaml", "--set", "schedule.kind=constant", "--out", "whole")
    assert losses(preheat.folder / "runs" / "small") == losses(preheat.folder / "whole")


def test_damaged_checkpoints(preheat: Command) -> None:
    preheat.here("train", "r.yaml", "--set", "schedule.kind=constant")
    whole = losses(preheat.folder / "runs" / "small")
    (last,) = (preheat.folder / "runs/small/checkpoints/step-12").glob("*.safetensors")
    last.write_bytes(last.read_bytes()[:-100])
    out, _ = preheat.here("train", "r.yaml", "--set", "schedule.kind=constant", "--resume")
    assert "step-12: damaged" in out.replace("\n", "")
    assert losses(preheat.folder / "runs" / "small") == whole
    for file in (preheat.folder / "runs/small/checkpoints").glob("*/*.safetensors"):
        file.write_bytes(b"")
    assert (
        "no checkpoint is intact"
        in preheat.here("train", "r.yaml", "--resume", "--set", "schedule.kind=constant", code=1)[1]
    )


def test_non_finite_loss_stops_with_step_and_rows(preheat: Command) -> None:
    more = [
        "--set",
        "optimizer.lr=1e9",
        "--set",
        "optimizer.max_grad_norm=0",
        "--set",
        "techniques={}",
        "--set",
        "schedule.kind=constant",
    ]
    error = preheat.here("train", "r.yaml", *more, code=1)[1]
    assert "step " in error
    assert "sequences " in error
    assert "optimizer.lr" in error


def test_two_runs_in_one_folder_at_once(preheat: Command) -> None:
    first = preheat.start("train", "r.yaml", "--set", "stop.max_steps=100000", "--set", "checkpoint.every=50")
    try:
        _wait_for(preheat.folder / "runs/small/metrics.jsonl", first)
        assert (
            "another process is writing"
            in preheat.here("train", "r.yaml", "--resume", "--set", "stop.max_steps=100000", code=1)[1]
        )
    finally:
        first.kill()
        first.communicate()


def _signalled(preheat: Command, number: signal.Signals, *more: str, **how: Any) -> tuple[int, str, Path]:
    out = preheat.folder / "runs" / f"{number.name} s"
    process = preheat.start(
        "train",
        "r.yaml",
        "--set",
        "stop.max_steps=100000",
        "--set",
        "schedule.kind=constant",
        "--out",
        str(out),
        *more,
        **how,
    )
    _wait_for(out / "metrics.jsonl", process)
    process.send_signal(number)
    printed, error = process.communicate(timeout=60)
    assert "Traceback" not in error
    return process.returncode, printed, out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_the_last_line_is_the_command_that_goes_on(
    preheat: Command, number: signal.Signals, code: int
) -> None:
    ended, printed, out = _signalled(preheat, number)
    assert ended == code
    assert f"stopped by {number.name}" in printed
    step = max(losses(out))
    assert (out / f"checkpoints/step-{step}/manifest.json").exists()
    typed = printed.strip().splitlines()[-1].removeprefix("to resume: ")
    arguments = shlex.split(typed)
    settings = ["--set", "stop.max_steps=100000", "--set", "schedule.kind=constant"]
    assert arguments == ["preheat", "train", "r.yaml", *settings, "--out", str(out), "--resume"]
    preheat.here(*arguments[1:], "--set", f"stop.max_steps={step + 2}")
    assert max(losses(out)) == step + 2


def test_an_evaluation_is_broken_off_and_taken_when_the_run_is_resumed(
    preheat: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preheat.evaluation.run_evaluator import RunEvaluator

    def evaluations(name: str) -> list[tuple[int, float]]:
        return [(e.step, e.validation_loss) for e in Reader(preheat.folder / name).evaluations()]

    more = ("--set", "evaluate={every: 4, rows: 6}", "--set", "sample={prompts: [the], max_new_tokens: 4}")
    preheat.here("train", "r.yaml", *more, "--out", "whole")
    take, broken = RunEvaluator.take, []

    def interrupted(self: RunEvaluator, build: Any, writer: Any, step: int) -> Any:
        if step in (4, 12) and step not in broken:
            broken.append(step)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it went on")
        return take(self, build, writer, step)

    monkeypatch.setattr(RunEvaluator, "take", interrupted)
    out = preheat.here("train", "r.yaml", *more, "--out", "cut", code=130)[0]
    assert "stopped by SIGINT at step 4" in out
    assert out.splitlines()[-1].startswith("to resume: preheat train r.yaml")
    assert preheat.here("train", "r.yaml", *more, "--out", "cut", "--resume", code=130)
    assert not Reader(preheat.folder / "cut").events(Finished)
    preheat.here("train", "r.yaml", *more, "--out", "cut", "--resume")
    assert evaluations("cut") == evaluations("whole")
    assert losses(preheat.folder / "cut") == losses(preheat.folder / "whole")
    assert Reader(preheat.folder / "cut").samples() == Reader(preheat.folder / "whole").samples()


def test_an_evaluation_that_ends_the_process_is_taken_again_once(
    preheat: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preheat.evaluation.run_evaluator import RunEvaluator

    def evaluations(name: str) -> list[tuple[int, float]]:
        return [(e.step, e.validation_loss) for e in Reader(preheat.folder / name).evaluations()]

    take, deaths = RunEvaluator.take, [0]

    def dies(self: RunEvaluator, build: Any, writer: Any, step: int) -> Any:
        if step == 4 and deaths[0]:
            deaths[0] -= 1
            raise SystemExit(
                9
            )  # without a word in the run's folder, as by `kill -9`, or OpenBLAS where it finds no memory
        return take(self, build, writer, step)

    monkeypatch.setattr(RunEvaluator, "take", dies)
    more = ("--set", "evaluate={every: 4, rows: 6}", "--set", "checkpoint.every=0")
    preheat.here("train", "r.yaml", *more, "--out", "whole")
    deaths[0] = 1
    preheat.here("train", "r.yaml", *more, "--out", "killed", code=9)
    preheat.here("train", "r.yaml", *more, "--out", "killed", "--resume")
    assert evaluations("killed") == evaluations("whole")
    assert losses(preheat.folder / "killed") == losses(preheat.folder / "whole")

    deaths[0] = 3
    preheat.here("train", "r.yaml", *more, "--out", "twice", code=9)
    preheat.here("train", "r.yaml", *more, "--out", "twice", "--resume", code=9)
    assert (
        "step 4: its evaluation is skipped" in preheat.here("train", "r.yaml", *more, "--out", "twice", "--resume")[0]
    )
    assert evaluations("twice") == evaluations("whole")[1:]
    assert losses(preheat.folder / "twice") == losses(preheat.folder / "whole")
    assert [e.step for e in Reader(preheat.folder / "twice").events(Unevaluated)] == [4]


def test_under_a_job_an_interrupted_run_is_no_failure_and_nohup_is_heeded(preheat: Command) -> None:
    preheat.environment["TORCHELASTIC_RUN_ID"] = "job"
    started = ["train", "r.yaml", "--set", "stop.max_steps=100000", "--set", "schedule.kind=constant", "--json"]
    process = preheat.start(*started, ignored=[signal.SIGHUP])
    log = preheat.folder / "runs/small/metrics.jsonl"
    _wait_for(log, process)
    process.send_signal(signal.SIGHUP)
    _wait_for(log, process, log.stat().st_size + 400)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert json.loads(out)["stopped"] == "SIGINT"


def _wait_for(path: Path, process: Any, size: int = 200) -> None:
    for _ in range(600):
        if path.exists() and path.stat().st_size > size:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(f"{path} was not written")


@pytest.mark.skipif(
    shutil.which("mount") is None or os.geteuid() != 0, reason="a disk that fills up needs root and mount"
)
def test_a_disk_that_fills_up_in_the_middle(preheat: Command) -> None:
    disk = preheat.folder / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=2500k none {disk} 2>/dev/null") != 0:
        pytest.skip("this container may not mount")
    try:
        more = [
            "--set",
            "checkpoint.every=2",
            "--set",
            "checkpoint.keep=50",
            "--set",
            "schedule.kind=constant",
            "--set",
            "stop.max_steps=60",
        ]
        error = preheat("train", "r.yaml", "--out", "disk/run", *more, code=1)[1]
        assert "space" in error
        assert "--resume" in error
        kept = list((disk / "run/checkpoints").iterdir())
        assert kept
        assert all((p / "manifest.json").exists() for p in kept), "half a checkpoint was left"
    finally:
        os.system(f"umount {disk}")


def test_a_recipe_for_several_devices_is_planned_for_as_many(preheat: Command) -> None:
    recipe = RECIPE.replace("techniques: {", "parallel: {devices: 2}\ntechniques: {data_parallel: {}, ")
    (preheat.folder / "two.yaml").write_text(recipe)
    assert preheat.here.json("plan", "two.yaml", "--gpu", "H100")["fits"]
    assert "parallel.devices: 2" in preheat.here("plan", "two.yaml", "--gpu", "H100", "--count", "1", code=2)[1]
