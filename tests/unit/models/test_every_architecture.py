"""Every causal architecture of transformers: it computes transformers' loss, or is refused before the data is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from preheat.errors import PreheatError, RecipeError
from preheat.models import hf

from ...architectures.columns import COLUMNS, Subject, fault_of, write_data
from ...architectures.shrink import CAUSAL, NOT_TRIED, shrunk
from ...architectures.tiny import ARCHITECTURES

# A kind of layer; positions numbered by the model itself; layers that are handed nothing; no token mixer that is known.
REFUSED = {
    "deepseek_v32": "layers of kind 'indexed_attention', which preheat does not know",
    "bart": r"numbers positions by itself \(no position_ids\)",
    "recurrent_gemma": "layer 0 of RecurrentGemmaModel has no token mixer",
    "xlstm": "layer 0 of xLSTMModel has no token mixer",
}


ROUGH = {"ctrl": 5e-3}
"""transformers' own gradients in fp32 are that far from those in fp64; preheat's are within 1e-6."""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("architectures")
    write_data(folder)
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_cross_documents_is_refused_when_it_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "NOT_TRAINED", {})  # their families are refused before they are built
    config = shrunk(name)
    config.is_encoder_decoder = False  # as the class with a causal head sets it
    with pytest.raises(RecipeError, match=REFUSED[name]):
        hf.build_on_meta(config)


def test_layers_that_are_not_told_of_documents_are_refused(parent: Path) -> None:
    with pytest.raises(RecipeError, match="MambaMixer of transformers is not told where documents begin"):
        Subject("mamba", parent, shrunk("mamba")).loss_and_gradients("")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own, of old classes
@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in {*ARCHITECTURES, *NOT_TRIED}])
def test_an_architecture_has_the_loss_of_transformers_or_is_refused(name: str, parent: Path) -> None:
    subject = Subject(name, parent, shrunk(name))
    try:
        loss, gradients = subject.loss_and_gradients("efficient_attention: {}")
    except PreheatError:
        # Before the data is read: the plan, which runs the model on the meta device, refuses it too.
        assert fault_of(COLUMNS["plan"], subject)
        return
    expected, theirs = subject.alone
    assert loss == pytest.approx(expected, rel=1e-4)
    assert gradients.keys() == theirs.keys()
    largest = max(float(g.norm()) for g in theirs.values())
    for key, gradient in theirs.items():  # a bias of the keys has no gradient but noise
        difference = float((gradients[key] - gradient).norm())
        assert difference < ROUGH.get(name, 1e-3) * max(float(gradient.norm()), 1e-3 * largest), key
