"""The house stands as DESIGN says: imports run one way, the front door is light."""

import ast
import pkgutil
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import preheat
from preheat.core import registry

HOUSE = Path(preheat.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))
LEVELS = [  # each may import what stands below it
    {"__main__"},
    {"cli"},
    {"web"},
    {"studies", "bench", "compress", "report", "integrations"},
    {"training"},  # above its equals of DESIGN: a run evaluates and generates as well
    {"inference", "evaluation", "tracking", "interop"},
    {"planning"},
    {"engine"},
    {"techniques"},
    {"ops", "models", "data"},
    {"run"},
    {"recipe", "hardware"},
    {
        *("core", "files", "cache_folder", "errors", "sanitize"),
        *("remote_code", "model_folder", "plugins", "storage", "torch_compat", "_version"),
    },
]
# What puts techniques together by hand: the package's front, and the example of a loop with several.
TOGETHER = ("preheat.techniques", "preheat.techniques.integration")
RANK = {room: len(LEVELS) - index for index, level in enumerate(LEVELS) for room in level}
FOR_PAGES = tuple(
    f"preheat.{name}"
    for name in (
        *("core", "run", "report", "files", "cache_folder", "errors", "sanitize", "storage"),
        "hardware.child_processes",
    )
)
"""The modules that the dashboard may import: none of them imports torch."""
HEAVY = {"torch", "transformers", "numpy", "datasets", "peft", "tokenizers", "pyarrow", "pandas", "matplotlib"}
LIGHT = [
    "preheat",
    "preheat.recipe",
    "preheat.core",
    "preheat.run.reader",
    "preheat.run.writer",
    "preheat.run.remote_copy",
    "preheat.files",
    "preheat.errors",
    "preheat.hardware.catalogue",
    "preheat.hardware.rates",
    "preheat.web.app",
]


def module_of(path: Path) -> str:
    parts = path.relative_to(HOUSE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, package: str) -> set[str]:
    """Dotted names that a source imports, also inside functions and under `if TYPE_CHECKING`.

    `from a import b` gives a.b, since b may be a module. `package` is what relative imports start from.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def breach(module: str, imported: str) -> str | None:
    """Why `module` may not import `imported`; None when it may."""
    if module == "preheat" or not imported.startswith("preheat."):  # the package itself only passes on, lazily
        return None
    here, there = module.split(".")[1], imported.split(".")[1]
    if there not in RANK:
        return None  # a name that preheat/__init__ defines
    if here == "techniques" == there:
        return (
            "a technique imports a sibling" if module != imported.rsplit(".", 1)[0] and module not in TOGETHER else None
        )
    if here == there:
        return None
    if here == "report" and there not in ("core", "run", "errors", "files", "sanitize"):
        return "report imports only core, run, files, errors and sanitize"
    if module.startswith("preheat.web.") and not imported.startswith(FOR_PAGES):
        return "the dashboard reads run folders, and leaves the rest to child processes"
    if RANK[there] > RANK[here]:
        return f"{here} stands below {there}"
    if RANK[there] == RANK[here] > 1:  # those at the bottom may use one another
        return f"{here} stands beside {there}"
    return None


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import preheat.cli", {"preheat.cli"}),
        ("def f():\n    from preheat.cli import main", {"preheat.cli.main"}),
        ("from preheat import engine", {"preheat.engine"}),
        ("from ..engine import step", {"preheat.engine.step"}),
        ("from . import lora", {"preheat.techniques.lora"}),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy", {"torch", "numpy"}),
    ],
)
def test_imports_are_found(source: str, found: set[str]) -> None:
    assert imports(source, "preheat.techniques") == found


@pytest.mark.parametrize(
    ("module", "imported", "allowed"),
    [
        ("preheat.cli.train", "preheat.training.loop", True),
        ("preheat.bench.rows", "preheat.cli.train", False),
        ("preheat.ops.losses.cross_entropy", "preheat.techniques.lora", False),
        ("preheat.techniques.lora", "preheat.ops.losses.cross_entropy", True),
        ("preheat.techniques.lora", "preheat.techniques.chunked_loss", False),
        ("preheat.planning.plan_request", "preheat.training.session.open_session", False),
        ("preheat.report.run_page", "preheat.run.reader.Reader", True),
        ("preheat.report.run_page", "preheat.recipe.load", False),
        ("preheat.web.run_page", "preheat.report.page.table", True),
        ("preheat.web.run_page", "preheat.training.loop.train", False),
        ("preheat.data.loader", "preheat.models.hf", False),
        ("preheat.recipe", "preheat.core.registry", True),
        ("preheat.run.reader", "preheat.engine.step", False),
        ("preheat.engine.step", "preheat.__version__", True),
        ("preheat.engine.step", "torch.nn", True),
    ],
)
def test_breaches_are_seen(module: str, imported: str, allowed: bool) -> None:
    assert (breach(module, imported) is None) == allowed


def test_imports_run_one_way() -> None:
    breaches = []
    for path in FILES:
        module = module_of(path)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for imported in sorted(imports(path.read_text(encoding="utf-8"), package)):
            if why := breach(module, imported):
                breaches.append(f"{module} imports {imported}: {why}")
    assert not breaches, "\n".join(breaches)


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import one another, directly or by others."""
    reach: dict[str, set[str]] = {}
    for module in graph:
        seen, left = set[str](), [module]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left.extend(new)
        reach[module] = seen
    found = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }
    return [set(circle) for circle in found]


def test_circles_are_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) in ([{"b", "c"}, {"d"}], [{"d"}, {"b", "c"}])


def test_no_module_imports_itself_by_others() -> None:
    modules = {module_of(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        named = imports(path.read_text(encoding="utf-8"), package)
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in named} & modules.keys() - {
            module
        }
    del graph["preheat"]  # passes on what others define, lazily
    assert not circles({module: found - {"preheat"} for module, found in graph.items()})


def test_every_room_has_its_level() -> None:
    rooms = {path.parent.name for path in HOUSE.glob("*/*.py")} | {path.stem for path in HOUSE.glob("*.py")}
    assert rooms - {"__init__"} <= set(RANK)


@pytest.mark.parametrize("modules", [*([name] for name in LIGHT), ["preheat.cli"]], ids=" ".join)
def test_the_front_door_is_light(modules: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; print(*sorted(set(sys.modules) & {HEAVY!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_the_registry_is_light() -> None:
    code = f"import sys; from preheat.core import registry; registry(); print(*sorted(set(sys.modules) & {HEAVY!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def named(source: str) -> set[str]:
    """Every identifier and every word of a string in a source."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    found |= set(re.findall(r"\w+", text))
    return found


def test_words_of_a_source_are_found() -> None:
    assert {"lora", "chunked_loss", "f", "k", "word"} <= named(
        "from x.lora import y\ndef f(k):\n    g(k=t.chunked_loss, z='a word')"
    )


def test_planning_and_the_loop_name_no_technique() -> None:
    techniques = set(registry())
    assert {"lora", "chunked_loss"} <= techniques
    places = [*(HOUSE / "planning").rglob("*.py"), HOUSE / "training" / "loop.py"]
    techniques -= {"freeze"}  # Python's garbage collector has a function of this name
    found = {module_of(path): hits for path in places if (hits := named(path.read_text(encoding="utf-8")) & techniques)}
    assert not found


def test_programs_for_child_processes_import_names_that_exist() -> None:
    programs = {
        node.value
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("from preheat")
    }
    imported = {name for program in programs for name in imports(program, "")}
    assert "preheat.hardware.nettest._run_child" in imported
    for name in imported:
        assert pkgutil.resolve_name(name)


class TypeOnlyNames(ast.NodeVisitor):
    """Lists the uses at run time of names that a module imports for type checkers only."""

    def __init__(self, tree: ast.Module):
        self.only: set[str] = set()
        self.local: list[set[str]] = []
        self.used: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                self.only |= {name for inner in node.body for name in self.imported(inner)}
        self.visit(tree)

    @staticmethod
    def imported(node: ast.AST) -> set[str]:
        names = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
        return {(name.asname or name.name).split(".")[0] for name in names}

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        bound = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        arguments = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        self.local.append(bound | arguments | {name for n in ast.walk(node) for name in self.imported(n)})
        for part in [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(part)
        self.local.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        for part in node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else [node.test, *node.body, *node.orelse]:
            self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.only and not any(node.id in names for names in self.local):
            self.used.append(f"{node.id} in line {node.lineno}")


def test_names_imported_for_types_are_not_used_at_run_time() -> None:
    used = {
        str(path): names for path in HOUSE.rglob("*.py") if (names := TypeOnlyNames(ast.parse(path.read_text())).used)
    }
    assert used == {}
    assert TypeOnlyNames(
        ast.parse("if TYPE_CHECKING:\n    from torch import Tensor\ndef f(x: Tensor) -> Tensor:\n    return Tensor(x)")
    ).used == ["Tensor in line 4"]
