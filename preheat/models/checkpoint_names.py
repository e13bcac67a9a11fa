"""Maps the parameters of a model to the tensors of a checkpoint, by transformers' own conversion of names and values.

Architectures were renamed over the years (GPT-NeoX's head is `embed_out` in the files), and experts are separate in the
files and stacked in the model. transformers' rules for this (`get_model_conversion_mapping`) are applied here to one
parameter at a time, when it is read, so that no second copy of the model is ever in memory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from preheat.models.text_part import name_in_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

__all__ = ["Names", "Stored"]


@dataclass
class Stored:
    """The tensors of the files that make up one parameter, or several parameters split from the same tensors.

    Attributes:
        first: the name of the parameter, the first of several.
        converter: transformers' WeightConverter that assembles it; None: a single tensor, unchanged.
        parts: keys in the files, by the converter's pattern that matched each.
    """

    first: str
    converter: WeightConverter | None = None
    parts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [key for keys in self.parts.values() for key in keys]


@contextlib.contextmanager
def _restore_built_classes(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which modules have the class that they had before FSDP, whose name some rules are for."""
    sharded = [(m, type(m)) for m in model.modules() if type(m).__bases__[0].__name__ == "FSDPModule"]
    for module, kind in sharded:
        module.__class__ = kind.__bases__[1]
    try:
        yield
    finally:
        for module, kind in sharded:
            module.__class__ = kind


def _build_dequantizer(quantized: Mapping[str, Any]) -> Any:
    """transformers' quantizer whose conversion rules give the full weights of files that are stored quantized."""
    from transformers.quantizers import AutoHfQuantizer

    return AutoHfQuantizer.from_config({**quantized, "dequantize": True}, pre_quantized=True)


def _pad_blocks(rules: Iterable[WeightConverter]) -> None:
    """Makes transformers' dequantization of FP8 accept matrices that end within a block.

    It derives the blocks from the scales, and rejects such matrices (DeepSeek-V3's `kv_a_proj_with_mqa` has 576 rows,
    in blocks of 128).
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    class Padded(Fp8Dequantize):  # type: ignore[misc]
        def _dequantize_one(self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
            blocks = self.hf_quantizer.quantization_config.weight_block_size
            rows, columns = quantized.shape[-2:]
            if blocks and scales.shape[-2:] == (-(-rows // blocks[0]), -(-columns // blocks[1])):
                size = (scales.shape[-2] * blocks[0], scales.shape[-1] * blocks[1])
                if size != (rows, columns):
                    padded = quantized.new_zeros(*quantized.shape[:-2], *size)
                    padded[..., :rows, :columns] = quantized
                    whole: Tensor = super()._dequantize_one(padded, scales, output_dtype)
                    return whole[..., :rows, :columns]
            value: Tensor = super()._dequantize_one(quantized, scales, output_dtype)
            return value

    for rule in rules:
        rule.operations = [
            Padded(operation.hf_quantizer) if type(operation) is Fp8Dequantize else operation
            for operation in rule.operations
        ]


class _InFp32:
    """A model for operators that dequantize to the dtype of a parameter: any parameter is fp32.

    The model's own may be packed in 4 bits, or be inside of an adapter.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model

    def get_submodule(self, name: str) -> Any:
        import torch

        parameter = torch.empty(0, device="meta")

        class _Module:
            def __getattr__(self, key: str) -> Tensor:
                return parameter

        return _Module()

    def __getattr__(self, key: str) -> Any:
        return getattr(self._model, key)


class Names:
    """The parameters that a model can read from files, by name.

    Args:
        model: on any device; only its classes, configuration and names are used.
        keys: of the files' tensors.
        places: names of the model's parameters, without the wrappers of adapters.
        of_whole: the files are of a model with several parts, of which `model` is the text part.
        quantized: the `quantization_config` of files whose weights are dequantized when they are read; {}: none are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        keys: Iterable[str],
        places: set[str],
        *,
        of_whole: bool = False,
        quantized: Mapping[str, Any] | None = None,
    ):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        self._model, self._places, self._quantized = model, places, bool(quantized)
        self._prefix: str = model.base_model_prefix
        self._read: set[str] = set()
        self._stored: dict[str, Stored] = {}
        with _restore_built_classes(model):
            rules = get_model_conversion_mapping(
                model, hf_quantizer=_build_dequantizer(quantized) if quantized else None
            )
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        if quantized:
            _pad_blocks(converters)
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        known: Mapping[str, bool] = dict.fromkeys(places, True)
        # None for tensors of other parts (vision), which are neither read nor reported.
        names = {key: name_in_text(key) if of_whole else key for key in keys}
        # Natural order puts expert 10 after expert 9; converters stack tensors in the order of the keys.
        self._keys = sorted((key for key, name in names.items() if name is not None), key=dot_natural_key)
        for key in self._keys:
            own = names[key] or key
            name, pattern = rename_source_key(own, renamings, converters, self._prefix, known)
            if name not in known and own in known:  # as in transformers: a rule that should not have applied
                name, pattern = rename_source_key(own, [], [], self._prefix, known)
            if pattern is None:
                self._stored[name] = Stored(name, None, {"": [key]})
                continue
            rule = by_pattern[pattern]
            stored = self._stored.get(name)
            if stored is None or stored.converter is None:
                stored = Stored(name, rule)
                # One rule may give several parameters (a fused matrix that is split): each leads to the same tensors.
                for target in rule.target_patterns:
                    self._stored[name.replace(rule.target_patterns[0], target)] = stored
            stored.parts.setdefault(pattern, []).append(key)

    def find(self, name: str) -> Stored | None:
        """The tensors of a parameter, under any name that it shares; None if the files do not have it."""
        prefix = f"{self._prefix}."
        for known in (name, *self._find_shared_names(name)):
            # Files may be of the base model alone, whose names lack the prefix, or the other way round.
            for variant in (known, known.removeprefix(prefix), prefix + known):
                if (stored := self._stored.get(variant)) is not None:
                    self._read |= set(stored.keys)
                    return stored
        return None

    def need(self, name: str) -> Stored:
        stored = self.find(name)
        assert stored is not None
        return stored

    def named(self) -> dict[str, str]:
        """The name in the model of each tensor of the files, also of those that it has no parameter for."""
        return {key: stored.first for stored in self._stored.values() for key in stored.keys}

    def mark_read(self, keys: Iterable[str]) -> None:
        """Marks tensors of the files as read, under whatever name."""
        self._read |= set(keys)

    def value(self, name: str, stored: Stored, tensor: Callable[[str], Tensor]) -> Tensor:
        """Assembles a parameter's value: one tensor of the files as it is, or several merged or converted.

        Args:
            name: the parameter's name in the model.
            stored: the tensors of the files that make it up, and transformers' converter if it is not one of them.
            tensor: reads the tensor of a key from the files.
        """
        if stored.converter is None:
            (key,) = stored.keys
            return tensor(key)
        # A converter collects tensors in itself, so each value needs a fresh one.
        rule = deepcopy(stored.converter)
        for pattern, keys in stored.parts.items():
            for key in keys:
                rule.add_tensor(stored.first, key, pattern, lambda key=key: tensor(key))
        model: Any = _InFp32(self._model) if self._quantized else self._model
        converted = rule.convert(stored.first, model=model, config=self._model.config)
        # A converter with one result may name it by its own pattern.
        value = (
            converted[name]
            if name in converted
            else converted[next(iter(converted))]
            if len(converted) == 1
            else converted[name]
        )
        assembled: Tensor = value[0] if isinstance(value, list) else value
        return assembled

    def _find_shared_names(self, name: str) -> list[str]:
        """Other names of the same parameter, by the model's tied weights."""
        tied: Mapping[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        source = tied.get(name, name)
        return [other for other in (source, *(target for target, of in tied.items() if of == source)) if other != name]

    def tied(self) -> Iterator[tuple[str, str]]:
        """Pairs of tied names that the files both have, and of which one was not read."""
        tied: Mapping[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        for target, source in tied.items():
            pair = [self._stored.get(name) for name in (target, source)]
            if all(pair) and any(not set(stored.keys) <= self._read for stored in pair if stored is not None):
                yield target, source

    def unread(self, model: PreTrainedModel) -> dict[str, str]:
        """Unread keys of the files, with their names in the model, except those that transformers ignores."""
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        buffers = [name for name, _ in model.named_buffers()]
        # Old checkpoints hold buffers that models compute by themselves.
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            ignored.add(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            ignored.add(r"(^|\.)position_ids$")
        pattern = re.compile("|".join(f"({part})" for part in ignored)) if ignored else None
        names = self.named()
        return {
            key: names[key]
            for key in self._keys
            if key not in self._read
            and names[key] not in self._places  # parameters of other pipeline stages are read there
            and not (pattern and pattern.search(names[key]))
        }
