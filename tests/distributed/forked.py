"""Many small recipes on 2 and 4 processes in one start: everything is imported once, and the processes are forks."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from preheat import recipe as recipes
from preheat.core import DATA, Build
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import PreheatError
from preheat.ops.distributed.dtensor_utils import local

from ..conftest import DEVICE, difference, split, tiny, uneven
from .processes import processes

ROWS = 8


@dataclass(frozen=True)
class Case:
    """A recipe on several processes, and what it is compared with.

    Attributes:
        scale: techniques that only the several processes have, in YAML's flow style without the braces.
        rest: techniques that one process has too; alone: those that it has instead.
        steps: of the optimizer.
        model: the recipe's model in YAML; family: or tiny()'s of that family.
        look: what else is taken from the build once the first gradients are there: a function of a module.
    """

    scale: str
    rest: str = ""
    family: str = "llama"
    model: str = ""
    world: int = 2
    steps: int = 5
    alone: str | None = None
    look: Callable[[Build], Any] | None = None

    @property
    def name(self) -> str:
        return " | ".join(part for part in (str(self.world), self.model or self.family, self.scale, self.rest) if part)

    def recipe(self, *, many: bool) -> recipes.Recipe:
        chosen = [self.scale if many else "", self.rest if many or self.alone is None else self.alone]
        made = tiny(f"{{{', '.join(part for part in chosen if part)}}}", family=self.family, rows=ROWS)
        return recipes.override(made, f"model={self.model}") if self.model else made


def train(recipe: recipes.Recipe, look: Callable[[Build], Any] | None, steps: int) -> dict[str, Any]:
    """Optimizer steps of what this process has to do: losses and norms of the global batch, and the weights at the end."""
    made = build(recipe, vocabulary=96, device=DEVICE)
    begun = {name: whole(p) for name, p in made.parameters()}
    seen, losses, norms, first = None, [], [], {}
    for step in range(steps):
        batch = uneven(
            rows=ROWS, seed=step, examples=next((e for t in recipe.techniques.values() if (e := t.examples())), None)
        )
        devices = made.mesh.size(*DATA)
        rows = ROWS // devices
        mine = split(batch, [rows] * devices)[made.mesh.index(*DATA)]
        micro = -(-rows // made.state.accumulation)
        loss = accumulate_gradients(made, split(mine, [micro] * (rows // micro)), 1e-2)
        if not step:
            first = {name: whole(p.grad) for name, p in made.parameters()}
            seen = look(made) if look else None
        losses.append(float(made.mesh.add(loss.total.detach().clone(), *DATA)) / batch.weight)
        norms.append(float(update(made, 1e-2)[0]))
    weights = {name: whole(p) for name, p in made.parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "begun": begun, "gradients": first, "seen": seen}


def whole(t: Any) -> torch.Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def kept_bytes(made: Build) -> dict[str, int]:
    """Of weights, gradients and optimizer state, on this process."""
    held = {
        "weights": [p for _, p in made.parameters()],
        "gradients": [p.grad for _, p in made.parameters()],
        "states": [t for p in made.optimizer.state.values() for t in p.values() if torch.is_tensor(t) and t.ndim],
    }
    return {kind: sum(local(t).nbytes for t in tensors) for kind, tensors in held.items()}  # type: ignore[arg-type]


def attempt(case: Case, *, many: bool) -> dict[str, Any]:
    try:
        return train(case.recipe(many=many), case.look, case.steps)
    except PreheatError as error:
        return {"refused": str(error)}
    except Exception:  # noqa: BLE001  # the others go on; the comparison fails with these words
        return {"failed": traceback.format_exc()[-3500:]}


def work(rank: int, folder: Path) -> None:
    """One process: every case in a group of its own, so that nothing of one is left in the next."""
    import torch.distributed as dist

    for number, case in enumerate(torch.load(folder / "cases.pt", weights_only=False)):
        if rank >= case.world:  # wait here: the next group forms under a time-out
            until = time.monotonic() + 120
            while not (folder / f"{number}-0.pt").exists() and time.monotonic() < until:
                time.sleep(0.02)
            continue
        store = f"file://{folder}/store{number}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=case.world, timeout=timedelta(seconds=60)
        )
        found = attempt(case, many=True)
        dist.destroy_process_group()
        torch.save(found, folder / f"{number}-{rank}.pt")


def run(cases: Sequence[Case], folder: Path, timeout: float = 240) -> list[list[dict[str, Any]]]:
    """For each case what one process alone found, and then what each of several did."""
    torch.save(list(cases), folder / "cases.pt")
    one: dict[Any, Any] = {}
    keys = [
        (case.rest if case.alone is None else case.alone, case.family, case.model, case.look, case.steps)
        for case in cases
    ]
    with processes(work, max(case.world for case in cases), folder, timeout):
        for key, case in zip(keys, cases, strict=True):
            if key not in one:
                one[key] = attempt(case, many=False)
    return [
        [one[key], *(torch.load(folder / f"{n}-{rank}.pt", weights_only=False) for rank in range(case.world))]
        for n, (key, case) in enumerate(zip(keys, cases, strict=True))
    ]


def compare(found: list[dict[str, Any]]) -> dict[str, float]:
    """The worst of all processes: losses absolutely, norms relatively, weights and first gradients tensor by tensor."""
    one, *many = found
    for made in found:
        assert "losses" in made, "\n".join(f"{key}: {words}" for key, words in made.items())
    assert all(torch.equal(made["begun"][name], value) for made in many for name, value in one["begun"].items())
    return {
        "loss": max(abs(a - b) for made in many for a, b in zip(made["losses"], one["losses"], strict=True)),
        "norm": max(abs(a - b) / b for made in many for a, b in zip(made["norms"], one["norms"], strict=True)),
        "gradients": max(difference(made["gradients"], one["gradients"]) for made in many),
        "weights": max(difference(made["weights"], one["weights"]) for made in many),
    }
