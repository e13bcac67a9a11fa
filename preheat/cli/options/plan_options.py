"""The options of `preheat plan`, by what it plans. The fields are all options that the job reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from preheat.cli.options.foreign_options import ForeignOptions
from preheat.core.plan import Price

if TYPE_CHECKING:
    from preheat.core import Numerics
    from preheat.hardware.catalogue import Accelerator

__all__ = ["Aim", "Method", "PlanOptions", "ServingPlanOptions", "TrainingPlanOptions", "parse_price"]

Method = Literal["full", "lora", "qlora"]
Aim = Literal["fastest", "cheapest", "largest-batch", "longest-context", "closest"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of every plan.

    Attributes:
        what: a recipe or a model; None if `set` names the model.
        gpu: None: the device of this machine.
        count: devices per host; without `nodes`, of the whole run.
        from_: the format of another trainer's file; None: recognized by its keys.
        deepspeed: DeepSpeed's JSON beside it.
        accelerate: accelerate's configuration beside it.
    """

    what: str | None
    set: tuple[str, ...]
    gpu: Accelerator | None
    count: int | None
    nodes: int
    length: int | None
    json: bool
    from_: str | None = None
    deepspeed: Path | None = None
    accelerate: Path | None = None

    @property
    def foreign(self) -> ForeignOptions:
        """Options for reading another trainer's file."""
        return ForeignOptions(self.from_, self.deepspeed, self.accelerate)

    @property
    def devices(self) -> int:
        """Number of devices, if the recipe does not state it."""
        return (self.count or 1) * self.nodes


@dataclass(frozen=True, kw_only=True)
class ServingPlanOptions(PlanOptions):
    """The options of a plan for serving.

    Attributes:
        batch: sequences at a time; None: as many as fit.
    """

    batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingPlanOptions(PlanOptions):
    """The options of a plan for training: of a recipe as it is, or of a search around it.

    Attributes:
        solve: key to find the largest value of.
        write: another trainer's file with the improvements of the plan.
        figures: file for the data of the page's plots.
    """

    batch_tokens: int | None
    method: Method | None
    aim: Aim | None
    allow: Numerics | None
    price: Price | None
    solve: str | None
    write: Path | None
    out: Path | None
    html: Path | None
    figures: Path | None
    verbose: bool

    @property
    def has_plots(self) -> bool:
        """True if the data of plots is asked for, which takes another dry run."""
        return self.html is not None or self.figures is not None


def parse_price(text: str) -> Price:
    """Returns a price per device-hour and its currency.

    Raises:
        RecipeError: no amount, or an amount without a unit: a bare number may be per hour, per month or per million.

    Example:
        >>> parse_price("2.5USD/h"), parse_price("730 eur/month")
        (Price(per_hour=2.5, currency='USD'), Price(per_hour=1.0, currency='EUR'))
    """
    from preheat.errors import RecipeError
    from preheat.sanitize import quote_value

    match = re.fullmatch(
        # Commas between thousands only: 1,5 may be a decimal comma.
        r"([$€£¥]?)\s*([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)\s*([$€£¥]|[a-zA-Z]{3})?"
        r"\s*/\s*(?:(?:gpu|device)-?)?(h|hr|hour|d|day|mo|month)",
        text.strip()[:60],
        re.IGNORECASE,
    )
    signs = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY"}
    # One currency, before or after the amount.
    if match is None or bool(match[1]) == bool(match[3]):
        raise RecipeError(
            f"--price: {quote_value(text)}: must be an amount with its currency and time, such as --price 2.5USD/h "
            "(of one "
            "device)"
        )
    currency = match[1] or match[3]
    per = {"h": 1, "d": 24, "m": 730}[match[4][0].lower()]  # a month of a cloud has 730 hours
    return Price(float(match[2].replace(",", "").replace("_", "")) / per, signs.get(currency, currency.upper()))
