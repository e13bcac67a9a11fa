"""TRL: the YAML of `trl sft` and `trl dpo`, SFTConfig and DPOConfig as JSON, and scripts: one table of keys.

Read from TRL 1.16 (trl/trainer/{base,sft,dpo,model}_config.py, trl/scripts) on transformers 5.23. A file does not say
which of TRL's commands it is for: `trl-dpo` is recognized by the keys of preferences, and refuses those of rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from preheat.errors import RecipeError
from preheat.interop.hf_keys import (
    REWARDS,
    read_of_source,
    read_preference,
    read_target_parameters,
    read_validation,
    read_variant,
)
from preheat.interop.hf_writing import (
    list_targets,
    write_batch,
    write_fsdp,
    write_kernels,
    write_optimizer,
    write_precision,
    write_saving,
    write_schedule,
    write_target_parameters,
)
from preheat.interop.keys import (
    Assumed,
    Entry,
    Handler,
    NoEffect,
    Outcome,
    Takes,
    assume,
    ignore,
    switch,
    take,
)
from preheat.interop.llama_factory import LLAMA_FACTORY
from preheat.interop.reading import Format
from preheat.interop.script import FAST_CALLS
from preheat.interop.settings import Settings
from preheat.interop.trainer_defaults import TRL_ARGUMENTS
from preheat.interop.trainer_defaults import TRL_DPO as DPO_DEFAULTS
from preheat.interop.trainer_defaults import TRL_SFT as SFT_DEFAULTS
from preheat.interop.training_arguments import (
    ARGUMENTS,
    CALLS,
    LOADING,
    RENAMED,
    RUN_CLM,
    TRAINER_CALL,
    VARIANTS,
    add_prefix,
    finish_run,
    read_data_files,
    read_model_name,
    read_path,
    read_targets,
)
from preheat.interop.writing import Draft, Written
from preheat.recipe import Recipe

__all__ = ["DPO_ARGUMENTS", "REFUSALS", "SFT_ARGUMENTS", "TRL", "TRL_DPO"]

_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo"}
_SFT_KEYS = frozenset(
    (
        *("packing", "packing_strategy", "eval_packing", "assistant_only_loss", "completion_only_loss"),
        *("dataset_text_field", "chat_template_path", "SFTConfig", "SFTTrainer"),
    )
)
_PREFERENCE_KEYS = frozenset(
    (
        *("beta", "precompute_ref_log_probs", "precompute_ref_batch_size", "sync_ref_model", "ref_model_mixup_alpha"),
        *("ref_model_sync_steps", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "use_weighting"),
        *("discopop_tau", "loss_weights", "label_smoothing", "DPOConfig", "DPOTrainer"),
    )
)
_REWARD_KEYS = (
    *("num_generations", "reward_funcs", "use_vllm", "vllm_mode", "reward_weights", "num_iterations", "scale_rewards"),
    *("steps_per_generation", "generation_batch_size", "reward_model_name_or_path", "center_rewards_coefficient"),
    *("max_completion_length", "num_ppo_epochs", "whiten_rewards", "num_generations_eval"),
)
_REWARD_CALLS = tuple(
    f"{name}{kind}" for name in ("GRPO", "Reward", "PPO", "RLOO", "Distillation") for kind in ("Config", "Trainer")
)
_OTHER_KEYS = ("desirable_weight", "undesirable_weight")
_OTHER_CALLS = tuple(f"{name}{kind}" for name in ("KTO", "ORPO", "CPO") for kind in ("Config", "Trainer"))
_OTHERS = "of TRL's trainers, SFT and DPO are read; write a recipe with techniques.preference"
_REFUSED = frozenset((*_REWARD_KEYS, *_REWARD_CALLS, *_OTHER_KEYS, *_OTHER_CALLS))


def _refuse(why: str) -> Handler:
    """Returns a handler of a key of another task, which also a value of none or false is of."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        raise entry.error(why)

    return handle


def _read_adapter(settings: Settings, entry: Entry) -> Outcome:
    settings.adapter = "lora" if entry.truth() else None
    return Takes(("adapter",))


def _read_task_type(settings: Settings, entry: Entry) -> Outcome:
    if entry.text() == "CAUSAL_LM":
        return NoEffect("a causal language model")
    raise entry.error(f"{entry.shown}: {REWARDS}")


def _read_assistant(settings: Settings, entry: Entry) -> Outcome:
    settings.train_on = "assistant" if entry.truth() else "all"
    return Takes(("train_on",))


def _read_completion(settings: Settings, entry: Entry) -> Outcome:
    if entry.truth():
        return NoEffect("of rows with a prompt and a completion, a recipe trains on the completion too")
    return Assumed("of rows with a prompt and a completion, the completion alone is trained on")


def _read_strategy(settings: Settings, entry: Entry) -> Outcome:
    name = entry.choice("bfd", "bfd_split", "bfd-requeue", "wrapped")
    if name == "bfd":
        return NoEffect("whole sequences are packed")
    if name == "wrapped":
        return Takes(("packing",), "conversations are packed whole; texts are cut at the ends of rows")
    return Assumed("sequences are packed whole, and cut if they are longer than a row")


def _read_sft_loss(settings: Settings, entry: Entry) -> Outcome:
    if entry.choice("nll", "chunked_nll", "dft") == "dft":
        settings.dft, settings.chunked_loss = True, False
        return Takes(("dft", "chunked_loss"), "TRL then needs all logits")
    return NoEffect("cross entropy, in chunks in any case")


def _read_dpo_loss(settings: Settings, entry: Entry) -> Outcome:
    names = entry.texts()
    if len(names) != 1 or names[0] not in _LOSSES:
        return Assumed("the loss is DPO's, which costs the same")
    settings.preference = settings.preference | {"loss": _LOSSES[names[0]]}
    return Takes(("preference",))


def _read_text_field(settings: Settings, entry: Entry) -> Outcome:
    if entry.text() == "text":
        return NoEffect("a recipe reads this column too")
    return Takes(("sources.text",))


def _read_smoothing(settings: Settings, entry: Entry) -> Outcome:
    if not entry.number():
        return NoEffect("switched off")
    settings.label_smoothing, settings.chunked_loss = entry.fraction(), False
    return Takes(("label_smoothing", "chunked_loss"), "TRL then needs all logits")


def _names(text: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(text.split(), handler)


_SHARED: Mapping[str, Handler] = {
    **ARGUMENTS,
    "max_length": take("length", Entry.whole),
    "label_smoothing_factor": _read_smoothing,
    "activation_offloading": switch("activation_offload"),
    **add_prefix("model_init_kwargs", LOADING),
    "router_aux_loss_coef": assume("without a loss on the router, of little weight"),
    "truncation_mode": ignore("what becomes of rows that are too long"),
    "pad_to_multiple_of": ignore("every sequence is planned at its full length"),
    "padding_free": switch("padding_free"),
    "disable_dropout": ignore("models have no dropout, but for old ones"),
    **_names("pad_token eos_token", ignore("tokens that the tokenizer has")),
    # Keys of earlier versions.
    "max_prompt_length": assume("max_length cuts prompt and answer together"),
    **_names("dataset_batch_size num_of_sequences chars_per_token", ignore("preparing the data")),
}
SFT_ARGUMENTS: Mapping[str, Handler] = {
    **_SHARED,
    "packing": switch("packing"),
    "packing_strategy": _read_strategy,
    "eval_packing": ignore("evaluation packs like training"),
    "completion_only_loss": _read_completion,
    "assistant_only_loss": _read_assistant,
    "loss_type": _read_sft_loss,
    "dataset_text_field": _read_text_field,
    "chat_template_path": assume("the tokenizer's own template is used"),
    "dataset_kwargs.*": ignore("preparing the data"),
    "shuffle_dataset": ignore("the order of the rows"),
}
DPO_ARGUMENTS: Mapping[str, Handler] = {
    **_SHARED,
    "beta": read_preference("beta"),
    "label_smoothing": read_preference("label_smoothing"),
    "loss_type": _read_dpo_loss,
    "loss_weights": assume("the loss is DPO's, which costs the same"),
    **_names("ld_alpha use_weighting f_divergence_type", assume("the loss is DPO's, which costs the same")),
    "precompute_ref_log_probs": assume("the reference stays in memory, and computes in each step"),
    "precompute_ref_batch_size": ignore("belongs to precompute_ref_log_probs"),
    "sync_ref_model": assume("the reference is the model before training, which costs the same"),
    **_names("ref_model_mixup_alpha ref_model_sync_steps", ignore("belongs to sync_ref_model")),
    "f_alpha_divergence_coef": ignore("belongs to f_divergence_type"),
    "discopop_tau": ignore("belongs to one of the losses"),
    # Keys of earlier versions.
    "reference_free": assume("the reference is the model before training"),
    **_names("generate_during_eval use_logits_to_keep is_encoder_decoder", ignore("of little weight")),
}
_MODEL: Mapping[str, Handler] = {
    **LOADING,
    "model_name_or_path": read_model_name,
    "model_revision": ignore("loading"),
    "use_peft": _read_adapter,
    "lora_r": take("lora_rank", Entry.whole),
    "lora_alpha": take("lora_alpha", Entry.number),
    "lora_dropout": take("lora_dropout", Entry.fraction),
    "lora_target_modules": read_targets,
    "lora_target_parameters": read_target_parameters,
    "lora_modules_to_save": assume("embedding and head stay frozen"),
    "lora_task_type": _read_task_type,
    "use_rslora": read_variant("rslora"),
    "use_dora": read_variant("dora"),
    "bnb_4bit_quant_type": ignore("fp4 and nf4 cost the same"),
    "use_bnb_nested_quant": switch("double_quantization"),
    "bnb_4bit_quant_storage": ignore("how the weights' bytes are kept"),
}
_DATA: Mapping[str, Handler] = {
    "dataset_name": read_path,
    "dataset_config": read_of_source("subset"),
    "dataset_train_split": read_of_source("split"),
    "dataset_test_split": ignore("evaluation"),
    "dataset_streaming": switch("streaming"),
    "streaming": switch("streaming"),
    "test_split_size": read_validation,
    "ignore_bias_buffers": ignore("how processes find and wait for each other"),
    **add_prefix(
        "datasets.*",
        {
            "path": read_path,
            "name": read_of_source("subset"),
            "split": read_of_source("split"),
            "data_files": read_data_files,
            "data_files.train": read_data_files,
            "data_files.*": ignore("rows that are not trained on"),
            "data_dir": assume("the rows of the whole dataset are read"),
            "columns": ignore("columns that are read"),
            "fraction": assume("all rows of the dataset are read"),
        },
    ),
    "env.*": ignore("variables of the environment"),
    "accelerate_config": assume("one device, or those of the command; name the file: --accelerate FILE"),
    **_names("num_processes num_machines", assume("the devices of the command (--count, --nodes)")),
    "config_file": assume("one device, or those of the command; name the file: --accelerate FILE"),
}
REFUSALS: Mapping[str, Handler] = {
    **dict.fromkeys(_REWARD_KEYS, _refuse(REWARDS)),
    **dict.fromkeys(_OTHER_KEYS, _refuse(_OTHERS)),
    **{f"{name}{end}": _refuse(REWARDS) for name in _REWARD_CALLS for end in ("", ".*")},
    **{f"{name}{end}": _refuse(_OTHERS) for name in _OTHER_CALLS for end in ("", ".*")},
}


def _build_table(task: str, arguments: Mapping[str, Handler]) -> dict[str, Handler]:
    """Returns the table of a task: the keys of its files, and of the calls of its scripts."""
    return {
        **REFUSALS,
        **_MODEL,
        **_DATA,
        **arguments,
        **CALLS,
        **add_prefix(f"{task}Config", arguments),
        f"{task}Config": ignore("all arguments have their defaults"),
        # TRL's trainers take transformers' arguments too.
        **add_prefix("TrainingArguments", arguments),
        **add_prefix(f"{task}Trainer", {**TRAINER_CALL, **arguments}),
    }


_OLD_NAMES = RENAMED | {
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
}


def _rename(task: str) -> dict[str, str]:
    sections = ("", f"{task}Config.", f"{task}Trainer.", "TrainingArguments.")
    return {f"{section}{old}": f"{section}{new}" for section in sections for old, new in _OLD_NAMES.items()}


def _finish(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    notes = finish_run(settings, entries)
    for entry in entries.values():
        if entry.path[-1] == "max_length" and entry.value is None:
            notes.append(
                f"max_length: null cuts no row: sequences of {settings.length:,} tokens are planned (--set "
                "batch.seq_len=N)"
            )
    return notes


def _finish_sft(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies the rules of `trl sft`."""
    notes = _finish(settings, entries)
    text = next((entry.value for entry in entries.values() if entry.path[-1] == "dataset_text_field"), None)
    for source in settings.sources if text not in (None, "text") else ():
        source["text"] = text
    strategies = {entry.value for entry in entries.values() if entry.path[-1] == "packing_strategy"}
    for source in settings.sources if text is not None and "wrapped" in strategies else ():
        source.setdefault("layout", "text")
    if not _SFT_KEYS & {step for entry in entries.values() for step in entry.path}:
        notes.append("no key tells the task: read as `trl sft` (--from trl-dpo: as `trl dpo`)")
    return notes


def _finish_dpo(settings: Settings, entries: Mapping[str, Entry]) -> Sequence[str]:
    """Applies the rules of `trl dpo`."""
    settings.pairs = True
    notes = _finish(settings, entries)
    for source in settings.sources:
        source["layout"] = "preference"
    return notes


def write_trl(recipe: Recipe, folder: Path = Path()) -> Written:
    """Writes a recipe as the YAML of `trl sft`, or of `trl dpo` if it has preferences.

    Args:
        folder: of the file, from where the run is started.

    Raises:
        RecipeError: the recipe has no such form at all.
    """
    preference = recipe.techniques.get("preference")
    defaults = SFT_DEFAULTS if preference is None else DPO_DEFAULTS
    draft = Draft(recipe, "TRL", defaults.settings, adapter_dropout=defaults.adapter_dropout)
    settings = draft.settings
    draft.say("model_name_or_path", "model")
    if not settings.attention:
        draft.say("attn_implementation", "attention", value="eager")
    _write_data(draft)
    if settings.preference:
        _write_preference(draft)
    _write_adapter(draft)
    draft.say("max_length", "length", always=True)
    if not settings.preference:
        _write_rows(draft)
    draft.agree("pairs")
    write_batch(draft)
    write_optimizer(draft)
    write_schedule(draft)
    write_precision(draft, ("dtype", "bfloat16"))
    draft.say("gradient_checkpointing", "checkpointing")
    if settings.activation_offload:
        draft.say("activation_offloading", "activation_offload")
    if settings.label_smoothing or settings.dft:
        draft.agree("chunked_loss")  # TRL then needs all logits
    if settings.dft:
        draft.say("loss_type", "dft", value="dft")
    write_kernels(draft, "use_liger_kernel")
    write_fsdp(draft)
    write_saving(draft)
    draft.explain("model.weights", "TRL's command draws no new weights; --to axolotl and --to llamafactory can")
    draft.explain("data.template", "TRL takes the tokenizer's own template, or a file: chat_template_path")
    devices = f" --num_processes {settings.world}" if settings.world > 1 else ""
    draft.start.append(f"trl {'sft' if preference is None else 'dpo'} --config {{file}}{devices}")
    return draft.finish()


def _write_data(draft: Draft) -> None:
    """Writes the datasets: TRL recognizes their rows by the names of their columns."""
    settings, listed, written = draft.settings, [], []
    readable = ("preference",) if settings.preference else ("auto", "text", "prompt", "messages", "sharegpt")
    for source in settings.sources:
        name, layout = str(source["source"]), source.get("layout", "auto")
        where: dict[str, object] = {"path": name}
        suffix = Path(name).suffix.removeprefix(".")
        if suffix in _SUFFIXES:
            where = {"path": _SUFFIXES[suffix], "data_files": name}
        listed.append(where | {theirs: source[key] for key, theirs in _SOURCE_KEYS.items() if key in source})
        source_keys = {key: source[key] for key in ("source", *_SOURCE_KEYS) if key in source}
        source_keys |= {key: source[key] for key in ("prompt", "completion") if source.get(key) == key}
        if layout in readable:
            source_keys |= {"layout": layout} if "layout" in source else {}
        else:
            rows = (
                "chosen and rejected"
                if settings.preference
                else "messages, conversations, prompt and completion, or text"
            )
            draft.refuse_layout(source, f"TRL reads rows with {rows}")
        written.append(source_keys)
    draft.put("datasets", listed)
    if not settings.preference:  # one column for all datasets
        text = str(settings.sources[0].get("text", "text"))
        stated = {source.get("layout") for source in settings.sources} == {"text"}
        draft.put("dataset_text_field", text, default=text == "text" and not stated)
        for source in written:
            source |= {"text": text} if text != "text" else {}
    draft.said.sources = written
    draft.explain("data.columns", "TRL knows columns by their own names: rename them in the data")
    if settings.streaming:
        draft.say("streaming", "streaming")
    if isinstance(settings.validation, float):
        if settings.validation:
            draft.say("test_split_size", "validation")
    else:
        draft.explain("data.validation", "TRL holds a fraction out: --set data.validation=0.02")


_SUFFIXES = {"jsonl": "json", "json": "json", "csv": "csv", "parquet": "parquet", "txt": "text", "arrow": "arrow"}
_SOURCE_KEYS = {"subset": "name", "split": "split"}


def _write_rows(draft: Draft) -> None:
    """Writes packing and the trained part of the rows."""
    settings = draft.settings
    layouts = {source.get("layout", "auto") for source in settings.sources}
    draft.say("packing", "packing")
    if settings.packing:
        stream = draft.recipe.data.packing == "stream"
        draft.put("packing_strategy", "wrapped" if stream else "bfd", default=not stream)
    if layouts <= {"text", "prompt"}:
        draft.agree("train_on")  # it is known: all of a text, and the completion
    elif settings.train_on in ("assistant", "all"):
        draft.say("assistant_only_loss", "train_on", value=settings.train_on == "assistant")


def _write_preference(draft: Draft) -> None:
    losses = {ours: theirs for theirs, ours in _LOSSES.items()}
    preference = draft.settings.preference
    loss = str(preference["loss"])
    if loss not in losses:
        raise RecipeError(f"techniques.preference.loss: {loss}: `trl dpo` has {', '.join(losses)}; use one of these")
    written = {"loss": loss} | {key: preference[key] for key in ("beta", "label_smoothing") if key in preference}
    draft.put("loss_type", [losses[loss]], default=loss == "dpo")
    draft.put("beta", preference.get("beta", 0.1))  # a key of preferences: the file is then known to be of `trl dpo`
    if "label_smoothing" in preference:
        draft.put("label_smoothing", preference["label_smoothing"])
    draft.said.preference = written


def _write_adapter(draft: Draft) -> None:
    settings = draft.settings
    if settings.adapter is None:
        draft.agree("adapter")
        return
    draft.say("use_peft", "adapter", value=True)
    draft.say("lora_r", "lora_rank", always=True)
    draft.say("lora_alpha", "lora_alpha", always=True)
    draft.say("lora_dropout", "lora_dropout")
    draft.say("lora_target_modules", "lora_targets", value=list_targets(settings))
    write_target_parameters(draft, "lora_target_parameters")
    if settings.lora_variant in ("rslora", "dora"):
        draft.say(f"use_{settings.lora_variant}", "lora_variant", value=True)
    if settings.quantized:
        draft.say("load_in_4bit", "quantized")
        draft.say("use_bnb_nested_quant", "double_quantization")
    if settings.frozen == "auto" and settings.precision == "bf16":
        draft.say("dtype", "frozen", value="bfloat16")


_NOT_TRL = LLAMA_FACTORY.unique | RUN_CLM | FAST_CALLS | {"model", "base_model", "checkpoint_dir"}

TRL = Format(
    name="trl",
    title="TRL",
    requires=frozenset(),
    unique=_SFT_KEYS - {"packing"}
    | {"dataset_name", "datasets", "use_peft", "lora_r", "lora_target_modules", "test_split_size"},
    without=_NOT_TRL | _PREFERENCE_KEYS | _REFUSED,
    defaults=SFT_DEFAULTS,
    variants={"TrainingArguments": TRL_ARGUMENTS, **VARIANTS},
    finish=_finish_sft,
    renamed=_rename("SFT"),
    table=_build_table("SFT", SFT_ARGUMENTS),
    write=write_trl,
)

TRL_DPO = Format(
    name="trl-dpo",
    title="TRL",
    requires=frozenset(),
    unique=_PREFERENCE_KEYS | _REFUSED,
    without=_NOT_TRL,
    defaults=DPO_DEFAULTS,
    variants={"TrainingArguments": TRL_ARGUMENTS, **VARIANTS},
    finish=_finish_dpo,
    renamed=_rename("DPO"),
    table=_build_table("DPO", DPO_ARGUMENTS),
    write=write_trl,
)
