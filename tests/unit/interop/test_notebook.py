"""Notebooks are read like scripts, and their keys are named by cell and line."""

from __future__ import annotations

import pytest

from preheat.errors import RecipeError

from .reads import look_up, read, read_notebook


def test_cells_are_one_script_and_magics_are_left_out() -> None:
    config = read_notebook(
        "%%capture\nimport os\n!pip install trl \\\n    peft\nif True:\n    %pip install x\nrate = 1e-4",
        "%%bash\npip install $(cat list)",
        "SFTConfig?",
        "import torch\nif torch:\n    !pip install a\nelse:\n    !pip install trl==0.22.2 \\\n        'x>=1'\n    %cd 1a",
        "files = !ls\nawait nothing()\nremainder = (7\n%3)",
        "args = SFTConfig('out', learning_rate=rate,\n    max_steps=5, seed=seed())",
        "SFTTrainer(model='tiny', args=args)",
    )
    assert (config.reading.trainer, look_up(config, "model.path")) == ("trl", "tiny")
    assert (look_up(config, "optimizer.lr"), look_up(config, "stop.max_steps")) == (1e-4, 5)
    taken = {key.key: (key.file, key.line) for key in config.reading.taken}
    assert taken["SFTConfig.learning_rate"] == ("f.ipynb:cell 7", 1)
    assert taken["SFTConfig.max_steps"] == ("f.ipynb:cell 7", 2)
    assert [(key.file, key.line) for key in config.reading.not_understood] == [("f.ipynb:cell 7", 2)]


def test_a_notebook_with_transformers_trainer() -> None:
    config = read_notebook("TrainingArguments('out', max_steps=5)", "Trainer(model='tiny')")
    assert (config.reading.trainer, look_up(config, "stop.max_steps")) == ("transformers", 5)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("x = (", "f.ipynb:cell 2:1: not Python: '(' was never closed"),
        ("%time\n\nx = 1 +", "f.ipynb:cell 2:3: not Python: invalid syntax"),
        (
            "\nSFTConfig(learning_rate='fast')",
            "f.ipynb:cell 2:2: SFTConfig.learning_rate: must be a number, got 'fast'",
        ),
        ("x = 1", "f.ipynb: calls none of TrainingArguments, SFTConfig, DPOConfig with its arguments"),
        ("x = '\0'", "f.ipynb:cell 2"),
    ],
)
def test_a_mistake_is_one_line_with_its_cell(cell: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_notebook(cell)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n]", "f.ipynb:2: not a notebook: it is not JSON"),
        ("[" * 100_000, "f.ipynb:1: not a notebook: it is not JSON"),
        ("[]", "f.ipynb: not a notebook of Jupyter's format 4: it has no list of cells"),
        ('{"worksheets": []}', "f.ipynb: not a notebook of Jupyter's format 4: it has no list of cells"),
    ],
)
def test_a_file_that_is_no_notebook(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read(text, where="f.ipynb")
    assert str(error.value) == message
