"""Adapts our docstrings to mkdocstrings, which reads them for the Python reference (docs/pages/api.md)."""

from __future__ import annotations

import re

from griffe import Extension, Function, GriffeLoader, Object

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_RETURNS = re.compile(r"^Returns:\n    ", re.MULTILINE)


class OurDocstrings(Extension):
    """Rewrites the sections that griffe reads otherwise than they are meant."""

    def on_object(self, *, obj: Object, loader: GriffeLoader, **_: object) -> None:
        """Names the section of examples `Examples`, and puts the type before what a function returns.

        Griffe shows `Example` as a quotation, and would take the text before a colon for the type.
        """
        if obj.docstring is None:
            return
        text = _EXAMPLE.sub("Examples:", obj.docstring.value)
        if isinstance(obj, Function) and obj.returns is not None:
            returned = str(obj.returns)
            text = _RETURNS.sub(lambda match: f"{match[0]}{returned}: ", text)
        obj.docstring.value = text
