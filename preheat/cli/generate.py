"""The `preheat generate` command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.options import generation
from preheat.cli.options.remote_folder import find_local_folder
from preheat.cli.views.console import Base, Checkpoint, Json
from preheat.cli.views.output import write_text
from preheat.core.json_types import JsonObject

if TYPE_CHECKING:
    from preheat.data.chat.messages import Message

__all__ = ["generate"]


def generate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL|ADAPTER...",
            help=(
                "The folder of a run, of one of its checkpoints, of a Hugging Face model, or of a PEFT adapter; "
                "several are shown side by side."
            ),
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="A prompt to continue. Repeatable."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            help='Prompts, one per line; a .jsonl file has {"prompt": ...} or {"messages": [...]} in each line.',
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help=generation.HELP["max_new_tokens"])] = 64,
    temperature: generation.Temperature = 0.0,
    top_p: generation.TopP = 1.0,
    top_k: generation.TopK = 0,
    min_p: generation.MinP = 0.0,
    repetition_penalty: generation.Penalty = 1.0,
    stop: generation.Stop = None,
    set: generation.Set = None,
    seed: generation.Seed = 0,
    checkpoint: Checkpoint = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Apply the chat template to the prompts, or not; default: as the run was trained.",
        ),
    ] = None,
    template: generation.ChatTemplate = None,
    base: Base = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts per batch.")] = 8,
    json: Json = False,
) -> None:
    """Generate text with runs or models, and stream it to the terminal.

    Example: `preheat generate runs/demo --prompt "def main("`; two models: `preheat generate base runs/mine --file
    prompts.txt`
    """
    from preheat.cli.views.console import emit
    from preheat.data.rows.prompt_files import read_prompts
    from preheat.inference.load import load_model

    prompts: list[str | list[Message]] = [*(prompt or []), *(read_prompts(file) if file is not None else [])]
    settings = generation.build_sampling(
        set or (),
        max_new_tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
    )
    # No prompt: the model writes from the beginning of a text.
    prompts = prompts or [""]
    # Messages need a template; plain texts follow the run.
    use_chat = True if chat is None and any(not isinstance(p, str) for p in prompts) else chat
    watched, texts = generation.Watched(), []
    for model in models:
        opened = load_model(find_local_folder(model), checkpoint=checkpoint, base=base)
        layout, source = generation.choose_template(opened, model, template, use_chat)
        if not json:
            generation.note(f"{model}{f', step {opened.step:,}' if opened.step is not None else ''}: {source}")
        # Several models are printed side by side at the end, so nothing is streamed.
        hear = None if json or len(models) > 1 else _Screen(prompts, layout is not None).hear
        watched.kind = opened.build.device.kind
        with watched:
            generated = opened.write(prompts, settings, template=layout, seed=seed, batch=batch, on_text=hear)
        watched.tokens += sum(len(text.tokens) for text in generated)
        watched.compiled |= any(text.compiled for text in generated)
        texts.append(
            [
                {
                    "model": model,
                    "step": opened.step,
                    "prompt": p,
                    "text": t.text,
                    "tokens": len(t.tokens),
                    "finish_reason": t.finish_reason,
                }
                for p, t in zip(prompts, generated, strict=True)
            ]
        )
        del opened  # frees its memory before the next model is loaded
    if json:
        every = [text for group in texts for text in group]
        # One text: its fields are at the top level, for scripts.
        emit({**(every[0] if len(every) == 1 else {}), "texts": every, **watched.figures()})
        return
    if len(models) > 1:
        _print_side_by_side(models, texts)
    generation.note(watched.summary())


class _Screen:
    """Streams a batch of texts to standard output in order; text of later rows is buffered until their turn."""

    def __init__(self, prompts: Sequence[str | list[Message]], chat: bool):
        self.prompts, self.chat = prompts, chat
        self.row = -1
        self.parts: dict[int, list[str | None]] = {}

    def hear(self, row: int, part: str | None) -> None:
        # None marks the end of a row.
        self.parts.setdefault(row, []).append(part)
        if self.row < 0:
            self._start_next()
        # The end of one row may release the buffered parts of the next.
        while parts := self.parts.pop(self.row, []):
            for text in parts:
                if text is not None:
                    write_text(text)
                else:
                    write_text("\n")
                    self._start_next()

    def _start_next(self) -> None:
        self.row += 1
        if self.row == len(self.prompts):
            return
        if self.row:
            write_text("─" * 40, "\n")
        prompt = self.prompts[self.row]
        if not self.chat:
            write_text(_format_prompt(prompt))
        elif len(self.prompts) > 1:
            write_text(_format_prompt(prompt), "\n")


def _format_prompt(prompt: str | list[Message]) -> str:
    """Returns a prompt as text; chat messages become one line each."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def _print_side_by_side(models: list[str], texts: list[list[JsonObject]]) -> None:
    """Prints each prompt with the text of each model: in columns if the terminal is wide enough, else one per line."""
    from rich.table import Column, Table
    from rich.text import Text

    from preheat.cli.views.console import build_console

    screen = build_console()
    for number, row in enumerate(zip(*texts, strict=True)):
        if number:
            write_text("─" * 40, "\n")
        write_text(_format_prompt(row[0]["prompt"]), "\n")
        if screen.is_terminal and screen.width >= 40 * len(models):
            table = Table(*[Column(Text(name, style="bold")) for name in models], box=None, pad_edge=False, expand=True)
            table.add_row(*[Text(text["text"]) for text in row])
            screen.print(table)
        else:
            for text in row:
                write_text(f"[{text['model']}]{text['text']}", "\n")
