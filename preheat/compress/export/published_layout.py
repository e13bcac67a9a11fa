"""Writes a trained text part back into the layout of the published checkpoint that it was read from.

The vision part and the processor's files are copied unchanged; text tensors are replaced under their own names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.files import to_json
from preheat.inference.load import LoadedModel
from preheat.model_folder import FAULTS, INDEX, describe_fault, find_weight_files, open_tensors, read_object
from preheat.models import configs
from preheat.models.checkpoint_names import Names
from preheat.models.text_part import name_in_text
from preheat.models.vision import copy_processor

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.core.json_types import JsonObject

__all__ = ["PublishedLayout", "find_published_layout"]

_KNOB = "model.path"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NOT_COMPARED = ("architectures", "dtype", "model_type", "transformers_version", "use_cache", "_name_or_path")
_TEXT_ALONE = "the folder holds the text part alone, without the vision part of {family}: {why}"


@dataclass(frozen=True)
class PublishedLayout:
    """The folder of a published checkpoint.

    Attributes:
        source: the folder.
        whole: its configuration.
        before: the configuration of its text part before the recipe and its techniques changed it.
    """

    source: Path
    whole: PretrainedConfig
    before: PretrainedConfig

    def write(self, model: PreTrainedModel, folder: Path, dtype: str) -> str:
        """Writes the weights, the configurations and the processor's files; not the tokenizer.

        Args:
            model: the trained text model, in the dtype to save.
            dtype: the name of that dtype.

        Returns:
            '', or why the model has no place in the layout; then nothing was written.
        """
        # All checks come first: on a problem nothing may have been written.
        settings, problem = self._build_settings(model.config, dtype)
        stated = read_object(self.source / "config.json", _KNOB).get("transformers_weights")
        files = find_weight_files(self.source, _KNOB, stated=stated).files
        # Tensor name -> file.
        keys: dict[str, Path] = {}
        for file in files:
            with open_tensors(file, _KNOB) as opened:
                keys |= dict.fromkeys(opened.keys(), file)
        values, more, lacking = _convert_values(model, list(keys))
        if problem or lacking:
            return problem or f"its files have no place for {lacking}"
        self._write_weights(folder, keys, values, more)
        (folder / "config.json").write_text(to_json(settings, indent=2) + "\n", encoding="utf-8")
        model.generation_config.save_pretrained(folder)
        copy_processor(self.source, folder)
        return ""

    def _build_settings(self, config: PretrainedConfig, dtype: str) -> tuple[JsonObject, str]:
        """Returns the published config.json with what the run changed, and why it cannot say that ('' if it can)."""
        values = read_object(self.source / "config.json", _KNOB)
        text = values["text_config"]
        # Compared as full dictionaries, because the differences to the defaults hide values that returned to them.
        now, before = (json.loads(c.to_json_string(use_diff=False)) for c in (config, self.before))
        changed = {key: value for key, value in now.items() if key not in _NOT_COMPARED and value != before.get(key)}
        if now["model_type"] != before["model_type"] or "num_hidden_layers" in changed:
            return values, "the recipe changed the architecture"
        if "quantization_config" in values:
            return values, "its weights are stored quantized"
        for key in _TOKENS:
            if key in changed:
                # Published configs state tokens at the top or in the text part; the one that has the key is read.
                (values if values.get(key) is not None else text)[key] = changed.pop(key)
        if "tie_word_embeddings" in changed:
            values["tie_word_embeddings"] = changed["tie_word_embeddings"]
        # transformers reads the older keys too, so leaving them would contradict the new ones.
        if "rope_parameters" in changed:
            for old in ("rope_theta", "rope_scaling"):
                text.pop(old, None)
            published = getattr(self.whole.get_text_config(), "rope_parameters", None) or {}
            changed["rope_parameters"] = {**published, **changed["rope_parameters"]}
        text |= changed
        # Each part of the configuration may state the dtype, under its new or its older key.
        for part in (values, *(value for value in values.values() if isinstance(value, dict))):
            for key in ("dtype", "torch_dtype"):
                if key in part:
                    part[key] = dtype
        return values, ""

    def _write_weights(
        self, folder: Path, keys: dict[str, Path], values: dict[str, Tensor], more: dict[str, Tensor]
    ) -> None:
        from safetensors.torch import save_file

        files = list(dict.fromkeys(keys.values()))
        size, places = 0, dict[str, str]()
        # File by file, so that only one file's tensors are in memory.
        for file in files:
            with open_tensors(file, _KNOB) as opened:
                tensors = {
                    key: values[key] if key in values else opened.get_tensor(key)
                    for key, home in keys.items()
                    if home == file
                }
            tensors |= more if file == files[-1] else {}
            # A tied matrix may be in the files under both of its names, and safetensors writes no shared memory.
            save_file(
                {k: v.detach().clone().contiguous() for k, v in tensors.items()}, folder / file.name, {"format": "pt"}
            )
            size += sum(tensor.nbytes for tensor in tensors.values())
            places |= dict.fromkeys(tensors, file.name)
        # A single file with an index keeps its index.
        if len(files) > 1 or (self.source / INDEX).is_file():
            index = {"metadata": {"total_size": size}, "weight_map": places}
            (folder / INDEX).write_text(to_json(index, indent=2) + "\n", encoding="utf-8")


def find_published_layout(opened: LoadedModel) -> tuple[PublishedLayout | None, str]:
    """Returns the layout to write a model back into, or None and the reason; ('' for a model that is no text part)."""
    import torch
    from transformers import AutoModelForImageTextToText

    whole, folder = configs.wrapper_config(opened.recipe), opened.build.weights.folder
    if whole is None:
        return None, ""
    if folder is None:
        return None, note_text_alone(whole, "the run began with new weights, which no vision part fits")
    try:
        # Without memory: only tests that transformers has the class and accepts the configuration.
        with torch.device("meta"):
            AutoModelForImageTextToText.from_config(whole)
    except (*FAULTS, ImportError) as error:
        return None, note_text_alone(whole, f"transformers cannot load the whole here ({describe_fault(error, 160)})")
    before = configs.of(opened.recipe, None)
    # The run's config has no dropout either, so that it does not count as a change.
    configs.disable_dropout(before)
    return PublishedLayout(folder, whole, before), ""


def note_text_alone(whole: PretrainedConfig, why: str) -> str:
    """Returns the note for a folder that has no vision part."""
    return _TEXT_ALONE.format(family=whole.model_type, why=why)


def _convert_values(model: PreTrainedModel, keys: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Returns the model's values by the files' names, those that the files lack, and a parameter without a place."""
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict()
    names = Names(model, keys, set(state), of_whole=True)
    in_text = {key: name_in_text(key) for key in keys}
    reverted: dict[str, Tensor] | None = None
    values: dict[str, Tensor] = {}
    for name, value in state.items():
        stored = names.find(name)
        if stored is None:
            if not name.startswith("lm_head."):
                return {}, {}, name
        elif stored.converter is None:
            values[stored.keys[0]] = value
        else:  # the value is made of several tensors of the files, such as one for each expert
            reverted = revert_weight_conversion(model, state) if reverted is None else reverted
            parts = {key: reverted.get(in_text[key] or "") for key in stored.keys}
            if lacking := [key for key, part in parts.items() if part is None]:
                return {}, {}, lacking[0]
            values |= {key: part for key, part in parts.items() if part is not None}
    more = {name: value for name, value in state.items() if names.find(name) is None}
    return values, more, ""
