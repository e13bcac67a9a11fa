"""Types carry control flow: no code decides by the text of a message, and the registry refuses what it does not know."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import preheat
from preheat.core import Phase, ProblemCode, Tag, TechniqueError, incompatibilities, registry

HOUSE = Path(preheat.__file__).parent

# Other libraries' messages: they raise one type for several causes, and nothing else tells these apart. (file, function) -> why.
FOREIGN = {
    ("compress/atomic_folder.py", "describe_write_error"): "torch and numpy raise bare errors for a full disk",
    (
        "engine/checkpoint.py",
        "write",
    ): "torch wraps the operating system's error in a CheckpointException without its number",
    (
        "hardware/collective_bench.py",
        "_join",
    ): "torch's store raises one RuntimeError for a taken port and everything else",
    (
        "ops/adapters/peft_layers.py",
        "inject",
    ): "peft raises ValueError both for targets that match nothing and for targets that it cannot adapt",
    ("recipe/yaml_io.py", "_short_yaml_errors"): "PyYAML's sentences begin with a conjunction",
}
_PARSING = {
    "startswith",
    "endswith",
    "partition",
    "rpartition",
    "removeprefix",
    "removesuffix",
    "replace",
    "split",
    "find",
    "index",
}
_MATCHING = {"search", "match", "fullmatch", "sub", "findall", "finditer"}


def text_of_error(node: ast.AST, errors: set[str]) -> bool:
    """Whether an expression has the text of a caught exception in it: str(error), error.args."""
    texts = [
        child.args[:1]
        for child in ast.walk(node)
        if isinstance(child, ast.Call) and ast.unparse(child.func) in ("str", "repr")
    ]
    texts += [[child.value] for child in ast.walk(node) if isinstance(child, ast.Attribute) and child.attr == "args"]
    return any(isinstance(name, ast.Name) and name.id in errors for names in texts for name in names)


def decisions_by_text(source: str) -> list[tuple[str, int]]:
    """(function, line) of each place that compares or parses the text of a caught exception, or compares with a sentence.

    A sentence is a constant with a space in it: names and keys have none.
    """
    tree = ast.parse(source)
    errors = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    found: list[tuple[str, int]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            flat = [
                e for side in sides for e in (side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side])
            ]
            sentences = [
                e for e in flat if isinstance(e, ast.Constant) and isinstance(e.value, str) and " " in e.value.strip()
            ]
            if sentences or any(text_of_error(side, errors) for side in sides):
                found.append((function, node.lineno))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parses = node.func.attr in _PARSING and text_of_error(node.func.value, errors)
            if parses or (node.func.attr in _MATCHING and any(text_of_error(a, errors) for a in node.args)):
                found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return found


def test_the_search_finds_decisions_by_text() -> None:
    source = """
def f():
    try:
        g()
    except ValueError as error:
        if "no room" in str(error): pass
        str(error).partition(":")
        re.search("x", str(error))
        phase == "making gradients"
        str(error).splitlines()[0]
        phase == "evaluation"
"""
    assert [line for _, line in decisions_by_text(source)] == [6, 7, 8, 9]


def test_nothing_decides_by_the_text_of_a_message() -> None:
    found = {
        (str(path.relative_to(HOUSE)), function): line
        for path in sorted(HOUSE.rglob("*.py"))
        for function, line in decisions_by_text(path.read_text(encoding="utf-8"))
    }
    assert found.keys() - FOREIGN.keys() == set(), found
    assert FOREIGN.keys() - found.keys() == set(), "no longer needed"


def test_the_registry_has_the_keys_of_techniques_alone() -> None:
    before = set(registry())
    import preheat.engine.deepspeed  # noqa: F401  # selected by parallel.engine

    assert set(registry()) == before


def test_a_missing_tag_names_what_provides_it() -> None:
    (problem,) = incompatibilities([registry()["nf4"]()], frozenset())
    assert (problem.technique, problem.code) == ("nf4", ProblemCode.MISSING_TAG)
    assert problem.text == "needs frozen-base, which nothing in this recipe provides; add lora or peft_adapter"
    assert str(TechniqueError([problem])) == f"techniques.nf4: {problem.text}"


def test_a_conflict_names_both() -> None:
    problems = incompatibilities([registry()["compile"](), registry()["liger"]()], frozenset({Tag.CPU}))
    assert {(p.technique, p.code) for p in problems} == {("compile", ProblemCode.CONFLICT)}


@pytest.mark.parametrize(
    ("techniques", "key", "fix"),
    [
        ("{muon: {}}", "techniques.muon", "leave it out, or choose another parallel.engine"),
        ("{lion: {}}", "techniques.lion", "leave it out, or choose another parallel.engine"),
        *(
            (f"{{mixed_precision: {{mode: {mode}}}}}", "techniques.mixed_precision", "use mode: bf16")
            for mode in ("bf16_master", "bf16_weights", "bf16_pure", "fp16")
        ),
        ("{}", "parallel.engine: deepspeed", "checkpoint.every: a DeepSpeed run cannot resume"),
    ],
)
def test_an_engine_that_excludes_a_technique_says_what_to_write_instead(techniques: str, key: str, fix: str) -> None:
    from preheat import recipe as recipes
    from preheat.core import Device, conflicts_of
    from preheat.engine.builder import build_context, list_techniques
    from preheat.models.hf import configure

    every = 0 if techniques != "{}" else 5
    recipe = recipes.parse(
        f"model: {{size: 15M}}\nstop: {{max_steps: 1}}\nparallel: {{engine: deepspeed, devices: 2}}\ncheckpoint: {{every: {every}}}\n"
        f"techniques: {techniques}"
    )
    context = build_context(recipe, configure(recipe, 96), Device("cuda", "an H100", 80 << 30, at_hand=False))
    (line,) = str(TechniqueError(conflicts_of(list_techniques(recipe), context))).splitlines()
    assert line.startswith(f"{key}: ")
    assert fix in line


# --- the registry -----------------------------------------------------------------------------------------------------

TECHNIQUE = """{doc}
from dataclasses import dataclass
from typing import ClassVar
from preheat.core import Change, Stage, Tag, Technique

@dataclass(frozen=True, kw_only=True)
class Mine(Technique):
    stage: ClassVar[Stage] = Stage.LOADER
    numerics: ClassVar[str] = "exact"
    {line}
    def apply(self, build, part):
        return Change("nothing", 1)
"""


def load(folder: Path, source: str, name: str = "my_technique") -> subprocess.CompletedProcess[str]:
    """Loads the registry in a process that has a package with one technique installed."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    facts = folder / "my_technique-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-technique\nVersion: 1\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text("[preheat.techniques]\nmine = " + name + "\n", encoding="utf-8")
    code = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(HOUSE.parent)!r}]; from preheat.cli import main; main(['techniques', '--json'])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_technique_of_another_package_is_found(tmp_path: Path) -> None:
    done = load(tmp_path, TECHNIQUE.format(doc='"""Does nothing."""', line=""))
    assert done.returncode == 0, done.stderr
    assert '"my_technique"' in done.stdout


@pytest.mark.parametrize(
    ("doc", "line", "reason"),
    [
        ('"""Doc."""', "needs: ClassVar[frozenset[Tag]] = frozenset({Tag.FROZEN_BAES})", "there is no tag FROZEN_BAES; did you mean 'FROZEN_BASE'?"),
        ('"""Doc."""', 'needs: ClassVar[frozenset[str]] = frozenset({"frozen"})', "technique my_technique: needs has 'frozen', which is not a Tag"),
        ("import absent_library", "", "cannot be imported (ModuleNotFoundError: No module named 'absent_library')"),
        ('"""Doc."""; {}["x"]', "", "cannot be imported (KeyError: 'x')"),
        ('"""Doc."""', "def options(self, context): return []", "technique my_technique: defines options, which only a preheat.core.Searchable has"),
        ('"""Doc."""', "del numerics", "technique my_technique: states no numerics"),
        ("", "", "technique my_technique: has no docstring"),
    ],
)  # fmt: skip
def test_the_registry_says_which_file_and_what(tmp_path: Path, doc: str, line: str, reason: str) -> None:
    done = load(tmp_path, TECHNIQUE.format(doc=doc, line=line))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'my_technique.py'}: "), done.stderr
    assert reason in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_technique_does_not_replace_another_of_its_name(tmp_path: Path) -> None:
    done = load(tmp_path, TECHNIQUE.format(doc='"""Doc."""', line=""), "lora")
    assert done.returncode == 1
    assert "preheat.techniques.lora has a technique of the name lora already" in done.stderr


def test_a_module_without_a_technique_is_named(tmp_path: Path) -> None:
    done = load(tmp_path, '"""Nothing."""')
    assert (done.returncode, "it defines no technique" in done.stderr) == (1, True)
    done = load(tmp_path / "other", "", "absent.sub") if (tmp_path / "other").mkdir() else done
    assert done.returncode == 1


def test_names_of_phases_in_files_of_earlier_versions_are_known() -> None:
    assert Phase.of("evaluating") is Phase.EVALUATION
    assert Phase.of("evaluation") is Phase.EVALUATION
    assert Phase.of("lunch") is None
