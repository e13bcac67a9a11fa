"""Shell scripts that start another trainer: the command's flags as keys, read without running the script. No torch.

`swift sft --lora_rank 8` is the key `lora_rank`, also as `--lora-rank=8`; `--a.b 1` is `a.b`. A file that the command
names is read too, and its flags come first. Launchers before the command, and variables, state the devices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from preheat.errors import RecipeError, suggest_nearest
from preheat.interop.keys import (
    Assumed,
    Computed,
    Entry,
    Handler,
    NoEffect,
    Outcome,
    Takes,
    assume,
    ignore,
    iterate_entries,
)
from preheat.interop.settings import Settings
from preheat.interop.shell_words import Command, Word, list_commands
from preheat.recipe.yaml_io import compose, read_text
from preheat.sanitize import quote_value, shorten

__all__ = ["ENVIRONMENT", "PROGRAMS", "Program", "ShellRun", "find_command", "is_shell", "read_shell"]


@dataclass(frozen=True)
class Program:
    """A command that trains.

    Attributes:
        format: name of the format that its flags are of; empty if preheat reads none.
        uses_all: it starts a process for each device that it sees, without being told.
        refusal: why it is not planned.
    """

    format: str = ""
    uses_all: bool = False
    refusal: str = ""


_OTHER_TRL = Program(refusal="of TRL's commands, sft and dpo are read; rewards, kto, orpo and cpo are not planned")
_OTHER_MEGATRON = Program(refusal="of Megatron-LM's scripts, pretrain_gpt.py is read")

PROGRAMS: Mapping[str, Program] = {
    **dict.fromkeys(("trl sft", "trl/scripts/sft.py"), Program("trl", uses_all=True)),
    **dict.fromkeys(("trl dpo", "trl/scripts/dpo.py"), Program("trl-dpo", uses_all=True)),
    **{f"trl {task}": _OTHER_TRL for task in ("grpo", "kto", "reward", "rloo", "gkd", "online_dpo")},
    **dict.fromkeys(("llamafactory-cli train", "lmf train"), Program("llamafactory", uses_all=True)),
    **dict.fromkeys(("axolotl train", "axolotl.cli.train"), Program("axolotl", uses_all=True)),
    "run_clm.py": Program("transformers"),
    "swift sft": Program("ms-swift"),
    "swift pt": Program("ms-swift-pt"),
    "swift rlhf": Program("ms-swift-rlhf"),
    **dict.fromkeys(("megatron sft", "megatron pt"), Program("megatron-swift")),
    "megatron rlhf": Program(refusal="of ms-swift's Megatron commands, sft and pt are read; write it as swift rlhf"),
    "pretrain_gpt.py": Program("megatron"),
    **dict.fromkeys(("pretrain_bert.py", "pretrain_t5.py", "pretrain_mamba.py", "pretrain_vlm.py"), _OTHER_MEGATRON),
}
"""Commands by name: of a program with its subcommand, of a script by the end of its path, of a module behind `-m`."""


@dataclass(frozen=True)
class ShellRun:
    """A run as a shell script starts it.

    Attributes:
        entries: its keys.
        table: handlers of keys that are not of the trainer: launchers, variables, other commands.
        accelerate: accelerate's file, if the launcher names one that is here.
    """

    entries: tuple[Entry, ...]
    table: Mapping[str, Handler]
    accelerate: Path | None = None


@dataclass
class _Call:
    """A command of a known name, with the words before and behind the name."""

    name: str
    command: Command
    prefix: Sequence[Word]
    arguments: Sequence[Word]


def is_shell(where: str) -> bool:
    """Returns True for the name of a shell script."""
    return where.endswith((".sh", ".bash"))


def read_shell(text: str, where: str, home: Path = Path()) -> ShellRun:
    """Reads the first command of a script that trains; later ones are keys that are not understood.

    Args:
        where: name of the script in errors.
        home: its folder, which relative paths may start from.

    Raises:
        RecipeError: it has no such command, or one that is not planned, or its file is not here.

    Example:
        >>> run = read_shell("torchrun --nproc_per_node 2 run_clm.py --seed=7 --bf16", "f.sh")
        >>> [(entry.name, entry.value) for entry in run.entries]
        [('torchrun.nproc_per_node', 2), ('command', 'run_clm.py'), ('seed', 7), ('bf16', True)]
    """
    call, *others = _find_calls(text, where)
    launch = _read_launch(call, where)
    entries = [*launch, Entry(("command",), call.name, where, call.command.line), *_read_flags(call, where, home)]
    entries += [Entry(("not read",), _show(other), where, other.command.line) for other in others]
    file = next((entry.value for entry in launch if entry.name == "accelerate.config_file"), None)
    beside = None if file is None or isinstance(file, Computed) else _find_file(str(file), home)
    table = _LAUNCH | _build_table(launch, uses_all=PROGRAMS[call.name].uses_all, has_file=beside is not None)
    return ShellRun(tuple(entries), table, beside)


def find_command(text: str, where: str) -> tuple[str, int]:
    """Returns the name of the first command of a script that trains, of `PROGRAMS`, and its line.

    Raises:
        RecipeError: it has no such command, or one that is not planned.
    """
    first = _find_calls(text, where)[0]
    return first.name, first.command.line


def _find_calls(text: str, where: str) -> list[_Call]:
    commands = list_commands(text, where)
    calls = [call for command in commands if (call := _find_call(command)) is not None]
    if not calls:
        raise RecipeError(f"{where}: {_describe_absence(commands)}")
    if refusal := PROGRAMS[calls[0].name].refusal:
        raise RecipeError(f"{where}:{calls[0].command.line}: {calls[0].name}: {refusal}")
    return calls


_PRINTS = ("echo", "printf", "cat", "which", "pip", "exit", "[", "[[", "test", "ls")
"""Programs that may name a command without starting it."""


def _find_call(command: Command) -> _Call | None:
    """Returns the command's call of a program of `PROGRAMS`; None if it calls none."""
    arguments = command.words
    if arguments[0].text in _PRINTS:
        return None
    for i, word in enumerate(arguments):
        following = arguments[i + 1].text if i + 1 < len(arguments) else ""
        pair = f"{PurePosixPath(word.text).name} {following}"
        if pair in PROGRAMS:
            return _Call(pair, command, arguments[:i], arguments[i + 2 :])
        if word.text == "-m" and following in PROGRAMS:
            return _Call(following, command, arguments[:i], arguments[i + 2 :])
        for name in PROGRAMS:
            if name.endswith(".py") and f"/{word.text}".endswith(f"/{name}"):
                return _Call(name, command, arguments[:i], arguments[i + 1 :])
    return None


def _describe_absence(commands: Sequence[Command]) -> str:
    """Returns why nothing is read from a script without a known command."""
    scripts = [word.text for command in commands for word in command.words if word.text.endswith(".py")]
    if scripts:
        return (
            f"starts {shorten(scripts[0])}, whose flags are its own; name that script in place of this one, if it "
            "calls TRL's or transformers' trainer"
        )
    programs = {name.partition(" ")[0] for name in PROGRAMS}
    near = next((c for c in commands if PurePosixPath(c.words[0].text).name in programs and len(c.words) > 1), None)
    if near is not None:
        typed = f"{PurePosixPath(near.words[0].text).name} {near.words[1].text}"
        return (
            f"line {near.line}: {shorten(typed)}: trains nothing that is read; {suggest_nearest(typed, list(PROGRAMS))}"
        )
    return f"has no command that is read ({', '.join(name for name, p in PROGRAMS.items() if p.format)})"


def _show(call: _Call) -> str:
    return " ".join([call.name, *(word.text for word in call.arguments)])


# The flags of a command.


@dataclass
class _Flag:
    """A flag with its values; without any it is a switch."""

    name: str
    line: int
    values: list[Word] = field(default_factory=list)
    computed: bool = False


_FLAG = re.compile(r"--?([A-Za-z_][\w.:-]*)(?:=(.*))?", re.DOTALL)
_HYDRA = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def _parse_flags(words: Sequence[Word]) -> tuple[list[_Flag], list[Word]]:
    """Returns the flags of a command, and its other words."""
    flags: list[_Flag] = []
    others: list[Word] = []
    for word in words:
        match = _FLAG.fullmatch(word.text)
        if match and (not word.is_computed or word.text.startswith("--")):
            values = [] if match[2] is None else [Word(_keep(match[2], word), word.line)]
            flags.append(_Flag(match[1].replace("-", "_"), word.line, values, computed=word.is_computed))
        elif (match := _HYDRA.fullmatch(word.text)) and not (flags and not flags[-1].values):
            flags.append(_Flag(match[1], word.line, [Word(_keep(match[2], word), word.line)]))
        elif not flags or (word.is_computed and word.text.startswith("$") and (flags[-1].values or _is_array(word))):
            others.append(word)
        else:
            flags[-1].values.append(word)
    return flags, others


def _is_array(word: Word) -> bool:
    """Returns True for an array that is not known, which has flags of its own."""
    return word.text.endswith(("[@]}", "[*]}"))


def _keep(text: str, word: Word) -> str:
    return Computed(text) if word.is_computed else text


def _read_value(flag: _Flag) -> object:
    """Returns the value of a flag, as a YAML file would have it."""
    if flag.computed or any(word.is_computed for word in flag.values):
        return Computed(" ".join(word.text for word in flag.values) or "true")
    values = [_read_scalar(word.text) for word in flag.values]
    return True if not values else values[0] if len(values) == 1 else values


def _read_scalar(text: str) -> object:
    """Returns text as a number, a truth value, or a list or mapping of JSON, if it is one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[-+]?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,2})?", text):
        return float(text)
    if text.startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            return json.loads(text)
    return text


_CONFIG = "config"
"""The flag by which TRL names a file."""
_FILES = (".yaml", ".yml", ".json")


def _read_flags(call: _Call, where: str, home: Path) -> list[Entry]:
    """Returns the keys of the command's file, and of its flags, which win."""
    flags, others = _parse_flags(call.arguments)
    file = next((word for word in others if word.text.endswith(_FILES)), None)
    if file is not None:
        others.remove(file)
    named = [flag for flag in flags if flag.name == _CONFIG and len(flag.values) == 1]
    if named and file is None:
        flags.remove(named[-1])
        file = named[-1].values[0]
    stated: dict[str, list[Entry]] = {}
    repeated: list[Entry] = []
    for flag in flags:
        repeated += stated.get(flag.name, ())
        path = tuple(flag.name.split("."))
        nested = iterate_entries({path[-1]: _read_value(flag)}, {}, where)
        stated[flag.name] = [replace(e, path=(*path[:-1], *e.path), line=flag.line) for e in nested]
    own = [entry for entries in stated.values() for entry in entries]
    theirs = [] if file is None else _read_file(file, call, where, home)
    names = {entry.name for entry in own} | stated.keys()
    repeated += [entry for entry in theirs if entry.name in names]
    return [
        *(entry for entry in theirs if entry.name not in names),
        *own,
        *(replace(entry, path=("repeated", *entry.path)) for entry in repeated),
        # As plain text: their keys are not known, let alone their defaults.
        *(Entry(("arguments", shorten(word.text)), str(word.text), where, word.line) for word in others),
    ]


def _read_file(file: Word, call: _Call, where: str, home: Path) -> list[Entry]:
    """Returns the keys of the file that the command names.

    Raises:
        RecipeError: it is not here, or no mapping of keys.
    """
    begin = f"{where}:{file.line}: {call.name}: {quote_value(file.text)}"
    path = None if file.is_computed else _find_file(file.text, home)
    if path is None:
        raise RecipeError(f"{begin}: no such file, here or beside the script; name the file itself in its place")
    name = shorten(str(path), 200)
    values, lines = compose(read_text(path, name), name)
    if not isinstance(values, Mapping):
        raise RecipeError(f"{begin}: must be a mapping of keys, got {quote_value(values)}")
    return list(iterate_entries(values, lines, name))


def _find_file(name: str, home: Path) -> Path | None:
    return next((path for path in (Path(name), home / name) if path.is_file()), None)


# Launchers and variables: how many devices, and how they start.


_LAUNCHERS = {"torchrun": "torchrun", "accelerate": "accelerate", "deepspeed": "deepspeed"}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
}


def _read_launch(call: _Call, where: str) -> list[Entry]:
    """Returns the variables that the command sees, and the flags of the launcher before it."""
    # The visible devices come first: a number of processes says more.
    variables = sorted(call.command.environment.items(), key=lambda pair: pair[0] != "CUDA_VISIBLE_DEVICES")
    entries = [
        Entry(("env", name), word.text if word.is_computed else _read_scalar(word.text), where, word.line)
        for name, word in variables
    ]
    for i, word in enumerate(call.prefix):
        base = PurePosixPath(word.text).name
        launcher = _MODULES.get(word.text) or _LAUNCHERS.get(base)
        if launcher is None:
            continue
        flags, others = _parse_flags([w for w in call.prefix[i + 1 :] if w.text != "launch"])
        entries += [Entry((launcher, flag.name), _read_value(flag), where, flag.line) for flag in flags]
        entries += [Entry((launcher, shorten(w.text)), w.text, where, w.line) for w in others if w.is_computed]
        break
    return entries


_ALL = ("auto", "gpu")
_STARTING = ignore("how processes start and find each other")
_COMMAND_DECIDES = "the devices of the command (--count, --nodes)"
_WITHOUT_WEIGHT = re.compile(
    r"(NCCL|GLOO|UCX|WANDB|SWANLAB|HF|HUGGINGFACE|TRANSFORMERS|DATASETS|MODELSCOPE|TOKENIZERS|TRITON|TORCH_NCCL|OMP|MKL|"
    r"MASTER|NODE|RANK|LD|PYTHON|CUDA_LAUNCH|TORCH_DISTRIBUTED|TORCHELASTIC|LOG|DEBUG|RAY)(_\w+)?"
    r"|PYTORCH(_CUDA)?_ALLOC_CONF|CUDA_DEVICE_(MAX_CONNECTIONS|ORDER)|CUDA_HOME|PATH|\w+_(proxy|PROXY|CACHE|PORT|ADDR|HOME)"
    r"|\w*LOG_LEVEL|LOCAL_RANK|USE_HF|USE_MODELSCOPE_HUB|DISABLE_VERSION_CHECK|FORCE_TORCHRUN|WORLD_SIZE|NVTE_\w+"
)
"""Variables of logging, loading, starting and communication."""


def _unless_stated(handler: Handler) -> Handler:
    """Returns a handler of a number of devices, which the command's own number overrides."""

    def handle(settings: Settings, entry: Entry) -> Outcome:
        if settings.devices is not None:
            return NoEffect(f"the plan is for {settings.devices} devices")
        return handler(settings, entry)

    return handle


def _read_processes(settings: Settings, entry: Entry) -> Outcome:
    if entry.value in _ALL:
        return Takes(("processes",)) if settings.processes else Assumed(_COMMAND_DECIDES)
    settings.processes = entry.whole()
    return Takes(("processes",))


def _read_nodes(settings: Settings, entry: Entry) -> Outcome:
    if isinstance(entry.value, str) and re.fullmatch(r"\d+:\d+", entry.value):
        return Assumed("one node")  # from one number of nodes to another
    settings.nodes = entry.whole()
    return Takes(("nodes",))


def _count_included(settings: Settings, entry: Entry) -> Outcome:
    hosts = [host for host in entry.text().split("@") if ":" in host]
    if len(hosts) != 1:
        return Assumed(_COMMAND_DECIDES)
    settings.processes = len(hosts[0].partition(":")[2].split(","))
    return Takes(("processes",))


def _count_visible(settings: Settings, entry: Entry) -> Outcome:
    settings.processes = len([name for name in str(entry.value).split(",") if name.strip()]) or 1
    return Takes(("processes",))


def _is_weightless(entry: Entry) -> bool:
    return _WITHOUT_WEIGHT.fullmatch(entry.path[-1]) is not None


def _read_variable(settings: Settings, entry: Entry) -> Outcome:
    if _is_weightless(entry):
        return NoEffect("a variable of logging, loading, starting or communication")
    return Assumed("the plan is without this variable")


_PROCESSES, _NODES = _unless_stated(_read_processes), _unless_stated(_read_nodes)

ENVIRONMENT: Mapping[str, Handler] = {
    "NPROC_PER_NODE": _PROCESSES,
    "NNODES": _NODES,
    "*": _read_variable,
}
"""Variables, also of the section of a file that sets them."""

_LAUNCH: dict[str, Handler] = {
    "command": ignore("the command that is read"),
    "not read": assume("the first command that trains is planned; name a script of the other to plan it"),
    "repeated.*": assume("stated again later, which counts"),
    "arguments.*": assume("the plan is without it"),
    **{f"env.{name}": handler for name, handler in ENVIRONMENT.items()},
    "torchrun.nproc_per_node": _PROCESSES,
    "torchrun.nnodes": _NODES,
    "torchrun.*": _STARTING,
    "deepspeed.num_gpus": _PROCESSES,
    "deepspeed.num_nodes": _NODES,
    "deepspeed.include": _unless_stated(_count_included),
    **dict.fromkeys(
        (
            *("deepspeed.master_port", "deepspeed.master_addr", "deepspeed.hostfile", "deepspeed.launcher"),
            *("deepspeed.no_ssh", "deepspeed.node_rank", "deepspeed.module", "deepspeed.bind_cores_to_rank"),
        ),
        _STARTING,
    ),
    **dict.fromkeys(
        (
            *(
                "accelerate.multi_gpu",
                "accelerate.same_network",
                "accelerate.use_deepspeed",
                "accelerate.main_process_ip",
            ),
            *("accelerate.main_process_port", "accelerate.num_cpu_threads_per_process", "accelerate.rdzv_backend"),
        ),
        _STARTING,
    ),
}


def _build_table(launch: Sequence[Entry], *, uses_all: bool, has_file: bool) -> dict[str, Handler]:
    """Returns the handlers that depend on the script: of its variables, and of accelerate's file."""
    uses_all = uses_all or any(
        entry.path[0] in ("accelerate", "deepspeed") or (entry.path[0] == "torchrun" and entry.value in _ALL)
        for entry in launch
    )
    visible = _unless_stated(_count_visible) if uses_all else ignore("which devices; other settings say how many")
    weightless = ignore("a variable of logging, loading, starting or communication")
    absent = assume("one device, or those of the command; name the file: --accelerate FILE")
    return {
        **{entry.name: weightless for entry in launch if entry.path[0] == "env" and _is_weightless(entry)},
        "env.CUDA_VISIBLE_DEVICES": visible,
        "env.ASCEND_RT_VISIBLE_DEVICES": visible,
        "accelerate.config_file": ignore("accelerate's file, which is read") if has_file else absent,
    }
