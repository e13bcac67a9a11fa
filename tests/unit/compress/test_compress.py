"""Methods on whole models: what is written is opened again exactly, what is lost, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from preheat import recipe as recipes
from preheat.compress import calibration_text, quantize, save_load
from preheat.compress.calibration import describe, require_rows, walk
from preheat.compress.compress import compress, read_variant, read_variants
from preheat.compress.llm_compressor import unpack_codes
from preheat.compress.registry import methods
from preheat.data.packing import Rows, Tokens
from preheat.engine.builder import build
from preheat.errors import DataError, RecipeError, RunError
from preheat.inference.load import LoadedModel, load_model
from preheat.models.hf import compute_reference_logits, head, softcap
from preheat.models.layerwise import plain_forward
from preheat.ops.quantization.linear import Int4Linear, Int8Linear

from ...conftest import DEVICE

PARTS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
QUANTIZE = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "llm_compressor" and "PREHEAT_LLM_COMPRESSOR" not in os.environ,
            reason="$PREHEAT_LLM_COMPRESSOR names no Python with llm-compressor",
        ),
    )
    for name, method in methods().items()
    if issubclass(method, quantize.High) and name != "fp8"  # which needs a GPU
]


@pytest.fixture(scope="module")
def stories(data_folder: Path) -> Path:
    return data_folder / "stories260K-hf"


@pytest.fixture(scope="module")
def rows(stories: Path, data_folder: Path) -> list[Tensor]:
    """24 rows of 128 tokens of the text that the model was trained on; the last 8 are not calibrated with."""
    from transformers import AutoTokenizer

    text = (data_folder / "text" / "tinystories_train_excerpt.txt").read_text(encoding="utf-8")[:40_000]
    ids = AutoTokenizer.from_pretrained(stories)(text).input_ids
    return [torch.tensor([ids[n * 128 : n * 128 + 128]]) for n in range(24)]


def compressed(source: Path, text: str, rows: list[Tensor]) -> tuple[LoadedModel, str]:
    opened = load_model(source)
    model: Any = opened.build.trained[0]
    model.requires_grad_(False)
    return opened, read_variant(text).method.apply(model, rows).what


@torch.no_grad()
def loss(model: Any, rows: list[Tensor]) -> float:
    with plain_forward(model):
        found = [
            nn.functional.cross_entropy(model(input_ids=row, use_cache=False).logits[0, :-1].float(), row[0, 1:])
            for row in rows
        ]
    return float(torch.stack(found).mean())


@pytest.fixture(scope="module")
def losses(stories: Path, rows: list[Tensor]) -> dict[str, float]:
    """Of the model as it is, and by methods with the same grid, on rows that were not calibrated with."""
    found = {"plain": loss(load_model(stories).build.trained[0], rows[16:])}
    for name in ("int8", "int4", "awq", "gptq"):
        found[name] = loss(compressed(stories, name, rows[:16])[0].build.trained[0], rows[16:])
    return found


def test_what_methods_lose(losses: dict[str, float]) -> None:
    rise = {name: value - losses["plain"] for name, value in losses.items()}
    assert abs(rise["int8"]) < 0.005, "half a percent of perplexity"
    assert rise["awq"] < 0.9 * rise["int4"]
    assert rise["gptq"] < 0.9 * rise["int4"]
    assert 0.01 < rise["int4"] < 0.1


@pytest.mark.parametrize("name", QUANTIZE)
def test_what_is_written_is_opened_again_exactly(name: str, stories: Path, rows: list[Tensor], tmp_path: Path) -> None:
    opened, words = compressed(stories, name, rows[:8])
    model: Any = opened.build.trained[0]
    save_load.write_model(model, opened, tmp_path, method=name, dtype=torch.float32)
    again = load_model(tmp_path)
    assert torch.equal(
        compute_reference_logits(again.build.trained[0], rows[0]), compute_reference_logits(model, rows[0])
    )  # type: ignore[arg-type]
    bits = float(words.partition(" bits a weight")[0].rpartition(" ")[2])
    assert 4 < bits < 8.5
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert "model.embed_tokens.codes" in held
    assert "lm_head.codes" not in held, "a tied head holds the embedding's codes"
    assert again.build.trained[0].lm_head.codes is again.build.trained[0].model.embed_tokens.codes  # type: ignore[union-attr]
    whole = sum(t.nbytes for t in held.values())
    assert whole < {"int8": 0.56, "int8_dynamic": 0.56, "int8_static": 0.57}.get(name, 0.45) * 2 * 260_032
    assert again.write(["Once upon"])[0].text


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "qwen3": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
              "intermediate_size": 96, "tie_word_embeddings": False},
    "gemma2": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
               "intermediate_size": 96, "sliding_window": 8},
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_other_families_are_written_and_opened(family: str, stories: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=512, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "plain")
    rows = [torch.randint(512, (1, 32)) for _ in range(8)]
    opened, _ = compressed(tmp_path / "plain", "gptq,keep=[head, embedding]", rows)
    model: Any = opened.build.trained[0]
    assert sum(isinstance(m, Int4Linear) for m in model.modules()) == {"gpt2": 12}.get(family, 21)
    (tmp_path / "made").mkdir()
    save_load.write_model(model, opened, tmp_path / "made", method="gptq", dtype=torch.float32)
    again: Any = load_model(tmp_path / "made").build.trained[0]
    assert torch.equal(compute_reference_logits(again, rows[0]), compute_reference_logits(model, rows[0]))
    assert softcap(again) == (30.0 if family == "gemma2" else None)
    shared = getattr(again.get_input_embeddings(), "codes", None) is again.lm_head.codes
    assert shared == (family == "gpt2"), (
        "Qwen3's here is not tied, and Gemma's embedding multiplies what it looks up: it stays"
    )


def test_a_layer_is_given_the_inputs_that_the_model_gives_it(stories: Path, rows: list[Tensor]) -> None:
    model: Any = load_model(stories).build.trained[0]
    seen: dict[str, Tensor] = {}
    places = {f"model.layers.{n}.mlp.down_proj": model.model.layers[n].mlp.down_proj for n in (0, 4)}
    hooks = [
        m.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: seen.get(name, 0) + args[0][0].t() @ args[0][0]})
        )
        for name, m in places.items()
    ]
    with torch.no_grad(), plain_forward(model):
        for row in rows[:8]:
            model(input_ids=row)
    for hook in hooks:
        hook.remove()
    for layer in walk(model, rows[:8]):
        for name, module in places.items():
            if name.startswith(f"{layer.name}."):
                found = layer.inputs({name: module})[name]
                assert found.tokens == 8 * 128
                assert float((found.gram - seen.pop(name)).norm() / found.gram.norm()) < 1e-5
    assert not seen


def test_sensitivity_is_the_curvature_of_the_loss(stories: Path, rows: list[Tensor]) -> None:
    """Against the loss with each map's weight changed by rounding, and by its opposite, whose mean has no slope in it."""
    from preheat.compress.methods.bit_budget import CHOICES, _quantize_map, estimate_sensitivity

    model: Any = load_model(stories).build.trained[0].requires_grad_(False)
    maps = {
        f"model.layers.{n}.{part}": model.get_submodule(f"model.layers.{n}.{part}") for n in (0, 2, 4) for part in PARTS
    }
    found, before = estimate_sensitivity(model, maps, rows), loss(model, rows)
    predicted, measured = [], []
    for name, module in maps.items():
        weight = module.weight.data
        change = _quantize_map(name, module, CHOICES[0]).weight - weight
        both = []
        for sign in (1, -1):
            module.weight.data = weight + sign * change
            both.append(loss(model, rows) - before)
        module.weight.data = weight
        predicted.append(found[name][0])
        measured.append(sum(both) / 2)
        assert found[name][1] > 20 * found[name][3] > found[name][4] >= 0, "four bits, eight, sixteen"
    assert float(torch.corrcoef(torch.tensor([predicted, measured]).double())[0, 1]) > 0.9
    assert 0.5 < sum(predicted) / sum(measured) < 2


def test_a_budget_is_kept_and_beats_uniform_bits(stories: Path, rows: list[Tensor]) -> None:
    opened, words = compressed(stories, "bit_budget,bits=5,rounding=nearest", rows[:16])
    spent = float(words.partition(" bits a weight")[0].rpartition(" ")[2])
    assert 4.9 < spent <= 5.0
    model: Any = opened.build.trained[0]
    assert {type(m) for n, m in model.named_modules() if n.endswith("_proj")} == {Int4Linear, Int8Linear}
    uniform = compressed(stories, "int4,symmetric=false,keep=[embedding, head]", rows[:16])[0]
    plain = loss(load_model(stories).build.trained[0], rows[16:])
    assert loss(model, rows[16:]) - plain < 0.9 * (loss(uniform.build.trained[0], rows[16:]) - plain)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gptp", "no such method; did you mean 'gptq'"),
        ("int4,grop=32", "unknown key 'int4.grop'; did you mean 'group'"),
        ("int4,group=half", "int4.group: must be .*got 'half'"),
        ("int4,group", "write settings as key=value"),
        ("bit_budget,bits=17", "more than the 16"),
    ],
)
def test_methods_and_settings_that_there_are_not(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        read_variant(text)


def test_settings_go_to_the_methods_that_have_them() -> None:
    names = ["int8", "awq", "int4,group=64"]
    int8, awq, int4 = (
        v.method for v in read_variants(names, None, ["group=32", "int4.symmetric=false", "keep=[head]"])
    )
    assert (awq.group, awq.symmetric, int4.group, int4.symmetric) == (32, True, 32, False)  # type: ignore[attr-defined]
    assert int8.keep == awq.keep == ("head",)  # type: ignore[attr-defined]
    budget = read_variants([], 5.0, ["keep=[head]"])[0].method
    assert (budget.bits, budget.keep) == (5.0, ("head",))  # type: ignore[attr-defined]
    for setting, words in (
        ("grop=32", r"int8, awq, int4: no setting 'grop' there; did you mean 'group'\?"),
        ("int8.group=32", r"--set int8.group=32: int8: no setting 'group' there"),
        ("gptq.group=32", r"'gptq' is not one of the chosen methods"),
        ("group", "write settings as key=value"),
    ):
        with pytest.raises(RecipeError, match=words):
            read_variants(names, None, [setting])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "int4,group=32",
            r"group: 32 does not divide the 172 inputs of model\.layers\.1\.mlp\.down_proj; the closest that does is 43",
        ),
        ("int4,keep=[dwn_proj]", "keep: 'dwn_proj' matches no linear map.*did you mean 'down_proj'"),
        ("int4,keep=.*", "leaves no linear map to quantize"),
        ("bit_budget,bits=3", r"the minimum is 4\.\d\d bits"),
    ],
)
def test_settings_that_the_model_cannot_have(text: str, words: str, stories: Path, rows: list[Tensor]) -> None:
    with pytest.raises(RecipeError, match=words):
        compressed(stories, text, rows[:8])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gptq,keep=[dwn_proj]", "keep: 'dwn_proj' matches no linear map.*did you mean 'down_proj'"),
        ("gptq,group=32", "group: 32 does not divide the 172 inputs"),
        ("wanda,keep=nothing", "keep: 'nothing' matches no linear map of the layers"),
        ("magnitude,keep=(x", r"keep: '\(x' is not a regular expression"),
    ],
)
def test_names_that_the_model_lacks_are_refused_before_the_text_is_read(
    text: str, words: str, stories: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=words):
        compress(stories, [read_variant(text)], tmp_path / "out", data=str(tmp_path / "missing.txt"))


def test_rows_that_teach_nothing_are_refused_with_numbers() -> None:
    row = torch.arange(32)[None]
    with pytest.raises(DataError, match="3 sequences, and 8 are needed"):
        require_rows([row + n for n in range(3)])
    with pytest.raises(DataError, match="9 sequences, of which only 1 differ"):
        require_rows([row] * 9)
    with pytest.raises(DataError, match="only 2 different tokens"):
        require_rows([torch.bincount(torch.tensor([n]), minlength=32)[None] for n in range(9)])
    with pytest.raises(DataError, match="the sequences repeat themselves: 17 different runs of 8 tokens in 1,971"):
        require_rows([(torch.arange(n, n + 226) % 17)[None] for n in range(9)])


def test_rows_are_calibrated_on_without_their_padding() -> None:
    documents = [list(range(10, 10 + size)) for size in (5, 9, 7, 3)]
    ends = np.cumsum([len(ids) for ids in documents])
    rows = Rows(Tokens(np.concatenate(documents), ends), 9, "whole", pad=0)
    read = calibration_text._cut_tokens(rows, range(len(rows)))
    assert [row.shape[1] for row in read] == [9, 8, 7]
    assert sorted(torch.cat(read, dim=1)[0].tolist()) == sorted(token for ids in documents for token in ids)
    assert describe(read) == "3 sequences of 7 to 9 tokens"


def test_first_and_last_layer_are_kept_where_others_lie_between() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from preheat.models.sensitive_modules import roles

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 16}
    two, three = (set(roles(LlamaForCausalLM(LlamaConfig(num_hidden_layers=n, **sizes)))["auto"]) for n in (2, 3))
    assert two == {"model.embed_tokens", "lm_head"}
    assert {"model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"} < three
    assert not any(name.startswith("model.layers.1.") for name in three)


def test_eight_bit_floats_need_a_gpu(stories: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert any(
        "a CPU has no fp8 matmuls" in words
        for words in read_variant("fp8").method.check(load_model(stories).build.model)
    )


def test_what_is_compressed_is_not_trained_and_carries_no_adapter(stories: Path, tmp_path: Path) -> None:
    opened, _ = compressed(stories, "int8", [])
    save_load.write_model(opened.build.trained[0], opened, tmp_path, method="int8", dtype=torch.float32)
    recipe = recipes.parse(f"model: {{path: {tmp_path}}}\nstop: {{max_steps: 1}}\nbatch: {{seq_len: 32}}")
    with pytest.raises(RecipeError, match="is compressed \\(int8\\): quantized weights cannot be trained"):
        build(recipe, vocabulary=512, device=DEVICE)
    with pytest.raises(RecipeError, match="is compressed already"):
        compress(tmp_path, [read_variant("int4")], tmp_path / "out", data=str(stories))
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["version"] = 9
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(RecipeError, match="version 9, and this preheat reads 1"):
        load_model(tmp_path)


def test_a_folder_that_stands_is_not_written_over(stories: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="already exists"):
        compress(stories, [read_variant("int8")], tmp_path)


def test_a_model_without_quantized_weights_is_written_plainly(stories: Path, tmp_path: Path) -> None:
    """As pruning leaves it."""
    from transformers import AutoModelForCausalLM

    opened = load_model(stories)
    model: Any = opened.build.trained[0]
    model.model.layers[0].mlp.up_proj.weight.data[::2] = 0
    save_load.write_model(model, opened, tmp_path, method="magnitude", dtype=torch.float32)
    row = torch.arange(20)[None]
    wanted = compute_reference_logits(model, row)
    assert torch.equal(compute_reference_logits(load_model(tmp_path).build.trained[0], row), wanted)  # type: ignore[arg-type]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(again(row).logits, wanted, atol=1e-4)


def test_the_head_is_found_again(stories: Path) -> None:
    opened, _ = compressed(stories, "int8", [])
    assert isinstance(head(opened.build.trained[0]), Int8Linear)  # type: ignore[arg-type]


# --- llm-compressor, in a process of its own ---------------------------------------------------------------------------


def test_an_environment_without_llm_compressor_is_told_with_the_command(
    stories: Path, rows: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREHEAT_LLM_COMPRESSOR", raising=False)
    for python, words in (
        ("", "none is named"),
        (",python=no-such-python", "no-such-python is not a program"),
        (",python=/bin/false", "/bin/false has no llm-compressor"),
    ):
        with pytest.raises(RunError, match=f"{words}.*pip install llmcompressor"):
            compressed(stories, f"llm_compressor{python}", rows[:4])
    with pytest.raises(RecipeError, match="group: 33 does not divide the 64 inputs"):
        compressed(stories, "llm_compressor,group=33", rows[:4])


@pytest.mark.parametrize("bits", [4, 8])
def test_words_of_codes_are_unpacked_in_the_order_of_compressed_tensors(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 13), generator=torch.Generator().manual_seed(bits))
    padded = torch.nn.functional.pad(codes, (0, -13 % (32 // bits))).unflatten(1, (-1, 32 // bits))
    words = sum((padded[..., n].long() << bits * n) for n in range(32 // bits))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    assert torch.equal(unpack_codes(words, bits, 13), codes.to(torch.uint8))


@pytest.mark.slow
@pytest.mark.skipif(
    "PREHEAT_LLM_COMPRESSOR" not in os.environ, reason="$PREHEAT_LLM_COMPRESSOR names no Python with llm-compressor"
)
@pytest.mark.parametrize("text", ["by=gptq", "by=awq", "by=nearest", "bits=8"])
def test_llm_compressor_s_codes_serve_like_ours(stories: Path, rows: list[Tensor], text: str) -> None:
    plain = loss(load_model(stories).build.trained[0], rows[16:])
    opened, what = compressed(stories, f"llm_compressor,{text}", rows[:16])
    rise = loss(opened.build.trained[0], rows[16:]) - plain
    assert "by llm-compressor 0." in what
    assert rise < (0.01 if text == "bits=8" else 0.1)
