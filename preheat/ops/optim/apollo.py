"""APOLLO: the size of AdamW's update of each channel, estimated in a small random projection of the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from preheat.ops.distributed.dtensor_utils import local, share_of, whole
from preheat.ops.optim.optimizers import Numbered, adamw_, adamw_state, keep_, locally

__all__ = ["Apollo", "projected_rank"]

_GROWTH = 1.01  # how much the update's norm may grow from one step to the next


def projected_rank(shape: torch.Size, rank: float) -> int:
    """Rows of the projected gradient of a matrix: `rank` of its smaller side; 1 where `rank` is 0."""
    return max(1, round(rank * min(shape)))


class Apollo(Numbered):
    """APOLLO for the groups marked `apollo`, AdamW for the others (Zhu et al. 2024, arXiv:2412.05270, algorithm 1).

    The gradient's smaller side is projected to a few rows by a Gaussian matrix; AdamW runs on those; each column of the
    gradient itself is then scaled by the ratio of the norms of AdamW's update and of the projected gradient. The moments are corrected for
    their bias as AdamW's are. Of matrices that are spread over devices every device has the whole (small) state and takes the whole
    gradient, one after another. Projections are not kept but drawn again in each step from (seed, step // every, parameter).

    Args:
        rank: rows of the projection as a share of the smaller side. 0: APOLLO-Mini, one row, and one scale for the whole matrix.
        every: steps after which another projection is drawn.
        scale: what the updates are multiplied by.
        seed, number: see `Numbered`.
    """

    def __init__(
        self,
        groups: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rank: float = 0.25,
        every: int = 200,
        scale: float = 1.0,
        **more: Any,
    ):
        defaults: dict[str, Any] = {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rank": rank,
            "every": every,
            "scale": scale,
        }
        super().__init__(groups, lr=lr, apollo=False, **defaults, **more)

    def _state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if not group["apollo"]:
            return adamw_state(p, torch.float32)
        rows = torch.zeros(projected_rank(p.shape, group["rank"]), max(p.shape), dtype=torch.float32, device=p.device)
        return adamw_state(rows) | {"norm": torch.zeros((), device=p.device)}

    def projection(self, p: Tensor, group: dict[str, Any], number: int) -> Tensor:
        """The Gaussian matrix [rank, smaller side] of a parameter in a step, of variance 1 / rank."""
        generator = self.draws(p, number // group["every"])
        rank = projected_rank(p.shape, group["rank"])
        return torch.randn(rank, min(p.shape), generator=generator, device=p.device).mul_(rank**-0.5)

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if not group["apollo"]:
            here, grad, state = locally(p, grad, state)
            adamw_(here, grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group, self.found_inf)
            return
        grad = whole(grad)
        wide = (grad if p.shape[0] <= p.shape[1] else grad.t()).float()
        projected = self.projection(p, group, self._number()) @ wide
        step = state["step"] + 1
        (first, second), across = group["betas"], 0 if group["rank"] else (0, 1)
        mean = torch.lerp(state["exp_avg"], projected, 1 - first)
        square = torch.lerp(state["exp_avg_sq"], projected.square(), 1 - second)
        size = mean / (1 - first**step) / ((square / (1 - second**step)).sqrt_() + group["eps"])
        norms = [torch.linalg.vector_norm(t, dim=across, keepdim=True) for t in (size, projected)]
        update = wide * (group["scale"] * norms[0] / norms[1].clamp(min=1e-30))
        norm = torch.linalg.vector_norm(update)
        # A sudden large gradient may not throw the weights far (the norm-growth limiter of Fira, arXiv:2410.01623); the first step has nothing to compare with.
        most = torch.where(state["norm"] > 0, _GROWTH * state["norm"], norm)
        shrink = (most / norm.clamp(min=1e-30)).clamp(max=1.0)
        update.mul_(shrink)
        here = local(p)
        value = here.float() * (1 - group["lr"] * group["weight_decay"])
        update = update if p.shape[0] <= p.shape[1] else update.t()
        keep_(here, value.sub_(share_of(update, p), alpha=group["lr"]), self.found_inf)
        for key, new in {"step": step, "exp_avg": mean, "exp_avg_sq": square, "norm": norm * shrink}.items():
            keep_(state[key], new, self.found_inf)
