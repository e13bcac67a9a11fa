"""Vision-language models: rows with images against transformers' own processor and forward pass, packed and not; bad rows."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText

from preheat.core import Batch, Build, Device, MaskSpec
from preheat.data.loader import collate
from preheat.data.tokenizer import load_tokenizer
from preheat.data.vision_inputs import ImageProcessor, compute_mrope_positions
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import DataError, RecipeError
from preheat.hardware.catalogue import find_accelerator
from preheat.models.image_attention import attend_image_blocks
from preheat.models.vision import read_processor, read_vision
from preheat.ops.attention.sdpa import reference_attention
from preheat.planning.dry_run import observe
from preheat.planning.image_counts import add_image_counts
from preheat.planning.layer_extrapolation import observe_few_layers
from preheat.planning.plan_request import request_of
from preheat.planning.request import Request
from preheat.recipe import Recipe, parse
from preheat.training.session import data_of

from ...conftest import DEVICE, difference
from ...contract.waits import waits_of
from ..seeing import QWEN, SQUARES, draw, questions, tiny_folder, written

FAMILIES = ["qwen3_vl", "qwen3_vl_moe"]
ALL = [
    *FAMILIES,
    "qwen2_5_vl",
    "gemma3",
    "gemma4",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_5", "mistral3", "smolvlm")),
]
LENGTH = {"gemma4": 160}  # an image is scaled up to 60 or 70 tokens
MORE = [pytest.param(name, marks=pytest.mark.slow) if name.endswith(("moe", "n2_vl")) else name for name in QWEN]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_folder(tmp_path_factory.mktemp(name), name) for name in (*QWEN, *SQUARES)}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_CACHE", str(tmp_path / "cache"))


def recipe_of(folder: Path, source: Path, techniques: str = "{}", length: int = 64, more: str = "") -> Recipe:
    part = "auto" if folder.name.startswith("stories") else "whole"
    return parse(
        f"model: {{path: {folder}, part: {part}}}\ndata: {{source: {source}, validation: 0, {more}}}\nbatch: {{size: 8, seq_len: {length}}}\n"
        f"optimizer: {{lr: 0.01, weight_decay: 0}}\nstop: {{max_steps: 4}}\ntechniques: {techniques}\n"
    )


def batches_of(recipe: Recipe) -> list[Batch]:
    """Each packed row by itself."""
    rows = data_of(recipe).train
    return [collate([(n, rows.row(n))]) for n in range(len(rows))]  # type: ignore[union-attr, arg-type]


def made(recipe: Recipe) -> Build:
    return build(recipe, vocabulary=None, device=DEVICE)


def taken(b: Build, batches: list[Batch]) -> tuple[float, dict[str, Any]]:
    """The loss, the load-balancing term left out, and the gradients of all."""
    b.optimizer.zero_grad()
    loss = accumulate_gradients(b, batches, 0.01)
    return float(loss.total) / float(loss.weight), {n: p.grad.clone() for n, p in b.parameters() if p.grad is not None}


def expanded_by_transformers(config: Any, seen: Any) -> str:
    """The text of an image's tokens by the code of transformers' own processor of the family."""
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

    if config.model_type == "gemma3":
        tokens = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
        tokenizer = SimpleNamespace(**tokens, boi_token_id=0)
        processor: Any = Gemma3Processor.__new__(Gemma3Processor)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("transformers.processing_utils.ProcessorMixin.__init__", lambda *_, **__: None)
            Gemma3Processor.__init__(processor, None, tokenizer, image_seq_length=config.mm_tokens_per_image)
        return str(processor.replace_image_token(seen, 0))
    if config.model_type == "gemma4":
        from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

        marks = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
        return str(Gemma4Processor.replace_image_token(SimpleNamespace(**marks), seen, 0))  # type: ignore[arg-type]
    if config.model_type == "mistral3":
        # PixtralProcessor cannot be imported without torchvision: its replace_image_token, in one line.
        height, width = (int(side) // (2 * config.vision_config.patch_size) for side in seen["image_sizes"][0])
        return "".join((["[IMG]"] * width + ["[IMG_BREAK]"]) * height).removesuffix("[IMG_BREAK]") + "[IMG_END]"
    marks = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    }
    processor = SimpleNamespace(
        image_seq_len=(config.vision_config.image_size // config.vision_config.patch_size // 2) ** 2, **marks
    )
    return SmolVLMProcessor.replace_image_token(processor, seen, 0)  # type: ignore[arg-type]


def squares_by_transformers(folder: Path, rows: list[dict[str, Any]], images: Path) -> Any:
    """As `by_transformers`, for families whose processor returns pixels."""
    import importlib

    import transformers
    from PIL import Image

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    model.train()
    name, cls, mark, begin = {
        "gemma3": ("gemma3", "Gemma3", "<start_of_image>", "model\n"),
        "gemma4": ("gemma4", "Gemma4", "<|image|>", "model\n"),
        "mistral3": ("pixtral", "Pixtral", "[IMG]", "[/INST]"),
        "smolvlm": ("smolvlm", "SmolVLM", "<image>", "Assistant:"),
    }[model.config.model_type]
    module = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    processor = getattr(module, f"{cls}ImageProcessorPil").from_pretrained(folder)
    if name == "pixtral":  # as its processor does
        processor.patch_size = {"height": 8, "width": 8}
    more = {"return_row_col_info": True} if name == "smolvlm" else {}
    total, count = torch.zeros(()), 0
    for row in rows:
        talk = []
        for message in row["messages"]:
            first, *others = message["content"].split("<image>")
            parts = [{"type": "text", "text": first}] if first else []
            for text in others:
                parts += [{"type": "image"}, {"type": "text", "text": text}]
            talk.append({**message, "content": [part for part in parts if part.get("text") != ""]})
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        seen = [
            processor(images=[Image.open(images / file).convert("RGB")], return_tensors="pt", **more)
            for file in row["images"]
        ]
        first, *others = text.rstrip("\n").split(mark)
        texts = [expanded_by_transformers(model.config, each) for each in seen]
        text = first + "".join(a + b for a, b in zip(texts, others, strict=True))
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        prompt = len(tokenizer(text[: text.rindex(begin) + len(begin)], add_special_tokens=False)["input_ids"])
        labels = ids.clone()
        labels[:, :prompt] = -100
        kind = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}.get(name)
        kinds = {kind: (ids == model.config.image_token_id).int()} if kind else {}
        # Every image by itself, and their features at once: batches of several sizes would be padded.
        names = ("pixel_values", "image_sizes", "pixel_attention_mask", "image_position_ids")
        given = [{key: value for key, value in each.items() if key in names} for each in seen]
        features = [model.base_model.get_image_features(**each, return_dict=True).pooler_output for each in given]
        whole = torch.cat([part.flatten(0, -2) for each in features for part in each])
        pooled = whole[None] if name == "gemma3" else [whole]
        output = transformers.modeling_outputs.BaseModelOutputWithPooling(pooler_output=pooled)
        out = model(input_ids=ids, mm_encoder_outputs={"image": output}, **kinds)
        logits = out.logits[:, :-1].flatten(0, 1)
        total = total + torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        count += int((labels[:, 1:] != -100).sum())
    (total / count).backward()
    return float(total.detach() / count), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def by_transformers(folder: Path, rows: list[dict[str, Any]], images: Path) -> Any:
    """transformers' own processor, conversation by conversation, and its own loss over all their answers."""
    import transformers
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    model.train()
    total, count = torch.zeros(()), 0
    for row in rows:
        seen = processor(
            images=[Image.open(images / name).convert("RGB") for name in row["images"]], return_tensors="pt"
        )
        counts = (seen["image_grid_thw"].prod(-1) // 4).tolist()
        text = tokenizer.apply_chat_template(
            [
                {**m, "content": m["content"].replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")}
                for m in row["messages"]
            ],
            tokenize=False,
        )
        for n in counts:
            text = text.replace("<|image_pad|>", "<|placeholder|>" * n, 1)
        text = text.replace("<|placeholder|>", "<|image_pad|>").rstrip("\n")
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        begins = text.index("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
        prompt = len(tokenizer(text[:begins], add_special_tokens=False)["input_ids"])
        labels = ids.clone()
        labels[:, :prompt] = -100
        kinds = (ids == model.config.image_token_id).int()
        out = model(input_ids=ids, mm_token_type_ids=kinds, **seen)
        logits = out.logits[:, :-1].flatten(0, 1)
        total = total + torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        count += int((labels[:, 1:] != -100).sum())
    (total / count).backward()
    return float(total.detach() / count), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def questions_of_two_images(folder: Path) -> tuple[list[dict[str, Any]], Path]:
    """The questions, the first of which has two images, and the file that they are written to."""
    rows = questions(folder)
    rows[0]["messages"][0]["content"] = "One <image>and two <image>: what colours?"
    rows[0]["images"] = ["red.png", "blue.png"]
    return rows, written(folder, rows)


@pytest.mark.parametrize("family", MORE)
def test_packed_rows_give_the_loss_and_gradients_of_transformers(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    rows, source = questions_of_two_images(tmp_path)
    plain = "model: {config: {router_aux_loss_coef: 0}}" if family.endswith("moe") else ""
    loss, wanted = by_transformers(folders[family], rows, tmp_path)
    # Gated delta nets amplify rounding: 2e-5 to 4e-4, by the CPU's instructions. In fp64 they are compared in
    # tests/architectures.
    bound = 1e-3 if family.startswith("qwen3_5") else 2e-5
    for length in (64, 160):  # about a conversation in a row, and several
        recipe = recipe_of(folders[family], source, length=length)
        if plain:
            from preheat import recipe as recipes

            recipe = recipes.override(recipe, "model.config={router_aux_loss_coef: 0}")
        batches = batches_of(recipe)
        assert len(batches) < 8 if length == 160 else len(batches) > 4
        found, grads = taken(made(recipe), batches)
        assert found == pytest.approx(loss, abs=2e-6)
        assert difference(grads, wanted) < bound
    b = made(recipe)  # all rows as one micro-batch
    whole = data_of(recipe).train
    found, grads = taken(b, [collate([(n, whole.row(n)) for n in range(len(whole))])])  # type: ignore[union-attr, arg-type]
    assert found == pytest.approx(loss, abs=2e-6)
    assert difference(grads, wanted) < bound


def without_key_biases(grads: dict[str, Any]) -> dict[str, Any]:
    """A tower's bias on keys shifts all scores of a query, and changes nothing: its gradients are rounding."""
    return {name: grad for name, grad in grads.items() if not ("vision" in name and name.endswith("k_proj.bias"))}


@pytest.mark.parametrize("family", SQUARES)
def test_families_of_squares_give_the_loss_and_gradients_of_transformers(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    rows, source = questions_of_two_images(tmp_path)
    loss, wanted = squares_by_transformers(folders[family], rows, tmp_path)
    for length in (256, 512) if family == "gemma4" else (120, 240):
        recipe = recipe_of(folders[family], source, length=length)
        found, grads = taken(made(recipe), batches_of(recipe))
        assert found == pytest.approx(loss, abs=2e-6)
        # Gemma 4 does not scale the scores of its tower, which amplifies rounding; below it is compared in fp64.
        bound = 5e-5 if family == "gemma4" else 2e-5
        assert difference(without_key_biases(grads), without_key_biases(wanted)) < bound


@pytest.mark.parametrize("sees", ["vision", None])
def test_gemma4_is_that_of_transformers_in_fp64(
    sees: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, softmax = tiny_folder(tmp_path / "gemma4", "gemma4"), torch.softmax
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = sees
    (folder / "config.json").write_text(json.dumps(config))
    # Both compute some of it in fp32 whatever the model's dtype.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for module in (torch, torch.nn.functional):
        monkeypatch.setattr(module, "softmax", lambda x, dim=None, **_: softmax(x, dim=dim))
    loaded = AutoModelForImageTextToText.from_pretrained
    monkeypatch.setattr(
        AutoModelForImageTextToText, "from_pretrained", lambda *args, **kwargs: loaded(*args, **kwargs).double()
    )
    rows, source = questions_of_two_images(tmp_path)
    loss, wanted = squares_by_transformers(folder, rows, tmp_path)
    recipe = recipe_of(folder, source, length=512)
    b = made(recipe)
    b.parts["trained"][0].double()
    found, grads = taken(b, batches_of(recipe))
    assert found == pytest.approx(loss, abs=1e-12)
    assert difference(grads, wanted) < 1e-10


def test_tokens_of_an_image_see_each_other_within_a_window() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 24, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    documents, blocks = ((9, 15), (24,)), (((2, 6), (15, 20)), ((12, 22),))
    for window in (None, 5):
        mask = MaskSpec(window=window, documents=documents)
        out = attend_image_blocks(reference_attention(q, k, v, mask, 0.3), q, k, v, mask, 0.3, blocks)
        seen = torch.ones(24, 24, dtype=torch.bool).tril()
        for row, spans in enumerate(blocks):
            allowed = seen.clone()
            for start, end in spans:
                allowed[start:end, start:end] = True
            if window:  # as transformers': both kinds of keys, but none beyond the window before a token
                allowed &= torch.arange(24)[:, None] - torch.arange(24) < window
            ends = torch.tensor(documents[row]).cumsum(0)
            number = torch.bucketize(torch.arange(24), ends, right=True)
            allowed &= number[:, None] == number
            wanted = torch.nn.functional.scaled_dot_product_attention(
                q[row], k[row], v[row], attn_mask=allowed, scale=0.3, enable_gqa=True
            )
            torch.testing.assert_close(out[row], wanted)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_5_vl", *SQUARES])
def test_no_step_waits_for_the_device(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = recipe_of(folders[family], written(tmp_path, questions(tmp_path)), length=LENGTH.get(family, 64))
    assert waits_of(made(recipe), batches_of(recipe)[:2]) == []


def test_positions_are_those_of_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    import transformers

    rows = questions(tmp_path)
    rows[3]["messages"][0]["content"] = "<image><image>Which?<image>"
    rows[3]["images"] = ["yellow.png", "white.png", "grey.png"]
    table = data_of(recipe_of(folders["qwen3_vl"], written(tmp_path, rows), length=160)).train.tokens  # type: ignore[union-attr]
    config = transformers.AutoConfig.from_pretrained(folders["qwen3_vl"])
    with torch.device("meta"):
        model: Any = transformers.Qwen3VLModel(config)
    for n, (start, end) in enumerate(itertools.pairwise([0, *table.offsets])):
        ids, images = np.asarray(table.ids[start:end]).astype(np.int64), table.images.within(n)  # type: ignore[union-attr]
        found = compute_mrope_positions(ids, images, table.images.eye.vision)  # type: ignore[union-attr]
        grids = torch.tensor([(1, i.rows, i.columns) for i in images])
        kinds = torch.from_numpy(ids == config.image_token_id).int()[None]
        wanted, _ = model.get_rope_index(torch.from_numpy(ids)[None], kinds, image_grid_thw=grids)
        assert torch.equal(torch.from_numpy(found).T[:, None], wanted)


def test_a_batch_without_images_is_text_and_its_blank_image_counts_for_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    text = [{"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]}]
    recipe = recipe_of(folders["qwen3_vl"], written(tmp_path, text))
    (batch,) = batches_of(recipe)
    assert batch.images is not None
    assert len(batch.images.positions) == 0
    loss, grads = taken(made(recipe), [batch])
    tower = {n: g for n, g in grads.items() if ".visual." in n}
    assert tower  # every device has gradients of the same weights
    assert not any(g.any() for g in tower.values())
    plain = replace(batch, images=None, positions=batch.positions[..., 0])
    again, other = taken(made(recipe), [plain])
    assert again == pytest.approx(loss, abs=1e-6)
    assert difference({n: g for n, g in grads.items() if n not in tower}, other) < 1e-5


TECHNIQUES = (
    "{efficient_attention: {}, chunked_loss: {rows: 16}, activation_checkpointing: {}, gradient_accumulation: {}}"
)


@pytest.mark.parametrize(
    "family", [*MORE, "gemma3", "gemma4", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mistral3", "smolvlm"))]
)
def test_techniques_change_no_gradient(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    source = written(tmp_path, questions(tmp_path))
    plain, changed = (recipe_of(folders[family], source, t, LENGTH.get(family, 64)) for t in ("{}", TECHNIQUES))
    batches = batches_of(plain)
    loss, wanted = taken(made(plain), batches)
    found, grads = taken(made(changed), batches)
    assert found == pytest.approx(loss, abs=2e-6)
    grads, wanted = without_key_biases(grads), without_key_biases(wanted)
    # Recurrent layers of random weights amplify the rounding of the attention kernel, which is fp32 in all.
    assert difference(grads, wanted) < (2e-4 if family.startswith("qwen3_5") else 2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_thirty_steps_learn_eight_pairs(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = recipe_of(folders[family], written(tmp_path, questions(tmp_path)), "{efficient_attention: {}}", length=160)
    whole = data_of(recipe).train
    batch = collate([(n, whole.row(n)) for n in range(len(whole))])  # type: ignore[union-attr, arg-type]
    b = made(recipe)
    losses = []
    for _ in range(30):
        losses.append(taken(b, [batch])[0])
        update(b, 0.01)
    assert losses[-1] < 0.05 < 1 < losses[0]
    blind = collate([(n, whole.row(n)) for n in range(len(whole))])  # type: ignore[union-attr, arg-type]
    assert blind.images is not None
    blind.images.patches.zero_()
    assert taken(b, [blind])[0] > 20 * losses[-1]  # it is the images that tell the colours


@pytest.mark.parametrize(
    ("techniques", "trained", "adapters"),
    [
        ("{vision_tower: {}}", set(), False),
        ("{vision_tower: {train: projectors}}", {"merger", "deepstack_merger_list"}, False),
        (
            "{vision_tower: {train: all}, lora: {rank: 2}}",
            {"merger", "deepstack_merger_list", "blocks", "patch_embed", "pos_embed"},
            False,
        ),
        ("{vision_tower: {}, lora: {rank: 2}}", set(), False),
        ("{vision_tower: {}, peft_adapter: {method: loha, settings: {r: 2}}}", set(), False),
        ("{lora: {rank: 2}}", {"merger", "deepstack_merger_list", "blocks"}, True),
    ],
)
def test_what_of_the_tower_is_trained(
    techniques: str, trained: set[str], adapters: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    recipe = recipe_of(folders["qwen3_vl"], written(tmp_path, questions(tmp_path)), techniques)
    b = made(recipe)
    of_tower = [name.partition("visual.")[2] for name, _ in b.parameters() if "visual." in name]
    assert {name.partition(".")[0] for name in of_tower} == trained
    assert any("lora" in name for name in of_tower) == adapters
    assert any("language_model" in name for name, _ in b.parameters())
    _, grads = taken(b, batches_of(recipe)[:1])
    assert grads.keys() == {name for name, _ in b.parameters()}


@pytest.mark.parametrize(
    ("techniques", "trained"),
    [
        ("{}", {"language_model", "vision_tower", "embed_vision"}),
        ("{vision_tower: {train: projectors}}", {"language_model", "embed_vision"}),
        ("{lora: {rank: 2}}", {"language_model", "vision_tower", "embed_vision"}),
        ("{lora: {rank: 2, target_modules: [q_proj]}}", {"language_model", "vision_tower"}),
        ("{lora: {rank: 2}, vision_tower: {}}", {"language_model"}),
        ("{peft_adapter: {method: loha, settings: {r: 2}}}", {"language_model", "vision_tower", "embed_vision"}),
    ],
)
def test_the_part_that_reads_sound_is_not_trained(
    techniques: str, trained: set[str], folders: dict[str, Path], tmp_path: Path
) -> None:
    recipe = recipe_of(folders["gemma4"], written(tmp_path, questions(tmp_path)), techniques, length=160)
    b = made(recipe)
    assert {
        re.sub(r".*?model\.(?=[a-z])", "", name, count=1).partition(".")[0] for name, _ in b.parameters()
    } == trained
    _, grads = taken(b, batches_of(recipe)[:1])
    assert grads.keys() == {name for name, _ in b.parameters()}


USER = {"role": "user", "content": "<image>What?"}
ANSWER = {"role": "assistant", "content": "This."}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [USER, ANSWER], "images": ["none.png"]}, r"none.png: no such file"),
        ({"messages": [USER, ANSWER], "images": ["torn.png"]}, r"torn.png: is corrupt or not an image"),
        ({"messages": [USER, ANSWER], "images": ["text.png"]}, r"text.png: is corrupt or not an image"),
        (
            {"messages": [USER, ANSWER], "images": ["long.png"]},
            r"long.png has 402 x 2 pixels.*no side 200 times the other",
        ),
        ({"messages": [USER, ANSWER], "images": ["huge.png"]}, r"huge.png: has more than the 89,478,485 pixels"),
        ({"messages": [USER, ANSWER], "images": ["red.png", "red.png"]}, r"has 2 images and 1 placeholder"),
        ({"messages": [USER, ANSWER], "images": []}, r"has 0 images and 1 placeholder"),
        ({"messages": [USER, ANSWER], "images": [7]}, r"an image is a number, not the path of a file"),
        ({"messages": [USER, ANSWER], "images": ["https://example.org/a.png"]}, r"is not a file; download it"),
        (
            {
                "messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "<image>"}],
                "images": ["red.png"],
            },
            r"message 2, of the assistant, has an image",
        ),
        (
            {"messages": [{"role": "user", "content": "<image><|image_pad|>?"}, ANSWER], "images": ["red.png"]},
            r"message 1 holds <\|image_pad\|> in its text",
        ),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], words: str, folders: dict[str, Path], tmp_path: Path) -> None:
    rows = questions(tmp_path)
    whole = (tmp_path / "red.png").read_bytes()
    (tmp_path / "torn.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no image")
    draw(tmp_path, "long.png", (1, 2, 3), (402, 2))
    if "huge" in words:
        from PIL import Image

        Image.new("1", (10_000, 9_000)).save(tmp_path / "huge.png")
    source = written(tmp_path, [*rows, row])
    with pytest.raises(DataError, match=words) as caught:
        data_of(recipe_of(folders["qwen3_vl"], source))
    assert "row 9" in str(caught.value) or ":9" in str(caught.value) or "line 9" in str(caught.value)
    kept = data_of(recipe_of(folders["qwen3_vl"], source, more="preflight: {images: warn, special_tokens: warn}"))
    assert kept.counts["dropped"] == {"images": 1}


def test_layouts_with_parts_and_of_llava_are_the_same_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    rows = questions(tmp_path)
    parts = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": row["images"][0]},
                        {"type": "text", "text": "What colour is it?"},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": row["messages"][1]["content"]}]},
            ]
        }
        for row in rows
    ]
    llava = [
        {
            "image": row["images"][0],
            "conversations": [
                {"from": "human", "value": "<image>What colour is it?"},
                {"from": "gpt", "value": row["messages"][1]["content"]},
            ],
        }
        for row in rows
    ]
    seen = []
    for n, listed in enumerate((rows, parts, llava)):
        tokens = data_of(recipe_of(folders["qwen3_vl"], written(tmp_path, listed, f"{n}.jsonl"))).train.tokens  # type: ignore[union-attr]
        assert tokens.images is not None
        seen.append((tokens.ids.tolist(), tokens.images.grids.tolist(), list(tokens.images.paths)))
    assert seen[0] == seen[1] == seen[2]


def test_rows_cut_no_image(folders: dict[str, Path], tmp_path: Path) -> None:
    rows = questions(tmp_path)
    turns = [m for row in rows[:4] for m in row["messages"]]
    long = {"messages": turns, "images": [row["images"][0] for row in rows[:4]]}
    source = written(tmp_path, [long] * 2)
    whole = data_of(recipe_of(folders["qwen3_vl"], source, length=256, more="preflight: {truncated: warn}")).train
    size = int(whole.tokens.offsets[0])  # type: ignore[union-attr]
    for length in range(40, size, 3):
        train = data_of(
            recipe_of(folders["qwen3_vl"], source, length=length, more="preflight: {truncated: warn}")
        ).train
        batch = collate([(0, train.row(0))])  # type: ignore[union-attr, arg-type]
        assert batch.images is not None
        assert sum(batch.images.sizes) == 4 * len(batch.images.positions) > 0


def test_an_image_that_changed_since_is_told(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = recipe_of(folders["qwen3_vl"], written(tmp_path, questions(tmp_path)))
    train = data_of(recipe).train
    draw(tmp_path, "red.png", (1, 2, 3), (48, 16))
    with pytest.raises(DataError, match=r"red.png: has another size than when the data was read"):
        collate([(n, train.row(n)) for n in range(len(train))])  # type: ignore[union-attr, arg-type]


def test_what_cannot_be_is_refused(folders: dict[str, Path], tmp_path: Path, data_folder: Path) -> None:
    source = written(tmp_path, questions(tmp_path))
    for techniques, words in (
        ("{length_curriculum: {}}", "would split the images"),
        ("{rope_scaling: {}}", "supports only text models"),
    ):
        with pytest.raises(RecipeError, match=words):
            made(recipe_of(folders["qwen3_vl"], source, techniques))
    text = recipe_of(data_folder / "stories260K-hf", source, more="template: alpaca")
    with pytest.raises(DataError, match="has images, and the model reads only text"):
        data_of(text)
    with pytest.raises(RecipeError, match="llama has no vision tower"):
        made(recipe_of(data_folder / "stories260K-hf", source, "{vision_tower: {}}"))
    with pytest.raises(DataError, match="packing: stream cuts examples"):
        data_of(recipe_of(folders["qwen3_vl"], source, more="packing: stream"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"do_pan_and_scan": True}, "has do_pan_and_scan true: crops of images are not supported"),
        ({"size": {"height": 32, "width": 32}}, "has size {'height': 32, 'width': 32}, but config.json {'height': 16"),
    ],
)
def test_a_processor_that_does_not_fit_the_tower_is_refused(
    settings: dict[str, Any], words: str, folders: dict[str, Path]
) -> None:
    file = folders["gemma3"] / "preprocessor_config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | settings))
    try:
        vision = read_vision(AutoConfig.from_pretrained(folders["gemma3"]))
        assert vision is not None
        with pytest.raises(RecipeError, match=re.escape(words)):
            read_processor(vision, str(folders["gemma3"]))
    finally:
        file.write_text(before)


GPU = Device("cuda", "a GPU of 24 GiB", 24 << 30, (8, 9))


@pytest.mark.parametrize("family", ALL)
def test_a_plan_counts_the_images_of_the_data(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    # Gemma 3 makes one square of an image, SmolVLM here four and a fifth of all of it.
    length, pixels = {"gemma3": (48, 16 * 16), "gemma4": (128, 64 * 64), "smolvlm": (80, 5 * 16 * 16)}.get(
        family, (48, 32 * 32)
    )
    rows = questions(tmp_path)
    for row in rows:
        draw(tmp_path, row["images"][0], (9, 9, 9), (32, 32))  # all alike: a row's worth is the fullest row's
    recipe = recipe_of(folders[family], written(tmp_path, rows), length=length)
    data = data_of(recipe)
    counted = add_image_counts(recipe, data)
    assert (counted.data.images, counted.data.image_pixels) == (1, pixels)
    batch = collate([(n, data.train.row(n)) for n in range(8)])  # type: ignore[union-attr]
    with FlopCounterMode(display=False) as counter:
        b = made(recipe)
        accumulate_gradients(b, [replace(batch, mask=MaskSpec(documents=((length,),) * 8))], 0.01)
    seen = observe(Request(counted, DEVICE))
    # On a CPU torch computes the attention of small squares without the kernel that a plan counts.
    near = {"rel": 0.03} if family in ("gemma3", "smolvlm") else {"rel": 0}
    assert seen.model_flops == pytest.approx(counter.get_total_flops(), **near)
    without = replace(counted, data=replace(counted.data, images=0.0))
    assert observe(Request(without, DEVICE)).model_flops < 0.95 * seen.model_flops


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", *SQUARES])
def test_a_plan_without_data_assumes_what_the_processor_makes_of_an_image(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    vision = read_vision(AutoConfig.from_pretrained(folders[family]))
    assert vision is not None
    settings, tokenizer = read_processor(vision, str(folders[family])), load_tokenizer(str(folders[family]))
    for side in (32, 45, 64, 101):
        draw(tmp_path, "square.png", (9, 9, 9), (side, side))
        seen, _ = ImageProcessor.of(vision, settings, side * side, tokenizer).look(tmp_path / "square.png")
        planned = ImageProcessor.planned(vision, settings, side * side)
        assert planned == seen.patches * vision.patch**2
        assert math.prod(vision.grid(planned)) == seen.patches
    recipe = recipe_of(folders[family], tmp_path, more="image_pixels: 10201")
    request = request_of(recipe, find_accelerator("RTX-4090"))
    assert request.observed.data.image_pixels == planned
    assert request.recipe == recipe


def test_many_layers_are_planned_by_few(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = recipe_of(
        folders["qwen3_vl"],
        tmp_path,
        "{mixed_precision: {mode: bf16}, efficient_attention: {}, activation_checkpointing: {}}",
    )
    deep = replace(recipe, model=replace(recipe.model, weights="random", config={"num_hidden_layers": 29}))
    few, whole = (see(Request(deep, GPU)) for see in (observe_few_layers, observe))
    assert not few.log
    assert few.peak == pytest.approx(whole.peak, rel=1e-3)
    assert few.model_flops == whole.model_flops


def test_published_folders_hold_experts_transposed(folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    source = written(tmp_path, questions(tmp_path))
    other = shutil.copytree(folders["qwen3_vl_moe"], tmp_path / "other")
    values = load_file(other / "model.safetensors")
    turned = {n: t.mT.contiguous() if ".mlp.experts." in n else t for n, t in values.items()}
    assert {n for n, t in values.items() if t.shape != turned[n].shape}
    save_file(turned, other / "model.safetensors", {"format": "pt"})
    one, two = (dict(made(recipe_of(folder, source)).parameters()) for folder in (folders["qwen3_vl_moe"], other))
    assert all(torch.equal(one[name], two[name]) for name in one)
