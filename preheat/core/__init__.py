"""Techniques, the build that they change, and their registry. No torch: `preheat --help` imports this.

A technique is one idea that changes a build: one file in `preheat/techniques/`; its file name is its key in the recipe.

    recipe ──check──▶ Build on meta ──apply, in the order of Stage──▶ Build with slots owned ──▶ step
"""

from __future__ import annotations

from preheat.core.batch import Batch, LossSum, MaskSpec, RowLoss, Shape, Stateful
from preheat.core.device import Device, MachineUse
from preheat.core.example_kind import ExampleKind
from preheat.core.field_types import Numerics
from preheat.core.mesh import DATA, Axis, Mesh, sizes_of
from preheat.core.phases import STEP, Phase
from preheat.core.problems import MissingPackage, Problem, ProblemCode, TechniqueError
from preheat.core.registry import (
    conflicts_of,
    incompatibilities,
    parallel_tags,
    problems_of,
    registry,
    single_device,
)
from preheat.core.slots import Change, Finish, Order, Slot, SlotFunction, Stage
from preheat.core.split_attention import SplitAttention
from preheat.core.tags import Tag
from preheat.core.technique import (
    Build,
    Context,
    DatasetPass,
    LossScaling,
    ModelFacts,
    Recipe,
    Searchable,
    Technique,
)
from preheat.core.trials import Trials
from preheat.core.vision import IMAGE_BUDGETS, ImageLayout, Images, Vision

__all__ = [
    "DATA",
    "IMAGE_BUDGETS",
    "STEP",
    "Axis",
    "Batch",
    "Build",
    "Change",
    "Context",
    "DatasetPass",
    "Device",
    "ExampleKind",
    "Finish",
    "ImageLayout",
    "Images",
    "LossScaling",
    "LossSum",
    "MaskSpec",
    "MachineUse",
    "Mesh",
    "ModelFacts",
    "Numerics",
    "Order",
    "Phase",
    "MissingPackage",
    "Problem",
    "ProblemCode",
    "Recipe",
    "RowLoss",
    "Searchable",
    "Shape",
    "Slot",
    "SlotFunction",
    "SplitAttention",
    "Stage",
    "Stateful",
    "Tag",
    "Technique",
    "TechniqueError",
    "Trials",
    "Vision",
    "conflicts_of",
    "incompatibilities",
    "single_device",
    "problems_of",
    "registry",
    "sizes_of",
    "parallel_tags",
]
