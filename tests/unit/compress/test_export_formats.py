"""What is written in other formats holds the model: read again by each format's own runtime or reader, and a wrong file is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
import transformers

from preheat.compress.export import (
    aoti,
    gguf,
    gguf_families,
    gguf_kquants,
    gguf_reader,
    gguf_tokenizer,
    onnx,
    torchchat,
    trace,
    verify,
)
from preheat.compress.export.huggingface import needs_code
from preheat.compress.export.plain_jinja import convert_to_jinja
from preheat.data.chat.builtin_templates import FORMATS
from preheat.data.chat.template import Template
from preheat.data.tokenizer import train_tokenizer
from preheat.errors import RunError
from preheat.models.hf import compute_reference_logits
from preheat.recipe import Model, Recipe

from ...architectures.tiny import ARCHITECTURES, tiny_config
from ..chats import KINDS, TALKS

VOCABULARY = 300
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}),
}
LONG = {"rope_theta": 5e5, "original_max_position_embeddings": 32}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, **LONG},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "wizards",
        "box",
        "at",
        "night",
    ]
    texts = [(f"{n:032x}", " ".join(words[(n * k) % len(words)] for k in range(1, 90))) for n in range(40)]
    made = train_tokenizer(texts, vocabulary=VOCABULARY)
    made.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return made


def folder_of(family: str, tokenizer: Any, out: Path, **changed: Any) -> Path:
    """A model of a family whose weights are large enough that a wrong one shows, as a Hugging Face folder."""
    kind, own = FAMILIES[family]
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "vocab_size": len(tokenizer) + 4,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**(sizes | own | changed)))
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:  # norms and biases, which begin at one and zero
                value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


# --- the comparison ---------------------------------------------------------------------------------------------------


def test_figures_of_a_comparison() -> None:
    tokens = [torch.tensor([[0, 1, 2, 3]]), torch.tensor([[3, 0]])]
    first = [torch.zeros(1, 4, 5), torch.zeros(1, 2, 5)]
    first[0][..., 1] = (
        2.0  # the most likely token is 1 everywhere in the first row, 0 (the first of equals) in the second
    )
    second = [row.clone() for row in first]
    second[0][0, 3, 4] = 4.0  # so at one position of six it becomes 4
    found = verify.compare(first, second, tokens)
    assert (found.largest, found.scale, found.tokens) == (4.0, 2.0, 6)
    assert found.mean == pytest.approx(4 / 30)
    assert found.agreement == pytest.approx(5 / 6)
    total = math.log(
        4 + math.exp(2)
    )  # of the first row's three next tokens, of which one is 1; the second row is uniform
    assert found.perplexity is not None
    assert found.perplexity[0] == pytest.approx(math.exp((3 * total - 2 + math.log(5)) / 4))
    assert found.perplexity[1] == pytest.approx(found.perplexity[0]), "the last position has no next token"
    assert verify.compare(first, [row[..., :3] for row in first]).largest == 0, "a vocabulary's padding is left out"


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (verify.Bound(1.9), "by up to 4 .* more than the 1.9 of it"),
        (verify.Bound(2.1, mean=0.06), "by 0.13 in the mean"),
        (verify.Bound(2.1, agreement=0.9), r"83.3% of positions .* less than the 90%"),
        (verify.Bound(2.1, perplexity=0.05), "perplexity goes from 10 to 11"),
        (verify.Bound(2.1, 0.07, 0.8, 0.2), ""),
    ],
)
def test_each_part_of_a_bound_is_held(bound: verify.Bound, words: str) -> None:
    found = verify.Difference(largest=4.0, scale=2.0, tokens=6, mean=4 / 30, agreement=5 / 6, perplexity=(10.0, 11.0))
    if not words:
        verify.refuse_beyond(found, bound, "out", "hint")
        return
    with pytest.raises(RunError, match=f"out: its logits differ .*{words}.*nothing was written; hint"):
        verify.refuse_beyond(found, bound, "out", "hint")


def test_no_number_is_beyond_every_bound() -> None:
    nan = verify.Difference(float("nan"), 2.0, 6, float("nan"), 0.0, (10.0, float("nan")))
    assert nan.beyond(verify.Bound(math.inf))


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "rope"),
    [*((family, "") for family in FAMILIES), ("llama", "linear"), ("llama", "llama3"), ("qwen3", "yarn")],
)
def test_a_gguf_file_read_back_gives_the_same_logits(tokenizer: Any, tmp_path: Path, family: str, rope: str) -> None:
    changed = {"rope_parameters": ROPES[rope]} if rope else {}
    source = folder_of(family, tokenizer, tmp_path / "model", **changed)
    made = gguf.write(source, tmp_path / "out", dtype="f32")
    assert made.max_logit_difference < 1e-5 * made.largest_logit
    assert made.top1_agreement > 0.99
    model, again = gguf_reader.load(tmp_path / "out" / made.file)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = torch.arange(40)[None] * 7 % VOCABULARY
    assert float((compute_reference_logits(model, tokens) - compute_reference_logits(plain, tokens)).abs().max()) < 1e-4
    assert again.chat_template == tokenizer.chat_template
    assert (tmp_path / "out/README.md").read_text().count("q8_0") == 0
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == sorted(["README.md", made.file, "preheat_export.json"]), "no folder is left over"


def test_the_order_of_rotated_rows_and_the_scaling_are_checked(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of("llama", tokenizer, tmp_path / "model", rope_parameters=ROPES["llama3"])
    with monkeypatch.context() as patch:
        plain = dataclasses.replace(gguf_families.FAMILIES["llama"], rules=lambda config: ())
        patch.setitem(gguf_families.FAMILIES, "llama", plain)
        with pytest.raises(RunError, match="differ by up to"):
            gguf.write(source, tmp_path / "out", dtype="f32")
    with monkeypatch.context() as patch:
        patch.setattr(gguf_families, "build_factors", lambda model: {})
        with pytest.raises(RunError, match="differ by up to"):
            gguf.write(source, tmp_path / "out", dtype="f32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("dtype", "types", "share"),
    [
        ("f16", {"F16": 36, "F32": 11}, 0.51),
        ("bf16", {"BF16": 36, "F32": 11}, 0.51),
        ("q8_0", {"Q8_0": 31, "F16": 5, "F32": 11}, 0.37),
        ("q4_0", {"Q4_0": 30, "Q8_0": 1, "F16": 5, "F32": 11}, 0.31),
    ],
)
def test_a_really_pretrained_model_in_each_type(
    data_folder: Path, tmp_path: Path, dtype: str, types: dict[str, int], share: float
) -> None:
    made = gguf.write(data_folder / "stories260K-hf", tmp_path / "out", dtype=dtype)
    assert made.types == types
    file = tmp_path / "out" / made.file
    assert file.stat().st_size == made.bytes
    assert made.bytes - 40_000 < share * 1_040_128  # of the weights in fp32; the rest is the tokenizer
    assert ("5 in f16, of 36 matrices: their rows are not whole blocks of 32" in made.note) == dtype.startswith("q")
    weights = transformers.AutoModelForCausalLM.from_pretrained(
        data_folder / "stories260K-hf", dtype=torch.float32
    ).state_dict()
    again, _ = gguf_reader.load(file)
    steps = {
        "f16": 2**-11,
        "bf16": 2**-8,
        "q8_0": 0.57 / 127,
        "q4_0": 1.01 / 8,
    }  # of the block's largest value; scales are in f16
    for name in ("model.layers.2.mlp.up_proj.weight", "model.layers.2.self_attn.q_proj.weight"):
        blocks = weights[name].reshape(-1, 32)
        apart = (again.state_dict()[name].reshape(-1, 32) - blocks).abs()
        assert bool((apart <= steps[dtype] * blocks.abs().amax(1, keepdim=True) + 1e-7).all()), name


@pytest.mark.parametrize("name", ["llama2", "gpt2"])
def test_real_tokenizers_cut_real_text_the_same_from_the_file(data_folder: Path, tmp_path: Path, name: str) -> None:
    from gguf import GGUFWriter

    wanted = transformers.AutoTokenizer.from_pretrained(data_folder / "tokenizers" / name)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    gguf_tokenizer.add_vocabulary(writer, wanted, len(wanted) + 3, [wanted.eos_token_id])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    found = gguf_reader.load_tokenizer(tmp_path / "model.gguf")
    text = (data_folder / "text/war_and_peace.txt").read_text(encoding="utf-8")[200_000:215_000]
    assert found.encode(text) == wanted.encode(text)
    assert found.decode(found.encode(text), skip_special_tokens=True).strip() == text.strip()
    assert (found.encode("a")[0] == wanted.bos_token_id) == (name == "llama2")


def test_scores_are_in_the_order_of_sentencepieces_own(data_folder: Path) -> None:
    told = json.loads((data_folder / "tokenizers/llama2/tokenizer.json").read_text(encoding="utf-8"))["model"]
    pieces = sorted(told["vocab"], key=told["vocab"].__getitem__)
    own = np.array(gguf_tokenizer.compute_scores(pieces, told["merges"], [True] * len(pieces)))
    data = (
        data_folder / "tokenizers/llama2/tokenizer.bin"
    ).read_bytes()  # longest piece, then of each: score, bytes, text
    real, at = [], 4
    for _ in pieces:
        score, size = struct.unpack_from("<fi", data, at)
        real.append(score)
        at += 8 + size
    made = [n for n, piece in enumerate(pieces) if -own[n] < len(told["merges"])]
    assert len(made) > 29_000  # others are single characters
    order = np.array(made)[np.argsort(-own[made], kind="stable")]
    assert bool((np.diff(np.array(real)[order]) <= 0).all())


def test_another_tokenizer_in_the_file_is_refused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = train_tokenizer(
        [("0", "in the mean of values, how many rows remain after minutes of watching the water")], vocabulary=290
    )
    add = gguf.add_vocabulary
    monkeypatch.setattr(gguf, "add_vocabulary", lambda writer, _, *more: add(writer, other, *more))
    monkeypatch.setattr(tokenizer, "chat_template", None)
    source = folder_of("qwen2", tokenizer, tmp_path / "model")
    with pytest.raises(RunError, match="the file's tokenizer splits"):
        gguf.write(source, tmp_path / "out")


@pytest.mark.parametrize("family", sorted({*ARCHITECTURES} - {*gguf_families.FAMILIES}))
def test_architectures_that_gguf_does_not_write_are_refused_by_name_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    tiny_config(family).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(gguf, "write_plain_model", None)  # reads the weights
    reason = (
        rf"^--to gguf: no mapping to llama.cpp's tensors is known for {family} \(it is for llama, .*\); use --to hf$"
    )
    with pytest.raises(RunError, match=reason):
        gguf.write(tmp_path / "model", tmp_path / "out")


def test_a_file_is_named_for_a_type_that_it_has(tokenizer: Any, tmp_path: Path) -> None:
    # Only the two down projections have rows of whole blocks of 32.
    sizes = {"hidden_size": 72, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    source = folder_of("llama", tokenizer, tmp_path / "model", **sizes)
    made = gguf.write(source, tmp_path / "out", dtype="q8_0", tolerance=1.0)
    # Seven matrices of each of two layers, the embedding and the head.
    assert (made.types["Q8_0"], made.types["F16"]) == (2, 14)
    assert "14 in f16, of 16 matrices: their rows are not whole blocks of 32" in made.note
    none = folder_of("llama", tokenizer, tmp_path / "none", **sizes | {"intermediate_size": 80})
    for dtype in ("q8_0", "q4_0"):
        with pytest.raises(RunError, match=rf"--dtype {dtype}: no matrix .* blocks of 32 .*\(they have 72, 80\); use"):
            gguf.write(none, tmp_path / "nothing", dtype=dtype)
    assert not (tmp_path / "nothing").exists()


def test_what_gguf_has_no_name_for_is_refused(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str, family: str = "llama", dtype: str = "f16", **changed: Any) -> None:
        source = folder_of(family, tokenizer, tmp_path / f"model{len(list(tmp_path.iterdir()))}", **changed)
        with pytest.raises(RunError, match=words) as caught:
            gguf.write(source, tmp_path / "out", dtype=dtype)
        assert "\n" not in str(caught.value)

    refused(
        "rotary scaling dynamic is not supported there; linear, yarn and llama3 are", rope_parameters=ROPES["dynamic"]
    )
    refused("llama.cpp's llama has silu, and this model gelu", hidden_act="gelu")
    refused("scales gemma2's scores by its head size 8, and this model by 16", "gemma2", query_pre_attn_scalar=16)
    refused("some layers attend in a window", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gguf_kquants, "load_quantizer", lambda: None)
    refused(
        r"K-quants are made by .* pip install 'preheat\[llama-cpp\]', put llama.cpp's llama-quantize on the PATH, or",
        dtype="q4_k_m",
    )
    tool = tmp_path / "llama-quantize"
    tool.write_text("#!/bin/sh\necho 'no such type' >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    refused(r"no matrix .* blocks of 256 .*\(they have 64, 96\); use --dtype q8_0, q4_0 or f16", dtype="q4_k_m")
    refused(r"--dtype q4_k_m: .*llama-quantize failed \(3\): no such type", dtype="q4_k_m", intermediate_size=256)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(r"--to gguf: needs gguf, not installed: pip install 'preheat\[gguf\]'")


# --- ONNX -------------------------------------------------------------------------------------------------------------


def test_onnx_runtime_gives_the_same_logits_alone_and_in_a_padded_batch_and_near_ones_in_8_bits(
    tokenizer: Any, tmp_path: Path
) -> None:
    import onnxruntime

    source = folder_of("qwen3", tokenizer, tmp_path / "model", num_hidden_layers=1)
    made = onnx.write(source, tmp_path / "out")
    assert made.max_logit_difference < 1e-4 * made.largest_logit
    assert "onnxruntime" in made.read_by
    assert str(Path(torch.__file__).parent).encode() not in (tmp_path / "out/model.onnx").read_bytes(), (
        "this machine's paths"
    )
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("fox") == tokenizer.encode("fox")
    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
    ids = np.arange(24).reshape(2, 12) * 5 % VOCABULARY
    mask = np.ones_like(ids)
    mask[1, 7:] = 0
    both = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    alone = session.run(None, {"input_ids": ids[1:, :7], "attention_mask": mask[1:, :7]})[0]
    assert float(np.abs(both[1, :7] - alone[0]).max()) < 1e-4
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wanted = compute_reference_logits(model, torch.from_numpy(ids[:1]))
    assert float((wanted - torch.from_numpy(both[:1])).abs().max()) < 1e-3

    # As a model whose weights exceed protobuf's limit.
    shutil.copytree(tmp_path / "out", tmp_path / "large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx, "_LARGEST", 0)
        onnx.quantize(tmp_path / "large/model.onnx")
    assert {file.name for file in (tmp_path / "large").glob("*.onnx*")} == {"model.onnx", "model.onnx.data"}
    onnx.quantize(tmp_path / "out/model.onnx")
    assert verify.count_bytes(tmp_path / "out", "model.onnx") < 0.6 * made.bytes, "the data beside it is gone, too"
    found = verify.compare([wanted], onnx.replay(tmp_path / "out/model.onnx", [torch.from_numpy(ids[:1])]))
    assert 0 < found.largest < 0.4 * found.scale
    assert 32 < largest_code(tmp_path / "out/model.onnx") <= 64
    one, apart = (onnx.replay(tmp_path / name / "model.onnx", [torch.from_numpy(ids)])[0] for name in ("out", "large"))
    assert torch.equal(one, apart)


def largest_code(file: Path) -> int:
    """Of weights in 8 bits. Beyond 64 two products saturate in ONNX Runtime's sixteen bits on CPUs without VNNI, 2 x 255 x 64 do not."""
    import onnx
    from onnx.numpy_helper import to_array

    weights = [to_array(kept) for kept in onnx.load(file).graph.initializer if kept.data_type == onnx.TensorProto.INT8]
    return max(int(np.abs(codes.astype(int)).max()) for codes in weights if codes.ndim > 1)


class Unsupported(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        square = (input_ids * attention_mask).float() @ (input_ids * attention_mask).float().T
        return torch.linalg.eigvalsh(square + torch.eye(square.shape[0])) + input_ids.sum()


def test_an_operator_without_a_form_in_onnx_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"--to onnx: the operator aten._?linalg_eig\w+ is not supported there; use --to aoti"
    ):
        trace.write_onnx(
            trace.export_trace(Unsupported(), 16), tmp_path / "model.onnx", ("input_ids", "attention_mask")
        )


# --- AOTInductor, ExecuTorch ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_package_gives_the_same_logits(tokenizer: Any, tmp_path: Path) -> None:
    source = folder_of("llama", tokenizer, tmp_path / "model", num_hidden_layers=1)
    made = aoti.write(source, tmp_path / "out")
    assert made.max_logit_difference < 1e-4 * made.largest_logit
    rows = [torch.arange(n)[None] for n in (1, 5, 100)]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for row, found in zip(rows, aoti.replay(tmp_path / "out/model.pt2", rows), strict=True):
        assert float((compute_reference_logits(model, row) - found).abs().max()) < 1e-3


def test_without_a_compiler_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RunError, match=r"--to aoti: needs a C\+\+ compiler"):
        aoti.write(tmp_path, tmp_path / "out")


def test_a_traced_model_takes_any_batch_and_length(tokenizer: Any, tmp_path: Path) -> None:
    source = folder_of("qwen2", tokenizer, tmp_path / "model")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    module: Any = trace.export_trace(trace.Logits(model), 128).module()
    for shape in ((1, 1), (1, 77), (3, 128)):
        ids = torch.arange(shape[0] * shape[1]).reshape(shape) % VOCABULARY
        with torch.no_grad():
            found = module(ids, torch.ones_like(ids))
        assert float((found - compute_reference_logits(model, ids)).abs().max()) < 1e-4


def test_8da4w_of_no_matrix_is_refused() -> None:
    from preheat.compress.export import executorch

    def model(inner: int) -> Any:
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=72, intermediate_size=inner, **sizes))

    total, skipped = executorch.quantize(model(64))
    assert (total, len(skipped)) == (7, 6)
    assert not any("down_proj" in name for name in skipped)
    with pytest.raises(RunError, match="no matrix has rows of whole groups of 32; use --dtype float32"):
        executorch.quantize(model(80))


@pytest.mark.filterwarnings("ignore")  # ExecuTorch's own, of many kinds
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "8da4w"])
def test_an_executorch_program_runs_with_its_cache(tokenizer: Any, tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("executorch", reason="ExecuTorch is not installed here (pip install 'preheat[executorch]')")
    from preheat.compress.export import executorch

    source = folder_of("llama", tokenizer, tmp_path / "model", num_hidden_layers=1, intermediate_size=80)
    made = executorch.write(source, tmp_path / "out", dtype=dtype, length=96)
    assert made.length == 96
    if dtype == "float32":
        assert made.max_logit_difference < 1e-4 * made.largest_logit
    else:
        assert "1 of 7 matrices stay in fp32" in made.note
        assert made.top1_agreement > 0.5


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_folder_for_vllm_is_read_back_from_its_packed_weights(tokenizer: Any, tmp_path: Path, dtype: str) -> None:
    pytest.importorskip(
        "compressed_tensors",
        reason="compressed-tensors is not installed here (pip install 'preheat[compressed-tensors]')",
    )
    from safetensors import safe_open

    from preheat.compress.export import vllm

    source = folder_of("qwen3", tokenizer, tmp_path / "model", intermediate_size=80)
    made = vllm.write(source, tmp_path / "out", dtype=dtype)
    assert 0 < made.mean_logit_difference < 0.1 * made.largest_logit
    with safe_open(tmp_path / "out/model.safetensors", "pt") as stored:
        packed = stored.get_tensor("model.layers.0.mlp.up_proj.weight_packed")
    assert packed.shape == (80, 8 if dtype == "int4" else 16), "eight or four weights to a word"
    assert packed.dtype == torch.int32
    assert ("2 of 14 matrices stay in bfloat16" in made.note) == (dtype == "int4")


# --- torchchat ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_checkpoint_of_torchchats_is_read_by_its_own_arithmetic(tokenizer: Any, tmp_path: Path, family: str) -> None:
    rope = {"rope_parameters": ROPES["llama3"]} if family == "llama" else {}
    source = folder_of(family, tokenizer, tmp_path / "model", **rope)
    made = torchchat.write(source, tmp_path / "out", dtype="float32")
    assert made.max_logit_difference < 1e-4 * made.largest_logit
    params = json.loads((tmp_path / "out/params.json").read_text())
    weights = torch.load(tmp_path / "out/model.pth", weights_only=True)
    # Rows of a head's first and second half side by side, as torchchat's conversion has them; its strict loading wants biases of all maps or none.
    name = "model.layers.0.self_attn.q_proj"
    query = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()[
        f"{name}.weight"
    ]
    half = params["dim"] // params["n_heads"] // 2
    assert torch.equal(weights["layers.0.attention.wqkv.weight"][1], query[half])
    assert ("layers.0.attention.wo.bias" in weights) == (family != "mistral") == params.get("attention_bias", False)
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings["bos_token"], "torchchat wants one named"
    assert settings["chat_template"]


TEMPLATES = {f"models' {name}": kind.text for name, kind in KINDS.items()}
TEMPLATES |= {f"our {name}": text.replace("BEGIN", "{{- bos_token }}", 1) for name, text in FORMATS.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_for_jinja_alone_lays_chats_out_the_same(name: str) -> None:
    template = Template(TEMPLATES[name], name, {"bos_token": "<s>", "eos_token": 'a"\\ü🙂'}, ("<s>",))
    written = convert_to_jinja(template)
    assert written is not None
    for talk in (TALKS["one turn"], TALKS["several turns"], TALKS["white space"]):
        asked = talk[:-1]
        found = jinja2.Template(written).render(messages=asked, add_generation_prompt=True)
        assert found == template.prompt(asked)


def test_what_jinja_alone_has_not_is_no_template_there() -> None:
    looped = "{% for m in messages %}{{ m.content }}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    assert convert_to_jinja(Template(looped)) is None
    assert convert_to_jinja(Template("{{ strftime_now('%Y') }}{{ messages[0].content }}")) is None
    raw = "{# a #}\n{% raw %}{{ x }}\n{% endraw %}\n  {% if true %}\n{{ messages[0].content }}\n\n"
    template = Template(raw + "{% endif %}\n\n")
    found = jinja2.Template(convert_to_jinja(template) or "").render(messages=[{"content": "c"}])
    assert found == template.prompt([{"content": "c"}]) == "{{ x }}\nc\n\n"


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("gemma2", {}, "gemma2 has other blocks"),
        ("qwen3", {}, r"has model.layers.0.self_attn.q_norm.weight, which torchchat does not support"),
        ("mistral", {"sliding_window": 16}, "it sees 16 tokens back, and torchchat has no windows"),
        ("mistral", {"head_dim": 8}, "its heads of 8 are together not as wide as the model .64."),
        ("llama", {"rope_parameters": ROPES["yarn"]}, "scaled by 'yarn', and torchchat has llama3's alone"),
    ],
)
def test_blocks_that_torchchat_has_not_are_refused(
    tokenizer: Any, tmp_path: Path, family: str, settings: dict[str, Any], words: str
) -> None:
    source = folder_of(family, tokenizer, tmp_path / "model", **settings)
    with pytest.raises(RunError, match=rf"--to torchchat: .*{words}; use --to hf"):
        torchchat.write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_new_model_needs_no_code_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "house"}')
    monkeypatch.chdir(tmp_path)
    assert not needs_code(Recipe(model=Model(size="15M")))
    assert needs_code(Recipe(model=Model(path=str(tmp_path))))
