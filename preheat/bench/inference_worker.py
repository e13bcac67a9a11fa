"""One contender of `preheat bench --inference` in its own process: `python -m preheat.bench.inference_worker JOB.json`.

Opens its model once and then measures one shape per request: a line of JSON in, a line out. So contenders can alternate
without reloading their models; a worker sleeps while another measures.

The job is an `InferenceJob`. A request is "begin", "end", or the rows and the length of a shape; the first answer is an
`OpenedModel`, without a request.
"""

from __future__ import annotations

import json
import os
import sys
import time

_BEGUN = time.perf_counter()  # before anything heavy is imported: start-up is measured from here

from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from preheat.bench.messages import Ending, Generation, InferenceJob, OpenedModel
    from preheat.models.generation.generate import Timed

__all__ = ["InferenceWorker", "main"]

_ROWS = 16
"""Rows of the longest length over which the loss is computed."""
_TEXT = 1 << 20
"""Maximum tokens of text to read."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class InferenceWorker:
    """A model with the generation settings of a job.

    Raises:
        PreheatError: the model cannot be opened, or does not support the settings.
    """

    def __init__(self, job: InferenceJob):
        from preheat.inference.load import load_draft_model, load_model
        from preheat.models.hf import read_facts, require_decoder_only

        self.job, self.tokens, self.settings = job, job.tokens, job.settings
        # transformers' engine opens the model too, for its device, positions and tokenizer.
        opened = load_model(job.model)
        self.device, self.tokenizer = opened.build.device, opened.tokenizer
        self.positions = opened.build.model.positions
        self.model: PreTrainedModel = opened.build.trained[0]
        require_decoder_only(self.model, "preheat bench --inference")
        if job.engine == "transformers":
            self.model = _load_plain(job, next(self.model.parameters()).device)
        elif job.dtype is not None:
            _cast(self.model, job.dtype)
        self.draft = (
            None if self.settings.draft_model is None else load_draft_model(self.settings.draft_model, self.tokenizer)
        )
        if self.draft is not None and job.dtype is not None:
            _cast(self.draft, job.dtype)
        self.facts = read_facts(self.model.config)
        self._text: list[int] = []
        self._baseline: int | None = None

    def begin(self) -> None:
        """Reads the text from which prompts are cut (a file, or Python's standard library), and starts measuring peak
        memory.

        Raises:
            DataError: the text is shorter than a prompt.
        """
        from preheat.data.sources import open_source
        from preheat.errors import DataError
        from preheat.hardware.probe import can_begin_peak, peak_bytes, start_peak
        from preheat.recipe import Data

        file, cells = self.job.text, self.job.cells
        for _, row in open_source(Data(source=file or "stdlib", layout="text")).rows():
            text = row["text"] if isinstance(row, dict) else row
            self._text += self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
            # Enough for all rows of every shape to differ, and for the rows of the loss.
            if len(self._text) >= min(_TEXT, max(max(rows, _ROWS) * length for rows, length in cells)):
                break
        if len(self._text) < (longest := max(length for _, length in cells)):
            raise DataError(
                f"--text {file}: has {len(self._text):,} tokens, and a prompt has {longest:,}; name a longer "
                "one, or shorter --lengths"
            )
        # From here on, so that the peak of opening the model does not hide that of generation.
        if can_begin_peak(self.device.kind):
            start_peak(self.device.kind)
            self._baseline = peak_bytes(self.device.kind, since_begun=True)

    def _cut_prompt(self, row: int, length: int) -> list[int]:
        """Returns the prompt of a row: consecutive sections of the text, which repeats at its end."""
        # A short text repeats from its start rather than end in a shorter prompt.
        start = row % (len(self._text) // length) * length
        return self._text[start : start + length]

    def about(self) -> OpenedModel:
        """Returns the sizes of the model and the predicted cache of each shape."""
        from preheat.bench.messages import OpenedModel
        from preheat.models.generation.generate import has_attention_pattern, resolve_auto
        from preheat.models.generation.kv_cache import cache_capacity
        from preheat.planning.kv_cache_size import CACHES, count_cache_bytes

        model = self.model
        # Settled once here, so that prediction and measurement use the same kind of cache.
        self.settings = resolve_auto(self.settings, model, 0 if has_attention_pattern(model) else self.tokens)
        # The integer codes of a compressed model are skipped.
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        # Bytes per element, and per vector for its scale.
        size, scale = CACHES["int8"] if self.settings.cache == "int8" else (dtype.itemsize, 0.0)

        def cache(rows: int, length: int) -> float:
            positions = cache_capacity(self.settings, length + self.tokens - 1)  # the last token is never an input
            settings = self.settings
            return count_cache_bytes(
                model.config, positions, rows, size, scale=scale, window=settings.window, latent=False
            )

        # By storage, so that tied weights count once.
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for m in (model, self.draft)
            if m
            for t in _collect_weights(m)
        }
        return OpenedModel(
            parameters=sum(p.numel() for p in model.parameters()),
            weights_bytes=sum(storages.values()),
            dtype=str(dtype).removeprefix("torch."),
            positions=self.positions,
            vocabulary=self.facts.vocabulary,
            device_kind=self.device.kind,
            device_name=self.device.name,
            device_memory=self.device.memory,
            cache_bytes=[cache(rows, length) for rows, length in self.job.cells],
            startup_seconds=time.perf_counter() - _BEGUN,
        )

    def measure(self, rows: int, length: int) -> Generation:
        """Generates `rows` texts after prompts of `length` tokens."""
        from preheat.models.generation.generate import Timed, generate

        prompts = [self._cut_prompt(row, length) for row in range(rows)]
        timed = Timed()
        if self.job.engine == "transformers":
            texts = self._generate_by_transformers(prompts, timed)
        else:
            # Speculative decoding generates row by row, so that the accepted tokens of each row count.
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
                    kernel=self.job.kernel,
                )
            ]
            return _join_generations(parts, texts)
        return _join_generations([timed], texts)

    def _generate_by_transformers(self, prompts: list[list[int]], timed: Timed) -> list[list[int]]:
        import torch
        from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

        from preheat.models.generation.kv_cache import cache_nbytes
        from preheat.models.token_mixers import pass_cache

        class Clock(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Tensor, **options: bool) -> Tensor:
                # Kernels run asynchronously, so a clock without this would measure launches.
                input_ids[:, -1].tolist()  # waits for the device
                timed.at.append(time.perf_counter())
                timed.tokens.append(len(input_ids))
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        ids = torch.tensor(prompts, device=self.model.device)
        cache = DynamicCache(config=self.model.config)
        config = GenerationConfig(max_new_tokens=self.tokens, do_sample=False, pad_token_id=0)
        timed.begun = time.perf_counter()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([Clock()]),
            **pass_cache(self.model, cache),
        )
        timed.cache_bytes = cache_nbytes(cache)
        return list(output[:, ids.shape[1] :].tolist())

    def end(self) -> Ending:
        """Measures the peak memory of all shapes and the loss."""
        import torch

        from preheat.bench.messages import Ending
        from preheat.hardware.probe import peak_bytes
        from preheat.models.generation.generate import evaluate_cached_loss

        # Before the loss, whose longer pass would raise the peak.
        beyond = (
            None
            if self._baseline is None
            else (peak_bytes(self.device.kind, since_begun=True) - self._baseline) / 2**30
        )
        length = max(length for _, length in self.job.cells)
        # [_ROWS, length]: the same rows for every contender with this tokenizer.
        rows = torch.tensor([self._cut_prompt(row, length) for row in range(_ROWS)])
        return Ending(beyond, evaluate_cached_loss(self.model, rows, self.settings, self.job.kernel))


def _join_generations(parts: list[Timed], texts: list[list[int]]) -> Generation:
    """Sums the timings of groups that were generated one after the other."""
    from preheat.bench.messages import Generation

    return Generation(
        # Groups ran one after the other, so their times add up. The first pass of each is its prefill.
        first=sum(part.at[0] - part.begun for part in parts),
        rest=sum(part.at[-1] - part.at[0] for part in parts),
        passes=sum(len(part.at) - 1 for part in parts),
        drawn=sum(sum(part.tokens[1:]) for part in parts),
        cache_bytes=sum(part.cache_bytes for part in parts),
        texts=texts,
    )


def _load_plain(job: InferenceJob, device: torch.device) -> PreTrainedModel:
    """Loads the folder's model with transformers alone.

    Raises:
        RunError: transformers cannot open it, or finds weights for only some tensors and would initialize the others.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from preheat.errors import RunError

    if not (Path(job.model) / "config.json").is_file():
        raise RunError(
            f"{job.model}: engine=transformers opens Hugging Face folders only (no config.json); export the run"
        )
    dtype = getattr(torch, DTYPES[job.dtype or "fp32"])
    model, info = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    # transformers only warns, and the speed of random weights would look like a valid result.
    if missing := sorted(info["missing_keys"]):
        raise RunError(
            f"{job.model}: engine=transformers finds no weights for {len(missing)} tensors of the model "
            f"({missing[0]}), and would initialize them at random; it does not open what `preheat compress` wrote: "
            "leave engine out, or name the original model"
        )
    model.generation_config = GenerationConfig()  # without end tokens: every text gets its full length
    return model.to(device).eval()


def _cast(model: PreTrainedModel, dtype: str) -> None:
    """Casts plain parameters in place.

    Buffers are not cast, because rotary frequencies would lose precision, nor are weights in a quantized format.
    """
    import torch

    for p in model.parameters():
        # The exact type: subclasses of tensors hold quantized codes with scales.
        if type(p.data) is torch.Tensor and p.is_floating_point():
            p.data = p.data.to(getattr(torch, DTYPES[dtype]))


def _collect_weights(model: PreTrainedModel) -> list[Tensor]:
    """Returns the tensors that hold a model's weights, including those inside of tensor subclasses."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    # A subclass (torchao) reports its logical size; its inner tensors are what memory holds.
    tensors, left = [], [*model.parameters(), *model.buffers()]
    while left:
        tensor = left.pop()
        if is_traceable_wrapper_subclass(tensor):
            left += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        else:
            tensors.append(tensor)
    return tensors


def main() -> None:
    from preheat.bench.messages import InferenceJob, encode
    from preheat.errors import PreheatError
    from preheat.recipe import Sample

    # The original standard output stays open under another descriptor, and descriptor 1 leads to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries may print to standard output, which is for answers

    def send_answer(text: str) -> None:
        print(text, file=answers, flush=True)

    values = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        worker = InferenceWorker(InferenceJob(**values | {"settings": Sample(**values["settings"])}))
        send_answer(encode(worker.about()))
        for line in sys.stdin:
            request = json.loads(line)
            if request == "begin":
                worker.begin()
                send_answer("{}")
            elif request == "end":
                send_answer(encode(worker.end()))
            else:
                send_answer(encode(worker.measure(*request)))
    except PreheatError as error:
        send_answer(json.dumps({"failed": str(error).splitlines()[0], "code": error.exit_code}))


if __name__ == "__main__":
    main()
