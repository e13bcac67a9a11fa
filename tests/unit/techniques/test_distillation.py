"""Distillation against slow references: each document alone through plain transformers, whole logits, autograd; and what is refused."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from preheat import recipe as recipes
from preheat.core import Batch
from preheat.data.packing import Rows, Tokens
from preheat.data.row_cache import RowCache
from preheat.data.tokenizer import compare_folders, describe_difference, load_tokenizer
from preheat.engine import checkpoint
from preheat.engine.builder import build
from preheat.engine.evaluate import measure
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError, RunError
from preheat.models.distillation.teacher import space_layers
from preheat.ops.losses.cross_entropy import sum_chunked_loss, sum_full_loss
from preheat.ops.losses.distillation import Distilled, TeacherHead, divergence, top_tokens
from preheat.planning.dry_run import observe
from preheat.planning.request import Request

from ...conftest import DEVICE, difference, split, tiny, uneven
from ...contract.settings import teacher

TOGETHER = "chunked_loss: {rows: 7}, gradient_accumulation: {steps: 3}, activation_checkpointing: {}"


def made(settings: str = "", beside: str = "", folder: Path | None = None, **more: Any) -> Any:
    """A build with the tiny teacher."""
    folder = folder or teacher()
    techniques = f"{{distillation: {{teacher: {folder}, {settings}}}, {beside}}}"
    recipe = recipes.override(tiny(techniques, **more), f"data.tokenizer={folder}")
    return build(recipe, vocabulary=96, device=DEVICE)


def forced(logits: torch.Tensor, factor: float = 30.0) -> torch.Tensor:
    """Logits of a model that is surer than one that is drawn at random."""
    return factor * logits


# --- the losses ---------------------------------------------------------------------------------------------------


def slow_divergence(student: torch.Tensor, teacher: torch.Tensor, direction: str, top: int | None) -> torch.Tensor:
    """Sums of p log(p / q) over probabilities, row by row; with `top` over that many and the sum of the others."""
    found = []
    for s, t in zip(student.double().softmax(-1), teacher.double().softmax(-1), strict=True):
        if top is not None:
            order = t.argsort(descending=True)
            s, t = (torch.cat([x[order[:top]], x[order[top:]].sum()[None]]) for x in (s, t))
        a, b = (t, s) if direction == "forward" else (s, t)
        found.append((a * (a / b).log()).sum())
    return torch.stack(found)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize(("temperature", "mixture"), [(1.0, 1.0), (1.0, 0.4), (2.5, 0.7)])
@pytest.mark.parametrize("top", [None, 5])
def test_the_loss_and_its_gradient_in_chunks_are_those_of_the_formula(
    direction: Any, temperature: float, mixture: float, top: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.ops.losses.distillation._BLOCK", 40 * 3)  # a chunk of 7 rows in blocks of 3
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 9, 8, requires_grad=True), torch.nn.Linear(8, 40, bias=False)
    theirs, over = torch.randn(2, 9, 6), torch.randn(43, 6)
    labels = torch.randint(40, (2, 9))
    labels[0, :4] = -100
    said = forced(theirs @ over[:40].T, 1.0)
    if top is None:
        aligned, of = (theirs,), TeacherHead(over, 40)
    else:
        aligned, of = tuple(top_tokens(said, top, temperature)), None

    def loss(by: Any) -> tuple[Any, ...]:
        row_loss = Distilled(of, direction=direction, temperature=temperature, mixture=mixture)
        total = by(hidden, head, row_loss, labels, *aligned)
        return total.detach(), row_loss.sums, torch.autograd.grad(total, [hidden, head.weight])

    logits = head(hidden).flatten(0, 1)
    apart = slow_divergence(logits / temperature, said.flatten(0, 1) / temperature, direction, top)
    plain = functional.cross_entropy(logits.double(), labels.flatten(), reduction="none", ignore_index=-100)
    rows = (1 - mixture) * plain + mixture * temperature**2 * torch.where(labels.flatten() >= 0, apart, 0)
    wanted = torch.autograd.grad(rows.sum(), [hidden, head.weight])
    rows, plain, apart = (t.detach() for t in (rows, plain, apart))
    for by in (sum_full_loss, lambda *given: sum_chunked_loss(*given, rows=7)):
        total, sums, grads = loss(by)
        assert float(total) == pytest.approx(float(rows.sum()), rel=1e-5)
        assert float(sums["label_loss"]) == pytest.approx(float(plain.sum()), rel=1e-5)
        assert float(sums["divergence"]) == pytest.approx(float(apart[labels.flatten() >= 0].sum()), rel=1e-4)
        assert difference(dict(enumerate(grads)), dict(enumerate(wanted))) < 2e-6  # type: ignore[arg-type]


def test_likeliest_tokens_of_all_are_the_whole_and_a_sure_student_has_a_gradient() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 20), 3 * torch.randn(4, 20)
    assert torch.allclose(divergence(a, top_tokens(b, 20)), divergence(a, b), atol=1e-6)
    assert torch.allclose(top_tokens(b, 3).values.exp().sum(-1), torch.ones(4))
    sure = torch.zeros(1, 20)
    sure[0, 4] = 300.0  # nothing is left for the others
    for direction in ("forward", "reverse"):
        logits = sure.clone()
        losses, _ = Distilled(None, direction=direction, mixture=1.0).value_and_grad_(  # type: ignore[arg-type]
            logits, torch.tensor([4]), *top_tokens(b[:1], 3)
        )
        assert torch.isfinite(logits).all()
        assert torch.isfinite(losses).all()


# --- in a build ---------------------------------------------------------------------------------------------------


def documents(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        pair
        for tokens, labels, sizes in zip(batch.tokens, batch.labels, batch.mask.documents or (), strict=True)
        for pair in zip(tokens.split(sizes), labels.split(sizes), strict=True)  # type: ignore[no-untyped-call]
    ]


def slow(b: Any, batch: Batch, *, direction: str, temperature: float, mixture: float) -> float:
    """The loss of a batch by transformers' own eager attention, each document alone; the mean."""
    from preheat.models.hf import compute_reference_logits

    (student,), (other,), total = b.parts["trained"], b.parts["teacher"], 0.0
    for tokens, labels in documents(batch):
        mine, theirs = (compute_reference_logits(model, tokens[None])[0, :, :96] for model in (student, other))
        apart = slow_divergence(mine / temperature, theirs / temperature, direction, None)[labels >= 0].sum()
        plain = functional.cross_entropy(mine, labels, ignore_index=-100, reduction="sum")
        total += (1 - mixture) * float(plain) + mixture * temperature**2 * float(apart)
    return total / batch.weight


@pytest.mark.parametrize("beside", ["", TOGETHER, f"lora: {{rank: 4}}, {TOGETHER}"])
def test_a_builds_loss_is_that_of_each_document_alone(beside: str) -> None:
    b = made("divergence: reverse, temperature: 2.0, mixture: 0.7", beside)
    with torch.no_grad():
        for p in b.parts["teacher"][0].parameters():
            p.mul_(3.0)  # surer of what it says
    batch = uneven()
    wanted = slow(b, batch, direction="reverse", temperature=2.0, mixture=0.7)
    loss = accumulate_gradients(b, split(batch, [2, 2] if b.state.accumulation > 1 else [4]))
    assert float(loss.total / loss.weight) == pytest.approx(wanted, rel=2e-5)
    assert all(p.grad is None for p in b.parts["teacher"][0].parameters())
    told = b.loss.scores(loss.metrics, loss.weight)
    assert 0.3 * told["label_loss"] + 0.7 * 4 * told["divergence"] == pytest.approx(wanted, rel=1e-5)
    assert measure(b, [batch]).loss == pytest.approx(
        told["label_loss"], rel=1e-5
    )  # an evaluation measures the labels alone


def test_a_teacher_of_another_family_is_read_by_its_own_attention_and_with_its_cap_on_the_logits(
    tmp_path: Path,
) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shutil.copytree(teacher(), tmp_path / "gemma2", ignore=shutil.ignore_patterns("model*", "config*"))
    config = Gemma2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=32, vocab_size=104,
        max_position_embeddings=64, sliding_window=5, attn_logit_softcapping=0.5, final_logit_softcapping=0.5,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma2")
    b = made("temperature: 2.0, mixture: 0.7", "efficient_attention: {}, chunked_loss: {rows: 7}", tmp_path / "gemma2")
    loss = accumulate_gradients(b, [uneven()])
    wanted = slow(b, uneven(), direction="forward", temperature=2.0, mixture=0.7)
    assert float(loss.total / loss.weight) == pytest.approx(wanted, rel=2e-6)


def test_gradients_through_chunks_and_checkpoints_are_those_of_the_plain_form() -> None:
    found = []
    for beside in ("", TOGETHER):
        b = made("hidden: 0.3, matched: 2", beside)
        accumulate_gradients(b, split(uneven(), [2, 2] if beside else [4]))
        found.append({name: p.grad for name, p in b.parameters()})
    assert difference(found[1], found[0]) < 5e-6
    assert any("preheat_maps.1" in name for name in found[0])


def test_hidden_states_come_near_the_teachers() -> None:
    b = made("hidden: 1.0, matched: 2, mixture: 0.0")
    batch = uneven()
    told = []
    for _ in range(30):
        loss = accumulate_gradients(b, [batch], 0.01)
        told.append(b.loss.scores(loss.metrics, loss.weight)["hidden_distance"])
        update(b, 0.01)
    assert told[-1] < 0.5 * told[0]


def test_the_teacher_is_in_no_checkpoint_but_known_by_its_weights() -> None:
    b = made()
    names = checkpoint._collect_tensors(b)
    assert not any("teacher" in name for name in names)
    assert any(name.startswith("model.") for name in names)
    assert b.sources["teacher"].fingerprint() != b.weights.fingerprint()
    assert not any(p.requires_grad for p in b.parts["teacher"][0].parameters())


def test_a_student_of_fewer_layers_begins_from_layers_all_over_its_teacher(data_folder: Path) -> None:
    stories = data_folder / "stories260K-hf"
    recipe = recipes.parse(
        f"model: {{path: {stories}, config: {{num_hidden_layers: 3}}}}\nbatch: {{size: 2, seq_len: 32}}\nstop: {{max_steps: 1}}\n"
        f"techniques: {{distillation: {{teacher: {stories}, layers: spread, mixture: 1.0}}}}"
    )
    b = build(recipe, vocabulary=512, device=DEVICE)
    mine, theirs = b.trained[0].model.layers, b.parts["teacher"][0].model.layers  # type: ignore[union-attr,index]
    assert space_layers(3, 5) == [0, 2, 4]
    for n, of in enumerate(space_layers(3, 5)):
        assert difference(mine[n].state_dict(), theirs[of].state_dict()) == 0  # type: ignore[index,union-attr]


# --- kept on disk -------------------------------------------------------------------------------------------------


def rows_of(count: int = 6, length: int = 32, seed: int = 0) -> Rows:
    ids = np.random.default_rng(seed).integers(0, 96, count * length).astype(np.uint16)
    return Rows(Tokens(ids, np.arange(20, count * length + 1, 43)), length=length, packing="stream", pad=0)


def _batch(rows: Rows, numbers: list[int]) -> Batch:
    from preheat.data.loader import collate

    return collate([(n, rows.row(n)) for n in numbers])


def test_what_a_teacher_said_is_read_by_row_and_gives_the_loss_of_the_teacher_at_hand(tmp_path: Path) -> None:
    rows, settings = rows_of(), "mixture: 0.8, temperature: 1.5"
    kept, live = (
        made(f"{settings}, cache: {tmp_path}, top_k: 96", "chunked_loss: {}"),
        made(settings, "chunked_loss: {}"),
    )
    assert "teacher" not in kept.parts
    asked: list[str] = []
    kept.run_dataset_passes(rows, [4, 1, 0, 4], lambda what, done, whole: asked.append(what))
    assert asked
    loss, wanted = (accumulate_gradients(b, [_batch(rows, [4, 0]), _batch(rows, [1])]) for b in (kept, live))
    assert float(loss.total) == pytest.approx(float(wanted.total), rel=1e-4)
    measure(kept, [_batch(rows, [3])])  # an evaluation reads no rows of it
    asked.clear()
    again = made(f"{settings}, cache: {tmp_path}, top_k: 96", "chunked_loss: {}")
    again.run_dataset_passes(rows, [0, 1, 4], lambda what, done, whole: asked.append(what))
    assert not asked  # the teacher runs once
    assert float(accumulate_gradients(again, [_batch(rows, [4, 0]), _batch(rows, [1])]).total) == float(loss.total)
    with pytest.raises(RunError, match="sequence 3 is not in the cache"):
        accumulate_gradients(again, [_batch(rows, [3])])
    with pytest.raises(RunError, match="sequence 1 belongs to another text"):
        accumulate_gradients(again, [_batch(rows_of(seed=1), [1])])


def test_a_cache_that_is_damaged_or_of_something_else_is_refused(tmp_path: Path) -> None:
    rows, folder = rows_of(), tmp_path / "kept"
    first = made(f"cache: {folder}, top_k: 4")
    first.run_dataset_passes(rows, range(6), lambda *_: None)
    cases = [
        ("temperature: 2.0, top_k: 4", rows, "temperature"),
        ("top_k: 5", rows, r"top \(was 4, is 5\)"),
        ("top_k: 4", rows_of(seed=1), "data"),
    ]
    for settings, other, words in cases:
        with pytest.raises(RunError, match=f"made with other settings: {words}"):
            made(f"cache: {folder}, {settings}").run_dataset_passes(other, range(6), lambda *_: None)
    file = folder / "rows.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    damaged = made(f"cache: {folder}, top_k: 4")
    damaged.run_dataset_passes(rows, range(6), lambda *_: None)
    with pytest.raises(RunError, match=r"sequence [23] is damaged; remove the folder"):
        accumulate_gradients(damaged, [_batch(rows, [2, 3])])
    file.write_bytes(content[:-5])
    with pytest.raises(RunError, match=r"rows\.bin is missing or incomplete"):
        made(f"cache: {folder}, top_k: 4").run_dataset_passes(rows, range(6), lambda *_: None)


def test_rows_that_were_not_written_whole_are_missing(tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "rows": 3,
        "of": {},
        "arrays": {"a": ((2,), "int32"), "b": ((1,), "float16")},
        "knob": "cache",
    }
    kept, tokens = RowCache(tmp_path, **how), np.arange(4)
    kept.write(1, tokens, np.array([7, -8]), np.array([0.5]))
    again = RowCache(tmp_path, **how)
    assert again.find_missing([2, 1, 0, 2]) == [0, 2]
    assert [a.tolist() for a in again.read(1, tokens)] == [[7, -8], [0.5]]


# --- what is planned ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a teacher with 32,000 pieces of which a dry run reads all but the values."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("large")
    shutil.copytree(
        teacher(32_000, hidden_size=4, num_hidden_layers=1, intermediate_size=4), folder, dirs_exist_ok=True
    )
    LlamaConfig(
        hidden_size=512, num_hidden_layers=12, num_attention_heads=8, intermediate_size=1376, vocab_size=32_000, max_position_embeddings=256
    ).save_pretrained(folder)  # fmt: skip
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def planned(
    folder: Path, technique: str, beside: str = "chunked_loss: {}, mixed_precision: {}, efficient_attention: {}"
) -> Any:
    recipe = recipes.parse(
        "model: {num_layers: 6, hidden_size: 384, num_heads: 6, intermediate_size: 1024, vocab_size: 32000}\nbatch: {size: 16, seq_len: 256}\n"
        f"data: {{tokenizer: {folder}}}\nstop: {{max_steps: 1}}\ntechniques: {{{beside}, {technique}}}"
    )
    return observe(Request(recipe, DEVICE, vocabulary=32_000), evaluated=False)


def test_at_32_000_pieces_memory_is_near_that_of_plain_chunked_training_and_the_teacher_is_counted(large: Path) -> None:
    plain = planned(large, "")
    live = planned(large, f"distillation: {{teacher: {large}}}")
    kept = planned(large, f"distillation: {{teacher: {large}, cache: {large / 'kept'}}}")
    most = max(plain.peak.values())
    assert max(live.peak.values()) < 1.3 * most
    assert max(kept.peak.values()) < 1.1 * most
    # Neither's logits of the batch: the largest thing that passes is far below 16 x 256 x 32,000 values in bf16.
    assert (
        max(size for _, size, phase in live.log if phase in ("head and loss", "backward")) < 16 * 256 * 32_000 * 2 / 2
    )
    layers = 12 * (4 * 512**2 + 3 * 512 * 1376)
    forward = 2 * 16 * 256 * (layers + 32_000 * 512) + 12 * 4 * 16 * 256 * 256 * 512
    assert sum(live.flops.values()) - sum(plain.flops.values()) == pytest.approx(forward, rel=0.02)
    assert sum(kept.flops.values()) == sum(plain.flops.values())
    assert live.trained == plain.trained


def test_under_fsdp_the_teacher_is_shared_out_as_the_student_is() -> None:
    recipe = recipes.override(
        tiny(f"{{fsdp: {{}}, distillation: {{teacher: {teacher()}}}}}"),
        f"data.tokenizer={teacher()}",
        "parallel.devices=4",
    )
    seen = observe(Request(recipe, DEVICE, vocabulary=96), evaluated=False)
    whole = sum(p.numel() for parts in made().parts.values() for part in parts for p in part.parameters())
    assert seen.at["load", ""]["parameters"] == pytest.approx(4 * whole / 4, rel=0.1)  # bytes of fp32, a fourth of them


def test_the_pass_that_fills_a_cache_is_planned_too(large: Path) -> None:
    recipe = recipes.override(
        tiny("{}", more=f"data: {{tokenizer: {teacher()}}}"),
        f"techniques.distillation={{teacher: {teacher()}, cache: {large / 'x'}}}",
    )
    seen = observe(Request(recipe, DEVICE, vocabulary=96))
    count = sum(p.numel() for p in made().parts["teacher"][0].parameters())
    assert sum(seen.at["load", "rows"].values()) > sum(seen.at["load", ""].values()) + 4 * count
    assert not (large / "x").exists()


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("teacher: /nowhere", "no config.json; name the folder of a Hugging Face model"),
        ("teacher: {run}", "is a run; export it first"),
        ("teacher: {adapter}", "is an adapter; merge it"),
        ("teacher: {other}", "token 17 is 'w17' in the one and 'w18' in the other"),
        ("teacher: {fewer}", "its head has 64 rows and the student's 96"),
        ("teacher: {same}, mixture: 0", "the teacher has no effect"),
        ("teacher: {same}, matched: 2", "hidden is 0"),
        ("teacher: {same}, hidden: 0.1, matched: 4", "the shallower model has 3; use at most 3"),
        ("teacher: {same}, layers: spread", "set model.path to the teacher"),
        ("teacher: {same}, cache: x, hidden: 0.1", "cache: holds no hidden states"),
        ("teacher: {same}, cache: x}, length_curriculum: {", "cache: holds whole sequences"),
    ],
)
def test_check_says_no(settings: str, words: str, tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("run", "adapter", "other")} | {"same": teacher(), "fewer": teacher(64)}
    for name, file in (("run", "recipe.yaml"), ("adapter", "adapter_config.json")):
        places[name].mkdir()
        (places[name] / file).write_text("{}")
    shutil.copytree(teacher(), places["other"])
    file = places["other"] / "tokenizer.json"
    file.write_text(file.read_text().replace('"w17"', '"w-"').replace('"w18"', '"w17"').replace('"w-"', '"w18"'))
    for name, folder in places.items():
        settings = settings.replace(f"{{{name}}}", str(folder))
    own = places["fewer"] if "64" in words else teacher()
    recipe = recipes.override(tiny(f"{{distillation: {{{settings}}}}}"), f"data.tokenizer={own}")
    with pytest.raises(RecipeError, match=words) as raised:
        build(recipe, vocabulary=64 if own == places["fewer"] else 96, device=DEVICE)
    assert str(raised.value).count("\n") == 0


def test_a_student_that_is_its_teacher_has_nothing_to_learn_but_a_changed_one_has(data_folder: Path) -> None:
    stories = data_folder / "stories260K-hf"
    recipe = recipes.parse(
        f"model: {{path: {stories}}}\nbatch: {{size: 2, seq_len: 32}}\nstop: {{max_steps: 1}}\n"
        f"techniques: {{distillation: {{teacher: {stories}, mixture: 1.0}}}}"
    )
    with pytest.raises(RecipeError, match="there is nothing to learn"):
        build(recipe, vocabulary=512, device=DEVICE)
    b = build(recipes.override(recipe, "techniques.grouped_queries={num_kv_heads: 2}"), vocabulary=512, device=DEVICE)
    assert b.changes["distillation"][0].count == 260_032
    own = dataclasses.replace(recipe, model=tiny().model)
    with pytest.raises(RecipeError, match=f"set data.tokenizer: {stories}"):
        build(own, vocabulary=96, device=DEVICE)


def test_tokenizers_that_cut_alike_are_told_from_those_that_do_not(data_folder: Path, tmp_path: Path) -> None:
    folder = data_folder / "tokenizers/gpt2"
    gpt2 = load_tokenizer(str(folder))
    assert describe_difference(gpt2, load_tokenizer(str(folder))) is None
    assert "tokens)" in str(describe_difference(gpt2, load_tokenizer(str(teacher()))))
    shutil.copytree(folder, tmp_path / "cut")
    file = tmp_path / "cut" / "tokenizer.json"
    file.write_text(file.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true').replace('"add_prefix_space":false', '"add_prefix_space":true'))  # fmt: skip
    assert "they split text differently" in str(describe_difference(gpt2, load_tokenizer(str(tmp_path / "cut"))))
    assert "they split text differently" in str(compare_folders(str(folder), str(tmp_path / "cut"), knob="teacher:"))
    shutil.copy(folder / "tokenizer.json", file)
    assert compare_folders(str(folder), str(tmp_path / "cut"), knob="teacher:") is None  # what changed is read again
