"""Closed forms against published claims, and against the dry run."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.errors import RecipeError
from preheat.models import configs
from preheat.planning.analytic import (
    ModelSize,
    compute_optimal,
    count_model_parameters,
    estimate_serving,
    estimate_state_bytes,
)
from preheat.planning.dry_run import observe
from preheat.planning.kv_cache_size import count_cache_bytes
from preheat.planning.request import Request
from preheat.recipe import override, parse

from ...conftest import DEVICE, tiny

GIB = 2**30
BLOOM, NEOX, T5, LLAMA2 = 176_247_271_424, 20_554_567_680, 2_851_000_000, 6_738_415_616


@pytest.fixture(scope="module")
def claims() -> dict[str, float]:
    """Published figures by id, in the unit that they are given in."""
    beside = Path(__file__).parents[4] / "shared"
    file = Path(os.environ.get("PREHEAT_DATA", beside / "data")).parent / "published" / "claims.csv"
    if not file.exists():
        pytest.skip("the published claims are not beside this clone (set PREHEAT_DATA)")
    with file.open(encoding="utf-8") as rows:
        return {
            row["id"]: float(row["value"]) for row in csv.DictReader(rows) if row["value"].replace(".", "").isdigit()
        }


def test_states_are_those_that_are_published(claims: dict[str, float]) -> None:
    assert estimate_state_bytes(BLOOM) / 1e12 == pytest.approx(2.82, abs=0.005)
    assert estimate_state_bytes(BLOOM) / 1e12 == pytest.approx(claims["bloom-ft"], rel=0.03)  # "almost 3 TB"
    assert estimate_state_bytes(BLOOM, gradients=0) / 2**40 == pytest.approx(claims["bloom-ckpt"], rel=0.03)
    assert estimate_state_bytes(BLOOM, gradients=0, optimizer=0) / GIB == pytest.approx(claims["bloom-w"], rel=0.005)
    assert estimate_state_bytes(NEOX, gradients=0, optimizer=0) / GIB == pytest.approx(claims["neox-slim"], rel=0.03)
    # DeepSpeed counts fp32 gradients with the optimizer, and one layer's gathered weights with stage 3.
    assert estimate_state_bytes(T5, optimizer=16, zero=1, devices=8) / GIB == pytest.approx(claims["ds-z2"], rel=0.005)
    assert estimate_state_bytes(T5, optimizer=14, zero=3, devices=8) / GIB == pytest.approx(claims["ds-z3"], rel=0.03)


def test_the_cache_is_that_which_is_published(claims: dict[str, float]) -> None:
    import transformers

    palm = transformers.LlamaConfig(hidden_size=48 * 128, num_attention_heads=48, num_hidden_layers=118)
    assert count_cache_bytes(palm, 2048, rows=512) / 1e12 == pytest.approx(claims["kv-540b"], rel=0.02)


def test_layers_with_windows_and_latent_attention_keep_less() -> None:
    gemma, deepseek = configs.preset_config("gemma-3-1b"), configs.preset_config("deepseek-v3")
    # 26 layers, every sixth of them full; one key-value head of 256.
    assert count_cache_bytes(gemma, 8192) == (22 * 512 + 4 * 8192) * 2 * 256 * 2
    assert count_cache_bytes(deepseek, 1000) == 61 * 1000 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("zero", "techniques"), [(0, "{data_parallel: {}}"), (1, "{data_parallel: {}, zero1: {}}"), (3, "{fsdp: {}}")]
)
def test_shares_of_states_are_what_the_dry_run_sees(zero: int, techniques: str) -> None:
    wide = "model={family: llama, num_layers: 3, hidden_size: 128, num_heads: 4, vocab_size: 256}"
    recipe = override(tiny(rows=4), wide, f"techniques={techniques}")
    seen = observe(Request(recipe, DEVICE, vocabulary=96, world=4))
    whole = observe(Request(override(recipe, "techniques={}"), DEVICE, vocabulary=96)).parameters
    at = seen.categories["update"]
    wanted = estimate_state_bytes(whole, weights=4, gradients=0, optimizer=8, zero=zero, devices=4)  # type: ignore[arg-type]
    assert at["parameters"] + at["optimizer"] == pytest.approx(wanted, rel=0.03)


def test_serving_fills_what_weights_leave() -> None:
    recipe = parse("model: {preset: llama-2-7b}\nstop: {max_steps: 1}")
    model = count_model_parameters(recipe)
    assert (model.parameters, model.ends) == (LLAMA2, 2 * 32000 * 4096)
    half, eighth, quarter = estimate_serving(model, memory=24 * GIB, length=4096, bandwidth=1e12)
    assert half.weights / 1e9 == pytest.approx(13.48, abs=0.01)
    assert half.cache == 2 * GIB  # 32 layers, 32 heads of 128, keys and values in bf16: 512 KiB a token
    assert half.rows == (24 * GIB - 2**29 - half.weights) // half.cache == 5
    assert half.rows < eighth.rows < quarter.rows
    assert estimate_serving(model, memory=8 * GIB, length=4096)[0].rows == 0
    assert half.tokens_per_second == pytest.approx(1e12 * 5 / (half.weights + 5 * half.cache))


def test_a_batch_is_served_by_the_devices_that_hold_its_cache() -> None:
    import transformers

    # A PaLM of 540B with 48 key-value heads of 128: 3 TB at 512 sequences of 2,048 tokens (arXiv:2211.05102, section 3.3).
    palm = transformers.LlamaConfig(hidden_size=18432, num_attention_heads=48, head_dim=128, num_hidden_layers=118)
    model = ModelSize(palm, 540_000_000_000, ends=0)
    ask = {"memory": 80 * GIB, "length": 2048, "bandwidth": 2e12, "batch": 512}
    whole, *_ = estimate_serving(model, **ask, devices=64)
    assert whole.batch is not None
    assert whole.batch.cache == 2 * 118 * 48 * 128 * 2 * 512 * 2048  # 3.04e12
    devices = whole.batch.devices
    assert devices is not None
    for count, fits in ((devices, True), (devices - 1, False)):
        assert (estimate_serving(model, **ask, devices=count)[0].rows >= 512) is fits
    # With 8 devices nothing fits, and one head's cache alone is larger than this device.
    assert estimate_serving(model, **ask | {"memory": 40 * GIB}, devices=8)[0].batch == replace(
        whole.batch, devices=None, tokens_per_second=None
    )
    # Nor does anything fit beside what a device reserves.
    assert estimate_serving(model, **ask | {"memory": 2**28})[0].batch == replace(
        whole.batch, devices=None, tokens_per_second=None
    )


@pytest.mark.parametrize("batch", [1, 40, 60, 100])
def test_devices_hold_whole_heads(batch: int) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32
    )
    model = ModelSize(config, 8_030_261_248, ends=0)
    ask = {"memory": 24 * GIB, "length": 8192, "batch": batch}
    planned = estimate_serving(model, **ask)[0].batch
    assert planned is not None
    # With 3 devices one has 3 of 8 heads, and 5 devices hold no more of the cache than 4.
    fits = [n for n in range(1, 9) if estimate_serving(model, **ask, devices=n)[0].rows >= batch]
    assert planned.devices == fits[0]
    assert estimate_serving(model, **ask, devices=3)[0].cache == planned.cache / batch * 3 / 8


def test_a_budget_is_spent_as_in_the_paper() -> None:
    for flops, size in ((1.92e19, 0.4e9), (1.23e22, 10e9), (5.76e23, 67e9)):  # table 3, approach 1
        assert compute_optimal(flops)[0].parameters == pytest.approx(size, rel=0.05)
    for o in compute_optimal(1e21):
        assert 6 * o.parameters * o.tokens == pytest.approx(1e21)
    for nonsense in (0, -1, 1e5, 1e40):
        with pytest.raises(RecipeError, match="--compute-budget"):
            compute_optimal(nonsense)
