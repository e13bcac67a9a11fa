"""A model that is no preset is planned from its config.json on the hub, here from the hub's cache, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from preheat.cli.options.subject import find_subject
from preheat.errors import RecipeError
from preheat.hardware.catalogue import find_accelerator
from preheat.models.hub_config import find_hub_folder
from tests.unit.plans import plan_of, values_of

from ...architectures.tiny import create_model, tiny_config


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a hub with `owner/new-model`."""
    cache, commit = tmp_path / "hub", "0" * 40
    folder = cache / "models--owner--new-model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    tiny_config("lfm2").save_pretrained(folder / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder / "snapshots" / commit


def test_a_name_on_the_hub_is_planned_by_its_configuration(hub: Path) -> None:
    from preheat.cli.plan_output import render_recipe
    from preheat.recipe import to_values

    assert find_hub_folder("owner/new-model") == hub
    subject = find_subject("owner/new-model")
    assert (subject.recipe.model.path, subject.checkpoint) == (str(hub), "owner/new-model")
    assert subject.recipe.batch.seq_len == json.loads((hub / "config.json").read_text())["max_position_embeddings"]
    # The recipe to train by names the model, not a folder of the cache.
    assert "path: owner/new-model" in render_recipe(
        replace(plan_of(values_of(1.0, 8.0)), recipe=to_values(subject.recipe)), subject
    )


@pytest.mark.parametrize("name", ["owner/other-model", "new-model", "../owner/new-model", "owner/new-model/file"])
def test_a_name_that_the_hub_does_not_have_is_not_a_model(name: str, hub: Path) -> None:
    assert find_hub_folder(name) is None
    with pytest.raises(RecipeError, match="not a known model"):
        find_subject(name)


OF_HUB = "model: {path: owner/new-model}\nstop: {max_steps: 1}\nbatch: {size: 2, seq_len: 32}\n"


@pytest.mark.parametrize("switch", ["offline", "no network"])
def test_a_model_of_which_only_config_json_is_cached_is_refused_before_the_data(
    switch: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preheat import recipe as recipes
    from preheat.engine.builder import require_model
    from preheat.models import configs
    from preheat.training.loop import train

    if switch == "no network":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        for module in ("preheat.hardware.connectivity", "preheat.models.configs", "preheat.models.hub_config"):
            monkeypatch.setattr(f"{module}.is_hub_reachable", lambda: False)
    monkeypatch.setattr("preheat.training.session.data_of", lambda *_, **__: pytest.fail("read the data"))
    recipe = recipes.parse(OF_HUB)
    weights = "model.path: owner/new-model: the hub's cache holds its config.json but not its weights.*"
    with pytest.raises(RecipeError, match=weights + "hf download owner/new-model"):
        train(recipe, out=tmp_path / "run")
    with pytest.raises(RecipeError, match=r"no tokenizer of it.*hf download owner/new-model"):
        configs.find_tokenizer_folder(recipe)
    # A download that was interrupted.
    (hub / "model-1.safetensors").touch()
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(RecipeError, match=r"but not model-2\.safetensors, and there is no network; run: hf download"):
        require_model(recipe, configs.source_config(recipe))


def test_a_model_that_is_cached_trains_without_a_network(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preheat import recipe as recipes
    from preheat.data import prepare
    from preheat.data.tokenizer import save_tokenizer
    from preheat.engine.builder import require_model
    from preheat.models import configs
    from preheat.planning.plan_request import find_vocabulary_size
    from preheat.recipe import Data

    config = tiny_config("llama", vocab_size=300)
    create_model(config).save_pretrained(hub)
    (tmp_path / "text.txt").write_text("One line of text.\n" * 50)
    data = prepare(Data(source=str(tmp_path / "text.txt"), vocab_size=300, validation=0.0), length=8, seed=0)
    save_tokenizer(data.tokenizer, hub)
    # HF_HUB_OFFLINE is not set, and a client that looked for the network would wait for it.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for module in ("preheat.hardware.connectivity", "preheat.models.configs", "preheat.models.hub_config"):
        monkeypatch.setattr(f"{module}.is_hub_reachable", lambda: False)
    recipe = recipes.parse(OF_HUB)
    source = configs.source_config(recipe)
    require_model(recipe, source)
    assert find_vocabulary_size(recipe, source) == len(data.tokenizer)


@pytest.mark.parametrize("weights", [False, True])
def test_a_folder_without_a_tokenizer_is_planned_and_not_trained(weights: bool, tmp_path: Path) -> None:
    from preheat import recipe as recipes
    from preheat.cli.views.next_command import list_assumed_settings
    from preheat.planning.plan import plan
    from preheat.planning.plan_request import request_of

    config = tiny_config("llama")
    (create_model(config) if weights else config).save_pretrained(tmp_path / "model")
    subject = find_subject(str(tmp_path / "model"))
    prediction = plan(request_of(subject.recipe, find_accelerator("H100"), count_rows=False))
    assert prediction.peak_gib > 0
    lines = list_assumed_settings(subject, prediction, [], per_host=8)
    assert "a tokenizer for the model's embedding (--set data.tokenizer)" in lines
    # A run would train a tokenizer of 4,096 tokens, for 96 rows, or read the weights' tokens wrongly.
    with pytest.raises(RecipeError, match="has weights and no tokenizer" if weights else "data.vocab_size: 4096: the"):
        request_of(
            recipes.parse(f"model: {{path: {tmp_path / 'model'}}}\nstop: {{max_steps: 1}}"), find_accelerator("H100")
        )
