"""A running Trainer, planned, watched and made faster: equal losses, true figures, and a step that memory lacks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import preheat
from preheat.core.run_records import Failed, MicroBatchSize, OutOfMemory
from preheat.errors import DoesNotFit, RecipeError
from preheat.integrations import PlanCallback, accelerate_trainer
from preheat.integrations.loop_memory import count_mask_bytes
from preheat.integrations.micro_batch import _measure_row, find_largest_micro_batch, split_micro_batch
from preheat.run.reader import Reader
from preheat.training.observer import Watch

TOO_LITTLE = "name=small,memory=900MiB,bandwidth=1000,bf16=100,fp32=50"
"""A GPU whose memory the CUDA context nearly fills."""


@pytest.fixture(autouse=True)
def _rates(cache: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"PREHEAT_CACHE": str(cache)}):
        yield


class Lines(Watch):
    """Keeps what a user is told."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.alarms: list[str] = []

    def notice(self, words: str) -> None:
        self.notices.append(words)

    def alarm(self, words: str) -> None:
        self.alarms.append(words)


def create_model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 256,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pads rows on the right."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (longest - len(values))

    tokens = [row["input_ids"] for row in rows]
    return {
        "input_ids": torch.tensor([pad(row, 0) for row in tokens]),
        "attention_mask": torch.tensor([pad([1] * len(row), 0) for row in tokens]),
        "labels": torch.tensor([pad(row, -100) for row in tokens]),
    }


def create_trainer(folder: Path, *, steps: int = 4, model: Any = None, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(32, 129, (48,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(320, (n,), generator=generator).tolist()} for n in lengths]
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **(settings | arguments),
    )
    return Trainer(model or create_model(), args, train_dataset=rows, data_collator=collate)


def losses_of(trainer: Trainer) -> torch.Tensor:
    trainer.train()
    return torch.tensor([line["loss"] for line in trainer.state.log_history if "loss" in line])


def limit_rows(trainer: Trainer, most: int) -> None:
    """Makes larger micro-batches fail as torch's allocator does."""
    compute = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs["input_ids"].shape[0] > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss  # type: ignore[method-assign]


def test_a_callback_changes_no_loss_and_writes_a_run(tmp_path: Path) -> None:
    plain = losses_of(create_trainer(tmp_path / "plain"))
    lines = Lines()
    callback, trainer = PlanCallback(watch=lines), create_trainer(tmp_path / "seen")
    trainer.add_callback(callback)
    assert torch.equal(losses_of(trainer), plain)
    assert lines.alarms == []
    assert callback.plan is not None
    assert callback.run == tmp_path / "seen" / "preheat"
    run = Reader(callback.run)
    lines = run.metrics()
    assert [line.loss for line in lines] == pytest.approx(plain.tolist(), abs=1e-6)
    assert [line.lr for line in lines] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert all(line.gradient_norm for line in lines)
    finished = run.finished()
    assert finished is not None
    assert finished.steps == 4
    assert run.measured().peak_gib is not None
    assert run.find_damage() == []
    assert vars(trainer).keys() & {"training_step"} == set(), "the trainer has its own methods again"
    from preheat.report.report_data import collect

    assert collect(callback.run).state.kind == "finished"


def test_a_second_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    callback, trainer = PlanCallback(watch=Watch()), create_trainer(tmp_path, steps=1)
    trainer.add_callback(callback)
    trainer.train()
    trainer.train()
    assert callback.run == tmp_path / "preheat-2"
    assert Reader(tmp_path / "preheat-2").finished() is not None


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_a_plan_reads_adapters_and_the_longest_rows(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(create_model(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    callback = PlanCallback(on_misfit="refuse", watch=Watch())
    trainer = create_trainer(tmp_path, steps=1, model=model)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.plan is not None
    assert callback.plan.recipe is not None
    assert callback.plan.recipe["techniques"]["lora"]["rank"] == 4
    assert callback.plan.recipe["techniques"]["lora"]["target_modules"] == ("q_proj", "v_proj")
    longest = max(len(row["input_ids"]) for row in trainer.train_dataset)  # type: ignore[union-attr]
    assert callback.plan.recipe["batch"] == {"size": 16, "seq_len": longest}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert callback.plan.parameters.trained == trained


def test_a_run_that_does_not_fit_is_refused_with_what_would_fit(tmp_path: Path) -> None:
    trainer = create_trainer(tmp_path, per_device_train_batch_size=40)
    trainer.add_callback(PlanCallback(TOO_LITTLE, "refuse", watch=Watch()))
    with pytest.raises(
        DoesNotFit, match=r"does not fit: needs .* on small; it fits with accelerate_trainer"
    ) as refused:
        trainer.train()
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "preheat").exists()


def test_a_run_that_does_not_fit_is_warned_of(tmp_path: Path) -> None:
    lines, trainer = Lines(), create_trainer(tmp_path, steps=1, per_device_train_batch_size=40)
    trainer.add_callback(PlanCallback(TOO_LITTLE, watch=lines))
    trainer.train()
    assert [line for line in lines.alarms if line.startswith("does not fit")]
    assert Reader(tmp_path / "preheat").finished() is not None


def test_an_error_of_memory_says_what_would_have_fitted(tmp_path: Path) -> None:
    callback, trainer = PlanCallback(watch=Watch()), create_trainer(tmp_path)
    trainer.add_callback(callback)
    limit_rows(trainer, 2)
    with pytest.raises(RuntimeError, match="can't allocate memory") as failed:
        trainer.train()
    (note,) = failed.value.__notes__
    assert "out of memory in step 1" in note
    assert "gradient_accumulation_steps=" in note
    assert callback.run is not None
    kinds = [type(event) for event in Reader(callback.run).events()]
    assert kinds[-2:] == [OutOfMemory, Failed]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
def test_an_accelerated_trainer_has_equal_losses(tmp_path: Path, checkpointing: bool) -> None:
    plain = losses_of(create_trainer(tmp_path / "plain", activation_checkpointing=checkpointing))
    trainer = create_trainer(tmp_path / "fast", activation_checkpointing=checkpointing)
    made = accelerate_trainer(trainer)
    assert {"attention", "chunked_loss", "micro_batch"} <= made.applied.keys()
    assert ("activation_checkpointing" in made.applied) == checkpointing
    assert "fused already" in made.left["optimizer"]
    callback = PlanCallback(watch=Watch())
    trainer.add_callback(callback)
    difference = (losses_of(trainer) - plain).abs().max()
    assert difference < 1e-4
    assert callback.plan is not None
    assert callback.plan.recipe is not None
    planned = callback.plan.recipe["techniques"]
    assert "chunked_loss" in planned
    assert planned.get("activation_checkpointing", {}).get("mode") == ("selective" if checkpointing else None)
    with pytest.raises(RecipeError, match="call it once"):
        accelerate_trainer(trainer)


def test_evaluation_still_has_its_logits(tmp_path: Path) -> None:
    trainer = create_trainer(tmp_path)
    batch = collate(trainer.train_dataset[:2])  # type: ignore[index]
    assert trainer.model is not None
    with torch.no_grad():
        before = trainer.model(**batch)
        accelerate_trainer(trainer)
        after = trainer.model(**batch)
    shown = batch["attention_mask"].bool()
    assert torch.allclose(after.logits[shown], before.logits[shown], atol=1e-4)
    assert torch.allclose(after.loss, before.loss, atol=1e-5)


def test_a_change_that_alters_the_loss_is_taken_back(tmp_path: Path) -> None:
    trainer = create_trainer(tmp_path)
    with mock.patch("preheat.ops.losses.cross_entropy.sum_chunked_loss", lambda hidden, *_, **__: hidden.sum() ** 2):
        made = accelerate_trainer(trainer)
    assert "differ" in made.left["chunked_loss"]
    assert "forward" not in vars(trainer.model)


def test_a_step_that_memory_lacks_for_is_repeated_in_smaller_micro_batches(tmp_path: Path) -> None:
    plain = losses_of(create_trainer(tmp_path / "plain"))
    trainer, callback = create_trainer(tmp_path / "less"), PlanCallback(watch=Watch())
    accelerate_trainer(trainer)
    trainer.add_callback(callback)
    limit_rows(trainer, 3)
    assert (losses_of(trainer) - plain).abs().max() < 1e-4
    assert callback.run is not None
    events = [event for event in Reader(callback.run).events() if isinstance(event, MicroBatchSize)]
    assert [(event.was, event.rows) for event in events] == [(8, 4), (4, 2)]


def test_a_later_micro_batch_of_a_step_repeats_the_earlier_ones(tmp_path: Path) -> None:
    """The first micro-batch's gradients are added again after an error in the second one; they would be lost else."""
    plain = losses_of(create_trainer(tmp_path / "plain"))
    trainer = create_trainer(tmp_path / "less")
    accelerate_trainer(trainer)
    compute, calls = trainer.compute_loss, []

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        loss = compute(*args, **kwargs)
        if len(calls) == 4:  # the second micro-batch of the second step
            raise MemoryError
        return loss

    trainer.compute_loss = compute_loss  # type: ignore[method-assign]
    assert (losses_of(trainer) - plain).abs().max() < 1e-4


@pytest.mark.filterwarnings("default")  # TRL's own
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_trainers_of_trl_have_equal_losses(tmp_path: Path, data_folder: Path, task: str) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = data_folder / "stories260K-hf"
    texts = [f"Once upon a time there was a cat who had {number} friends. " * (1 + number % 4) for number in range(16)]
    if task == "sft":
        kind, config, rows = trl.SFTTrainer, trl.SFTConfig, [{"text": text} for text in texts]
    else:
        kind, config = trl.DPOTrainer, trl.DPOConfig
        rows = [{"prompt": "Tell me. ", "chosen": text, "rejected": text[:30]} for text in texts]

    def create(name: str) -> Trainer:
        args = config(
            output_dir=str(tmp_path / name),
            max_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            max_length=64,
            bf16=False,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer: Trainer = kind(
            AutoModelForCausalLM.from_pretrained(weights),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(weights),
        )
        return trainer

    plain = losses_of(create("plain"))
    trainer, callback = create("fast"), PlanCallback(on_misfit="refuse", watch=Watch())
    made = accelerate_trainer(trainer)
    assert {"attention", "chunked_loss", "activation_checkpointing"} <= made.applied.keys()
    trainer.add_callback(callback)
    limit_rows(trainer, 4)  # of DPO two pairs
    assert (losses_of(trainer) - plain).abs().max() < 1e-4
    assert callback.plan is not None
    assert callback.plan.recipe is not None
    assert ("preference" in callback.plan.recipe["techniques"]) == (task == "dpo")


def test_pairs_are_split_as_pairs() -> None:
    inputs = {"input_ids": torch.arange(12).view(6, 2), "ref_chosen_logps": torch.arange(3.0), "n": 7}
    parts = split_micro_batch(inputs, 3, pairs=True)
    assert parts is not None
    first, share = next(iter(parts))
    assert first["input_ids"].tolist() == [[0, 1], [6, 7]], "a chosen answer with its rejected one"
    assert first["ref_chosen_logps"].tolist() == [0.0]
    assert (first["n"], share) == (7, pytest.approx(1 / 3))
    assert split_micro_batch(inputs, 4, pairs=True) is None


def test_the_largest_micro_batch_is_found(tmp_path: Path) -> None:
    trainer = create_trainer(tmp_path)
    batch = find_largest_micro_batch(trainer)
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]  # type: ignore[union-attr]
    assert (batch.rows, batch.length, batch.padded) == (8, max(lengths), True)


def test_the_memory_of_padding_masks_is_that_of_the_saved_tensors() -> None:
    model, rows, length = create_model(), 4, 48
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    padded = torch.ones_like(tokens)
    padded[1, 40:] = 0

    def count_saved(mask: torch.Tensor) -> int:
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(input_ids=tokens, attention_mask=mask, use_cache=False)  # alive until the sizes are added
        return sum(sizes.values()) + 0 * output.logits.shape[0]

    more = count_saved(padded) - count_saved(torch.ones_like(tokens))
    counted = count_mask_bytes(model, model, rows=rows, length=length, itemsize=4, recomputes=False)
    assert counted - rows * length**2 == more, "all but the mask as booleans, which no layer saves"


@pytest.mark.parametrize(
    ("row", "length"),
    [
        ({"input_ids": [1, 2, 3], "labels": [1]}, 3),
        ({"prompt_ids": [1], "chosen_ids": [1, 2], "rejected_ids": [1, 2, 3]}, 4),
        ({"text": "words"}, 5),
        (torch.arange(7), 7),
    ],
    ids=["tokens", "pair", "text", "tensor"],
)
def test_lengths_of_rows(row: Any, length: int) -> None:
    assert _measure_row(row) == length


def test_a_plain_loop_is_planned_and_measured(tmp_path: Path) -> None:
    model = create_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(320, (4, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    with preheat.watch(model, optimizer, accumulation=2, steps=3, out=tmp_path / "run", watch=Watch()) as loop:
        for _ in range(3):
            for part in tokens.chunk(2):
                loss = model(input_ids=part, labels=part).loss / 2
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert loop.plan is not None
    assert loop.plan.tokens_per_step == tokens.numel()
    lines = Reader(tmp_path / "run").metrics()
    assert [line.loss for line in lines] == pytest.approx([sum(losses[n : n + 2]) for n in (0, 2, 4)], abs=1e-6)
    assert [line.tokens for line in lines] == [256, 512, 768]
    assert not model._forward_hooks


def test_a_plain_loop_refuses_what_it_cannot_plan() -> None:
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(RecipeError, match="Linear is no model of transformers"):
        preheat.watch(layer, torch.optim.SGD(layer.parameters()))
