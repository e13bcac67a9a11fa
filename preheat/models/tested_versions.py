"""Warns about releases of torch and transformers that are newer than those that preheat was tested with.

preheat reads signatures and names inside these libraries, and their minor releases rename them. Most do not, so an
untested release is used and not refused: a bound below it would also stop other packages from installing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version

__all__ = ["NEWEST_TESTED", "warn_of_untested"]

_log = logging.getLogger(__name__)

NEWEST_TESTED: Mapping[str, str] = {"torch": "2.14", "transformers": "5.24"}
"""Newest minor releases that preheat was tested with; raise them after the workflow `newest` has passed."""


def warn_of_untested() -> None:
    """Logs a warning for each installed library that is newer than what preheat was tested with."""
    from packaging.version import Version

    for name, newest in NEWEST_TESTED.items():
        major, minor = Version(newest).release
        if Version(version(name)).release[:2] > (major, minor):
            _log.warning(
                "%s %s is newer than %s, the newest that preheat was tested with; if something fails: "
                "pip install '%s<%d.%d'",
                name,
                version(name),
                newest,
                name,
                major,
                minor + 1,
            )
