"""Names of torch that the package uses exist in the installed release; those of some releases only are in one module."""

import ast
import pkgutil
from pathlib import Path

import preheat

HOUSE = Path(preheat.__file__).parent


def names(source: str) -> set[str]:
    """Dotted names of torch that a source imports or reads, by the names that it gave to modules."""
    nodes = list(ast.walk(ast.parse(source)))
    known, found = {"torch": "torch"}, set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            known |= {alias.asname: alias.name for alias in aliases if alias.asname}
            found |= {alias.name for alias in aliases}
    found |= set(known.values())
    for node in nodes:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            found.add(".".join([known[node.id], *parts]))
    return found


def exists(name: str) -> bool:
    """True if a dotted name leads to a module or to something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_names_are_found() -> None:
    source = "import torch.distributed as dist\nfrom torch import nn\nnn.Linear\ndist.all_reduce(x)\nself.torch.a"
    assert names(source) == {
        "torch",
        "torch.distributed",
        "torch.nn",
        "torch.nn.Linear",
        "torch.distributed.all_reduce",
    }
    assert exists("torch.nn.functional.linear")
    assert not exists("torch.nn.functional.linear_by_magic")
    assert not exists("torch.no_such_module.linear")


def test_every_name_of_torch_exists() -> None:
    missing = {
        f"{path.relative_to(HOUSE)}: {name}"
        for path in sorted(HOUSE.rglob("*.py"))
        if path.name != "torch_compat.py"
        for name in names(path.read_text(encoding="utf-8"))
        if not name.startswith("torch.ops.preheat.") and not exists(name)
    }
    assert not missing, "not in every supported release of torch: move them to torch_compat.py"
