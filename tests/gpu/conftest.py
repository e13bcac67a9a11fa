"""What the tests on a CUDA device share."""

from __future__ import annotations

import torch

from preheat.core import Build


def copy_weights(source: Build, target: Build) -> None:
    """Gives `target` the weights of `source`, whatever device and dtype it has them in.

    Each device's generator draws other weights from the same seed.
    """
    with torch.no_grad():
        for role, parts in target.parts.items():
            for ours, theirs in zip(parts, source.parts[role], strict=True):
                given = theirs.state_dict()
                own = {name: t for name, t in ours.state_dict().items() if isinstance(t, torch.Tensor)}
                assert own.keys() == given.keys()
                for name, t in own.items():
                    assert t.shape == given[name].shape, name
                    t.copy_(given[name])
