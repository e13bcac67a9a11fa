"""One contender of `preheat bench --inference` in a process of its own: `python -m preheat.bench.inference_worker JOB.json`.

It opens its model once and then measures whatever shape it is asked for, a line of JSON in and a line out, so that contenders take turns and
none waits for its model to be loaded again. While another measures it sleeps.

A job: {model: path, settings: keys of Sample, dtype: or null, engine: preheat or transformers, tokens, cells: [[rows, length], ...], text: a file or null}.
"""

from __future__ import annotations

import json
import os
import sys
import time

_BEGUN = time.perf_counter()  # before anything heavy is imported: start-up is measured from here

from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from preheat.models.generation.generate import Timed

__all__ = ["InferenceWorker", "main"]

_ROWS = 16
"""Rows of the longest length that the loss is of."""
_TEXT = 1 << 20
"""Tokens of text that are read at most."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class InferenceWorker:
    """A model that writes as a job says.

    Raises:
        PreheatError: it cannot be opened, or not be written with in that way.
    """

    def __init__(self, job: dict[str, Any]):
        from preheat.inference.load import load_draft_model, load_model
        from preheat.models.hf import facts, require_decoder_only
        from preheat.recipe import Sample

        self.job, self.tokens = job, int(job["tokens"])
        self.settings = Sample(**job["settings"], tokens=self.tokens)
        opened = load_model(job["model"])
        self.device, self.tokenizer = opened.build.device, opened.tokenizer
        self.positions = opened.build.model.positions
        self.model: Any = opened.build.trained[0]
        require_decoder_only(self.model, "preheat bench --inference")
        if job["engine"] == "transformers":
            self.model = _plain(job, self.model.device)
        elif job["dtype"] is not None:
            _cast(self.model, job["dtype"])
        self.draft = None if self.settings.draft is None else load_draft_model(self.settings.draft, self.tokenizer)
        if self.draft is not None and job["dtype"] is not None:
            _cast(self.draft, job["dtype"])
        self.facts = facts(self.model.config)
        self._text: list[int] = []
        self._held: int | None = None

    def begin(self) -> dict[str, Any]:
        """Reads the text that prompts are cut from: of a file, or what every Python carries; from here on memory is watched.

        Raises:
            DataError: there is less than one prompt of it.
        """
        from preheat.data.sources import open_source
        from preheat.errors import DataError
        from preheat.hardware.probe import begin_peak, can_begin_peak, peak_bytes
        from preheat.recipe import Data

        file, cells = self.job["text"], self.job["cells"]
        for _, row in open_source(Data(source=file or "stdlib", layout="text")).rows():
            text = row if isinstance(row, str) else row["text"]
            self._text += self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
            if len(self._text) >= min(_TEXT, max(max(rows, _ROWS) * length for rows, length in cells)):
                break
        if len(self._text) < (longest := max(length for _, length in cells)):
            raise DataError(
                f"--text {file}: has {len(self._text):,} tokens, and a prompt has {longest:,}; name a longer "
                "one, or shorter --lengths"
            )
        if can_begin_peak(self.device.kind):
            begin_peak(self.device.kind)
            self._held = peak_bytes(self.device.kind, since_begun=True)
        return {}

    def _prompt(self, row: int, length: int) -> list[int]:
        """Prompts follow one another; where the text ends they begin anew."""
        start = row % (len(self._text) // length) * length
        return self._text[start : start + length]

    def about(self) -> dict[str, Any]:
        """What is known before anything is measured: sizes, and what the cache of each shape will take."""
        from preheat.models.generation.generate import patterned, settled
        from preheat.models.generation.kv_cache import room
        from preheat.planning.analytic import CACHES, cache_bytes

        model = self.model
        self.settings = settled(self.settings, model, 0 if patterned(model) else self.tokens)
        dtype = next(
            p.dtype for p in model.parameters() if p.is_floating_point()
        )  # codes of a compressed model are none
        size, scale = CACHES["int8"] if self.settings.cache == "int8" else (dtype.itemsize, 0.0)

        def cache(rows: int, length: int) -> float:
            kept = room(self.settings, length + self.tokens - 1)  # the last token is not read
            return cache_bytes(model.config, kept, rows, size, scale=scale, window=self.settings.window)

        held = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for m in (model, self.draft)
            if m
            for t in _tensors(m)
        }
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "weights_bytes": sum(held.values()),
            "dtype": str(dtype).removeprefix("torch."),
            "positions": self.positions,
            "vocabulary": self.facts.vocabulary,
            "device": {"kind": self.device.kind, "name": self.device.name, "memory": self.device.memory},
            "cache_bytes": [cache(rows, length) for rows, length in self.job["cells"]],
            "startup_seconds": time.perf_counter() - _BEGUN,
        }

    def measure(self, rows: int, length: int) -> dict[str, Any]:
        """One generation of so many rows after prompts of that length.

        Returns:
            {first: seconds until the first tokens, rest: seconds until the last ones after that, passes: after the first, drawn: tokens in these,
            cache_bytes, texts: the tokens of each row}.
        """
        from preheat.models.generation.generate import Timed, generate

        prompts = [self._prompt(row, length) for row in range(rows)]
        timed = Timed()
        if self.job["engine"] == "transformers":
            texts = self._transformers(prompts, timed)
        else:
            # One row after the other where tokens are proposed, so that all of them count.
            groups = [[p] for p in prompts] if self.settings.speculates else [prompts]
            parts = [Timed() for _ in groups]
            texts = [
                written.tokens
                for group, part in zip(groups, parts, strict=True)
                for written in generate(
                    self.model,
                    self.tokenizer,
                    group,
                    self.settings,
                    positions=self.positions,
                    batch=rows,
                    draft=self.draft,
                    timed=part,
                )
            ]
            return _joined(parts) | {"texts": texts}
        return _joined([timed]) | {"texts": texts}

    def _transformers(self, prompts: list[list[int]], timed: Timed) -> list[list[int]]:
        import torch
        from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

        from preheat.models.generation.kv_cache import cache_nbytes

        class Clock(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                input_ids[:, -1].tolist()  # the tokens have come from the device
                timed.at.append(time.perf_counter())
                timed.tokens.append(len(input_ids))
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        ids = torch.tensor(prompts, device=self.model.device)
        cache = DynamicCache(config=self.model.config)
        how = GenerationConfig(max_new_tokens=self.tokens, do_sample=False, pad_token_id=0)
        timed.begun = time.perf_counter()
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=how,
            stopping_criteria=StoppingCriteriaList([Clock()]),
            past_key_values=cache,
        )
        timed.cache_bytes = cache_nbytes(cache)
        return list(made[:, ids.shape[1] :].tolist())

    def end(self) -> dict[str, Any]:
        """What is measured once, after all shapes.

        Returns:
            {beyond_weights_gib: the most memory that writing took beside what was held once the model was open, None where the system does not tell;
            loss: mean loss of a token of the text, read through the cache}.
        """
        import torch

        from preheat.hardware.probe import peak_bytes
        from preheat.models.generation.generate import cached_loss

        beyond = None if self._held is None else (peak_bytes(self.device.kind, since_begun=True) - self._held) / 2**30
        length = max(length for _, length in self.job["cells"])
        rows = torch.tensor([self._prompt(row, length) for row in range(_ROWS)])
        return {"beyond_weights_gib": beyond, "loss": cached_loss(self.model, rows, self.settings)}


def _joined(parts: list[Timed]) -> dict[str, Any]:
    """The seconds of groups that were written one after the other."""
    return {
        "first": sum(part.at[0] - part.begun for part in parts),
        "rest": sum(part.at[-1] - part.at[0] for part in parts),
        "passes": sum(len(part.at) - 1 for part in parts),
        "drawn": sum(sum(part.tokens[1:]) for part in parts),
        "cache_bytes": sum(part.cache_bytes for part in parts),
    }


def _plain(job: dict[str, Any], device: Any) -> Any:
    """The folder's model as transformers itself loads it.

    Raises:
        RunError: it is none that transformers opens, or one of whose weights it finds only some, and would draw the others.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from preheat.errors import RunError

    if not (Path(job["model"]) / "config.json").is_file():
        raise RunError(
            f"{job['model']}: engine=transformers opens Hugging Face folders only (no config.json); export the run"
        )
    dtype = getattr(torch, DTYPES[job["dtype"] or "fp32"])
    model, told = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=dtype, local_files_only=True, output_loading_info=True
    )
    if missing := sorted(told["missing_keys"]):
        raise RunError(
            f"{job['model']}: engine=transformers finds no weights for {len(missing)} tensors of the model "
            f"({missing[0]}), and would draw them; "
            "it opens plain folders, and none that `preheat compress` wrote: leave it to preheat, or name the "
            "model it was made from"
        )
    model.generation_config = GenerationConfig()  # no token ends a text early
    return model.to(device).eval()


def _cast(model: Any, dtype: str) -> None:
    """Plain parameters, in place; not buffers, of which rotary frequencies would lose the positions, nor weights in a format of their own."""
    import torch

    for p in model.parameters():
        if type(p.data) is torch.Tensor and p.is_floating_point():
            p.data = p.data.to(getattr(torch, DTYPES[dtype]))


def _tensors(model: Any) -> list[Any]:
    """Tensors that hold a model's weights; those inside of weights in a format of their own, too."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    found, left = [], [*model.parameters(), *model.buffers()]
    while left:
        tensor = left.pop()
        if is_traceable_wrapper_subclass(tensor):
            left += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        else:
            found.append(tensor)
    return found


def main() -> None:
    from preheat.errors import PreheatError

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(made: dict[str, Any]) -> None:
        print(json.dumps(made), file=answers, flush=True)

    try:
        speaker = InferenceWorker(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
        answer(speaker.about())
        for line in sys.stdin:
            asked = json.loads(line)
            answer(
                {"begin": speaker.begin, "end": speaker.end}[asked]()
                if isinstance(asked, str)
                else speaker.measure(*asked)
            )
    except PreheatError as error:
        answer({"failed": str(error).splitlines()[0], "code": error.exit_code})


if __name__ == "__main__":
    main()
