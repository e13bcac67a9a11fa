"""Reads the fields of a form that was sent. Uploads do not exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["read_form"]

_MOST_FIELDS = 1_000


async def read_form(request: Request) -> Mapping[str, list[str]]:
    """Returns the values of each field, in order.

    Raises:
        HTTPException: 400, the body is no form.
    """
    try:
        return parse_qs(
            (await request.body()).decode("utf-8"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MOST_FIELDS,
        )
    except ValueError:  # also UnicodeDecodeError
        raise HTTPException(400, "The form cannot be read; load the page again.") from None
