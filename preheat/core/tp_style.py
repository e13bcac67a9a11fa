"""Styles in which a model's plan splits modules along the tensor axis, executed by torch's styles. No torch."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["TpStyle"]


class TpStyle(StrEnum):
    """The role of a module under tensor parallelism."""

    BLOCK = "block"  # attention or feed-forward: takes an unsharded input
    BLOCK_OF_HEADS = "block of heads"  # the same, with parameters of its own that have an entry for each head
    BLOCK_WHOLE = "whole block"  # a block that each device computes for all positions, with all parameters
    BLOCK_OF_EXPERTS = "block of experts"  # a router and experts: each device's result is a partial sum
    EXPERTS = "experts"  # inside such a block: stacks of weights, split along the width of each expert
    PARTIAL_COLUMNS = "partial columns"  # inside such a block: a linear layer of shared experts, with sharded outputs
    PARTIAL_ROWS = "partial rows"  # the same, with sharded inputs
    PARTIAL_WHOLE = "partial whole"  # inside such a block, and replicated: the gradients are partial
    COLUMNS = "columns"  # a linear layer with sharded outputs
    COLUMNS_GATHERED = "columns gathered"  # the same, with outputs gathered afterwards
    ROWS = "rows"  # a linear layer with sharded inputs; results are summed into the residual stream
    ROWS_SPLIT = "rows split"  # the same for unsharded inputs, of which each device takes its shard
    ROWS_SUMMED = "rows summed"  # as rows, but results stay unsharded on each device
    HEADS = "heads"  # a norm over each local head: the gradients of its weight are partial
    REPLICATED = "whole"  # inside a block, and replicated
    REPLICATED_THEN_SPLIT = "whole, then cut"  # the same, with results that go to the residual stream
    BETWEEN = "between"  # between blocks: a norm over the residual stream
    LAST = "last"  # the final norm
    EMBEDDING = "embedding"
    HEAD = "head"
