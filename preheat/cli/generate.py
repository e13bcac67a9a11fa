"""preheat generate"""

from __future__ import annotations

from typing import Annotated

import typer

from preheat.cli.show import Json

__all__ = ["generate"]


def generate(
    model: Annotated[
        str,
        typer.Argument(metavar="RUN|MODEL|ADAPTER", help="The folder of a run, a Hugging Face model, or an adapter of peft's."),
    ],
    prompt: Annotated[str, typer.Option("--prompt", help="The beginning to continue.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to write.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Decides the draws at a temperature above 0.")] = 0,
    base: Annotated[
        str | None, typer.Option("--base", help="The base of an adapter's folder, where it names another place.")
    ] = None,
    json: Json = False,
) -> None:
    """Writes text with a run or a model.

    Example: `preheat generate runs/demo --prompt "def main("`
    """
    import torch

    from preheat.cli.show import emit
    from preheat.errors import RecipeError
    from preheat.models.adapter import generate as write
    from preheat.training.opened import open_model

    opened = open_model(model, base=base)
    start = opened.tokenizer.encode(prompt)
    if not start:
        first = opened.tokenizer.bos_token_id if opened.tokenizer.bos_token_id is not None else opened.tokenizer.eos_token_id
        if first is None:
            raise RecipeError("--prompt: is needed: the tokenizer has no token to begin with")
        start = [first]
    positions = opened.build.model.positions
    if positions and len(start) >= positions:
        raise RecipeError(f"--prompt: has {len(start)} tokens, the model only {positions} positions; shorten it")
    torch.manual_seed(seed)
    ids = torch.tensor([start], device=opened.build.torch_device)
    room = min(tokens, positions - len(start)) if positions else tokens
    out = write(opened.build.trained[0], ids, count=room, temperature=temperature, stop=opened.tokenizer.eos_token_id)
    text = opened.tokenizer.decode(out[0, len(start) :], skip_special_tokens=True)
    if json:
        emit({"prompt": prompt, "text": text, "tokens": out.shape[1] - len(start)})
    else:
        print(prompt + text)
