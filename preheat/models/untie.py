"""Unties folders whose configuration ties head and embedding, but whose files have different values of the two.

transformers then reads both, warns, and ties nothing, whatever config.json says.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.errors import RecipeError
from preheat.model_folder import FAULTS, find_weight_files, open_tensors, read_object
from preheat.models.checkpoint_names import Names
from preheat.models.text_part import text_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["untie"]

_log = logging.getLogger("preheat.weights")
_KNOB = "model.path"


def untie(config: PretrainedConfig, folder: Path) -> None:
    """Sets `tie_word_embeddings` to false, in place, if the folder has different values of head and embedding.

    An encoder-decoder ties several matrices and scales its output by that key, so it is left alone, as are composite
    models.
    """
    # Only a local folder whose configuration ties the two needs a look at its files.
    parts = config.is_encoder_decoder or config.get_text_config() is not config
    if not getattr(config, "tie_word_embeddings", False) or parts or not folder.is_dir():
        return
    try:
        settings = folder / "config.json"
        weights_setting = read_object(settings, _KNOB).get("transformers_weights")
        files = find_weight_files(folder, _KNOB, stated=weights_setting).files
        # Part of the cache's key: a changed file is read again.
        stamps = tuple((str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in (settings, *files))
        warning = _describe_difference(folder, stamps, config.model_type)
    except (RecipeError, OSError):  # reported when the weights are read
        return
    if warning:
        config.tie_word_embeddings = False


@functools.lru_cache(maxsize=32)  # a plan reads a configuration for each of its candidates
def _describe_difference(folder: Path, stamps: tuple[tuple[str, int, int], ...], family: str) -> str:
    """A warning about matrices that the configuration ties and that differ in the files; '' if there are none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    places = dict[str, Path]()
    shapes = dict[str, tuple[int, ...]]()
    # The first stamp is that of config.json. Shapes come from the headers, without reading values.
    for name, _, _ in stamps[1:]:
        with open_tensors(Path(name), _KNOB) as opened:
            for key in opened.keys():  # noqa: SIM118
                places[key], shapes[key] = Path(name), tuple(opened.get_slice(key).get_shape())
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if of_whole := config.model_type != family:
            config = text_config(config, "text")
        if sum(shape == (config.vocab_size, config.hidden_size) for shape in shapes.values()) < 2:
            return ""  # the usual case: the head is not in the files
        # The names of tied parameters are attributes of a built model, which on meta costs no memory.
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (*FAULTS, RecipeError):  # remote code, or not a decoder
        return ""
    names = Names(
        model, places, {name for name, _ in model.named_parameters(remove_duplicate=False)}, of_whole=of_whole
    )

    def read_tensor(key: str) -> Tensor:
        with open_tensors(places[key], _KNOB) as opened:
            return opened.get_tensor(key)

    for name, other in names.tied():
        first, second = (names.value(n, names.need(n), read_tensor) for n in (name, other))
        if not torch.equal(first, second):
            warning = (
                f"{_KNOB}: {folder} holds other values of {name} than of {other}, which its config.json ties; both are "
                "read and nothing is tied, as by transformers; set tie_word_embeddings to false there"
            )
            _log.warning("%s", warning)
            return warning
    return ""
