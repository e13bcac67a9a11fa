"""preheat eval"""

from __future__ import annotations

from typing import Annotated

import typer

from preheat.cli.show import Json

__all__ = ["evaluate"]


def evaluate(
    model: Annotated[
        str,
        typer.Argument(metavar="RUN|MODEL|ADAPTER", help="The folder of a run, a Hugging Face model, or an adapter of peft's."),
    ],
    data: Annotated[
        str | None, typer.Option("--data", help="A file, folder or source to read instead of the run's validation rows.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="At most so many rows.")] = 1000,
    length: Annotated[
        int | None, typer.Option("--length", min=2, help="Tokens a row; the run's, or 512, when not given.")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="The base of an adapter's folder, where it names another place.")
    ] = None,
    json: Json = False,
) -> None:
    """Mean loss a token and perplexity of a run or a model on held-out text.

    Example: `preheat eval runs/demo`, `preheat eval my-model --data notes.txt`
    """
    import math
    from dataclasses import replace

    from preheat.cli.show import console, emit
    from preheat.data import Rows, evaluation_batches, prepare
    from preheat.data.kinds import require_examples
    from preheat.engine.evaluate import evaluate as measure
    from preheat.errors import RecipeError
    from preheat.training.opened import open_model

    opened = open_model(model, base=base)
    recipe = opened.recipe
    if data is None and opened.step is None:
        raise RecipeError("--data: is needed with a model folder: name the text to evaluate on")
    settings = (
        recipe.data
        if data is None
        else replace(recipe.data, source=data, validation=0.0, limit=None, prompt=None, completion=None)
    )
    prepared = prepare(settings, length=length or recipe.batch.length, seed=recipe.seed, tokenizer=opened.tokenizer_folder)
    require_examples(recipe, prepared)
    held_out = prepared.validation if data is None else prepared.train
    assert isinstance(held_out, Rows), "a stream is read for training only"
    loss, tokens = measure(opened.build, evaluation_batches(held_out, micro=min(8, recipe.batch.size), limit=rows))
    made = {"model": model, "loss": loss, "perplexity": math.exp(loss), "tokens": tokens, "tasks": {}}
    if json:
        emit(made)
    else:
        console().print(
            f"loss {loss:.4f} nats a token, perplexity {math.exp(loss):.2f}, over {tokens:,} tokens of {data or 'the validation rows'}"
        )
