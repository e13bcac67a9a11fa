"""Mixture-of-experts models of transformers: computes their experts, and records their routers' choices.

Routers compute in fp32 whatever the rest does, because the choice of experts depends on differences that bf16 cannot
represent. Scores are a softmax over all experts (Mixtral, Qwen) or a sigmoid of each (GLM-4.5, after DeepSeek-V3:
groups of experts are chosen first, by the score plus a bias that is part of the model). No token is dropped: each goes
to all of its experts, however many tokens these have. The experts of a layer are computed by a function attached to
them (`ops/grouped_mm.py`: one grouped matmul for all), under the name `preheat` in transformers' registry;
transformers' eager loop gives the same result.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from preheat.models.layer_sizes import max_over_layers

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

__all__ = [
    "BALANCE",
    "BIAS",
    "COUNTS",
    "FAMILIES",
    "TOKENS",
    "RouterRecorder",
    "biases",
    "coefficient",
    "all_experts",
    "has_stacked_experts",
    "compute_by",
    "expert_layers",
    "layers_have_experts",
    "experts_of",
    "has_bias",
    "number_of",
    "record_routers",
    "register",
    "read_router_records",
    "routers",
    "pause_router_records",
    "shared_width",
    "sizes_of",
]

_BY_SOFTMAX = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text")
_BY_SIGMOID = ("deepseek_v3", "glm4_moe")
FAMILIES = (*_BY_SOFTMAX, *_BY_SIGMOID)
"""Families whose routers and experts preheat computes itself: a softmax or sigmoid top-k router over gated experts. The
routers of all others are transformers' own, and their choices are recorded."""
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
"""Names of the number of experts of a layer, and of a token."""
NAME = "preheat"  # our function in transformers' registry of experts
COMPUTE = "preheat_compute"  # attribute of a layer's experts: the function that computes them
ROUTED = "preheat_routed"  # attribute of a router: its choices since the last call of `read_router_records`
BIAS = "e_score_correction_bias"
"""transformers' name of a router's buffer, [experts] fp32: added to scores to choose experts, not to weigh them."""
NUMBER = "preheat_number"  # attribute of a router: its index among those of the whole model
TOKENS = "expert_tokens"
"""Metric of a step: tokens per expert, [layers, experts]; of a pipeline stage with zeros for layers of other stages."""
BALANCE = "balance"
"""Metric of a step: the load-balancing loss before its coefficient, times the weight."""


class Router(Protocol):
    """The attributes that transformers' top-k routers share; `nn.Module` does not declare them."""

    weight: Tensor
    hidden_dim: int
    num_experts: int
    top_k: int
    training: bool
    _buffers: dict[str, Tensor]
    # of the families with a sigmoid only
    num_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


def sizes_of(config: PretrainedConfig) -> tuple[int, int, int]:
    """Experts per layer, experts per token, inner width of an expert; (0, 0, 0) if the model has none."""
    count = next((n for key in COUNTS if (n := max_over_layers(config, key))), 0)
    # Dense models of Gemma 4 and Doge state a number of experts too.
    if not count or False in (getattr(config, "enable_moe_block", True), getattr(config, "is_moe", True)):
        return 0, 0, 0
    chosen = next((n for key in _CHOSEN if (n := max_over_layers(config, key))), 0)
    return (
        int(count),
        int(chosen),
        int(max_over_layers(config, "moe_intermediate_size") or max_over_layers(config, "intermediate_size")),
    )


def expert_layers(config: PretrainedConfig) -> int:
    """Number of layers with experts; the others have one feed-forward block for all tokens."""
    return sum(layers_have_experts(config))


def layers_have_experts(config: PretrainedConfig) -> list[bool]:
    """For each layer, True if it has experts."""
    numbers = range(config.num_hidden_layers)
    if not sizes_of(config)[0]:
        return [False for _ in numbers]
    get = functools.partial(getattr, config)
    if (kinds := get("mlp_layer_types", None)) is not None:
        return [kind == "sparse" for kind in kinds]
    # Nemotron-H: a layer is a mixer, a feed-forward block or experts.
    if {"mlp", "moe"} & {*(kinds := get("layers_block_type", None) or ())}:
        return [kind == "moe" for kind in kinds]
    if (chosen := get("moe_layers", None)) is not None:  # Llama 4
        return [n in chosen for n in numbers]
    if (period := get("expert_layer_period", None)) is not None:  # Jamba, whose only expert is a feed-forward block
        return [config.num_experts > 1 and n % period == config.expert_layer_offset for n in numbers]
    if (first := get("moe_layer_start_index", None)) is not None:  # ERNIE 4.5
        last = config.moe_layer_end_index
        return [first <= n <= last and (n + 1) % config.moe_layer_interval == 0 for n in numbers]
    dense, step = get("mlp_only_layers", None) or (), get("decoder_sparse_step", None) or 1
    before = get("first_k_dense_replace", None) or get("num_dense_layers", None) or 0
    # Qwen-MoE names its dense layers and puts experts in every step-th of the others;
    # DeepSeek and GLM begin with dense layers.
    return [n >= before and n not in dense and (n + 1) % step == 0 for n in numbers]


def shared_width(config: PretrainedConfig) -> int:
    """Inner width of the shared expert of a layer; 0 without one."""
    # Qwen2-MoE, Nemotron-H and Granite state the width of their shared expert.
    for key in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"):
        if width := max_over_layers(config, key):
            return int(width)
    # DeepSeek, GLM and Hunyuan count shared experts, each as wide as a routed one.
    keys = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "num_shared_expert")
    count = next((n for key in keys if (n := max_over_layers(config, key))), 0)
    return int(count * (max_over_layers(config, "moe_intermediate_size") or 0))


def has_bias(config: PretrainedConfig) -> bool:
    """True if the model itself has a bias on the choice of experts, saved in its folder and used by transformers."""
    return config.model_type in _BY_SIGMOID


def coefficient(config: PretrainedConfig) -> float:
    """Coefficient of the load-balancing loss; 0 without one."""
    value = float(getattr(config, "router_aux_loss_coef", None) or 0.0)
    # Families with sigmoid routers are balanced by the bias on the choice, without a loss.
    if config.model_type in FAMILIES:
        return value if config.model_type in _BY_SOFTMAX else 0.0
    return value if getattr(config, "output_router_logits", False) else 0.0  # as transformers decides it


@functools.cache
def register() -> str:
    """Registers our function under its own name in transformers' registry of experts; returns the name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _compute_experts)
    return NAME


@functools.cache
def has_stacked_experts(kind: type[PretrainedConfig]) -> bool:
    """True if the experts of a configuration class are stacks of weights that `experts_of` finds, by the code of its
    modules."""
    try:
        modeling = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
        # transformers itself decides by this whether a model's experts can be computed by another function.
        return "@use_experts_implementation" in inspect.getsource(modeling)
    except (ImportError, OSError, TypeError):
        return False


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Each layer's experts: modules of stacked weights whose function transformers' registry gives."""
    return [m for m in model.modules() if hasattr(m, "is_transposed") and _has_stack(m)]


def _has_stack(module: nn.Module) -> bool:
    # Packed stacks (ops/quantization/packed_experts.py) are no parameters.
    return "down_proj" in module._parameters or "down_proj" in getattr(module, "packed_shapes", ())


def all_experts(model: nn.Module) -> list[nn.Module]:
    """Each layer's experts, in whatever form: stacked, as a list of modules, packed in 4 bits, with adapters."""
    return [m for name, m in model.named_modules() if name.rpartition(".")[2] == "experts"]


def routers(model: nn.Module) -> list[nn.Module]:
    """The router of each layer that has experts, in order."""
    classes = _router_classes(model)
    return [m for m in model.modules() if type(m) in classes or _is_ours(m)]


def _is_ours(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("TopKRouter", "TopkRouter"))


def _router_classes(model: nn.Module) -> dict[type, int]:
    """The classes whose results transformers records as router logits, and which of their results that is."""
    classes: dict[type, int] = {}
    # transformers' models declare their recorders on the class: a module class, or one with the index of its result.
    for part in model.modules():
        recorders: Any = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits") or ()
        for recorder in recorders if isinstance(recorders, list | tuple) else (recorders,):
            kind: Any = getattr(recorder, "target_class", recorder)
            classes[kind] = getattr(recorder, "index", 0)
    return classes


def biases(model: nn.Module) -> dict[str, Tensor]:
    """A model's biases on the choice of experts, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(f".{BIAS}")}


class RouterRecorder:
    """A switch for recording routers' choices.

    Attributes:
        open: true in forward passes that are recorded; false while a layer is recomputed in the backward pass.
        padding: [rows, length] bool, of the micro-batch; also while a layer is recomputed. None: of a model that is not
            built for training.
    """

    def __init__(self) -> None:
        self.open = False
        self.padding: Tensor | None = None


@contextmanager
def pause_router_records(layer: nn.Module) -> Iterator[None]:
    """Leaves the records of a layer's routers as they are, while the layer runs outside of a step."""
    records = [(module, getattr(module, ROUTED)) for module in layer.modules() if hasattr(module, ROUTED)]
    for router, _ in records:
        setattr(router, ROUTED, None)
    try:
        yield
    finally:
        for router, record in records:
            setattr(router, ROUTED, record)


def record_routers(model: nn.Module) -> RouterRecorder:
    """Makes the routers of a model compute in fp32 and record their choices while the recorder is open, in place."""
    ledger = RouterRecorder()
    config: PretrainedConfig = model.config
    text = config.get_text_config()
    ours, classes = text.model_type in FAMILIES, _router_classes(model)
    for number, router in enumerate(routers(model)):
        # Our forward replaces the router's; that of any other family runs unchanged and is observed.
        if ours:
            forward: Any = types.MethodType(functools.partial(_route, ledger), router)
        else:
            index, balanced = classes.get(type(router), 0), coefficient(text) > 0
            forward = functools.partial(_record, ledger, router, router.forward, index, sizes_of(text)[1], balanced)
        router.forward = forward  # type: ignore[method-assign]
        setattr(router, ROUTED, None)
        setattr(router, NUMBER, number)  # a pipeline stage has a part of the routers
    return ledger


def number_of(router: nn.Module) -> int:
    """The index of a recorded router among those of the whole model, also in a pipeline stage."""
    return int(getattr(router, NUMBER))


def _record(
    ledger: RouterRecorder,
    router: nn.Module,
    forward: Callable[..., Any],
    index: int,
    chosen: int,
    balanced: bool,
    *args: object,
    **kwargs: object,
) -> Any:
    """Runs transformers' own router, and records its choices."""
    import torch

    out = forward(*args, **kwargs)
    if not router.training:
        return out
    results = out if isinstance(out, tuple) else (out,)
    # Gradients only if a balance loss uses the probabilities; otherwise the record is a metric.
    with nullcontext() if balanced else torch.no_grad():
        shares = results[index].flatten(0, -2).float().softmax(dim=-1)  # [tokens, experts]
    # Families return scores, weights and indices in different orders: the indices are the integers [tokens, chosen].
    tensors = (r for r in results if torch.is_tensor(r) and not r.is_floating_point())
    picks = (r for r in tensors if r.shape == (len(shares), chosen))  # JetMoE's are sorted by expert
    # transformers' balance loss counts the experts of the largest probabilities, whatever the router chose.
    picked = None if balanced else next(picks, None)
    _note(ledger, router, shares.detach().topk(chosen, dim=-1).indices if picked is None else picked, shares)
    return out


def _note(ledger: RouterRecorder, router: nn.Module | Router, chosen: Tensor, shares: Tensor) -> None:
    """Adds the counts of `chosen` experts and the sums of `shares` [tokens, experts] to a router's open record.

    Positions of padding are left out. A recomputed layer counts too, although nothing is recorded then: selective
    checkpointing replays a layer's operators one by one, so they must be the same.
    """
    import torch

    if not router.training:  # a reference model, which is this one without its adapters
        return
    flat = chosen.flatten()
    if ledger.padding is None:
        ones = torch.ones_like(flat, dtype=shares.dtype)
    else:
        real = (~ledger.padding).flatten().to(shares.dtype)[:, None]  # [tokens, 1]: 1, or 0 at padding
        ones, shares = real.expand_as(chosen).flatten(), shares * real
    # Both [experts]: the tokens that chose each expert, and the sum of its probabilities.
    counts = shares.new_zeros(shares.shape[-1]).scatter_add_(0, flat, ones)
    sums = shares.sum(dim=0)
    if ledger.open:
        record = getattr(router, ROUTED)
        setattr(router, ROUTED, (counts, sums) if record is None else (record[0] + counts, record[1] + sums))


def _route(ledger: RouterRecorder, router: Router, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all experts [tokens, experts], and weights and indices of each token's experts [tokens, chosen]."""
    import torch

    # [tokens, width]: the choice does not depend on rows.
    hidden = hidden.reshape(-1, router.hidden_dim)
    # Autocast would compute the linear map in bf16, whatever the dtype of its inputs.
    with torch.autocast(hidden.device.type, enabled=False):
        scores = torch.nn.functional.linear(hidden.float(), router.weight.float())
    shares, weights, chosen = (
        _route_by_sigmoid(router, scores) if hasattr(router, "num_group") else _route_by_softmax(router, scores)
    )
    _note(ledger, router, chosen, shares)
    return scores, weights, chosen


def _route_by_softmax(router: Router, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of all experts, and weights and indices of the chosen ones."""
    shares = scores.softmax(dim=-1)
    bias = router._buffers.get(BIAS) if router.training else None  # these families do not save it in their folders
    # The bias decides which experts are chosen; their weights stay the router's
    # probabilities, which carry the gradient.
    if bias is None:
        weights, chosen = shares.topk(router.top_k, dim=-1)
    else:
        chosen = (shares.detach() + bias).topk(router.top_k, dim=-1).indices
        weights = shares.gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always normalizes
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return shares, weights, chosen


def _route_by_sigmoid(router: Router, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_route_by_softmax`; a group of experts is scored by its two best (DeepSeek-V3, arXiv:2412.19437)."""
    import torch

    shares = scores.sigmoid()
    choice = shares.detach() + router._buffers[BIAS]
    groups, rows = router.num_group, len(choice)
    # Group-limited choice: only experts of each token's best groups can be chosen.
    if router.topk_group < groups:
        grouped = choice.view(rows, groups, -1)  # [tokens, groups, experts / groups]
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(router.topk_group, dim=-1).indices
        left_out = torch.ones(rows, groups, dtype=torch.bool, device=choice.device).scatter_(1, best, False)
        # -inf rather than 0: with a negative bias, a score in a chosen group may be below 0.
        choice = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(1)
    chosen = choice.topk(router.top_k, dim=-1).indices
    weights = shares.gather(1, chosen)
    if router.norm_topk_prob:
        # 1e-20 as in transformers' DeepSeek-V3: sigmoids may all round to 0, unlike a softmax.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return shares, weights * router.routed_scaling_factor, chosen


def read_router_records(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The routers' records since the last call: tokens per expert, and summed probabilities, [layers, experts] each.

    Layers are those of `model` with experts, at least one: of a pipeline stage, its own.
    """
    import torch

    records = []
    for router in routers(model):
        record = getattr(router, ROUTED)
        assert record is not None, "a router did not record its choice"
        setattr(router, ROUTED, None)
        records.append(record)
    return torch.stack([counts for counts, _ in records]), torch.stack([sums for _, sums in records])


def _compute_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' interface of experts: hidden [tokens, width], chosen and weights [tokens, k] -> [tokens, width]."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    # transformers' own function for a model that was not built for training.
    compute = getattr(experts, COMPUTE, grouped_mm_experts_forward)
    return compute(experts, hidden, chosen, weights)  # type: ignore[no-any-return]


def compute_by(model: nn.Module, function: Callable[..., Tensor]) -> None:
    """Makes `function(experts, hidden, chosen, weights)` compute the experts of a model, in place.

    Args:
        function: gets a layer's experts, hidden states [tokens, width], and per token the indices of its experts
            [tokens, k] and their weights [tokens, k]; returns [tokens, width].
    """
    for experts in experts_of(model):
        setattr(experts, COMPUTE, function)
