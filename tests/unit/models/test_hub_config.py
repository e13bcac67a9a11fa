"""A model that is no preset is planned from its config.json on the hub, here from the hub's cache, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest

from preheat.errors import RecipeError
from preheat.models.hub_config import folder_on_hub
from preheat.training.plan_request import subject_of

from ...architectures.tiny import tiny_config


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
    from preheat.cli.plan import recipe_text
    from preheat.recipe import as_values

    assert folder_on_hub("owner/new-model") == hub
    subject = subject_of("owner/new-model")
    assert (subject.recipe.model.path, subject.checkpoint) == (str(hub), "owner/new-model")
    assert subject.recipe.batch.seq_len == json.loads((hub / "config.json").read_text())["max_position_embeddings"]
    # The recipe to train by names the model, not a folder of the cache.
    assert "path: owner/new-model" in recipe_text({"recipe": as_values(subject.recipe)}, subject)


@pytest.mark.parametrize("name", ["owner/other-model", "new-model", "../owner/new-model", "owner/new-model/file"])
def test_a_name_that_the_hub_does_not_have_is_not_a_model(name: str, hub: Path) -> None:
    assert folder_on_hub(name) is None
    with pytest.raises(RecipeError, match="not a known model"):
        subject_of(name)
