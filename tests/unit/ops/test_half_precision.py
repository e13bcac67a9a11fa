"""Loss scaling against torch's GradScaler, masters against AdamW in fp32, modules kept in fp32, and overflow in a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preheat import recipe as recipes
from preheat.core import Build, Device, Slot, Tag, registry
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, forward, update
from preheat.errors import RecipeError
from preheat.ops.optim.half_precision import LossScale, MasterAdamW

from ...conftest import DEVICE, difference, tiny, uneven


def made(settings: str, **more: Any) -> Build:
    return build(tiny(f"{{mixed_precision: {settings}}}", **more), vocabulary=96, device=DEVICE)


def test_the_scale_moves_as_torchs_grad_scaler_does() -> None:
    settings = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, **settings)
    ours = LossScale("cpu", start=1024.0, interval=3)
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.0)
    for finite in (1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1):
        theirs.scale((p * (1.0 if finite else float("inf"))).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(torch.tensor(1.0 - finite))
        assert float(ours.scale) == theirs.get_scale()


def test_scaled_losses_are_reported_as_they_are_and_gradients_come_back_unscaled() -> None:
    scale = LossScale("cpu", start=65536.0)
    half = torch.full((3,), 2.0, dtype=torch.float16, requires_grad=True)
    loss = scale((half * 1e-4).float().sum() * 1e-5)  # without a scale these gradients, 1e-9, are 0 in fp16
    assert float(loss.detach()) == pytest.approx(6e-9, rel=1e-3)
    loss.backward()
    scale.unscale_([half])
    assert half.grad is not None
    assert half.grad.dtype == torch.float32
    assert float(half.grad[0]) == pytest.approx(1e-9, rel=0.01)
    (half * 1e-4).float().sum().mul(1e-5).backward()  # and the next backward pass can add to an fp32 gradient
    assert half.grad.dtype == torch.float32


def test_masters_take_the_way_of_fp32() -> None:
    """The master of a half weight equals the weight that AdamW trains in fp32, given the same gradients."""
    torch.manual_seed(0)
    half = torch.nn.Parameter(torch.randn(40, 30).to(torch.bfloat16))
    full = torch.nn.Parameter(half.detach().float())
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours, theirs = MasterAdamW([half], chunk=500, **settings), torch.optim.AdamW([full], **settings)
    for step in range(5):
        half.grad = torch.randn(40, 30).to(torch.bfloat16)
        full.grad = half.grad.float()
        if step == 2:  # left out, as after an overflow
            half.grad[0, 0] = float("inf")
            ours.found_inf = torch.tensor(1.0)
            ours.step()
            ours.found_inf = torch.tensor(0.0)
            continue
        ours.step()
        theirs.step()
    master = ours.state[half]["master"]
    assert float((master - full.detach()).norm() / full.detach().norm()) < 1e-7
    assert torch.equal(half, master.to(torch.bfloat16))


@pytest.mark.parametrize("mode", ["fp16", "fp16_master"])
def test_an_overflow_costs_one_step_and_halves_the_scale(mode: str) -> None:
    b = made(f"{{mode: {mode}, loss_scale: 1.0e+9}}")
    scale = b.state.saved["mixed_precision"]
    skipped = []
    for n in range(30):
        before, at = [p.detach().clone() for _, p in b.parameters()], float(scale.scale)
        accumulate_gradients(b, [uneven()])
        finite = bool(update(b, 0.01)[1])
        assert all(torch.equal(old, p) for old, (_, p) in zip(before, b.parameters(), strict=True)) != finite
        assert float(scale.scale) == (at if finite else at / 2)
        skipped += [] if finite else [n]
    assert 3 < len(skipped) < 20
    assert skipped[:4] == [0, 1, 2, 3]


def test_fp16_gradients_are_those_of_fp32_whatever_the_scale() -> None:
    plain = made("{mode: fp32}")
    accumulate_gradients(plain, [uneven()])
    for scale in (1.0, 4096.0):
        b = made(f"{{mode: fp16, loss_scale: {scale}}}")
        accumulate_gradients(b, [uneven()])
        assert difference({n: p.grad for n, p in b.parameters()}, {n: p.grad for n, p in plain.parameters()}) < 0.01


def test_a_frozen_base_in_bf16_leaves_adapters_and_the_optimizer_as_they_are() -> None:
    def of(frozen: str) -> Build:
        return build(
            tiny(f"{{lora: {{}}, low_bit_adamw: {{}}, mixed_precision: {{frozen: {frozen}}}}}"),
            vocabulary=96,
            device=DEVICE,
        )

    plain, half, auto = of("fp32"), of("half"), of("auto")
    for b, dtype in ((plain, torch.float32), (half, torch.bfloat16), (auto, torch.float32)):  # auto: this is a CPU
        parameters = list(b.trained[0].parameters())
        assert {p.dtype for p in parameters if not p.requires_grad} == {dtype}
        assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
        assert b.owner(Slot.OPTIMIZER) == "low_bit_adamw"
        accumulate_gradients(b, [uneven()])
    grads = [{n: p.grad for n, p in b.parameters()} for b in (half, plain, auto)]
    assert difference(grads[0], grads[1]) < 0.02  # products are of the same bits; norms and the embedding are rounded
    assert difference(grads[2], grads[1]) == 0


# --- modules kept in fp32 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bf16", "bf16_weights", "bf16_master", "fp16"])
def test_modules_kept_in_fp32_have_fp32_weights_and_products(mode: str) -> None:
    b = made(f"{{mode: {mode}, keep_fp32: ['down_proj$', '^lm_head$']}}")
    of_weights = mode in ("bf16_weights", "bf16_master")
    half = torch.float16 if mode == "fp16" else torch.bfloat16
    named = dict(b.trained[0].named_parameters())
    assert {p.dtype for n, p in named.items() if "down_proj" in n or "lm_head" in n} == {torch.float32}
    assert {p.dtype for n, p in named.items() if "up_proj" in n} == {half if of_weights else torch.float32}
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                seen.append((args[0].dtype, args[1].shape))
            return func(*args, **(kwargs or {}))

    with Watch():
        forward(b, uneven())
    width, inner = 32, b.trained[0].config.intermediate_size
    assert {dtype for dtype, shape in seen if shape == (inner, width)} == {torch.float32}, "down_proj"
    assert {dtype for dtype, shape in seen if shape == (width, 96)} == {torch.float32}, "the head"
    assert {dtype for dtype, shape in seen if shape == (width, inner)} == {half}, "gate_proj and up_proj"
    assert "4 modules in fp32" in b.changes["mixed_precision"][0].what


def test_a_copy_of_modules_kept_in_fp32_computes_with_its_own_weights() -> None:
    techniques = "{mixed_precision: {mode: bf16, keep_fp32: ['norm', '^lm_head$']}, preference: {}}"
    b = build(tiny(techniques), vocabulary=96, device=DEVICE)
    (part,), (reference,) = b.parts["trained"], b.parts["reference"]
    hidden, batch = b.slot(Slot.HIDDEN), uneven()
    before = hidden(reference, batch)
    with torch.no_grad():
        for p in part.parameters():
            p.mul_(2)
    assert torch.equal(hidden(reference, batch), before)


@pytest.mark.parametrize("loss", ["", ", chunked_loss: {rows: 7}"])
def test_a_head_kept_in_fp32_computes_there_in_every_form_of_the_loss(loss: str) -> None:
    """With everything else in bf16, hidden states equal; the loss then is that of fp32 products over them."""
    settings = "{{mixed_precision: {{mode: bf16{}}}{}}}"
    kept = build(tiny(settings.format(", keep_fp32: ['^lm_head$']", loss)), vocabulary=96, device=DEVICE)
    low = build(tiny(settings.format("", loss)), vocabulary=96, device=DEVICE)
    part, batch = kept.trained[0], uneven()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = kept.slot(Slot.HIDDEN)(part, batch)
    head = part.get_output_embeddings().weight.detach()
    exact = torch.nn.functional.cross_entropy(
        (hidden.detach().double() @ head.double().t()).flatten(0, 1), batch.labels.flatten(), reduction="sum"
    )
    assert float(forward(kept, batch).total.detach()) == pytest.approx(float(exact), rel=1e-6)
    assert float(forward(low, batch).total.detach()) != pytest.approx(float(exact), rel=1e-6)


def test_a_tied_embedding_stays_in_fp32_with_its_head() -> None:
    apart = tiny("{mixed_precision: {mode: bf16_weights, keep_fp32: ['^lm_head$']}}")
    tied = recipes.override(apart, "model.tie_embeddings=true")
    for recipe, dtype in ((apart, torch.bfloat16), (tied, torch.float32)):
        b = build(recipe, vocabulary=96, device=DEVICE)
        assert b.trained[0].get_input_embeddings().weight.dtype == dtype
        accumulate_gradients(b, [uneven()])
        assert update(b, 0.01)[1] == 1


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ("{mixed_precision: {keep_fp32: [no_such]}}", "'no_such' matches no module"),
        ("{mixed_precision: {keep_fp32: ['(']}}", "not a regular expression"),
        ("{mixed_precision: {mode: fp32, keep_fp32: [norm]}}", "leave it out"),
        ("{mixed_precision: {mode: bf16_master}, lora: {}}", "use bf16_weights"),
        ("{mixed_precision: {mode: fp16_master}, lora: {}}", "use fp16"),
        ("{mixed_precision: {mode: bf16_weights, frozen: half}, lora: {}}", "frozen: half is for mode: bf16 or fp16"),
        ("{mixed_precision: {mode: bf16_weights, frozen: fp32}, lora: {}}", "frozen: fp32 is for mode: bf16 or fp16"),
        ("{mixed_precision: {mode: bf16_pure, frozen: fp32}, lora: {}}", "frozen: fp32 is for mode: bf16 or fp16"),
        ("{mixed_precision: {frozen: half}}", "no technique freezes a base"),
        ("{fp8: {}}", "needs bf16-compute"),
    ],
)
def test_check_says_no(techniques: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(tiny(techniques), vocabulary=96, device=DEVICE)


def test_fp8_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from preheat.engine.builder import build_context
    from preheat.models.hf import configure

    recipe = tiny("{mixed_precision: {}, fp8: {}}")
    fp8 = registry()["fp8"]()

    def said(name: str, capability: tuple[int, int], r: Any = recipe) -> str:
        return "; ".join(fp8.check(build_context(r, configure(r, 96), Device("cuda", name, 80 << 30, capability))))

    assert said("H100", (9, 0)) == ""
    assert said("L4", (8, 9)) == ""
    assert "A100 has 8.0" in said("A100", (8, 0))
    assert "multiple of 16" in said("H100", (9, 0), tiny(length=24))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install torchao" in said("H100", (9, 0))
    assert Tag.FP8_COMPUTE in fp8.provided()
