"""Makes what every contender reads: one initial model and one file of token rows. `prepare.py OUT SHAPE.json`.

SHAPE.json holds {width, layers, heads, feed_forward, vocabulary, length, rows, seed, tokenizer}. OUT gets `model/` (a Hugging
Face folder, fp32, embeddings tied), `litgpt/` (the same safetensors and nothing else, for litgpt's converter) and `tokens.npy`
(int32 [rows, length]). The text is the source of Python's standard library; each file is a document that begins with the
tokenizer's beginning-of-text piece; the stream is cut into rows and the rows are shuffled.
"""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def iterate_documents() -> Iterator[str]:
    """The files of the standard library, in the order of their paths; tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def load_encoder(folder: str, vocabulary: int) -> tuple[Any, str]:
    """A tokenizer and where it came from: the folder's, else a BPE trained here on the same text."""
    import tokenizers

    file = Path(folder) / "tokenizer.json"
    if file.is_file():
        found = tokenizers.Tokenizer.from_file(str(file))
        if found.get_vocab_size() > vocabulary:
            raise SystemExit(
                f"--tokenizer {folder}: has {found.get_vocab_size()} pieces, the model's embedding {vocabulary}"
            )
        return found, "the tokenizer given"
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(iterate_documents(), trainer)
    return made, f"a BPE of {made.get_vocab_size()} tokens trained on the text"


def write_tokens(out: Path, shape: dict[str, Any]) -> str:
    import numpy as np

    tokenizer, origin = load_encoder(shape["tokenizer"], shape["vocabulary"])
    begin, need = tokenizer.token_to_id("<s>"), shape["rows"] * shape["length"]
    if begin is None:
        raise SystemExit(f"--tokenizer {shape['tokenizer']}: has no piece <s> to begin a document with")
    # Every n-th file first, so that a short stream is not the first letters of the alphabet only.
    texts = list(iterate_documents())
    stream: list[int] = []
    for text in (texts[i] for start in range(7) for i in range(start, len(texts), 7)):
        if len(stream) >= need:
            break
        stream += [begin, *tokenizer.encode(text, add_special_tokens=False).ids]
    if len(stream) < need:
        raise SystemExit(f"--steps: need {need:,} tokens, the standard library has {len(stream):,}; take fewer steps")
    rows = np.asarray(stream[:need], dtype=np.int32).reshape(shape["rows"], shape["length"])
    np.random.default_rng(shape["seed"]).shuffle(rows)
    np.save(out / "tokens.npy", rows)
    return f"standard library of Python {sys.version.split()[0]}, {origin}"


def write_model(out: Path, shape: dict[str, Any]) -> None:
    import transformers

    transformers.set_seed(shape["seed"])
    config = transformers.LlamaConfig(
        hidden_size=shape["width"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        intermediate_size=shape["feed_forward"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=shape["length"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(out / "model")
    (out / "litgpt").mkdir()
    shutil.copy(out / "model" / "model.safetensors", out / "litgpt")


def main() -> None:
    out = Path(sys.argv[1])
    shape = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    text = write_tokens(out, shape)
    write_model(out, shape)
    print("\n" + json.dumps({"text": text}))


if __name__ == "__main__":
    main()
