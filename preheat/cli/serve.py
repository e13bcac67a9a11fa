"""The `preheat serve` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.options.remote_folder import find_local_folder
from preheat.cli.views.console import Base, Checkpoint, Json
from preheat.cli.views.output import say

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject
    from preheat.inference.serving import Engine
    from preheat.recipe import Recipe

__all__ = ["serve"]

_PROMPT = "Hello"
_TOKENS = 32
"""The request with which a server is measured."""
_LENGTH = 4096
"""Default of `--length` for models with more positions: their whole cache may not fit."""


def serve(
    run: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="The folder of a run, or of a Hugging Face model.")],
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="The server: llama.cpp, transformers or vllm; auto: the one that is installed (vllm on a GPU only).",
        ),
    ] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Precision of the weights, as for `preheat export`: llama.cpp f16, q8_0, ..."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            min=2,
            help="Tokens of prompt and answer; default: the model's, up to 4,096. transformers' server has no limit.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; another than 127.0.0.1 is open to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8000,
    prompt: Annotated[str, typer.Option("--prompt", help="The text with which the server is measured.")] = _PROMPT,
    check: Annotated[bool, typer.Option("--check", help="Stop after the first answer.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the export and print the command; start no server.")
    ] = False,
    checkpoint: Checkpoint = None,
    base: Base = None,
    json: Json = False,
) -> None:
    """Serve a run or a model with an OpenAI-style API, by llama.cpp, transformers or vLLM.

    Exports the model for the server, predicts memory and latency, starts the server, and measures them with one
    request.

    Example: `preheat serve runs/mine`, `preheat serve runs/mine --engine llama.cpp --dtype q8_0 --port 9000`
    """
    import shlex

    from preheat import remote_code
    from preheat.cli.views.console import emit
    from preheat.engine.checkpoint import at_checkpoint
    from preheat.errors import RecipeError, RunError
    from preheat.hardware.probe import probe
    from preheat.inference import serving
    from preheat.sanitize import shorten

    chosen = serving.choose_engine(engine, probe().kind, installed=not dry_run)
    if length is not None and chosen == "transformers":
        raise RecipeError(
            f"--length {length}: transformers' server has no limit; leave it out, or use --engine llama.cpp"
        )
    source = at_checkpoint(Path(find_local_folder(run)), checkpoint)
    recipe = _read_recipe(source, base)
    _require_servable(recipe, source, chosen)
    positions = _count_positions(recipe)
    if positions and length is not None and length > positions:
        raise RecipeError(f"--length {length}: is longer than the model's {positions} positions; use fewer")
    if length is None:
        length = min(positions or _LENGTH, _LENGTH)
    model = _export(source, chosen, dtype, base)
    name = source.resolve().name
    command = serving.build_command(
        chosen, model, name=name, host=host, port=port, length=length, trusted=remote_code.is_allowed()
    )
    predicted = _predict(recipe, model, length, prompt)
    # Servers on all addresses are asked at this machine's own.
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    result: JsonObject = {
        "engine": chosen,
        "model": str(model),
        "name": name,
        "url": url,
        "length": length,
        "command": command,
        "predicted": predicted,
    }
    if not json:
        say(f"{chosen}: {model}")
        say(_describe(predicted, "predicted", of_process=False))
    if dry_run:
        emit(result) if json else say(shlex.join(command))
        return
    if _is_taken(address, host, port):
        raise RunError(f"--port {port}: another program listens there; use another --port")
    if not _is_loopback(host):
        say(
            f"note: --host {host}: anybody who reaches this machine can use the server, which has no password",
            error=True,
        )
    chat = _has_template(model)
    with serving.running_server(command, url, _log_file(model)) as process:
        # The name in transformers' answers is the path that it serves.
        asked_name = str(model) if chosen == "transformers" else name
        serving.ask(url, asked_name, prompt, tokens=2, chat=chat)  # the first request loads and compiles
        reply = serving.ask(url, asked_name, prompt, tokens=_TOKENS, chat=chat)
        result["measured"] = {
            "process_gib": _read_memory(process.pid),
            "seconds_to_first_token": reply.first_token,
            "tokens_per_second": reply.tokens_per_second,
        }
        result["answer"] = reply.text
        if json:
            emit(result)
        else:
            say(_describe(result["measured"], "measured", of_process=True))
            say(f"answer     {shorten(reply.text)}")
            kind, body = (
                ("chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}')
                if chat
                else ("completions", '{"prompt": "Hello", "max_tokens": 32}')
            )
            say(f"curl {url}/v1/{kind} -H 'Content-Type: application/json' -d '{body}'")
        if check:
            return
        say("serving; Ctrl-C ends it", error=True)
        code = process.wait()
        raise RunError(f"the server ended with code {code}; see {_log_file(model)}")


def _log_file(model: Path) -> Path:
    return (model if model.is_dir() else model.parent) / "server.log"


def _export(source: Path, engine: Engine, dtype: str | None, base: str | None) -> Path:
    """Writes the export that an engine reads, unless it is there already.

    Returns:
        The exported file for llama.cpp, the folder for the others.
    """
    import shutil

    from transformers.utils.logging import disable_progress_bar

    from preheat.cli.views.output import print_progress
    from preheat.compress.atomic_folder import choose_home
    from preheat.compress.export import registry
    from preheat.errors import RecipeError
    from preheat.files import to_json, write_atomic
    from preheat.inference.serving import FORMATS

    form = FORMATS[engine]
    is_folder = (source / "config.json").is_file() and not (source / "recipe.yaml").is_file()
    if is_folder and form == "hf":
        for key, value in (("--dtype", dtype), ("--base", base)):
            if value is not None:
                raise RecipeError(f"{key} {value}: {source} is served as it is; leave it out, or name a run")
        return source
    home, step = choose_home(source)
    out = home / "serving" / f"{form}{'' if dtype is None else f'-{dtype}'}{step}"
    stamp = {"weights": _describe_weights(source), "base": base}
    if _read_stamp(out) != stamp:
        # Of another checkpoint, or of an export that was interrupted.
        shutil.rmtree(out, ignore_errors=True)
        print_progress(f"exporting to {out}")
        disable_progress_bar()  # transformers shows a bar for each file
        registry.write(form, source, out, dtype=dtype, base=base)
        print_progress()
        write_atomic(out / _STAMP, to_json(stamp))
    return out if form == "hf" else next(iter(sorted(out.glob("*.gguf"))))


_STAMP = "served.json"
"""File in an export that names the weights which it was made from."""


def _describe_weights(source: Path) -> str:
    """Returns what identifies the weights of a run or folder: the newest checkpoint, or the files' times."""
    from preheat.compress.atomic_folder import choose_home

    home, _ = choose_home(source)
    folder = source / "checkpoints" if home == source else source
    files = sorted(folder.glob("step-*") if home == source and folder.is_dir() else source.glob("*.safetensors"))
    return "; ".join(f"{file.name} {file.stat().st_mtime_ns}" for file in files)


def _read_stamp(out: Path) -> object:
    import json

    try:
        return json.loads((out / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _read_recipe(source: Path, base: str | None) -> Recipe:
    """Returns a recipe of the served model: of its run, of its folder, or of an adapter's base."""
    from preheat.compress.atomic_folder import choose_home
    from preheat.inference.load import read_recipe, require_model
    from preheat.recipe import Model, Recipe

    require_model(source)
    home, _ = choose_home(source)
    if (home / "recipe.yaml").is_file():
        return read_recipe(home, base)
    if (source / "adapter_config.json").is_file():
        from preheat.ops.adapters.peft_io import read_folder

        return Recipe(model=Model(path=base or read_folder(source, "adapter").base))
    return Recipe(model=Model(path=str(source)))


def _require_servable(recipe: Recipe, source: Path, engine: Engine) -> None:
    """Raises RecipeError if the server would have to run code from the export's folder and does not."""
    from preheat import remote_code
    from preheat.compress.export.huggingface import needs_code
    from preheat.errors import RecipeError

    if engine == "llama.cpp" or not needs_code(recipe):
        return
    if engine == "transformers":
        raise RecipeError(
            f"--engine transformers: {source} needs the Python code of its class, which is no part of transformers, "
            "and transformers' server runs no code from a folder; use preheat generate or preheat chat"
        )
    if not remote_code.is_allowed():
        raise RecipeError(
            f"--engine {engine}: {source} needs the Python code of its class; add --trust-remote-code if you trust it"
        )


def _count_positions(recipe: Recipe) -> int:
    """Returns the positions of the model; 0: no limit."""
    from preheat.models import configs

    config = configs.of(recipe, recipe.data.vocab_size).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 0)


def _predict(recipe: Recipe, model: Path, length: int, prompt: str) -> JsonObject:
    """Predicts memory and latency on this machine, from the size of the export and the machine's measured rates."""
    from preheat.hardware.rates import Rates
    from preheat.planning.analytic import count_model_parameters, estimate_prefill_flops
    from preheat.planning.kv_cache_size import count_cache_bytes
    from preheat.planning.plan_request import choose_hardware

    size = count_model_parameters(recipe)
    files = [model] if model.is_file() else [*model.glob("*.safetensors")]
    weights = sum(file.stat().st_size for file in files)
    cache = count_cache_bytes(size.config, length)
    device, rates, _ = choose_hardware(None, recipe, 1)
    assert isinstance(rates, Rates), "this machine's rates are measured"
    # A pass reads the weights of a token's experts once; a prompt is computed at once.
    read = weights * size.active / size.parameters
    tokens = max(1, len(prompt) // 4)
    prefill = estimate_prefill_flops(size, tokens) / max(rates.peak_matrix_rate.values())
    return {
        "weights_gib": weights / 2**30,
        "cache_gib": cache / 2**30,
        "seconds_to_first_token": max(prefill, read / rates.bandwidth),
        "tokens_per_second": rates.bandwidth / read,
        "device": device.name,
    }


def _describe(figures: JsonObject, label: str, *, of_process: bool) -> str:
    from preheat.core.units import format_memory

    memory = (
        f"{format_memory(figures['process_gib'])} in the server's process"
        if of_process
        else f"weights {format_memory(figures['weights_gib'])}, cache {format_memory(figures['cache_gib'])}"
    )
    speed = figures["tokens_per_second"]
    rate = "unknown" if speed is None else f"{speed:,.0f} tokens/s{'' if of_process else ' at most'}"
    from preheat.core.units import format_three_digits

    first = format_three_digits(1000 * figures["seconds_to_first_token"])
    least = "" if of_process else "at least "
    return f"{label:<11}{memory}; first token after {least}{first} ms, then {rate}"


def _has_template(model: Path) -> bool:
    """Returns True if the tokenizer of an export has a chat template."""
    import json

    if model.is_file():
        from gguf import GGUFReader

        return GGUFReader(model).get_field("tokenizer.chat_template") is not None
    if (model / "chat_template.jinja").is_file():
        return True
    settings = model / "tokenizer_config.json"
    return settings.is_file() and bool(json.loads(settings.read_text(encoding="utf-8")).get("chat_template"))


def _is_taken(address: str, host: str, port: int) -> bool:
    """Returns True if a program listens at the address of `--host`."""
    import socket

    from preheat.errors import RecipeError

    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except socket.gaierror as error:
        raise RecipeError(f"--host {host}: {error.strerror}; use an address of this machine") from None
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_memory(process: int) -> float:
    """Returns the resident memory of a process and its children in GiB."""
    import psutil

    parent = psutil.Process(process)
    return sum(int(each.memory_info().rss) for each in (parent, *parent.children(recursive=True))) / 2**30
