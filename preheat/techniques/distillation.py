"""Distillation: trains a student on a larger teacher's next-token distributions in addition to the labels.

What: the loss is (1 - mixture) times the labels' cross entropy plus mixture times the divergence between the teacher's
and the student's distributions, both at a temperature. `hidden` adds the distance between their hidden states, through
a linear map that is trained along and then discarded. With chunked_loss, neither model's full logits are in memory. The
teacher is a Hugging Face folder: frozen, included in the plan, never in a checkpoint, and sharded under fsdp like the
student. With `cache` it runs once: a first pass writes its top tokens at every position to disk, and training reads
them by sequence. Evaluation measures the labels' loss only. With `on_policy` the student generates some of the answers
itself and the teacher scores them, which trains it on the texts that it produces at inference. A teacher with another
tokenizer is rejected unless `pieces: common` is chosen: each model tokenizes the text itself, and distributions over
their shared tokens are compared at aligned byte offsets; elsewhere only the labels count.
Helps: a small model reaches a lower loss from the same tokens, because a distribution carries more information than one
token.
Hurts: the teacher's forward pass costs about a third of training a model of its size; a teacher that is bad on the data
teaches its errors; forward divergence spreads a very small student over all of the teacher's modes; `on_policy` takes
the time to generate.
Source: Hinton et al. 2015 (arXiv:1503.02531); reverse divergence: Gu et al. 2023, MiniLLM (arXiv:2306.08543); hidden
states: Romero et al. 2014, FitNets (arXiv:1412.6550); the student's own texts: Agarwal et al. 2023, GKD
(arXiv:2306.13649); initialization from the teacher's layers: Sanh et al. 2019, DistilBERT (arXiv:1910.01108); other
tokenizers: see `preheat.models.distillation.tokenizer_alignment`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from preheat.core import Batch, Build, Change, Context, LossSum, Numerics, Order, Slot, Stage, Tag, Technique, Trials
from preheat.core.run_records import Notice
from preheat.core.units import format_bytes
from preheat.errors import PreheatError, RunError
from preheat.recipe import Bound, Fraction, NonNegative, Positive

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from preheat.core.json_types import JsonObject
    from preheat.data.packing import Rows
    from preheat.data.row_cache import RowCache
    from preheat.models.distillation.on_policy import OnPolicy
    from preheat.models.distillation.teacher import Teacher
    from preheat.models.distillation.tokenizer_alignment import TokenAligner
    from preheat.ops.losses.distillation import CommonHead, Distilled, TeacherHead

__all__ = ["Distillation", "distillation_loss", "hidden_distance"]


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    *,
    divergence: Literal["forward", "reverse"] = "forward",
    mixture: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """Returns the losses [n] of logits [n, vocabulary] against labels [n] (-100: ignored) and a teacher's logits.

    Differentiable, for custom training loops.

    Args:
        divergence: forward: KL(teacher || student); reverse: KL(student || teacher).
        mixture, temperature: as in `preheat.ops.losses.distillation.Distilled`.

    Example:
        >>> import torch
        >>> distillation_loss(torch.zeros(1, 2), torch.tensor([[0.0, 2.0]]), torch.tensor([1]), mixture=1.0)
        tensor([0.3278])
    """
    from preheat.ops.losses.distillation import Distilled

    # The head is the identity: the third argument holds the teacher's logits themselves. [n, vocabulary]
    row_loss = Distilled(lambda given: given, direction=divergence, mixture=mixture, temperature=temperature)
    return row_loss(student, labels, teacher.detach())


def hidden_distance(states: Tensor, teacher: Tensor) -> Tensor:
    """Returns the relative squared distance ||a - b||² / ||b||² of hidden states [..., width] per position, [...].

    Example:
        >>> import torch
        >>> hidden_distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
        tensor([0.2500])
    """
    from preheat.ops.losses.distillation import distance

    return distance(states, teacher)


@dataclass(frozen=True, kw_only=True)
class Distillation(Technique):
    # After adapters and precision are applied to the student, so that they affect neither the teacher nor the discarded
    # maps.
    stage: ClassVar[Stage] = Stage.PIPELINE_SPLIT
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"divergence": "reverse", "temperature": 2.0},
            {"hidden": 0.05, "matched": 2},
        ),
        recipe=(
            "techniques.distillation.teacher={teacher}",
            "data.tokenizer={teacher}",
        ),
        # Half of log 96, the cross entropy of a new model; two new models hardly diverge.
        first_loss={None: 0.5 * math.log(96)},
    )
    unsupported_for_images: ClassVar[str] = "reads sequences without their images so far; leave it out"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OBJECTIVE, Slot.ROW_LOSS})
    # Only the last pipeline stage has the metrics; a tensor-parallel head has only a shard of the logits.
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.PIPELINE_STAGES, Tag.TENSOR_PARALLEL})
    training_only: ClassVar[bool] = True

    teacher: str = ""
    """A Hugging Face folder: the model to learn from. Export a run first: preheat export RUN."""
    pieces: Literal["same", "common"] = "same"
    """same: the teacher has the student's tokenizer; common: it has another one, and the `top_k` likeliest of the
    tokens in both vocabularies are compared at positions where both have read the same text. A plan assumes that it
    splits text into as many tokens as the student."""
    divergence: Literal["forward", "reverse"] = "forward"
    """forward: KL(teacher || student), covers everything that the teacher considers likely; reverse: KL(student ||
    teacher), concentrates on its likeliest tokens."""
    temperature: Positive = 1.0
    """Both models' logits are divided by it; above 1, unlikely tokens count for more. The divergence is multiplied by
    its square."""
    mixture: Fraction = 0.5
    """Weight of the teacher in the loss; the labels have the rest."""
    hidden: NonNegative = 0.0
    """Weight of the relative squared distance of hidden states, added to the loss; 0: hidden states are ignored."""
    matched: Annotated[int, Bound(1, 4)] = 1
    """With `hidden`: number of layers, evenly spaced over the depth, whose states are compared; 1: the last hidden
    states only."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the teacher's weights; auto: bf16 if the student computes in bf16."""
    layers: Literal["own", "spread"] = "own"
    """spread: initializes a student that has fewer layers than the teacher (model.path: the teacher, model.config:
    {num_hidden_layers: N}) from layers evenly spaced over the teacher's, including the first and the last; own: from
    its own weights, which in such a student are the first layers."""
    cache: str | None = None
    """A folder for the teacher's likeliest tokens at every position: filled in a first pass (and if sequences are
    missing), read afterwards, so that the teacher is not in memory during training."""
    top_k: Annotated[int, Bound(1)] = 32
    """With `cache` or `pieces: common`: number of tokens per position; all others count together."""
    on_policy: Fraction = 0.0
    """Fraction of the sequences in which the student generates the answers itself (the second half of plain text) by
    sampling, and learns there from the teacher only: it is corrected on its own outputs. A plan does not include the
    time and the KV cache of this generation."""

    def check(self, context: Context) -> list[str]:
        from preheat.data.tokenizer import describe_vocabulary_mismatch
        from preheat.models import configs, hf
        from preheat.models.distillation import teacher

        recipe, model = context.recipe, context.model
        if not self.teacher:
            return ["teacher: is not stated; name the Hugging Face folder of the model to learn from"]
        try:
            teacher_facts = hf.read_facts(teacher.read_config(Path(self.teacher), recipe.batch.seq_len))
            # A tokenizer that is trained on the data has no folder yet: `own` is then None.
            own = recipe.data.tokenizer or configs.find_tokenizer_folder(recipe)
            mismatch = describe_vocabulary_mismatch(own, self.teacher, recipe.model.add_tokens)
            problems = (
                [mismatch] if mismatch and self.pieces == "same" else self._find_tokenizer_problems(own, mismatch)
            )
        except PreheatError as error:
            return [str(error)]
        # A teacher may have more rows than the student (padding of the vocabulary); fewer leave tokens without a logit.
        if not mismatch and model.vocabulary > teacher_facts.vocabulary:
            problems.append(
                f"teacher: its head has {teacher_facts.vocabulary:,} rows and the student's {model.vocabulary:,}, so "
                f"it has no logits for some of them; set model.vocab_size: {teacher_facts.vocabulary} for a new "
                "student, or take another teacher"
            )
        if not self.mixture and not self.hidden and not self.on_policy:
            problems.append(
                "mixture: with 0, and without hidden, the teacher has no effect; use 0.5, or leave distillation out"
            )
        # Adapters start as the base, so a student with one still begins as its teacher.
        changed = recipe.model.config or any(
            t.stage < Stage.KERNEL and t.stage != Stage.ADAPT for t in recipe.techniques.values()
        )
        # The divergence between a model and itself is 0, and so is its gradient: no step would change anything.
        if (
            self.mixture == 1
            and not self.hidden
            and not changed
            and teacher.is_read_from_teacher(recipe, Path(self.teacher))
        ):
            problems.append(
                "teacher: is the model that the student starts as, and the labels have no weight (mixture: 1), so "
                "there is nothing to learn; name a larger teacher, change the student, or lower mixture"
            )
        fewest = min(model.layers, teacher_facts.layers)
        if self.matched > fewest:
            problems.append(
                f"matched: {self.matched} layers, but the shallower model has {fewest}; use at most {fewest}"
            )
        if self.matched > 1 and not self.hidden:
            problems.append(
                "matched: selects the hidden states to compare, and hidden is 0; set hidden: 0.1, or leave matched out"
            )
        if self.layers == "spread":
            problems += teacher.find_spacing_problems(recipe, Path(self.teacher), model.layers, teacher_facts.layers)
        cached, writes, common = self.cache is not None, self.on_policy > 0, self.pieces == "common"
        return problems + teacher.find_row_problems(
            context, cached=cached, hidden=self.hidden > 0, writes=writes, common=common
        )

    def _find_tokenizer_problems(self, own: str | None, mismatch: str | None) -> list[str]:
        if self.pieces == "same":
            return []
        if own is None:
            return [
                "pieces: common compares two tokenizers, and the student's is trained "
                "on the data; set data.tokenizer to a folder that has it"
            ]
        if mismatch is None:
            return [
                "pieces: common is for a teacher with another tokenizer, and this one has the student's; leave it out"
            ]
        unsupported = [
            name
            for name, value in (("hidden", self.hidden), ("cache", self.cache), ("on_policy", self.on_policy))
            if value
        ]
        # Hidden states and cached rows are aligned by position, which only a common tokenizer makes the same text.
        return [
            f"{name}: does not support other tokens (pieces: common); leave it out, or take a teacher with the "
            "student's tokenizer"
            for name in unsupported
        ]

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.models import hf
        from preheat.models.distillation import teacher as teachers
        from preheat.models.weights import WeightSource
        from preheat.ops.attention.blockwise import attend_blockwise
        from preheat.ops.losses.cross_entropy import CrossEntropy
        from preheat.ops.losses.distillation import compute_means

        folder = Path(self.teacher)
        config = teachers.read_config(folder, build.recipe.batch.seq_len)
        # The tags are complete before the first technique applies, so those of later stages count too.
        bf16 = self.precision == "bf16" or (self.precision == "auto" and Tag.BF16_COMPUTE in build.tags)
        # Kernel for a teacher with windows or capped scores, which the student's own kernel may not support.
        teacher = teachers.Teacher(
            build, teachers.build_teacher(config, bf16=bf16), hf.read_facts(config), attend_blockwise
        )
        # A source of its own: checkpoints leave the teacher out, and a resumed run must find the same folder.
        build.sources["teacher"] = WeightSource(folder, knob=f"techniques.{self.name()}.teacher")
        count = sum(p.numel() for p in teacher.model.parameters())
        summary = (
            f"{self.divergence} divergence at temperature {self.temperature:g} from a teacher of "
            f"{count:,} parameters in {'bf16' if bf16 else 'fp32'}, {self.mixture:.0%} of the loss"
        )
        matcher = self._build_aligner(build, teacher) if self.pieces == "common" else None
        if matcher:
            summary += f", compared over {len(matcher.common[0]):,} tokens in both vocabularies"
        if self.hidden:
            # The maps belong to the student, so that they are trained and sharded with it; an export leaves them out.
            maps = teachers.add_maps(part, teacher.facts.width, self.matched, build.weights)
            summary += f"; hidden states of {len(maps)} layer{'s' * (len(maps) > 1)} x {self.hidden:g}"
        if self.layers == "spread":
            summary += (
                "; starts from the teacher's layers "
                f"{teachers.init_from_layers(part, build.weights, teacher.facts.layers)}"
            )
        build.claim(Slot.ROW_LOSS, CrossEntropy(), self.name())  # for evaluation; a training step passes its own
        if self.cache is None:
            # As a part of the build, the teacher is materialized with the student, and sharded under fsdp.
            build.parts["teacher"] = [teacher.model]
            training_loss = (
                self._build_common_loss(teacher, matcher) if matcher else self._build_live_loss(part, teacher)
            )
            if self.on_policy:
                # At MOVE, behind the copy to the device: the student generates there.
                build.hooks.transforms.append((Order.MOVE, self._build_on_policy(build, part)))
                summary += f"; in {self.on_policy:.0%} of the sequences generated by the student"
        else:
            # The teacher is no part of the build here: it is in memory during the first pass only.
            teacher_cache = _TeacherCache(teacher, part, Path(self.cache), top=self.top_k, temperature=self.temperature)
            build.hooks.dataset_passes.append(teacher_cache)
            # At PACK: the copy to the device, which follows, includes the attached tensors.
            build.hooks.transforms.append((Order.PACK, teacher_cache.attach))
            training_loss = self._compute_cached_loss
            summary += (
                f", whose {teacher_cache.top} likeliest tokens per position are read from {self.cache}, "
                f"{teacher_cache.bytes:,} bytes per position"
            )

        def objective(batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]) -> LossSum:
            # Evaluation reports the labels' loss, which is comparable with other runs and needs no teacher.
            if not part.training:
                return LossSum(over_logits(hidden(batch), batch.labels), batch.weight)
            return training_loss(batch, hidden, over_logits)

        build.claim(Slot.OBJECTIVE, objective, self.name())
        build.loss.scores = compute_means
        return Change(summary, count)

    def _build_row_loss(self, head: TeacherHead | CommonHead | None, *, partly: bool = False) -> Distilled:
        from preheat.ops.losses.distillation import Distilled

        # `written` and `partly` announce a last aligned tensor, by which positions differ in their weights.
        settings: JsonObject = {"direction": self.divergence, "temperature": self.temperature, "mixture": self.mixture}
        return Distilled(head, **settings, written=self.on_policy > 0, partly=partly)

    def _build_on_policy(self, build: Build, part: nn.Module) -> OnPolicy:
        from preheat.data.tokenizer import load_tokenizer
        from preheat.models import configs
        from preheat.models.distillation import on_policy
        from preheat.models.generation import generate

        recipe = build.recipe
        tokenizer = load_tokenizer(
            recipe.data.tokenizer or configs.find_tokenizer_folder(recipe) or self.teacher,
            add_tokens=recipe.model.add_tokens,
        )
        # Tokens that end an answer, by the tokenizer and the folder's generation settings.
        stop = generate.stop_tokens(tokenizer, build.weights.folder)
        return on_policy.OnPolicy(build, part, tokenizer, self.on_policy, stop)

    def _build_aligner(self, build: Build, teacher: Teacher) -> TokenAligner:
        from preheat.data.tokenizer import load_tokenizer, token_bytes
        from preheat.models import configs
        from preheat.models.distillation import tokenizer_alignment

        recipe = build.recipe
        own = recipe.data.tokenizer or configs.find_tokenizer_folder(recipe)  # not None: `check` requires it
        # Added tokens are the student's alone: the teacher has never seen them.
        both = (load_tokenizer(str(own), add_tokens=recipe.model.add_tokens), load_tokenizer(self.teacher))
        mine, theirs = (tokenizer_alignment.TokenizerView(t, token_bytes(t), t.eos_token_id) for t in both)
        return tokenizer_alignment.TokenAligner(mine, theirs, teacher.facts.positions)

    def _build_common_loss(self, teacher: Teacher, matcher: TokenAligner) -> Callable[..., LossSum]:
        """Returns the loss for a teacher with another tokenizer."""
        import torch

        from preheat.ops.losses.distillation import CommonHead

        # Ids of the common tokens in the student's and in the teacher's vocabulary, [common] each.
        own, theirs = (torch.tensor(n, device=teacher.build.torch_device) for n in matcher.common)

        def training_loss(
            batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]
        ) -> LossSum:
            # The same text in the teacher's tokens, and for each student position the teacher position that has read
            # the same bytes.
            other = matcher(batch)
            last, _ = teacher.read(other.batch)  # (rows, teacher's length, teacher's width)
            # (rows, length, teacher's width)
            states = last.gather(1, other.at.unsqueeze(-1).expand(-1, -1, last.shape[-1]))
            head = CommonHead(
                _find_teacher_head(teacher, last.dtype, same=False), own, theirs, self.top_k, self.temperature
            )
            # `other.known` is 0 at positions without a counterpart; there the label has all the weight.
            row_loss = self._build_row_loss(head, partly=True)
            total = over_logits(hidden(batch), batch.labels, states, other.known, row_loss=row_loss)
            return LossSum(total, batch.weight, row_loss.sums)

        return training_loss

    def _compute_cached_loss(
        self, batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]
    ) -> LossSum:
        """Computes the loss from the teacher's cached top tokens."""
        row_loss = self._build_row_loss(None)
        total = over_logits(hidden(batch), batch.labels, *batch.aligned, row_loss=row_loss)
        return LossSum(total, batch.weight, row_loss.sums)

    def _build_live_loss(self, part: PreTrainedModel, teacher: Teacher) -> Callable[..., LossSum]:
        """Returns the loss for a teacher that runs on each micro-batch.

        The teacher runs before the student, so that only its hidden states are in memory along with the student's.
        """
        from preheat.models.distillation import teacher as teachers
        from preheat.ops.losses.distillation import mapped_distance

        count = self.matched if self.hidden else 0

        def training_loss(
            batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]
        ) -> LossSum:
            # last: (rows, length, teacher's width); theirs: one such tensor per compared layer.
            last, theirs = teacher.read(batch, count)
            # One row loss per micro-batch: it accumulates the sums that become metrics.
            row_loss = self._build_row_loss(_find_teacher_head(teacher, last.dtype))
            states, own = teachers.capture_hidden(part, count, lambda: hidden(batch))
            total = over_logits(states, batch.labels, last, *batch.aligned, row_loss=row_loss)
            if not count:
                return LossSum(total, batch.weight, row_loss.sums)
            maps = part.get_submodule(teachers.MAPS)
            # A sum over trained positions, like the loss, so that the division by the batch's weight suits both.
            distance = mapped_distance(own, theirs, [m.weight for m in maps], batch.labels)
            return LossSum(
                total + self.hidden * distance, batch.weight, row_loss.sums | {"hidden_distance": distance.detach()}
            )

        return training_loss


def _find_teacher_head(teacher: Teacher, dtype: torch.dtype, *, same: bool = True) -> TeacherHead:
    """Returns the teacher's output head, gathered if sharded; limited to the student's vocabulary if `same`."""
    from preheat.models import hf
    from preheat.ops.distributed.dtensor_utils import full_tensor
    from preheat.ops.losses.distillation import TeacherHead

    # The head is used outside of its module's forward pass, so nothing else gathers a sharded weight.
    head: Any = hf.head(teacher.model)
    weight = full_tensor(head.weight.detach()).to(dtype)
    bias = full_tensor(head.bias.detach()).to(dtype) if head.bias is not None else None
    # A head with padded rows is cut to the student's vocabulary; one of another tokenizer needs all of its own.
    rows = teacher.build.model.vocabulary if same else len(weight)
    return TeacherHead(weight, rows, hf.softcap(teacher.model), bias)


class _TeacherCache:
    """The teacher's top tokens at every position of the rows, on disk: missing rows are computed before training."""

    ROWS = 512  # rows of logits at a time

    def __init__(self, teacher: Teacher, student: nn.Module, folder: Path, *, top: int, temperature: float):
        self.teacher, self.student, self.folder, self.temperature = teacher, student, folder, temperature
        vocabulary = teacher.build.model.vocabulary
        # At least one token stays outside of the top k, so that the remaining probability belongs to something.
        self.top = min(top, vocabulary - 1)
        # Log-probabilities are stored in fp16 (relative error 0.05 %); most vocabularies need no 32-bit token ids.
        self.kind = "uint16" if vocabulary <= 1 << 16 else "int32"
        # fp16 for the top tokens and the rest, then the tokens' ids.
        self.bytes = 2 * (self.top + 1) + (2 if self.kind == "uint16" else 4) * self.top
        self.rows: RowCache  # opened by the pass over the rows

    def __call__(self, rows: Rows, numbers: Iterable[int], progress: Callable[[str, float, float], None]) -> None:
        from preheat.data.row_cache import RowCache, hash_rows
        from preheat.data.sources import compute_digest
        from preheat.models.weights import materialize

        build, length = self.teacher.build, rows.length
        shapes = {"values": ((length, self.top + 1), "float16"), "indices": ((length, self.top), self.kind)}
        # All that decides the cached values: a folder that holds others is rejected.
        of = {
            "teacher": build.sources["teacher"].fingerprint(),
            "config": compute_digest((build.sources["teacher"].folder / "config.json").read_text(encoding="utf-8")),
            "precision": str(next(self.teacher.model.parameters()).dtype),
            "temperature": self.temperature,
            "top": self.top,
            "data": hash_rows(rows),
        }
        self.rows = RowCache(self.folder, rows=len(rows), of=of, arrays=shapes, knob="techniques.distillation.cache")
        missing = self.rows.find_missing(numbers)
        if not missing:
            return
        if build.mesh.world > 1:
            raise RunError(
                f"techniques.distillation.cache: {self.folder} lacks {len(missing):,} sequences, and several processes "
                "can only read it; train with one process until its first step, or leave cache out"
            )
        # Still on meta; materialized for this pass only.
        teacher = replace(self.teacher, model=copy.deepcopy(self.teacher.model))
        materialize(teacher.model, build.torch_device)
        build.sources["teacher"].fill(teacher.model, seed=0)
        # Micro-batches of full-length rows, as at the end of the run.
        micro = build.slot(Slot.BATCH_SHAPE)(1.0).micro
        self.rows.fill(
            rows, missing, lambda batch: self._find_top_tokens(teacher, batch), micro=micro, progress=progress
        )
        size = len(missing) * length * self.bytes
        build.state.events.append(
            Notice(message=f"the teacher read {len(missing):,} sequences: {format_bytes(size)} in {self.folder}")
        )

    def once(self, batch: Batch) -> None:
        from preheat.models.weights import materialize

        materialize(self.teacher.model, self.teacher.build.torch_device)
        self._find_top_tokens(self.teacher, batch)

    def _find_top_tokens(self, teacher: Teacher, batch: Batch) -> list[Tensor]:
        """Returns values [rows, length, top + 1] and indices [rows, length, top] of a batch, in the cache's dtypes."""
        import torch

        from preheat.ops.losses.distillation import top_tokens

        device = teacher.build.torch_device
        # The teacher computes in the student's contexts, e.g. under its autocast.
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for context in teacher.build.hooks.around_forward:
                stack.enter_context(context())
            last, _ = teacher.read(replace(batch, tokens=batch.tokens.to(device), positions=batch.positions.to(device)))
            head = _find_teacher_head(teacher, last.dtype)
            # [n, width] at a time: the logits of a whole micro-batch are never in memory.
            tops = [
                top_tokens(head(states), self.top, self.temperature) for states in last.flatten(0, 1).split(self.ROWS)
            ]
        values = torch.cat([f.values for f in tops]).to(torch.float16)
        indices = torch.cat([f.indices for f in tops]).to(getattr(torch, self.kind))
        # [rows * length, ...] back to [rows, length, ...].
        return [t.unflatten(0, batch.tokens.shape) for t in (values, indices)]

    def attach(self, batch: Batch) -> Batch:
        """Attaches the teacher's top tokens to a training batch; evaluation does not need them."""
        import torch
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        if not self.student.training:
            return batch
        if not is_in_torch_dispatch_mode():
            return replace(batch, aligned=self.rows.tensors_for(batch))
        shape = batch.tokens.shape  # a dry run has no data
        values = torch.empty(*shape, self.top + 1, dtype=torch.float16)
        return replace(batch, aligned=(values, torch.empty(*shape, self.top, dtype=getattr(torch, self.kind))))
