"""Shell scripts are read without running them; bash itself is the reference for their words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from preheat.errors import RecipeError
from preheat.interop.formats import FORMATS
from preheat.interop.keys import Computed
from preheat.interop.reading import ForeignConfig, find_format, read_config
from preheat.interop.shell import read_shell
from preheat.interop.shell_words import list_commands

from .reads import look_up

_SCRIPT = r"""#!/bin/bash
# a comment with a 'quote
GPUS=8; NODES=${UNSET_A:-2} PLAIN=a#b
MODEL=${UNSET_B:-"models/llama $GPUS"}
WORLD=$(($GPUS*$NODES + 1)) HALF=$((GPUS / 3))
ARGS=(
    --num-layers 32  # within an array
    --name "a  b"    '--c'
)
TEXT="
    --lr 1e-4 \
    --tp 2
"
ARGS+=("--plain")
ARGS=("${ARGS[@]}" "--two words")
PLAIN+=c
cat > /dev/null <<END
{"a": "it's", run --not-this
END
show "${ARGS[@]}" ${ARGS[@]} $TEXT --w $WORLD "$HALF" --d "$MODEL" --e=$MODEL 'x#$y' "a\"b\$c" \ d $PLAIN \
    --steps=$(expr 16 / $GPUS) ${GPUS}x "" $UNSET_IS_KEPT_OUT 2>&1 | cat; show second
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_words_are_those_of_bash() -> None:
    script = _SCRIPT.replace(" $UNSET_IS_KEPT_OUT", "")
    shown = subprocess.run(
        ["bash", "-c", f"show() {{ printf '%s\\n' \"$@\"; }}\n{script}"], capture_output=True, text=True
    )
    words = [word for command in list_commands(script, "f.sh") for word in command.words[1:] if command.line > 15]
    assert [word.text for word in words] == shown.stdout.splitlines()


_BRANCHES = """DTYPE=${UNSET_A:-fp8} N=2 EMPTY=
if [[ "$DTYPE" == "fp8" ]]; then ARGS+=("--fp8" a); else ARGS+=(--bf16); fi
if [ $DTYPE != fp8 ] || [ -z "$EMPTY" ]; then ARGS+=(--b); fi
if [[ "$DTYPE" == bf16 || $N -gt 2 ]]; then
    if [ 1 = 1 ]; then ARGS=(--never); fi
    show --not-run
elif ! [[ -n $EMPTY ]] && [ $N -ge 2 ]; then
    N=3
    if [ $N = 3 ]; then show "--from branch"; fi
elif [ 1 = 1 ]; then
    ARGS+=(--neither)
else
    ARGS+=(--nor)
fi
show "${ARGS[@]}" --n $N
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_branches_on_known_values_are_those_of_bash() -> None:
    defined = f"show() {{ printf '%s\\n' \"$@\"; }}\n{_BRANCHES}"
    shown = subprocess.run(["bash", "-c", defined], capture_output=True, text=True, check=True)
    words = [w for c in list_commands(_BRANCHES, "f.sh") if c.words[0].text == "show" for w in c.words[1:]]
    assert [word.text for word in words] == shown.stdout.splitlines()
    assert not any(word.is_computed for word in words)


@pytest.mark.parametrize(
    "condition",
    [
        *("[ -f here ]", "[[ $A == 1* ]]", "[[ $A > 2 ]]", "[[ $A =~ 1 ]]", "grep -q x y", "[ $1 = 1 ]"),
        *("[ $A = 1 ]; true", "[ $A = 1 ] | cat", "( [ $A = 1 ] )", "[ $A = 1 ] && [ $A = 2 ] || true"),
    ],
)
def test_branches_on_what_is_not_known_are_computed(condition: str) -> None:
    text = f"A=1 B=2\nif {condition}; then B=3; fi\nrun $B"
    command = next(c for c in list_commands(text, "f.sh") if c.words[0].text == "run")
    assert (command.words[1].text, command.words[1].is_computed) == ("$B", True)


@pytest.mark.parametrize("around", ["for i in 1 2; do {}; done", "f() {{ {}; }}", "while read x; do {}; done"])
def test_conditions_of_loops_and_functions_are_computed(around: str) -> None:
    text = f"A=1 B=2\n{around.format('if [ $A = 2 ]; then B=3; fi; A=2')}\nf\nrun $B"
    command = next(c for c in list_commands(text, "f.sh") if c.words[0].text == "run")
    assert (command.words[1].text, command.words[1].is_computed) == ("$B", True)


def test_lines_and_what_is_not_known() -> None:
    text = """A=1
if [[ $X == 1 ]]; then
    B=2
    ARGS+=(--fp8 hybrid)
fi
for i in 1 2; do run --seed $i; done
run $1 "$B" $(date) `date` ${MODEL} "${ARGS[@]}" \\
    --last \\
    $A
"""
    words = [command.words for command in list_commands(text, "f.sh") if command.words[0].text == "run"]
    first, second = words
    assert (first[2].text, type(first[2].text)) == ("$i", Computed)
    assert [(w.text, w.line) for w in second] == [
        ("run", 7),
        ("$1", 7),
        ("$B", 3),
        ("$(date)", 7),
        ("`date`", 7),
        ("${MODEL}", 7),
        ("--fp8", 4),
        ("hybrid", 4),
        ("--last", 8),
        ("1", 1),
    ]
    assert [w.is_computed for w in second] == [False, *[True] * 7, False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n'a", "f.sh:2: not a shell script that can be read: a quote is not closed"),
        ('\n\n"a', "f.sh:3: not a shell script that can be read: a quote is not closed"),
        ("A=(1\n", "f.sh:1: not a shell script that can be read: a parenthesis is not closed"),
        ("x $(a\n", "f.sh:1: not a shell script that can be read: ( is not closed"),
        ("x `a\n", "f.sh:1: not a shell script that can be read: a backquote is not closed"),
        ("A=aaaaaaaa\n" + "A=$A$A$A$A\n" * 20, "f.sh:10: A: expands to more than a megabyte"),
        ("ls\n", "f.sh: has no command that is read (trl sft, "),
        ("", "f.sh: has no command that is read (trl sft, "),
        ("trl stf --seed 1", "f.sh: line 1: trl stf: trains nothing that is read; did you mean 'trl sft'?"),
        (
            "torchrun train.py --lr 1",
            "f.sh: starts train.py, whose flags are its own; name that script in place of this",
        ),
        (
            "\ntrl grpo --model m",
            "f.sh:2: trl grpo: of TRL's commands, sft and dpo are read; rewards, kto, orpo and cpo",
        ),
        (
            "axolotl train no.yaml",
            "f.sh:1: axolotl train: 'no.yaml': no such file, here or beside the script; name the",
        ),
        ("axolotl train $1", "f.sh: base_model: names no model; add it, or --set model.path=PATH"),
        ("trl sft --max_length many", "f.sh:1: max_length: must be a number, got 'many'"),
    ],
)
def test_a_mistake_is_one_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        _read(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def _read(text: str, file: Path = Path("f.sh"), **options: int) -> ForeignConfig:
    format = find_format(text, "f.sh", FORMATS)
    assert format is not None
    return read_config(text, file, format, where="f.sh", **options)  # type: ignore[arg-type]


_TRL = """export CUDA_VISIBLE_DEVICES=0,1 WANDB_PROJECT=$USER STRANGE=1
CUDA_VISIBLE_DEVICES=4,5,6 trl sft --model_name_or_path tiny --learning-rate 2e-4 --bf16=false \\
    --per_device_train_batch_size 2 --dataset_name "rows of mine" --lora_target_modules q_proj v_proj \\
    --gradient_checkpointing_kwargs '{"use_reentrant": false}' --use_peft --seed 1 --seed 2 \\
    --max_length $LENGTH $EXTRA --warmup_steps -1e0
trl sft --model_name_or_path other
"""


def test_flags_are_keys() -> None:
    config = _read(_TRL.replace(" --warmup_steps -1e0", ""))
    expected = {
        "model.path": "tiny",
        "optimizer.lr": 2e-4,
        "parallel.devices": 3,
        "batch.size": 6,
        "seed": 2,
        "data.source": "rows of mine",
        "batch.seq_len": 1024,
        "techniques.lora.target_modules": ("q_proj", "v_proj"),
    }
    assert {key: look_up(config, key) for key in expected} == expected
    assert look_up(config, "techniques.mixed_precision") is None
    assert {key.key: key.line for key in config.reading.not_understood} == {
        "env.STRANGE": 1,
        "max_length": 5,
        "arguments.$EXTRA": 5,
        "repeated.seed": 4,
        "not read": 6,
    }
    assert config.reading.trainer == "trl"


def test_negative_numbers_are_values() -> None:
    entries = read_shell("trl sft --warmup_steps -1e0 --lr=-2 --flag", "f.sh").entries[1:]
    assert [(entry.name, entry.value) for entry in entries] == [("warmup_steps", -1.0), ("lr", -2), ("flag", True)]


@pytest.mark.parametrize(
    ("start", "devices"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=2 --master_port 1 {}", 16),
        ("N=4\npython -m torch.distributed.run --nproc-per-node $N {}", 4),
        ("CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc_per_node gpu {}", 3),
        ("CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc_per_node=2 {}", 2),
        ("torchrun --nproc_per_node $N {}", None),
        ("deepspeed --num_gpus 4 --num_nodes 2 {}", 8),
        ("deepspeed --include localhost:0,3 {}", 2),
        ("accelerate launch --num_processes 6 --num_machines 2 {}", 6),
        ("CUDA_VISIBLE_DEVICES=0,1 python {}", None),
    ],
)
def test_launchers_state_the_devices(start: str, devices: int | None) -> None:
    text = start.format("/opt/examples/run_clm.py --model_name_or_path tiny")
    assert look_up(_read(text), "parallel.devices") == devices
    stated = _read(text, devices=5)
    assert look_up(stated, "parallel.devices") == 5
    assert not any("parallel.devices: " in ours for key in stated.reading.taken for ours in key.ours)


def test_a_file_of_the_command_is_read_and_its_flags_win(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base_model: tiny\nseed: 1\nsequence_len: 64\n")
    (tmp_path / "acc.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n")
    text = "accelerate launch --config_file acc.yaml -m axolotl.cli.train a.yaml --seed 2\n"
    config = _read(text, tmp_path / "f.sh")
    assert {key: look_up(config, key) for key in ("model.path", "seed", "batch.seq_len", "parallel.devices")} == {
        "model.path": "tiny",
        "seed": 2,
        "batch.seq_len": 64,
        "parallel.devices": 2,
    }
    assert look_up(config, "techniques.fsdp") is not None
    places = {key.key: (Path(key.file or "f.sh").name, key.line) for key in config.reading.taken}
    assert places["sequence_len"] == ("a.yaml", 3)
    assert places["seed"] == ("f.sh", 1)
    assert [key.key for key in config.reading.not_understood] == ["repeated.seed"]


def test_llama_factory_takes_keys_with_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model_name_or_path: tiny\nstage: sft\ntemplate: qwen\n")
    config = _read("llamafactory-cli train a.yaml learning_rate=1e-5 lora_rank=4", tmp_path / "f.sh")
    assert (look_up(config, "optimizer.lr"), look_up(config, "techniques.lora.rank")) == (1e-5, 4)


def test_a_script_of_one_trainer_is_not_anothers() -> None:
    with pytest.raises(RecipeError, match=r"^f.sh:2: trl sft: is a command of TRL; leave --from axolotl out$"):
        find_format("\ntrl sft --seed 1", "f.sh", FORMATS, "axolotl")
