"""Mixed-precision bit allocation across layers by their estimated loss increase."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["estimate_loss_rise", "allocate_bits"]


def estimate_loss_rise(x: Tensor, change: Tensor, gradient: Tensor) -> float:
    """Estimates how much a change of a layer's weight raises the loss, to second order.

    The estimate is half the sum over tokens of (change in outputs . gradient)^2. Its expectation over the model's own
    distribution is the curvature of the loss along the change (Fisher information), the leading term once training has
    brought the gradient near zero. Here it uses gradients of the text's own tokens. Sources: LeCun et al. 1989,
    "Optimal Brain Damage", for the expansion; Theis et al. 2018 (arXiv:1801.05787) for the estimate.

    Args:
        x: inputs [tokens, in].
        change: change of the weight, [out, in].
        gradient: gradient of the summed loss by the outputs, [tokens, out].

    Returns:
        Nats, summed over the tokens.
    """
    # Per token: (change x) . gradient, the first-order change of its loss; its square is the Fisher estimate.
    return float(((x @ change.t()) * gradient).sum(dim=1).square().sum()) / 2


def allocate_bits(bits: Sequence[Sequence[float]], rises: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Chooses a bit width per layer that minimizes the summed loss increase within a bit budget.

    Greedy along each layer's lower convex hull: starts at the fewest bits and repeatedly takes the upgrade that saves
    most per bit, as long as one fits. The result is optimal for budgets at which an upgrade ends and at most one
    upgrade off otherwise.

    Args:
        bits: bits of each choice of each layer.
        rises: loss increase of each choice of each layer.
        budget: bits in total.

    Raises:
        ValueError: even the fewest bits exceed the budget.

    Example:
        >>> allocate_bits([[4, 8], [4, 8]], [[1.0, 0.0], [3.0, 0.0]], 12)
        [0, 1]
    """
    # Fewest bits; of equally many, the lowest loss.
    chosen = [min(range(len(b)), key=lambda n: (b[n], r[n])) for b, r in zip(bits, rises, strict=True)]
    left = budget - sum(b[n] for b, n in zip(bits, chosen, strict=True))
    if left < 0:
        raise ValueError(f"the minimum takes {budget - left:g} bits")
    closed: set[int] = set()  # layers without an upgrade that fits; the budget only shrinks, so they stay closed
    while len(closed) < len(chosen):
        best: tuple[float, int, int] | None = None
        for m, at in enumerate(chosen):
            if m in closed:
                continue
            # All upgrades of the layer, not just the next one: skipping a choice above the hull keeps to the hull.
            steps = [
                ((rises[m][at] - rises[m][n]) / (bits[m][n] - bits[m][at]), m, n)
                for n in range(len(bits[m]))
                if at != n and 0 < bits[m][n] - bits[m][at] <= left and rises[m][n] < rises[m][at]
            ]
            if not steps:
                closed.add(m)
                continue
            # Tuples compare by gain per bit first.
            best = max([max(steps), *([best] if best else [])])
        if best is None:
            break
        _, m, n = best
        left -= bits[m][n] - bits[m][chosen[m]]
        chosen[m] = n
    return chosen
