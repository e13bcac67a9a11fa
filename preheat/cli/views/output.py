"""Output functions of all commands.

Text from outside (names, paths, keys, data) has its control characters escaped and is never parsed as markup.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from preheat.sanitize import escape_control_characters

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    class PlainConsole(Console):
        """The class that `_build_console_class` creates."""

        def note(self, text: str) -> None:
            """Prints a yellow "note:" before the text."""


__all__ = ["build_progress_bar", "build_console", "print_progress", "say", "write_text"]


def say(text: object = "", *, end: str = "\n", error: bool = False) -> None:
    """Prints text with its control characters escaped, on standard output or standard error."""
    # Flushed at once: a pipe would hold the text until the process ends.
    print(escape_control_characters(text), end=end, file=sys.stderr if error else sys.stdout, flush=True)


def write_text(text: str, end: str = "") -> None:
    """Prints generated text: with control characters escaped on a terminal, unchanged into a pipe or a file."""
    print(escape_control_characters(text) if sys.stdout.isatty() else text, end=end, flush=True)


def print_progress(text: str = "") -> None:
    """Prints a line of progress on standard error.

    On a terminal each line replaces the last one, and an empty text clears it.
    """
    if sys.stderr.isatty():
        # Cut to the terminal's width: a wrapped line could not be cleared, since only the last row is.
        width = min(shutil.get_terminal_size().columns - 1, 100)
        print(f"\r\x1b[2K{escape_control_characters(text)[:width]}", end="", file=sys.stderr, flush=True)
    # Not a terminal: each line stays, as in a log.
    elif text:
        say(text, error=True)


def build_console(*, error: bool = False, quiet: bool = False) -> PlainConsole:
    """Returns a rich console without markup, emoji codes or highlighting; styled text is a `rich.text.Text`."""
    # rich looks up the standard streams when it prints, so a new console per call is cheap and follows redirections.
    return _build_console_class()(stderr=error, quiet=quiet, markup=False, emoji=False, highlight=False)


def build_progress_bar(screen: Console, *columns: str | ProgressColumn, **options: Any) -> Progress:
    """Returns a progress display; a text column is a template such as "{task.description}", filled without markup."""
    from rich.progress import Progress, TextColumn

    return Progress(
        *(TextColumn(column, markup=False) if isinstance(column, str) else column for column in columns),
        console=screen,
        # The bar disappears at its end; what remains is printed as lines.
        transient=True,
        **options,
    )


@cache
def _build_console_class() -> type[PlainConsole]:
    """Returns the console class; created on first use, since importing rich takes a tenth of a second."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.status import Status
    from rich.text import Text

    class PlainStatus(Status):
        """A status without markup: rich parses its text as markup even if the console does not."""

        def update(self, status: RenderableType | None = None, **options: Any) -> None:
            super().update(_strip_styles(status), **options)

    class PlainConsole(Console):
        def status(self, status: RenderableType, **options: Any) -> Status:  # type: ignore[override]
            return PlainStatus(_strip_styles(status) or "", console=self, **options)

        def note(self, text: str) -> None:
            self.print(Text.assemble(("note:", "yellow"), f" {text}"), soft_wrap=True)

        # Plain strings that rich turns into text.
        def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
            return super().render_str(escape_control_characters(text), **options)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                # rich's own cursor movements stay; text within tables and progress bars is escaped too.
                yield segment if segment.control else segment._replace(text=escape_control_characters(segment.text))

    def _strip_styles(status: RenderableType | None) -> RenderableType | None:
        return Text(escape_control_characters(status)) if isinstance(status, str) else status

    return PlainConsole  # type: ignore[return-value]  # declared above for type checkers
