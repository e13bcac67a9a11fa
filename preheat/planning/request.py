"""The request that every function of the planner takes: a recipe, the devices to plan it for, and their rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from preheat.core import Context, Device
from preheat.engine.builder import build_context, find_world_size
from preheat.hardware.plausibility import contradicted_data_sheet
from preheat.hardware.rates import Rates
from preheat.models import configs, hf
from preheat.planning.speed.roofline import Roofline
from preheat.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """A recipe to plan, and everything that its plan depends on. Decided once, by the command or the session.

    A search and the fallbacks plan changed recipes of the same model on the same devices:
    `dataclasses.replace(request, recipe=other)` keeps the configuration that was read.

    Attributes:
        vocabulary: vocabulary size of the tokenizer; None if the model decides.
        world: number of devices; None takes the recipe's own number.
        per_host: devices of a host.
        rates: rates of the device: measured (`hardware.benchmark_rates.rates`), or from the catalogue; None is enough
            for a dry run. A GPU's measured rates that contradict its data sheet are replaced by the data sheet's.
        rows: number of training rows if known; `stop.epochs` needs it.
        in_use: bytes of the device in use before the run (on a CPU by the imports).
        image_pixels: pixels per image as the model's processor hands them over, for a plan without data; None: those
            that the recipe's data has.
        source_config: the model's configuration as read, once per request; None for a new model, which has no file.
    """

    recipe: Recipe
    device: Device
    vocabulary: int | None = None
    world: int | None = None
    per_host: int = 8
    rates: Rates | Roofline | None = None
    rows: int | None = None
    in_use: int = 0
    image_pixels: int | None = None
    source_config: PretrainedConfig | None = None

    def __post_init__(self) -> None:
        # Read here once, because a search replaces the recipe hundreds of times.
        if self.source_config is None:
            object.__setattr__(self, "source_config", configs.source_config(self.recipe))
        # Here, because every plan of this machine passes: commands, runs, searches and fallbacks.
        if isinstance(self.rates, Rates) and (contradicted := contradicted_data_sheet(self.rates)):
            sheet, why = contradicted
            roofline = Roofline(sheet, self.per_host, alone=self.devices == 1, doubt=why)
            object.__setattr__(self, "rates", roofline)

    @property
    def devices(self) -> int:
        """Number of devices of the run."""
        return self.world or find_world_size(self.recipe)

    @property
    def room(self) -> Device:
        """The device with the memory that other processes leave, if it is a GPU: its allocator gets no more."""
        if self.device.kind == "cpu":
            return self.device
        return replace(self.device, memory=max(self.device.memory - self.in_use, 1))

    @cached_property
    def config(self) -> PretrainedConfig:
        """The model's configuration with the changes of the recipe and its techniques."""
        return hf.configure(self.recipe, self.vocabulary, self.source_config)

    @property
    def observed(self) -> Recipe:
        """The recipe with the size of the images that a dry run makes."""
        if self.image_pixels is None:
            return self.recipe
        return replace(self.recipe, data=replace(self.recipe.data, image_pixels=self.image_pixels))

    @property
    def context(self) -> Context:
        """The context that the techniques' checks read; RecipeError if the mesh does not match the devices."""
        return build_context(self.recipe, self.config, self.device, self.world)
