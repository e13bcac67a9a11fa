"""APOLLO: AdamW's per-channel update scale, estimated from a low-rank random projection of the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from preheat.ops.distributed.dtensor_utils import full_tensor, local, local_shard
from preheat.ops.optim.optimizers import Numbered, adamw_, adamw_state, keep_, local_shards

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from preheat.ops.optim.param_groups import ParamGroup


__all__ = ["Apollo", "projected_rank"]

_GROWTH = 1.01  # maximum growth of the update norm per step: Fira's norm-growth limiter (arXiv:2410.01623)


def projected_rank(shape: torch.Size, rank: float) -> int:
    """Rows of a matrix's projected gradient: `rank` times its smaller side, at least 1."""
    return max(1, round(rank * min(shape)))


class Apollo(Numbered):
    """APOLLO for the groups marked `apollo`, AdamW for the others (Zhu et al. 2024, arXiv:2412.05270, algorithm 1).

    A Gaussian matrix projects the smaller side of the gradient to a few rows, and AdamW runs on those. Each column of
    the full gradient is then scaled by the norm of AdamW's update over the norm of the projected gradient. The moments
    get AdamW's bias correction. For sharded matrices every rank holds the full (small) state and gathers the full
    gradients one at a time. Projections are not stored: each step redraws them from (seed, step // every, parameter).

    Args:
        rank: rows of the projection as a fraction of the smaller side. 0: APOLLO-Mini, one row and one scale per
            matrix.
        every: steps between two projections.
        scale: factor on the updates.
        seed, number: see `Numbered`.
    """

    def __init__(
        self,
        groups: ParamsT,
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
        defaults: ParamGroup = {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rank": rank,
            "every": every,
            "scale": scale,
        }
        super().__init__(groups, lr=lr, apollo=False, **defaults, **more)

    def _state(self, p: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        if not group["apollo"]:
            return adamw_state(p, torch.float32)
        # [rank, larger side]: the moments of the projected gradient.
        rows = torch.zeros(projected_rank(p.shape, group["rank"]), max(p.shape), dtype=torch.float32, device=p.device)
        return adamw_state(rows) | {"norm": torch.zeros((), device=p.device)}

    def projection(self, p: Tensor, group: ParamGroup, number: int) -> Tensor:
        """Draws the Gaussian projection [rank, smaller side] of a parameter for one step, with variance 1 / rank."""
        # The same seed for `every` steps, so the same projection.
        generator = self.draws(p, number // group["every"])
        rank = projected_rank(p.shape, group["rank"])
        # Variance 1 / rank preserves the length of a column on average.
        return torch.randn(rank, min(p.shape), generator=generator, device=p.device).mul_(rank**-0.5)

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: ParamGroup) -> None:
        if not group["apollo"]:
            here, grad, state = local_shards(p, grad, state)
            adamw_(here, grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group, self.found_inf)
            return
        grad = full_tensor(grad)
        # [smaller side, larger side]
        wide = (grad if p.shape[0] <= p.shape[1] else grad.t()).float()
        # [rank, larger side]
        projected = self.projection(p, group, self._number()) @ wide
        step = state["step"] + 1
        # APOLLO scales each column (dim 0 is summed); APOLLO-Mini has one scale for the matrix.
        (first, second), across = group["betas"], 0 if group["rank"] else (0, 1)
        mean = torch.lerp(state["exp_avg"], projected, 1 - first)
        square = torch.lerp(state["exp_avg_sq"], projected.square(), 1 - second)
        # AdamW's update in the projected space: mhat / (sqrt(vhat) + eps).
        size = mean / (1 - first**step) / ((square / (1 - second**step)).sqrt_() + group["eps"])
        norms = [torch.linalg.vector_norm(t, dim=across, keepdim=True) for t in (size, projected)]
        # Each column of the full gradient times |AdamW's update| / |projected gradient|.
        update = wide * (group["scale"] * norms[0] / norms[1].clamp(min=1e-30))
        norm = torch.linalg.vector_norm(update)
        # Limits the jump that a sudden large gradient causes. The first step has no earlier norm to compare with.
        most = torch.where(state["norm"] > 0, _GROWTH * state["norm"], norm)
        shrink = (most / norm.clamp(min=1e-30)).clamp(max=1.0)
        update.mul_(shrink)
        here = local(p)
        value = here.float() * (1 - group["lr"] * group["weight_decay"])
        # Back to the weight's orientation.
        update = update if p.shape[0] <= p.shape[1] else update.t()
        keep_(here, value.sub_(local_shard(update, p), alpha=group["lr"]), self.found_inf)
        # The norm after limiting: the next step may grow from there.
        for key, new in {"step": step, "exp_avg": mean, "exp_avg_sq": square, "norm": norm * shrink}.items():
            keep_(state[key], new, self.found_inf)
