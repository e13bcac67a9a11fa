"""The plain functions of precision, in loops written by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ..conftest import difference
from .by_hand import by_hand, falls, plain_backward


def test_alone_fp8() -> None:
    """Emulated: the rounding of fp8, products in fp32. Embedding and head stay as they were."""
    from torchao.float8.float8_linear import Float8Linear

    from preheat.techniques.fp8 import convert_to_fp8

    model, tokens = by_hand()
    weights = dict(model.named_parameters())
    done, left = convert_to_fp8(model, keep=[model.lm_head], emulate=True)
    assert (len(done), left) == (21, [])
    assert dict(model.named_parameters()) == weights, "the very same parameters"
    assert isinstance(model.model.layers[0].mlp.up_proj, Float8Linear)
    assert type(model.lm_head) is torch.nn.Linear
    falls(model, tokens, torch.optim.AdamW(model.parameters(), lr=0.01), plain_backward)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_agrees_with_bf16_within_its_rounding(recipe: Any) -> None:
    from preheat.techniques.fp8 import convert_to_fp8

    model, tokens = by_hand()
    twin = copy.deepcopy(model)
    convert_to_fp8(twin, recipe=recipe, keep=[twin.lm_head], emulate=True)
    for m in (model, twin):
        m.to(torch.bfloat16)
        plain_backward(m, tokens)
    assert float(twin(tokens, labels=tokens).loss.detach()) == pytest.approx(
        float(model(tokens, labels=tokens).loss.detach()), rel=0.01
    )
    other = dict(twin.named_parameters())
    far = {
        n: float((p.grad - other[n].grad).float().norm() / p.grad.float().norm()) for n, p in model.named_parameters()
    }
    assert max(far.values()) < 0.15, far  # 3 bits of mantissa: each factor is off by up to 6 %
    assert max(far.values()) > 0.01, "something was rounded to fp8"


def test_sizes_that_fp8_cannot_take_are_left_and_named() -> None:
    from preheat.techniques.fp8 import convert_to_fp8

    with torch.device("meta"):
        model = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(32, 48), "b": torch.nn.Linear(48, 24), "head": torch.nn.Linear(48, 32)}
        )
    assert convert_to_fp8(model, keep=[model["head"]]) == (["a"], ["b"])
    assert model["a"].weight.device.type == "meta"


def test_alone_keep_in_fp32() -> None:
    from preheat.techniques.mixed_precision import autocast, keep_in_fp32

    model, tokens = by_hand()
    keep_in_fp32(model, ["o_proj", "^lm_head$"])
    seen: dict[str, torch.dtype] = {}
    for name, m in model.named_modules():
        if isinstance(m, torch.nn.Linear):
            m.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.dtype}))
    with autocast("cpu"):
        model(tokens)
    high = {name for name, dtype in seen.items() if dtype == torch.float32}
    assert high == {"lm_head", *(f"model.layers.{n}.self_attn.o_proj" for n in range(3))}
    assert set(seen.values()) == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_train_with_mixed_precision(precision: str) -> None:
    from preheat.techniques.mixed_precision import train_with_mixed_precision

    model, data, criterion = regression()
    dtypes = set()
    model[0].register_forward_hook(lambda _, args, out: dtypes.add(out.dtype))
    losses = train_with_mixed_precision(
        model, data, torch.optim.AdamW(model.parameters(), lr=0.02), criterion, precision, 8
    )
    assert len(losses) == 8 * len(data)
    assert losses[-1] < 0.5 * losses[0]
    assert dtypes == {{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]}


def test_train_with_mixed_precision_refuses_what_it_does_not_know_and_what_always_overflows() -> None:
    from preheat.errors import RunError
    from preheat.techniques.mixed_precision import train_with_mixed_precision

    model, data, criterion = regression()
    with pytest.raises(ValueError, match="use fp32, bf16, fp16"):
        train_with_mixed_precision(model, data, torch.optim.SGD(model.parameters(), lr=0.1), criterion, "int4", 1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RunError, match="any loss scale"):
        train_with_mixed_precision(
            model, data, torch.optim.SGD(model.parameters(), lr=0.1), lambda o, t: criterion(o, t) * 1e30, "fp16", 9
        )
    # The scale would become low enough, but the three steps of one epoch end before.
    with pytest.raises(RunError, match=r"in all 3 steps, and no weight has changed; the loss scale is 8192 now"):
        train_with_mixed_precision(
            model, data, torch.optim.SGD(model.parameters(), lr=0.1), lambda o, t: criterion(o, t) * 1e4, "fp16", 1
        )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), (
        "no overflowed step was taken"
    )


def regression() -> tuple[torch.nn.Sequential, list[tuple[torch.Tensor, torch.Tensor]], Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    inputs = torch.randn(3, 32, 8)
    return model, [(x, x[:, :2].sin()) for x in inputs], torch.nn.MSELoss()


# --- gradient accumulation -------------------------------------------------------------------------------------------


def classes(weight: torch.Tensor | None, reduction: str) -> Any:
    return torch.nn.CrossEntropyLoss(weight=weight, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_train_with_gradient_accumulation_equals_the_big_batch(weighted: bool, reduction: str) -> None:
    """Batches of uneven sizes with uneven numbers of targets, one of them all ignored."""
    from preheat.techniques.gradient_accumulation import train_with_gradient_accumulation

    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    twin = copy.deepcopy(model)
    criterion = classes(torch.tensor([0.1, 0.2, 0.05, 0.1, 0.3]) if weighted else None, reduction)
    sizes = [7, 2, 4, 5, 3]
    inputs, targets = torch.randn(sum(sizes), 6), torch.randint(5, (sum(sizes),))
    targets[[0, 1, 2, 5]] = -100
    targets[7:9] = -100  # the whole of the second batch
    data = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    losses = train_with_gradient_accumulation(model, data, torch.optim.SGD(model.parameters(), lr=0.1), 3, criterion, 2)
    optimizer, wanted = torch.optim.SGD(twin.parameters(), lr=0.1), []
    for _ in range(2):
        for rows in (slice(0, 13), slice(13, 21)):  # three batches, and the two that are left
            loss = criterion(twin(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wanted.append(float(loss.detach()))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert difference(dict(model.state_dict()), dict(twin.state_dict())) < 1e-6


@pytest.mark.parametrize(
    "criterion",
    [torch.nn.MSELoss(), torch.nn.CrossEntropyLoss(), lambda o, t: (o - t).abs().mean()],
    ids=["squares", "classes", "own"],
)
def test_targets_that_are_no_classes_count_by_their_number(criterion: Any) -> None:
    from preheat.techniques.gradient_accumulation import train_with_gradient_accumulation

    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    twin = copy.deepcopy(model)
    inputs, targets = torch.randn(9, 6), torch.rand(9, 5).softmax(dim=1)
    data = list(zip(inputs.split([6, 3]), targets.split([6, 3]), strict=True))
    (loss,) = train_with_gradient_accumulation(
        model, data, torch.optim.SGD(model.parameters(), lr=0.1), 2, criterion, 1
    )
    whole = criterion(twin(inputs), targets)
    whole.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert loss == pytest.approx(float(whole.detach()), rel=1e-5)
    assert difference(dict(model.state_dict()), dict(twin.state_dict())) < 1e-6


def test_train_with_gradient_accumulation_refuses() -> None:
    from preheat.techniques.gradient_accumulation import train_with_gradient_accumulation

    model, data, _ = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="at least 1"):
        train_with_gradient_accumulation(model, data, optimizer, 0, torch.nn.MSELoss(), 1)
    with pytest.raises(ValueError, match="scalar"):
        train_with_gradient_accumulation(model, data, optimizer, 1, torch.nn.MSELoss(reduction="none"), 1)


def test_alone_quantization_aware() -> None:
    from preheat.ops.quantization.fake_quant import Grid, round_weight
    from preheat.techniques.quantization_aware import QuantizationAware, round_weights

    model, tokens = by_hand()
    before = {name: p.clone() for name, p in model.named_parameters()}
    four, eight = round_weights(model, QuantizationAware(keep=("embedding", "head"), group_size=8))
    assert (four, eight) == (21, 0)
    name = "model.layers.1.mlp.down_proj"
    plain = model.get_submodule(name)
    x = torch.randn(2, plain.in_features, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(x), x @ round_weight(plain.weight, Grid(4, 8)).t())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), (
        "the weights that are trained stay full"
    )
    falls(model, tokens, torch.optim.AdamW(model.parameters(), lr=0.01), plain_backward)
