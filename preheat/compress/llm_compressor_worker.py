"""Quantizes a model inside llm-compressor's environment, which has no preheat: python llm_compressor_worker.py FOLDER.

FOLDER contains model/ and asked.json ({by, bits, maps: {name: group}, rows}); the result is written to made/ in the
layout of compressed-tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    import llmcompressor
    import torch
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    if not torch.accelerator.is_available():
        # llm-compressor 0.14's AWQ always pins memory, which fails without an accelerator.
        IntermediatesCache.pin_memory = lambda self, index: None
    request: dict[str, Any] = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    maps: dict[str, int | None] = request["maps"]
    groups: dict[str, dict[str, object]] = {}
    # llm-compressor wants one configuration for each group size, with the names of its maps.
    for size in dict.fromkeys(maps.values()):
        granularity = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
        weights = {"num_bits": request["bits"], "type": "int", "symmetric": True, **granularity}
        groups[f"of_{size}"] = {"targets": [name for name, group in maps.items() if group == size], "weights": weights}
    # In order: AWQ scales the weights, then they are quantized.
    modifiers: list[AWQModifier | GPTQModifier | QuantizationModifier] = (
        [AWQModifier()] if request["by"].startswith("awq") else []
    )
    # "static": quantizes columns in the order of activation size, and stores them in their original order.
    modifiers.append(
        GPTQModifier(config_groups=groups, actorder="static")
        if request["by"].endswith("gptq")
        else QuantizationModifier(config_groups=groups)
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16, local_files_only=True)
    rows = [torch.tensor(row) for row in request["rows"]]
    examples = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    # Single rows, because their lengths may differ.
    data: DataLoader[dict[str, torch.Tensor]] = DataLoader(examples, batch_size=1)  # type: ignore[arg-type]
    # oneshot requires a tokenizer, although the rows are token ids already.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"": 0})))
    llmcompressor.oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=data,
        recipe=modifiers,
        max_seq_length=max(map(len, rows)),
        num_calibration_samples=len(rows),
    )
    # In the packed format that `llm_compressor._read` unpacks.
    model.save_pretrained(folder / "made", save_compressed=True)
    (folder / "made/version.json").write_text(json.dumps(llmcompressor.__version__), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
