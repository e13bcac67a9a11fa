"""Difficulty curriculum: trains on the easiest sequences first, and on a growing share of the data until all is used.

What: ranks sequences by a score: the rarity of their tokens, the length of their documents, numbers from a file, or the
loss of a small model. The run samples from the easiest fraction of them (the model's competence), which grows with the
square root of the progress or linearly. Each sequence of the pool is read once before any is repeated, and after
`until` the order is that of plain epochs.
Helps: faster at first, if easy sequences teach what hard ones build on; most on heterogeneous data.
Hurts: early batches are alike; little or nothing is gained on data that is read less than once or is evenly hard.
Scoring by a model costs one forward pass over the data.
Source: Platanios et al. 2019 (arXiv:1903.09848), competence, length and rarity; loss of a small model: Marion et al.
2023 (arXiv:2309.04564).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from preheat.core import Build, Change, Context, Numerics, Slot, Stage, Technique, Trials
from preheat.errors import DataError, RecipeError, RunError
from preheat.recipe import Bound, Fraction

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from preheat.core.json_types import JsonObject, StateDict
    from preheat.data.packing import Rows
    from preheat.models.weights import WeightSource

__all__ = ["DifficultyCurriculum", "compute_competence", "compute_losses", "order_by_difficulty"]

_MODEL = "techniques.difficulty_curriculum.model"


def compute_competence(
    progress: float, *, start: float, until: float, curve: Literal["root", "linear"] = "root"
) -> float:
    """Returns the fraction of the rows, easiest first, that may be sampled at this progress.

    Args:
        progress: from 0 to 1.
        start: the fraction at the beginning.
        until: the progress at which it reaches 1.
        curve: root: sqrt(t (1 - start²) + start²), which adds hard rows ever more slowly; linear.

    Example:
        >>> [round(compute_competence(n / 4, start=0.1, until=1.0), 2) for n in range(5)]
        [0.1, 0.51, 0.71, 0.87, 1.0]
    """
    if progress >= until:
        return 1.0
    # c(t) = (t / T (1 - c0^p) + c0^p)^(1 / p): Platanios et al. 2019, section 3.
    power = 2 if curve == "root" else 1
    return float((progress / until * (1 - start**power) + start**power) ** (1 / power))


def order_by_difficulty(
    scores: np.ndarray,
    *,
    total: int,
    seed: int,
    start: float = 0.1,
    until: float = 0.5,
    curve: Literal["root", "linear"] = "root",
    committed: int = 0,
) -> Iterator[int]:
    """Yields row numbers endlessly, starting at sample number `committed`; a pure function of its arguments.

    Args:
        scores: [rows], low means easy.
        total: samples of the whole run; `until` is a fraction of it.

    Example:
        >>> import numpy as np
        >>> order = order_by_difficulty(np.array([0.9, 0.1, 0.5, 0.3]), total=8, seed=0, start=0.5)
        >>> sorted(next(order) for _ in range(2))
        [1, 3]
    """
    import numpy as np

    from preheat.data.difficulty import order_growing_pool

    # Stable: rows of equal score keep their order, so that a resumed run ranks them alike.
    ranked = np.argsort(scores, kind="stable")

    def pool_size(n: int) -> int:
        return int(np.ceil(compute_competence(n / total, start=start, until=until, curve=curve) * len(ranked)))

    # The order is drawn anew from its beginning and skipped to the committed sample, so it needs no state.
    return itertools.islice(order_growing_pool(ranked, pool_size, seed), committed, None)


def compute_losses(
    folder: Path, rows: Rows, *, device: str = "cpu", micro: int = 8, cache: Path | None = None
) -> np.ndarray:
    """Returns a small model's mean loss per token on each row, in nats; cached by the model's weights and the data.

    Args:
        folder: a Hugging Face folder of a decoder-only model with the data's tokenizer.
        device: where to run it, in fp32.
        micro: rows at a time.
        cache: folder for the scores; $PREHEAT_CACHE or ~/.cache/preheat by default.

    Returns:
        [rows] float64.

    Raises:
        RecipeError: the model cannot be loaded.
        DataError: its vocabulary or its context is too small for the data.
    """
    import numpy as np

    from preheat.cache_folder import cache_folder
    from preheat.data.cache import open_entry
    from preheat.data.sources import compute_digest
    from preheat.models.weights import WeightSource

    # Labels of classes are no tokens that a language model predicts.
    if rows.tokens.examples.kind == "classes":
        raise DataError(
            f"{_MODEL}: ranks by the loss of the next token, which classified documents do not have; use by: rarity"
        )
    if not (folder / "config.json").is_file():
        raise RecipeError(f"{_MODEL}: {folder} has no config.json; name the folder of a Hugging Face model")
    source = WeightSource(folder, knob=_MODEL)
    # Weights, configuration, tokens and packing decide the losses; the path of the model does not.
    content = [
        hashlib.blake2b(np.ascontiguousarray(a).tobytes()).hexdigest() for a in (rows.tokens.ids, rows.tokens.offsets)
    ]
    config = (folder / "config.json").read_text(encoding="utf-8")
    key = compute_digest("difficulty", 1, source.fingerprint(), config, *content, rows.length, rows.packing)

    def build(target: Path) -> JsonObject:
        np.save(target / "losses.npy", _iterate_losses(folder, source, rows, device, micro))
        return {}

    # Scored once: a resumed run, and others on the same data, read the file.
    cached, _ = open_entry(cache or cache_folder(), f"losses-{key}", build)
    return np.load(cached / "losses.npy")


def _iterate_losses(folder: Path, source: WeightSource, rows: Rows, device: str, micro: int) -> np.ndarray:
    import numpy as np
    import torch

    from preheat.data.loader import evaluation_batches
    from preheat.models import hf
    from preheat.models.weights import materialize
    from preheat.ops.attention.blockwise import attend_blockwise
    from preheat.ops.attention.multihead import attend_fastest
    from preheat.ops.losses.cross_entropy import CrossEntropy
    from preheat.recipe import Batch, Model, Recipe, Stop

    # Only the configuration is used: the rows' length is compared with its positions below.
    config = hf.configure(Recipe(model=Model(path=str(folder)), batch=Batch(seq_len=2), stop=Stop(max_steps=1)))
    # By the tokens in use: a tokenizer that is larger than the model is harmless as long as none of them is beyond it.
    facts, largest = hf.read_facts(config), int(np.max(rows.tokens.ids, initial=0))
    if largest >= facts.vocabulary:
        raise DataError(
            f"{_MODEL}: {folder} has {facts.vocabulary:,} tokens but the data has token number {largest:,}; name a "
            "model with the data's tokenizer"
        )
    if facts.positions and facts.positions < rows.length:
        raise DataError(
            f"{_MODEL}: {folder} has {facts.positions} positions but sequences "
            f"have {rows.length} tokens; name a model with more"
        )
    # Built on meta, so that its weights are allocated once, with their final values.
    model = hf.build_on_meta(config)
    materialize(model, torch.device(device))
    source.fill(model, seed=0)
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in evaluation_batches(rows, micro=micro, limit=len(rows)):
            hidden = hf.hidden_states(
                model,
                batch.tokens.to(device),
                batch.positions.to(device),
                batch.mask,
                # Only blockwise attention caps scores, as Gemma 2 needs.
                attend_fastest if facts.score_softcap is None else attend_blockwise,
            )
            # One row of logits at a time to save memory
            for states, labels in zip(hidden, batch.labels.to(device), strict=True):
                total = CrossEntropy()(hf.compute_logits(model, states), labels).sum()
                losses.append(float(total) / max(int((labels >= 0).sum()), 1))  # a row may have no label at all
    return np.array(losses, np.float64)


class _Ranking:
    """Detects changed scores on resume: another ranking would silently change the data order."""

    def __init__(self) -> None:
        self.mark = ""

    def see(self, scores: np.ndarray) -> None:
        # Of the order, not of the scores: these may differ in rounding on another device.
        mark = hashlib.blake2b(scores.argsort(kind="stable").tobytes(), digest_size=8).hexdigest()
        if self.mark not in ("", mark):
            raise RunError(
                "techniques.difficulty_curriculum: the sequences rank differently from when the checkpoint was saved, "
                "so their order would change; restore the scores (or the model) that the run started with, or start "
                "another run with --out"
            )
        self.mark = mark

    def state_dict(self) -> StateDict:
        return {"ranking": self.mark}

    def load_state_dict(self, state: StateDict) -> None:
        self.mark = state["ranking"]


@dataclass(frozen=True, kw_only=True)
class DifficultyCurriculum(Technique):
    stage: ClassVar[Stage] = Stage.LOADER
    numerics: ClassVar[Numerics] = "exact"  # for a given batch; the order of batches differs
    trials: ClassVar[Trials] = Trials(settings=({"by": "length", "curve": "linear"},))
    unsupported_for_images: ClassVar[str] = "orders sequences by their text only; leave it out"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.SAMPLE_ORDER})

    by: Literal["rarity", "length"] | None = None
    """What makes a sequence hard: rarity (mean -log p of its tokens by their counts) or length (of its documents);
    rarity by default."""
    scores: str | None = None
    """Instead of `by`: a file with a number for each training document or each sequence, low means easy: .npy, .txt or
    .jsonl."""
    model: str | None = None
    """Instead of `by`: a Hugging Face folder of a small model with the data's tokenizer; a sequence is as hard as its
    mean loss."""
    start: Annotated[float, Bound(0, 1, open_low=True)] = 0.1
    """Fraction of the sequences, the easiest, to begin with."""
    until: Fraction = 0.5
    """Fraction of the run after which all sequences are sampled."""
    curve: Literal["root", "linear"] = "root"
    """How the fraction grows: with the square root of the progress, or linearly."""

    def check(self, context: Context) -> list[str]:
        stop, problems = context.recipe.stop, []
        given = [name for name in ("by", "scores", "model") if getattr(self, name) is not None]
        if len(given) > 1:
            problems.append(f"{given[0]}: and {given[1]} both define the difficulty; set one")
        if context.recipe.data.streaming:
            problems.append("by: streamed rows cannot be ranked before training; set data.streaming: false")
        if self.start == 1 or self.until == 0:
            problems.append(
                "start: with 1 (or until: 0) all sequences are drawn from the "
                "beginning; use start: 0.1 and until: 0.5, or leave it out"
            )
        if not (stop.max_steps or stop.tokens or stop.epochs):
            problems.append(
                "until: is a fraction of the run, whose length stop.hours alone does not determine; add "
                "stop.max_steps, tokens or epochs"
            )
        return problems

    def _compute_scores(self, rows: Rows, device: str) -> np.ndarray:
        from preheat.data.difficulty import read_scores, score_by_length, score_by_rarity

        if self.scores is not None:
            return read_scores(Path(self.scores), rows)
        if self.model is not None:
            return compute_losses(Path(self.model), rows, device=device)
        return score_by_length(rows) if self.by == "length" else score_by_rarity(rows)

    def apply(self, build: Build, part: nn.Module) -> Change:
        ranking = _Ranking()
        # In the checkpoint: after a resume, the loaded mark meets the scores of this session.
        build.state.saved[self.name()] = ranking

        def order(rows: Rows, seed: int, committed: int, total: int | None) -> Iterator[int]:
            assert total is not None, "check refuses a run without a known end"
            scores = self._compute_scores(rows, build.device.kind)
            ranking.see(scores)
            return order_by_difficulty(
                scores,
                total=total,
                seed=seed,
                start=self.start,
                until=self.until,
                curve=self.curve,
                committed=committed,
            )

        build.claim(Slot.SAMPLE_ORDER, order, self.name())
        source = (
            f"scores of {self.scores}"
            if self.scores
            else f"the loss of {self.model}"
            if self.model
            else self.by or "rarity"
        )
        return Change(
            f"sequences by {source}: the easiest {self.start:.0%} at first, all after {self.until:.0%} of the run", 1
        )
