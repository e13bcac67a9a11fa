"""Optimizers that torch lacks, all with state allocated before the first step."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from preheat.ops.distributed.dtensor_utils import full_tensor, local, local_shard, runs_of, wrap_local_shard
from preheat.ops.dry_run_loops import fold_identical
from preheat.ops.optim.half_adamw import half_adamw_
from preheat.ops.optim.param_groups import WeightSettings, to_lists
from preheat.ops.optim.stochastic_rounding import stochastic_round_

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.optimizer import ParamsT

    from preheat.core.json_types import StateDict
    from preheat.ops.optim.param_groups import ParamGroup


__all__ = [
    "Adafactor",
    "Guarded",
    "Lion",
    "Muon",
    "Numbered",
    "StochasticAdamW",
    "adamw_",
    "adamw_state",
    "group_by_decay",
    "fused_adamw",
    "keep_",
    "local_shards",
    "orthogonalize",
    "prepare_state",
    "split_matrices",
]


def group_by_decay(
    named: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    settings: Mapping[str, WeightSettings] = MappingProxyType({}),
) -> list[ParamGroup]:
    """Groups parameters per device mesh: matrices with weight decay, vectors (norms, biases) without.

    Args:
        settings: of parameters that have others, by name.

    Example:
        >>> own = {"bias": WeightSettings(lr_scale=2.0)}
        >>> groups = group_by_decay(nn.Linear(2, 2).named_parameters(), 0.1, own)
        >>> [(len(group["params"]), group["weight_decay"], group.get("lr_scale")) for group in groups]
        [(1, 0.1, None), (1, 0.0, 2.0)]
    """
    named = list(named)
    # torch's fused update takes tensors of one mesh.
    groups: dict[tuple[bool, WeightSettings, DeviceMesh | None], list[nn.Parameter]] = defaultdict(list)
    for matrix in (True, False):
        for name, p in named:
            # Decay pulls weights towards 0; a norm's scale belongs near 1. Stacks of experts (3-D) are matrices too.
            if (p.ndim >= 2) == matrix:
                mesh = p.device_mesh if isinstance(p, DTensor) else None
                groups[matrix, settings.get(name, WeightSettings()), mesh].append(p)
    return [
        {
            "params": params,
            "weight_decay": (weight_decay if matrix else 0.0) if own.weight_decay is None else own.weight_decay,
            **({} if own.lr_scale == 1 else {"lr_scale": own.lr_scale}),
        }
        for (matrix, own, _), params in groups.items()
    ]


def adamw_state(p: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Returns AdamW's initial state of one parameter, with moments in `dtype` (default: the parameter's)."""
    # zeros_like of a DTensor is a DTensor with the same placements: the moments are sharded as the weight is.
    mean, square = (torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format) for _ in range(2))
    # On the device: the fused kernel reads the step there, and a number of the host would need a copy per step.
    return {"step": torch.zeros((), dtype=torch.float32, device=p.device), "exp_avg": mean, "exp_avg_sq": square}


def prepare_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocates AdamW's state at build time, so that an out-of-memory error in the first step cannot leave it
    incomplete.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = adamw_state(p)


def adamw_(
    value: Tensor,
    slope: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    group: ParamGroup,
    found_inf: Tensor | None,
) -> None:
    """Runs torch's fused AdamW in place; changes nothing if `found_inf` is 1. `group`: lr, betas, eps, weight_decay."""
    adamw(
        [value],
        [slope],
        [mean],
        [square],
        # For AMSGrad's maxima. This is AdamW's functional form, because the caller holds the state.
        [],
        [step],
        fused=True,
        found_inf=found_inf,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def fused_adamw(groups: list[ParamGroup], *, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """Returns torch's fused AdamW with its state allocated."""
    # Its `step` reads `found_inf` as an attribute, which the engine sets (engine/step.py).
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    prepare_state(optimizer)
    return optimizer


def keep_(old: Tensor, new: Tensor, found_inf: Tensor | None) -> None:
    """Copies `new` into `old` unless `found_inf` is 1. Uses torch.where because 0 * NaN is not 0."""
    old.copy_(new if found_inf is None else torch.where(found_inf == 0, new, old.to(new.dtype)))


def local_shards(p: Tensor, grad: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the local shards of a parameter, its gradient and its state."""
    # The local shard shares the DTensor's memory, so in-place updates of it reach the parameter.
    here = local(p)
    assert here.is_contiguous(), "parameters are contiguous"
    return here, local(grad), {key: local(value) for key, value in state.items()}


class Guarded(torch.optim.Optimizer):
    """Base class: allocates the state at construction and skips the step if `found_inf` is 1, without a host sync.

    Parameters may be DTensors: `_update` works on local shards (`local_shards`) and gathers full tensors with `whole`
    if it needs them.
    """

    found_inf: Tensor | None = None
    masters: ClassVar[str] = ""
    """Name of a state that holds the fp32 values of each parameter, if there is one that a checkpoint of another
    optimizer may lack: it then has the values of an fp32 parameter."""

    def __init__(self, groups: ParamsT, **defaults: Any):
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = self._state(p, group)

    def _state(self, p: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        raise NotImplementedError

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: ParamGroup) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            same = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    # Equal shapes, dtypes and placements run the same operators: a dry run executes one of each.
                    same[
                        p.shape,
                        p.dtype,
                        p.grad.dtype,
                        (p.device_mesh, p.placements) if isinstance(p, DTensor) else None,
                    ].append(p)
            for parameters in same.values():
                for p in fold_identical(parameters, wholly=True):
                    self._update(p, p.grad, self.state[p], group)

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Copies values into the existing state; torch's implementation would cast codes and fp32 moments to the
        weight's dtype.
        """
        ours = [p for group in self.param_groups for p in group["params"]]
        # torch numbers the parameters over all groups, in order.
        for number, p in enumerate(ours):
            for key, value in self.state[p].items():
                value.copy_(state_dict["state"][number][key])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            # `params` of the saved groups are numbers.
            group.update({key: value for key, value in saved.items() if key != "params"})


class Numbered(Guarded):
    """An optimizer with random numbers that depend only on seed, step and parameter, so that a resumed run repeats
    them.

    Args:
        number: returns the updates so far; counted here if None.
    """

    def __init__(self, groups: ParamsT, *, seed: int = 0, number: Callable[[], int] | None = None, **defaults: Any):
        super().__init__(groups, **defaults)
        self.seed, self._taken, self._number = seed, 0, number or (lambda: self._taken)
        parameters = [p for group in self.param_groups for p in group["params"]]
        # The index over all groups, the same on every rank and in every process.
        self._order = {p: index for index, p in enumerate(parameters)}
        # A generator of its own: draws must not depend on how much dropout or sampling has drawn before.
        self._generator = torch.Generator(device=parameters[0].device)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        self._taken += 1

    def draws(self, p: Tensor, number: int, part: int = 0) -> torch.Generator:
        """Returns the generator, seeded for part `part` of parameter `p` in step `number`."""
        # 0x9E37... is 2**64 divided by the golden ratio (Knuth's multiplicative hash): the seeds of neighbouring parts
        # differ in many bits. Modulo 2**63, to remain a signed 64-bit number.
        return self._generator.manual_seed((self._seed(p, number) + part * 0x9E3779B97F4A7C15) % (1 << 63))

    def _seed(self, p: Tensor, number: int) -> int:
        """Returns the seed of parameter `p` in step `number`, below 2**62."""
        index = self._order[p]
        # 18 bits for the seed, 24 for the step (16 million), 20 for the parameter (a million). A CPU generator uses the
        # low 32 bits alone: there such seeds share their draws, which repeat every 4096 steps.
        if 0 <= self.seed < 1 << 18 and number < 1 << 24 and index < 1 << 20:
            return (self.seed << 44) + (number << 20) + index
        # Larger ones are hashed: cut to these bits, different seeds or steps would draw the same numbers.
        text = f"{self.seed} {number} {index}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


class StochasticAdamW(Numbered):
    """AdamW for bf16 weights: fp32 moments and arithmetic, stochastic rounding of the new weight.

    Round-to-nearest loses every update below half of bf16's spacing; stochastic rounding applies it with the right
    probability. fp32 parameters are updated as usual.

    Args:
        seed, number: see `Numbered`.
        chunk: elements updated at a time, which bounds the fp32 scratch. Each chunk has its own random bits, so that a
            shard is rounded as it would be on one device.
        fused: on CUDA, one kernel per bf16 parameter (`preheat.ops.optim.half_adamw`), with other random bits and
            without chunks.
    """

    def __init__(
        self,
        groups: ParamsT,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        chunk: int = 1 << 20,
        fused: bool = False,
        **more: Any,
    ):
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **more)
        self.chunk, self.fused = chunk, fused

    def _state(self, p: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        return adamw_state(p, torch.float32)

    def _moments(self, state: dict[str, Tensor], part: slice) -> tuple[Tensor, Tensor]:
        """Returns both moments of a slice of elements, to be updated in place."""
        return state["exp_avg"].view(-1)[part], state["exp_avg_sq"].view(-1)[part]

    # fp32 moments are views that AdamW updates in place; `LowBitAdamW` overrides this to quantize them again.
    def _remember(self, state: dict[str, Tensor], part: slice, mean: Tensor, square: Tensor) -> None:
        """Writes updated moments back if the state stores them in another form."""

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: ParamGroup) -> None:
        # Before `local_shards`: the indices and the number of elements are those of the full parameter.
        runs, count = runs_of(p), p.numel()
        here, grad, state = local_shards(p, grad, state)
        low = p.dtype != torch.float32
        # The kernel works in registers, so there is no scratch to bound by chunks.
        if self.fused:
            if low:
                seed = self._seed(p, self._number())
                half_adamw_(here, grad, state, group, self.found_inf, seed=seed, runs=runs)
            else:
                adamw_(here, grad.float(), state["exp_avg"], state["exp_avg_sq"], state["step"], group, self.found_inf)
            return
        # Flat, because chunks are ranges of elements, whatever the shape.
        weights, slopes, step = here.view(-1), grad.reshape(-1), state["step"]
        # At least one start: a rank with an empty shard must count steps too.
        # Chunk borders are those of the full parameter: a shard that begins within a chunk has a shorter first one.
        starts = [
            (run, start)
            for run in range(runs.number)
            for start in (0, *range(self.chunk - runs.start(run) % self.chunk, runs.length, self.chunk))
        ]
        for run, start in fold_identical(starts):
            # `number`: chunk of the full parameter, which seeds the random bits; `skip`: its elements on earlier ranks.
            number, skip = divmod(runs.start(run) + start, self.chunk)
            begin, end = run * runs.length, (run + 1) * runs.length
            part = slice(begin + start, min(begin + start + self.chunk - skip, end))
            mean, square = self._moments(state, part)
            # A copy for bf16; for fp32 weights it is the view itself, and AdamW updates the weight in place.
            value = weights[part].float()
            step = state["step"].clone()  # torch increments it in every call
            adamw_(value, slopes[part].float(), mean, square, step, group, self.found_inf)
            self._remember(state, part, mean, square)
            if low and end:
                # The last chunk of the full parameter is shorter, and the number of draws depends on it.
                chunk_size = min(self.chunk, count - number * self.chunk)
                stochastic_round_(weights[part], value, self.draws(p, self._number(), number), skip=skip, of=chunk_size)
        # Once, after all chunks: each took the same step.
        state["step"].copy_(step)


class Lion(Guarded):
    """Lion: updates by the sign of an interpolation between momentum and gradient (Chen et al. 2023, arXiv:2302.06675,
    algorithm 2).

    Args:
        scale: multiplies the groups' `lr` and divides their weight decay.
        chunk: elements updated at a time, which bounds the scratch memory.
    """

    def __init__(
        self,
        groups: ParamsT,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        scale: float = 1.0,
        chunk: int = 1 << 20,
    ):
        super().__init__(groups, lr=lr, betas=betas, weight_decay=weight_decay, scale=scale)
        self.chunk = chunk

    def _state(self, p: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        # fp32 even for bf16 weights: a step adds 1 % of the gradient, and bf16's spacing is 0.4 to 0.8 %.
        return {"exp_avg": torch.zeros_like(p, dtype=torch.float32, memory_format=torch.contiguous_format)}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: ParamGroup) -> None:
        p, grad, state = local_shards(p, grad, state)
        (first, second), lr = group["betas"], group["lr"] * group["scale"]
        flat = (p.view(-1), grad.reshape(-1), state["exp_avg"].view(-1))
        for weight, slope, mean in fold_identical(list(zip(*(t.split(self.chunk) for t in flat), strict=True))):
            slope = slope.float()
            # c = beta1 m + (1 - beta1) g;  w <- w (1 - lr wd) - lr sign(c);  m <- beta2 m + (1 - beta2) g
            direction = torch.lerp(mean, slope, 1 - first).sign_()
            # The decay per step is the same for any scale: (lr * scale) * (weight_decay / scale).
            value = (weight * (1 - group["lr"] * group["weight_decay"])).float().sub_(direction, alpha=lr)
            keep_(weight, value, self.found_inf)
            keep_(mean, torch.lerp(mean, slope, 1 - second), self.found_inf)


def orthogonalize(matrix: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Approximates U V^T of the singular value decomposition U S V^T by Muon's Newton-Schulz iteration.

    The singular values end between about 0.7 and 1.2, which is precise enough (Jordan et al. 2024,
    kellerjordan.github.io/posts/muon).

    Args:
        matrix: [n, m].
        dtype: dtype of the iterations and of the result.

    Example:
        >>> o = orthogonalize(torch.diag(torch.tensor([3.0, 1.0]))).float().diagonal()
        >>> bool(((o > 0.6) & (o < 1.3)).all())
        True
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan's coefficients, tuned for fast growth of small singular values
    # The Gram matrix of the shorter side is the smaller one.
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if tall else matrix).to(dtype)
    # The Frobenius norm bounds the largest singular value, and the iteration converges for values in [0, 1].
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        # x <- a x + (b G + c G^2) x with G = x x^T: a polynomial of the singular values, a s + b s^3 + c s^5.
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if tall else x


def split_matrices(groups: Iterable[Any], by_adamw: Iterable[Tensor], mark: str) -> list[ParamGroup]:
    """Splits each parameter group: matrices, marked `mark`, and the rest for AdamW (`by_adamw` and vectors)."""
    # Parameters or groups, as for any torch optimizer; the loop below reads a group's parameters twice.
    listed = to_lists(groups)
    others = {id(p) for p in by_adamw}
    split = []
    for group in listed if isinstance(listed[0], dict) else [{"params": listed}]:
        matrices = [p for p in group["params"] if p.ndim == 2 and id(p) not in others]
        rest = [p for p in group["params"] if p.ndim != 2 or id(p) in others]
        split += [{**group, "params": matrices, mark: True}, {**group, "params": rest, mark: False}]
    return [g for g in split if g["params"]]


class Muon(Guarded):
    """Muon for the groups marked `muon`, AdamW for the others, at one learning rate.

    Orthogonalizes Nesterov momentum and scales the update by 0.2 sqrt(max(n, m)), which matches the size of AdamW's
    update so that its learning rate and weight decay carry over (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    Computes the same as torch.optim.Muon, but skips steps with non-finite gradients.

    Args:
        dtype: dtype of the orthogonalization.
    """

    def __init__(
        self,
        groups: ParamsT,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        steps: int = 5,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.dtype = dtype
        super().__init__(
            groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum=momentum, steps=steps, muon=False
        )

    def _state(self, p: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(p)} if group["muon"] else adamw_state(p)

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: ParamGroup) -> None:
        like, side = p, max(p.shape)
        p, grad, state = local_shards(p, grad, state)
        if not group["muon"]:
            adamw_(p, grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group, self.found_inf)
            return
        # Out of place, because a step with non-finite gradients must leave all of these as they are.
        decayed = p * (1 - group["lr"] * group["weight_decay"])
        momentum = state["momentum"] * group["momentum"] + grad
        # Nesterov: the momentum as the next step would apply it, plus the gradient.
        update = torch.add(grad, momentum, alpha=group["momentum"])
        # Orthogonalization mixes all rows, so a shard alone cannot be updated.
        if isinstance(like, DTensor):  # gathers the full matrix on every rank, in the dtype of the computation
            update = local_shard(
                orthogonalize(full_tensor(wrap_local_shard(update.to(self.dtype), like)), group["steps"], self.dtype),
                like,
            )
        else:
            update = orthogonalize(update, group["steps"], self.dtype)
        keep_(p, decayed.add_(update, alpha=-group["lr"] * 0.2 * side**0.5), self.found_inf)
        keep_(state["momentum"], momentum, self.found_inf)


class Adafactor(Guarded):
    """Adafactor: factored second moments, no first moment (Shazeer and Stern 2018, arXiv:1804.04235, algorithm 4).

    The learning rate is external: updates are clipped to a root mean square of `clip` and scaled by the rate. A 3-D
    tensor is a stack of matrices (experts), each factored separately. For sharded parameters every rank holds the full
    (small) state and gathers the full gradients one at a time.
    """

    def __init__(self, groups: ParamsT, *, lr: float, weight_decay: float = 0.0, decay: float = 0.8, clip: float = 1.0):
        super().__init__(groups, lr=lr, weight_decay=weight_decay, decay=decay, clip=clip)

    def _state(self, p: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        step = torch.zeros((), device=p.device)
        # A matrix [n, m] takes n + m numbers instead of n m.
        shapes = {"square": p.shape} if p.ndim < 2 else {"row": p.shape[:-1], "column": (*p.shape[:-2], p.shape[-1])}
        return {"step": step} | {k: torch.zeros(s, dtype=torch.float32, device=p.device) for k, s in shapes.items()}

    def _update(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: ParamGroup) -> None:
        step = state["step"] + 1
        weight = step ** -group["decay"]  # 1 - beta2 of this step
        # Means over rows and columns need the full gradient.
        update = full_tensor(grad).float()
        # epsilon_1 of the paper: the square roots of zeros would divide by 0.
        squares = update.square().add_(1e-30)
        new = {"step": step}
        if p.ndim < 2:
            new["square"] = torch.lerp(state["square"], squares, weight)
            update = update * new["square"].rsqrt()
        else:
            new["row"] = torch.lerp(state["row"], squares.mean(dim=-1), weight)
            new["column"] = torch.lerp(state["column"], squares.mean(dim=-2), weight)
            # v = r c^T / mean(r), so 1 / sqrt(v) = rsqrt(r / mean(r)) * rsqrt(c)
            row = (new["row"] / new["row"].mean(dim=-1, keepdim=True)).rsqrt_()
            update = update * row.unsqueeze(-1) * new["column"].rsqrt().unsqueeze(-2)
        # [..., 1, 1]: the root mean square per matrix, of each expert in a stack.
        size = update.square().mean(dim=(-2, -1) if p.ndim >= 2 else -1, keepdim=True).sqrt()
        update /= (size / group["clip"]).clamp_(min=1.0)
        here = local(p)
        value = here * (1 - group["lr"] * group["weight_decay"])
        keep_(here, value.float().sub_(local_shard(update, p), alpha=group["lr"]), self.found_inf)
        for key, tensor in new.items():
            keep_(state[key], tensor, self.found_inf)
