"""The two lock files: requirements.lock is what running needs, requirements-dev.lock what tests and development add."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import preheat
from preheat.models import tested_versions

HOUSE = Path(preheat.__file__).parent
ROOT = HOUSE.parent
pytestmark = pytest.mark.skipif(not (ROOT / "requirements.lock").is_file(), reason="installed without its sources")
# Of a build of torch for CUDA, which brings them itself.
OF_CUDA = ("nvidia-", "cuda-", "triton")


def locked(name: str) -> dict[str, Requirement]:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
    return {str(canonicalize_name(r.name)): r for r in map(Requirement, filter(None, lines))}


def needed(requirements: Iterable[Requirement]) -> set[str]:
    """Distributions that these requirements need, their own requirements included, by the metadata of what is installed."""
    extras: dict[str, set[str]] = {}
    left = list(requirements)
    while left:
        requirement = left.pop()
        name, wanted = str(canonicalize_name(requirement.name)), {"", *requirement.extras}
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if wanted <= extras.get(name, set()):
            continue
        extras[name] = extras.get(name, set()) | wanted
        try:
            inner = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        except importlib.metadata.PackageNotFoundError:
            continue  # the caller sees that it is missing
        for one in inner:
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras[name]):
                one.marker = None
                left.append(one)
    # nvidia-ml-py reads figures of the driver, on machines without CUDA too.
    return {name for name in extras if not name.startswith(OF_CUDA) or name == "nvidia-ml-py"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def running() -> list[Requirement]:
    # gguf: `preheat export --to gguf` is one of the first commands that the README shows.
    return [Requirement(line) for line in (*project()["dependencies"], *project()["optional-dependencies"]["gguf"])]


def test_the_running_lock_has_what_running_needs_and_nothing_else() -> None:
    have, need = set(locked("requirements.lock")), needed(running())
    assert need - have == set(), "missing in requirements.lock"
    assert have - need == set(), "not needed to run: belongs in requirements-dev.lock"


def test_the_second_lock_adds_what_development_needs() -> None:
    first, second = locked("requirements.lock"), locked("requirements-dev.lock")
    assert first.keys() & second.keys() == set()
    development = [Requirement(line) for line in project()["optional-dependencies"]["dev"]]
    assert needed([*running(), *development]) - first.keys() - second.keys() == set()


def test_every_locked_release_runs_on_the_oldest_python() -> None:
    # Debian 12 has Python 3.11.2: a release that asks for 3.11.5 stops `make test` there.
    oldest = "3.11.0"
    assert SpecifierSet(project()["requires-python"]).contains(oldest)
    refusing = {}
    for name, requirement in {**locked("requirements.lock"), **locked("requirements-dev.lock")}.items():
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or not installed
        pythons = metadata["Requires-Python"]
        if requirement.specifier.contains(metadata["Version"]) and not SpecifierSet(pythons or "").contains(oldest):
            refusing[name] = pythons
    assert refusing == {}


def at_start(body: list[ast.stmt]) -> Iterator[str]:
    """Top-level packages that a module imports when it is imported: outside functions and `if TYPE_CHECKING`."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.If) and not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield from at_start([*node.body, *node.orelse])
        elif isinstance(node, ast.ClassDef | ast.With):
            yield from at_start(node.body)
        elif isinstance(node, ast.Try):
            yield from at_start([*node.body, *node.orelse, *node.finalbody])


def test_every_import_of_a_module_is_in_the_running_lock() -> None:
    have, owners = locked("requirements.lock"), importlib.metadata.packages_distributions()
    others = sys.stdlib_module_names | {"preheat"}
    lacking = {
        (str(path.relative_to(HOUSE)), name)
        for path in HOUSE.rglob("*.py")
        for name in at_start(ast.parse(path.read_text(encoding="utf-8")).body)
        if name not in others
        and not {str(canonicalize_name(owner)) for owner in owners.get(name, [name])} & have.keys()
    }
    # Imported on CUDA only, where torch brings Triton.
    assert {pair for pair in lacking if pair != ("ops/triton_kernels.py", "triton")} == set()
    assert set(at_start(ast.parse("import onnx\nif x:\n    import gguf\ndef f():\n    import torch").body)) == {
        "onnx",
        "gguf",
    }


def test_the_requirements_name_the_running_lock_and_this_clone() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["--requirement requirements.lock", "--editable ."]


def test_make_demo_installs_the_running_lock_alone() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "demo: .venv/installed\n" in rules
    recipe = rules.split("\n.venv/installed: ")[1].split("\n\n")[0]
    assert "requirements.lock" in recipe
    assert "requirements-dev.lock" not in recipe


def test_the_locked_releases_are_tested_ones_and_newer_ones_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locks = locked("requirements.lock")
    monkeypatch.setattr(tested_versions, "version", lambda name: next(iter(locks[name].specifier)).version)
    tested_versions.warn_of_untested()
    assert caplog.messages == []
    newest = tested_versions.NEWEST_TESTED["transformers"]
    releases = {"torch": f"{tested_versions.NEWEST_TESTED['torch']}.9+cpu", "transformers": "99.0.0.dev0"}
    monkeypatch.setattr(tested_versions, "version", releases.__getitem__)
    tested_versions.warn_of_untested()
    (message,) = caplog.messages
    assert message.startswith(f"transformers 99.0.0.dev0 is newer than {newest}, ")
    assert Requirement(message.rpartition("'")[0].rpartition("'")[2]).specifier.contains(f"{newest}.9")
