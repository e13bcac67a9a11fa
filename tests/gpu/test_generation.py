"""Compiled decoding by graphs of CUDA's: the texts of the model as it is. Not yet run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from preheat.models.generation.generate import generate
from preheat.recipe import Sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Tokens:
    """A tokenizer of one letter a token."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return "x" * len(ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return "x"


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9}, {"window": 16}])
def test_compiled_texts_are_those_of_the_model_as_it_is(settings: dict[str, Any]) -> None:
    """Batches of two sizes, one of them twice, so that a recorded graph is used over a cache that was emptied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            vocab_size=512,
        )
    ).cuda()
    prompts = [[3 + (7 * n + row) % 500 for n in range(4 + row)] for row in range(5)]
    plain, compiled = (
        generate(model, Tokens(), prompts, Sample(max_new_tokens=40, compile=compile, **settings), batch=2)  # type: ignore[arg-type]
        for compile in (False, True)
    )
    assert plain == compiled
    assert all(text.compiled for text in compiled)
