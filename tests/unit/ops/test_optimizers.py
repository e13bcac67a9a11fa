"""Optimizers against slow references of their published updates."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from preheat import recipe as recipes
from preheat.core import Device, Slot
from preheat.core.mesh import fake_process_group
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients
from preheat.ops.distributed.dtensor_utils import runs_of, total_norm
from preheat.ops.optim.cpu_adamw import HostAdamW
from preheat.ops.optim.low_bit_adamw import LowBitAdamW
from preheat.ops.optim.optimizers import Adafactor, Lion, Muon, StochasticAdamW, orthogonalize
from preheat.ops.optim.zero import ZeROAdamW
from preheat.planning.dry_run import observe
from preheat.planning.request import Request
from preheat.techniques.apollo import apollo_optimizer
from preheat.techniques.muon import muon_optimizer

from ...conftest import DEVICE, difference, tiny, uneven


def run(
    make: Any, steps: int = 4, shape: tuple[int, ...] = (24, 16)
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The weight after some steps, the gradients that it was given, and where it began."""
    g = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape, generator=g))
    begin, grads = p.detach().clone(), [torch.randn(shape, generator=g) for _ in range(steps)]
    optimizer = make([p])
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach(), grads, begin


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return float((a.double() - b.double()).norm() / b.double().norm()) < tolerance


def test_lion_is_algorithm_2_of_its_paper() -> None:
    got, grads, w = run(lambda p: Lion(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, chunk=100))
    w, m = w.double(), torch.zeros_like(w, dtype=torch.float64)
    for g in grads:
        c = 0.9 * m + 0.1 * g.double()
        w = w - 0.01 * (torch.sign(c) + 0.1 * w)
        m = 0.99 * m + 0.01 * g.double()
    assert near(got, w, 1e-6)


def test_lions_scale_leaves_the_product_of_rate_and_decay() -> None:
    got, grads, w = run(lambda p: Lion(p, lr=0.05, weight_decay=0.1, scale=0.2), steps=1)
    assert near(got, w * (1 - 0.05 * 0.1) - 0.01 * grads[0].sign(), 1e-6)


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_muon_is_that_of_torch(shape: tuple[int, int]) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
    ours = run(lambda p: Muon([{"params": p, "muon": True}], **settings), shape=shape)
    torchs = run(lambda p: torch.optim.Muon(p, **settings, adjust_lr_fn="match_rms_adamw"), shape=shape)
    # torch remembers (1 - momentum) g where we remember g, and orthogonalizes in bf16 what differs by a factor: rounding alone.
    assert near(ours[0] - ours[2], torchs[0] - torchs[2], 0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_orthogonalized_singular_values_are_near_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(48, 20) @ torch.diag(torch.logspace(0, -1.5, 20))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    made = orthogonalize(matrix, dtype=dtype)
    assert made.dtype == dtype
    made = made.float()
    values = torch.linalg.svdvals(made)
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    assert near(u.T @ made @ v.T, torch.diag(torch.diagonal(u.T @ made @ v.T)), 0.1), "the same directions"


@pytest.mark.parametrize(
    ("capability", "dtype"), [("AVX2", torch.float32), ("AVX512", torch.bfloat16), ("SVE256", torch.bfloat16)]
)
def test_a_cpu_without_products_in_bf16_iterates_in_fp32(
    capability: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preheat.engine.builder import build

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    gpu = Device("cuda", "H100", 80 << 30, (9, 0), at_hand=False)
    assert build(tiny("{muon: {}}"), vocabulary=96, device=DEVICE).optimizer.dtype == dtype
    dry = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    assert build(tiny("{muon: {}}"), vocabulary=96, device=gpu, dry=dry).optimizer.dtype == torch.bfloat16, (
        "planned for elsewhere"
    )


def test_what_muon_does_not_take_goes_by_adamw() -> None:
    torch.manual_seed(0)
    ours, plain = (torch.nn.Embedding(6, 4) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    a = muon_optimizer(ours.parameters(), by_adamw=ours.parameters(), lr=0.1, weight_decay=0.01, betas=(0.9, 0.95))
    b = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.01, betas=(0.9, 0.95))
    for _ in range(3):
        for module, optimizer in ((ours, a), (plain, b)):
            optimizer.zero_grad()
            module(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()
    assert near(ours.weight.detach(), plain.weight.detach(), 1e-6)


@pytest.mark.parametrize("shape", [(24, 16), (40,)])
def test_adafactor_is_algorithm_4_of_its_paper(shape: tuple[int, ...]) -> None:
    got, grads, w = run(lambda p: Adafactor(p, lr=0.01, weight_decay=0.1), shape=shape)
    w = w.double()
    row = column = whole = torch.zeros((), dtype=torch.float64)
    for t, g in enumerate(grads, start=1):
        decay, squares = 1 - t**-0.8, g.double() ** 2 + 1e-30
        if len(shape) == 1:
            whole = decay * whole + (1 - decay) * squares
            update = g / whole.sqrt()
        else:
            row = decay * row + (1 - decay) * squares.sum(dim=1)
            column = decay * column + (1 - decay) * squares.sum(dim=0)
            update = g / (row[:, None] * column[None, :] / row.sum()).sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()))
        w = w - 0.01 * 0.1 * w - 0.01 * update
    assert near(got, w, 1e-5)


MAKERS: dict[str, Any] = {
    "adafactor": Adafactor,
    "apollo": apollo_optimizer,
    "lion": Lion,
    "low_bit_adamw": functools.partial(LowBitAdamW, least=0),
    "muon": muon_optimizer,
    "offloaded": HostAdamW,
    "stochastic": StochasticAdamW,
}


@pytest.mark.parametrize("name", MAKERS)
def test_where_the_gradient_is_not_finite_nothing_changes(name: str) -> None:
    p = torch.nn.Parameter(torch.randn(8, 4))
    optimizer = MAKERS[name]([p], lr=0.1)
    for value in (1.0, float("nan")):
        before = [p.detach().clone(), *(t.clone() for t in optimizer.state[p].values())]
        p.grad = torch.full_like(p, value)
        optimizer.found_inf = torch.tensor(0.0 if value == value else 1.0)
        optimizer.step()
        after = [p.detach(), *optimizer.state[p].values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (value != value)


@pytest.mark.filterwarnings("ignore:ZeRO on one process")
@pytest.mark.parametrize("make", [ZeROAdamW, muon_optimizer])
def test_groups_of_generators_keep_every_parameter(make: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = make([{"params": model.parameters()}], lr=0.1)
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(model.parameters())


@pytest.mark.parametrize(
    ("shape", "mesh", "dims"),
    [
        ((8, 6), (4,), (0,)),
        ((3, 8, 5), (4,), (1,)),
        ((3, 5, 8), (2,), (2,)),
        ((4, 6, 5), (2, 2), (0, 1)),
        ((2, 3), (4,), (0,)),
    ],
)
def test_shards_are_rounded_as_the_whole(shape: tuple[int, ...], mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Whatever the dimension: experts are sharded along their rows, which are several ranges of the parameter."""
    torch.manual_seed(0)
    weight, grad = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()

    def updated(p: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        parameter = torch.nn.Parameter(p)
        parameter.grad = slope
        StochasticAdamW([parameter], lr=1e-2, chunk=16).step()
        return parameter.detach()

    whole = updated(weight.clone(), grad)
    assert not torch.equal(whole, weight)
    for rank in range(math.prod(mesh)):
        with fake_process_group(math.prod(mesh), rank):
            devices = init_device_mesh("cpu", mesh)
            placements = [Shard(dim) for dim in dims]

            def part(t: torch.Tensor) -> DTensor:
                return distribute_tensor(t, devices, placements, src_data_rank=None)  # noqa: B023

            mine = updated(part(weight), part(grad)).to_local()
            assert torch.equal(mine, part(whole).to_local())
            runs = runs_of(part(weight))
            indices = [runs.first + n * runs.apart + i for n in range(runs.number) for i in range(runs.length)]
            assert indices == part(torch.arange(weight.numel()).view(shape)).to_local().flatten().tolist()


def test_large_seeds_and_steps_draw_numbers_of_their_own() -> None:
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def numbers(seed: int, step: int) -> tuple[int, list[int]]:
        optimizer = StochasticAdamW([p], lr=0.1, seed=seed)
        draws = torch.randint(1 << 62, (4,), generator=optimizer.draws(p, step))
        return optimizer._seed(p, step), draws.tolist()

    seeds = [(0, 0), (1 << 18, 0), (1 << 19, 0), (1 << 31, 0), (0, 1 << 24)]
    found = [numbers(*each) for each in seeds]
    assert len({seed % (1 << 62) for seed, _ in found}) == len(seeds)
    assert len({tuple(draws) for _, draws in found}) == len(seeds)
    assert numbers(3, 5)[0] == (3 << 44) + (5 << 20), "recipes with small seeds repeat their losses"


def test_the_norm_of_bf16_gradients_is_summed_in_fp32() -> None:
    torch.manual_seed(0)
    grads = [
        torch.randn(1000, 3).bfloat16(),
        torch.randn(70).bfloat16(),
        torch.randn(4, 6).bfloat16().t(),
        torch.randn(5),
    ]
    wanted = torch.cat([g.double().flatten() for g in grads]).norm()
    assert float(total_norm(grads, chunk=64)) == pytest.approx(float(wanted), rel=1e-6)


def test_the_norm_of_all_gradients_at_once_is_that_of_each_by_itself() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(300, 70), torch.randn(70).bfloat16(), torch.randn(4, 6).bfloat16().t(), torch.randn(5)]
    wanted = torch.cat([g.double().flatten() for g in grads]).norm()
    assert float(total_norm(grads, together=True)) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("mode", ["fp32", "bf16_weights"])
def test_a_gpu_clips_by_a_few_kernels_and_gives_the_same(mode: str) -> None:
    recipe = recipes.override(tiny(f"{{mixed_precision: {{mode: {mode}}}}}"), "optimizer.max_grad_norm=0.1")
    kernels = observe(Request(recipe, Device("cuda", "test", 8 << 30), vocabulary=96)).kernels
    count = {
        name: sum(n for k, n in kernels.items() if k.operator == name)
        for name in ("_foreach_norm", "linalg_vector_norm")
    }
    assert count == {"_foreach_norm": 1, "linalg_vector_norm": 1}
    assert sum(n for k, n in kernels.items() if k.operator == "_foreach_mul_") == (mode == "fp32")
    found = []
    for device in (DEVICE, Device("cuda", "test", 8 << 30)):
        b = build(recipe, vocabulary=96, device=DEVICE)
        accumulate_gradients(b, [uneven()])
        b.device = device  # clipping alone asks for it
        norm = b.slot(Slot.CLIP)(b)
        found.append((float(norm), {name: p.grad for name, p in b.parameters()}))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert found[0][0] > recipe.optimizer.max_grad_norm
    assert difference(found[1][1], found[0][1]) < (1e-6 if mode == "fp32" else 1e-2)
