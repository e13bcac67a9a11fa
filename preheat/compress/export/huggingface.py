"""Export of a run to a Hugging Face folder: adapters merged, reloaded by plain transformers and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from preheat.compress import model_card
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import verify
from preheat.compress.export.held_out_text import HeldOutText, choose_held_out_text
from preheat.compress.export.published_layout import find_published_layout, note_text_alone
from preheat.compress.front_matter import find_pipeline_tag
from preheat.compress.special_tokens import end_texts, require_same_tokens, set_end_tokens
from preheat.core import Tag
from preheat.core.export import FolderResult
from preheat.data.tokenizer import describe_rebuild
from preheat.errors import RunError
from preheat.inference.load import load_model
from preheat.model_folder import read_object
from preheat.models.configs import is_remote_code
from preheat.models.conversions.architecture import describe_unsupported_modules
from preheat.models.conversions.modules import FeedForward, RMSNorm
from preheat.models.hf import auto_class, head
from preheat.models.moe import biases
from preheat.models.vision import copy_processor, draw_image
from preheat.ops.adapters.peft_layers import merge, names_of
from preheat.ops.classification_head import ClassHead, convert_to_sequence_classifier, pad_for
from preheat.ops.quantization.fake_quant import unfake_
from preheat.ops.quantization.packed import unpack_all_
from preheat.ops.quantization.serialization import is_compressed
from preheat.run.reader import Reader

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from preheat.recipe import Recipe

__all__ = ["needs_code", "write", "write_held"]

_UNROUNDED = (
    "the run was trained with rounded weights; the folder has them before rounding: preheat compress RUN writes "
    "them as they were rounded"
)
_NO_BIAS = (
    "the run balanced its experts by a bias on the choice; its family's folders have no place for that, so the "
    "folder routes without it, as the run's evaluations did"
)
_NO_WINDOW = (
    "the run limited its attention by a technique; the folder's configuration has no place for that, so plain "
    "transformers attends in full"
)


def write(
    run: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    base: str | None = None,
) -> FolderResult:
    """As `write_held`, without the held-out text in its result."""
    return write_held(run, out, dtype=dtype, tolerance=tolerance, base=base)[0]


def write_held(
    run: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    base: str | None = None,
    final: bool = True,
) -> tuple[FolderResult, HeldOutText]:
    """Writes `out` from a run's newest complete checkpoint, or from an adapter's folder and its base.

    Adapters are merged in fp32 into the base they were trained on; a 4-bit base is dequantized first. The folder is
    reloaded by plain transformers, and both models are compared over rows of real text and the added tokens.

    Args:
        dtype: of the saved weights; None: the run's.
        tolerance: maximum logit difference relative to the largest logit (at least 1); None: `verify.TOLERANCE`.
        base: as in `load_model`.
        final: False for an intermediate folder of another format, whose perplexity and Python code are not reported.

    Returns:
        {path, bytes, dtype, merged, tokens_that_end, turn_ends, chats, string_ends, read_by, note} and
        `verify.build_comparison`; and the text that perplexity was measured on. Here turn_ends is the token that ends
        an answer, or None; chats is True if it was trained on chats; string_ends is the string that ends an answer if
        no token does; note lists properties that the folder cannot express, or is "".

    Raises:
        RunError: no run or checkpoint; `out` exists or cannot be written; neither transformers nor preheat has a class
            of the architecture that a folder could name;
            the reloaded model differs by more than the tolerance.
    """
    import transformers

    out = Path(out)
    require_new(out, run)
    opened = load_model(run, base=base)
    model: PreTrainedModel = opened.build.trained[0]
    own_class = final and _is_rms_norm_gpt2(model)
    if not own_class and (beyond := describe_unsupported_modules(model)):
        raise RunError(
            f"{run}: has {' and '.join(beyond)}, which no class of transformers can load; evaluate and "
            "generate from the run itself"
        )
    # Dequantizing would give a large folder with the quality of the small one.
    if is_compressed(model):
        raise RunError(
            f"{run}: is compressed, and quantized weights cannot be written in other formats; export the original model"
        )
    if dtype is None and (stored := opened.build.weights.packed_method):
        raise RunError(
            f"{run}: its base is stored in {stored}, in which an adapter "
            "cannot be merged; write full weights with --dtype bfloat16, or the adapter alone with --to peft"
        )
    # Before `unfake_` and `merge`: the run's perplexity is that of the model as it was trained.
    held_text = choose_held_out_text(opened, run)
    # The comparison takes more memory than training a model on a 4-bit base: on the host, if the GPU lacks it.
    if verify.needs_host(model):
        opened.build.parts.clear()
        del model
        torch.cuda.empty_cache()
        opened = load_model(run, base=base, device="cpu")
        model = opened.build.trained[0]
    rounded = unfake_(model)
    saved_dtype = dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
    accepted = verify.Bound(verify.TOLERANCE[saved_dtype] if tolerance is None else tolerance)
    # Added tokens are the last of the vocabulary.
    first = len(opened.tokenizer) - len(opened.recipe.model.add_tokens)
    rows = verify.tokenize_samples(
        opened.tokenizer, opened.build.model.positions, list(range(first, len(opened.tokenizer)))
    )
    vision = opened.build.model.vision
    layout, text_note = find_published_layout(opened) if final else (None, "")
    reader = getattr(transformers, auto_class(model.config))
    classifies = isinstance(head(model), ClassHead)
    pad = _pad(opened.tokenizer, run) if classifies else None
    if pad is not None:  # transformers' classifiers read the last non-padding token
        opened.tokenizer.pad_token_id = pad
        rows = [row[row != pad][None] for row in rows]
    image_rows = [] if vision is None else [draw_image(vision)]
    # Before merging, so that the comparison covers the merge as well.
    wanted = verify.compute_logits(model, rows, image_rows)
    merged = merge(model) if names_of(model) else 0
    unpack_all_(model)  # of a folder without an adapter
    # A classifier has its own class in transformers, which reads logits at the last token only.
    if pad is not None:
        text_note = note_text_alone(layout.whole, "it is a classifier") if layout is not None else text_note
        layout = None
        reader, wanted = transformers.AutoModelForSequenceClassification, [row[:, -1] for row in wanted]
        model = _build_classifier(model, pad, run)
    # After merging in fp32: one rounding instead of two.
    model.to(saved_dtype)
    if own_class:
        model = _to_rms_norm_class(model)
    # The folder must keep the relation, or training it further would update one matrix only.
    tied = not classifies and model.get_input_embeddings().weight is model.get_output_embeddings().weight
    model.set_attn_implementation("eager")  # the folder must not name our own attention
    # Training turns the cache off; generation from the folder needs it.
    model.config.use_cache = True
    notes = [held_text.unfinished] if held_text.unfinished else []
    notes += [_NO_WINDOW] if Tag.SLIDING_WINDOW in opened.build.tags else []
    notes += [_UNROUNDED] if rounded else []
    # A bias that `expert_balancing` added is not saved; one of the family itself is.
    notes += [_NO_BIAS] if biases(model).keys() - model.state_dict().keys() else []
    ends = set_end_tokens(model, opened)
    tokenizer = end_texts(opened.tokenizer) if classifies else ends.tokenizer
    notes += [] if classifies else ends.notes
    runs = own_class or is_remote_code(model.config, opened.recipe.model.trust_remote_code)
    name = str(saved_dtype).removeprefix("torch.")
    with NewFolder(out) as folder:
        # `write` returns why the layout cannot represent the model; then the text part alone is saved.
        if layout is not None and (problem := layout.write(model, folder, name)):
            text_note = note_text_alone(layout.whole, problem)
            layout = None
        if layout is None:
            model.save_pretrained(folder)
        else:
            reader = transformers.AutoModelForImageTextToText
        notes += [text_note] if text_note else []
        tokenizer.save_pretrained(folder)
        require_same_tokens(tokenizer, folder)
        notes += [note] if final and (note := describe_rebuild(folder)) else []
        if vision is not None and opened.build.weights.folder is not None:
            copy_processor(opened.build.weights.folder, folder)
        # After saving, which sets config.architectures.
        pipeline = find_pipeline_tag(model.config if layout is None else layout.whole)
        # Frees the run's model before the folder is loaded.
        opened.build.parts.clear()
        del model
        notes += verify.note_code(folder) if final else []
        reloaded = reader.from_pretrained(folder, dtype=torch.float32, local_files_only=True, trust_remote_code=runs)
        # Perplexity is undefined for a classifier.
        texts = None if classifies else [*rows, *(inputs["input_ids"] for inputs in image_rows)]
        difference = verify.compare(wanted, verify.compute_logits(reloaded, rows, image_rows), texts)
        hint = (
            "raise --tolerance only if you know why"
            if saved_dtype == torch.float32
            else "use --dtype float32, or raise --tolerance"
        )
        verify.refuse_beyond(difference, accepted, str(out), hint)
        # Equal logits do not show it: two equal matrices compute the same as one.
        if not classifies and tied != (
            reloaded.get_input_embeddings().weight is reloaded.get_output_embeddings().weight
        ):
            raise RunError(
                f"{out}: embedding and head are {'one matrix' if tied else 'two matrices'} in the run, but "
                "not in the folder"
            )
        perplexity = held_text.by(reloaded, difference) if final else held_text.perplexities(difference, None)
        summary = FolderResult(
            path=str(out),
            bytes=verify.count_bytes(folder),
            dtype=name,
            merged=merged,
            tokens_that_end=tuple(ends.tokens),
            turn_ends=ends.end_of_turn,
            chats=ends.chats,
            string_ends=ends.string,
            read_by=model_card.find_version("transformers"),
            **vars(verify.build_comparison(difference, accepted)),
            **vars(perplexity),
            note="; ".join(notes),
        )
        more = ", trust_remote_code=True" if own_class else ""
        use = f'import transformers\nmodel = transformers.{reader.__name__}.from_pretrained("."{more})'
        model_card.write_export(
            folder,
            run,
            summary,
            title=f"Hugging Face folder, {name}",
            use=use,
            library="transformers",
            pipeline=pipeline,
        )
    return summary, held_text


def needs_code(recipe: Recipe) -> bool:
    """True if the folder of a recipe's model has the code of its class, since transformers has none of that kind."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if "rms_norm" in recipe.techniques:
        return True
    if recipe.model.path is None:
        return False
    file = Path(recipe.model.path) / "config.json"
    return file.is_file() and read_object(file, "configuration").get("model_type") not in CONFIG_MAPPING_NAMES


def _is_rms_norm_gpt2(model: PreTrainedModel) -> bool:
    """True for a GPT-2 with the technique `rms_norm`, of which a folder can hold the class itself."""
    kinds = {type(module) for module in model.modules()}
    return model.config.model_type == "gpt2" and RMSNorm in kinds and not {FeedForward, ClassHead} & kinds


def _to_rms_norm_class(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the same weights in the class whose code is saved with them."""
    from preheat.compress.export.modeling_gpt2_rms_norm import GPT2RMSNormConfig, GPT2RMSNormLMHeadModel

    GPT2RMSNormConfig.register_for_auto_class()
    GPT2RMSNormLMHeadModel.register_for_auto_class("AutoModelForCausalLM")
    folded = any(isinstance(module, RMSNorm) and module.bias is not None for module in model.modules())
    values = {**model.config.to_dict(), "model_type": GPT2RMSNormConfig.model_type, "rms_norm_folded": folded}
    with torch.device("meta"):
        own = GPT2RMSNormLMHeadModel(GPT2RMSNormConfig.from_dict(values))
    own.load_state_dict(model.state_dict(), assign=True)
    own.tie_weights()
    return own.eval()


def _pad(tokenizer: PreTrainedTokenizerFast, run: str | Path) -> int:
    try:
        return pad_for(tokenizer)
    except ValueError as error:
        raise RunError(f"{run}: cannot be exported: {error}") from None


def _build_classifier(model: PreTrainedModel, pad: int, run: str | Path) -> PreTrainedModel:
    """Returns transformers' classifier of the family, with the names of the run's classes."""
    try:
        classifier = convert_to_sequence_classifier(model, pad=pad)
    except ValueError as error:
        raise RunError(f"{run}: cannot be exported: {error}") from None
    names = Reader(run).data.classes if (Path(run) / "recipe.yaml").is_file() else None
    # The hub's widget and pipelines show these names.
    if names:
        classifier.config.id2label = dict(enumerate(map(str, names)))
        classifier.config.label2id = {name: n for n, name in classifier.config.id2label.items()}
    return classifier
