"""ZeRO for any training loop: AdamW with states (and gradients, and weights) sharded across processes."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from preheat.ops.optim.param_groups import to_lists

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from preheat.ops.optim.param_groups import ParamGroup


__all__ = ["ZeROAdamW"]


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class ZeROAdamW(torch.optim.Optimizer):
    """AdamW with ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) over the processes of torch.distributed's default
    group.

    Each process computes gradients of its part of the batch; this optimizer averages them, so do not add
    DistributedDataParallel.

    - stage 1: each parameter has one owner, which alone holds its AdamW state, updates it and broadcasts it.
    - stage 2: also reduces each gradient to its owner during backward; the other processes free it at once.
    - stage 3: also shards the weights of `module` with FSDP2 (`fully_shard`), layer by layer. Create the optimizer
      before the first forward pass.

    On one process nothing is sharded (it warns once) and this is AdamW. Every process must take part in each step with
    the same parameters.

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr: learning rate.
        weight_decay: decoupled.
        stage: 1, 2 or 3.
        cpu_offload: hold the state and an fp32 copy of the weights in host memory and update there. No effect on a CPU.
        betas, eps: as for AdamW.
        module: for stage 3, the module to shard in place; `params` are its parameters.

    Raises:
        ValueError: an unknown stage, or stage 3 without a module.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     optimizer = ZeROAdamW(model.parameters(), lr=1e-3, stage=2)
        >>> model(torch.ones(1, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        stage: int = 1,
        cpu_offload: bool = False,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        module: nn.Module | None = None,
    ):
        if stage not in (1, 2, 3):
            raise ValueError(
                f"stage: {stage} is not a ZeRO stage; use 1 (states), 2 (and gradients) or 3 (and weights)"
            )
        if stage == 3 and module is None:
            raise ValueError(
                "stage: 3 shards the weights too, so it needs module=, the model whose parameters these are"
            )
        self.stage, self.world = stage, _world_size()
        self._rank = torch.distributed.get_rank() if self.world > 1 else 0
        # Before `super().__init__`, which calls `add_param_group` below for every group.
        self._owner: dict[Tensor, int] = {}
        self._loads = [0] * self.world
        self._averaged: dict[Tensor, Tensor] = {}  # owned parameter -> gradient averaged over all processes
        self._reduced = False  # stage 1: this step's gradients have been averaged
        listed = to_lists(params)
        all_parameters = (p for each in listed for p in (each["params"] if isinstance(each, dict) else [each]))
        on_host = all(p.device.type == "cpu" for p in all_parameters)
        if self.world == 1:
            _say("ZeRO on one process: nothing is sharded, this is AdamW; start several with torchrun")
        if cpu_offload and on_host:
            _say("cpu_offload: the parameters are already on the CPU, so it has no effect")
        self.offload = cpu_offload and not on_host
        # Sharding replaces the parameters by DTensors: the optimizer must get the new ones.
        if stage == 3 and self.world > 1:
            assert module is not None
            listed = _shard(module, listed, offload=self.offload)
            self.offload = False  # FSDP2 does it
        super().__init__(listed, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @property
    def _shares(self) -> bool:
        """True if complete parameters have owners (stages 1 and 2); FSDP2 splits each parameter instead."""
        return self.world > 1 and self.stage < 3

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds parameters. Largest first, each goes to the least loaded owner, which is the same on every process."""
        super().add_param_group(param_group)
        new = self.param_groups[-1]["params"]
        # The greedy rule for balanced loads. `sorted` is stable, so every process decides alike without a message.
        for p in sorted(new, key=lambda p: -p.numel()):
            owner = min(range(self.world), key=self._loads.__getitem__) if self._shares else self._rank
            self._owner[p] = owner
            self._loads[owner] += p.numel()
        # The hook runs in the backward pass as soon as a gradient is complete, so few are in memory at once.
        if self._shares and self.stage == 2:
            for p in new:
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(self._hand_over)

    def _average(self, p: Tensor) -> Tensor:
        """Averages a gradient over the processes in place; valid on the owner only."""
        assert p.grad is not None
        # To the owner only: an all-reduce would send about twice as much.
        torch.distributed.reduce(p.grad, dst=self._owner[p])  # gloo has no mean
        return p.grad.div_(self.world)

    def _hand_over(self, p: Tensor) -> None:
        """Stage 2 backward hook: the owner accumulates the averaged gradient over micro-batches; every process frees
        `.grad`.
        """
        mean = self._average(p)
        if self._owner[p] == self._rank:
            # Micro-batches: each backward pass adds its mean. `step` and `zero_grad` clear the sum.
            previous = self._averaged.get(p)
            self._averaged[p] = mean if previous is None else previous.add_(mean)
        # Also on the owner, which holds the mean in `_averaged`.
        p.grad = None

    def _gradients(self) -> dict[Tensor, Tensor]:
        """Returns the averaged gradients of the parameters that this process updates."""
        everything = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not self._shares:
            return {p: p.grad for p in everything if p.grad is not None}
        # Once per step: `clip_grad_norm_` and then `step` both ask for the gradients.
        if self.stage == 1 and not self._reduced:
            self._reduced = True
            for p in everything:
                mean = self._average(p)
                if self._owner[p] == self._rank:
                    self._averaged[p] = mean
        return self._averaged

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the gradients to a norm over all of them; call it before `step`. Returns the norm before clipping.

        torch.nn.utils.clip_grad_norm_ would only see the gradients of this process. The result is the same on every
        one.
        """
        grads = list(self._gradients().values())
        # Stage 3: this process's shards of all gradients. Stages 1 and 2: the full gradients of the parameters that it
        # owns. Either way the sum below counts each element once.
        local = [_local_shard(g) for g in grads]
        device = self.param_groups[0]["params"][0].device
        square = torch.zeros((), device=device)
        for g in local:
            square += torch.linalg.vector_norm(g, dtype=torch.float32).square()
        if self.world > 1:
            torch.distributed.all_reduce(square)
        norm = square.sqrt()
        for g in local:
            g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the parameters; afterwards every process has the same weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = self._gradients()
        # `self._averaged` holds only parameters that this process owns, so the others are skipped.
        for group in self.param_groups:
            self._update(group, {p: grads[p] for p in group["params"] if p in grads})
        self._averaged.clear()
        self._reduced = False
        # All broadcasts at once, in the same order on every process; only then wait.
        if self._shares:
            sent = [torch.distributed.broadcast(p.detach(), src=o, async_op=True) for p, o in self._owner.items()]
            for work in sent:
                assert work is not None
                work.wait()
        return loss

    def _update(self, group: ParamGroup, grads: dict[Tensor, Tensor]) -> None:
        if not grads:
            return
        columns: dict[str, list[Tensor]] = defaultdict(list)
        for p, grad in grads.items():
            state = self.state[p]
            if not state:
                home = torch.device("cpu") if self.offload else p.device
                state["step"] = torch.zeros((), device=home)
                # like p: under FSDP2 the moments are sharded as the weights are
                like = p.detach().to(home, torch.float32) if self.offload else p.detach()
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(like), torch.zeros_like(like)
                if self.offload:
                    state["master"] = like
            # With offload the CPU updates its fp32 copy, which is then cast to the device's dtype.
            weight = state.get("master", p)
            for name, value in (("weight", weight), ("grad", grad.to(weight.device, weight.dtype)), *state.items()):
                columns[name].append(value)
        adamw(
            columns["weight"],
            columns["grad"],
            columns["exp_avg"],
            columns["exp_avg_sq"],
            [],
            columns["step"],
            foreach=self.stage == 3 and self.world > 1,
            fused=not (self.stage == 3 and self.world > 1),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if self.offload:
            for p, master in zip(grads, columns["master"], strict=True):
                p.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        # Stage 2 has no `.grad` left; its gradients are the averages.
        super().zero_grad(set_to_none)
        self._averaged.clear()
        self._reduced = False

    def state_bytes(self) -> int:
        """Returns the bytes of optimizer state on this process."""
        return sum(_local_shard(t).nbytes for state in self.state.values() for t in state.values())


def _local_shard(t: Tensor) -> Tensor:
    """Returns the local shard of a DTensor; other tensors unchanged."""
    return t.to_local() if isinstance(t, DTensor) else t


_said: set[str] = set()


def _say(message: str) -> None:
    """Warns once per process, whatever the filters are."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=3)


def _shard(module: nn.Module, listed: list[Any], *, offload: bool) -> list[Any]:
    """Shards a module with FSDP2 in place and returns the parameters (or groups) that replace the given ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    # FSDP2 creates new parameter objects under the old names.
    names = {id(p): name for name, p in module.named_parameters()}
    device = next(module.parameters()).device.type
    settings: dict[str, Any] = {"mesh": init_device_mesh(device, (torch.distributed.get_world_size(),))}
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy()
    # Lists of modules are the layers of most models. Layers before the root, which takes the rest.
    for child in module.modules():
        if isinstance(child, nn.ModuleList):
            for layer in child:
                fully_shard(layer, **settings)
    fully_shard(module, **settings)
    now = dict(module.named_parameters())

    def of(params: Iterable[Tensor]) -> list[nn.Parameter]:
        return [now[names[id(p)]] for p in params]

    if isinstance(listed[0], dict):
        return [{**group, "params": of(group["params"])} for group in listed]
    return of(listed)
