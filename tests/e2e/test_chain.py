"""preheat compress RUN --recipe: steps one after the other over a trained run, each measured on the same text."""

from __future__ import annotations

import json
from pathlib import Path

from preheat.compress.chain import load_chain

from .conftest import Command

CHAIN = """\
name: mine
chain:
  - {compress: width, settings: {channels: 0.5}}
  - train: 0.5
    settings: {optimizer.lr: 1.0e-3}
    techniques:
      rms_norm: {}
      grouped_queries: {num_kv_heads: 1}
      distillation: {teacher: $start}
    where_possible: [rms_norm, grouped_queries]
  - {train: 0.25, techniques: {quantization_aware: {group_size: 16}}}
  - {compress: int4, settings: {group: 16}}
"""


def test_steps_follow_each_other_and_each_is_measured(preheat: Command) -> None:
    preheat.here.json("train", "r.yaml", "--set", "model.num_layers=3")
    (preheat.folder / "chain.yaml").write_text(CHAIN, encoding="utf-8")
    made = preheat.here.json("compress", "runs/small", "--recipe", "chain.yaml", "--measured", "4")
    out = preheat.folder / "runs/small/mine"
    assert [v["name"] for v in made["variants"]] == ["1-width-channels-0.5", "2-train", "3-train", "4-int4-group-16"]
    assert made["path"] == str(Path("runs/small/mine/4-int4-group-16"))
    sizes = [v["after"]["bytes"] for v in made["variants"]]
    assert sizes[0] < made["before"]["bytes"]
    assert sizes[3] < sizes[2] == sizes[1] < sizes[0]
    assert len({v["before"]["loss"] for v in made["variants"]}) == 1, "not the same text, or not the same model"
    losses = [v["after"]["loss"] for v in made["variants"]]
    assert abs(losses[3] - losses[2]) < 0.01 * losses[2], "what was trained for four bits is not what they are"
    assert any(words.startswith("rms_norm was left out") for words in made["notes"])
    recipe = (out / "2-train" / "recipe.yaml").read_text(encoding="utf-8")
    assert "distillation:" in recipe
    assert "grouped_queries:" in recipe
    assert json.loads((out / "compress.json").read_text(encoding="utf-8"))["notes"] == made["notes"]
    assert "4-int4-group-16" in (out / "compress.html").read_text(encoding="utf-8")
    assert preheat.here.json("generate", made["path"], "--prompt", "one", "--tokens", "4")["text"] is not None


def test_what_cannot_be_done_is_refused_before_the_first_step(preheat: Command) -> None:
    preheat.here("train", "r.yaml", "--set", "stop.max_steps=2")
    wrong = {
        "export": "{export: hf, settings: {dtype: int3}}",
        "clash": "{train: 1, techniques: {lion: {}}}",
        "key": "{train: 1, settings: {optimizer.lrr: 1}}",
    }
    for name, step in wrong.items():
        (preheat.folder / f"{name}.yaml").write_text(f"chain:\n- {{compress: int8}}\n- {step}\n", encoding="utf-8")
    (preheat.folder / "first.yaml").write_text("chain: [{train: 1, techniques: {distillation: {teacher: gone}}}]")
    for file, said in {
        "export.yaml": "export.yaml:3: chain.1: --dtype int3: --to hf has float32, float16, bfloat16",
        "clash.yaml": "clash.yaml:3: chain.1: techniques.lion: owns the slot 'optimizer', which mixed_precision owns already",
        "key.yaml": "key.yaml:3: chain.1: settings: unknown key 'optimizer.lrr'; did you mean 'lr'?",
        "first.yaml": "first.yaml:1: chain.0: techniques.distillation: teacher: gone has no config.json",
        "edgy": "no chain of that name; did you mean 'edge'?",
        "r.yaml": "is not a chain",
    }.items():
        _, error = preheat.here("compress", "runs/small", "--recipe", file, "--out", "x", code=2)
        assert said in error
        assert not (preheat.folder / "x").exists()


def test_what_is_wrong_in_a_chain_is_said_with_its_line(preheat: Command) -> None:
    (preheat.folder / "bad.yaml").write_text(
        "chain:\n  - {compress: int8, train: 0.1}\n  - {compres: int8}\n  - {compress: int8, techniques: {lion: {}}}\n"
        "  - train: 0.1\n    techniques:\n      distilation: {}\n      quantization_aware:\n        group_size: none\n",
        encoding="utf-8",
    )
    _, error = preheat.here("compress", "nowhere", "--recipe", "bad.yaml", code=2)
    assert "bad.yaml:2: chain.0: a step is one of compress, train, export; this one states compress and train" in error
    assert "bad.yaml:3: unknown key 'chain.1.compres'; did you mean 'compress'?" in error
    assert "techniques and where_possible are for a step that trains" in error
    assert "bad.yaml:7: unknown technique 'distilation'; did you mean 'distillation'?" in error
    assert "bad.yaml:9: chain.3.techniques.quantization_aware.group_size: must be" in error


def test_built_in_chains_load_and_are_no_recipes(preheat: Command) -> None:
    for name in ("edge", "inference-speed"):
        assert load_chain(name).name == name
        _, error = preheat.here("train", name, code=2)
        assert f"preheat compress RUN --recipe {name}" in error
    assert "--recipe edge.yaml" in preheat.here("init", "edge")[0]
