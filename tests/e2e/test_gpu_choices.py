"""What a search chooses for a GPU beside a brute force over what a careful user would try: benchmarks/gpu_choices.py, two of its sixteen pairs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "gpu_choices.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fused_by"), [("llama-3.2-1b full", "compile"), ("qwen3-8b qlora", "fused_operators")]
)
def test_a_search_comes_near_the_best_that_a_user_would_find(model: str, fused_by: str) -> None:
    case = next(case for case in _SCRIPT["CASES"] if case.name == model)
    chosen, _ = _SCRIPT["search_choice"](case, "RTX-4090")
    best = _SCRIPT["search_by_brute_force"](case, ("RTX-4090",))["RTX-4090"]
    assert not _SCRIPT["find_faults"](chosen, best), (chosen.what, chosen.speed, best.what, best.speed)
    assert fused_by in chosen.techniques  # adapters are joined by the latter


@pytest.mark.parametrize("case", _SCRIPT["CASES"], ids=lambda case: case.name)
def test_the_settings_of_the_brute_force_exist(case: Any) -> None:
    settings = list(_SCRIPT["iterate_settings"](case))
    assert len(settings) == len(set(settings)) >= 30
    assert any(t.name() == "fsdp" for each in settings for t in each) is (case.devices > 1)


def test_a_grouped_model_is_planned_with_efficient_attention_whatever_the_precision() -> None:
    """A small model of Qwen's shape, by the same functions: numbers kept, and rounded."""
    case = _SCRIPT["Case"]("qwen2.5-0.5b", "lora")
    for allow in ("exact", "rounding"):
        chosen, _ = _SCRIPT["search_choice"](case, "RTX-4090", passes=2, allow=allow)
        assert "efficient_attention" in chosen.techniques, (allow, chosen.what)
        # Either fuses small operators.
        assert bool({"compile", "fused_operators"} & chosen.techniques) is (allow == "rounding")
