"""Distillation: a student learns from a larger teacher's probabilities for every next token, beside the labels.

What: the loss is (1 - mixture) times the labels' cross entropy and mixture times the divergence of the student's
probabilities from the teacher's, both at a temperature; `hidden` adds how far the student's hidden states, through a
linear map that is trained with it and thrown away, are from the teacher's. With chunked_loss neither's logits are ever
whole in memory. The teacher is a Hugging Face folder: frozen, planned for, never in a checkpoint, shared out under fsdp
as the student is. With `cache` it runs once: in a first pass its likeliest tokens at every place are written to disk,
and training reads them by row. An evaluation measures the labels alone, as any other run's does.
Helps: a small model reaches a lower loss from the same tokens, since a distribution says more than one token. Hurts:
the teacher's forward pass costs about a third of what training a model of its size does; a teacher that is bad on the
data teaches that; forward divergence spreads a very small student over all that the teacher can say. With `on_policy`
the student writes some of the answers itself and the teacher judges them, which trains it on the texts that it will
meet when it writes alone; that takes the time of writing them. A teacher with another tokenizer is refused unless
`pieces: common` is chosen: it reads the same text in its own pieces, and where both have read as much, what it says of
the pieces that both have is compared; elsewhere the labels count alone.
Source: Hinton et al. 2015 (arXiv:1503.02531); reverse divergence: Gu et al. 2023, MiniLLM (arXiv:2306.08543); hidden
states: Romero et al. 2014, FitNets (arXiv:1412.6550); the student's own texts: Agarwal et al. 2023, GKD
(arXiv:2306.13649); layers of the teacher to begin from: Sanh et al. 2019, DistilBERT (arXiv:1910.01108); other
tokenizers: as `preheat.models.distillation.tokenizer_alignment` says.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from preheat.core import Batch, Build, Change, Context, LossSum, Order, Slot, Stage, Tag, Technique, Trials
from preheat.errors import PreheatError, RunError
from preheat.recipe import Bound, NonNegative, Positive, Share

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.models.distillation.teacher import Teacher
    from preheat.models.distillation.tokenizer_alignment import TokenAligner

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
    """Losses [n] of logits [n, vocabulary] against labels [n] (-100: not trained) and a teacher's logits,
    differentiable: for a loop of your own.

    Args:
        divergence: forward: KL(teacher || student); reverse: KL(student || teacher).
        mixture: the teacher's share, as of `preheat.ops.losses.distillation.Distilled`; so the temperature.

    Example:
        >>> import torch
        >>> distillation_loss(torch.zeros(1, 2), torch.tensor([[0.0, 2.0]]), torch.tensor([1]), mixture=1.0)
        tensor([0.3278])
    """
    from preheat.ops.losses.distillation import Distilled

    row_loss = Distilled(lambda given: given, direction=divergence, mixture=mixture, temperature=temperature)
    return row_loss(student, labels, teacher.detach())


def hidden_distance(states: Tensor, teacher: Tensor) -> Tensor:
    """How far hidden states [..., width] are from the teacher's, ||a - b||² / ||b||² of each place, [...];
    differentiable.

    Example:
        >>> import torch
        >>> hidden_distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
        tensor([0.2500])
    """
    from preheat.ops.losses.distillation import distance

    return distance(states, teacher)


@dataclass(frozen=True, kw_only=True)
class Distillation(Technique):
    # After what makes the student what it is, so that its adapters and precision are not the teacher's, nor what is
    # thrown away in the end.
    stage: ClassVar[Stage] = Stage.SPLIT
    numerics: ClassVar[Any] = "different"
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"divergence": "reverse", "temperature": 2.0},
            {"hidden": 0.05, "matched": 2},
        ),
        recipe=(
            "techniques.distillation.teacher={teacher}",
            "data.tokenizer={teacher}",
        ),
        first_loss={None: 0.5 * math.log(96)},
    )
    unsupported_for_images: ClassVar[str] = "reads rows without their images so far; leave it out"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OBJECTIVE, Slot.ROW_LOSS})
    # Metrics that only the last stage of a pipeline knows; logits of which each device of a tensor-parallel head has a
    # part.
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.PIPELINE_STAGES, Tag.TENSOR_PARALLEL})
    training_only: ClassVar[bool] = True

    teacher: str = ""
    """A Hugging Face folder: the model to learn from. A run is exported first: preheat export RUN."""
    pieces: Literal["same", "common"] = "same"
    """same: the teacher has the student's tokenizer; common: it has another, and the `top` likeliest of the pieces that
    both have are compared at the places where both have read the same text. A plan takes it to cut text into as many
    pieces as the student."""
    divergence: Literal["forward", "reverse"] = "forward"
    """forward: KL(teacher || student), covers all that the teacher holds likely; reverse: KL(student || teacher), keeps
    to its likeliest."""
    temperature: Positive = 1.0
    """Both models' logits are divided by it; above 1 unlikely tokens count for more. The divergence is multiplied by
    its square."""
    mixture: Share = 0.5
    """Share of the teacher in the loss; the labels have the rest."""
    hidden: NonNegative = 0.0
    """Weight of the relative squared distance of hidden states, added to the loss; 0: they are left alone."""
    matched: Annotated[int, Bound(1, 4)] = 1
    """With `hidden`: at how many places, evenly spaced over the depth, states are compared; 1: the last hidden states
    alone."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the teacher's weights; auto: bf16 where the student computes in bf16."""
    layers: Literal["own", "spread"] = "own"
    """spread: a student with fewer layers of the teacher (model.path: the teacher, model.config: {num_hidden_layers:
    N}) begins from layers evenly spaced over all of them, the first and last among them; own: from its own weights,
    which in such a student are the first layers."""
    cache: str | None = None
    """A folder for the teacher's likeliest tokens at every place: made in a first pass (and where rows are missing),
    read afterwards, so that the teacher is not in memory while training."""
    top: Annotated[int, Bound(1)] = 32
    """With `cache` or `pieces: common`: so many tokens a place; all others count together."""
    on_policy: Share = 0.0
    """Share of the rows in which the student writes the answers itself (of plain text the second half), by its own
    probabilities, and learns there from the teacher alone: it is corrected where its own text leads it. A plan does not
    see the time and the cache of keys and values of this writing."""

    def check(self, context: Context) -> list[str]:
        from preheat.data.tokenizer import other_pieces
        from preheat.models import configs, hf
        from preheat.models.distillation import teacher

        recipe, model = context.recipe, context.model
        if not self.teacher:
            return ["teacher: is not stated; name the Hugging Face folder of the model to learn from"]
        try:
            teacher_facts = hf.facts(teacher.config_of(Path(self.teacher), recipe.batch.length))
            own = recipe.data.tokenizer or configs.tokenizer_folder(recipe)
            mismatch = other_pieces(own, self.teacher, recipe.model.add_tokens)
            problems = [mismatch] if mismatch and self.pieces == "same" else self._tokenizer_problems(own, mismatch)
        except PreheatError as error:
            return [str(error)]
        if not mismatch and model.vocabulary > teacher_facts.vocabulary:
            problems.append(
                f"teacher: its head has {teacher_facts.vocabulary:,} rows and the student's {model.vocabulary:,}, so "
                "it says nothing of some of them; "
                f"set model.vocabulary: {teacher_facts.vocabulary} for a new student, or take another teacher"
            )
        if not self.mixture and not self.hidden and not self.on_policy:
            problems.append(
                "mixture: with 0, and without hidden, the teacher counts for nothing; use 0.5, or leave distillation "
                "out"
            )
        changed = recipe.model.config or any(
            t.stage < Stage.KERNEL and t.stage != Stage.ADAPT for t in recipe.techniques.values()
        )
        if self.mixture == 1 and not self.hidden and not changed and teacher.reads_teacher(recipe, Path(self.teacher)):
            problems.append(
                "teacher: is the very model that the student begins as, and the labels count for nothing (mixture: 1), "
                "so there is nothing to "
                "learn; name a larger teacher, change the student, or lower mixture"
            )
        fewest = min(model.layers, teacher_facts.layers)
        if self.matched > fewest:
            problems.append(
                f"matched: {self.matched} places, but the shallower model has {fewest}; use at most {fewest}"
            )
        if self.matched > 1 and not self.hidden:
            problems.append(
                "matched: says which hidden states are compared, and hidden is 0; set hidden: 0.1, or leave matched out"
            )
        if self.layers == "spread":
            problems += teacher.spreading_problems(recipe, Path(self.teacher), model.layers, teacher_facts.layers)
        cached, writes, common = self.cache is not None, self.on_policy > 0, self.pieces == "common"
        return problems + teacher.rows_problems(
            context, cached=cached, hidden=self.hidden > 0, writes=writes, common=common
        )

    def _tokenizer_problems(self, own: str | None, mismatch: str | None) -> list[str]:
        if self.pieces == "same":
            return []
        if own is None:
            return [
                "pieces: common compares two tokenizers, and the student's is trained on the data; set data.tokenizer "
                "to a folder that has it"
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
        return [
            f"{name}: is not made for places of other pieces (pieces: common); leave it out, or take a teacher with "
            "the student's tokenizer"
            for name in unsupported
        ]

    def apply(self, build: Build, part: Any) -> Change:
        from preheat.models import hf
        from preheat.models.distillation import teacher as teachers
        from preheat.models.weights import WeightSource
        from preheat.ops.attention.blockwise import blocked_attention
        from preheat.ops.losses.cross_entropy import CrossEntropy
        from preheat.ops.losses.distillation import means

        folder = Path(self.teacher)
        config = teachers.config_of(folder, build.recipe.batch.length)
        bf16 = self.precision == "bf16" or (self.precision == "auto" and Tag.BF16_COMPUTE in build.tags)
        teacher = teachers.Teacher(
            build, teachers.build_teacher(config, bf16=bf16), hf.facts(config), blocked_attention
        )
        build.sources["teacher"] = WeightSource(folder, knob=f"techniques.{self.name()}.teacher")
        count = sum(p.numel() for p in teacher.model.parameters())
        summary = (
            f"{self.divergence} divergence at temperature {self.temperature:g} from a teacher of {count:,} parameters "
            "in "
            f"{'bf16' if bf16 else 'fp32'}, {self.mixture:.0%} of the loss"
        )
        matcher = self._matcher(build, teacher) if self.pieces == "common" else None
        if matcher:
            summary += f", compared over {len(matcher.common[0]):,} pieces that both have"
        if self.hidden:
            maps = teachers.add_maps(part, teacher.facts.width, self.matched, build.weights)
            summary += f"; hidden states at {len(maps)} place{'s' * (len(maps) > 1)} x {self.hidden:g}"
        if self.layers == "spread":
            summary += (
                "; begins from the teacher's layers "
                f"{teachers.init_from_layers(part, build.weights, teacher.facts.layers)}"
            )
        build.own(Slot.ROW_LOSS, CrossEntropy(), self.name())  # of an evaluation; a step states its own
        if self.cache is None:
            build.parts["teacher"] = [teacher.model]
            training_loss = self._common_loss(teacher, matcher) if matcher else self._live_loss(part, teacher)
            if self.on_policy:
                build.hooks.transforms.append((Order.MOVE, self._on_policy(build, part)))
                summary += f"; in {self.on_policy:.0%} of the rows of what the student writes itself"
        else:
            teacher_cache = _TeacherCache(teacher, part, Path(self.cache), top=self.top, temperature=self.temperature)
            build.hooks.dataset_passes.append(teacher_cache)
            build.hooks.transforms.append((Order.PACK, teacher_cache.beside))
            training_loss = self._cached_loss
            summary += (
                f", whose {teacher_cache.top} likeliest tokens a place are read from {self.cache}, "
                f"{teacher_cache.bytes:,} bytes a place"
            )

        def objective(batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]) -> LossSum:
            if not part.training:
                return LossSum(over_logits(hidden(batch), batch.labels), batch.weight)
            return training_loss(batch, hidden, over_logits)

        build.own(Slot.OBJECTIVE, objective, self.name())
        build.loss.scores = means
        return Change(summary, count)

    def _row_loss(self, head: Any, *, partly: bool = False) -> Any:
        from preheat.ops.losses.distillation import Distilled

        settings: Any = {"direction": self.divergence, "temperature": self.temperature, "mixture": self.mixture}
        return Distilled(head, **settings, written=self.on_policy > 0, partly=partly)

    def _on_policy(self, build: Build, part: Any) -> Any:
        from preheat.data.tokenizer import load_tokenizer
        from preheat.models import configs
        from preheat.models.distillation import on_policy
        from preheat.models.generation import generate

        recipe = build.recipe
        tokenizer = load_tokenizer(
            recipe.data.tokenizer or configs.tokenizer_folder(recipe) or self.teacher,
            add_tokens=recipe.model.add_tokens,
        )
        stop = generate.stop_tokens(tokenizer, build.weights.folder)
        return on_policy.OnPolicy(build, part, tokenizer, self.on_policy, stop)

    def _matcher(self, build: Build, teacher: Teacher) -> TokenAligner:
        from preheat.data.tokenizer import load_tokenizer, pieces_of
        from preheat.models import configs
        from preheat.models.distillation import tokenizer_alignment

        recipe = build.recipe
        own = recipe.data.tokenizer or configs.tokenizer_folder(recipe)  # there is one: `check` asks for it
        both = (load_tokenizer(str(own), add_tokens=recipe.model.add_tokens), load_tokenizer(self.teacher))
        mine, theirs = (tokenizer_alignment.TokenizerView(t, pieces_of(t), t.eos_token_id) for t in both)
        return tokenizer_alignment.TokenAligner(mine, theirs, teacher.facts.positions)

    def _common_loss(self, teacher: Teacher, matcher: TokenAligner) -> Callable[..., LossSum]:
        """The loss where the teacher reads the same text in pieces of its own."""
        import torch

        from preheat.ops.losses.distillation import CommonHead

        own, theirs = (torch.tensor(n, device=teacher.build.torch_device) for n in matcher.common)

        def training_loss(
            batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]
        ) -> LossSum:
            other = matcher(batch)
            last, _ = teacher.read(other.batch)
            states = last.gather(1, other.at.unsqueeze(-1).expand(-1, -1, last.shape[-1]))
            head = CommonHead(_head(teacher, last.dtype, same=False), own, theirs, self.top, self.temperature)
            row_loss = self._row_loss(head, partly=True)
            total = over_logits(hidden(batch), batch.labels, states, other.said, row_loss=row_loss)
            return LossSum(total, batch.weight, row_loss.sums)

        return training_loss

    def _cached_loss(
        self, batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]
    ) -> LossSum:
        """The loss where what the teacher said stands beside the tokens."""
        row_loss = self._row_loss(None)
        total = over_logits(hidden(batch), batch.labels, *batch.beside, row_loss=row_loss)
        return LossSum(total, batch.weight, row_loss.sums)

    def _live_loss(self, part: Any, teacher: Teacher) -> Callable[..., LossSum]:
        """The loss where the teacher reads each micro-batch too: before the student, so that only its hidden states
        stand beside the student's."""
        from preheat.models.distillation import teacher as teachers
        from preheat.ops.losses.distillation import mapped_distance

        count = self.matched if self.hidden else 0

        def training_loss(
            batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]
        ) -> LossSum:
            last, theirs = teacher.read(batch, count)
            row_loss = self._row_loss(_head(teacher, last.dtype))
            states, own = teachers.capture_hidden(part, count, lambda: hidden(batch))
            total = over_logits(states, batch.labels, last, *batch.beside, row_loss=row_loss)
            if not count:
                return LossSum(total, batch.weight, row_loss.sums)
            maps = part.get_submodule(teachers.MAPS)
            distance = mapped_distance(own, theirs, [m.weight for m in maps], batch.labels)
            return LossSum(
                total + self.hidden * distance, batch.weight, row_loss.sums | {"hidden_distance": distance.detach()}
            )

        return training_loss


def _head(teacher: Teacher, dtype: Any, *, same: bool = True) -> Any:
    """A teacher's head, whole where devices share it out; of a student with the same pieces those that it has."""
    from preheat.models import hf
    from preheat.ops.distributed.dtensor_utils import whole
    from preheat.ops.losses.distillation import TeacherHead

    weight: Any = hf.head(teacher.model).weight
    rows = teacher.build.model.vocabulary if same else len(weight)
    return TeacherHead(whole(weight.detach()).to(dtype), rows, hf.softcap(teacher.model))


class _TeacherCache:
    """What a teacher holds likeliest at every place of the rows, on disk: made before training where it is missing,
    read by row then."""

    ROWS = 512  # of logits at a time

    def __init__(self, teacher: Teacher, student: Any, folder: Path, *, top: int, temperature: float):
        self.teacher, self.student, self.folder, self.temperature = teacher, student, folder, temperature
        vocabulary = teacher.build.model.vocabulary
        self.top = min(top, vocabulary - 1)
        # Log-probabilities with 10 bits of fraction: rounded by half a thousandth of their size. Most numbers of tokens
        # need no 32 bits.
        self.kind = "uint16" if vocabulary <= 1 << 16 else "int32"
        self.bytes = 2 * (self.top + 1) + (2 if self.kind == "uint16" else 4) * self.top
        self.rows: Any = None

    def __call__(self, rows: Any, numbers: Iterable[int], progress: Callable[[str, float, float], None]) -> None:
        from preheat.data.row_cache import RowCache, content_of
        from preheat.data.sources import digest
        from preheat.models.weights import materialize

        build, length = self.teacher.build, rows.length
        shapes = {"values": ((length, self.top + 1), "float16"), "indices": ((length, self.top), self.kind)}
        of = {
            "teacher": build.sources["teacher"].fingerprint(),
            "config": digest((build.sources["teacher"].folder / "config.json").read_text(encoding="utf-8")),
            "precision": str(next(self.teacher.model.parameters()).dtype),
            "temperature": self.temperature,
            "top": self.top,
            "data": content_of(rows),
        }
        self.rows = RowCache(self.folder, rows=len(rows), of=of, arrays=shapes, knob="techniques.distillation.cache")
        missing = self.rows.missing(numbers)
        if not missing:
            return
        if build.mesh.world > 1:
            raise RunError(
                f"techniques.distillation.cache: {self.folder} lacks {len(missing):,} rows, and several processes only "
                "read it; train with one "
                "process until its first step, or leave cache out"
            )
        teacher = replace(
            self.teacher, model=copy.deepcopy(self.teacher.model)
        )  # on meta so far: it is here for this pass alone
        materialize(teacher.model, build.torch_device)
        build.sources["teacher"].fill(teacher.model, seed=0)
        micro = build.slot(Slot.BATCH_SHAPE)(1.0).micro
        self.rows.fill(rows, missing, lambda batch: self._likeliest(teacher, batch), micro=micro, progress=progress)
        size = len(missing) * length * self.bytes / 2**20
        build.state.events.append(
            {"kind": "notice", "words": f"the teacher read {len(missing):,} rows: {size:,.1f} MiB in {self.folder}"}
        )

    def once(self, batch: Batch) -> None:
        from preheat.models.weights import materialize

        materialize(self.teacher.model, self.teacher.build.torch_device)
        self._likeliest(self.teacher, batch)

    def _likeliest(self, teacher: Teacher, batch: Batch) -> list[Tensor]:
        """Values [rows, length, top + 1] and indices [rows, length, top] of a batch, as they are kept."""
        import torch

        from preheat.ops.losses.distillation import likeliest

        device = teacher.build.torch_device
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for context in teacher.build.hooks.around_forward:
                stack.enter_context(context())
            last, _ = teacher.read(replace(batch, tokens=batch.tokens.to(device), positions=batch.positions.to(device)))
            head = _head(teacher, last.dtype)
            tops = [
                likeliest(head(states), self.top, self.temperature) for states in last.flatten(0, 1).split(self.ROWS)
            ]
        values = torch.cat([f.values for f in tops]).to(torch.float16)
        indices = torch.cat([f.indices for f in tops]).to(getattr(torch, self.kind))
        return [t.unflatten(0, batch.tokens.shape) for t in (values, indices)]

    def beside(self, batch: Batch) -> Batch:
        """The batch with what the teacher said of its rows; for training alone: an evaluation does without."""
        import torch
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        if not self.student.training:
            return batch
        if not is_in_torch_dispatch_mode():
            return replace(batch, beside=self.rows.beside(batch))
        shape = batch.tokens.shape  # a dry run's rows hold nothing
        values = torch.empty(*shape, self.top + 1, dtype=torch.float16)
        return replace(batch, beside=(values, torch.empty(*shape, self.top, dtype=getattr(torch, self.kind))))
