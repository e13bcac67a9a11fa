"""Applies exact techniques to a transformers Trainer and its model, and halves its micro-batches if memory lacks.

Each change to the model is tried on a few tokens before and after: one with which loss or gradients differ is undone.
"""

from __future__ import annotations

import functools
import gc
import logging
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from preheat.core.run_records import MicroBatchSize
from preheat.core.units import format_memory
from preheat.errors import PreheatError, RecipeError
from preheat.hardware.cpp_build import find_compiler
from preheat.hardware.cpu_allocator import install_heap, release_unused
from preheat.hardware.oom import is_oom
from preheat.integrations.applied import applied_to
from preheat.integrations.loop_config import find_core_model, read_trainer
from preheat.integrations.loop_memory import TILE
from preheat.integrations.micro_batch import find_largest_micro_batch, is_preference, split_micro_batch
from preheat.integrations.recorder import count_tensor_bytes, predict_loop, preserve_generators
from preheat.models import hf
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, Trainer

    from preheat.core.plan import Plan

__all__ = ["Acceleration", "accelerate_trainer"]

Allowed = Literal["exact", "rounding"]
_ROWS = {"cpu": 512, "cuda": 4096}
"""Rows of logits that are in memory at a time, as of the technique `chunked_loss`."""
_TOKENS = 12
"""Length of the sequence that a change is tried on."""
_TOLERATED = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference of a tried loss and its gradients by the precision of the weights: of sums in another
order over a few tokens. A wrong operator differs by more than half."""
_log = logging.getLogger("preheat.run")


@dataclass(frozen=True)
class Acceleration:
    """Changes that `accelerate_trainer` made, and those that it did not make.

    Attributes:
        applied: change -> what it is.
        left: change that was not made -> why.
    """

    applied: Mapping[str, str]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"applied: {name}: {what}" for name, what in self.applied.items()]
        return "\n".join(lines + [f"left:    {name}: {why}" for name, why in self.left.items()])


class _Left(Exception):
    """A change is not made; the message says why."""


def accelerate_trainer(trainer: Trainer, allow: Allowed = "exact") -> Acceleration:
    """Applies to a trainer and its model, in place, what makes it faster or smaller and leaves its losses as they are.

    attention: preheat's kernels on a CPU and in place of eager attention; and batches that are padded on the right
        need no mask, since causal attention never looks there.
    fused_operators: norms and gates that save only their inputs.
    chunked_loss: head and cross entropy without all logits. TRL's trainers do that themselves, in a buffer that is made
        as narrow as a small vocabulary.
    activation_checkpointing: if the trainer recomputes whole layers, results of matmuls and attention are kept as far
        as a dry run says that they fit; if the run does not fit, layers are recomputed.
    optimizer: the fused form of AdamW.
    heap (on a CPU): freed memory is reused without holes.
    micro_batch: at an out-of-memory error the step is repeated with micro-batches of half as many rows, and more of
        them. Sums of losses and gradients are the same; dropout draws other masks.

    Call it after the trainer is made and before `train`. Losses are equal up to the order of sums.

    Args:
        allow: exact, or rounding: also what rounds elsewhere in half precision (fused operators under autocast).

    Returns:
        The changes that were applied, and the others with the reason.

    Raises:
        RecipeError: `allow` is something else, or the model is not of transformers.

    Example:
        >>> print(accelerate_trainer(trainer))  # doctest: +SKIP
    """
    if allow not in ("exact", "rounding"):
        raise RecipeError(f"allow: {quote_value(allow)}: must be exact or rounding")
    assert trainer.model is not None
    model = find_core_model(trainer.model)
    applied: dict[str, str] = {}
    left: dict[str, str] = {}
    record = applied_to(trainer.model)
    if record.settings:
        raise RecipeError("accelerate_trainer: was called for this trainer before; call it once")
    settings = record.settings
    changes: dict[str, Callable[[], str]] = {
        "attention": lambda: _change_attention(trainer, model),
        "fused_operators": lambda: _fuse_operators(trainer, model, allow, settings),
        "chunked_loss": lambda: _chunk_loss(trainer, model, settings),
        "activation_checkpointing": lambda: _change_checkpointing(trainer, model, settings),
        "optimizer": lambda: _change_optimizer(trainer),
        # After the loss: with a buffer of which a part is used, all of it would become resident.
        "heap": lambda: _use_heap(trainer, model),
        "micro_batch": lambda: _StepDown(trainer).install(),
    }
    for name, change in changes.items():
        try:
            applied[name] = change()
        except _Left as reason:
            left[name] = str(reason)
    return Acceleration(applied, left)


def _use_heap(trainer: Trainer, model: PreTrainedModel) -> str:
    if trainer.args.device.type != "cpu":
        raise _Left("is for tensors of a CPU")
    assert trainer.model is not None
    narrow = applied_to(trainer.model).narrow_tile
    if _has_trl_head(trainer) and not narrow and model.get_input_embeddings().weight.shape[0] < TILE[1]:
        raise _Left("TRL's buffer of logits is wider than the vocabulary, and would be resident as a whole")
    if why := install_heap():
        raise _Left(why)
    return "freed memory is reused without holes"


def _require_whole_weights(trainer: Trainer) -> None:
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise _Left("FSDP and DeepSpeed shard the weights, which this change reads")


def _change_attention(trainer: Trainer, model: PreTrainedModel) -> str:
    from preheat.techniques.efficient_attention import convert_model_to_efficient_attention

    assert trainer.model is not None
    config = model.config
    before = str(config._attn_implementation)
    if getattr(config.get_text_config(), "attention_dropout", 0.0):
        raise _Left("its dropout needs all scores")
    texts = []
    if before == "eager" or (before == "sdpa" and trainer.args.device.type == "cpu"):

        def convert() -> None:
            try:
                convert_model_to_efficient_attention(model)
            except ValueError as error:
                raise _Left(str(error)) from None

        _try_change(trainer, model, convert, undo=lambda: model.set_attn_implementation(before))
        texts.append(f"preheat's kernels in place of {before}")
    if _drop_padding_masks(model):
        applied_to(trainer.model).drops_padding_masks = True
        texts.append("no mask for rows that are padded on the right")
    if not texts:
        raise _Left(f"{before} is a fused kernel already")
    return "; ".join(texts)


def _drop_padding_masks(model: PreTrainedModel) -> bool:
    """Lets causal models compute batches that are padded on the right without a mask."""
    from preheat.models import moe
    from preheat.models.token_mixers import find_recurrent_mixers

    text = model.config.get_text_config()
    # Experts and recurrent layers compute on padding too.
    parts = hf.find_anatomy(model)
    if moe.sizes_of(text)[0] or any(find_recurrent_mixers(layer) for layer in parts.layers):
        return False
    if model.config.is_encoder_decoder or model.config is not text:
        return False

    def drop(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        # Packed rows and caches read positions that a mask decides.
        plain = kwargs.get("past_key_values") is None and kwargs.get("position_ids") is None
        if plain and not kwargs.get("use_cache") and torch.is_tensor(mask) and mask.ndim == 2 and _is_right(mask):
            kwargs = {**kwargs, "attention_mask": None}
        return args, kwargs

    parts.base.register_forward_pre_hook(drop, with_kwargs=True)
    return True


def _is_right(mask: Tensor) -> bool:
    """Returns True if every row of a padding mask is ones, then zeros."""
    return bool((mask[:, 1:] <= mask[:, :-1]).all()) and bool(mask[:, 0].all())


def _fuse_operators(trainer: Trainer, model: PreTrainedModel, allow: Allowed, settings: list[str]) -> str:
    from preheat.models.kernel_swap import KERNEL_FAMILIES
    from preheat.techniques.fused_operators import fuse_operators

    _require_whole_weights(trainer)
    args, kind = trainer.args, trainer.args.device.type
    if args.use_liger_kernel:
        raise _Left("Liger's kernels are in use")
    if args.torch_compile:
        raise _Left("the compiler fuses them")
    if model.config.model_type not in KERNEL_FAMILIES:
        raise _Left(f"is for {', '.join(KERNEL_FAMILIES)}, not {model.config.model_type}")
    if kind == "cpu" and find_compiler() is None:
        raise _Left("a CPU needs a C++ compiler for them")
    if allow == "exact" and (args.bf16 or args.fp16):
        raise _Left('under autocast norms round to half precision sooner; allow="rounding"')
    counts: dict[str, int] = {}
    _try_change(trainer, model, lambda: counts.update(fuse_operators(model, rotary=True, device=kind)))
    settings.append("techniques.fused_operators.adapters=false")
    return ", ".join(f"{count} {what}" for what, count in counts.items()) + " save only their inputs"


def _chunk_loss(trainer: Trainer, model: PreTrainedModel, settings: list[str]) -> str:
    from transformers.loss.loss_utils import ForCausalLMLoss

    _require_whole_weights(trainer)
    if _has_trl_head(trainer):
        return _narrow_tile(trainer, model)
    if trainer.args.use_liger_kernel:
        raise _Left("Liger's kernel computes it")
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        raise _Left("the trainer's own loss needs all logits")
    text: Any = model.config.get_text_config()
    if getattr(model, "loss_function", None) is not ForCausalLMLoss or model.config.is_encoder_decoder:
        raise _Left(f"{type(model).__name__} has another loss than that of causal language models")
    if model.config is not text:
        raise _Left("the model reads images too")
    if getattr(text, "final_logit_softcapping", None) or hf.logit_multiplier(text) != 1.0:
        raise _Left(f"{text.model_type} scales or caps its logits")
    if getattr(text, "output_router_logits", False):
        raise _Left("the model adds a loss on its router")
    head = hf.find_anatomy(model).head
    if not isinstance(head, torch.nn.Linear):  # under an adapter, or quantized
        raise _Left("the head is no plain linear layer")
    rows = _ROWS[trainer.args.device.type]
    _try_change(trainer, model, lambda: _replace_loss(model, rows))
    settings.append("techniques.chunked_loss={}")
    return f"head and loss {rows} positions at a time, without all logits"


def _narrow_tile(trainer: Trainer, model: PreTrainedModel) -> str:
    """Gives TRL's loss, which is computed in chunks, a buffer no wider than the vocabulary."""
    vocabulary, name = model.get_input_embeddings().weight.shape[0], "_CHUNKED_LOGPROB_CHUNK_SIZE"
    if vocabulary >= TILE[1]:
        raise _Left("TRL's trainers compute the loss in chunks already")
    bound = vars(model).get("forward")
    plain: Any = getattr(bound, "__func__", None)
    if plain is None or name not in plain.__code__.co_names:
        raise _Left("TRL's trainers compute the loss in chunks already, in this version with another buffer")
    # The same code with other globals: rebinding the name in TRL would change every model of this process.
    copy = types.FunctionType(
        plain.__code__, plain.__globals__ | {name: vocabulary}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    functools.update_wrapper(copy, plain)
    copy.__wrapped__ = plain.__wrapped__  # type: ignore[attr-defined]  # the signature that the trainer reads
    _try_change(trainer, model, lambda: setattr(model, "forward", types.MethodType(copy, model)))
    assert trainer.model is not None
    applied_to(trainer.model).narrow_tile = True
    return f"TRL's chunks, in a buffer of {vocabulary:,} columns instead of {TILE[1]:,}"


def _has_trl_head(trainer: Trainer) -> bool:
    return any(kind.__module__.partition(".")[0] == "trl" for kind in type(trainer).__mro__)


def _replace_loss(model: PreTrainedModel, rows: int) -> None:
    """Makes a model compute its loss in chunks where gradients are wanted; evaluation still gets its logits."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from preheat.ops.losses.cross_entropy import IGNORED, CrossEntropy, sum_chunked_loss

    plain, parts = model.forward, hf.find_anatomy(model)

    @functools.wraps(plain)  # the trainer reads the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if args or labels is None or not torch.is_grad_enabled() or kwargs.get("logits_to_keep"):
            return plain(*args, **kwargs)
        del kwargs["labels"]
        count, shifted = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        kwargs.pop("logits_to_keep", None)
        outputs = parts.base(**kwargs | {"return_dict": True})
        hidden = outputs.last_hidden_state  # [rows, length, width]
        if shifted is None:
            shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        total = sum_chunked_loss(
            hidden, parts.head, CrossEntropy(), shifted.contiguous(), rows=rows, cuda=hidden.is_cuda
        )
        if count is None:
            count = (shifted != IGNORED).sum()
        return CausalLMOutputWithPast(
            loss=total / count,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    model.forward = forward  # type: ignore[method-assign]


def _change_checkpointing(trainer: Trainer, model: PreTrainedModel, settings: list[str]) -> str:
    from preheat.techniques.activation_checkpointing import checkpoint_layers

    _require_whole_weights(trainer)
    args = trainer.args
    if args.torch_compile:
        raise _Left("the compiler chooses what is kept")
    off = ["techniques.activation_checkpointing.mode=none"]
    selective = ["techniques.activation_checkpointing.mode=selective"]
    # The trainer's own arguments say "full"; what is planned replaces that.
    was = bool(args.activation_checkpointing)
    if was:
        if not (kept := _plan_with(trainer, [*settings, *selective])).has_room:
            raise _Left(f"keeping results of matmuls would take {format_memory(kept.peak_gib)}: layers are recomputed")
        chosen, keep = selective, "products"
    else:
        if (now := _plan_with(trainer, [*settings, *off])).has_room:
            raise _Left(f"the run fits without recomputation ({format_memory(now.peak_gib)})")
        chosen, keep = selective, "products"
        if not _plan_with(trainer, [*settings, *selective]).has_room:
            chosen, keep = ["techniques.activation_checkpointing={}"], "inputs"

    def set_arguments(on: bool) -> None:
        args.activation_checkpointing = args.gradient_checkpointing = on  # the second is its former name

    def change() -> None:
        set_arguments(False)
        model.activation_checkpointing_disable()
        checkpoint_layers(hf.find_anatomy(model).blocks, keep="products" if keep == "products" else "inputs")

    _try_change(trainer, model, change, undo=lambda: set_arguments(was))
    settings += chosen
    kinds = {"products": "results of matmuls and attention are kept", "inputs": "layers keep their inputs only"}
    return f"{kinds[keep]}, the rest is recomputed"


def _plan_with(trainer: Trainer, settings: list[str]) -> Plan:
    """Plans the trainer's run with settings of a recipe.

    Raises:
        _Left: it cannot be planned.
    """
    assert trainer.model is not None
    try:
        with torch.random.fork_rng(devices=[]):  # samplers and collators may draw from it
            batch = find_largest_micro_batch(trainer)
        loop = read_trainer(trainer.args, trainer.model, batch=batch, max_steps=1, applied=settings)
        return predict_loop(loop, trainer.args.device.type, count_tensor_bytes(trainer.model))[1]
    except PreheatError as error:
        raise _Left(f"the run cannot be planned: {error}") from None


def _change_optimizer(trainer: Trainer) -> str:
    from transformers.training_args import OptimizerNames

    name = OptimizerNames(trainer.args.optim)
    if trainer.optimizer is not None:
        raise _Left("the trainer was given its optimizer")
    if name is not OptimizerNames.ADAMW_TORCH:
        raise _Left(f"{name.value} is {'fused already' if name is OptimizerNames.ADAMW_TORCH_FUSED else 'kept'}")
    trainer.args.optim = OptimizerNames.ADAMW_TORCH_FUSED
    return "AdamW as one fused operator"


def _try_change(
    trainer: Trainer, model: PreTrainedModel, change: Callable[[], None], undo: Callable[[], object] = lambda: None
) -> None:
    """Makes a change, and takes it back if loss or gradients of a few tokens differ.

    Raises:
        _Left: they do.
    """
    forwards = {module: vars(module).get("forward") for module in model.modules()}
    before = _compute_tried(trainer, model)
    change()
    after = _compute_tried(trainer, model)
    off = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(after, before, strict=True))
    if off <= _TOLERATED.get(model.dtype, 1e-1):
        return
    undo()
    for module, forward in forwards.items():
        if forward is not None:
            module.forward = forward  # type: ignore[method-assign]
        elif "forward" in vars(module):
            del module.forward
    raise _Left(f"loss or gradients of a trial differ by {off:.1%} with it")


def _compute_tried(trainer: Trainer, model: PreTrainedModel) -> list[Tensor]:
    """Returns the loss of a few tokens, and its gradients with respect to the first and the last trained weight."""
    size = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(size, (1, _TOKENS), generator=generator).to(model.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    chosen = [trained[0], trained[-1]] if len(trained) > 1 else trained
    training = model.training
    model.eval()  # without dropout
    try:
        with preserve_generators(), trainer.compute_loss_context_manager():
            loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens, use_cache=False).loss
            gradients = torch.autograd.grad(loss, chosen, allow_unused=True)
    finally:
        model.train(training)
    return [loss.detach().float(), *(torch.zeros(()) if g is None else g.float() for g in gradients)]


class _StepDown:
    """Repeats a step with smaller micro-batches after an out-of-memory error."""

    def __init__(self, trainer: Trainer):
        assert trainer.model is not None
        self.trainer, self.model, self.parts = trainer, trainer.model, 1
        self.plain: Callable[..., Tensor] = trainer.training_step
        self.step = -1
        self.done: list[tuple[nn.Module, Any, tuple[Any, ...], dict[str, Any]]] = []
        """Micro-batches of this step whose gradients are added already."""

    def install(self) -> str:
        trainer = self.trainer
        if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
            raise _Left("several processes must agree on their micro-batches")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise _Left("FSDP and DeepSpeed count micro-batches themselves")
        text: Any = find_core_model(self.model).config.get_text_config()
        if getattr(text, "output_router_logits", False):
            raise _Left("the loss on the router is a mean over the micro-batch")
        trainer.training_step = self.run  # type: ignore[method-assign]
        return "halved at an out-of-memory error, with the same sums of losses and gradients"

    def run(self, model: nn.Module, inputs: dict[str, Any], *more: Any, **options: Any) -> Tensor:
        """A micro-batch of the trainer, in as many parts as fit."""
        if self.step != self.trainer.state.global_step:
            self.step, self.done = self.trainer.state.global_step, []
        while True:
            try:
                loss = self._run_in_parts(model, inputs, *more, **options)
                break
            except (MemoryError, RuntimeError) as error:
                if not is_oom(error) or not self._can_split(inputs, more, options):
                    raise
                traceback.clear_frames(error.__traceback__)
                message = str(error)
            # Outside of the handler, whose traceback keeps tensors alive.
            self._restart(model, message)
        self.done.append((model, inputs, more, options))
        return loss

    def _can_split(self, inputs: Mapping[str, Any], more: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        rows = inputs["input_ids"].shape[0] // (2 if is_preference(self.trainer) else 1)
        # A mean over the micro-batch's tokens is no sum of its parts' means.
        count = options.get("num_items_in_batch", more[0] if more else None)
        return rows >= 2 * self.parts and (is_preference(self.trainer) or count is not None)

    def _restart(self, model: nn.Module, message: str) -> None:
        """Halves the micro-batch, and adds the gradients of this step's earlier micro-batches again."""
        self.parts *= 2
        model.zero_grad()
        gc.collect()
        release_unused(self.trainer.args.device.type)
        step = self.trainer.state.global_step
        size = self.trainer.args.train_batch_size
        rows, was = max(size // self.parts, 1), max(2 * size // self.parts, 1)
        why = f"out of memory: {message.splitlines()[0][:160] if message else 'no message'}"
        _log.warning("step %d: micro-batches of %d rows instead of %d (%s)", step + 1, rows, was, why)
        for listener in applied_to(self.model).listeners:
            listener(MicroBatchSize(step=step, rows=rows, was=was, why=why))
        for earlier, inputs, more, options in self.done:
            self._run_in_parts(earlier, inputs, *more, **options)

    def _run_in_parts(self, model: nn.Module, inputs: dict[str, Any], *more: Any, **options: Any) -> Tensor:
        pairs = is_preference(self.trainer)
        parts = None if self.parts == 1 else split_micro_batch(inputs, self.parts, pairs=pairs)
        if parts is None:
            # A copy: losses take labels out of their inputs, which a repetition needs.
            return self.plain(model, dict(inputs), *more, **options)
        losses = []
        for part, share in parts:
            if pairs:
                losses.append(self._run_weighted(share, model, part, *more, **options))
            else:
                losses.append(self.plain(model, part, *more, **options))
        return torch.stack(losses).sum()

    def _run_weighted(
        self, share: float, model: nn.Module, inputs: dict[str, Any], *more: Any, **options: Any
    ) -> Tensor:
        """Runs part of a micro-batch whose loss is the mean over its rows."""
        trainer = self.trainer
        compute = trainer.compute_loss
        own = vars(trainer).get("compute_loss")

        def compute_share(*args: Any, **kwargs: Any) -> Any:
            loss: Any = compute(*args, **kwargs)
            return (loss[0] * share, loss[1]) if isinstance(loss, tuple) else loss * share

        trainer.compute_loss = compute_share  # type: ignore[method-assign, assignment]
        try:
            return self.plain(model, inputs, *more, **options)
        finally:
            if own is None:
                del trainer.compute_loss  # type: ignore[misc]
            else:
                trainer.compute_loss = own
