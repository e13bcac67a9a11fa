"""What is exported holds what was trained: read again by plain transformers and by peft, whatever the adapter and the family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers

from preheat import recipe as recipes
from preheat.compress.export import huggingface, verify
from preheat.compress.export import peft as peft_export
from preheat.compress.special_tokens import end_texts, require_same_tokens
from preheat.core import Build
from preheat.data.tokenizer import load_tokenizer, train_tokenizer
from preheat.engine import checkpoint
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import DataError, PreheatError, RecipeError, RunError
from preheat.inference.load import load_model
from preheat.models.hf import compute_reference_logits
from preheat.ops.quantization import nf4
from preheat.planning.plan_request import find_vocabulary_size
from preheat.run.writer import Writer
from preheat.techniques.peft_adapter import METHODS

from ...conftest import DEVICE, uneven

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated", "ignore:fan_in_fan_out is set"
)

VOCABULARY = 300
TOKENS = torch.arange(24)[None] * 11 % VOCABULARY


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base of each family with its tokenizer; weights large enough that a change of one shows at the logits."""
    root = tmp_path_factory.mktemp("bases")
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
        "seven",
        "wizards",
        "box",
        "at",
        "night",
    ]
    texts = [(f"{n:032x}", " ".join(words[(n * k) % len(words)] for k in range(1, 90))) for n in range(40)]
    tokenizer = train_tokenizer(texts, vocabulary=VOCABULARY)
    common: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": len(tokenizer),
        "initializer_range": 0.1,
    }
    common |= {
        "num_hidden_layers": 2,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "max_position_embeddings": 64,
    }
    gated = {"num_key_value_heads": 2, "intermediate_size": 64}
    still = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    torch.manual_seed(0)
    configs = {
        "llama": transformers.LlamaConfig(**common, **gated),
        "tied": transformers.LlamaConfig(**common, **gated, tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(**common, **gated, head_dim=8, tie_word_embeddings=True),
        "gpt2": transformers.GPT2Config(**common, **still),
    }
    for name, config in configs.items():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in configs}


def text(folder: Path | str, techniques: str, model: str = "") -> str:
    return f"model: {{path: {folder}{model}}}\nbatch: {{size: 4, seq_len: 32}}\noptimizer: {{lr: 0.01}}\nstop: {{max_steps: 9}}\nevaluate: {{rows: 4}}\ntechniques: {techniques}"


def trained(
    folder: Path, techniques: str, steps: int = 3, model: str = "", *, vocabulary: int = VOCABULARY, lr: float = 0.02
) -> Build:
    b = build(recipes.parse(text(folder, techniques, model)), vocabulary=vocabulary, device=DEVICE)
    for _ in range(steps):
        batch = uneven(vocabulary=vocabulary)
        batch.tokens[:, ::9], batch.tokens[:, 4::9] = (
            vocabulary - 1,
            vocabulary - 2,
        )  # tokens that were added, where some were
        accumulate_gradients(b, [batch])
        update(b, lr)
    return b


def run_of(b: Build, tokenizer: Any, out: Path) -> Path:
    """A run's folder as training leaves it, in what is read from it again."""
    writer = Writer(out)
    progress = checkpoint.Progress(step=3, fingerprints={"weights": b.weights.fingerprint()}, run=writer.id)
    checkpoint.save(b, progress, out / "checkpoints", keep=1)
    writer.write_folder("tokenizer", tokenizer.save_pretrained)
    writer.write_text("recipe.yaml", recipes.dump(b.recipe))
    writer.close()
    return out


def tokenizer_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def made(folder: Path, techniques: str, out: Path) -> tuple[Path, torch.Tensor]:
    b = trained(folder, techniques)
    return run_of(b, tokenizer_of(folder), out), compute_reference_logits(b.trained[0], TOKENS)  # type: ignore[arg-type]


def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


SMALL = {"miss": "{r: 8}", "randlora": "{r: 4}", "road": "{group_size: 16}", "vera": "{r: 16}"}
LORAS = {name: f"{{lora: {{variant: {name}, rank: 4}}}}" for name in ("lora", "rslora", "dora", "pissa")}
QUANTIZED = {
    "qlora": "{lora: {rank: 4}, nf4: {}}",
    "qdora": "{lora: {rank: 4, variant: dora}, nf4: {double_quantization: false, keep: [down_proj]}}",
}
OTHERS = {name: f"{{peft_adapter: {{method: {name}, settings: {SMALL.get(name, '{}')}}}}}" for name in METHODS}
CASES = [
    *(("llama", name) for name in LORAS),
    *(("qwen3", "dora"), ("qwen3", "pissa"), ("gpt2", "rslora"), ("gpt2", "dora"), ("gpt2", "pissa")),
    *(("tied", "qlora"), ("tied", "qdora"), ("gpt2", "qlora")),
    *(("llama", name) for name in OTHERS),
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_merged_and_alone_give_the_runs_logits(bases: dict[str, Path], tmp_path: Path, family: str, name: str) -> None:
    techniques = (LORAS | QUANTIZED | OTHERS)[name].replace(
        ", keep: [down_proj]", "" if family == "gpt2" else ", keep: [down_proj]"
    )
    run, wanted = made(bases[family], techniques, tmp_path / "run")
    start = plain(bases[family])
    assert furthest(compute_reference_logits(start, TOKENS), wanted) > 0.05, "something was learnt"
    scale = max(1.0, float(wanted.abs().max()))

    loose = 1e-3 if name == "randlora" else 1e-5  # its sums cancel: in fp32 its own forward pass is no better
    merged = huggingface.write(run, tmp_path / "merged", tolerance=loose)
    again = plain(tmp_path / "merged")
    assert type(again) is type(start)
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in start.named_parameters()}
    assert furthest(compute_reference_logits(again, TOKENS), wanted) < loose * scale
    assert merged.max_logit_difference < loose * scale

    alone = peft_export.write(run, tmp_path / "alone")
    model = peft.PeftModel.from_pretrained(start, tmp_path / "alone")
    for packed in (json.loads((tmp_path / "alone/preheat_base.json").read_text())["nf4"] or {"modules": []})["modules"]:
        weight: Any = model.get_submodule(f"base_model.model.{packed}").base_layer.weight.data  # type: ignore[union-attr]
        rounded = nf4.quantize(weight, double=name == "qlora")
        weight.copy_(nf4.dequantize(rounded, tuple(weight.shape), torch.float32, nf4.build_tables()))
    assert (
        furthest(compute_reference_logits(model.get_base_model(), TOKENS), wanted)
        < (1e-4 if name in QUANTIZED else 1e-5) * scale
    )  # type: ignore[arg-type]
    assert ("NF4" in alone.note) == (name in QUANTIZED)
    assert not [p.name for p in (tmp_path / "alone").iterdir() if p.name.startswith("model")], "the adapter alone"


@pytest.mark.parametrize("targets", ["[attention]", "[attention, experts]"])
def test_an_adapter_on_experts_in_4_bits_is_exported(bases: dict[str, Path], tmp_path: Path, targets: str) -> None:
    torch.manual_seed(0)
    tokenizer = tokenizer_of(bases["qwen3"])
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, vocab_size=len(tokenizer), initializer_range=0.1,
        bos_token_id=None, eos_token_id=0, pad_token_id=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    techniques = f"{{lora: {{rank: 4, target_modules: {targets}}}, nf4: {{}}}}"
    run, wanted = made(tmp_path / "base", techniques, tmp_path / "run")
    merged = huggingface.write(run, tmp_path / "merged")
    assert furthest(compute_reference_logits(plain(tmp_path / "merged"), TOKENS), wanted) < 1e-5
    alone = peft_export.write(run, tmp_path / "alone")
    assert max(merged.max_logit_difference, alone.max_logit_difference) < 1e-5
    assert "experts too, which it leaves as they are" in alone.note
    if "experts" not in targets:  # adapters of parameters are not read
        again = load_model(tmp_path / "alone").build.trained[0]
        assert furthest(compute_reference_logits(again, TOKENS), wanted) < 1e-5  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_a_really_pretrained_models_logits_move_by_less_than_a_hundred_thousandth(
    data_folder: Path, tmp_path: Path, name: str
) -> None:
    base = data_folder / "stories260K-hf"
    b = trained(base, (LORAS | QUANTIZED)[name], vocabulary=512, lr=0.005)
    run = run_of(b, tokenizer_of(base), tmp_path / "run")
    for made in (huggingface.write(run, tmp_path / "merged"), peft_export.write(run, tmp_path / "alone")):
        assert made.max_logit_difference < 1e-5
        assert made.largest_logit > 5
        assert made.tokens > 300


# --- what a folder says ---------------------------------------------------------------------------------------------


def test_what_a_gpu_cannot_compare_is_compared_on_the_host(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, wanted = made(bases["tied"], QUANTIZED["qlora"], tmp_path / "run")
    opened, load = [], huggingface.load_model

    def recorded(*args: Any, **options: Any) -> Any:
        opened.append(load(*args, **options))
        return opened[-1]

    monkeypatch.setattr(huggingface, "load_model", recorded)
    monkeypatch.setattr(verify, "needs_host", lambda model: True)
    huggingface.write(run, tmp_path / "merged")
    assert [o.recipe.hardware.device for o in opened] == ["auto", "cpu"]
    assert not opened[0].build.parts, "the first copy is freed"
    assert furthest(compute_reference_logits(plain(tmp_path / "merged"), TOKENS), wanted) < 1e-5 * max(
        1.0, float(wanted.max())
    )


@pytest.mark.parametrize(("free", "needed"), [(3999, True), (4000, False)])
def test_a_comparison_replaces_the_weights_that_a_gpu_holds(
    monkeypatch: pytest.MonkeyPatch, free: int, needed: bool
) -> None:
    weight = SimpleNamespace(device=torch.device("cuda"), numel=lambda: 1000, element_size=lambda: 4)
    monkeypatch.setattr(verify, "count_parameters", lambda model: (0, 1000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 0))
    model: Any = SimpleNamespace(parameters=lambda: iter([weight]))
    assert verify.needs_host(model) == needed  # 1,000 weights in fp64
    assert not verify.needs_host(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_narrower_precision_is_measured_and_a_difference_beyond_the_tolerance_leaves_nothing(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    run, _ = made(bases["llama"], LORAS["lora"], tmp_path / "run")
    half = huggingface.write(run, tmp_path / "half", dtype=torch.bfloat16)
    assert {
        p.dtype for p in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").parameters()
    } == {torch.bfloat16}
    assert 1e-4 < half.max_logit_difference < half.tolerance * half.largest_logit
    with pytest.raises(
        RunError, match=r"differ by up to .* more than the 1e-06 of it that is accepted; nothing was written"
    ):
        huggingface.write(run, tmp_path / "refused", dtype=torch.bfloat16, tolerance=1e-6)
    with pytest.raises(RunError, match=r"differ by up to"):
        peft_export.write(run, tmp_path / "refused", tolerance=-1.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["half", "run"]
    with pytest.raises(RunError, match="already exists"):
        huggingface.write(run, tmp_path / "half")


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_ends_template_and_generation_settings_are_written_and_a_tied_head_stays_tied(
    bases: dict[str, Path], tmp_path: Path, family: str
) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases[family], base)
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 7]}
    (base / "generation_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_of(base)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    b = trained(base, "{}", steps=2)
    made = huggingface.write(run_of(b, tokenizer, tmp_path / "run"), tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is (family == "tied")
    assert (config["eos_token_id"], config["pad_token_id"], config["vocab_size"]) == (0, 1, VOCABULARY)
    said = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (said.temperature, said.top_p, said.pad_token_id) == (0.6, 0.9, 1)
    assert said.eos_token_id == list(made.tokens_that_end) == [5, 7, 0], "the base's ends and the one that was trained"
    assert (
        tokenizer_of(tmp_path / "out").apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        == "<user>hi"
    )
    model = plain(tmp_path / "out")
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is (family == "tied")
    assert made.max_logit_difference == 0.0
    ids = torch.tensor([tokenizer.encode("the quick brown")])
    ours = b.trained[0].eval()
    ours.set_attn_implementation("eager")  # type: ignore[operator]
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "temperature": None, "top_p": None}
    assert torch.equal(
        model.generate(ids, **greedy), ours.generate(ids, **greedy, eos_token_id=[5, 7, 0], pad_token_id=1)
    )  # type: ignore[operator]


def test_of_a_generation_config_that_contradicts_itself_what_does_not_is_kept(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases["llama"], base)
    stated = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 7], "repetition_penalty": 1.2}
    (base / "generation_config.json").write_text(json.dumps(stated))
    b = trained(base, "{}", steps=1)
    run = run_of(b, tokenizer_of(base), tmp_path / "run")
    made = huggingface.write(run, tmp_path / "out")
    said = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert said.eos_token_id == list(made.tokens_that_end) == [5, 7, 0], "both of its ends, and the tokenizer's"
    assert (said.do_sample, said.temperature, said.top_p, said.repetition_penalty) == (False, None, None, 1.2)
    assert "left out: temperature 0.6, top_p 0.9" in made.note
    assert "sets repetition_penalty 1.2" in made.note
    for damaged in ("{", "[]", '{"eos_token_id": "</s>"}'):
        (base / "generation_config.json").write_text(damaged)
        with pytest.raises(RunError, match=r"generation_config.json: .*fix it or remove it from the folder"):
            huggingface.write(run, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_tokenizer_of_a_classifier_ends_each_text_as_training_did(bases: dict[str, Path], tmp_path: Path) -> None:
    plain_one = tokenizer_of(bases["llama"])
    begins = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(bases["llama"]).backend_tokenizer, eos_token="<|end|>", bos_token="<|pad|>"
    )
    begins.add_bos_token = True
    for n, tokenizer in enumerate((plain_one, begins)):
        changed = end_texts(tokenizer)
        assert changed.encode("the fox") == [*tokenizer.encode("the fox"), 0]
        assert tokenizer.encode("the fox")[-1] != 0, "the run's own stays as it is"
        changed.save_pretrained(tmp_path / str(n))
        require_same_tokens(changed, tmp_path / str(n))
        assert end_texts(tokenizer_of(tmp_path / str(n))).encode("the fox") == changed.encode("the fox"), (
            "once is enough"
        )


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_that_pefts_own_merge_adds_a_tied_pair_twice_is_said(bases: dict[str, Path], tmp_path: Path) -> None:
    run, wanted = made(
        bases["tied"], "{lora: {rank: 4, target_modules: [q_proj], embedding_rank: 4}}", tmp_path / "run"
    )
    note = peft_export.write(run, tmp_path / "alone").note
    model = peft.PeftModel.from_pretrained(plain(bases["tied"]), tmp_path / "alone")
    assert furthest(compute_reference_logits(model.get_base_model(), TOKENS), wanted) < 1e-4  # type: ignore[arg-type]
    off = furthest(compute_reference_logits(model.merge_and_unload(), TOKENS), wanted)  # type: ignore[operator]
    assert off > 0.01
    assert "peft's merge_and_unload gives another model" in note
    assert "merge by preheat export --to hf" in note
    assert huggingface.write(run, tmp_path / "merged").max_logit_difference < 1e-4
    untied, _ = made(bases["llama"], "{lora: {rank: 4, embedding_rank: 4}}", tmp_path / "other")
    assert "merge" not in peft_export.write(untied, tmp_path / "right").note


# --- tokens that are added ------------------------------------------------------------------------------------------

CHAT = ("<|im_start|>", "<|im_end|>")
ADDED = f", add_tokens: ['{CHAT[0]}', '{CHAT[1]}']"


@pytest.mark.parametrize(("family", "spare"), [("llama", 0), ("tied", 0), ("tied", 5)])
def test_added_tokens_begin_as_the_mean_are_trained_and_exported(
    bases: dict[str, Path], tmp_path: Path, family: str, spare: int
) -> None:
    base = tmp_path / "base"
    model = plain(bases[family])
    model.resize_token_embeddings(VOCABULARY + spare, mean_resizing=False)
    model.save_pretrained(base)
    tokenizer_of(bases[family]).save_pretrained(base)
    tokenizer = load_tokenizer(str(base), add_tokens=CHAT)
    assert tokenizer.encode("a<|im_end|>")[-1] == len(tokenizer) - 1 == VOCABULARY + 1
    fresh: Any = trained(base, "{}", 0, ADDED, vocabulary=len(tokenizer))
    for old, new in (
        (model.get_input_embeddings(), fresh.trained[0].get_input_embeddings()),
        (model.get_output_embeddings(), fresh.trained[0].get_output_embeddings()),
    ):
        assert new.weight.shape[0] == max(VOCABULARY + spare, VOCABULARY + 2)
        assert torch.equal(new.weight[:VOCABULARY], old.weight[:VOCABULARY])
        assert torch.allclose(
            new.weight[VOCABULARY : VOCABULARY + 2], old.weight[:VOCABULARY].mean(0).expand(2, -1), atol=1e-6
        )
    assert "rows 300 to 301 of embedding and head start as the mean" in fresh.changes["add_tokens"][0].what
    b = trained(base, "{}", 3, ADDED, vocabulary=len(tokenizer))
    assert (
        furthest(
            b.trained[0].get_input_embeddings().weight[VOCABULARY:],
            fresh.trained[0].get_input_embeddings().weight[VOCABULARY:],
        )
        > 1e-3
    )  # type: ignore[operator]
    huggingface.write(run_of(b, tokenizer, tmp_path / "run"), tmp_path / "out")
    again = plain(tmp_path / "out")
    assert (
        again.config.vocab_size
        == again.get_input_embeddings().weight.shape[0]
        == max(VOCABULARY + spare, VOCABULARY + 2)
    )
    assert tokenizer_of(tmp_path / "out").convert_tokens_to_ids(list(CHAT)) == [VOCABULARY, VOCABULARY + 1]


def test_tokens_that_would_never_be_learnt_or_are_there_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model.add_tokens: the embedding is frozen, so the new tokens"):
        trained(bases["llama"], LORAS["lora"], 0, ADDED, vocabulary=VOCABULARY + 2)
    with pytest.raises(DataError, match=r"model.add_tokens: the tokenizer has '<\|pad\|>' already"):
        load_tokenizer(str(bases["llama"]), add_tokens=["<|pad|>"])
    with pytest.raises(RecipeError, match=r"'<\|pad\|>' is already in the tokenizer and in the embedding"):
        find_vocabulary_size(recipes.parse(text(bases["llama"], "{}", ", add_tokens: ['<|pad|>']")))
    tokenizer = load_tokenizer(str(bases["llama"]), add_tokens=CHAT)
    larger = tmp_path / "larger"
    shutil.copytree(bases["llama"], larger)
    tokenizer.save_pretrained(larger)
    with pytest.raises(RecipeError, match=r"302 tokens but .* 300 rows; name the missing tokens in model.add_tokens"):
        trained(larger, "{}", 0, vocabulary=302)
    assert find_vocabulary_size(recipes.parse(text(larger, "{}", ADDED))) == 302
    with pytest.raises(RecipeError, match="is empty or repeated"):
        recipes.parse(text("x", "{}", ", add_tokens: [a, a]"))
    with pytest.raises(RecipeError, match="model from a path"):
        recipes.parse("model: {size: 1M, add_tokens: [a]}\nstop: {max_steps: 1}")


# --- adapters that came from peft -----------------------------------------------------------------------------------


def by_peft(base: Path, out: Path, **changed: Any) -> torch.Tensor:
    """Writes an adapter with peft alone; returns its logits."""
    torch.manual_seed(3)
    settings = {
        "r": 4,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    } | changed
    model = peft.get_peft_model(plain(base), peft.LoraConfig(**settings))
    model.save_pretrained(out)
    return compute_reference_logits(model.get_base_model(), TOKENS)  # type: ignore[arg-type]


def started(out: Path, more: str = "", rank: int = 4) -> str:
    return f"{{lora: {{rank: {rank}, target_modules: [q_proj, down_proj], start: {out}{more}}}}}"


@pytest.mark.parametrize("dora", [False, True])
def test_training_starts_from_an_adapter_of_pefts(bases: dict[str, Path], tmp_path: Path, dora: bool) -> None:
    wanted = by_peft(bases["llama"], tmp_path / "adapter", use_dora=dora)
    techniques = started(tmp_path / "adapter", ", variant: dora" if dora else "")
    b = trained(bases["llama"], techniques, 0)
    assert furthest(compute_reference_logits(b.trained[0], TOKENS), wanted) < 1e-5  # type: ignore[arg-type]
    assert f"begun from {tmp_path / 'adapter'}" in b.changes["lora"][0].what
    b = trained(bases["llama"], techniques, 2)
    tuned = compute_reference_logits(b.trained[0], TOKENS)  # type: ignore[arg-type]
    run = run_of(b, tokenizer_of(bases["llama"]), tmp_path / "run")
    shutil.rmtree(tmp_path / "adapter")  # what it began from is not needed any more
    assert torch.equal(compute_reference_logits(load_model(run).build.trained[0], TOKENS), tuned)  # type: ignore[arg-type]


def test_another_method_starts_from_its_own_folder(bases: dict[str, Path], tmp_path: Path) -> None:
    run, wanted = made(bases["llama"], OTHERS["vera"], tmp_path / "run")
    peft_export.write(run, tmp_path / "alone")
    more = OTHERS["vera"].replace("method: vera", f"method: vera, start: {tmp_path / 'alone'}")
    assert furthest(compute_reference_logits(trained(bases["llama"], more, 0).trained[0], TOKENS), wanted) < 1e-5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "more", "words"),
    [
        ({"r": 8}, "", "has r 8, the recipe 4; change rank"),
        ({"lora_alpha": 8}, "", "has lora_alpha 8, the recipe 32.0; change alpha"),
        ({"use_rslora": True}, "", "has use_rslora True, the recipe False; change variant"),
        (
            {"rank_pattern": {"q_proj": 2}},
            "",
            r"q_proj.lora_A.weight of shape .2, 32., the model needs .4, 32.: another rank",
        ),
        ({"target_modules": ["q_proj"]}, "", r"has no model.layers.0.mlp.down_proj.lora_A.weight.*other targets"),
        (
            {"target_modules": ["q_proj", "down_proj", "o_proj"]},
            "",
            r"has model.layers.0.self_attn.o_proj.*does not have",
        ),
        ({"modules_to_save": ["lm_head"]}, "", "also trains whole modules"),
        ({"bias": "all"}, "", "trains biases"),
        ({"init_lora_weights": "pissa"}, "", "belongs to a base that pissa changed"),
        ({}, ", variant: pissa", "start: pissa starts from the base's singular directions"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(
    bases: dict[str, Path], tmp_path: Path, settings: dict[str, Any], more: str, words: str
) -> None:
    by_peft(bases["llama"], tmp_path / "adapter", **settings)
    with pytest.raises(RecipeError, match=words):
        trained(bases["llama"], started(tmp_path / "adapter", more), 0)


def test_an_adapter_for_another_base_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    by_peft(bases["llama"], tmp_path / "adapter")
    with pytest.raises(RecipeError, match=r"is an adapter for .*llama, whose weights are not those of .*tied"):
        trained(bases["tied"], started(tmp_path / "adapter"), 0)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/else"}))
    with pytest.raises(
        RecipeError, match=r"is an adapter for org/else, not for .*llama; if they are the same model, write"
    ):
        trained(bases["llama"], started(tmp_path / "adapter"), 0)
    with pytest.raises(
        RecipeError, match="fits the base that it was trained on; this model's weights are newly initialized"
    ):
        trained(bases["llama"], started(tmp_path / "adapter"), 0, ", weights: random")
    wide = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, vocab_size=VOCABULARY
    )
    transformers.LlamaForCausalLM(wide).save_pretrained(tmp_path / "wide")
    with pytest.raises(
        RecipeError,
        match=r"of shape \(4, 32\), the model needs \(4, 64\): another rank, or an adapter for another base",
    ):
        trained(tmp_path / "wide", started(tmp_path / "adapter"), 0)


@pytest.mark.parametrize("name", ["lora", "qdora"])
def test_an_adapters_folder_is_opened_on_its_base(bases: dict[str, Path], tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases["llama"], base)
    run, wanted = made(base, (LORAS | QUANTIZED)[name], tmp_path / "run")
    peft_export.write(run, tmp_path / "alone")
    opened = load_model(tmp_path / "alone")
    assert furthest(compute_reference_logits(opened.build.trained[0], TOKENS), wanted) < 1e-5  # type: ignore[arg-type]
    assert huggingface.write(tmp_path / "alone", tmp_path / "merged").merged == 14
    assert furthest(compute_reference_logits(plain(tmp_path / "merged"), TOKENS), wanted) < 3e-5
    base.rename(tmp_path / "moved")
    with pytest.raises(RecipeError, match=r"its base model is not there .*no such folder.*--base"):
        load_model(tmp_path / "alone")
    with pytest.raises(RecipeError, match=r"^--base: .*no such folder"):
        load_model(tmp_path / "alone", base=str(base))
    again = load_model(tmp_path / "alone", base=str(tmp_path / "moved"))
    assert furthest(compute_reference_logits(again.build.trained[0], TOKENS), wanted) < 1e-5  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="whose weights are not those of"):
        load_model(tmp_path / "alone", base=str(bases["tied"]))


def test_adapters_with_other_ranks_for_some_maps_are_opened(bases: dict[str, Path], tmp_path: Path) -> None:
    wanted = by_peft(bases["llama"], tmp_path / "adapter", rank_pattern={"q_proj": 2}, use_rslora=True)
    assert furthest(compute_reference_logits(load_model(tmp_path / "adapter").build.trained[0], TOKENS), wanted) < 1e-5  # type: ignore[arg-type]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_refused_in_one_line(bases: dict[str, Path], tmp_path: Path) -> None:
    def refused(call: Any, words: str) -> None:
        with pytest.raises(PreheatError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)

    pickled = tmp_path / "pickled"
    shutil.copytree(bases["llama"], pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    refused(
        lambda: trained(pickled, "{}", 0),
        r"pytorch_model.bin is a pickle, which preheat does not open: .*save_pretrained, which makes safetensors",
    )
    by_peft(bases["llama"], tmp_path / "adapter")
    (tmp_path / "adapter/adapter_model.safetensors").rename(tmp_path / "adapter/adapter_model.bin")
    refused(lambda: load_model(tmp_path / "adapter"), "adapter_model.bin is a pickle, which preheat does not open")
    refused(
        lambda: trained(bases["llama"], started(tmp_path / "adapter"), 0),
        r"techniques.lora.start: .*adapter_model.bin is a pickle",
    )
    refused(
        lambda: trained(bases["llama"], started(tmp_path / "nowhere"), 0), r"techniques.lora.start: .*no such folder"
    )
    refused(lambda: trained(bases["llama"], started(bases["llama"]), 0), "has no adapter_config.json")
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(b"cut")
    refused(lambda: load_model(tmp_path / "adapter"), "incomplete")
    four = tmp_path / "four"
    shutil.copytree(bases["llama"], four)
    config = json.loads((four / "config.json").read_text())
    (four / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    refused(lambda: trained(four, "{lora: {}}", 0), "bnb_4bit_quant_type: 'fp4': .*add techniques.nf4")
    full = run_of(trained(bases["llama"], "{}", 1), tokenizer_of(bases["llama"]), tmp_path / "full")
    refused(lambda: peft_export.write(full, tmp_path / "out"), "trained no adapter; write the whole model with --to hf")
    new = run_of(
        trained(bases["llama"], LORAS["lora"], 1, ", weights: random"), tokenizer_of(bases["llama"]), tmp_path / "new"
    )
    refused(lambda: peft_export.write(new, tmp_path / "out"), "its base was newly initialized")
    base = tmp_path / "base"
    shutil.copytree(bases["llama"], base)
    run, _ = made(base, LORAS["lora"], tmp_path / "run")
    model = plain(base)
    model.model.norm.weight.data += 1
    model.save_pretrained(base)
    refused(lambda: huggingface.write(run, tmp_path / "out"), "changed since the run was trained on them")
    shutil.rmtree(base)
    refused(lambda: huggingface.write(run, tmp_path / "out"), "no such folder")
    shutil.rmtree(run / "checkpoints")
    base.mkdir()
    refused(lambda: huggingface.write(run, tmp_path / "out"), "has no checkpoint yet")
    assert not (tmp_path / "out").exists()
