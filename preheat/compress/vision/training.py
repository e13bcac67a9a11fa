"""Training, distillation and evaluation of image classifiers: plain functions on transformers models and `Images`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from preheat.compress.vision.image_folder import Images
from preheat.errors import RunError
from preheat.models.image_classifiers import compute_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Distil", "compute_all_scores", "measure", "settle_norms", "train"]

LR = 4e-3
"""Peak learning rate of AdamW, for training from scratch."""


@dataclass(frozen=True)
class Distil:
    """A teacher and the weight of its loss; the fields are those of the technique `distillation`."""

    teacher: PreTrainedModel
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
    say: Callable[[str], None] = lambda message: None,
) -> float:
    """Trains a classifier on labels, and on a teacher's logits if there is one, in place; it is left in eval mode.

    AdamW with linear warmup over the first 5 % of the steps and cosine decay. Images are shuffled each epoch, by the
    seed. At the end the norms' running statistics are recomputed over the images (`settle_norms`).

    Args:
        epochs: may be fractional.
        batch: images per step; the steps of an epoch are equal in size up to one image, since batch norm fails on a
            single image.
        distil: the teacher reads the same pixels.
        say: progress callback.

    Returns:
        Mean loss of the last epoch, nats per image (with a teacher: of the mixture).

    Raises:
        RunError: the loss is not finite.

    Example:
        >>> train(student, images, epochs=20, distil=Distil(teacher, temperature=2.0))              # doctest: +SKIP
        0.0913
    """
    from preheat.ops.losses.distillation import Distilled
    from preheat.ops.optim.optimizers import fused_adamw, group_by_decay

    steps_per_epoch = max(1, math.ceil(len(images) / batch))
    steps = max(1, round(epochs * steps_per_epoch))
    row_loss = None
    if distil is not None:
        # The identity as head: image classifiers give logits, language models hidden states.
        row_loss = Distilled(
            lambda hidden: hidden, direction=distil.divergence, temperature=distil.temperature, mixture=distil.mixture
        )
    optimizer = fused_adamw(group_by_decay(model.named_parameters(), weight_decay), lr=lr, betas=(0.9, 0.95), eps=1e-8)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    last: deque[float] = deque(maxlen=steps_per_epoch)  # losses of one epoch
    # Dropout draws from torch's global generator, whose state the caller gets back.
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # dropout
        for step in range(steps):
            if step % steps_per_epoch == 0:
                # `tensor_split` gives batches that differ by at most one image.
                order = torch.randperm(len(images), generator=generator).tensor_split(steps_per_epoch)
            numbers = order[step % steps_per_epoch]
            pixels, labels = images.pixels(numbers.tolist()), images.labels[numbers]
            logits = compute_scores(model, pixels)
            if row_loss is None:
                loss = nn.functional.cross_entropy(logits, labels)
            else:
                with torch.no_grad():
                    teacher_logits = compute_scores(distil.teacher, pixels)  # type: ignore[union-attr]
                loss = row_loss(logits, labels, teacher_logits).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            for group in optimizer.param_groups:
                group["lr"] = lr * _schedule_factor(step, steps)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            last.append(float(loss.detach()))
            # Left in eval mode, as on success.
            if not math.isfinite(last[-1]):
                model.eval()
                raise RunError(f"step {step + 1} of {steps}: the loss is {last[-1]}; lower optimizer.lr (it is {lr:g})")
            if (step + 1) % steps_per_epoch == 0:
                say(f"pass {(step + 1) // steps_per_epoch} of {epochs:g}: loss {sum(last) / len(last):.4f}")
    settle_norms(model, images, batch=batch)
    return sum(last) / len(last)


def _schedule_factor(step: int, steps: int) -> float:
    """Returns the learning rate of a step as a fraction of its peak."""
    warm = max(1, steps // 20)
    # Linear to 1, then 0.5 (1 + cos(pi t)) with t from 0 to 1.
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def settle_norms(model: nn.Module, images: Images, *, batch: int = 64) -> None:
    """Recomputes the running mean and variance of each batch norm as the mean over all images, in place; the model
    ends in eval mode.

    With a momentum near 1, running statistics follow only the last batches: transformers uses TensorFlow's values,
    which mean the opposite in torch, for MobileNetV2 (0.997) and EfficientNet (0.99).
    Source: Wu and Johnson 2021 (arXiv:2105.07576), section 3.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    model.eval()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        # Eval mode everywhere else, so that dropout does not disturb the statistics.
        norm.reset_running_stats()
        norm.momentum = None  # cumulative mean over all batches
        norm.train()
    with torch.no_grad():
        # Shuffled: batches of a single class would miss the variance between classes.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        for numbers in order.tensor_split(max(1, math.ceil(len(images) / batch))):
            compute_scores(model, images.pixels(numbers.tolist()))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def compute_all_scores(model: PreTrainedModel, images: Images) -> Tensor:
    """Returns the logits [n, classes] of images in order, in eval mode."""
    model.eval()
    with torch.no_grad():
        return torch.cat([compute_scores(model, pixels) for pixels, _ in images.batches(64)])


def measure(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns {accuracy, loss} of logits [n, classes] against labels [n]; the loss in nats per image.

    Example:
        >>> measure(torch.tensor([[0.0, 2.0], [2.0, 0.0]]), torch.tensor([1, 1]))["accuracy"]
        0.5
    """
    return {
        "accuracy": float((logits.argmax(-1) == labels).double().mean()),
        "loss": float(nn.functional.cross_entropy(logits.double(), labels)),
    }
