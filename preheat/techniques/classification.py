"""Classification: replaces the language model head with a classification head on each document's last token.

What: the head over the vocabulary is replaced by a newly initialized head over `classes`; the loss is the cross entropy
of the class at the last token, which has attended to the whole document. The head is trained even under an adapter.
Several documents are packed in one sequence, and none attends to another. The run reports accuracy and macro F1 (the
unweighted mean over classes) along with the loss.
Helps: a label costs one forward pass, without generation; scores are calibrated and comparable.
Hurts: the model can no longer generate text; one training example per document instead of one per token.
Source: Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", section 3.2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from preheat.core import (
    Batch,
    Build,
    Change,
    Context,
    ExampleKind,
    LossSum,
    Numerics,
    Slot,
    Stage,
    Tag,
    Technique,
    Trials,
)
from preheat.recipe import Bound, Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["Classification", "compute_accuracy_and_f1", "replace_head", "confusion_matrix"]


def replace_head(model: PreTrainedModel, classes: int, *, seed: int = 0) -> str:
    """Replaces the head of a transformers model with a new one over `classes`, in place. Returns its name.

    Raises:
        ValueError: the head is tied to the embedding.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=16
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> replace_head(model, 3), model.lm_head.weight.shape
        ('lm_head', torch.Size([3, 16]))
    """
    import torch

    from preheat.ops.classification_head import draw_head, give_classes

    if model.config.tie_word_embeddings:
        raise ValueError("the head is tied to the embedding; set tie_word_embeddings to False")
    # The head is drawn on the CPU, whose generator is restored afterwards; creating it draws too.
    with torch.random.fork_rng(devices=[]):
        name = give_classes(model, classes)
        torch.random.default_generator.manual_seed(seed)  # torch.manual_seed would reseed those of GPUs too
        draw_head(model.get_submodule(name), model.config.initializer_range)
    return name


def confusion_matrix(predicted: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Returns the confusion matrix [classes, classes] (rows: truth, columns: prediction). Negative truths are ignored.

    Example:
        >>> import torch
        >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 0, -100]), 2).tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """
    import torch

    # One cell per (truth, prediction), and a last one for ignored truths, which is cut off.
    cell = torch.where(truth < 0, classes * classes, truth * classes + predicted)
    counts = torch.zeros(classes * classes + 1, device=truth.device)
    # Not bincount, which reads its size back from the device.
    counts.index_add_(0, cell, torch.ones_like(cell, dtype=counts.dtype))
    return counts[:-1].view(classes, classes)


def compute_accuracy_and_f1(table: Tensor) -> dict[str, float]:
    """Returns the accuracy and the mean F1 over the classes that occur or were predicted.

    Example:
        >>> import torch
        >>> compute_accuracy_and_f1(torch.tensor([[3.0, 1.0], [0.0, 0.0]]))
        {'accuracy': 0.75, 'macro_f1': 0.42857142857142855}
    """
    # Per class: predicted correctly, true, predicted.
    right, occur, named = (t.double() for t in (table.diagonal(), table.sum(1), table.sum(0)))
    # Classes that neither occur nor are predicted would be 0 / 0.
    present = occur + named > 0
    # F1 = 2 tp / (true + predicted).
    f1 = 2 * right[present] / (occur + named)[present]
    return {"accuracy": float(right.sum() / occur.sum().clamp(min=1)), "macro_f1": float(f1.mean())}


@dataclass(frozen=True, kw_only=True)
class Classification(Technique):
    stage: ClassVar[Stage] = Stage.STRUCTURE
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"classes": 5},), first_loss={None: math.log(2), 5: math.log(5)})
    unsupported_for_images: ClassVar[str] = "supports only text so far; leave it out"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OBJECTIVE})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.CLASSIFICATION_HEAD, Tag.WHOLE_EXAMPLES})

    classes: Annotated[int, Bound(2)] = 2
    """Rows of the head: the classes of the data are numbered from 0."""

    def examples(self) -> ExampleKind:
        return ExampleKind("classes", self.classes)

    def configure(self, config: PretrainedConfig, recipe: Recipe) -> None:
        # A head with a row per class cannot share the embedding's matrix.
        config.tie_word_embeddings = False
        config.num_labels = self.classes

    def check(self, context: Context) -> list[str]:
        recipe, problems = context.recipe, []
        if recipe.data.packing == "stream":
            problems.append("data.packing: stream cuts documents at sequence ends; use auto or whole")
        if recipe.sample.is_active:
            problems.append("sample: a classifier generates no text; leave them out")
        if recipe.evaluate.baselines:
            problems.append("evaluate.baselines: a unigram model has no classes; set it to false")
        return problems

    def evaluation_scores(self) -> Mapping[str, bool]:
        return {"accuracy": True, "macro_f1": True}

    def apply(self, build: Build, part: PreTrainedModel) -> Change:
        from preheat.ops.classification_head import draw_head, give_classes

        name = give_classes(part, self.classes)
        draw = functools.partial(draw_head, std=part.config.get_text_config().initializer_range)
        # A pattern for the weights that no folder has: they are drawn.
        build.weights.fresh(rf"^{name}\.weight$", [name], draw)
        build.claim(Slot.OBJECTIVE, self._build_objective(part), self.name())
        build.loss.scores = _compute_scores
        return Change(
            f"{name} over {self.classes} classes, newly initialized, in place of the language model head; loss at "
            "each document's last token",
            1,
        )

    def _build_objective(self, part: PreTrainedModel) -> Callable[..., LossSum]:
        import torch

        from preheat.models.hf import head

        def objective(batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]) -> LossSum:
            states = hidden(batch)  # [rows, length, width]
            # Labels are ignored everywhere but at each document's last token.
            total = over_logits(states, batch.labels)
            # The metric needs only those positions: [documents, classes] logits.
            with torch.no_grad():
                last = _find_last_positions(batch)
                logits = head(part)(states.detach().flatten(0, 1)[last])
                table = confusion_matrix(logits.argmax(dim=-1), batch.labels.flatten()[last], self.classes)
            return LossSum(total, batch.weight, {"confusion": table})

        return objective


def _find_last_positions(batch: Batch) -> torch.Tensor:
    """Returns the index of each document's last token in the flattened batch, from the lengths on the host."""
    from preheat.hardware.transfers import to_device

    rows, length = batch.tokens.shape
    # Without documents, each row is one.
    sizes = [size for row in batch.mask.documents or ((length,),) * rows for size in row]
    return to_device(sizes, batch.tokens.device).cumsum(0) - 1


def _compute_scores(metrics: Mapping[str, Tensor], weight: float) -> dict[str, float]:
    return compute_accuracy_and_f1(metrics["confusion"])
