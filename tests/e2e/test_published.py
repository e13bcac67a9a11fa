"""benchmarks/published.py: rows of a table in, predictions with intervals and reasons out; what a row's words say of it is taken, its measured values are not."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..fork_server import Fork
from ..unit.plans import plan_of, values_of

ROOT = Path(__file__).parents[2]
HEADER = (
    "id,source_repo,source_path,model,params_b,hidden,layers,heads,kv_heads,ffn,vocab,seq_len,gpu,n_gpus,dp_replicate,dp_shard,zero_stage,"
    "tp,sequence_parallel,pp,vpp,pp_schedule,cp,ep,micro_batch,global_batch_seqs,precision,optimizer,activation_checkpointing,method,lora_rank,compile,attention,fused_or_chunked_ce,cpu_offload,peak_mem_gib,tokens_per_s_per_gpu,tflops_per_gpu,mfu_pct,notes"
)
COLUMNS = HEADER.split(",")
ALL_SAID, LEFT_OPEN = 1.05, 1.10  # on what is seen, for what is not


def row(name: str, **said: Any) -> dict[str, str]:
    small: dict[str, Any] = {
        "hidden": 256,
        "layers": 4,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 1024,
        "vocab": 8192,
        "seq_len": 512,
    }
    plain = {
        "gpu": "H100",
        "n_gpus": 1,
        "micro_batch": 2,
        "precision": "bf16 (pure)",
        "optimizer": "adamw",
        "method": "full-ft",
    }
    return dict.fromkeys(COLUMNS, "") | {
        key: str(value) for key, value in {"id": name, **small, **plain, **said}.items()
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("published")
    of_torch = {
        "precision": "bf16",
        "pp": 2,
        "dp_shard": 2,
        "zero_stage": 3,
        "n_gpus": 4,
        "method": "pretrain",
        "global_batch_seqs": 32,
    }
    sharded = {"n_gpus": 2, "dp_shard": 2, "zero_stage": 3}
    many = {
        "method": "pretrain",
        "compile": "yes",
        "micro_batch": 64,
        "layers": 24,
        "activation_checkpointing": "selective",
    }
    gpt = {
        "precision": "bf16",
        "sequence_parallel": "no",
        "dp_replicate": 2,
        "n_gpus": 2,
        "method": "pretrain",
        "compile": "yes",
    }
    unsloth = {"method": "qlora", "lora_rank": 8, "source_repo": "unslothai/unsloth", "notes": "Unsloth on OASST"}
    crowded = {"gpu": "Card-2GB", "micro_batch": 128, "compile": "yes"}
    rows = [
        row("plain", activation_checkpointing="full", compile="yes"),
        row("measured otherwise", activation_checkpointing="full", compile="yes", peak_mem_gib=77, tokens_per_s_per_gpu=1, source_repo="a/b"),
        row("reserved", activation_checkpointing="full", compile="yes", notes="peak reserved"),
        row("lengths vary", activation_checkpointing="full", compile="yes", notes="variable lengths"),
        row("queries", method="lora", lora_rank=8, notes="LoRA on q,v"),
        row("all maps", method="lora", lora_rank=8, notes="LoRA on q,k,v,o,mlp"),
        row("QLoRA by transformers", **unsloth | {"notes": "HF"}, activation_checkpointing="full", seq_len=2048),
        row("QLoRA by Unsloth", **unsloth, activation_checkpointing="full", seq_len=2048),
        row("Unsloth", **unsloth),
        row("Unsloth recomputes", **unsloth, activation_checkpointing="full"),
        row("Unsloth keeps", **unsloth, activation_checkpointing="none"),
        row("FSDP's root", **sharded, activation_checkpointing="full", source_repo="huggingface/peft"),
        row("no root", **sharded, activation_checkpointing="full", source_repo="stas00/ml-engineering", notes="DeepSpeed"),
        row("512 tokens of a row", notes="variable lengths"),
        row("Alpaca's", seq_len=4096, notes="variable-length Alpaca batches, not 4096 tokens"),
        row("micro-batches of 8", **of_torch, micro_batch=8),
        row("as many micro-batches as stages", **of_torch, micro_batch=""),
        row("tunes", **sharded),
        row("tunes, allocated", **sharded, notes="max allocated"),
        row("tunes, reserved", **sharded, notes="peak reserved"),
        row("pretrains", **sharded, method="pretrain", compile="yes"),
        row("pretrains, reserved", **sharded, method="pretrain", compile="yes", notes="peak reserved"),
        row("pretrains on AMD's", **sharded, **many, gpu="MI300X"),
        row("pretrains on NVIDIA's", **sharded, **many, gpu="H200"),
        row("pretrains and says little", method="pretrain", micro_batch="", seq_len="", precision=""),
        row("four rows", method="pretrain", micro_batch=4, seq_len=2048, precision="bf16 (true)"),
        row("recomputes", **crowded, activation_checkpointing="full"),
        row("recomputes, it seems", **crowded),
        row("recomputes nothing", **crowded, activation_checkpointing="none"),
        row("Llama", model="Llama", **gpt),
        row("GPT", model="GPT", **gpt),
        row("no sizes", hidden="", layers="", model="of some kind"),
    ]  # fmt: skip
    with (folder / "in.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (folder / "gpus.csv").write_text("gpu,mem_gib\n", encoding="utf-8")
    files = ["--runs", folder / "in.csv", "--gpus", folder / "gpus.csv", "--out", folder / "out.csv"]
    arguments = [str(ROOT / "benchmarks/published.py"), *map(str, files), "--jobs", "1", "--new", "measured"]
    process = Fork(arguments, function="tests.fork_server:script")
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert re.search(r"\*\*new sources, of 1 measured\*\* \| 1 \| \d", out)
    assert "| a/b, new | 1 |" in out
    assert "known sources" not in out  # no other row was measured
    with (folder / "out.csv").open(encoding="utf-8") as file:
        return {found["id"]: found for found in csv.DictReader(file)}


def gib(answers: dict[str, dict[str, str]], name: str) -> tuple[float, float, float]:
    low, said, high = (float(answers[name][key]) for key in ("low_gib", "predicted_gib", "high_gib"))
    assert low < said < high
    return low, said, high


def test_a_row_without_sizes_says_why_not(answers: dict[str, dict[str, str]]) -> None:
    assert answers["no sizes"]["predicted_gib"] == answers["no sizes"]["predicted_tok_s"] == ""
    assert "neither the model's sizes nor a name" in answers["no sizes"]["reason"]


def test_states_of_a_plain_row_are_those_of_the_closed_form(answers: dict[str, dict[str, str]]) -> None:
    """Weights, gradients and two moments of 2 bytes each, and 32 MiB of cuBLAS; rows of 1,024 tokens add little, and a compiled tool's loss is by few rows."""
    parameters = 2 * 8192 * 256 + 4 * (4 * 256 * 256 + 3 * 256 * 1024)
    _, said, _ = gib(answers, "plain")
    assert 1.0 < (said - 32 / 2**10) / (8 * parameters / 2**30) < 1.5
    assert float(answers["plain"]["predicted_tok_s"]) > 0


def test_measured_values_and_sources_are_not_looked_at(answers: dict[str, dict[str, str]]) -> None:
    assert gib(answers, "measured otherwise") == gib(answers, "plain")


def test_words_of_a_row_say_which_memory_is_meant_and_what_is_adapted(answers: dict[str, dict[str, str]]) -> None:
    assert gib(answers, "reserved")[1] > gib(answers, "plain")[1]
    assert gib(answers, "queries")[1] < gib(answers, "all maps")[1]


def test_which_memory_is_meant_where_no_word_says_it(answers: dict[str, dict[str, str]]) -> None:
    assert gib(answers, "tunes") == gib(answers, "tunes, allocated")
    assert gib(answers, "tunes, reserved")[1] > gib(answers, "tunes")[1]
    assert gib(answers, "pretrains") == gib(answers, "pretrains, reserved")


def test_what_a_row_leaves_open_is_what_tools_do(answers: dict[str, dict[str, str]]) -> None:
    assert gib(answers, "Alpaca's") == gib(answers, "512 tokens of a row")
    more = LEFT_OPEN / ALL_SAID
    assert gib(answers, "as many micro-batches as stages")[1] == pytest.approx(
        more * gib(answers, "micro-batches of 8")[1]
    )
    assert gib(answers, "pretrains and says little")[1] == pytest.approx(more * gib(answers, "four rows")[1])


def test_what_a_row_says_is_not_changed_to_make_it_fit(answers: dict[str, dict[str, str]]) -> None:
    assert gib(answers, "recomputes, it seems") == gib(answers, "recomputes")
    assert float(answers["recomputes nothing"]["predicted_gib"]) == 2.0  # more than that, and it ran


def test_who_pretrains_with_shards_has_segments_that_grow_where_the_driver_can(
    answers: dict[str, dict[str, str]],
) -> None:
    assert gib(answers, "pretrains on AMD's")[1] > gib(answers, "pretrains on NVIDIA's")[1]


def test_megatrons_gpt_keeps_masks_of_dropped_hidden_states(answers: dict[str, dict[str, str]]) -> None:
    """Two masks of a byte a number in each of four layers, of 1,024 tokens."""
    more = gib(answers, "GPT")[1] - gib(answers, "Llama")[1]
    assert more == pytest.approx(ALL_SAID * 2 * 4 * 1024 * 256 / 2**30)


def test_trainers_defaults_are_taken_where_a_row_says_nothing(answers: dict[str, dict[str, str]]) -> None:
    """Unsloth recomputes layers by default; FSDP1's root keeps embedding and head in bf16, DeepSpeed does not."""
    assert gib(answers, "Unsloth") == gib(answers, "Unsloth recomputes") < gib(answers, "Unsloth keeps")
    more = gib(answers, "FSDP's root")[1] - gib(answers, "no root")[1]
    assert more == pytest.approx(ALL_SAID * 2 * 8192 * 256 / 2**30)


def test_transformers_operators_copies_and_dequantization_take_time(answers: dict[str, dict[str, str]]) -> None:
    by_transformers, by_unsloth = (
        float(answers[f"QLoRA by {name}"]["predicted_tok_s"]) for name in ("transformers", "Unsloth")
    )
    assert by_transformers < 0.8 * by_unsloth


def test_a_4_bit_base_prepared_by_peft_keeps_the_rest_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsloth's base is not, and its loss computes the gradient in place of the logits."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import published_rows

    def build(notes: str) -> Any:
        said = {"method": "qlora", "lora_rank": 8, "source_repo": "unslothai/unsloth", "precision": "bf16, nf4 weights"}
        return published_rows.build_recipe(row("any", **said, notes=notes)).techniques

    by_transformers, by_unsloth = build("HF on OASST"), build("Unsloth on OASST")
    assert (by_transformers["mixed_precision"].frozen, by_unsloth["mixed_precision"].frozen) == ("fp32", "auto")
    assert "chunked_loss" not in by_transformers
    assert by_unsloth["chunked_loss"].rows == 2 * 512


def test_time_is_that_of_the_mean_length_and_of_the_trainers_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import published_rows

    said = {"method": "lora", "lora_rank": 8, "activation_checkpointing": "full", "seq_len": 768}
    padded = row("any", **said, source_repo="huggingface/peft", notes="variable lengths (cap 768)")
    recipe = published_rows.build_recipe(padded)
    timed = published_rows.add_time_settings(padded, recipe)
    assert (recipe.batch.seq_len, timed.batch.seq_len) == (768, 216)
    assert recipe.techniques.keys() - timed.techniques.keys() == {"fused_operators"}
    compiled = row("any", **said, compile="yes")
    assert published_rows.add_time_settings(
        compiled, published_rows.build_recipe(compiled)
    ) == published_rows.build_recipe(compiled)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"source_repo": "bigscience-workshop/bigscience", "gpu": "V100-32GB"}, "Megatron-DeepSpeed of 2021"),
        ({"source_repo": "bigscience-workshop/bigscience", "gpu": "A100-80GB"}, "Megatron-DeepSpeed"),
        ({"source_repo": "hiyouga/LLaMA-Factory", "notes": "Unsloth+FA2"}, "Unsloth"),
        ({"source_repo": "hiyouga/LLaMA-Factory", "notes": "HF+FA2"}, "LLaMA-Factory"),
        ({"source_repo": "huggingface/peft", "notes": "variable lengths (cap 768)"}, "peft's comparison of methods"),
        ({"source_repo": "a/b"}, "transformers Trainer, TRL"),
        ({"source_repo": "a/b", "method": "pretrain", "dp_shard": 8}, "torchtitan"),
        ({"source_repo": "a/b", "method": "pretrain", "sequence_parallel": "no"}, "Megatron-LM, NeMo, Megatron-Bridge"),
    ],
)
def test_the_trainer_of_a_row(said: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import trainers

    assert trainers.find_trainer(row("any", **said)).name == name
    assert all(trainer.sources for *_, trainer in trainers.RAN)


def test_deepspeeds_gradients_stand_in_bf16_beside_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import published

    memory = {"parameters": 3.0}
    plan, recipe = plan_of(values_of(4.0, 8.0, memory=memory)), SimpleNamespace(techniques={"pipeline_parallel": None})
    for precision, source, gib in (("bf16", "bigscience", 3.0), ("fp16", "bigscience", 0.0), ("bf16", "other", 0.0)):
        said = row("any", precision=precision, source_repo=f"bigscience-workshop/{source}", gpu="A100-80GB")
        assert published.estimate_half_gradients(said, plan, recipe) == gib


def test_a_guess_has_a_wider_interval(answers: dict[str, dict[str, str]]) -> None:
    (low, said, high), (least, same, most) = gib(answers, "plain"), gib(answers, "lengths vary")
    assert same == pytest.approx(LEFT_OPEN / ALL_SAID * said)
    assert least < low
    assert most > high
