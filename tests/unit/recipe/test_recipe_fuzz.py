"""Recipes that no reader should survive: each gives a recipe or a few short lines, soon."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from preheat import recipe as recipes
from preheat.core import Recipe, registry
from preheat.errors import RecipeError
from preheat.recipe import built_in, dump, load, parse
from preheat.recipe.synonyms import NAMES, describe_unknown_key

from ...conftest import within

BASE = "model: {size: 15M}\nstop: {max_steps: 10}\n"
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


def refusal(text: str, overrides: list[str] | None = None) -> str | None:
    """The error of a text, checked for its form; None: it is a recipe, which its own YAML gives back."""
    with within(10):
        try:
            recipe = parse(text, where="r.yaml", overrides=overrides or [])
        except RecipeError as error:
            message = str(error)
            lines = message.splitlines()
            assert 1 <= len(lines) <= 11, message[:2000]
            assert all(0 < len(line) <= 600 for line in lines), message[:2000]
            return message
        assert parse(dump(recipe)) == recipe
        return None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB + BASE, "aliases"),
        (BASE + "seed: &s [*s]", "levels deep"),
        (BASE + "seed: " + "9" * 5000, "64 bits"),
        (BASE + f"seed: {2**70}", "r.yaml:3: seed: an integer must fit in 64 bits"),
        (BASE + f"seed: {2**40}", "seed: must be at most 4,294,967,295"),
        (BASE + f"batch: {{size: {2**31}}}", "batch.size: must be at most"),
        (BASE + "batch: {size: 16000000, seq_len: 16000000}", "tokens a step"),
        (BASE + f"hardware: {{threads: {10**18}}}", "hardware.threads: must be at most"),
        (BASE + f"techniques: {{lora: {{rank: {2**40}}}}}", "techniques.lora.rank: must be at most"),
        (BASE + "techniques: {lora: {alpha: .inf}}", "finite"),
        (BASE + "optimizer: {lr: 1e400}", "finite"),
        (BASE + "batch: {size: 512, seq_len: 16000000}", "scores a layer"),
        (BASE + "name: ..", "not begin with '.'"),
        (BASE + "name: " + "x" * 300, "at most 100"),
        ("model: {size: 999999999999B}\nstop: {max_steps: 1}", "model.size"),
        ("model: {size: 0M}\nstop: {max_steps: 1}", "model.size"),
        ("model: {num_layers: 1000000}\nstop: {max_steps: 1}", "model.num_layers: must be at most"),
        (
            "model: {num_layers: 4096, hidden_size: 1048576, intermediate_size: 4194304}\nstop: {max_steps: 1}",
            "parameters",
        ),
        (BASE + "a: " + "[" * 5000, "levels deep"),
        (BASE + "a: " + "{a: " * 100 + "1" + "}" * 100, "levels deep"),
        (BASE + "".join(f"k{i}: 1\n" for i in range(4_000)), "more problems"),
        (BASE + "".join(f"k{i}: 1\n" for i in range(20_000)), "more than 10,000 values"),
        (BASE + "a: [" + "1," * 500_000 + "]", "more than 10,000 values"),
        (BASE + "name: " + "x" * 100_000 + "\x07", "not YAML"),
        (BASE + "name: " + "x y" * 50_000, "name: "),
        (BASE + "x" * 100_000 + ": 1", "not YAML"),
        (BASE + "? " + "x" * 100_000 + "\n: 1", "unknown key"),
        (BASE + "batch: " + "x" * 100_000, "batch: must be a mapping"),
        (BASE + "a: !!binary aGk=", "a: has the tag '!!binary'"),
        (BASE + "!!binary aGk=: 1", "has the tag '!!binary'"),
        (BASE + "? [a, b]\n: 1", "a key is text"),
        (BASE + "a: !!python/object/apply:os.system [x]", "a: has the tag"),
        (BASE + "seed: !!timestamp x", "seed: has the tag"),
        (BASE + "batch:\n\tsize: 1", "spaces, not tabs"),
        (BASE + "a: !!int abc", "64 bits"),
        (BASE + "<<: {seed: 2}", "merge keys"),
        (BASE + "1: 2", "unknown key '1'"),
        (BASE + "null: 2", "unknown key 'null'"),
        (BASE + 'name: "a\\0b"', "NUL"),
        (BASE + 'name: "\\ud800"', "surrogate"),
        (BASE + "*nobody : 1", "not YAML"),
        (BASE + "#" * (2 << 20), "longer than"),
    ],
)
def test_what_no_reader_survives_is_told_in_a_line(text: str, words: str) -> None:
    message = refusal(text)
    assert message is not None
    assert words in message, message


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("batch.size=0", "--set batch.size=0: batch.size: must be at least 1"),
        ("batch.size=" + "9" * 5000, "--set batch.size=999"),
        ("a" * 9000 + "=1", "unknown key"),
        ("batch.size=" + "[" * 400, "levels deep"),
        ("=3", "key=value"),
        ("batch.size=&a [*a]", "levels deep"),
        ("seed=99999999999999999999", "--set seed=99999999999999999999: an integer must fit"),
        ("a..b=1", "key=value"),
        ("stop.max_steps=null", "--set stop.max_steps=null: stop: no stopping condition"),
        ("model.path=x", "--set model.path=x: model.path: a model from a path brings its sizes"),
        # The file's key is wrong only beside what --set gave.
        ("schedule.kind=wsd", "--set schedule.kind=wsd: stop.hours: schedule wsd needs a length"),
    ],
)
def test_what_set_gave_is_named(item: str, words: str) -> None:
    text = BASE if "schedule" not in item else "model: {size: 15M}\nschedule: {kind: constant}\nstop: {hours: 1}\n"
    message = refusal(text + "batch: {size: 4}", [item])
    assert message is not None
    assert words in message
    assert message.startswith("--set "), message


def test_a_later_set_is_the_one_that_is_named() -> None:
    message = refusal(BASE, ["batch.size=0", "batch.size=-1"])
    assert message == "--set batch.size=-1: batch.size: must be at least 1, got -1"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("learning_rate",), "'optimizer.lr'"),
        (("optimizer", "learning_rate"), "'optimizer.lr'"),
        (("max_grad_norm",), "'optimizer.max_grad_norm'"),
        (("sequence_len",), "'batch.seq_len'"),
        (("num_train_epochs",), "'stop.epochs'"),
        (("epochs",), "'stop.epochs'"),
        (("lora_r",), "'techniques.lora.rank'"),
        (("lora",), "'techniques.lora'"),
        (("output_dir",), "--out FOLDER"),
        (("batch", "steps"), "'stop.max_steps'"),
        (("per_device_train_batch_size",), "techniques.gradient_accumulation.steps"),
        (("learning-rate",), "'optimizer.lr'"),
        (("evaluate", "max_samples"), "'evaluate.rows'"),
        (("deepspeed",), "parallel.engine: deepspeed"),
        (("parallel", "config"), "parallel.engine: deepspeed"),
    ],
)
def test_names_of_other_trainers_lead_to_ours(path: tuple[str, ...], words: str) -> None:
    known = ["kind"] if len(path) > 1 else ["model", "data", "batch", "optimizer", "schedule", "stop", "techniques"]
    assert words in describe_unknown_key(path, known)


@pytest.mark.parametrize("word", ["config", "configs", "path", "kind", "limit", "size", "tokens", "weights"])
def test_names_that_say_nothing_alone_suggest_no_other_section(word: str) -> None:
    sections = {field.name: field.default_factory for field in dataclasses.fields(Recipe)}
    for section in ("batch", "optimizer", "techniques.fsdp", "hardware"):
        cls = registry()["fsdp"] if "." in section else sections[section]
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        message = describe_unknown_key((*section.split("."), word), known).partition("; ")[2]
        assert message.startswith(("known: ", "did you mean")), (section, message)
        assert all(name in known for name in re.findall(r"'([^']*)'", message)), (section, message)


def test_keys_outside_a_recipe_never_lead_to_its_keys() -> None:
    for word in ("learning_rate", "resume", "r", "data", "packing", "seq_lenn"):
        assert describe_unknown_key(("int4", word), ["group", "symmetric"], {}).endswith("; known: group, symmetric"), (
            word
        )
    assert describe_unknown_key(("chain", "0", "techniques", "lora", "lora_r"), ["rank"], {}).endswith(
        "'techniques.lora.rank'"
    )
    assert describe_unknown_key(("limit",), ["each"], {"limit": "use each"}).endswith("; use each")


def test_every_name_leads_to_a_key_that_exists() -> None:
    schema = recipes.build_json_schema()["properties"]
    for theirs, ours in NAMES.items():
        part, *rest = ours.split(".")
        assert part in schema, ours
        if part == "techniques":
            technique, *key = rest
            assert technique in registry(), (theirs, ours)
            assert not key or key[0] in registry()[technique].__dataclass_fields__, (theirs, ours)
        elif rest:
            assert rest[0] in schema[part]["properties"], (theirs, ours)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    import os

    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.yaml").write_text("#" * (2 << 20))
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    names = {"binary.yaml": "UTF-8", "large.yaml": "larger", "pipe.yaml": "not a file", "dangling.yaml": "no such file"}
    for name, words in names.items():
        with within(10), pytest.raises(RecipeError, match=words):
            load(tmp_path / name)
    for name, words in (("/dev/zero", "not a file"), ("x" * 5000, "no such file"), ("a\0b", "no such file")):
        with within(10), pytest.raises(RecipeError, match=words) as caught:
            load(name)
        assert len(str(caught.value)) < 700


VALUES: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e308, "", "x", "auto", "é\u202e", "1e3", "~", "../..", [], [1],
    ["a", "a"], [[]], [None], {}, {"a": 1}, {"size": "15M"}, [{}], "x" * 3000, list(range(300)), "\t", "[/b]", "{{ x }}", "9" * 300,
]  # fmt: skip


def mutated(rng: random.Random) -> str:
    """A built-in recipe with values, keys or bytes changed."""
    file = rng.choice([path for path in built_in().values() if path.parent.name != "chains"])
    text = file.read_text(encoding="utf-8")
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        return (
            text[:at]
            + rng.choice(["\0", "\t", ":", "[", "{", "&a", "*a", "!!x ", "\n", "'", '"', "%", "\ufeff", ""])
            + text[at + rng.randrange(4) :]
        )
    values = yaml.safe_load(text)
    for _ in range(rng.randint(1, 3)):
        part = values
        while True:
            key = rng.choice(list(part)) if part else "x"
            inner = part.get(key)
            if isinstance(inner, dict) and inner and rng.random() < 0.8:
                part = inner
                continue
            break
        if rng.random() < 0.3:
            part[rng.choice(["x", "learning_rate", key + "s", key.upper(), " ", "a.b", "\x1b[31m", "k" * 2000])] = inner
        else:
            part[key] = rng.choice(VALUES)
        if rng.random() < 0.2 and isinstance(values.get("techniques", {}), dict):
            values.setdefault("techniques", {})[rng.choice(list(registry()))] = rng.choice([None, {}, *VALUES])
    return yaml.safe_dump(values, allow_unicode=True)


def test_mutated_recipes_are_read_or_refused() -> None:
    rng = random.Random(29)
    answers = [refusal(mutated(rng)) for _ in range(60)]
    assert any(answers)


@pytest.mark.slow
def test_a_thousand_mutated_recipes_are_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(2029)
    answers = [refusal(mutated(rng)) for _ in range(1000)]
    assert 300 < sum(answer is not None for answer in answers) < 1000
    for n in range(18):
        (tmp_path / "r.yaml").write_text(mutated(rng))
        command = [sys.executable, "-m", "preheat", "plan", "r.yaml", "--gpu", "H100", "--json"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert ended.returncode in (0, 2, 3, 4), (n, ended.stderr[-2000:])
        assert "Traceback" not in ended.stderr, ended.stderr[-2000:]
        assert len(ended.stderr.strip().splitlines()) <= 11, ended.stderr
        assert all(len(line) < 700 for line in ended.stderr.splitlines()), ended.stderr


def test_a_wrong_recipe_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    """One process, all commands that take a recipe: none of them has imported torch by the time it says what is wrong."""
    (tmp_path / "r.yaml").write_text(BASE + "learning_rate: 1\n")
    program = """if True:
        import sys
        from preheat.cli import main
        for command in (
            ["plan", "r.yaml"], ["plan", "r.yaml", "--gpu", "H100"], ["data", "r.yaml"], ["train", "r.yaml", "--out", "o"],
            ["train", "r.yaml", "--dry-run"], ["train", "r.yaml", "--nproc", "2"], ["bench", "r.yaml", "--ablate"],
            ["bench", "r.yaml", "--techniques", "lora"], ["bench", "r.yaml"], ["launch", "r.yaml", "--scheduler", "slurm"],
            ["demo", "--set", "learning_rate=1"],
        ):
            try:
                main(command)
            except SystemExit as ended:
                assert ended.code == 2, (command, ended.code)
            assert "torch" not in sys.modules, command
    """
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 11
    assert sum("'optimizer.lr'" in line for line in lines) == 10, ended.stderr
    assert not (tmp_path / "o").exists()
