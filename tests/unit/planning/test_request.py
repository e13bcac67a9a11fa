"""The planner's request: decided once, carried to changed recipes and to other processes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from preheat import recipe as recipes
from preheat.models import configs
from preheat.planning.request import Request
from preheat.planning.speed.roofline import Roofline


def test_a_request_reads_the_models_configuration_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = configs.preset_config
    monkeypatch.setattr(configs, "preset_config", lambda name: reads.append(name) or read(name))
    recipe = recipes.parse("model: {preset: gpt2}\nbatch: {seq_len: 64}\nstop: {max_steps: 1}")
    gpu = Roofline.of("H100")
    request = Request(recipe, gpu.as_device, world=1, rates=gpu)
    source = request.source_config.to_dict()  # type: ignore[union-attr]
    fewer = replace(request, recipe=recipes.override(recipe, "model.config.n_layer=2"))
    assert (request.config.n_layer, fewer.config.n_layer) == (12, 2)
    assert request.source_config.to_dict() == source, "a candidate changed what was read"  # type: ignore[union-attr]
    other = pickle.loads(pickle.dumps(fewer))
    assert (other.config.to_dict(), other.rates) == (fewer.config.to_dict(), gpu)
    assert reads == ["gpt2"]


def test_fewer_layers_of_a_model_with_shared_keys_keep_what_they_are() -> None:
    gpu = Roofline.of("H100")
    for layers, shared in ((1, 0), (15, 0), (20, 5), (35, 20)):
        model = f"{{preset: gemma-4-e2b, config: {{num_hidden_layers: {layers}}}}}"
        request = Request(recipes.parse(f"model: {model}\nstop: {{max_steps: 1}}"), gpu.as_device)
        text = request.config.get_text_config()
        assert text.num_kv_shared_layers == shared
        assert text.kv_sharing_modes.count("reuse") == shared
