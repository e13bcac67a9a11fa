"""How the modules of a model are shared out along the tensor axis: what a model's plan says and torch's styles carry
out. No torch."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Share"]


class Share(StrEnum):
    """What devices along the tensor axis do with a module."""

    BLOCK = "block"  #                        attention or feed-forward: reads its input whole
    COLUMNS = "columns"  #                    a map whose outputs are shared out
    COLUMNS_GATHERED = "columns gathered"  #  and then gathered
    #                          a map whose inputs are shared out already; results are summed and go to the stream
    ROWS = "rows"
    ROWS_SPLIT = "rows split"  #              the same of inputs that are whole, of which each device takes its share
    ROWS_SUMMED = "rows summed"  #            as rows, but results stay whole on each device
    HEADS = (
        "heads"  #                        a norm over each head that a device has: its weight's gradients are partial
    )
    WHOLE = "whole"  #                        inside a block, and the same on all devices
    WHOLE_CUT = "whole, then cut"  #          the same, with results that go to the stream
    BETWEEN = "between"  #                    between blocks: a norm over the stream that they add to
    LAST = "last"  #                          the norm behind the last layer
    EMBEDDING = "embedding"
    HEAD = "head"
