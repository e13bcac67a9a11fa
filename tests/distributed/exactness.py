"""The same recipe on several processes and on one: what both compute in five optimizer steps, for many recipes in one start of processes."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from preheat import recipe as recipes
from preheat.core import DATA, Axis, Batch
from preheat.data.rows.example_kinds import examples_of
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import PreheatError
from preheat.ops.distributed.dtensor_utils import full_tensor, local

from ..conftest import DEVICE, difference, split, tiny, uneven
from .processes import processes

ROWS, STEPS = 8, 5


@dataclass(frozen=True)
class Case:
    """A recipe on several processes, and what it is compared with.

    Attributes:
        scale: techniques that only the several processes have, in YAML's flow style without the braces; or settings, as --set takes them.
        rest: techniques that one process has too.
        more: further recipe settings, as --set takes them, with spaces between.
        instead: techniques that one process has in place of those of `rest`, where the several compute what these do.
        together: one process takes all rows at once, and not those of each device one after another.
        loss, norm, weights: bounds: absolute, relative, and relative norm of a tensor's difference.
    """

    family: str
    scale: str
    rest: str = ""
    more: str = ""
    together: bool = False
    instead: str | None = None
    loss: float = 1e-5
    norm: float = 1e-4
    weights: float = 1e-4

    @property
    def name(self) -> str:
        return " | ".join(part for part in (self.family, self.scale, self.rest, self.more) if part)

    def recipe(self, *, alone: bool) -> recipes.Recipe:
        rest = self.rest if self.instead is None or not alone else self.instead
        settings = "=" in self.scale
        parts = [part for part in ("" if alone or settings else self.scale, rest) if part]
        recipe = tiny(f"{{{', '.join(parts)}}}", family=self.family, rows=ROWS)
        more = self.more.split() + (self.scale.split() if settings and not alone else [])
        return recipes.override(recipe, *more) if more else recipe


def _shares(batch: Batch, devices: int, accumulation: int) -> list[list[Batch]]:
    """For each device its micro-batches."""
    rows = ROWS // devices
    micro = -(-rows // accumulation)
    return [split(part, [micro] * (rows // micro)) for part in split(batch, [rows] * devices)]


def train(recipe: recipes.Recipe, *, devices: int) -> dict[str, Any]:
    """Five steps of what this process has to do; one alone takes the micro-batches of `devices` one after another."""
    made = build(recipe, vocabulary=96, device=DEVICE)
    losses, norms = [], []
    for step in range(STEPS):
        batch = uneven(rows=ROWS, seed=step, examples=examples_of(recipe))
        shares = _shares(batch, made.mesh.size(*DATA) if made.mesh.world > 1 else devices, made.state.accumulation)
        mine = shares[made.mesh.index(*DATA)] if made.mesh.world > 1 else [b for share in shares for b in share]
        loss = accumulate_gradients(made, mine, 1e-2)
        losses.append(float(made.mesh.add(loss.total.detach().clone(), *DATA, Axis.CONTEXT)) / batch.weight)
        norms.append(float(update(made, 1e-2)[0]))
    weights = {name: full_tensor(made.parallel.full_parameter(p)).clone() for name, p in made.parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "states": state_bytes(made)}


def state_bytes(made: Any) -> int:
    kept = [
        local(t) for _, p in made.parameters() for t in made.optimizer.state.get(p, {}).values() if torch.is_tensor(t)
    ]
    return sum(t.nbytes for t in kept)


def attempt(case: Case, *, alone: bool, devices: int) -> dict[str, Any]:
    try:
        return train(case.recipe(alone=alone), devices=1 if case.together else devices)
    except PreheatError as error:
        return {"refused": str(error)}
    except Exception:  # noqa: BLE001  # the matrix goes on; the comparison fails with these words
        return {"failed": traceback.format_exc()[-3000:]}


def work(rank: int, folder: Path) -> None:
    """One process: every case in a group of its own, so that nothing of one is left in the next."""
    import torch.distributed as dist

    world, cases = torch.load(folder / "cases.pt", weights_only=False)
    for number, case in enumerate(cases):
        if dist.is_initialized() and "deepspeed" not in case.scale:  # which keeps groups of its first start
            dist.destroy_process_group()
        if not dist.is_initialized():
            store = f"file://{folder}/store{number}"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
        found = attempt(case, alone=False, devices=world)
        torch._dynamo.reset()
        torch.save(found, folder / f"{number}-{rank}.pt")
    dist.destroy_process_group()


def run(cases: list[Case], world: int, folder: Path, timeout: float = 240) -> list[list[dict[str, Any]]]:
    """For each case what one process alone found, and then what each of `world` processes did."""
    torch.save((world, cases), folder / "cases.pt")
    key_of = lambda case: (case.family, case.rest, case.more, case.instead, case.together)  # noqa: E731
    alone = {key_of(case): case for case in cases}
    with processes(work, world, folder, timeout):
        one = {key: attempt(case, alone=True, devices=world) for key, case in alone.items()}
    return [
        [one[key_of(case)], *(torch.load(folder / f"{n}-{r}.pt") for r in range(world))] for n, case in enumerate(cases)
    ]


def verdict(case: Case, found: list[dict[str, Any]]) -> str:
    """'' where all processes agree with one, else what does not."""
    one, *many = found
    if "losses" not in one:
        return f"alone: {one}"
    for rank, made in enumerate(many):
        if "losses" not in made:
            return " ".join(f"{key}: {words}" for key, words in made.items())
        loss = max(abs(a - b) for a, b in zip(made["losses"], one["losses"], strict=True))
        norm = max(abs(a - b) / b for a, b in zip(made["norms"], one["norms"], strict=True))
        weights = difference(made["weights"], one["weights"])
        if not (loss <= case.loss and norm <= case.norm and weights <= case.weights):
            return f"rank {rank}: loss off by {loss:.1e}, norm by {norm:.1e}, weights by {weights:.1e}"
    return ""
