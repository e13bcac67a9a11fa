"""Checkpoints of stacks that hold a gate and an up projection, of which a rank has some rows of each.

torch's distributed checkpoint describes a DTensor's local part by one box of the full tensor. Such a part is two: it is
written as two entries, and read as two from a checkpoint of any layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from preheat.ops.distributed.dtensor_utils import parts_of, split_dim

__all__ = ["Writer", "as_boxes", "assign_parts", "is_packed"]

_PART = "#part"
"""Suffix of a tensor's name for the file of its second part: a safetensors file has each name once."""


def is_packed(t: Tensor) -> bool:
    """True if a rank's part is two boxes of the full tensor."""
    # FSDP's strided shards come before the shard that they divide, and are one box.
    return isinstance(t, DTensor) and parts_of(t.placements[-1]) > 1


def as_boxes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replaces the tensors that are several boxes by ones that say so; they share their memory."""
    return {name: _PackedShard.create(t) if is_packed(t) else t for name, t in tensors.items()}


def assign_parts(numbers: Mapping[str, int], packed: Iterable[str]) -> dict[str, int]:
    """Adds the files of second parts to a table of name -> number of the file, from 1."""
    last = max(numbers.values(), default=0)
    return {**numbers, **{f"{name}{_PART}": last + numbers[name] for name in packed}}


class _PackedShard(torch.Tensor):
    """A local part that tells torch's checkpoint planner which boxes of the full tensor it is.

    Attributes:
        along: dimension along which the boxes lie behind each other.
        boxes: of each, the offsets in the full tensor and the sizes.
        full: shape of the full tensor.
    """

    along: int
    boxes: list[ChunkStorageMetadata]
    full: torch.Size

    @classmethod
    def create(cls, t: Any) -> _PackedShard:
        """Describes the local part of a DTensor."""
        place = t.placements[-1]
        dim, parts = split_dim(place), parts_of(place)
        assert dim is not None
        sizes, offsets = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
        shard: _PackedShard = t.detach().to_local().as_subclass(cls)
        size = (*sizes[:dim], sizes[dim] // parts, *sizes[dim + 1 :])
        starts = [offsets[dim] + n * t.shape[dim] // parts for n in range(parts)]
        shard.along, shard.full = dim, t.shape
        shard.boxes = [
            ChunkStorageMetadata(
                offsets=torch.Size((*offsets[:dim], start, *offsets[dim + 1 :])), sizes=torch.Size(size)
            )
            for start in starts
        ]
        return shard

    def size(self, *_: int) -> torch.Size:  # type: ignore[override]
        """The full size, which torch compares with that of the checkpoint."""
        return self.full

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor))
        return [
            WriteItem(
                index=MetadataIndex(name, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box, properties=properties, size=self.full),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.boxes

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        number = next(n for n, box in enumerate(self.boxes) if box.offsets == index.offset)
        return self.as_subclass(torch.Tensor).chunk(len(self.boxes), self.along)[number]


class Writer(dcp.HuggingFaceStorageWriter):
    """torch's writer of safetensors files; writes second parts of tensors into the files that `assign_parts` adds."""

    def _split_by_storage_plan(
        self, storage_plan: dict[str, int] | None, items: list[WriteItem]
    ) -> dict[int, list[WriteItem]]:
        assert storage_plan is not None
        files: dict[int, list[WriteItem]] = {}
        seen: set[str] = set()
        for item in items:
            name = item.index.fqn
            files.setdefault(storage_plan[f"{name}{_PART}" if name in seen else name], []).append(item)
            seen.add(name)
        return files
