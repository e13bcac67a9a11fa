"""What the tests share: a tiny model's recipe, batches with uneven masks, and the real data beside the project."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from preheat import recipe as recipes
from preheat.core import Batch, Device, ExampleKind, MaskSpec
from preheat.hardware.benchmark_rates import Grid
from preheat.hardware.openmp import spin_briefly

# Before anything imports Triton: its kernels then run in its interpreter, on CPUs. Tests on a GPU compile them.
if "TRITON_INTERPRET" not in os.environ and not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Before anything imports torch: two processes share the tests and the cores, and use them by turns.
spin_briefly()

DEVICE = Device("cpu", "test", 8 << 30)
# So few sizes to measure rates at that it takes seconds.
SMALL = Grid(
    rows=(64, 256),
    layers=((256, 256),),
    products=(256,),
    elements=(2**14,),
    width=64,
    vocabulary=512,
    attention=((1, 2, 64, 16),),
    parameters=2**14,
    large=2**20,
)


SLOW = [
    "contract/test_techniques",
    "e2e/test_commands",
    "e2e/test_stories",
    "e2e/test_processes",
    "e2e/test_crash",
    "e2e/test_writing",
]
SLOW += [
    "e2e/test_adapters",
    "e2e/test_bench",
    "e2e/test_try",
    "e2e/test_data",
    "e2e/test_notebooks",
    "distributed/",
    "e2e/",
]


def pytest_configure(config: pytest.Config) -> None:
    """Ignores warnings inside of torch if it is another release than the locked one, whose warnings are all known."""
    locked = re.search(r"^torch==(\S+)", (Path(__file__).parents[1] / "requirements.lock").read_text(), re.MULTILINE)
    assert locked is not None
    if metadata.version("torch").partition("+")[0] != locked[1]:
        config.addinivalue_line("filterwarnings", r"ignore:::torch(\.|$)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: at the end all processes that share the tests still have something to do.

    Recipes that the installed torch is too old for are skipped.
    """
    for item in items:
        parameters = str(item.callspec.params).replace("'", "") if hasattr(item, "callspec") else ""
        if "kernel: torch" in parameters:
            from preheat.torch_compat import why_no_linear_cross_entropy as missing
        elif "fsdp: " in parameters and "nf4: " in parameters:
            from preheat.torch_compat import why_no_integer_shards as missing
        else:
            continue
        if reason := missing():
            item.add_marker(pytest.mark.skip(reason=reason))

    def rank(item: pytest.Item) -> int:
        return next((n for n, part in enumerate(SLOW) if part in item.nodeid), len(SLOW))

    items.sort(key=rank)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Threads that wait for each other cost tiny models more than they save, above all where cores are shared."""
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("PREHEAT_PROCESSES", "1")


@pytest.fixture(autouse=True)
def _loggers_are_left_alone() -> Iterator[None]:
    yield
    log = logging.getLogger("preheat")
    assert log.propagate
    assert log.isEnabledFor(logging.WARNING)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Real data that lies beside the project on some machines and is never part of it."""
    folder = Path(os.environ.get("PREHEAT_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not (folder / "README.md").exists():
        pytest.skip("the real data is not beside this clone (set PREHEAT_DATA)")
    return folder


@pytest.fixture
def torchs_loss() -> None:
    """Skips a test of torch's own kernel of the loss if torch is too old for it."""
    from preheat.torch_compat import why_no_linear_cross_entropy

    if reason := why_no_linear_cross_entropy():
        pytest.skip(reason)


class TooLong(BaseException):
    """An answer that does not come. No `Exception`: nothing under test takes it for a fault of its input."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails what takes longer."""

    def late(*_: object) -> None:
        raise TooLong(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tiny(
    techniques: str = "{}", *, family: str = "llama", rows: int = 4, length: int = 32, more: str = ""
) -> recipes.Recipe:
    """A recipe of a model that takes a step in milliseconds."""
    heads = "num_heads: 4" if family in ("gpt2", "t5") else "num_heads: 4, num_kv_heads: 2"
    return recipes.parse(
        f"model: {{family: {family}, num_layers: 3, hidden_size: 32, {heads}, vocab_size: 96}}\n"
        f"batch: {{size: {rows}, seq_len: {length}}}\noptimizer: {{lr: 0.01}}\nstop: {{max_steps: 20}}\ntechniques: {techniques}\n{more}"
    )


def uneven(
    rows: int = 4,
    length: int = 32,
    *,
    vocabulary: int = 96,
    seed: int = 0,
    examples: ExampleKind | None = None,
    padded: bool = False,
) -> Batch:
    """A batch whose rows hold different numbers of documents and of trained labels; of pairs, of liked answers, of classes.

    If `padded`, all rows of text but the first end in padding, which is a document of its own.
    """
    import torch

    from preheat.data.loader import count_weight

    examples = examples or ExampleKind()
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (rows, length), generator=g)
    labels = torch.randint(examples.classes or vocabulary, (rows, length), generator=g)
    documents: list[tuple[int, ...]] = []
    padding = torch.zeros(rows, length, dtype=torch.bool)
    judged = examples.kind in ("pairs", "desirable")
    for row in range(rows):
        cut = (row * 7) % length
        if judged:  # two answers, then in all rows but the first padding
            documents.append((length // 2 - row, length // 2 - row, *((2 * row,) if row else ())))
            cut = length // 2 - row
            labels[row, : 2 + row] = labels[row, cut - 1 : cut + 3] = labels[row, 2 * cut - 1 :] = -100
            continue
        edges = sorted({0, cut, length - row if padded else length, length})
        documents.append(tuple(end - start for start, end in itertools.pairwise(edges)))
        if padded:
            padding[row, length - row :] = True
        if examples.kind == "classes":
            ends = [sum(documents[-1][: n + 1]) - 1 for n in range(len(documents[-1]))]
            labels[row, [n for n in range(length) if n not in ends]] = -100
        else:
            labels[row, : (row * 5) % length] = -100
            labels[padding] = -100
    positions = torch.stack([torch.cat([torch.arange(n) for n in d]) for d in documents])
    group = 2 if examples.kind == "pairs" else 1
    liked = tuple((n % 2, 1) for n in range(rows)) if examples.kind == "desirable" else ()
    weight = count_weight(labels, tuple(documents), group, liked)
    mask = MaskSpec(documents=tuple(documents))
    numbers = tuple(range(rows))
    blank = padding if padded else None
    return Batch(tokens, labels, positions, mask, weight, numbers, group, liked, padding=blank)


def split(batch: Batch, sizes: list[int]) -> list[Batch]:
    """A batch cut into micro-batches of so many rows."""
    from preheat.data.loader import count_weight

    out, start = [], 0
    for n in sizes:
        rows = slice(start, start + n)
        labels, liked = batch.labels[rows], batch.desirable[rows]
        mask = MaskSpec(documents=batch.mask.documents[rows] if batch.mask.documents else None)
        weight = count_weight(labels, mask.documents, batch.group, liked)
        tokens, positions, numbers = batch.tokens[rows], batch.positions[rows], batch.rows[rows]
        padding = batch.padding[rows] if batch.padding is not None else None
        out.append(Batch(tokens, labels, positions, mask, weight, numbers, batch.group, liked, padding=padding))
        start += n
    return out


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest relative norm over tensors of equal name: ‖a - b‖ / ‖b‖."""
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).norm() / b[k].double().norm().clamp(min=1e-30)) for k in a)
