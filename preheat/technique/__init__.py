"""What a technique is, the build that it acts on, and the registry. No torch: `preheat --help` reads this.

A technique is one idea that changes a build: one file in `preheat/techniques/`, found by its name, the key in the recipe.

    recipe ──check──▶ Build on meta ──apply, in the order of Stage──▶ Build with slots owned ──▶ step
"""

from __future__ import annotations

from preheat.technique.base import (
    Context,
    Device,
    ModelFacts,
    Technique,
    clashes_of,
    conflicts_of,
    has_room,
    on_one_device,
    refusals,
    registry,
    spreading,
)
from preheat.technique.batch import Batch, LossSum, MaskSpec, RowLoss, Shape, Stateful
from preheat.technique.build import Build
from preheat.technique.images import Images, Vision
from preheat.technique.mesh import DATA, Axis, Mesh, sizes_of
from preheat.technique.places import Change, Finish, Order, Slot, Stage, Tag

__all__ = [
    "DATA",
    "Axis",
    "Batch",
    "Build",
    "Change",
    "Context",
    "Device",
    "Finish",
    "Images",
    "LossSum",
    "MaskSpec",
    "Mesh",
    "ModelFacts",
    "Order",
    "RowLoss",
    "Shape",
    "Slot",
    "Stage",
    "Stateful",
    "Tag",
    "Technique",
    "Vision",
    "clashes_of",
    "conflicts_of",
    "has_room",
    "on_one_device",
    "refusals",
    "registry",
    "sizes_of",
    "spreading",
]
