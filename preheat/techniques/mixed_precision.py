"""Mixed precision: bf16 or fp16 compute with fp32 weights, fp32 masters, or stochastically rounded bf16 weights.

What: `bf16` and `fp16` keep weights, gradients and optimizer in fp32 and cast to half around matmuls (autocast).
`bf16_weights` keeps weights and gradients in bf16, moments in fp32, and rounds each new weight stochastically, so that
its mean is exact: updates smaller than bf16's step (0.4 %) are not lost. `bf16_master` and `fp16_master` compute with
half weights and gradients, and keep fp32 master weights in the optimizer. A frozen base may be kept in half precision
under `bf16` and `fp16` too (`frozen`). The fp16 modes use dynamic loss scaling, because gradients below 6e-8 would
underflow; a step that overflows is skipped, the scale halved, and the learning rate's schedule waits. `bf16_pure` has
weights, gradients and moments in bf16 and rounds to nearest, as some fine-tuning tools do: the least memory, and
updates below 0.4 % of a weight are lost. Adapters on a frozen base stay in fp32. `fp32` states full precision
explicitly, and `keep_fp32` names modules that compute in fp32 in any mode. `tf32` computes the remaining fp32 matmuls
on a GPU in TF32: fp32's range, 10 bits of mantissa, half of bf16's rate.
Helps: half-precision matmuls run several times faster than fp32; half weights save all casts, and `bf16_weights` also 4
bytes per parameter. fp16 has 3 bits of mantissa more than bf16 and also runs on devices without bf16 (V100, T4).
Hurts: results differ by the format's rounding; fp16 overflows at 65,504, and on a CPU its matmuls are slower than
fp32's. torch has one global TF32 switch, so it affects all fp32 matmuls of the process while the model exists.
Source: Micikevicius et al. 2018 (arXiv:1710.03740); Kalamkar et al. 2019 (arXiv:1905.12322); stochastic rounding of
weights: Rae et al. 2021 (arXiv:2112.11446), appendix C.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from preheat.core import (
    Build,
    Change,
    Context,
    Device,
    Finish,
    LossScaling,
    Numerics,
    Searchable,
    Slot,
    Stage,
    Tag,
    Technique,
    Trials,
)
from preheat.errors import RecipeError, RunError
from preheat.hardware.probe import fastest_half_dtype
from preheat.hardware.tf32 import allow_tf32, has_tf32
from preheat.recipe import Bound

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim.optimizer import ParamsT

    from preheat.core.plan import Plan

__all__ = [
    "MixedPrecision",
    "autocast",
    "keep_in_fp32",
    "stochastic_adamw",
    "cast_to_bf16",
    "cast_to_half",
    "train_with_mixed_precision",
]


def autocast(device: str = "cpu", dtype: torch.dtype | None = None, cached: bool = True) -> torch.autocast:
    """Returns torch's autocast to bf16 (or `dtype`) on a device, for a forward pass.

    Args:
        cached: cache the half-precision copies of weights until it exits. Not under FSDP, where the cache would hold
            all layers at once.
    """
    import torch

    return torch.autocast(device, dtype=dtype or torch.bfloat16, cache_enabled=cached)


def cast_to_half(
    model: nn.Module, dtype: torch.dtype, *, keep: Iterable[nn.Module] = (), trained: bool | None = None
) -> int:
    """Casts fp32 parameters to `dtype`, in place. Buffers stay.

    Args:
        keep: modules whose parameters are not cast.
        trained: cast the trained parameters too; None: if none is frozen.

    Returns:
        The number of cast elements.

    Example:
        >>> import torch
        >>> cast_to_half(torch.nn.Linear(4, 4), torch.bfloat16)
        20
    """
    import torch

    excluded = {id(p) for module in keep for p in module.parameters()}
    # Under an adapter only the frozen base is cast: trained weights in bf16 would lose small updates.
    frozen = [p for p in model.parameters() if not p.requires_grad]
    candidates = model.parameters() if trained or not frozen else frozen
    chosen = [p for p in candidates if p.dtype == torch.float32 and id(p) not in excluded]
    for p in chosen:
        # `.data` keeps the Parameter object, so that tied modules still share it.
        p.data = p.data.to(dtype)
    return sum(p.numel() for p in chosen)


def cast_to_bf16(model: nn.Module) -> int:
    """Calls `cast_to_half` with bf16."""
    import torch

    return cast_to_half(model, torch.bfloat16)


def keep_in_fp32(
    model: nn.Module, patterns: Iterable[str], *, back_to: torch.dtype | None = None, last: Iterable[nn.Module] = ()
) -> list[nn.Module]:
    """Makes modules compute in fp32, in place: casts their inputs up and disables autocast inside.

    Args:
        patterns: regular expressions that are searched in the modules' names: `norm`, `router`, `^lm_head$`.
        back_to: dtype of the surrounding weights, which results are cast back to; None under autocast, which casts by
            itself.
        last: modules whose results go to the loss and stay in fp32.

    Returns:
        The outermost matching modules, then those that share a parameter with them (a tied embedding).

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> _ = keep_in_fp32(model, ["^1$"])
        >>> with autocast("cpu"):
        ...     model[0](torch.ones(1, 4)).dtype, model(torch.ones(1, 4)).dtype
        (torch.bfloat16, torch.float32)
    """
    from preheat.ops.optim.half_precision import compute_in_fp32

    named = {name: module for name, module in model.named_modules() if name}
    match = {name for name in named if any(re.search(pattern, name) for pattern in patterns)}
    # The outermost matches suffice: all that they contain runs inside their fp32 region.
    tops = [named[n] for n in named if n in match and not any(n.startswith(f"{other}.") for other in match)]
    inside = {id(m) for top in tops for m in top.modules()}
    shared = {id(p) for top in tops for p in top.parameters()}
    # A module with the same parameter (a tied embedding) would otherwise mix its fp32 weight with half-precision
    # inputs.
    tied = [
        m for m in named.values() if id(m) not in inside and any(id(p) in shared for p in m.parameters(recurse=False))
    ]
    ends = {id(module) for module in last}
    for module in (*tops, *tied):
        compute_in_fp32(module, None if id(module) in ends else back_to)
    return [*tops, *tied]


def stochastic_adamw(parameters: ParamsT, **settings: Any) -> torch.optim.Optimizer:
    """Returns AdamW for bf16 weights with stochastic rounding (`preheat.ops.optim.optimizers.StochasticAdamW`).

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> _ = cast_to_bf16(layer)
        >>> optimizer = stochastic_adamw(layer.parameters(), lr=1e-3)
    """
    from preheat.ops.optim.optimizers import StochasticAdamW

    return StochasticAdamW(parameters, **settings)


def train_with_mixed_precision(
    model: nn.Module,
    dataloader: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    criterion: Callable[[Tensor, Tensor], Tensor],
    precision: str = "bf16",
    epochs: int = 1,
) -> list[float]:
    """Trains a model under autocast, in place; `fp16` uses loss scaling (torch.amp.GradScaler).

    Args:
        model: weights in fp32, on the device to train on.
        dataloader: yields (inputs, targets); read once per epoch.
        criterion: criterion(outputs, targets), a scalar.
        precision: fp32, bf16 or fp16.

    Returns:
        The loss of each step. An fp16 step whose gradients overflow does not change the weights.

    Raises:
        ValueError: unknown precision.
        RunError: fp16 gradients overflow at any loss scale, or in every step, so that no weight has changed.

    Example:
        >>> import torch
        >>> model, loss = torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss()
        >>> data = [(torch.randn(8, 4), torch.randint(2, (8,)))] * 3
        >>> losses = train_with_mixed_precision(model, data, torch.optim.AdamW(model.parameters()), loss, "bf16", 2)
        >>> len(losses)
        6
    """
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        raise ValueError(f"precision: {precision!r} is not known; use {', '.join(dtypes)}")
    device = next(model.parameters()).device
    # Disabled, the scaler passes everything through, so that one loop serves all precisions.
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    losses, updates, scale = [], 0, scaler.get_scale()
    model.train()
    for _ in range(epochs):
        for inputs, targets in dataloader:
            inputs, targets = inputs.to(device), targets.to(device)
            with torch.autocast(device.type, dtype=dtypes[precision], enabled=precision != "fp32"):
                loss = criterion(model(inputs), targets)
            # Backward outside of autocast: each operator's gradient has the dtype of its forward pass anyway.
            scaler.scale(loss).backward()
            # Unscales the gradients, and skips the step if one of them is not finite.
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            # Not float(loss), which would wait for the device in each step.
            losses.append(loss.detach())
            # Each overflow halves the scale: below 1 the gradients overflow without any scaling.
            before, scale = scale, scaler.get_scale()
            updates += scale >= before
            if scale < 1:
                raise RunError(
                    "fp16: the gradients overflow at any loss scale; use precision bf16 or a lower learning rate"
                )
    if losses and not updates:
        raise RunError(
            f"fp16: the gradients overflowed in all {len(losses)} steps, and no weight has changed; the loss scale is "
            f"{scale:g} now; use precision bf16, or more steps"
        )
    return [float(loss) for loss in losses]


_AMPERE = (8, 0)  # CUDA compute capability of the first matrix units for bf16; an unknown one counts as recent


@dataclass(frozen=True, kw_only=True)
class MixedPrecision(Searchable):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "rounding"
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"keep_fp32": "norm|^lm_head$"},
            {"mode": "bf16_master"},
            {"mode": "bf16_weights"},
            {"mode": "bf16_weights", "keep_fp32": "norm|q_proj|embed_tokens"},
            {"mode": "fp16"},
            {"mode": "fp16_master"},
            {"mode": "fp32"},
            {"mode": "auto"},
        )
    )
    supports_encoder_decoder: ClassVar[bool] = True
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OPTIMIZER})
    provides: ClassVar[frozenset[Tag]] = frozenset(
        {Tag.BF16_COMPUTE, Tag.FP16_COMPUTE, Tag.LOSS_SCALING, Tag.ELEMENTWISE_UPDATE, Tag.TF32_PRODUCTS}
    )

    mode: Literal["auto", "fp32", "bf16", "bf16_weights", "bf16_master", "bf16_pure", "fp16", "fp16_master"] = "bf16"
    """auto: bf16 where the device has fast bf16 matmuls, fp16 on older GPUs, fp32 on older CPUs; fp32: full precision;
    bf16, fp16: fp32 weights under autocast; bf16_weights: weights in bf16 with stochastic rounding; bf16_master,
    fp16_master: half weights with fp32 masters in the optimizer; bf16_pure: everything in bf16, small updates lost."""
    frozen: Literal["fp32", "half", "auto"] = "auto"
    """Modes bf16 and fp16, on a frozen base: the precision of its weights. half: the precision of the matmuls, which
    saves half of their memory, every cast, and half of the residual stream; auto: half on a GPU, as other trainers
    keep it, fp32 on a CPU. Trained weights stay in fp32, and any optimizer technique may be used."""
    keep_fp32: str | tuple[str, ...] = ()
    """Regular expressions (one, or a list) of module names that compute in fp32 in any mode, e.g. [norm, router,
    lm_head]."""
    loss_scale: Annotated[float, Bound(1)] = 65536.0
    """fp16 modes: the initial loss scale, at least 1. Each step whose gradients overflow halves it and is skipped."""
    growth_interval: Annotated[int, Bound(1)] = 2000
    """fp16 modes: number of consecutive steps without overflow after which the loss scale doubles."""
    tf32: bool = False
    """On a GPU, compute the remaining fp32 matmuls (all in mode fp32, those of keep_fp32 and of an fp32 head) in TF32,
    which rounds their factors to 10 bits of mantissa. NVIDIA GPUs from Ampere on."""

    def on(self, device: Device) -> MixedPrecision:
        """Returns the settings with `auto` resolved: by the device alone, so that a resumed run has the same."""
        if self.mode != "auto":
            return self
        if device.kind == "cpu":
            import torch

            return replace(self, mode="bf16" if fastest_half_dtype() == torch.bfloat16 else "fp32")
        return replace(self, mode="fp16" if (device.capability or _AMPERE) < _AMPERE else "bf16")

    def resolve_auto(self, context: Context, plan: Callable[[Technique], Plan]) -> Technique:
        return self.on(context.device)

    def claimed(self) -> frozenset[Slot]:
        # The autocast modes work with every optimizer; half-precision weights need one that keeps small updates.
        return self.owns if self.mode.endswith(("_weights", "_master")) else frozenset()

    def provided(self) -> frozenset[Tag]:
        own = frozenset({Tag.ELEMENTWISE_UPDATE} if self.claimed() else ())
        # Tags describe what these settings do, so that conflicts concern them alone.
        own |= frozenset({Tag.TF32_PRODUCTS} if self.tf32 else ())
        if self.mode.startswith("fp16"):
            return own | {Tag.FP16_COMPUTE, Tag.LOSS_SCALING}
        return own | ({Tag.BF16_COMPUTE} if self.mode != "fp32" else set())

    def beside_engine(self) -> str:
        return f"use mode: bf16 instead of {self.mode} (the engine's optimizer keeps fp32 weights by itself)"

    @property
    def _patterns(self) -> tuple[str, ...]:
        return (self.keep_fp32,) if isinstance(self.keep_fp32, str) else self.keep_fp32

    def search_numerics(self) -> Numerics:
        return {  # type: ignore[return-value]
            "fp32": "rounding" if self.tf32 else "exact",
            "bf16_pure": "different",
        }.get(self.mode, "rounding")

    def read_on(self, device: Device) -> Technique:
        # A run that was trained with TF32 may be read on a device without it.
        resolved = self.on(device)
        return resolved if has_tf32(device) else replace(resolved, tf32=False)

    def check(self, context: Context) -> list[str]:
        if self.mode == "auto":
            return self.on(context.device).check(context)
        problems = []
        for pattern in self._patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                problems.append(f"keep_fp32: {pattern!r} is not a regular expression ({error})")
        if self.tf32 and not has_tf32(context.device):
            problems.append(
                f"tf32: {context.device.name} has no TF32, which NVIDIA's GPUs have from Ampere on; leave it out"
            )
        if self.keep_fp32 and self.mode == "fp32":
            problems.append("keep_fp32: with mode: fp32, everything is in fp32; leave it out")
        # fp32 in mode fp32 is true, and all other modes cast the frozen weights, too.
        if self.frozen not in ("auto", self.mode) and self.mode not in ("bf16", "fp16"):
            problems.append(
                f"frozen: {self.frozen} is for mode: bf16 or fp16, and mode: {self.mode} decides it; leave it out"
            )
        elif self.frozen == "half" and Tag.FROZEN_BASE not in context.tags:
            problems.append("frozen: half has no effect, since no technique freezes a base; leave it out, or use auto")
        if context.recipe.parallel.engine != "native" and self.mode == "bf16_pure":
            problems.append(
                f"mode: bf16_pure has no fp32 weights, which parallel.engine: {context.recipe.parallel.engine} "
                "always keeps; use mode: bf16, or engine: native"
            )
        if self.keep_fp32 and self.claimed() and Tag.REDUCED_GRADIENTS in context.tags:
            problems.append(
                f"keep_fp32: with mode: {self.mode} on several devices a layer's weights are gathered together and "
                f"need one precision; use mode: {self.mode[:4]}, or leave keep_fp32 out"
            )
        if self.mode.endswith("_master") and Tag.FROZEN_BASE in context.tags:
            half = self.mode.removesuffix("_master")
            other = "bf16_weights, which keeps the frozen ones in bf16" if half == "bf16" else half
            problems.append(f"mode: {self.mode} is for models without frozen weights; with a frozen base use {other}")
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        import torch

        if self.mode == "auto":
            return self.on(build.device).apply(build, part)
        total = sum(p.numel() for p in part.parameters())
        if self.tf32 and build.torch_device.type == "cuda":  # fake tensors compute nothing
            allow_tf32(build)
        in_tf32 = ", fp32 matmuls in TF32" if self.tf32 else ""
        if self.mode == "fp32":
            return Change(
                "weights and optimizer in fp32, matmuls in TF32"
                if self.tf32
                else "weights, matmuls and optimizer in fp32",
                total,
            )
        half = torch.float16 if self.mode.startswith("fp16") else torch.bfloat16
        full = Tag.FROZEN_WEIGHTS in build.tags or all(p.requires_grad for p in part.parameters())
        frozen_half = self.frozen == "half" or (self.frozen == "auto" and build.device.kind == "cuda")
        # True if weights are cast, all or the frozen ones; otherwise autocast casts a copy for each matmul.
        of_weights = self.mode not in ("bf16", "fp16") or (frozen_half and not full)
        if self.mode.endswith("_master") and not full:
            raise RecipeError(
                f"techniques.{self.name()}.mode: {self.mode} is for models without frozen weights; some weights are "
                "frozen"
            )
        # Under autocast results need no cast back: the next matmul casts its own inputs.
        fp32_modules = self._keep(build, part, half if of_weights and full else None)
        if half == torch.float16:
            self._scale(build)
        suffix = (f"; {len(fp32_modules)} modules in fp32" if fp32_modules else "") + in_tf32
        # The first four letters name the format. With FSDP, autocast's cache of cast weights would hold all layers at
        # once.
        name, cached = self.mode[:4], Tag.SHARDED_WEIGHTS not in build.tags
        if not of_weights:
            build.hooks.around_forward.append(functools.partial(autocast, build.torch_device.type, half, cached))
            scaled = ", loss scaled" if half == torch.float16 else ""
            return Change(f"matmuls in {name} under autocast, weights in fp32{scaled}{suffix}", total)
        count = cast_to_half(part, half, keep=fp32_modules, trained=full)
        # Frozen half-precision weights and trained fp32 ones meet in one layer: autocast brings them together.
        if not full:
            build.hooks.around_forward.append(functools.partial(autocast, build.torch_device.type, half, cached))
            return Change(f"frozen weights in {name}; trained ones in fp32 under autocast{suffix}", count)
        # No optimizer of its own: whichever the recipe has rounds to the nearest.
        if self.mode == "bf16_pure":
            return Change(f"weights, gradients and moments in bf16, rounded to the nearest{suffix}", count)
        build.claim(Slot.OPTIMIZER, functools.partial(self._build_optimizer, build), self.name())
        if self.mode == "bf16_weights":
            return Change(f"weights and gradients in bf16, rounded stochastically; moments in fp32{suffix}", count)
        scaled = ", loss scaled" if half == torch.float16 else ""
        return Change(f"weights and gradients in {name}; masters and moments in fp32{scaled}{suffix}", count)

    def _keep(self, build: Build, part: nn.Module, back_to: torch.dtype | None) -> list[nn.Module]:
        import torch

        from preheat.models.hf import head

        # A pattern without a match is a mistake in the recipe, which would otherwise go unnoticed.
        for pattern in self._patterns:
            if not any(name and re.search(pattern, name) for name, _ in part.named_modules()):
                raise RecipeError(f"techniques.{self.name()}.keep_fp32: {pattern!r} matches no module of the model")
        if not self._patterns:
            return []
        last = head(part)
        fp32_modules = keep_in_fp32(part, self._patterns, back_to=back_to, last=[last])
        # Chunked losses read the head's weight without calling its module, so they need its dtype.
        names = [name for name, module in part.named_modules() if module is last]
        if any(re.search(pattern, name) for pattern in self._patterns for name in names):
            build.loss.head_dtype = torch.float32
        return fp32_modules

    def _scale(self, build: Build) -> None:
        """Adds loss scaling, once per build: its parts share one scale."""
        from preheat.ops.optim.half_precision import LossScale

        if self.name() in build.state.saved:
            return
        scale = LossScale(build.torch_device, start=self.loss_scale, interval=self.growth_interval)
        build.loss.scaling.append(scale)
        # After sums over devices and tied weights, before clipping: the norm must be of the true gradients.
        build.hooks.finish_gradients.append((Finish.UNSCALE, lambda b: scale.unscale_(p for _, p in b.parameters())))
        build.hooks.after_update.append(lambda b: scale.update(b.optimizer.found_inf))
        key = f"techniques.{self.name()}"
        build.loss.dynamic_scale = LossScaling(
            lambda: scale.scale,
            initial=f"{key}.loss_scale (it is {self.loss_scale:g})",
            remedy=f"Use {key}.mode: {self.mode.replace('fp16', 'bf16')}, whose range is that of fp32",
        )
        # In the checkpoint: a resumed run continues with the scale that it had found.
        build.state.saved[self.name()] = scale

    def _build_optimizer(self, build: Build, groups: ParamsT, **settings: Any) -> torch.optim.Optimizer:
        from preheat.ops.cuda_kernels import is_plain

        # Only if the weights themselves are on the GPU: an offloaded optimizer runs on the host.
        if build.device.kind == "cuda" and build.storage_device is None:
            settings["fused"] = not is_plain("half_adamw")
            settings["chunk"] = 1 << 26  # chunk of the unfused form: a GPU wants few large kernels
        if self.mode == "bf16_weights":
            # The noise depends on seed and step alone, so that a resumed run draws the same.
            return stochastic_adamw(groups, seed=build.recipe.seed, number=lambda: build.state.updates, **settings)
        from preheat.ops.optim.half_precision import MasterAdamW

        return MasterAdamW(groups, **settings)

    def options(self, context: Context) -> Iterable[Technique]:
        frozen = Tag.FROZEN_BASE in context.tags
        if context.device.kind == "cuda" and (context.device.capability or _AMPERE) < _AMPERE:
            # Without fp16_weights: fp16 has too few exponents for weights without masters. A frozen base is in half
            # precision on a GPU (`frozen: auto`).
            half = MixedPrecision(mode="fp16")
            return [half] if frozen else [half, MixedPrecision(mode="fp16_master")]
        modes = ["bf16", "bf16_weights"]
        if not frozen:
            modes += ["bf16_master", "bf16_pure"]
        # Not fp32 with TF32: such a device has bf16 too, which is faster, and each option costs a search layouts.
        return [MixedPrecision(mode=mode) for mode in modes]  # type: ignore[arg-type]
