"""Runs the notebooks at their real size and stores their outputs in them, so that they can be read without running.

    python notebooks/store.py [05_fine_tuning ...]      all of them without a name
    python notebooks/store.py --check                   names the notebooks whose outputs are missing or outdated

The metadata of a notebook record what its outputs belong to: a digest of its code cells, and for each built-in recipe
or chain that its cells name, a digest of the settings and the planned memory of a small model trained by it. A change
of the cells, of a recipe or of the planner therefore makes the outputs outdated. The rest of the package does not
count: almost every commit changes it, so that all outputs would always be outdated, and the tests run every notebook.
"""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import io
import json
import os
import platform
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from preheat.core import Device
from preheat.recipe import parse

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
RECIPES = ROOT / "preheat" / "recipes"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 400_000  # bytes of a notebook with its plots; the commit hook refuses 500 KB
TOLERANCE = 0.02  # of planned memory: releases of torch differ by less
# Replaces model and data of a built-in recipe: 0.2 s for a dry run instead of seconds, and no weights.
SMALL = {
    "model": {
        "num_layers": 2,
        "hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 1024,
        "max_positions": 2048,
    },
    "data": {"source": "stdlib"},
}


def find_notebooks(names: list[str]) -> list[Path]:
    """Paths of the named notebooks, or of all; exits with 2 if a name is unknown."""
    paths = {path.stem: path for path in NOTEBOOKS}
    for name in names:
        if name not in paths:
            print(f"{name}: no such notebook; use one of {', '.join(paths)}", file=sys.stderr)
            raise SystemExit(2)
    return [paths[name] for name in names] or NOTEBOOKS


def execute(notebook: NotebookNode, folder: Path, *, small: bool = False, timeout: int | None = None) -> None:
    """Runs all cells in place in a new kernel, with `folder` as its working folder and its folder for temporary files.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    from nbclient import NotebookClient

    environment = {name: value for name, value in os.environ.items() if name != "PREHEAT_NOTEBOOK"}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(folder),
    }
    if small:
        environment["PREHEAT_NOTEBOOK"] = "test"
    client = NotebookClient(
        notebook,
        timeout=timeout,
        startup_timeout=300,  # a busy machine takes minutes to import
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment)


def clean(notebook: NotebookNode, folder: Path) -> list[str]:
    """Removes in place what differs between machines and runs, and shrinks plots; returns the lines of stderr."""
    errors = []
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        errors += [output.text for output in cell.outputs if output.get("name") == "stderr"]
        cell.outputs = merge_streams([output for output in cell.outputs if output.get("name") != "stderr"])
        for output in cell.outputs:
            if "text" in output:
                output.text = clean_text(output.text, folder)
            for kind, content in output.get("data", {}).items():
                shrink = kind == "image/png"
                output.data[kind] = shrink_picture(content) if shrink else clean_text(content, folder)
    return errors


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs with neighbouring texts joined: a kernel sends them in pieces that differ from run to run."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream" and output.name == merged[-1].name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def clean_text(text: str, folder: Path) -> str:
    """The text without progress that a later line overwrote, paths of this machine and addresses of objects."""
    text = re.sub(r"[^\r\n]*\r(?!\n)", "", text)
    for path, name in ((folder, "folder"), (ROOT, "."), (Path(sys.prefix), ".venv"), (Path.home(), "~")):
        if len(path.parts) > 1:  # in a container, / may be the home
            text = re.sub(re.escape(str(path)) + r"(/tmp\w+)?", name, text)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def shrink_picture(content: str) -> str:
    """The picture (PNG, base64) with a palette of 128 colours, which plots rarely exceed."""
    from PIL import Image

    small = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(content))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def describe_code(notebook: Mapping) -> dict:
    """Returns a digest of the notebook's code, and a description of each built-in recipe that it names."""
    cells = [join(cell["source"]) for cell in notebook["cells"]]
    code = [join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    files = sorted((path.stem, path) for path in RECIPES.rglob("*.yaml"))
    named = {name: path for name, path in files if re.search(rf'[`"]{name}[`"]', "\n".join(cells))}
    return {"cells": digest("\0".join(code)), "recipes": {name: describe_recipe(path) for name, path in named.items()}}


@functools.cache
def describe_recipe(path: Path) -> dict:
    """A digest of a recipe's or chain's settings, and the peak of its dry run with a small model if it is a recipe."""
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    described = {"settings": digest(json.dumps(settings, sort_keys=True))}
    if "chain" in settings:
        return described
    import torch

    from preheat.planning.dry_run import observe
    from preheat.planning.request import Request

    techniques = dict(settings["techniques"])
    if techniques.get("mixed_precision", {}).get("mode") == "auto":
        techniques["mixed_precision"] = {"mode": "fp32"}  # auto differs between the CPUs that check
    small = parse(yaml.safe_dump({**settings, **SMALL, "techniques": techniques}), where=str(path))
    world = 8 if "fsdp" in settings["techniques"] else 1
    request = Request(small, Device("cpu", "any", 2**35), vocabulary=1024, world=world)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # attention on a CPU takes memory for each thread
    try:
        peak = max(observe(request).peak.values())
    finally:
        torch.set_num_threads(threads)
    return {**described, "planned_mib": round(peak / 2**20, 3)}


def join(text: str | list[str]) -> str:
    """A notebook's text, which the format stores as one string or as lines."""
    return text if isinstance(text, str) else "".join(text)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_faults(path: Path) -> Iterator[str]:
    """Yields the reasons why the stored outputs are outdated, one line each."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    again = f"python notebooks/store.py {path.stem}"
    stored = notebook["metadata"].get("preheat")
    if stored is None:
        yield f"{path.name} has no stored outputs: {again}"
        return
    today = describe_code(notebook)
    if stored["cells"] != today["cells"]:
        yield f"{path.name}: its outputs are older than its cells: {again}"
    if changed := sorted(today["recipes"].keys() ^ stored["recipes"].keys()):
        yield f"{path.name}: it names other recipes than its outputs show ({', '.join(changed)}): {again}"
    for name in sorted(today["recipes"].keys() & stored["recipes"].keys()):
        now, before = today["recipes"][name], stored["recipes"][name]
        if now["settings"] != before["settings"]:
            yield f"{path.name}: its outputs are older than the recipe {name}: {again}"
        elif abs(now.get("planned_mib", 0) - before.get("planned_mib", 0)) > TOLERANCE * now.get("planned_mib", 0):
            yield (
                f"{path.name}: its outputs are older than the planner: {name} with a small model is planned at "
                f"{now['planned_mib']} MiB, and was at {before['planned_mib']} MiB: {again}"
            )
    outputs = [(n, output) for n, cell in enumerate(notebook["cells"]) for output in cell.get("outputs", [])]
    for n, output in outputs:
        if output["output_type"] == "error":
            yield f"{path.name}, cell {n}: the stored output is an error ({output['ename']}): {again}"
        texts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/"))]
        if paths := re.findall(r"/(?:home|root|tmp|work|usr|opt|Users|var)/[\w./-]*", "\n".join(map(join, texts))):
            yield f"{path.name}, cell {n}: a path of the machine that stored it ({paths[0]}): {again}"
    if sum("image/png" in output.get("data", {}) for _, output in outputs) < 2:
        yield f"{path.name}: fewer than two plots are stored: {again}"
    if path.stat().st_size > LARGEST:
        yield f"{path.name}: {path.stat().st_size:,} bytes, more than {LARGEST:,}: store smaller plots"


def name_processor() -> str:
    """The processor's name as Linux gives it, or the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def store(path: Path, *, small: bool, out: Path | None) -> None:
    """Runs one notebook and writes it back with its outputs, or into another folder."""
    import nbformat
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    start, usage_before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        try:
            execute(notebook, Path(folder), small=small)
        except CellExecutionError as error:
            print(
                f"{error}\n{path.stem}: a cell failed, nothing was stored: {error.ename}: {error.evalue}",
                file=sys.stderr,
            )
            raise SystemExit(1) from None
        errors = clean(notebook, Path(folder))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    notebook.metadata["preheat"] = {
        **describe_code(notebook),
        "cpu_seconds": round(cpu),
        "machine": f"{name_processor()}, {os.cpu_count()} cores, torch {version('torch')}",
    }
    target = (out or FOLDER) / path.name
    nbformat.write(notebook, target)
    print("".join(errors), end="", file=sys.stderr)
    print(f"{path.stem}: {time.monotonic() - start:.0f} s, of CPU {cpu:.0f} s; {target.stat().st_size / 1000:.0f} KB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="notebooks, for example 05_fine_tuning; all if none is given")
    parser.add_argument("--check", action="store_true", help="only name those whose outputs are missing or outdated")
    parser.add_argument("--small", action="store_true", help="run at the size of the tests; needs --out")
    parser.add_argument("--out", type=Path, help="folder for the executed notebooks instead of this one")
    options = parser.parse_args()
    paths = find_notebooks(options.names)
    if options.small and options.out is None:
        parser.error("--small needs --out FOLDER, since the stored outputs are of the real size")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.check:
        faults = [fault for path in paths for fault in find_faults(path)]
        print("\n".join(faults) or "the stored outputs belong to today's code")
        raise SystemExit(bool(faults))
    for path in paths:
        store(path, small=options.small, out=options.out)


if __name__ == "__main__":
    main()
