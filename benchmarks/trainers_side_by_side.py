"""Runs one configuration file by its trainer and by `preheat train`, and compares losses; compares memory with the plan.

    python benchmarks/trainers_side_by_side.py --trl PYTHON [--llamafactory PYTHON] [--ms-swift PYTHON] [--axolotl PYTHON]
        [--only NAME] [--steps 20]

PYTHON is the interpreter of an environment with the trainer, which needs no preheat; TRL's has transformers' Trainer too:

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 trl==1.16.0 peft accelerate
    python -m venv ENV && ENV/bin/pip install torch==2.13.0 ms-swift==4.6.0
    python -m venv ENV && ENV/bin/pip install torch==2.13.0 axolotl==0.19.0

The trainer runs the file by its own entry point (`_peers/foreign_worker.py`); `preheat train FILE` runs the same file.
Files of ms-swift and axolotl are those that `preheat convert` writes of a recipe, with the few keys that only they need.
Each step has the same rows, so that their order does not matter; each row has more than half of the tokens of a sequence, so that preheat packs no two of them into one, as the
trainer pads them. An adapter's random half starts from the same values: those of preheat's run, copied into the trainer's.

Memory: the growth of the trainer's process from just before it loads the model to its high-water mark (VmHWM, which is reset
there) at the end of training, beside `preheat plan FILE` for this CPU. All that a first run imported is imported before.
It is measured twice: as the trainer runs, and with glibc told to return freed memory at once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROWS, LENGTH = 8, 128  # of the losses
CHAT_LENGTH = 80  # of rows in a template
LR = 1e-3
VERSIONS = ("torch", "transformers", "trl", "peft", "accelerate", "llamafactory", "swift", "axolotl")
STUBS = {"llamafactory": ("torchaudio",)}  # which it imports for sound; PyPI's wheels need CUDA's libraries
EXPANDS = {"ms-swift": "swift.cli.main:parse_yaml_args"}  # which makes arguments of a file, for another process
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "tie_word_embeddings": True,
}
"""The model whose memory is measured: 65M parameters with the 32,000 tokens of Llama 2's tokenizer."""


@dataclass(frozen=True)
class Case:
    """A configuration file.

    Attributes:
        trainer: whose environment runs it.
        file: its name.
        module, call: the trainer's entry point, as in `foreign_worker.py`.
        arguments: before the file's name on the command line.
        write: returns the file's text.
        adapter: a LoRA adapter is trained.
        ours: values of preheat's `--set` beside the file: what a script computes is not read.
        reads: the value of its `--from`; empty if the file's keys tell it.
    """

    name: str
    trainer: str
    file: str
    module: str
    write: Callable[[Path, int], str]
    arguments: tuple[str, ...] = ()
    adapter: bool = False
    ours: tuple[str, ...] = ()
    reads: str = ""

    def name_options(self) -> list[str]:
        """Returns the options of preheat's commands beside the file."""
        options = [word for value in self.ours for word in ("--set", value)]
        return [*options, "--from", self.reads] if self.reads else options


def write_rows(folder: Path, tokenizer: Path, source: Path, count: int, length: int) -> None:
    """Writes paragraphs of more than half of a sequence: as texts, and as prompts with completions."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    paragraphs = [text.strip() for text in source.read_text(encoding="utf-8").split("\n\n")]
    rows: list[str] = []
    for text in paragraphs:
        if length // 2 + 4 < len(encode(text, add_special_tokens=False)["input_ids"]) < length - 4:
            rows.append(" ".join(text.split()))
        if len(rows) == count:
            break
    assert len(rows) == count, f"{source}: {len(rows)} paragraphs of that length"
    # Cut at a space: TRL encodes both together, and a word that is cut would be other tokens.
    cuts = [text.index(" ", len(text) // 3) for text in rows]
    pairs = [{"prompt": text[:cut], "completion": text[cut:]} for text, cut in zip(rows, cuts, strict=True)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair["completion"].strip()},
            ]
        }
        for pair in pairs
    ]
    for name, some in (("texts", [{"text": text} for text in rows]), ("pairs", pairs), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    whole = " ".join(source.read_text(encoding="utf-8").split())
    with (folder / "long.jsonl").open("w", encoding="utf-8") as long:
        for start in range(0, ROWS * MEMORY_STEPS * 4000, 4000):
            long.write(json.dumps({"text": whole[start : start + 4000]}) + "\n")
    info = {
        "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}},
        "long": {"file_name": "long.jsonl", "columns": {"prompt": "text"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")


def copy_model(source: Path, target: Path, *, begins: bool = True) -> None:
    """Copies a model with a padding token of its own: collators that mask it would mask the end token with it.

    Args:
        begins: the tokenizer adds its first token to a text.
    """
    shutil.copytree(source, target)
    if not begins:
        values = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
        (target / "tokenizer.json").write_text(json.dumps(values | {"post_processor": None}), encoding="utf-8")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        values = json.loads((target / name).read_text(encoding="utf-8"))
        (target / name).write_text(json.dumps(values | {"pad_token": "<unk>"}), encoding="utf-8")


def write_chat_model(tokenizer: Path, target: Path) -> None:
    """Saves a small Llama with random weights, GPT-2's tokenizer and the tokens of ChatML.

    It has no tokenizer of SentencePiece: that adds a space to each part of a conversation that is encoded by itself.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    encode = AutoTokenizer.from_pretrained(tokenizer)
    encode.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    encode.eos_token, encode.pad_token = "<|im_end|>", "<|endoftext|>"
    shape = SHAPE | {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
    ends = {name: getattr(encode, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    LlamaForCausalLM(LlamaConfig(**shape, **ends, vocab_size=len(encode))).save_pretrained(target)
    encode.save_pretrained(target)


def to_yaml(values: dict[str, Any]) -> str:
    """Returns plain values as YAML, which JSON is."""
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items())


def common(folder: Path, steps: int) -> dict[str, Any]:
    """Arguments of transformers' Trainer that all files have."""
    return {
        "per_device_train_batch_size": ROWS,
        "max_steps": steps,
        "learning_rate": LR,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": str(folder / "out"),
        "seed": 1,
    }


def write_trl(rows: str, adapted: bool = False, length: int = LENGTH, **others: Any) -> Callable[[Path, int], str]:
    """Returns a writer of a file of `trl sft`."""

    def write(folder: Path, steps: int) -> str:
        adapter = {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": []}
        adapter["lora_target_modules"] = ["q_proj", "v_proj", "up_proj"]
        return to_yaml(
            {
                "model_name_or_path": str(folder / "model"),
                "datasets": [{"path": "json", "data_files": str(folder / rows), "split": "train"}],
                "max_length": length,
                **common(folder, steps),
                **(adapter if adapted else {}),
                **others,
            }
        )

    return write


SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

LENGTH = {length}
tokenizer = AutoTokenizer.from_pretrained("{model}")
rows = load_dataset("json", data_files="{folder}/{rows}.jsonl", split="train")


def tokenize(row):
    return tokenizer(row["text"] + tokenizer.eos_token, truncation=True, max_length=LENGTH)


rows = rows.map(tokenize, remove_columns=["text"])
model = AutoModelForCausalLM.from_pretrained("{model}", dtype="float32")
{adapter}
arguments = TrainingArguments(
{arguments}
)
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate).train()
"""
ADAPTER = 'model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "o_proj"]))'


def write_script(
    adapted: bool = False, length: int = LENGTH, rows: str = "texts", **others: Any
) -> Callable[[Path, int], str]:
    """Returns a writer of a Python script with transformers' Trainer."""

    def write(folder: Path, steps: int) -> str:
        values = common(folder, steps) | others
        return SCRIPT.format(
            model=folder / "model",
            folder=folder,
            length=length,
            rows=rows,
            adapter=ADAPTER if adapted else "",
            arguments="\n".join(f"    {key}={value!r}," for key, value in values.items()),
        )

    return write


def convert(
    to: str,
    rows: str,
    model: str = "model",
    adapted: bool = False,
    length: int = LENGTH,
    accumulation: int = 1,
    **added: Any,
) -> Callable[[Path, int], str]:
    """Returns a writer of a file that `preheat convert` writes of a recipe.

    Args:
        to: the trainer.
        model: its folder; the one named chat has conversations to train on, all others texts.
        added: keys of its file that a recipe has no counterpart of.
    """

    def write(folder: Path, steps: int) -> str:
        recipe: dict[str, Any] = {
            "model": {"path": str(folder / model)},
            "data": {"source": str(folder / rows), "packing": "whole", "validation": 0.0},
            "batch": {"size": ROWS, "seq_len": length},
            "optimizer": {"lr": LR, "weight_decay": 0.1, "betas": [0.9, 0.95]},
            "schedule": {"kind": "cosine", "warmup_ratio": 0.0, "min_lr_ratio": 0.0},
            "stop": {"max_steps": steps},
            "techniques": {"efficient_attention": {}},
        }
        recipe["data"] |= {"layout": "messages", "template": "chatml"} if model == "chat" else {"layout": "text"}
        if accumulation > 1:
            recipe["techniques"]["gradient_accumulation"] = {"steps": accumulation}
        if adapted:
            targets = ["q_proj", "v_proj", "up_proj"]
            recipe["techniques"]["lora"] = {"rank": 8, "alpha": 16, "dropout": 0.0, "target_modules": targets}
        file = folder / f"recipe-{to}.yaml"
        file.write_text(to_yaml(recipe), encoding="utf-8")
        text = run([sys.executable, "-m", "preheat", "convert", str(file), "--to", to])
        return text + to_yaml(added)

    return write


def write_swift(**others: Any) -> Callable[[Path, int], str]:
    """Returns a writer of a file of `swift sft`: conversations, by ms-swift's defaults."""

    def write(folder: Path, steps: int) -> str:
        values = {
            "model": str(folder / "chat"),
            "tuner_type": "full",
            "dataset": [str(folder / "chats.jsonl")],
            "torch_dtype": "float32",
            "fp16": False,
            "learning_rate": LR,
            "max_steps": steps,
            "max_length": CHAT_LENGTH,
            "save_strategy": "no",
            "report_to": "none",
            "dataloader_num_workers": 0,
            **SWIFT,
        }
        return to_yaml(values | others)

    return write


def write_llama_factory(
    method: str, length: int = LENGTH, rows: str = "texts", **others: Any
) -> Callable[[Path, int], str]:
    """Returns a writer of a file of LLaMA-Factory."""

    def write(folder: Path, steps: int) -> str:
        return to_yaml(
            {
                # 0.9.5 adds no first token to plain text with tokenizers of transformers 5.
                "model_name_or_path": str(folder / ("model" if rows == "long" else "plain")),
                "stage": "sft",
                "do_train": True,
                "finetuning_type": method,
                "dataset_dir": str(folder),
                "dataset": rows,
                "cutoff_len": length,
                **common(folder, steps),
                **others,
            }
        )

    return write


TRL = ("trl.scripts.sft", ("--config",))
HALVES: dict[str, Any] = {
    "per_device_train_batch_size": ROWS // 2,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
}
SWIFT: dict[str, Any] = {"model_type": "llama", "template": "chatml", "check_model": False}
"""ms-swift knows models by the names of their folders; it checks their files by a hub's list."""
CUT = SWIFT | {"truncation_strategy": "right"}  # which leaves long rows out by default
PLAIN: dict[str, Any] = {"stage": "pt", "packing": False}
SWIFT_PT = ("ms-swift", "pt.yaml", "swift.cli.pt")
AXOLOTL = ("axolotl", "file.yaml", "axolotl.cli.train")
SWIFT_SFT = ("ms-swift", "sft.yaml", "swift.cli.sft")
FACTORY = "llamafactory.train.tuner:run_exp"
STATED = (f"batch.seq_len={LENGTH}",)
LOSSES = (
    Case("texts, full", "trl", "texts.yaml", TRL[0], write_trl("texts.jsonl"), TRL[1]),
    Case(
        *("prompts with completions, full, cosine, 2 micro-batches, weight decay", "trl", "pairs.yaml", TRL[0]),
        write_trl("pairs.jsonl", **HALVES),
        TRL[1],
    ),
    Case(
        *("the same with a warmup of 4 steps", "trl", "warmup.yaml", TRL[0]),
        write_trl("pairs.jsonl", warmup_steps=4, **HALVES),
        TRL[1],
    ),
    Case("texts, LoRA", "trl", "lora.yaml", TRL[0], write_trl("texts.jsonl", True), TRL[1], True),
    Case("texts, full", "transformers", "full.py", "", write_script(), ours=STATED),
    Case(
        *("texts, LoRA", "transformers", "lora.py", "", write_script(True, lr_scheduler_type="cosine"), ()),
        adapter=True,
        ours=STATED,
    ),
    Case("texts (stage pt), full", "llamafactory", "pt.yaml", FACTORY, write_llama_factory("full", **PLAIN)),
    Case(
        *("texts (stage pt), LoRA", "llamafactory", "lora.yaml", FACTORY),
        write_llama_factory("lora", lora_rank=8, lora_dropout=0.0, lora_target="q_proj,v_proj", **PLAIN),
        adapter=True,
    ),
    Case("texts (swift pt), full", *SWIFT_PT, convert("ms-swift", "texts.jsonl", **SWIFT), reads="ms-swift-pt"),
    Case(
        *("texts (swift pt), LoRA", *SWIFT_PT, convert("ms-swift", "texts.jsonl", adapted=True, **SWIFT)),
        adapter=True,
        reads="ms-swift-pt",
    ),
    Case(
        *("conversations (swift sft, ChatML), full, 2 micro-batches", *SWIFT_SFT),
        write_swift(per_device_train_batch_size=ROWS // 2, gradient_accumulation_steps=2),
    ),
    Case("texts (completion), full", *AXOLOTL, convert("axolotl", "texts.jsonl")),
    Case("texts (completion), LoRA", *AXOLOTL, convert("axolotl", "texts.jsonl", adapted=True), adapter=True),
    Case(
        *("conversations (ChatML), full, 2 micro-batches", *AXOLOTL),
        convert("axolotl", "chats.jsonl", "chat", length=CHAT_LENGTH, accumulation=2),
    ),
)


OFFLINE = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
"""axolotl sends notes of its use, and without a network tries to for minutes."""


def find_python(options: argparse.Namespace, case: Case) -> str | None:
    """Returns the interpreter of a case's trainer; None if none was given."""
    name = "trl" if case.trainer == "transformers" else case.trainer.replace("-", "_")
    python: str | None = getattr(options, name)
    return python


def run(command: list[str], folder: Path | None = None, **environment: str) -> str:
    """Runs a command and returns its standard output.

    Args:
        folder: the working directory.

    Raises:
        SystemExit: it failed; with the end of its standard error.
    """
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **OFFLINE, "TOKENIZERS_PARALLELISM": "false", **environment},
    )
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)}: {(done.stderr + done.stdout)[-3000:]}")
    return done.stdout


RETURNING = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Makes glibc's malloc return freed tensors to the system at once, so that resident memory is that of the tensors."""


def train_theirs(
    case: Case, python: str, folder: Path, file: Path, adapter: Path | None, **environment: str
) -> dict[str, Any]:
    """Returns what the trainer's own process noted."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    modules = folder / f"modules-{case.trainer}.json"
    job = {
        "module": case.module or str(file),
        "call": [],
        "arguments": [*case.arguments, str(file)] if case.module else [],
        "expand": EXPANDS.get(case.trainer, ""),
        "adapter": str(adapter) if adapter else "",
        "modules": str(modules),
        "stubs": STUBS.get(case.trainer, ()),
        "versions": VERSIONS,
        "result": str(folder / "result.json"),
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    worker = str(HERE / "_peers" / "foreign_worker.py")
    run([python, worker, str(folder / "job.json")], folder, PYTHONPATH="", **environment)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def train_ours(case: Case, file: Path, folder: Path) -> list[float]:
    """Returns the loss of each step of `preheat train FILE`."""
    run([sys.executable, "-m", "preheat", "train", str(file), *case.name_options(), "--out", str(folder)])
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [values["loss"] for line in lines if "loss" in (values := json.loads(line))]


def save_adapter(out: Path, file: Path, reads: str, *overrides: str) -> None:
    """Saves the values that an adapter starts from in `preheat train FILE`."""
    from safetensors.torch import save_file

    from preheat.cli.options.foreign_options import ForeignOptions
    from preheat.cli.options.subject import find_subject
    from preheat.engine.builder import build
    from preheat.hardware.probe import probe

    recipe = find_subject(str(file), overrides, foreign=ForeignOptions(format=reads or None)).recipe
    built = build(recipe, vocabulary=None, device=probe("cpu"))
    save_file({name: value.detach().clone() for name, value in built.parameters()}, out)


def iterate_losses(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yields a row of the table for each file."""
    for number, case in enumerate(LOSSES):
        python = find_python(options, case)
        if python is None or options.only not in f"{case.trainer}: {case.name}":
            continue
        file = folder / f"{number}-{case.file}"
        file.write_text(case.write(folder, options.steps), encoding="utf-8")
        adapter = folder / f"{number}.safetensors" if case.adapter else None
        if adapter:
            run([sys.executable, __file__, "--save-adapter", str(adapter), str(file), case.reads, *case.ours])
        theirs = train_theirs(case, python, folder, file, adapter)
        ours = train_ours(case, file, folder / f"{number}-run")
        losses = theirs["losses"]
        assert len(losses) == len(ours) == options.steps, (len(losses), len(ours))
        worst = max(abs(a - b) for a, b in zip(losses, ours, strict=True))
        yield (
            f"| {case.trainer} | {case.name} | {losses[0]:.5f} | {ours[0]:.5f} | {losses[-1]:.5f} | {ours[-1]:.5f} | "
            f"{worst:.1e} |"
        )


MEMORY_LENGTH, MEMORY_STEPS = 512, 3
WIDE = (f"batch.seq_len={MEMORY_LENGTH}",)
MEMORY = (
    Case("full, checkpointing", "trl", "full.yaml", TRL[0], write_trl("long.jsonl", length=MEMORY_LENGTH), TRL[1]),
    Case("LoRA, checkpointing", "trl", "lora.yaml", TRL[0], write_trl("long.jsonl", True, MEMORY_LENGTH), TRL[1]),
    Case("full", "transformers", "full.py", "", write_script(length=MEMORY_LENGTH, rows="long"), ours=WIDE),
    Case("full", "llamafactory", "pt.yaml", FACTORY, write_llama_factory("full", MEMORY_LENGTH, "long", **PLAIN)),
    Case(
        *("full", *SWIFT_PT, convert("ms-swift", "long.jsonl", length=MEMORY_LENGTH, **CUT)),
        reads="ms-swift-pt",
    ),
    Case(
        *("LoRA", *SWIFT_PT, convert("ms-swift", "long.jsonl", adapted=True, length=MEMORY_LENGTH, **CUT)),
        reads="ms-swift-pt",
    ),
    Case("full", *AXOLOTL, convert("axolotl", "long.jsonl", length=MEMORY_LENGTH)),
    Case("LoRA", *AXOLOTL, convert("axolotl", "long.jsonl", adapted=True, length=MEMORY_LENGTH)),
)
"""With rows of at least a whole sequence, which a plan assumes of padded rows."""


def write_large_model(folder: Path, tokenizer: Path) -> None:
    """Saves the model whose memory is measured, with random weights."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=32000, max_position_embeddings=MEMORY_LENGTH)).save_pretrained(
        folder / "model"
    )
    encode = AutoTokenizer.from_pretrained(tokenizer)
    encode.pad_token = encode.unk_token
    encode.save_pretrained(folder / "model")


def plan_peak(case: Case, file: Path) -> float:
    """Returns the peak of `preheat plan FILE` for this CPU in GiB."""
    text = run([sys.executable, "-m", "preheat", "plan", str(file), *case.name_options(), "--json"])
    return float(json.loads(text.strip().splitlines()[-1])["peak_gib"])


def iterate_memory(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yields a row of the table of memory for each file."""
    for number, case in enumerate(MEMORY):
        python = find_python(options, case)
        if python is None or options.only not in f"memory: {case.trainer}: {case.name}":
            continue
        file = folder / f"{number}-{case.file}"
        file.write_text(case.write(folder, MEMORY_STEPS), encoding="utf-8")
        train_theirs(case, python, folder, file, None)  # notes what it imports
        runs = [train_theirs(case, python, folder, file, None, **environment) for environment in ({}, RETURNING)]
        measured, returning = ((found["after"] - found["before"]) / 2**30 for found in runs)
        planned = plan_peak(case, file)
        yield (
            f"| {case.trainer} | {case.name} | {measured:.2f} | {returning:.2f} | {planned:.2f} | "
            f"{planned / measured - 1:+.0%} | {planned / returning - 1:+.0%} |"
        )


def show(row: str) -> str:
    """Prints a row, and returns it."""
    print(row, flush=True)
    return row


def format_page(losses: list[str], memory: list[str], steps: int) -> str:
    """Returns the result's tables, below which causes of differences are written by hand."""
    return "\n".join(
        [
            "# The same file by its trainer and by preheat",
            "",
            "| trainer | what | first loss | preheat's | last loss | preheat's | largest difference of a step |",
            "|---|---|---|---|---|---|---|",
            *losses,
            "",
            "| trainer | what | measured, GiB | freed memory returned | planned | plan to measured | to returned |",
            "|---|---|---|---|---|---|---|",
            *memory,
            "",
            f"`python benchmarks/trainers_side_by_side.py`: {steps} steps in fp32, {platform.machine()}, "
            f"{os.cpu_count()} cores.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", metavar="PYTHON")
    parser.add_argument("--llamafactory", metavar="PYTHON")
    parser.add_argument("--ms-swift", metavar="PYTHON")
    parser.add_argument("--axolotl", metavar="PYTHON")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="Files whose trainer and name have this text.")
    parser.add_argument("--save-adapter", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trainers_side_by_side.md"))
    options = parser.parse_args()
    if options.save_adapter:
        out, file, reads, *overrides = options.save_adapter
        save_adapter(Path(out), Path(file), reads, *overrides)
        return
    data = Path(os.environ.get("PREHEAT_DATA") or HERE.parents[1] / "shared" / "data")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_model(data / "stories260K-hf", folder / "model")
        copy_model(data / "stories260K-hf", folder / "plain", begins=False)
        write_chat_model(data / "tokenizers/gpt2", folder / "chat")
        write_rows(folder, folder / "model", data / "text/tinystories_train_excerpt.txt", ROWS, LENGTH)
        losses = [show(row) for row in iterate_losses(options, folder)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_large_model(folder, data / "tokenizers/llama2")
        write_rows(folder, folder / "model", data / "text/tinystories_train_excerpt.txt", ROWS, LENGTH)
        memory = [show(row) for row in iterate_memory(options, folder)]
    if not options.only:
        options.out.write_text(format_page(losses, memory, options.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
