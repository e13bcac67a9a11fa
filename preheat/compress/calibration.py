"""Calibration: checks the rows, and collects the inputs of linear maps layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from preheat.errors import DataError
from preheat.models.layerwise import iterate_layers, plain_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LEAST", "Inputs", "Layer", "describe", "require_rows", "walk"]

LEAST = 8
"""Minimum number of different rows."""
_RUN, _OWN = 8, 0.02
"""Length of a run of tokens, and the share of runs that must differ. With 512 tokens, TinyStories has about 90 %."""


def describe(rows: Sequence[Tensor]) -> str:
    """Returns the number of rows [1, length] and their lengths.

    Example:
        >>> describe([torch.zeros(1, 8), torch.zeros(1, 5)])
        '2 sequences of 5 to 8 tokens'
    """
    shortest, longest = min(row.shape[1] for row in rows), max(row.shape[1] for row in rows)
    return f"{len(rows)} sequences of {longest if shortest == longest else f'{shortest} to {longest}'} tokens"


def require_rows(rows: Sequence[Tensor]) -> None:
    """Raises DataError, with the counts, if the rows [1, length] are too few or too uniform to calibrate on."""
    # Identical rows add nothing to the statistics.
    count, different = len(rows), len({tuple(row.flatten().tolist()) for row in rows})
    if count < LEAST:
        raise DataError(
            f"calibration: {count} sequences, and {LEAST} are needed; name more text with --data, or lower --length"
        )
    if different < LEAST:
        raise DataError(
            f"calibration: {count} sequences, of which only {different} differ, and {LEAST} are needed; name other "
            "text with --data"
        )
    # Also rejects text of one repeated word.
    vocabulary = len(torch.cat([row.flatten() for row in rows]).unique())
    if vocabulary < LEAST:
        raise DataError(
            f"calibration: the sequences hold only {vocabulary} different tokens; name real text with --data"
        )
    runs = torch.cat(
        [row.flatten().unfold(0, _RUN, 1) for row in rows if row.numel() >= _RUN] or [torch.empty(0, _RUN)]
    )
    # Rows that start at different offsets of a repetitive text differ from each other, but their runs do not.
    if len(runs) and (distinct := len(runs.unique(dim=0))) < _OWN * len(runs):
        raise DataError(
            f"calibration: the sequences repeat themselves: {distinct:,} different runs of {_RUN} tokens in "
            f"{len(runs):,}; name other text with --data"
        )


@dataclass
class Inputs:
    """Statistics of a linear map's inputs over the calibration sequences.

    Attributes:
        gram: sum(x x^T) [in, in], fp32.
        largest: largest magnitude per input, [in].
        tokens: number of tokens seen.
    """

    gram: Tensor
    largest: Tensor
    tokens: int = 0

    def add(self, x: Tensor) -> None:
        # (..., in) -> (tokens, in)
        x = x.detach().reshape(-1, x.shape[-1]).float()
        # In place: the Gram matrix is as large as a square weight.
        self.gram.addmm_(x.t(), x)
        torch.maximum(self.largest, x.abs().amax(dim=0), out=self.largest)
        self.tokens += x.shape[0]


@dataclass
class Layer:
    """A transformer layer with its input hidden states, computed by the preceding layers in their current state.

    Attributes:
        run: computes the output hidden states.
    """

    name: str
    module: nn.Module
    run: Callable[[], list[Tensor]]

    def inputs(self, maps: Mapping[str, nn.Module]) -> dict[str, Inputs]:
        """Collects the input statistics of some of its linear maps.

        Args:
            maps: by any names.
        """

        def collect(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                x: Tensor = args[0]
                # The width and the device are known at the first call.
                if name not in inputs:
                    width = x.shape[-1]
                    inputs[name] = Inputs(
                        torch.zeros(width, width, device=x.device), torch.zeros(width, device=x.device)
                    )
                inputs[name].add(x)

            return hook

        inputs: dict[str, Inputs] = {}
        hooks = [module.register_forward_pre_hook(collect(name)) for name, module in maps.items()]
        try:
            # This layer alone, on the outputs of the layers before it.
            self.run()
        finally:
            for handle in hooks:
                handle.remove()
        return inputs


def walk(model: PreTrainedModel, rows: Sequence[Tensor]) -> Iterator[Layer]:
    """Yields the model's layers in order; changes to a layer affect the inputs of the following ones.

    All other arguments of a layer (masks, rotary tables) are those of one forward pass at the start.

    Args:
        rows: [1, length] tokens each.

    Raises:
        DataError: too few rows, or all alike.
    """
    require_rows(rows)
    # Between two yields the caller changes the layer; the next one gets its inputs from the changed layer.
    with plain_forward(model):
        for name, module, run in iterate_layers(model, rows):
            yield Layer(name, module, run)
