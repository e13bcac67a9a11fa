"""An image classifier trained, distilled and measured: plain functions on transformers' models and `Images`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from preheat.compress.vision.image_folder import Images
from preheat.errors import RunError
from preheat.models.image_classifiers import scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Distil", "all_scores", "measure", "settle_norms", "train"]

LR = 4e-3
"""Of AdamW at its peak, for a model that is trained from nothing."""


@dataclass(frozen=True)
class Distil:
    """A teacher, and how much it counts; its fields are those of the technique `distillation`."""

    teacher: Any
    divergence: Literal["forward", "reverse"] = "forward"
    temperature: float = 1.0
    mixture: float = 0.5


def train(
    model: PreTrainedModel,
    images: Images,
    *,
    epochs: float,
    lr: float = LR,
    batch: int = 64,
    weight_decay: float = 0.05,
    distil: Distil | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda words: None,
) -> float:
    """Trains a classifier on labels, and where there is one on a teacher's scores, in place; it is left in evaluation.

    AdamW, the rate rising over the first twentieth of the steps and falling as a cosine. Images are read in another order each time, as the
    seed decides. At the end the norms' running statistics are taken anew over the images (`settle_norms`).

    Args:
        epochs: passes over the images; a part of one is allowed.
        batch: images a step; steps of a pass are as equal as can be, since a norm over one image is none.
        distil: the teacher reads the same pixels.

    Returns:
        Mean loss of the last pass, nats an image (with a teacher: of the mixture).

    Raises:
        RunError: the loss is no number.

    Example:
        >>> train(student, images, epochs=20, distil=Distil(teacher, temperature=2.0))              # doctest: +SKIP
        0.0913
    """
    from preheat.ops.losses.distillation import Distilled
    from preheat.ops.optim.optimizers import decay_groups, fused_adamw

    each = max(1, math.ceil(len(images) / batch))
    steps = max(1, round(epochs * each))
    row_loss = None
    if distil is not None:
        row_loss = Distilled(
            lambda given: given, direction=distil.divergence, temperature=distil.temperature, mixture=distil.mixture
        )
    optimizer = fused_adamw(decay_groups(model.named_parameters(), weight_decay), lr=lr, betas=(0.9, 0.95), eps=1e-8)
    draw = torch.Generator().manual_seed(seed)
    model.train()
    last: deque[float] = deque(maxlen=each)  # of a pass
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # dropout
        for step in range(steps):
            if step % each == 0:
                order = torch.randperm(len(images), generator=draw).tensor_split(each)
            numbers = order[step % each]
            pixels, labels = images.pixels(numbers.tolist()), images.labels[numbers]
            found = scores(model, pixels)
            if row_loss is None:
                loss = nn.functional.cross_entropy(found, labels)
            else:
                with torch.no_grad():
                    wanted = scores(distil.teacher, pixels)  # type: ignore[union-attr]
                loss = row_loss(found, labels, wanted).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            for group in optimizer.param_groups:
                group["lr"] = lr * _share(step, steps)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            last.append(float(loss.detach()))
            if not math.isfinite(last[-1]):
                model.eval()
                raise RunError(f"step {step + 1} of {steps}: the loss is {last[-1]}; lower optimizer.lr (it is {lr:g})")
            if (step + 1) % each == 0:
                say(f"pass {(step + 1) // each} of {epochs:g}: loss {sum(last) / len(last):.4f}")
    settle_norms(model, images, batch=batch)
    return sum(last) / len(last)


def _share(step: int, steps: int) -> float:
    """Of the rate's peak."""
    warm = max(1, steps // 20)
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def settle_norms(model: nn.Module, images: Images, *, batch: int = 64) -> None:
    """Takes the running mean and variance of each batch norm anew, as the mean over all images, in place; the model is left in evaluation.

    Running means follow the last batches alone where their momentum is near 1: as transformers states MobileNetV2's (0.997) and
    EfficientNet's (0.99), which TensorFlow counts from the other end. Source: Wu and Johnson 2021 (arXiv:2105.07576), section 3.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    model.eval()
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # torch's word for the mean of all batches
        norm.train()
    with torch.no_grad():
        # In drawn order: batches of one class alone would leave out how far the classes are apart.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        for numbers in order.tensor_split(max(1, math.ceil(len(images) / batch))):
            scores(model, images.pixels(numbers.tolist()))
    for norm, momentum in zip(norms, kept, strict=True):
        norm.momentum = momentum
    model.eval()


def all_scores(model: PreTrainedModel, images: Images) -> Tensor:
    """[n, classes] of images in their order, in evaluation."""
    model.eval()
    with torch.no_grad():
        return torch.cat([scores(model, pixels) for pixels, _ in images.batches(64)])


def measure(found: Tensor, labels: Tensor) -> dict[str, float]:
    """{accuracy, loss} of scores [n, classes] against labels [n]; the loss in nats an image.

    Example:
        >>> measure(torch.tensor([[0.0, 2.0], [2.0, 0.0]]), torch.tensor([1, 1]))["accuracy"]
        0.5
    """
    return {
        "accuracy": float((found.argmax(-1) == labels).double().mean()),
        "loss": float(nn.functional.cross_entropy(found.double(), labels)),
    }
