"""How bits are shared out among the maps of a model, by what each of them loses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["loss_rise", "share_out"]


def loss_rise(x: Tensor, change: Tensor, gradient: Tensor) -> float:
    """How much a change of a map's weight raises the loss, to second order: half the sum over tokens of (change in outputs . gradient)^2.

    The expectation of that square over the model's own distribution is the curvature of the loss along the change (the Fisher
    information), which is all that matters where training has brought the gradient near zero. Per token, with the gradients of the
    text's own tokens: LeCun et al. 1989, "Optimal Brain Damage", for the expansion; Theis et al. 2018 (arXiv:1801.05787) for this estimate.

    Args:
        x: inputs [tokens, in].
        change: of the weight, [out, in].
        gradient: of the summed loss for the outputs, [tokens, out].

    Returns:
        Nats, summed over the tokens.
    """
    return float(((x @ change.t()) * gradient).sum(dim=1).square().sum()) / 2


def share_out(bits: Sequence[Sequence[float]], rises: Sequence[Sequence[float]], budget: float) -> list[int]:
    """A choice for each map so that the sum of the rises is small and that of the bits within the budget.

    Each map begins with its fewest bits; then the step that saves most for its bits is taken, along each map's lower convex hull, as
    long as one fits: the best for every budget at which a step ends, and at others off by less than one step.

    Args:
        bits: of each choice of each map.
        rises: in loss, alike.
        budget: bits in all.

    Raises:
        ValueError: the fewest bits are more than the budget.

    Example:
        >>> share_out([[4, 8], [4, 8]], [[1.0, 0.0], [3.0, 0.0]], 12)
        [0, 1]
    """
    chosen = [min(range(len(b)), key=lambda n: (b[n], r[n])) for b, r in zip(bits, rises, strict=True)]
    left = budget - sum(b[n] for b, n in zip(bits, chosen, strict=True))
    if left < 0:
        raise ValueError(f"the least that there is takes {budget - left:g} bits")
    closed: set[int] = set()
    while len(closed) < len(chosen):
        best: tuple[float, int, int] | None = None
        for m, at in enumerate(chosen):
            if m in closed:
                continue
            steps = [
                ((rises[m][at] - rises[m][n]) / (bits[m][n] - bits[m][at]), m, n)
                for n in range(len(bits[m]))
                if at != n and 0 < bits[m][n] - bits[m][at] <= left and rises[m][n] < rises[m][at]
            ]
            if not steps:
                closed.add(m)
                continue
            best = max([max(steps), *([best] if best else [])])
        if best is None:
            break
        _, m, n = best
        left -= bits[m][n] - bits[m][chosen[m]]
        chosen[m] = n
    return chosen
