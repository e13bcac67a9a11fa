"""Loads the model's tokenizer or trains a byte-level BPE on the data, and encodes documents with special tokens."""

from __future__ import annotations

import contextlib
import functools
import heapq
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from preheat import remote_code
from preheat.core.schema import TOKENIZER_FILES
from preheat.data.document import END, PAD, Document, TextSpan
from preheat.data.rows.file_readers import describe_json_type, describe_missing_path, expand_path
from preheat.data.sources import compute_digest
from preheat.errors import DataError, RecipeError, RunError
from preheat.files import to_json
from preheat.hardware.connectivity import find_cached_folder, is_hub_offline
from preheat.model_folder import (
    FAULTS,
    beginning_tokens,
    count_embedding_rows,
    describe_fault,
    find_repository_file,
    read_object,
)
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from preheat.core.json_types import JsonObject

__all__ = [
    "END",
    "PAD",
    "Encoded",
    "Encoder",
    "load_tokenizer",
    "token_bytes",
    "describe_vocabulary_mismatch",
    "read_as_it_is",
    "describe_rebuild",
    "save_tokenizer",
    "train_tokenizer",
    "describe_difference",
    "compare_folders",
    "write_tokenizer",
]

SAMPLE = 4_000_000
"""Characters of the training documents that a BPE is trained on: those with the lowest content hash, so that the sample
is the same in any order of files. More text changes few tokens and costs time in proportion."""


class Encoded(NamedTuple):
    """One sequence as tokens.

    Attributes:
        tokens: token ids.
        loss_mask: one byte per token, 1 for tokens that are trained on; None for all.
        label: label of its document.
    """

    tokens: list[int]
    loss_mask: bytes | None = None
    label: int | None = None


def load_tokenizer(
    name: str, *, knob: str = "data.tokenizer", add_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of a Hugging Face folder, or of a hub name such as `org/model`.

    Args:
        add_tokens: special tokens that must be the last ones, in this order; missing ones are added.

    Raises:
        DataError: the folder is missing, holds no usable tokenizer, or `add_tokens` cannot be added to it.
    """
    path = expand_path(knob, name)
    source = str(path) if path.exists() else name
    # A hub repository has exactly one slash in its name; every other missing name was meant as a path.
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise describe_missing_path(knob, path)
    if path.exists():
        _look_at(knob, path)
    elif is_hub_offline():
        # From the folder in the cache: by its name, the hub's client would wait for a network first.
        if (cached := find_cached_folder(name, TOKENIZER_FILES)) is None:
            raise DataError(
                f"{knob} {name}: no such folder, and no network to look for a model of that name, of which the hub's "
                f"cache holds no tokenizer; run: hf download {name} with a network, or name a folder that has "
                "tokenizer.json"
            )
        source = str(cached)
    # Code of a folder runs only with the user's consent; code from the hub never runs.
    runs = path.exists() and remote_code.may_run(knob, name, _find_tokenizer_classes(knob, path))
    loaded = _read(knob, source, runs)
    # Slow tokenizers are pure Python: they have no `backend_tokenizer`, which `Encoder` needs.
    if not loaded.is_fast:
        raise DataError(
            f"{knob} {name}: has no fast tokenizer (tokenizer.json); convert it with transformers and save it again"
        )
    tokenizer = cast("PreTrainedTokenizerFast", loaded)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{knob} {name}: the tokenizer has no end-of-text token, which ends every document; add "
            "eos_token to tokenizer_config.json"
        )
    if add_tokens:
        _add(tokenizer, add_tokens)
    return tokenizer


def _read(knob: str, name: str, runs: bool) -> PreTrainedTokenizerBase:
    """Loads a tokenizer with transformers, by the class that splits text as its tokenizer.json does.

    Args:
        runs: allow the folder's own code, without which it cannot be loaded.
    """
    import transformers

    # PreTrainedTokenizerFast loads tokenizer.json unchanged; AutoTokenizer may rebuild it by the model's class.
    reader = transformers.PreTrainedTokenizerFast if read_as_it_is(name) else transformers.AutoTokenizer
    try:
        return reader.from_pretrained(name, trust_remote_code=runs)
    except _loading_errors() as error:
        raise DataError(f"{knob} {name}: no tokenizer can be read from it: {describe_fault(error, 200)}") from None


def _loading_errors() -> tuple[type[Exception], ...]:
    """Returns what transformers raises for a tokenizer, or its config.json, that it cannot load."""
    from huggingface_hub.errors import StrictDataclassError

    return (*FAULTS, StrictDataclassError)


def read_as_it_is(name: str) -> str:
    """Returns how the class chosen by transformers splits text differently from tokenizer.json, or '' if it does not.

    If it does, tokenizer.json is loaded without that class.

    Args:
        name: folder or hub name, as for `load_tokenizer`.
    """
    file = find_repository_file(name, "tokenizer.json")
    return _compare_classes(name, file, _stamp_files(file.parent)) if file is not None else ""


def _stamp_files(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """Returns time, size and inode of the files of a tokenizer, as a cache key that changes with them."""
    # Besides the vocabulary, transformers reads special tokens and the class from these files.
    others = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json", "merges.txt")
    files = (folder / name for name in (*TOKENIZER_FILES, *others))
    states = (file.stat() for file in files if file.is_file())
    return tuple((state.st_mtime_ns, state.st_size, state.st_ino) for state in states)


# A command loads its tokenizer several times, and a large one takes a second.
@functools.lru_cache(maxsize=32)
def _compare_classes(name: str, file: Path, _changed: tuple[tuple[int, int, int], ...]) -> str:
    """Implements `read_as_it_is` for a tokenizer.json.

    transformers 5 rebuilds some tokenizers by the class in tokenizer_config.json or by the model's type (Qwen2, GPT-2,
    Llama): it takes the vocabulary and merges from the file, but the rules for spaces and digits from the class.

    Raises:
        DataError: neither way of loading gives the tokens of the file.
    """
    import transformers
    from tokenizers import Tokenizer

    reference, reasons = Tokenizer.from_file(str(file)), list[str]()
    # AutoTokenizer first: if it splits text as the file does, `reasons` is empty and the result is ''.
    for reader in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        try:
            rebuilt: PreTrainedTokenizerBase = reader.from_pretrained(name, trust_remote_code=False)
        except _loading_errors() as error:
            reasons.append(f"transformers cannot read it by its class: {describe_fault(error, 200)}")
            continue
        if not rebuilt.is_fast:
            return ""  # `load_tokenizer` reports it
        # Compare with the Rust library's own reading of the file, which involves no class of transformers.
        difference = _compare_backends(reference, rebuilt)
        if difference is None:
            return reasons[0] if reasons else ""
        reasons.append(f"transformers builds a {type(rebuilt).__name__} of it, in which {difference}")
    raise DataError(f"{file}: {reasons[-1]}; save the tokenizer again with the transformers that is installed here")


def describe_rebuild(folder: str | Path) -> str | None:
    """Returns how `AutoTokenizer` splits text differently from a folder's tokenizer.json, or None if it does not.

    Users who load the folder with transformers alone get those tokens, which the model was never trained on.
    """
    import transformers
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        rebuilt: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except _loading_errors() as error:
        return f"AutoTokenizer cannot read it: {describe_fault(error, 200)}"
    difference = _compare_backends(Tokenizer.from_file(str(file)), rebuilt)
    return f"AutoTokenizer builds a {type(rebuilt).__name__} of it, in which {difference}" if difference else None


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, stops: Sequence[str] = ()) -> str | None:
    """Saves a tokenizer and verifies it by loading it back.

    Args:
        stops: see `write_tokenizer`.

    Returns:
        How transformers' `AutoTokenizer` splits text differently, or None if it does not. It does if config.json names
        a model whose tokenizer transformers always rebuilds by its own rules.

    Raises:
        RunError: the tokenizer cannot be written, or loads back as a different one.
    """
    write_tokenizer(tokenizer, folder, stops)
    try:
        if describe_rebuild(folder):  # name a class that loads tokenizer.json unchanged
            file = folder / "tokenizer_config.json"
            settings = {**json.loads(file.read_bytes()), "tokenizer_class": "PreTrainedTokenizerFast"}
            file.write_text(to_json(settings, indent=2), encoding="utf-8")
        # Load it by the function that every later command uses, so that the comparison covers its choices too.
        reloaded = load_tokenizer(str(folder))
    except OSError as error:
        raise RunError(f"{folder}: the tokenizer cannot be saved ({error.strerror or error})") from None
    except DataError as error:
        raise RunError(f"{folder}: the saved tokenizer cannot be read back: {error}") from None
    # A tokenizer that loads back differently would silently pair the trained weights with other tokens.
    if difference := describe_difference(tokenizer, reloaded):
        raise RunError(f"{folder}: the saved tokenizer is not the one that was used: {difference}")
    return describe_rebuild(folder)


def _add(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str]) -> None:
    known = tokenizer.get_vocab()
    # Special tokens are matched first and as a whole, and left out of decoded text.
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    if ids == list(range(len(tokenizer) - len(tokens), len(tokenizer))):  # they index rows of the embedding
        return
    # An existing token keeps its number, so the new ones are not the contiguous last numbers.
    if existing := [token for token in tokens if token in known]:
        raise DataError(
            f"model.add_tokens: the tokenizer has {existing[0]!r} already (number {known[existing[0]]}); leave it out"
        )
    raise DataError(
        f"model.add_tokens: the tokenizer's numbers have gaps (the new tokens got {ids}), so it cannot be added to"
    )


def _find_tokenizer_classes(knob: str, path: Path) -> list[str]:
    """Returns the folder's own tokenizer classes, if neither tokenizer.json nor a class of transformers can load it."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    file = path / "tokenizer_config.json"
    settings = read_object(file, knob) if file.is_file() else {}
    name = settings.get("tokenizer_class")
    # Consent is required only if the folder cannot be loaded without its code.
    if (path / "tokenizer.json").is_file() or (isinstance(name, str) and tokenizer_class_from_name(name) is not None):
        return []
    # auto_map maps a class of transformers to the folder's own one: {"AutoTokenizer": [slow, fast]}.
    places = settings.get("auto_map")
    return (
        remote_code.find_code_classes({"auto_map": {"AutoTokenizer": places.get("AutoTokenizer")}})
        if isinstance(places, dict)
        else []
    )


def _look_at(knob: str, path: Path) -> None:
    if not path.is_dir():
        raise DataError(f"{knob} {path}: is a file; name the folder that holds tokenizer.json")
    file = path / "tokenizer.json"
    if not file.exists():
        # Older folders have only tokenizer.model or vocab.txt, which transformers converts as it loads them.
        if not any((path / other).is_file() for other in TOKENIZER_FILES):
            raise DataError(f"{knob} {path}: not a tokenizer folder: it has no tokenizer.json")
        return
    # The Rust reader raises a bare Exception for a truncated or foreign file, so check first.
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{file}: not a tokenizer: {describe_fault(error, 200)}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise DataError(f"{file}: not a tokenizer: it has no 'model'")
    # A JSON object may still be no tokenizer (inconsistent ids, an unknown model): only the library can decide.
    refused = _find_rust_error(str(file), file.stat().st_mtime_ns, file.stat().st_size)
    if refused:
        raise DataError(f"{file}: not a tokenizer that can be read: {refused}; copy it again from an intact source")
    # transformers reads these too, and its errors about them would not name the file.
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        companion = path / name
        try:
            settings = json.loads(companion.read_bytes()) if companion.is_file() else {}
        except (ValueError, RecursionError, OSError) as error:
            raise DataError(
                f"{companion}: not JSON: {describe_fault(error, 200)}; copy it again from an intact source"
            ) from None
        if not isinstance(settings, dict):
            raise DataError(f"{companion}: holds {describe_json_type(settings)}, not an object")
        if problem := _find_unusable_setting(settings):
            raise DataError(f"{companion}: {problem}; restore the model's own")


def _find_unusable_setting(settings: JsonObject) -> str | None:
    """Returns the problem of a setting that transformers accepts and fails on later, or None."""
    for key, value in settings.items():
        # A special token is text, or an object (AddedToken) with its text in `content`.
        token = value.get("content") if isinstance(value, dict) else value
        if key in _SPECIAL and value is not None and not isinstance(token, str):
            return f"{key}: must be a token's text, got {quote_value(value)}"
    longest = settings.get("model_max_length")
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int | float) or not longest > 0):
        return f"model_max_length: must be a number above 0, got {quote_value(longest)}"
    template = settings.get("chat_template")
    # A chat template is text, an object of named texts, or a list of {name, template}.
    parts = (
        list(template.values())
        if isinstance(template, dict)
        else [part.get("template") if isinstance(part, dict) else part for part in template]
        if isinstance(template, list)
        else [template or ""]
    )
    if wrong := [part for part in parts if not isinstance(part, str)]:
        return f"chat_template: must be a template's text, got {quote_value(wrong[0])}"
    return None


_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@functools.lru_cache(maxsize=32)
# The time and size of the file are arguments only to make a changed file another cache key.
def _find_rust_error(file: str, _changed: int, _size: int) -> str:
    """Returns the Rust library's error for a tokenizer.json, or '' if it can be loaded."""
    from tokenizers import Tokenizer

    try:
        with _convert_rust_errors():
            Tokenizer.from_file(file).encode("a")  # its post-processor may name missing tokens
    except OSError as error:
        return describe_fault(error, 200)
    return ""


@contextlib.contextmanager
def _convert_rust_errors() -> Iterator[None]:
    """Turns the bare Exception that the Rust library raises when it cannot read or write into an OSError."""
    try:
        yield
    except BaseException as error:
        # A panic in Rust, as for a tokenizer.json with inconsistent ids, is a BaseException but no Exception.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise OSError(describe_fault(error, 200)) from None


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, stops: Sequence[str] = ()) -> None:
    """Saves a tokenizer without verifying it.

    Args:
        stops: stop tokens of its model that its template needs (`Template.stops`).

    Raises:
        RunError: the tokenizer cannot be written.
    """
    try:
        with _convert_rust_errors():
            tokenizer.save_pretrained(folder)
        if stops:
            ids = tokenizer.convert_tokens_to_ids(list(stops))
            (folder / "generation_config.json").write_text(to_json({"eos_token_id": ids}, indent=2), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder}: the tokenizer cannot be saved ({error.strerror or error})") from None


def compare_folders(own: str, other: str, *, knob: str, add_tokens: tuple[str, ...] = ()) -> str | None:
    """Compares the tokenizers of two folders by `describe_difference`. `add_tokens` is for the first, `knob` for
    the second."""
    return _compare_folders(own, other, knob, add_tokens, (_stamp_files(Path(own)), _stamp_files(Path(other))))


# A search compares them for each candidate, and a large tokenizer takes a second to load.
@functools.lru_cache(maxsize=32)
def _compare_folders(own: str, other: str, knob: str, add_tokens: tuple[str, ...], _changed: Hashable) -> str | None:
    return describe_difference(load_tokenizer(own, add_tokens=add_tokens), load_tokenizer(other, knob=knob))


def describe_vocabulary_mismatch(own: str | None, teacher: str, add_tokens: tuple[str, ...] = ()) -> str | None:
    """Returns why a teacher's probabilities are not over the student's tokens, or None if they are.

    Args:
        own: folder of the student's tokenizer; None if it is trained on the data.
        teacher: the teacher's folder.
        add_tokens: tokens added to the student's tokenizer.
    """
    if own is None:
        return (
            "teacher: has its own tokens, and the student's tokenizer is trained on the data; set data.tokenizer: "
            f"{teacher}"
        )
    # The same folder needs no comparison, which would load both.
    if Path(own).resolve() == Path(teacher).resolve() and not add_tokens:
        return None
    difference = compare_folders(own, teacher, knob="teacher:", add_tokens=add_tokens)
    if difference is None:
        return None
    return (
        f"teacher: its tokenizer is not the student's ({own}), so probabilities cannot be compared token "
        f"by token: {difference}; "
        f"set data.tokenizer: {teacher} for a new student, take a teacher of the student's family, or set "
        "techniques.distillation.pieces: common"
    )


_SEVERAL_KINDS = (
    'Once upon a time, there was a girl who didn\'t like rain.  She said: "Well, 3,141.59 drops!"\n\n',
    "def mean(values: list[float]) -> float:\n\treturn sum(values) / len(values)  # ZeroDivisionError\n",
    "Zoë naïvely chose Łódź over 東京 and Санкт-Петербург… 😀 50 % off, x²≤y",
    "Hello world, in 2023 we had 1234567 birds and 10 000 more; I'll, WE'RE, they'VE, e\u0301 \u00e9 \ufb01 \u0130",
    "  two  spaces\n\nand\ttabs \r\n \n    four, and at the end  ",
    " leading",
    "trailing ",
    "once upon a time",
    "CamelCase snake_case kebab-case https://a.b/c?d=e#f <html> {'k': [1, 2]}",
)
"""Texts to compare tokenizers by: spaces, line ends, digits, contractions, code, scripts, (de)composed letters."""


def describe_difference(a: PreTrainedTokenizerFast, b: PreTrainedTokenizerFast) -> str | None:
    """Returns the difference between two tokenizers, or None if they have the same vocabulary and split texts alike.

    Beginning, end and padding tokens are not compared, since only one of the two tokenizers reads the data.
    """
    # Number -> token of both.
    mine, theirs = ({number: piece for piece, number in t.get_vocab().items()} for t in (a, b))
    if mine != theirs:
        number = min(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
        one, other = (repr(pieces[number]) if number in pieces else "nothing" for pieces in (mine, theirs))
        return f"token {number} is {one} in the one and {other} in the other ({len(mine):,} and {len(theirs):,} tokens)"
    # Equal vocabularies may still split text differently: by merges, normalization or the rules for spaces and digits.
    for text in _SEVERAL_KINDS:
        one, other = (t.convert_ids_to_tokens(t.encode(text, add_special_tokens=False)) for t in (a, b))
        if one != other:
            at = _find_first_difference(one, other)
            return f"they split text differently: {one[at : at + 3]} in the one is {other[at : at + 3]} in the other"
    return None


def _find_first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def _compare_backends(reference: Tokenizer, built: PreTrainedTokenizerBase) -> str | None:
    """Returns the difference between tokenizer.json and the tokenizer built by transformers; extra special tokens are
    allowed.

    The tokens added around a text are compared too, unless tokenizer_config.json sets them, which transformers follows.
    """
    from tokenizers import Tokenizer

    # Copies, since they are changed below.
    reference, other = (Tokenizer.from_str(t.to_str()) for t in (reference, built.backend_tokenizer))
    pieces, numbers = reference.get_vocab(with_added_tokens=True), other.get_vocab(with_added_tokens=True)
    # Only missing or renumbered tokens count: transformers may add special tokens that the file lacks.
    if pieces.items() - numbers.items():
        piece, number = min(pieces.items() - numbers.items(), key=lambda pair: pair[1])
        return f"{piece!r}, token {number} of tokenizer.json, is {numbers.get(piece, 'no token')}"
    # Flags of a special token decide if it takes the white space around it, so each is tested within a text.
    special = [token.content for token in reference.get_added_tokens_decoder().values()][:64]
    texts = [*_SEVERAL_KINDS, *(f"a {token} b{token}c\n" for token in special)]
    # Truncation and padding are settings of use; they do not decide how text is split.
    for tokenizer in (reference, other):
        tokenizer.no_truncation()
        tokenizer.no_padding()
    explicit = {"add_bos_token", "add_eos_token"} & built.init_kwargs.keys()
    for add in (False,) if explicit else (False, True):
        one, two = (t.encode_batch(texts, add_special_tokens=add) for t in (reference, other))
        if (difference := _compare_encodings(reference, other, one, two)) is not None:
            return difference
    return None


def _compare_encodings(
    reference: Tokenizer, other: Tokenizer, one: Sequence[Encoding], two: Sequence[Encoding]
) -> str | None:
    """Returns the first difference between two encodings of the same texts, in ids or in decoded text, or None."""
    for a, b in zip(one, two, strict=True):
        if a.ids != b.ids:
            at = _find_first_difference(a.ids, b.ids)
            return f"{a.tokens[at : at + 3]} of tokenizer.json becomes {b.tokens[at : at + 3]}"
        # Equal ids may still decode differently, which would change every generated text.
        if reference.decode(a.ids, skip_special_tokens=False) != other.decode(a.ids, skip_special_tokens=False):
            return (
                f"{a.tokens[:3]} is read as {other.decode(a.ids[:3])!r}, by tokenizer.json as "
                f"{reference.decode(a.ids[:3])!r}"
            )
    return None


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Returns the bytes of each token by id; special tokens, and ids without a token, have none.

    Example:
        >>> token_bytes(AutoTokenizer.from_pretrained("gpt2"))[464]  # doctest: +SKIP
        b'The'
    """
    # The kind of tokenizer decides how the text of a token encodes bytes; only the serialized form names the kind.
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    by_byte = '"ByteLevel"' in json.dumps([backend.get("pre_tokenizer"), backend.get("decoder")])
    added = {token["id"]: (token["content"], token["special"]) for token in backend.get("added_tokens", [])}
    # Byte-level BPE maps each byte to a character: printable ones to themselves, the others to U+0100 onwards, in
    # order.
    shown = {c: c for c in (*range(33, 127), *range(161, 173), *range(174, 256))}
    hidden = {256 + n: c for n, c in enumerate(c for c in range(256) if c not in shown)}
    byte_of = shown | hidden
    pieces = [b""] * count_embedding_rows(tokenizer)
    for token, number in tokenizer.get_vocab().items():
        if number in added:
            content, special = added[number]
            pieces[number] = b"" if special else content.encode()
        # GPT-2, Llama 3, Qwen: one character for each byte.
        elif by_byte:
            pieces[number] = b"".join(bytes([byte_of[ord(c)]]) if ord(c) in byte_of else c.encode() for c in token)
        # Llama 2, Gemma: SentencePiece's byte fallback, <0x0A> for a line break.
        elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            pieces[number] = bytes([int(token[3:5], 16)])
        else:
            # WordPiece marks the continuation of a word by ##, SentencePiece a space by U+2581.
            pieces[number] = token.removeprefix("##").replace("▁", " ").encode()
    return pieces


def train_tokenizer(documents: Iterable[tuple[str, str]], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE, which can encode and decode every text, with at most `vocabulary` tokens.

    Args:
        documents: (content hash, text) pairs; of a large corpus `SAMPLE` characters are used.
        vocabulary: number of tokens, including 256 bytes, the end-of-text token and the padding token.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary < len(alphabet) + 2:
        raise RecipeError(
            f"data.vocab_size: {vocabulary} is too few; 256 bytes, {END} and {PAD} take {len(alphabet) + 2}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # All 256 bytes are tokens, even those that the data lacks, so that any later text can be encoded.
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_sample(documents), trainer)
    # Clean-up would remove spaces before punctuation when decoding, so that a text would not come back unchanged.
    tokenizer: PreTrainedTokenizerFast = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    return tokenizer


def _sample(documents: Iterable[tuple[str, str]]) -> list[str]:
    # heapq keeps the smallest item on top, so hashes are negated.
    heap: list[tuple[int, str]] = []  # the highest hash on top, to be evicted first
    size = 0
    for mark, text in documents:
        heapq.heappush(heap, (-int(mark, 16), text))
        size += len(text)
        # Evict as long as the rest has enough text; a single document is kept whatever its length.
        while len(heap) > 1 and size - len(heap[0][1]) >= SAMPLE:
            size -= len(heapq.heappop(heap)[1])
    # Ascending hashes: the same order whatever the order of the files.
    return [text for _, text in sorted(heap, reverse=True)]


class Encoder:
    """Encodes documents in batches, in threads of the Rust library (TOKENIZERS_PARALLELISM stays as set).

    Each document ends with the end-of-text token, and begins with the beginning-of-text token if the tokenizer's own
    rules add one, unless it is `complete`. No token spans two spans of a sequence: a prompt has the same tokens as when
    the model is asked.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        from tokenizers import Tokenizer

        # tokenizer.json may turn truncation on: turned off in a copy, which leaves the caller's tokenizer as it is.
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.end: int = tokenizer.eos_token_id
        self.begin: list[int] = beginning_tokens(tokenizer)
        # The end-of-text token may have a number beyond the vocabulary. This size decides the dtype of stored ids.
        self.pieces = max(count_embedding_rows(tokenizer), self.end + 1)
        # Any token can pad, since padding is never a label and is a document of its own in the attention mask.
        self.pad: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end
        named = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        # GPT-2's unknown token is its end of text, which does not count.
        self.unknown: int | None = tokenizer.unk_token_id if tokenizer.unk_token_id not in named else None
        # All that decides the tokens of a document: part of the key of cached tokens.
        self.key = compute_digest(self.backend.to_str(), self.begin, self.end)

    def __call__(self, documents: Sequence[Document]) -> list[list[Encoded]]:
        """Returns the tokens of each sequence of each document."""
        # One call for all sequences of all documents, which the Rust library spreads over its threads.
        flat = [(d, sequence) for d in documents for sequence in d.sequences]
        plain = all(len(sequence) == 1 for _, sequence in flat)
        # Only the slower one gives the offsets of tokens.
        encode = self.backend.encode_batch_fast if plain else self.backend.encode_batch
        encodings = encode(
            ["".join(piece.text for piece in sequence) for _, sequence in flat], add_special_tokens=False
        )
        # A generator in the order of `flat`, from which the next line takes each document's sequences.
        encoded = (self._finish(*pair, encoding) for pair, encoding in zip(flat, encodings, strict=True))
        return [[next(encoded) for _ in d.sequences] for d in documents]

    def first_of(self, document: Document) -> list[int]:
        """Returns the tokens of a document's first sequence."""
        sequence = document.sequences[0]
        encoding = self.backend.encode("".join(piece.text for piece in sequence), add_special_tokens=False)
        return self._finish(document, sequence, encoding).tokens

    def _finish(self, document: Document, sequence: tuple[TextSpan, ...], encoding: Encoding) -> Encoded:
        tokens: list[int] = encoding.ids
        begin, end = ([], []) if document.complete else (self.begin, [self.end])
        # Plain text: no mask means that all tokens are trained on.
        if len(sequence) == 1 and sequence[0].trained:
            return Encoded([*begin, *tokens, *end], None, document.label)
        # Nothing precedes the beginning-of-text token, so it can never be a label.
        marks = bytearray(len(begin))
        counts = _count_span_tokens(sequence, encoding)
        if counts is None:
            # A token crosses two spans: encode these apart, as the prompt is when the model is asked.
            parts = [self.alone(piece.text, first=n == 0) for n, piece in enumerate(sequence)]
            tokens, counts = [token for part in parts for token in part], [len(part) for part in parts]
        for piece, count in zip(sequence, counts, strict=True):
            marks += bytes([piece.trained]) * count
        # The end-of-text token belongs to the last span: after a trained answer the model learns to stop.
        marks += bytes([sequence[-1].trained]) * len(end)
        return Encoded([*begin, *tokens, *end], bytes(marks), document.label)

    def alone(self, text: str, *, first: bool = True) -> list[int]:
        """Returns the tokens of a span; the blank that some tokenizers prepend is kept for the `first` one only."""
        if first:
            return cast("list[int]", self.backend.encode(text, add_special_tokens=False).ids)
        # SentencePiece prepends a blank to each text. Encode the span after a line break, which takes the blank, and
        # drop the tokens of the line break.
        line, behind = (self.backend.encode(t, add_special_tokens=False).ids for t in ("\n", "\n" + text))
        if behind[: len(line)] == line:
            return cast("list[int]", behind[len(line) :])
        # The line break merged with the text into one token: encode the span on its own.
        return cast("list[int]", self.backend.encode(text, add_special_tokens=False).ids)


def _count_span_tokens(sequence: tuple[TextSpan, ...], encoding: Encoding) -> list[int] | None:
    """Returns the number of tokens of each span, or None if a token crosses two of them."""
    # `at`: end of the span in characters. `begun`: its first token.
    counts, at, begun = [], 0, 0
    total = sum(len(piece.text) for piece in sequence)
    for piece in sequence:
        at += len(piece.text)
        upto = at
        first = None
        # The tokenizer may drop white space, which then has no token.
        while upto < total and (first := encoding.char_to_token(upto)) is None:
            upto += 1
        if first is None:
            first = len(encoding.ids)
        # The token of the next span's first character begins before that span.
        elif (place := encoding.token_to_chars(first)) is not None and place[0] < at:
            return None
        counts.append(first - begun)
        begun = first
    return counts
