"""Other trainers on the same card, the same rows and a model of the same shape: TRL with Liger's kernels, torchtitan's model, unsloth.

AdamW at a constant rate, bf16, no evaluation, no saving. Each runs in a process of its own, which may have packages of its own: their
versions conflict with preheat's. `python -m _gpu.peers JOB.json` is that process; it imports nothing of preheat.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _gpu.case import Skip, Wrong
from _gpu.shapes import SHAPES

__all__ = ["PEERS", "Taken", "Task", "run_apart"]

LR = 1e-4
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "accelerate",
    "liger-kernel",
    "bitsandbytes",
    "trl",
    "torchtitan",
    "unsloth",
)
"""Their versions are recorded if a trainer imported them."""
ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # as preheat sets it for itself
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "UNSLOTH_DISABLE_STATISTICS": "1",
}


@dataclass(frozen=True)
class Task:
    """What all trainers are given.

    Attributes:
        shape: of SHAPES.
        four_bits, adapters: the base in four bits; low-rank adapters of rank 16 on all linear maps.
        rows, length, steps: of a batch, and how many batches.
        checkpointed: with activation checkpointing, for cards that are too small without.
    """

    shape: str
    four_bits: bool
    adapters: bool
    rows: int
    length: int
    steps: int
    tiny: bool
    kind: str
    folder: str
    checkpointed: bool = False


@dataclass
class Taken:
    """Seconds and loss of each step."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def _need(*modules: str) -> None:
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise Skip(f"not installed: {', '.join(missing)}")


def _config(task: Task) -> Any:
    from transformers import LlamaConfig

    shape = SHAPES[task.shape]
    if task.tiny:
        sizes = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 4096,
        }
    else:
        sizes = {"hidden_size": shape["hidden_size"], "num_hidden_layers": shape["num_layers"], "num_attention_heads": shape["num_heads"],
                 "num_key_value_heads": shape["num_kv_heads"], "intermediate_size": shape["intermediate_size"], "vocab_size": shape["vocab_size"]}  # fmt: skip
    return LlamaConfig(
        **sizes, max_position_embeddings=task.length, tie_word_embeddings=bool(shape.get("tie_embeddings"))
    )


def _saved(task: Task) -> Path:
    """Returns a folder with drawn weights in bf16 and a tokenizer, for trainers that read one."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = Path(task.folder) / f"peer-{task.shape}"
    if not folder.exists():
        partial = folder.with_suffix(".partial")  # renamed once it is whole: a case may be cut off
        torch.manual_seed(0)
        with torch.device(task.kind):
            AutoModelForCausalLM.from_config(_config(task), dtype=torch.bfloat16).save_pretrained(partial)
        vocabulary = {"</s>": 0, "<s>": 1} | {f"w{n}": n for n in range(2, _config(task).vocab_size)}
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="</s>")),
            bos_token="<s>",
            eos_token="</s>",
            pad_token="</s>",
        ).save_pretrained(partial)
        partial.rename(folder)
    if task.kind == "cuda":  # the weights were drawn on the card
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return folder


def _wait(task: Task) -> None:
    if task.kind == "cuda":
        import torch

        torch.cuda.synchronize()


def _timed(task: Task, tokens: Any, step: Callable[[Any], Any]) -> Taken:
    """Takes the steps of a plain loop; `step` gets the rows of a batch on the card and gives its loss."""
    import torch

    taken = Taken()
    for number in range(task.steps):
        rows = torch.as_tensor(tokens[number * task.rows : (number + 1) * task.rows]).cuda()
        _wait(task)
        begun = time.perf_counter()
        loss = step(rows)
        _wait(task)
        taken.seconds.append(time.perf_counter() - begun)
        taken.losses.append(float(loss))
    return taken


def trl(task: Task, tokens: Any) -> Taken:
    """TRL's SFTTrainer, with Liger's kernels on CUDA."""
    _need("trl", "datasets", "accelerate", *(["liger_kernel"] if task.kind == "cuda" else []))
    _need(*(["peft"] if task.adapters else []), *(["bitsandbytes"] if task.four_bits else []))
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    taken, begun = Taken(), [0.0]

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            _wait(task)
            begun[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _wait(task)
            taken.seconds.append(time.perf_counter() - begun[0])

    class Trainer(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            loss = super().training_step(*arguments, **named)
            taken.losses.append(float(loss))
            return loss

    how: dict[str, Any] = {}
    if task.four_bits:
        from transformers import BitsAndBytesConfig

        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = AutoModelForCausalLM.from_pretrained(_saved(task), dtype=torch.bfloat16, device_map=task.kind, **how)
    more: dict[str, Any] = {}
    if task.adapters:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(_saved(task))
    settings = SFTConfig(
        output_dir=str(Path(task.folder) / "trl"), max_steps=task.steps, per_device_train_batch_size=task.rows, learning_rate=LR,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, bf16=True, gradient_checkpointing=task.checkpointed,
        use_liger_kernel=task.kind == "cuda", use_cpu=task.kind == "cpu", report_to="none", save_strategy="no", disable_tqdm=True,
        logging_steps=task.steps, max_length=task.length, completion_only_loss=False,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": tokens.tolist()})
    Trainer(model, settings, train_dataset=rows, processing_class=tokenizer, callbacks=[Watch()], **more).train()
    return taken


def torchtitan(task: Task, tokens: Any) -> Taken:
    """torchtitan's Llama, its layers compiled, with torch's fused AdamW under bf16 autocast."""
    _need("torchtitan", "spmd_types")
    if task.adapters or task.shape != "1B" or task.kind != "cuda":
        raise Skip("torchtitan's Llama is compared at 1B full on CUDA")
    import torch
    from torch.distributed import fsdp
    from torch.nn.functional import cross_entropy

    if torch.__version__ < "2.12":  # torchtitan imports a name that torch 2.11 lacks, which one device does not use
        vars(fsdp)["DataParallelMeshDims"] = object
    from torchtitan.models.llama3 import llama3_configs

    with torch.device("meta"):
        model = llama3_configs["1B"]("flex").build() if callable(llama3_configs["1B"]) else llama3_configs["1B"].build()
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cuda"))
    for layer in model.layers.values():
        layer.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    over = torch.compile(lambda out, labels: cross_entropy(out.flatten(0, 1).float(), labels.flatten()))

    def step(rows: Any) -> Any:
        positions = torch.arange(task.length, device="cuda").expand(task.rows, -1)
        with torch.autocast("cuda", torch.bfloat16):
            loss = over(model(rows, positions=positions), rows.roll(-1, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return _timed(task, tokens, step)


def unsloth(task: Task, tokens: Any) -> Taken:
    """unsloth's model with its own adapters, in a plain loop."""
    _need("unsloth")
    if task.kind != "cuda" or not task.adapters:
        raise Skip("unsloth is compared with adapters on CUDA")
    from unsloth import FastLanguageModel  # isort: skip  # first, as it changes what follows
    import torch

    model, _ = FastLanguageModel.from_pretrained(
        str(_saved(task)), max_seq_length=task.length, load_in_4bit=task.four_bits, dtype=torch.bfloat16
    )
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=32,
        target_modules=names,
        use_gradient_checkpointing="unsloth" if task.checkpointed else False,
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0, fused=True
    )

    def step(rows: Any) -> Any:
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return _timed(task, tokens, step)


PEERS: dict[str, Callable[[Task, Any], Taken]] = {
    "TRL with Liger": trl,
    "torchtitan, compiled": torchtitan,
    "unsloth": unsloth,
}


def run_apart(peer: str, task: Task, tokens: Path, sites: str) -> dict[str, Any]:
    """Runs a trainer in a process of its own, whose output is that of this process.

    Args:
        peer: of PEERS.
        tokens: a .npy file, int64 [task.steps * task.rows, task.length].
        sites: folders of its packages, which come before the interpreter's, joined as in PYTHONPATH; "" uses what this process has.

    Returns:
        {seconds, losses: of each step, versions: of what it imported, figures: memory on CUDA}, or {skip: why}, or {out of memory: why}.
    """
    from preheat.hardware.child_processes import describe_exit, tie_to_parent

    job, result = Path(task.folder) / "peer-job.json", Path(task.folder) / "peer-result.json"
    job.write_text(json.dumps({"peer": peer, "tokens": str(tokens), "result": str(result), "task": asdict(task)}))
    result.unlink(missing_ok=True)
    path = [sites or os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[1])]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    # `-P`: nothing from the folder of the run, where a trainer's packages must not be looked for.
    command = [sys.executable, "-P", "-m", "_gpu.peers", str(job)]
    done = subprocess.run(
        tie_to_parent(command), env=environment, cwd=task.folder, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode or not result.exists():
        raise Wrong(f"the trainer's process {describe_exit(done.returncode)}: see the log", {})
    answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return answer


def main(file: str) -> None:
    """Runs the job in a file (see `run_apart`), and writes its result."""
    import numpy as np

    job = json.loads(Path(file).read_text(encoding="utf-8"))
    task = Task(**job["task"])
    if job["peer"] == "unsloth" and importlib.util.find_spec("unsloth"):
        importlib.import_module("unsloth")  # before torch and transformers, which it changes
    try:
        answer = asdict(PEERS[job["peer"]](task, np.load(job["tokens"]))) | {"versions": _versions(), "figures": {}}
    except Skip as reason:  # before torch was imported
        answer = {"skip": str(reason)}
    except RuntimeError as error:
        import torch

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        answer = {"out of memory": str(error).splitlines()[0]}
    else:
        if task.kind == "cuda":
            import torch

            answer["figures"] = {
                "allocated GiB": torch.cuda.max_memory_allocated() / 2**30,
                "reserved GiB": torch.cuda.max_memory_reserved() / 2**30,
            }
    Path(job["result"]).write_text(json.dumps(answer), encoding="utf-8")


def _versions() -> str:
    """Returns the packages that were imported, with their versions."""
    names = [name for name in PACKAGES if name.replace("-", "_") in sys.modules]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


if __name__ == "__main__":
    main(sys.argv[1])
