"""The errors that a user can cause, and the exit code each ends the command with.

    PreheatError (ValueError)      the user's to mend; printed as one line, without a traceback
    ├── RecipeError      exit 2    the command or the recipe is wrong
    ├── DoesNotFit       exit 3    the run needs more memory than the device has
    ├── DataError        exit 4    the data is wrong; the message has the file and the row
    └── RunError         exit 1    the run failed, or a run folder cannot be used

Anything else that is raised is a fault of preheat itself and keeps its traceback.
"""

__all__ = ["DataError", "DoesNotFit", "PreheatError", "RecipeError", "RunError", "SettingError", "nearest"]


class PreheatError(ValueError):
    """A fault that the user can mend: the message names the knob, the value and the fix."""

    exit_code = 1


class RecipeError(PreheatError):
    """The command line or the recipe is wrong."""

    exit_code = 2


class DoesNotFit(PreheatError):
    """The run needs more memory than there is."""

    exit_code = 3


class DataError(PreheatError):
    """The data is wrong: the message names the file, the row and the field."""

    exit_code = 4


class RunError(PreheatError):
    """The run failed, or its folder cannot be used as asked."""

    exit_code = 1


class SettingError(ValueError):
    """A plain function refuses one of its arguments; a technique turns it into a `RecipeError` with its own key.

    Attributes:
        setting: the argument.
    """

    def __init__(self, setting: str, message: str):
        super().__init__(f"{setting}: {message}")
        self.setting = setting


def nearest(word: str, known: "list[str] | tuple[str, ...]") -> str:
    """' Did you mean …?' with the known word nearest to `word`, or the list of known words when none is near."""
    import difflib

    # Comparing a word of a megabyte takes minutes, and no name is that long.
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.55) if len(word) <= 100 else []
    if matches:
        return f"did you mean '{matches[0]}'?"
    names = sorted(known)
    more = f" and {len(names) - 12} more" if len(names) > 40 else ""
    return "known: " + ", ".join(names[:12] if more else names) + more if names else "there are none here"
