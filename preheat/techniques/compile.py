"""Compile: compiles each layer with torch.compile and fuses its small operators.

What: torch.compile traces a transformer layer and generates code; one graph serves all layers and all batches of one
shape. Each kind of layer (windows, no rotary positions) has a graph of its own, and so have evaluation, batches whose
rows are one document each, and the first layer if only adapters are trained, because its input needs no gradient. For
packed batches, attention is one opaque operator that takes document boundaries as data, so other boundaries cause no
recompilation. Generation with a KV cache runs uncompiled. The run counts recompilations, and reports when it stops
compiling, or when layers do not share their graphs.
Helps: norms, rotary embedding, activation and residual additions are memory-bound, and read and write once when fused;
fewer activations are kept for the backward pass.
Hurts: the first step waits for the compiler (tens of seconds on a CPU), which also takes tens of MiB of host memory
that the plan does not include. The plan models compiled layers as fused_operators, which keep the same activations; for
unsupported families it models uncompiled layers, an upper bound. A search adds compile on GPUs, if rounding is allowed
and the run is long enough to repay about a minute of compilation. It does not add it to layers with experts, recurrent
mixers, attention sinks or chunks, or batches of changing shapes. Recurrent mixers, sinks and chunks cut sequences by
their documents, so these mixers run uncompiled, and the other parts of their layers (norms, feed-forward) compile
apart.
Source: Ansel et al. 2024, PyTorch 2 (doi:10.1145/3620665.3640366).
"""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeVar

from preheat.core import Build, Change, Context, Device, Numerics, Searchable, Slot, Stage, Tag, Technique, conflicts_of
from preheat.core.run_records import Notice
from preheat.errors import RunError
from preheat.recipe import Bound

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn
    from transformers import PreTrainedModel

    from preheat.core.json_types import JsonObject
    from preheat.core.plan import Plan
    from preheat.models.kernel_swap import Forwards
    from preheat.ops.attention.custom_op import OpaqueAttention

__all__ = ["Compile", "CompiledLayers", "compile_layers"]

P = ParamSpec("P")
T = TypeVar("T")

# Families whose layers compile without graph breaks (tests/unit/techniques/test_compile.py); others may have several.
_ONE_GRAPH = frozenset(
    ("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
)
# Seconds to compile the training and evaluation graphs: 15 to 25 measured on a CPU; a minute assumed on a GPU with a
# cold compiler cache. The first step of an 8B Llama with shared graphs took 14 s on an H100 (gpu_layer.md).
_COMPILE_SECONDS = {"cpu": 25.0, "cuda": 60.0}
# Kinds of layers that a model may have, with a graph each: with a window or without, with rotary positions or without.
_KINDS = 4


class CompiledLayers:
    """Layers that share a compiled function, and its statistics; created by `compile_layers`.

    Attributes:
        graphs: number of compiled graphs: one per batch shape and kind of layer, with and without gradients.
        compilations: how often calls of equal inputs compiled, by the `_Inputs` of the call: once per kind of layer.
        modules: what is compiled: the layers, or parts of them.
        apart: number of layers of which parts are compiled.
        limit: after this many graphs, calls that would need another one run uncompiled; those that have one keep it.
        planned: replacement forwards of the layers' modules in a dry run, of `models.kernel_swap.find_forwards`.
    """

    def __init__(self, *, backend: str, mode: str, dynamic: bool, fullgraph: bool, limit: int):
        import torch

        def layer(forward: Callable[..., T], args: tuple[object, ...], kwargs: Mapping[str, object]) -> T:
            return forward(*args, **kwargs)

        self.graphs, self.limit = 0, limit
        self.compilations = Counter[_Inputs]()
        self._reported: set[str] = set()
        self.modules: list[nn.Module] = []
        self.apart = 0
        self._generating = False
        self._planning: AbstractContextManager[None] | None = None
        self.planned: Forwards = []
        # torch caches graphs by code object: use our own copy, so that graphs of other models are neither used nor
        # counted.
        own = types.FunctionType(layer.__code__.replace(), globals())
        # At the first call: a dry run compiles nothing, and should not import the compiler.
        self._compiled = functools.cache(
            lambda: torch.compile(
                own, backend=backend, mode=None if mode == "default" else mode, dynamic=dynamic, fullgraph=fullgraph
            )
        )
        self._attention: OpaqueAttention | None = None

    def call_layer(self, forward: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the forward of a layer whose parts are compiled: they are not told of its cache."""
        from preheat.models.token_mixers import find_cache

        before, self._generating = self._generating, find_cache(kwargs) is not None
        try:
            return forward(*args, **kwargs)
        finally:
            self._generating = before

    def run(self, kind: type, forward: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `forward(*args, **kwargs)` of a module of type `kind`, compiled if possible."""
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        from preheat.models.token_mixers import find_cache

        # Nothing compiles under a dispatch mode (e.g. fake tensors), and a growing KV cache changes shape with each
        # token.
        if is_in_torch_dispatch_mode():
            from torch._guards import detect_fake_mode

            from preheat.models.kernel_swap import swap_forwards

            within = swap_forwards(self.planned)
            # A dry run: the replacement forwards save what the compiler's fused operators would.
            if detect_fake_mode(args) is not None:  # stays active, so that recomputation in backward uses it too
                if self._planning is None:
                    self._planning = within
                    within.__enter__()
                return forward(*args, **kwargs)
            with within:
                return forward(*args, **kwargs)
        # Each graph belongs to one shape, and a growing cache has another with each token.
        if self._generating or find_cache(kwargs) is not None:
            return forward(*args, **kwargs)
        from torch._dynamo.exc import Unsupported
        from torch._dynamo.utils import counters

        if prepare := getattr(forward, "prepare", None):  # checkpointed layers choose what to keep,
            prepare(args, kwargs)  # which cannot be traced
        # torch counts graphs per process; the difference is what this call compiled.
        before = counters["stats"]["unique_graphs"]
        traced_kwargs = self._make_attention_opaque(args, kwargs)
        try:
            with self._recompile_limit(), warnings.catch_warnings():
                # Hides torch's own deprecation warnings, and those of .grad access, which torch's filter does not hide
                # under -W error.
                warnings.filterwarnings("ignore", module=r"torch\.")
                return self._compiled()(forward, args, traced_kwargs)
        except Unsupported as error:
            raise RunError(
                "techniques.compile.fullgraph: torch.compile cannot make one graph of a "
                f"layer ({str(error).strip().splitlines()[0]}); use fullgraph: false"
            ) from error
        finally:
            if graphs := counters["stats"]["unique_graphs"] - before:
                self.graphs += graphs
                self.compilations[_describe_inputs(kind, args, traced_kwargs)] += 1

    def expected_compilations(self) -> int:
        """Returns the number of compilations so far, counting at most `_KINDS` for each `_Inputs`."""
        return sum(min(count, _KINDS) for count in self.compilations.values())

    def new_notices(self) -> list[str]:
        """Returns notices about the graphs for the user, each once."""
        notices = {}
        if (most := max(self.compilations.values(), default=0)) > _KINDS:
            notices["kinds"] = (
                f"techniques.compile: layers were compiled {most} times for inputs of one shape, because they differ "
                f"in a value that is part of a graph; this takes long and soon reaches limit: {self.limit}; "
                "TORCH_LOGS=recompiles names the value; leave compile out if it belongs to the model"
            )
        if self.graphs >= self.limit:
            notices["limit"] = (
                f"techniques.compile.limit: {self.graphs} graphs are compiled; layers and batch shapes that have a "
                "graph keep it, and those that need another run uncompiled from here on; a higher limit compiles more"
            )
        new = [message for key, message in notices.items() if key not in self._reported]
        self._reported |= notices.keys()
        return new

    def _recompile_limit(self) -> AbstractContextManager[None]:
        """Replaces torch's recompile limit, which counts layers and silently falls back to eager, by our own."""
        import torch

        # No further graph: calls whose guards hold for a graph keep using it, all others run eagerly.
        if self.graphs >= self.limit:
            return torch.compiler.set_stance("eager_on_recompile")
        return torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)

    def _make_attention_opaque(self, args: tuple[Any, ...], kwargs: JsonObject) -> JsonObject:
        """Returns the arguments with attention as one opaque operator if its kernel or mask cannot be traced."""
        from preheat.ops.attention.custom_op import OpaqueAttention, OpaqueMask
        from preheat.ops.attention.sdpa import reference_attention, sdpa_attention

        kernel, mask = kwargs.get("preheat_attention"), kwargs.get("preheat_mask")
        if kernel is None or mask is None:
            return kwargs
        # Documents are data that the trace would freeze: each batch with other boundaries would compile anew.
        packed = mask.documents is not None and any(len(row) > 1 for row in mask.documents)
        function = kernel.func if isinstance(kernel, functools.partial) else kernel
        # Torch's own operators are traced as they are.
        if not packed and function in (
            reference_attention,
            sdpa_attention,
        ):
            # Rows of one document need no boundaries: without them, all such batches have the same arguments.
            return kwargs | {"preheat_mask": replace(mask, documents=None)}
        # One operator object for all layers and calls: another object would be another graph.
        if self._attention is None:
            self._attention = OpaqueAttention(kernel)
        self._attention.kernel = kernel
        rows, length = (args[0] if args else kwargs["hidden_states"]).shape[:2]  # hidden states: [rows, length, width]
        return kwargs | {"preheat_attention": self._attention, "preheat_mask": OpaqueMask.of(mask, rows, length)}


class _Inputs(NamedTuple):
    """Inputs of a call that need a graph of their own for each kind of layer."""

    module: type
    shape: tuple[int, ...]
    requires_grad: bool
    """False for the first layer if only adapters are trained."""
    grad_enabled: bool
    opaque_attention: bool


def _describe_inputs(module: type, args: tuple[object, ...], kwargs: Mapping[str, object]) -> _Inputs:
    import torch

    from preheat.ops.attention.custom_op import OpaqueMask

    opaque = isinstance(kwargs.get("preheat_mask"), OpaqueMask)
    # Of a layer the first tensor is the hidden states [rows, length, width].
    hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return _Inputs(module, tuple(hidden.shape), hidden.requires_grad, torch.is_grad_enabled(), opaque)


def compile_layers(
    layers: Iterable[nn.Module],
    *,
    backend: str = "inductor",
    mode: str = "default",
    dynamic: bool = False,
    fullgraph: bool = True,
    limit: int = 16,
) -> CompiledLayers:
    """Compiles the `forward` of each layer at its first call, in place.

    A layer whose mixers cut sequences by documents is compiled in parts, without these mixers.

    Args:
        layers: e.g. `model.model.layers`; their first argument is [rows, length, width].
        backend, mode: as in torch.compile.
        dynamic: one graph for all shapes, slower code.
        fullgraph: raise an error on graph breaks.
        limit: maximum number of graphs; calls that would need another one run uncompiled, and those that have one do
            not.

    Returns:
        The compilation statistics.

    Raises:
        RunError: at a layer's first call, if `fullgraph` and the layer has graph breaks.

    Example:
        >>> import torch
        >>> layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        >>> compiled = compile_layers(layers)
        >>> compiled.graphs
        0
    """
    from preheat.models.token_mixers import find_compilable_parts

    compiled = CompiledLayers(backend=backend, mode=mode, dynamic=dynamic, fullgraph=fullgraph, limit=limit)
    # Same code, different `forward`: the layers share one graph through the code object of `CompiledLayers`.
    for layer in layers:
        parts = find_compilable_parts(layer)
        for module in parts:
            module.forward = functools.partial(compiled.run, type(module), module.forward)  # type: ignore[method-assign]
        if layer not in parts:
            compiled.apart += 1
            layer.forward = functools.partial(compiled.call_layer, layer.forward)  # type: ignore[method-assign]
        compiled.modules += parts
    return compiled


@dataclass(frozen=True, kw_only=True)
class Compile(Searchable):
    stage: ClassVar[Stage] = Stage.COMPILE
    numerics: ClassVar[Numerics] = "exact"
    unsupported_for_images: ClassVar[str] = "supports only text models so far; leave it out"
    # Both would fuse the same operators, and the compiler cannot trace external kernels.
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.COMPILED_LAYERS})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.FUSED_LAYERS})

    # torch's CUDA graph modes are left out: they reuse a layer's outputs while backward still needs them.
    # On a CPU its gains are uneven, and its plan does not know them.
    searched_on: ClassVar[frozenset[str]] = frozenset({"cuda"})

    when: Literal["always", "auto", "never"] = "always"
    """auto: on a GPU, if the dry run says that the run finishes sooner, compilation included (assumed to take a
    minute), and no other technique conflicts; never on a CPU. The run records the choice."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """How long to search for fast code; max-autotune-no-cudagraphs tries several kernels for each product."""
    dynamic: bool = False
    """One graph for all lengths and batch sizes: fewer compilations, slower code."""
    fullgraph: bool = True
    """Reject layers with graph breaks."""
    limit: Annotated[int, Bound(2)] = 16
    """Maximum number of graphs. Each batch shape needs one per kind of layer (most models have one or two kinds),
    evaluation as many again; what needs another graph then runs uncompiled, and the run reports it."""

    def check(self, context: Context) -> list[str]:
        from preheat.hardware.cpp_build import describe_missing_compiler

        if self.when == "never" and self != type(self)(when="never"):
            # Ignored settings would suggest that they act.
            return ["when: never compiles nothing, so its other settings change nothing; leave them out"]
        if not self.acts():
            return []
        device = context.device
        missing = describe_missing_compiler(device.kind) if device.at_hand or device.kind == "cpu" else ""
        # Only this machine can be searched for a compiler.
        return [missing] if missing else []

    def acts(self) -> bool:
        return self.when == "always"

    def left_open(self, device: Device) -> bool:
        return self.when == "auto" and device.kind in self.searched_on

    def provided(self) -> frozenset[Tag]:
        return self.provides if self.acts() else frozenset()

    def search_numerics(self) -> Literal["rounding"]:
        return "rounding"  # fused half-precision operators keep intermediate values in fp32

    def startup_seconds(self, device: Device) -> float:
        return _COMPILE_SECONDS[device.kind] if self.acts() else 0.0

    def resolve_auto(self, context: Context, plan: Callable[[Technique], Plan]) -> Technique:
        if self.when != "auto":
            return self
        never = replace(self, when="never")
        # The search's own settings, so that auto and a search choose between the same candidates.
        always = next(iter(self.options(context)), None) if self.left_open(context.device) else None
        if always is None:
            return never
        techniques = {**context.recipe.techniques, self.name(): always}
        # A technique that excludes compiled layers wins: auto never turns a valid recipe into an invalid one.
        if conflicts_of(techniques.values(), replace(context, tags=context.tags | always.provided())):
            return never
        without, compiled = plan(never), plan(always)
        # Fitting comes before speed: fusing may be what makes the run fit.
        if compiled.fits != without.fits:
            return always if compiled.fits else never
        return always if _is_finished_sooner(compiled, without) else never

    def options(self, context: Context) -> Iterable[Technique]:
        # Routing decides at run time which rows an expert reads, which a graph cannot hold; and each batch shape needs
        # a graph of its own.
        shapes = any(Slot.BATCH_SHAPE in t.claimed() for t in context.recipe.techniques.values())
        # Families without a test of their graph may break it; elsewhere a break is an error that the user wants to see.
        return (
            []
            if context.model.experts or context.model.special_mixers or shapes
            else [replace(self, when="always", fullgraph=self.fullgraph and context.model.family in _ONE_GRAPH)]
        )

    def apply(self, build: Build, part: PreTrainedModel) -> Change:
        from preheat.models.hf import find_anatomy
        from preheat.models.kernel_swap import KERNEL_FAMILIES, find_forwards, is_gated_silu
        from preheat.ops import rowwise_cpu, rowwise_cuda
        from preheat.ops.fused_norm_gate import gated_silu, rms_norm

        layers = find_anatomy(part).layers
        if not self.acts():
            reason = {"auto": "no GPU" if build.device.kind == "cpu" else "no plan chose it"}.get(
                self.when, f"when: {self.when}"
            )
            return Change(f"{len(layers)} layers run uncompiled ({reason})", len(layers))
        compiled = compile_layers(
            layers, mode=self.mode, dynamic=self.dynamic, fullgraph=self.fullgraph, limit=self.limit
        )
        # A dry run cannot compile: it computes these modules by fused operators, which save the same activations.
        if part.config.model_type in KERNEL_FAMILIES and not compiled.apart:
            cuda = build.device.kind == "cuda"
            gate = rowwise_cuda.gated_silu if cuda else gated_silu
            rotary = rowwise_cuda.rotary if cuda else rowwise_cpu.rotary
            overrides = find_forwards(part, norm=rms_norm, rotary=rotary, gate=gate if is_gated_silu(part) else None)
            # Only inside the layers: the final norm is not compiled.
            within = {id(m) for module in compiled.modules for m in module.modules()}
            compiled.planned = [pair for pairs in overrides.values() for pair in pairs if id(pair[0]) in within]
        # The first step compiles each kind of layer; later graphs, and those of layers that share none, are
        # recompilations.
        first_step: list[int] = []
        build.state.counters["recompilations"] = lambda: (
            compiled.compilations.total() - first_step[0] if first_step else 0
        )

        def report(build: Build) -> None:
            if not first_step:
                first_step.append(compiled.expected_compilations())
            build.state.events += [Notice(message=message) for message in compiled.new_notices()]

        build.hooks.after_update.append(report)
        but = f"; {compiled.apart} of them without their mixers, which cut sequences by documents" * bool(
            compiled.apart
        )
        return Change(f"{len(layers)} layers compiled when they first run{but}", len(layers))


def _is_finished_sooner(one: Plan, other: Plan) -> bool:
    """Returns True if the first plan finishes the same work sooner, startup included.

    Compares only steps if the length of the run is unknown.
    """

    # total seconds / total tokens, of which only the rate and the training time are known.
    def seconds_per_token(plan: Plan) -> float:
        total = plan.seconds_total
        if total is None:
            return 1 / plan.tokens_per_second
        remaining = total - plan.seconds_to_start  # for runs limited by hours and by steps
        return total / (plan.tokens_per_second * remaining) if remaining > 0 else math.inf

    return seconds_per_token(one) < seconds_per_token(other)
