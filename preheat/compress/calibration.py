"""What calibration looks at: rows that can teach something, and the inputs of linear maps, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from preheat.errors import DataError
from preheat.models.layerwise import layer_by_layer, plainly

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LEAST", "Inputs", "Layer", "require_rows", "walk"]

LEAST = 8
"""Rows that must differ from each other."""
_RUN, _OWN = 8, 0.02
"""Runs of so many tokens, and the share of them that must differ: of TinyStories in 512 pieces nine in ten do."""


def require_rows(rows: Sequence[Tensor]) -> None:
    """Raises DataError, with the numbers, where rows [1, length] cannot stand for the model's inputs."""
    many, different = len(rows), len({tuple(row.flatten().tolist()) for row in rows})
    if many < LEAST:
        raise DataError(
            f"calibration: {many} rows, and {LEAST} are needed; name more text with --data, or lower --length"
        )
    if different < LEAST:
        raise DataError(
            f"calibration: {many} rows, of which only {different} differ, and {LEAST} are needed; name other text with --data"
        )
    pieces = len(torch.cat([row.flatten() for row in rows]).unique())
    if pieces < LEAST:
        raise DataError(f"calibration: the rows hold only {pieces} different tokens; name real text with --data")
    runs = torch.cat(
        [row.flatten().unfold(0, _RUN, 1) for row in rows if row.numel() >= _RUN] or [torch.empty(0, _RUN)]
    )
    if len(runs) and (own := len(runs.unique(dim=0))) < _OWN * len(
        runs
    ):  # rows that begin elsewhere in a text that repeats itself
        raise DataError(
            f"calibration: the rows say the same over and over: {own:,} different runs of {_RUN} tokens in {len(runs):,}; name other text with --data"
        )


@dataclass
class Inputs:
    """What a linear map's inputs were over the calibration rows.

    Attributes:
        gram: sum(x x^T) [in, in], fp32.
        largest: the largest magnitude of each, [in].
        tokens: how many.
    """

    gram: Tensor
    largest: Tensor
    tokens: int = 0

    def see(self, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self.gram.addmm_(x.t(), x)
        torch.maximum(self.largest, x.abs().amax(dim=0), out=self.largest)
        self.tokens += x.shape[0]


@dataclass
class Layer:
    """A transformer layer with the hidden states that come into it, from layers before as they are by now.

    Attributes:
        run: gives the hidden states that go out.
    """

    name: str
    module: nn.Module
    run: Callable[[], list[Tensor]]

    def inputs(self, maps: Mapping[str, nn.Module]) -> dict[str, Inputs]:
        """What comes into some of its maps.

        Args:
            maps: by whatever names.
        """

        def hear(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                x: Tensor = args[0]
                if name not in found:
                    width = x.shape[-1]
                    found[name] = Inputs(
                        torch.zeros(width, width, device=x.device), torch.zeros(width, device=x.device)
                    )
                found[name].see(x)

            return hook

        found: dict[str, Inputs] = {}
        hooks = [module.register_forward_pre_hook(hear(name)) for name, module in maps.items()]
        try:
            self.run()
        finally:
            for handle in hooks:
                handle.remove()
        return found


def walk(model: PreTrainedModel, rows: Sequence[Tensor]) -> Iterator[Layer]:
    """The model's layers in order; what is changed in one is what the next one's inputs are made with.

    The arguments of each layer beside the hidden states (masks, rotary tables) are those of one plain pass at the beginning.

    Args:
        rows: [1, length] tokens each.

    Raises:
        DataError: too few rows, or all alike.
    """
    require_rows(rows)
    with plainly(model):
        for name, module, run in layer_by_layer(model, rows):
            yield Layer(name, module, run)
