"""Commands that take a recipe: a model in its place is answered with the commands that write one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from preheat.cli.options.recipe_argument import load_recipe, refuse_model
from preheat.errors import RecipeError

from ...architectures.tiny import tiny_config


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a hub with the config.json of `owner/new-model`; there is no network."""
    folder = tmp_path / "hub" / "models--owner--new-model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    tiny_config("lfm2").save_pretrained(folder / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B", "owner/new-model", "15M", "folder"])
@pytest.mark.parametrize("command", ["train", "data", "bench", "launch"])
def test_a_model_is_answered_with_the_commands_that_make_a_recipe(
    name: str, command: str, hub: Path, tmp_path: Path
) -> None:
    names = [name]
    if name == "folder":
        tiny_config("llama").save_pretrained(tmp_path / "folder of mine")
        names = [str(tmp_path / "folder of mine"), str(tmp_path / "folder of mine" / "config.json")]
    for what in names:
        quoted = f"'{what}'" if " " in what else what
        with pytest.raises(RecipeError) as error:
            load_recipe(what, command)
        assert f"preheat plan {quoted} --out r.yaml writes one, then: preheat {command} r.yaml" in str(error.value)
        assert "\n" not in str(error.value)


def test_a_name_that_the_hub_lacks_is_answered_with_the_form_of_the_command(hub: Path) -> None:
    with pytest.raises(RecipeError, match=r"owner/other: no such recipe file, and no model .* preheat plan OWNER/NAME"):
        load_recipe("owner/other", "train")


@pytest.mark.parametrize("name", ["no-such.yaml", "recipes/no-such.yml", "./no-such", "a\0b", "x" * 5000])
def test_a_recipe_that_is_missing_is_reported_as_one(name: str, hub: Path) -> None:
    refuse_model(name, "train")
    with pytest.raises(RecipeError, match="no such file"):
        load_recipe(name, "train")


def test_recipes_are_loaded_as_before(hub: Path, tmp_path: Path) -> None:
    assert load_recipe("demo", "train", ["batch.size=8"]).batch.size == 8
    (tmp_path / "mine").write_text("stop: {max_steps: 1}")  # without a suffix
    assert load_recipe(str(tmp_path / "mine"), "train").stop.max_steps == 1


@pytest.mark.parametrize("arguments", [["train"], ["train", "--dry-run"], ["data"], ["bench", "--ablate"]])
def test_the_commands_refuse_a_model_before_torch_is_imported(arguments: list[str]) -> None:
    code = (
        "import sys; from preheat.cli import main\n"
        f"sys.argv = ['preheat', {arguments[0]!r}, 'Qwen/Qwen3-8B', *{arguments[1:]!r}]\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: Qwen/Qwen3-8B: is a model, not a recipe"), result.stderr
    assert len(result.stderr.splitlines()) == 1
