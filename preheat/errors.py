"""Errors that a user can cause, and the exit code of the command for each.

    PreheatError (ValueError)      the user can fix it; printed as one line, without a traceback
    ├── RecipeError      exit 2    the command or the recipe is wrong
    ├── DoesNotFit       exit 3    the run needs more memory than the device has
    ├── DataError        exit 4    the data is wrong; the message has the file and the row
    └── RunError         exit 1    the run failed, or a run folder cannot be used

Any other exception is a bug in preheat and keeps its traceback.
"""

__all__ = ["DataError", "DoesNotFit", "PreheatError", "RecipeError", "RunError", "SettingError", "suggest_nearest"]


class PreheatError(ValueError):
    """An error that the user can fix: the message names the setting, the value and the fix."""

    exit_code = 1


class RecipeError(PreheatError):
    """The command line or the recipe is wrong."""

    exit_code = 2


class DoesNotFit(PreheatError):
    """The run needs more memory than the device has."""

    exit_code = 3


class DataError(PreheatError):
    """The data is wrong: the message names the file, the row and the field."""

    exit_code = 4


class RunError(PreheatError):
    """The run failed, or its folder cannot be used."""

    exit_code = 1


class SettingError(ValueError):
    """A function rejects one of its arguments; a technique turns this into a `RecipeError` with its own key.

    Attributes:
        setting: name of the argument.
    """

    def __init__(self, setting: str, message: str):
        super().__init__(f"{setting}: {message}")
        self.setting = setting


def suggest_nearest(word: str, known: "list[str] | tuple[str, ...]") -> str:
    """Returns "did you mean ...?" with the known word closest to `word`, or a list of known words if none is close."""
    import difflib

    # Comparing a word of a megabyte takes minutes, and names are short.
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.55) if len(word) <= 100 else []
    if matches:
        return f"did you mean '{matches[0]}'?"
    # No close name: list all of them if they are few, otherwise the first twelve.
    names = sorted(known)
    more = f" and {len(names) - 12} more" if len(names) > 40 else ""
    return "known: " + ", ".join(names[:12] if more else names) + more if names else "there are none here"
