"""Fields of forms: their help from the recipe's own descriptions, and the checks of their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException

from preheat.core import schema
from preheat.core.schema import field_docs
from preheat.errors import RecipeError
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["Choice", "Field", "clean_values", "describe_key", "fill", "read_form", "read_number", "read_values"]

_SECTIONS = {
    "model": schema.Model,
    "data": schema.Data,
    "batch": schema.Batch,
    "optimizer": schema.Optimizer,
    "parallel": schema.Parallel,
    "sample": schema.Sample,
    "stop": schema.Stop,
}
_MOST_FIELDS = 1_000
_LONGEST = 2000
"""Characters of a value."""


@dataclass(frozen=True)
class Choice:
    """An entry of a list to choose from; `group` is its heading."""

    value: str
    label: str
    group: str = ""


@dataclass(frozen=True)
class Field:
    """A field of a form.

    Attributes:
        name: its key in the form and in the URL of the page.
        help: the sentence below it.
        kind: "suggest" is a text with a list of suggestions.
        groups: {heading: choices} of a "select" or "suggest".
        value: what it shows at first.
    """

    name: str
    label: str
    help: str
    kind: Literal["text", "number", "select", "suggest", "area"] = "text"
    groups: Mapping[str, Sequence[Choice]] = field(default_factory=dict)
    value: str = ""
    placeholder: str = ""
    minimum: int | None = None

    @property
    def brief(self) -> str:
        """The first sentence of its help."""
        return self.help.partition(". ")[0].rstrip(".") + "."

    @property
    def rest(self) -> str:
        return self.help.partition(". ")[2]

    def list_values(self) -> set[str]:
        """Returns the values that its list offers."""
        return {choice.value for group in self.groups.values() for choice in group}


@cache
def describe_key(key: str) -> str:
    """Returns the description of a key of the recipe, such as batch.seq_len."""
    section, _, name = key.partition(".")
    return " ".join(field_docs(_SECTIONS[section])[name].split()).replace("`", "")


def fill(fields: Sequence[Field], values: Mapping[str, str]) -> list[Field]:
    """Returns the fields with the values of a URL.

    A value that a list lacks, of a file that was deleted, is added to the list: the form sends it, and is refused. The
    default in its place would answer another question.
    """
    filled = [replace(field, value=values.get(field.name, field.value)) for field in fields]
    return [
        replace(field, groups={**field.groups, "Not there any more": [Choice(field.value, field.value)]})
        if field.kind == "select" and field.value and field.value not in field.list_values()
        else field
        for field in filled
    ]


async def read_form(request: Request) -> Mapping[str, Sequence[str]]:
    """Returns the values of each field of a form that was sent, in order. Uploads do not exist.

    Raises:
        HTTPException: 400, the body is no form.
    """
    try:
        return parse_qs(
            (await request.body()).decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS
        )
    except ValueError:  # also UnicodeDecodeError
        raise HTTPException(400, "The form cannot be read; load the page again.") from None


async def read_values(request: Request) -> dict[str, str]:
    """Returns the last value of each field of a form that was sent, as `clean_values`.

    Raises:
        HTTPException: 400, the body is no form.
        RecipeError: a value is too long or has a null character.
    """
    return clean_values([(name, values[-1]) for name, values in (await read_form(request)).items()])


def clean_values(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Returns values of a form or of a URL by name, without spaces around them and without empty ones."""
    values = {}
    for name, text in pairs:
        value = text.strip()
        if len(value) > _LONGEST:
            raise RecipeError(f"{quote_value(name)}: has {len(value):,} characters; {_LONGEST:,} are allowed")
        if "\x00" in value:
            raise RecipeError(f"{quote_value(name)}: has a null character; remove it")
        if value:
            values[name] = value
    return values


def read_number(values: Mapping[str, str], field: Field) -> int | None:
    """Returns a whole number of a form, or None if its field is empty.

    Raises:
        RecipeError: it is no number, or too small.
    """
    text = values.get(field.name)
    if text is None:
        return None
    digits = text.replace(",", "").replace("_", "")
    least = field.minimum or 0
    if not digits.isascii() or not digits.isdigit() or len(digits) > 15 or int(digits) < least:
        raise RecipeError(f"{field.label}: {quote_value(text)}: must be a whole number of at least {least:,}")
    return int(digits)
