"""The `preheat chat` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.options import generation
from preheat.cli.options.remote_folder import find_local_folder
from preheat.cli.views.console import Base, Checkpoint
from preheat.cli.views.line_input import read_line
from preheat.cli.views.output import say, write_text
from preheat.files import to_json
from preheat.hardware.interrupts import raise_keyboard_interrupt
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from preheat.inference.conversation import Conversation

__all__ = ["chat"]

HELP = """\
/system TEXT   set the system message; without TEXT: show it
/reset         forget the conversation, not the system message
/save FILE     append the conversation to FILE as a row of training data (JSONL, OpenAI messages)
/quit          end (also Ctrl-D); Ctrl-C interrupts an answer"""


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL|ADAPTER",
            help="The folder of a run, of one of its checkpoints, of a Hugging Face model, or of a PEFT adapter.",
        ),
    ],
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Maximum number of tokens of each answer.")] = 256,
    temperature: generation.Temperature = 0.0,
    top_p: generation.TopP = 1.0,
    top_k: generation.TopK = 0,
    min_p: generation.MinP = 0.0,
    repetition_penalty: generation.Penalty = 1.0,
    stop: generation.Stop = None,
    set: generation.Set = None,
    seed: generation.Seed = 0,
    checkpoint: Checkpoint = None,
    template: generation.ChatTemplate = None,
    base: Base = None,
    before: Annotated[
        bool, typer.Option("--before", help="Of a run: chat with its model as it was before the first step.")
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help=(
                'Read a JSON object per line, such as {"message": "Hello"} or {"reset": true}, and write one per line: '
                "ready, the request, text as it is generated, answer, error. A model without a chat template continues "
                "each message as plain text."
            ),
        ),
    ] = False,
) -> None:
    """Chat with a run or a model, on a terminal or with one message per line from a pipe. /help lists the commands of
    a chat.

    Example: `preheat chat runs/mine`; from a script: `echo "Who are you?" | preheat chat runs/mine`
    """
    from preheat.errors import PreheatError, RecipeError
    from preheat.inference.conversation import Conversation
    from preheat.inference.load import load_model

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
    if before and checkpoint is not None:
        raise RecipeError(f"--before: the model before training has no checkpoint; leave --checkpoint {checkpoint} out")
    opened = load_model(find_local_folder(model), checkpoint=checkpoint, base=base, at_start=before)
    if json:
        from preheat.cli.chat_json import choose_format, serve_requests

        serve_requests(opened, *choose_format(opened, model, template), settings, system=system, seed=seed)
        return
    layout, source = generation.choose_template(opened, model, template, True)
    assert layout is not None
    generation.note(f"{model}{f', step {opened.step:,}' if opened.step is not None else ''}: {source}")
    # The conversation keeps its cache: each answer reads only the new tokens.
    talk = Conversation(opened, layout, settings, system=system, seed=seed)
    live = sys.stdin.isatty()
    if live:
        import readline  # noqa: F401  # arrow keys and history at the prompt

        generation.note("/help lists commands; /quit ends")
    while (line := read_line(live)) is not None:
        line = line.strip()
        try:
            if line == "/quit":
                break
            if line.startswith("/"):
                _run_command(talk, line)
            elif line:
                _print_answer(talk, line)
        except PreheatError as error:
            if not live:  # a script cannot correct its input
                raise
            say(f"error: {shorten(str(error), 700)}", error=True)


# Commands begin with a slash and never reach the model.
def _run_command(talk: Conversation, line: str) -> None:
    from preheat.errors import RecipeError, suggest_nearest

    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/system":
        if rest:
            talk.system = rest
        generation.note(f"system: {talk.system or '(none)'}")
    elif name == "/reset":
        talk.reset()
        generation.note("the conversation starts over")
    elif name == "/save":
        if not rest:
            raise RecipeError("/save: needs a file, e.g. /save talk.jsonl")
        _save(talk, Path(rest).expanduser())
    elif name == "/help":
        generation.note(HELP)
    else:
        raise RecipeError(
            f"{name}: no such command; {suggest_nearest(name, ['/help', '/quit', '/reset', '/save', '/system'])}"
        )


def _save(talk: Conversation, file: Path) -> None:
    from preheat.errors import RecipeError

    if not talk.turns:
        raise RecipeError(f"/save {file}: the conversation is empty")
    try:
        # One row per conversation, appended, so that a file can collect training data.
        with file.open("a", encoding="utf-8") as out:
            out.write(to_json({"messages": talk.messages}) + "\n")
    except OSError as error:
        raise RecipeError(f"/save {file}: cannot be written ({error.strerror})") from None
    generation.note(f"{len(talk.messages)} messages appended to {file}")


def _print_answer(talk: Conversation, line: str) -> None:
    watched = generation.Watched()
    watched.kind = talk.opened.build.device.kind
    try:
        with raise_keyboard_interrupt(), watched:
            answer = talk.say(line, write_text)
    except KeyboardInterrupt:
        say()
        generation.note("interrupted; the text so far stays in the conversation")
        return
    say()
    watched.tokens = len(answer.written.tokens)
    if answer.dropped:
        generation.note(
            f"the oldest {answer.dropped} messages were dropped: with them the conversation would exceed the "
            "model's positions"
        )
    positions = talk.opened.build.model.positions
    if answer.written.finish_reason == "context":
        generation.note(f"cut off: the model's {positions:,} positions end here; /reset starts over")
    elif answer.written.finish_reason == "length":
        generation.note(f"cut off after {watched.tokens:,} tokens; --tokens allows more")
    of = f" of {positions:,}" if positions else ""
    generation.note(
        f"{watched.summary()}; {answer.prompt + watched.tokens:,}{of} positions in use, {answer.read:,} tokens read"
    )
