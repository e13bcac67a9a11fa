"""A teacher with another tokenizer: places at which both have read the same text, and the loss there against loops over documents."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from preheat import recipe as recipes
from preheat.core import Batch, MaskSpec
from preheat.data.tokenizer import _SEVERAL_KINDS, load_tokenizer, token_bytes
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, forward, transform
from preheat.errors import RecipeError
from preheat.models.distillation.tokenizer_alignment import TokenAligner, TokenizerView, find_common_tokens

from ...conftest import DEVICE

TEXTS = (*_SEVERAL_KINDS, "Once upon a time there was a little girl named Lily.", "She saw a big, red ball")


def cut_of(folder: Path) -> TokenizerView:
    tokenizer = load_tokenizer(str(folder))
    return TokenizerView(tokenizer, token_bytes(tokenizer), tokenizer.eos_token_id)


@pytest.fixture(scope="module")
def cuts(data_folder: Path) -> dict[str, TokenizerView]:
    folders = {"gpt2": "tokenizers/gpt2", "llama2": "tokenizers/llama2", "stories": "stories260K-hf"}
    return {name: cut_of(data_folder / folder) for name, folder in folders.items()}


def row_of(cut: TokenizerView, texts: Any, length: int) -> Batch:
    """A row of documents, each with its end; its last is cut off where the row ends. The last place of a document has no label."""
    documents = [[*cut.tokenizer(text).input_ids, cut.end] for text in texts]
    flat = [n for numbers in documents for n in numbers][:length]
    sizes, left = [], length
    for numbers in documents:
        sizes.append(min(len(numbers), left))
        left -= sizes[-1]
    if left:
        raise ValueError("the texts are shorter than the row")
    sizes = [size for size in sizes if size]
    tokens = torch.tensor([flat])
    labels = torch.cat([torch.cat([part[1:], torch.tensor([-100])]) for part in tokens[0].split(sizes)])[None]
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    return Batch(tokens, labels, positions, MaskSpec(documents=(tuple(sizes),)), int((labels != -100).sum()), rows=(0,))


@pytest.mark.parametrize("name", ["gpt2", "llama2", "stories"])
def test_the_bytes_of_pieces_are_those_of_the_text(cuts: dict[str, TokenizerView], name: str) -> None:
    for text in TEXTS:
        read, ends = cuts[name].ends(cuts[name].tokenizer(text).input_ids)
        assert read == text.encode()
        assert ends[-1] == len(read)


@pytest.mark.parametrize(
    ("student", "teacher"), [("gpt2", "llama2"), ("llama2", "gpt2"), ("stories", "gpt2"), ("gpt2", "stories")]
)
def test_places_are_those_at_which_both_have_read_the_same_text(
    cuts: dict[str, TokenizerView], student: str, teacher: str
) -> None:
    own, other = cuts[student], cuts[teacher]
    batch = row_of(own, TEXTS * 2, 150)
    found = TokenAligner(own, other, positions=512)(batch)
    assert found.batch.tokens.shape[1] % 64 == 0
    assert sum(found.batch.mask.documents[0]) == found.batch.tokens.shape[1]
    read = [part.tolist() for part in found.batch.tokens[0].split(found.batch.mask.documents[0])]  # type: ignore[no-untyped-call]
    place, begun, said = 0, 0, 0
    for part, theirs in zip(batch.tokens[0].split(batch.mask.documents[0]), read, strict=False):  # type: ignore[no-untyped-call]
        upto = {
            other.tokenizer.decode(theirs[: n + 1], skip_special_tokens=True).lstrip(): n for n in range(len(theirs))
        }
        for n in range(len(part)):
            text = own.tokenizer.decode(part[: n + 1], skip_special_tokens=True).lstrip()
            ends = not own.token_bytes[part[n]] and n > 0
            if "\ufffd" in text:  # within a letter
                pass
            elif found.known[0, place]:
                assert int(found.at[0, place]) == begun + upto[text]
                said += 1
            elif not ends and text:
                assert text not in upto, text
            place += 1
        begun += len(theirs)
    assert said > 0.2 * batch.tokens.shape[1]


def test_a_teacher_with_the_same_pieces_reads_the_same_row_and_a_short_one_its_beginning(
    cuts: dict[str, TokenizerView],
) -> None:
    own = cuts["llama2"]
    batch = row_of(own, TEXTS[-2:], 20)
    found = TokenAligner(own, own, positions=512)(batch)
    ends = batch.tokens[0] == own.end
    assert found.known[0].bool().equal(~ends)
    first, second = batch.mask.documents[0]
    at = found.at[0]
    assert found.batch.tokens[0, at[~ends]].equal(batch.tokens[0, ~ends])
    short = TokenAligner(own, own, positions=4)(batch)
    assert short.known[0].tolist() == [*[1.0] * 4, *[0.0] * (first - 4), *[1.0] * 4, *[0.0] * (second - 4)]


def test_pieces_in_common_stand_for_the_same_bytes(cuts: dict[str, TokenizerView]) -> None:
    own, theirs = find_common_tokens(cuts["gpt2"], cuts["llama2"])
    assert len(own) == len(theirs) > 5000
    assert (own[-1], theirs[-1]) == (cuts["gpt2"].end, cuts["llama2"].end)
    for mine, other in list(zip(own, theirs, strict=True))[:-1]:
        assert cuts["gpt2"].token_bytes[mine] == cuts["llama2"].token_bytes[other] != b""
    letters = cuts["llama2"].tokenizer.convert_ids_to_tokens(
        [n for n in theirs if len(cuts["llama2"].token_bytes[n]) == 1]
    )
    assert "a" in letters
    assert "<0x61>" not in letters


RECIPE = """
model: {{family: llama, num_layers: 2, hidden_size: 16, num_heads: 2, max_positions: 128}}
data: {{tokenizer: {own}}}
batch: {{size: 2, seq_len: 60}}
stop: {{max_steps: 1}}
techniques: {{distillation: {{teacher: {teacher}, pieces: common, {settings}}}, {beside}}}
"""


def made(data_folder: Path, settings: str = "", beside: str = "") -> Any:
    places = {"own": data_folder / "tokenizers/gpt2", "teacher": data_folder / "stories260K-hf"}
    return build(
        recipes.parse(RECIPE.format(**places, settings=settings, beside=beside)), vocabulary=50257, device=DEVICE
    )


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_loss_is_that_of_loops_over_documents(
    cuts: dict[str, TokenizerView], data_folder: Path, direction: str
) -> None:
    temperature, mixture, top = 1.5, 0.7, 6
    b = made(data_folder, f"divergence: {direction}, temperature: {temperature}, mixture: {mixture}, top_k: {top}")
    student, teacher = (
        LlamaForCausalLM(LlamaConfig(**b.parts["trained"][0].config.to_diff_dict() | {"attn_implementation": "eager"})),
        AutoModelForCausalLM.from_pretrained(data_folder / "stories260K-hf"),
    )
    student.load_state_dict(b.parts["trained"][0].state_dict())
    own, other = cuts["gpt2"], cuts["stories"]
    batch = row_of(own, TEXTS[-2:] * 4, 60)
    mine, theirs = (torch.tensor(n) for n in find_common_tokens(own, other))
    total, compared = torch.zeros((), dtype=torch.float64), 0
    for part, labels in zip(
        batch.tokens[0].split(batch.mask.documents[0]), batch.labels[0].split(batch.mask.documents[0]), strict=True
    ):  # type: ignore[no-untyped-call]
        text = own.tokenizer.decode(part, skip_special_tokens=True)
        numbers = other.tokenizer(text).input_ids
        logp = student(part[None]).logits[0].double()
        logq = (teacher(torch.tensor([numbers])).logits[0].double() / temperature).log_softmax(-1)
        upto = {other.tokenizer.decode(numbers[: n + 1], skip_special_tokens=True): n for n in range(len(numbers))}
        for n in range(len(part)):
            if labels[n] == -100:
                continue
            ce = -logp[n].log_softmax(-1)[labels[n]]
            at = upto.get(own.tokenizer.decode(part[: n + 1], skip_special_tokens=True))
            if at is None:
                total = total + ce
                continue
            q = logq[at].exp()
            order = q[theirs].argsort(descending=True)[:top]
            q = torch.cat([q[theirs[order]], 1 - q[theirs[order]].sum()[None]])
            p = (logp[n] / temperature).softmax(-1)
            p = torch.cat([p[mine[order]], 1 - p[mine[order]].sum()[None]])
            x, y = (q, p) if direction == "forward" else (p, q)
            total = total + (1 - mixture) * ce + temperature**2 * mixture * (x * (x / y).log()).sum()
            compared += 1
    assert compared > 10
    wanted = torch.autograd.grad(total / batch.weight, list(student.parameters()))
    found = forward(b, transform(b, batch))
    assert float(found.total.detach() if hasattr(found, "total") else found.loss) == pytest.approx(
        float(total.detach()), rel=1e-5
    )
    accumulate_gradients(b, [transform(b, batch)])
    for p, w in zip(b.parts["trained"][0].parameters(), wanted, strict=True):
        assert (p.grad - w).norm() <= 1e-4 * w.norm()
    assert b.loss.scores(b.loss.metrics, batch.weight)["compared"] == pytest.approx(compared / batch.weight)
    chunked = made(
        data_folder,
        f"divergence: {direction}, temperature: {temperature}, mixture: {mixture}, top_k: {top}",
        "chunked_loss: {rows: 7}",
    )
    accumulate_gradients(chunked, [transform(chunked, batch)])
    for p, w in zip(chunked.parts["trained"][0].parameters(), wanted, strict=True):
        assert (p.grad - w).norm() <= 1e-4 * w.norm()


@pytest.mark.parametrize(
    ("settings", "beside", "words"),
    [
        ("hidden: 0.1", "", "hidden: does not support other tokens"),
        ("cache: x", "", "cache: does not support other tokens"),
        ("on_policy: 0.5", "", "on_policy: does not support other tokens"),
    ],
)
def test_what_it_does_not_go_with_is_refused(data_folder: Path, settings: str, beside: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        made(data_folder, settings, beside)


def test_the_tokenizers_must_be_known_and_differ(data_folder: Path) -> None:
    stories = data_folder / "stories260K-hf"
    same = recipes.parse(RECIPE.format(own=stories, teacher=stories, settings="", beside=""))
    with pytest.raises(RecipeError, match="this one has the student's; leave it out"):
        build(same, vocabulary=512, device=DEVICE)
    with pytest.raises(RecipeError, match="the student's is trained on the data"):
        build(recipes.override(same, "data={}"), vocabulary=512, device=DEVICE)
    with pytest.raises(RecipeError, match=r"or set techniques\.distillation\.pieces: common"):
        build(
            recipes.override(
                same, f"data.tokenizer={data_folder / 'tokenizers/gpt2'}", "techniques.distillation.pieces=same"
            ),
            vocabulary=50257,
            device=DEVICE,
        )
