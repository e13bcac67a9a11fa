"""Scripts are read without running them: constants are values, all else is their source."""

from __future__ import annotations

import sys

import pytest

from preheat.errors import RecipeError
from preheat.interop.keys import Computed, Reference
from preheat.interop.script import read_script

from .reads import read_script as read


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("1e-4", 1e-4),
        ("-1", -1),
        ("None", None),
        ("'a'", "a"),
        ("[1, 'a']", [1, "a"]),
        ("('a', 'b')", ["a", "b"]),
        ("{'a': {'b': 1}}", {"a": {"b": 1}}),
        ("dict(a=True)", {"a": True}),
        ("torch.bfloat16", "bfloat16"),
        ("once", 3),
        ("alias", 3),
        ("f'{once}'", Computed("f'{once}'")),
        ("twice", Computed("twice")),
        ("argument", Computed("argument")),
        ("counted", Computed("counted")),
        ("2 * 4", Computed("2 * 4")),
        ("os.environ['RATE']", Computed("os.environ['RATE']")),
        ("[1, once + 1]", Computed("[1, once + 1]")),
        ("LoraConfig()", Reference("LoraConfig")),
        ("lora", Reference("LoraConfig")),
        ("itself", Computed("itself")),
        ("is_bfloat16_supported()", "auto"),
        ("not torch.cuda.is_bf16_supported()", False),
        ("not True", False),
        ("not flag()", Computed("not flag()")),
        ("1e999", Computed("1e309")),
        (str(2**70), Computed(str(2**70))),
    ],
)
def test_values(source: str, value: object) -> None:
    text = f"""
once = 3
alias = once
twice = 1
twice = 2
counted = 1
counted += 1
itself = itself
lora = LoraConfig()
def run(argument=1):
    return SFTConfig(key={source})
"""
    read = read_script(text, "f.py")[0]["SFTConfig"]["key"]
    assert (read, type(read)) == (value, type(value))


def test_lines_names_and_several_calls() -> None:
    text = """
settings = {"a": 1,
            "b": 2}
first = SFTConfig("out",
    **settings,
)
second = trl.SFTConfig(c=1, **unknown)
load_dataset("x", "small")
load_dataset("y", split="test")
"""
    values, lines = read_script(text, "f.py")
    assert values == {
        "SFTConfig": {"output_dir": "out", "a": 1, "b": 2},
        "SFTConfig#2": {"c": 1, "**": "unknown"},
        "load_dataset": [{"path": "x", "name": "small"}, {"path": "y", "split": "test"}],
    }
    assert lines["SFTConfig", "b"] == 3
    assert lines["SFTConfig#2", "c"] == 7
    assert lines["load_dataset", "1", "split"] == 9


def test_branches_that_never_run_are_not_read() -> None:
    text = """
length = 8
if False:
    length = 9
    SFTConfig(max_length=1)
else:
    SFTConfig(max_length=length)
"""
    assert read_script(text, "f.py")[0] == {"SFTConfig": {"max_length": 8}}


def test_get_peft_model_is_unsloths_only_with_its_class() -> None:
    values = read_script("get_peft_model(m, 4)\nunsloth.FastModel.get_peft_model(m, 8)\n", "f.py")[0]
    assert values == {"FastModel.get_peft_model": {"model": "m", "r": 8}}


def test_a_script_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = 'print("run")\nraise SystemExit(7)\nargs = SFTConfig("out", max_steps=5)\n'
    before = set(sys.modules)
    read(text, overrides=["model.path=tiny"])
    assert capsys.readouterr().out == ""
    assert not {"trl", "peft"} & (set(sys.modules) - before)


def test_the_second_call_of_a_name_is_not_understood() -> None:
    text = 'a = SFTConfig("out", max_steps=5)\nb = SFTConfig("out", max_steps=6)\n'
    config = read(text, overrides=["model.path=tiny"])
    assert config.recipe.stop.max_steps == 5
    assert [(key.key, key.line) for key in config.reading.not_understood] == [
        ("SFTConfig#2.max_steps", 2),
    ]
    assert config.reading.not_understood[0].assumed == "the first call of SFTConfig is the run's"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (\n", "f.py:1: not Python: '(' was never closed"),
        ("x = 1\n  y = 2\n", "f.py:2: not Python: unexpected indent"),
        ("x = 1\n", "f.py: calls none of TrainingArguments, SFTConfig, DPOConfig with its arguments, nor torchtitan's"),
        ("x = '\0'\n", "f.py"),
        ("SFTConfig(learning_rate='fast')", "f.py:1: SFTConfig.learning_rate: must be a number, got 'fast'"),
        ("x = " + "(" * 500 + ")" * 500, "f.py:1: not Python: too many nested parentheses"),
        ("x = " + "-" * 100_000 + "1", "f.py"),
    ],
)
def test_a_mistake_is_one_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
