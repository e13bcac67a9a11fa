"""What somebody gets wrong who fine-tunes for the first time: each is one line with the knob, the value and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preheat.cli import main

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"How long is order {n} on its way?"},
            {"role": "assistant", "content": f"{n} days."},
        ]
    }
    for n in range(40)
]
FAILS = (
    "{% for m in messages %}\n{{ m.role }}: {{ m.content }}\n{{ m.content.nothing.more }}{{ eos_token }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, data_folder: Path) -> Path:
    """A folder with rows of one's own, a model, and the recipe `fine-tune` set to both."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "model").symlink_to((data_folder / "stories260K-hf").resolve())
    write(folder, "rows", ROWS)
    write(folder, "pairs", [{"asked": row["messages"][0]["content"], "reply": "yes"} for row in ROWS])
    write(
        folder,
        "equal",
        [{"prompt": f"Say {n}", "chosen": f"yes {n}", "rejected": "yes 7" if n == 7 else f"no {n}"} for n in range(40)],
    )
    write(folder, "kinds", [{"text": f"order {n}", "label": "abcde"[n % 5]} for n in range(40)])
    (folder / "fails.jinja").write_text(FAILS)
    recipe = Path(__file__).parents[2].joinpath("preheat/recipes/fine-tune.yaml").read_text()
    recipe = recipe.replace("preset: qwen2.5-0.5b", "path: model").replace("seq_len: 1024", "seq_len: 256")
    (folder / "mine.yaml").write_text(recipe.replace("  validation: 0.05", "  template: alpaca\n  validation: 0.05"))
    (folder / "typo.yaml").write_text((folder / "mine.yaml").read_text().replace("  max_grad_norm:", "  max_grad_nrm:"))
    return folder


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize(
    ("recipe", "settings", "code", "words"),
    [
        ("mine.yaml", ["data.source=pairs.jsonl"], 4, "which no layout has; set data.columns={prompt: asked, completion: reply}"),
        ("mine.yaml", ["data.source=row.jsonl"], 4, "data.source row.jsonl: does not exist; looking for 'row.jsonl' in .: did you mean 'rows.jsonl'?"),
        ("mine.yaml", ["model.path=./modle"], 2, "model.path: ./modle: no such folder; did you mean 'model'?"),
        ("mine.yaml", ["model.path=s3://bucket/model"], 2, "is a URL; models are read from folders and from the hub"),
        ("mine.yaml", ["model.path=Qwen/Qwen2.5-0.5B"], 2, "download it on a machine with a network and name the folder"),
        ("fine-tune", ["data.source=rows.jsonl"], 2, "can be planned, not trained; add model.path: Qwen/Qwen2.5-0.5B"),
        ("typo.yaml", [], 2, "unknown key 'optimizer.max_grad_nrm'; did you mean 'max_grad_norm'?"),
        ("mine.yaml", ["techniques.lorra={rank: 8}"], 2, "unknown technique 'lorra'; did you mean 'lora'?"),
        ("my.yaml", [], 2, "my.yaml: no such file"),
        ("mine.yaml", ["data={source: kinds.jsonl, layout: classes, validation: 0}", "techniques={classification: {classes: 3}}", "sample={}"], 2, "3, but the data has class 4"),
        ("mine.yaml", ["data.source=equal.jsonl", "techniques={preference: {}, lora: {}}"], 4, "equal.jsonl:8: 'chosen' and 'rejected' are equal"),
        ("mine.yaml", ["data.template=fails.jinja"], 4, "rows.jsonl:1: fails.jinja, line 3: does not render the row: 'str object' has no attribute"),
        ("mine.yaml", ["data.template=chatlm"], 4, "data.template chatlm: no template of that name; did you mean 'chatml'?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    shop: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    settings: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(shop)
    monkeypatch.setenv("PREHEAT_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as ended:
        main(["train", recipe, "--out", "runs/x", *(part for item in settings for part in ("--set", item))])
    error = capsys.readouterr().err
    assert ended.value.code == code, error
    assert words in error
    lines = [line for line in error.splitlines() if not line.startswith("warning: ")]  # of keys that nothing reads
    assert len(lines) == 1, error
    assert lines[0].startswith("error: ")
    assert not (shop / "runs").exists()
