"""What a technique is, the build that it acts on, and the registry. No torch: `preheat --help` reads this.

A technique is one idea that changes a build: one file in `preheat/techniques/`, found by its name, the key in the recipe.

    recipe ──check──▶ Build on meta ──apply, in the order of Stage──▶ Build with slots owned ──▶ step
"""

from __future__ import annotations

from preheat.technique.base import Build, Context, DatasetPass, Device, ModelFacts, Numerics, Recipe, Searchable, Technique
from preheat.technique.batch import Batch, LossSum, MaskSpec, RowLoss, Shape, Stateful
from preheat.technique.examples import Examples
from preheat.technique.images import Images, Vision
from preheat.technique.mesh import DATA, Axis, Mesh, sizes_of
from preheat.technique.phases import STEP, Phase
from preheat.technique.places import Change, Finish, Order, Slot, Stage
from preheat.technique.problems import Problem, ProblemCode, TechniqueError
from preheat.technique.registry import (
    conflicts_of,
    has_room,
    incompatibilities,
    on_one_device,
    problems_of,
    registry,
    spreading,
)
from preheat.technique.tags import Tag
from preheat.technique.trials import Trials

__all__ = [
    "DATA",
    "STEP",
    "Axis",
    "Batch",
    "Build",
    "Change",
    "Context",
    "DatasetPass",
    "Device",
    "Examples",
    "Finish",
    "Images",
    "LossSum",
    "MaskSpec",
    "Mesh",
    "ModelFacts",
    "Numerics",
    "Order",
    "Phase",
    "Problem",
    "ProblemCode",
    "Recipe",
    "RowLoss",
    "Searchable",
    "Shape",
    "Slot",
    "Stage",
    "Stateful",
    "Tag",
    "Technique",
    "TechniqueError",
    "Trials",
    "Vision",
    "conflicts_of",
    "has_room",
    "incompatibilities",
    "on_one_device",
    "problems_of",
    "registry",
    "sizes_of",
    "spreading",
]
