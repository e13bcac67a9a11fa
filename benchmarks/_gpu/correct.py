"""Correctness of operators, attention, techniques, resume, out-of-memory recovery, collectives, generation, compressed weights and exports.

References are fp64, or the same build on the CPU with the same weights.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _gpu import compressed
from _gpu.case import Case, Skip, Where, Wrong
from _gpu.short_of_memory import LIMITED
from preheat.hardware.child_processes import tie_to_parent

ROOT = Path(__file__).resolve().parents[2]
SPREAD = {
    "context_parallel",
    "data_parallel",
    "expert_parallel",
    "fsdp",
    "pipeline_parallel",
    "tensor_parallel",
    "zero1",
}
"""Techniques that need several devices: `tests/distributed` has them, and `collectives/` below what one rank can show."""
BOUNDS = {"exact": (0.99999, 1e-3), "rounding": (0.99, 0.05), "fp8": (0.95, 0.2)}
"""The least cosine of all gradients with the reference, and the most that the norm may differ by."""


LONGEST = {"distillation": 64, "rope_scaling": 32}
"""The longest rows of techniques whose trial settings limit them: the positions of the small teacher; twice 16 positions."""
MISSING = re.compile(r"which is not installed|compute capability|[Ll]inux only|torch \d\S+ (has no|cannot) ")
"""Refusals because of the machine, not of the recipe."""


def cases(where: Where) -> list[Case]:
    return [
        *_list_operators(),
        *_list_attention(where),
        *_list_techniques(where),
        *_list_recipes(),
        *_resume(),
        *_list_out_of_memory(),
        *_list_collectives(),
        *_list_generation(),
        *_list_written(),
    ]


# --- operators against fp64 ---------------------------------------------------------------------------------------


def _list_operators() -> list[Case]:
    return [
        Case("operators/rms norm", _check_rms_norm),
        Case("operators/gated activation", _check_gated),
        *(
            Case(f"operators/loss by chunks, {kernel}", functools.partial(_check_loss, kernel))
            for kernel in ("loop", "torch", "liger")
        ),
        Case("operators/four-bit NormalFloat", _check_nf4),
        Case("operators/stochastic rounding", _check_rounding),
        Case("operators/AdamW on bf16 weights", _check_adamw),
    ]


def _find_device(where: Where) -> Any:
    import torch

    return torch.device(where.kind)


def _relative_error(value: Any, reference: Any) -> float:
    """Relative norm of the difference."""
    difference = (value.double() - reference.double()).norm()
    return float(difference / reference.double().norm().clamp(min=1e-300))


def _check_bounds(figures: dict[str, float], bounds: dict[str, float]) -> dict[str, Any]:
    beyond = [
        f"{key} is {figures[key]:.2e}, more than {bound:.0e}"
        for key, bound in bounds.items()
        if not figures[key] <= bound
    ]
    if beyond:
        raise Wrong("; ".join(beyond), figures)
    return figures


def _compare_with_fp64(
    make: Callable[..., Any], reference: Callable[..., Any], inputs: list[Any], bound: float
) -> dict[str, Any]:
    """Errors of a function's result and of its gradients by all inputs."""
    import torch

    wide = [t.detach().double().requires_grad_() for t in inputs]
    narrow = [t.detach().clone().requires_grad_() for t in inputs]
    expected, got = reference(*wide), make(*narrow)
    slope = torch.randn_like(expected)
    expected.backward(slope)
    got.backward(slope.to(got.dtype))
    figures = {"forward": _relative_error(got.detach(), expected.detach())}
    figures |= {
        f"gradient {n}": _relative_error(a.grad, b.grad) for n, (a, b) in enumerate(zip(narrow, wide, strict=True))
    }
    return _check_bounds(figures, dict.fromkeys(figures, bound))


def _draw_tensor(where: Where, *shape: int, dtype: Any = None) -> Any:
    import torch

    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(_find_device(where), dtype or torch.float32)


def _check_rms_norm(where: Where) -> dict[str, Any]:
    import torch

    from preheat.ops.fused_norm_gate import rms_norm

    rows, width = (64, 96) if where.tiny else (4096, 4096)
    figures: dict[str, Any] = {}
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x, weight = _draw_tensor(where, rows, width, dtype=dtype), 1 + 0.1 * _draw_tensor(where, width, dtype=dtype)

        def reference(x: Any, weight: Any) -> Any:
            return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

        errors = _compare_with_fp64(lambda x, w: rms_norm(x, w, 1e-6), reference, [x, weight], bound)
        figures |= {f"{str(dtype).removeprefix('torch.')} {key}": value for key, value in errors.items()}
    return figures


def _check_gated(where: Where) -> dict[str, Any]:
    from torch.nn import functional

    from preheat.ops.fused_norm_gate import gated_silu

    shape = (32, 48) if where.tiny else (4096, 8192)
    a, b = _draw_tensor(where, *shape), _draw_tensor(where, *reversed(shape)).view(shape)
    return _compare_with_fp64(gated_silu, lambda a, b: functional.silu(a) * b, [a, b], 1e-5)


def _check_loss(kernel: str, where: Where) -> dict[str, Any]:
    import torch
    from torch.nn import functional

    from preheat.ops.losses import cross_entropy
    from preheat.torch_compat import why_no_linear_cross_entropy

    if kernel == "liger" and (where.kind == "cpu" or importlib.util.find_spec("liger_kernel") is None):
        raise Skip("liger-kernel is not installed" if where.kind == "cuda" else "liger's kernels need a CUDA device")
    if kernel == "torch" and (missing := why_no_linear_cross_entropy()):
        raise Skip(missing)
    rows, width, vocabulary = (50, 32, 96) if where.tiny else (4096, 2048, 32000)
    hidden, weight = _draw_tensor(where, rows, width), _draw_tensor(where, vocabulary, width) / math.sqrt(width)
    labels = torch.arange(rows, device=_find_device(where)) * 7 % vocabulary
    labels[::5] = -100
    wide = [t.double().requires_grad_() for t in (hidden, weight)]
    expected = functional.cross_entropy(wide[0] @ wide[1].T, labels, ignore_index=-100, reduction="sum")
    expected.backward()
    head = torch.nn.Linear(width, vocabulary, bias=False, device=_find_device(where))
    head.weight = torch.nn.Parameter(weight)
    over: Any = {
        "loop": cross_entropy.sum_chunked_loss,
        "torch": cross_entropy.sum_torch_loss,
        "liger": cross_entropy.sum_liger_loss,
    }[kernel]
    more = {} if kernel == "liger" else {"rows": 17 if where.tiny else 512}
    loss = over(hidden.requires_grad_(), head, cross_entropy.CrossEntropy(), labels, **more)
    loss.backward()
    figures = {
        "loss": _relative_error(loss.detach(), expected.detach()),
        "gradient hidden": _relative_error(hidden.grad, wide[0].grad),
        "gradient weight": _relative_error(head.weight.grad, wide[1].grad),
    }
    return _check_bounds(figures, dict.fromkeys(figures, 1e-4))


def _check_nf4(where: Where) -> dict[str, Any]:
    """The device's weights and products of four-bit weights against those of the CPU."""
    import torch

    from preheat.ops.quantization.nf4 import build_tables, dequantize, quantize

    shape = (96, 128) if where.tiny else (4096, 4096)
    weight = _draw_tensor(where, *shape)
    figures = {}
    for double in (True, False):
        packed = quantize(weight, double=double)
        there = quantize(weight.cpu(), double=double)
        scales = "double" if double else "single"
        different = (packed.codes.cpu() != there.codes).float().mean()
        figures[f"{scales}: codes that differ"] = float(different)
        for dtype in (torch.float32, torch.bfloat16):
            value = dequantize(packed, shape, dtype, build_tables(_find_device(where)))
            reference = dequantize(there, shape, torch.float32, build_tables())
            figures[f"{scales}: {str(dtype).removeprefix('torch.')}"] = _relative_error(value.cpu(), reference)
    return _check_bounds(figures, {key: 3e-3 if "bfloat16" in key else 1e-3 for key in figures})


def _check_rounding(where: Where) -> dict[str, Any]:
    import torch

    from preheat.ops.optim.stochastic_rounding import stochastic_round_

    count = 1 << (12 if where.tiny else 24)
    value = torch.full((count,), 1 + 2**-10, device=_find_device(where))
    out = torch.empty_like(value, dtype=torch.bfloat16)
    stochastic_round_(out, value.clone())
    mean = float(out.double().mean())
    # An eighth of a step above 1: of so many draws the mean is off by 5 standard deviations at most.
    deviation = math.sqrt(0.125 * 0.875 / count) * 2**-7
    figures = {
        "mean less 1": mean - 1,
        "expected": 2**-10,
        "standard deviations off": abs(mean - 1 - 2**-10) / deviation,
    }
    return _check_bounds(figures, {"standard deviations off": 5.0})


def _check_adamw(where: Where) -> dict[str, Any]:
    """The moments of the optimizer for bf16 weights against torch's in fp32, and that small updates are not lost."""
    import torch

    from preheat.ops.optim.optimizers import StochasticAdamW

    shape = (64, 33) if where.tiny else (2048, 2049)
    start = _draw_tensor(where, *shape, dtype=torch.bfloat16)
    ours = torch.nn.Parameter(start.clone())
    theirs = torch.nn.Parameter(start.float())
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers: list[Any] = [StochasticAdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)]
    for step in range(20):
        slope = _draw_tensor(where, *shape, dtype=torch.bfloat16) + step / 10
        ours.grad, theirs.grad = slope.clone(), slope.float()
        for optimizer in optimizers:
            optimizer.step()
    moved = (ours.detach().double() - start.double()).mean(), (theirs.detach().double() - start.double()).mean()
    figures = {
        "mean of the updates": abs(float(moved[0] / moved[1]) - 1),
        "weights": _relative_error(ours.detach(), theirs.detach()),
    }
    return _check_bounds(figures, {"mean of the updates": 0.02, "weights": 0.02})


# --- attention ----------------------------------------------------------------------------------------------------


def _list_attention(where: Where) -> list[Case]:
    from _gpu import attention

    named = {str(case): case for case in attention.cases(where.kind)}
    return [Case(f"attention/{name}", functools.partial(_attend, case), seconds=90) for name, case in named.items()]


def _attend(case: Any, where: Where) -> dict[str, Any]:
    from _gpu import attention

    figures = attention.run(case, where.kind)
    return _check_bounds(figures, dict.fromkeys(figures, case.bound))


# --- techniques ---------------------------------------------------------------------------------------------------


def _list_techniques(where: Where) -> list[Case]:
    from preheat.core import registry
    from tests.contract.settings import FURTHER

    settings_of: list[tuple[str, dict[str, Any]]] = [
        (name, {}) for name in sorted(registry()) if name not in SPREAD
    ] + FURTHER
    return [
        Case(f"techniques/{_describe_settings(name, settings)}", functools.partial(_check_technique, {name: settings}))
        for name, settings in settings_of
    ]


def _describe_settings(name: str, settings: dict[str, Any]) -> str:
    return f"{name} {json.dumps(settings)}" if settings else name


def _list_recipes() -> list[Case]:
    from preheat import recipe as recipes
    from preheat.errors import RecipeError

    selected = []
    for name in sorted(recipes.built_in()):
        try:
            recipe = recipes.load(name)
        except RecipeError:
            continue  # a chain of `compress`
        techniques = {key: t for key, t in recipes.to_values(recipe)["techniques"].items() if key not in SPREAD}
        selected.append(Case(f"recipes/{name}", functools.partial(_check_technique, techniques)))
    return selected


def _add_required(techniques: dict[str, dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """With what brings the tags that these techniques need."""
    from preheat.core import registry
    from tests.contract.settings import BRINGS

    chosen = [registry()[name](**settings) for name, settings in techniques.items()]
    missing = {tag for t in chosen for tag in t.needs} - {tag for t in chosen for tag in t.provided()} - {kind, "cuda"}
    return techniques | {BRINGS[tag]: {} for tag in sorted(missing)}


def _build_recipe(techniques: dict[str, dict[str, Any]], where: Where) -> Any:
    """A small model of a family that serves these techniques; on a GPU with heads of 64, which its kernels take."""
    from preheat import recipe as recipes
    from tests.conftest import tiny
    from tests.contract.settings import FAMILY, asked

    family = next((FAMILY[name] for name in techniques if name in FAMILY), "llama")
    length = min((LONGEST[name] for name in techniques if name in LONGEST), default=128)
    more = [] if where.tiny else ["model.hidden_size=256", f"batch.seq_len={length}"]
    techniques = {name: _fit_settings(name, settings) for name, settings in techniques.items()}
    return recipes.override(
        tiny(family=family),
        *more,
        f"techniques={json.dumps(techniques)}",
        *[setting for name in techniques for setting in asked(name)],
    )


def _fit_settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a shipped recipe for a batch of four short rows."""
    if name == "gradient_accumulation" and "steps" in settings:
        return settings | {"steps": min(settings["steps"], 2)}
    if name == "rope_scaling" and settings.get("factor") == "auto":  # rows longer than the model was trained on
        return {"original_length": 16} | {key: value for key, value in settings.items() if value is not None}
    if name == "length_curriculum" and settings.get("lengths"):
        return settings | {"lengths": [16]}
    return settings


def _check_technique(techniques: dict[str, dict[str, Any]], where: Where) -> dict[str, Any]:
    """Gradients of a step against the CPU's from the same weights; a second step in which nothing may be read from the device."""
    import torch

    from preheat import recipe as recipes
    from preheat.core import registry
    from preheat.data.rows.example_kinds import examples_of
    from preheat.engine.builder import build
    from preheat.engine.step import update
    from preheat.errors import RecipeError
    from preheat.hardware.probe import probe
    from tests.conftest import DEVICE, uneven
    from tests.contract.settings import CANNOT_RUN_HERE
    from tests.contract.test_techniques import step

    chosen = _add_required(techniques, where.kind)
    recipe = _build_recipe(chosen, where)
    device = probe(where.kind)
    torch.manual_seed(0)
    try:
        model = build(recipe, vocabulary=96, device=device)
    except RecipeError as error:
        raise _classify_refusal(str(error), chosen) from None
    kinds = {registry()[name].numerics for name in chosen}
    # A technique that runs on a CPU is compared with its own build there; for any other the reference leaves it out.
    reference = recipe
    if where.kind == "cuda" and (others := [name for name in chosen if name in CANNOT_RUN_HERE]):
        left = {name: settings for name, settings in chosen.items() if name not in others}
        reference = _build_recipe(left, where)
    if chosen.get("efficient_attention", {}).get("kernel"):
        reference = recipes.override(reference, "techniques.efficient_attention.kernel=auto")
    try:
        expected = build(reference, vocabulary=96, device=DEVICE)
    except RecipeError as error:
        raise _classify_refusal(f"no reference on a CPU: {error}", chosen) from None
    _copy_weights(expected, model)
    batch = uneven(length=recipe.batch.seq_len, examples=examples_of(recipe))
    with _fix_noise():
        loss, slopes = step(model, batch)
    with _fix_noise():
        loss_there, slopes_there = step(expected, batch)
    both = sorted(slopes.keys() & slopes_there.keys())
    flat = [
        torch.cat([gradients[name].double().cpu().flatten() for name in both]) for gradients in (slopes, slopes_there)
    ]
    figures = {
        "loss": loss,
        "loss there": loss_there,
        "cosine": float(torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0)),
        "norm": float(flat[0].norm() / flat[1].norm()) - 1,
        "compared": len(both),
    }
    least, most = BOUNDS["fp8" if "fp8" in chosen else "rounding" if kinds - {"exact"} else "exact"]
    if slopes.keys() != slopes_there.keys():
        raise Wrong(f"gradients of {len(slopes)} weights, {len(slopes_there)} there", figures)
    if not figures["cosine"] >= least or not abs(figures["norm"]) <= most or not abs(loss / loss_there - 1) <= most:
        raise Wrong(f"the cosine is to be {least} at least, norm and loss within {most:.0%}", figures)
    if update(model, 0.01).tolist()[1] != 1:
        raise Wrong("the gradients are not finite", figures)
    return figures | {"read from the device": _list_reads(model, batch, where)}


def _classify_refusal(message: str, chosen: dict[str, Any]) -> Skip | Wrong:
    """A skip if the machine or the small model cannot have this technique; any other refusal is a fault of the case."""
    from tests.contract.settings import CANNOT_RUN_HERE

    expected = [CANNOT_RUN_HERE[name] for name in chosen if name in CANNOT_RUN_HERE]
    if MISSING.search(message) or any(re.search(reason, message) for reason in expected):
        return Skip(message)
    return Wrong(f"refused: {message}", {})


@contextmanager
def _fix_noise() -> Iterator[None]:
    """Makes `uniform_` draw the same noise each time and on each device, whose generators differ."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw_uniform(tensor: Any, low: float = 0.0, high: float = 1.0, **_: Any) -> Any:
        return tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)

    before = torch.Tensor.uniform_
    torch.Tensor.uniform_ = draw_uniform  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.uniform_ = before  # type: ignore[method-assign]


def _copy_weights(source: Any, target: Any) -> None:
    """All parameters and buffers; a build draws its own on its device."""
    import torch

    with torch.no_grad():
        for role, parts in target.parts.items():
            for part, other in zip(parts, source.parts[role], strict=True):
                tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
                for name, tensor in (*part.named_parameters(), *part.named_buffers()):
                    tensor.copy_(tensors[name])


def _list_reads(model: Any, batch: Any, where: Where) -> str:
    """What a step reads from the device, which makes the host wait: none is to."""
    import torch

    from preheat.engine.step import accumulate_gradients, update
    from tests.conftest import split

    if where.kind == "cpu":
        return "not looked at"
    rows = model.recipe.batch.size
    micro = -(-rows // model.state.accumulation)
    batches = split(batch, [micro] * (rows // micro) + ([rows % micro] if rows % micro else []))
    torch.cuda.set_sync_debug_mode("error")
    try:
        accumulate_gradients(model, batches)
        update(model, 0.01)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        import traceback

        frames = [f for f in traceback.extract_tb(error.__traceback__) if "preheat/" in f.filename]
        at = f"{frames[-1].filename.rpartition('preheat/')[2]}:{frames[-1].lineno}" if frames else "?"
        raise Wrong(f"a step reads from the device at {at}", {"line": frames[-1].line if frames else ""}) from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "nothing"


# --- runs of the command line -------------------------------------------------------------------------------------

RUN = """\
name: check
seed: 3
model: {{num_layers: 2, hidden_size: {width}, num_heads: 4, num_kv_heads: 2, vocab_size: {vocabulary}}}
data: {{source: stdlib, vocab_size: 300, limit: 40, validation: 0.1}}
batch: {{size: 8, seq_len: 128}}
optimizer: {{lr: 0.01}}
stop: {{max_steps: 8}}
evaluate: {{rows: 16}}
checkpoint: {{every: 4, keep: 9}}
hardware: {{device: {device}}}
techniques: {techniques}
"""


def _run_preheat(where: Where, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command, which is to succeed."""
    command = tie_to_parent([sys.executable, "-m", "preheat", *arguments])
    done = subprocess.run(command, cwd=where.folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        print(done.stderr, file=sys.stderr)
        raise Wrong(f"preheat {' '.join(arguments)}: exit code {done.returncode}: {said[-1] if said else ''}", {})
    return done


def _write_recipe(
    where: Where, name: str, techniques: str, more: str = "", *, vocabulary: int = 300, width: int | None = None
) -> str:
    file = Path(where.folder) / f"{name}.yaml"
    width = width or (64 if where.tiny else 256)
    text = RUN.format(width=width, vocabulary=vocabulary, device=where.kind, techniques=techniques)
    file.write_text(text.replace("}\ntechniques", f"{more}}}\ntechniques"), encoding="utf-8")
    return file.name


def _train_run(where: Where) -> Path:
    """A run that the cases share."""
    folder = Path(where.folder) / "trained"
    if not folder.exists():
        _run_preheat(
            where,
            "train",
            _write_recipe(where, "trained", "{mixed_precision: {}, efficient_attention: {}}"),
            "--out",
            "trained",
        )
    return folder


def _resume() -> list[Case]:
    plain = "{mixed_precision: {mode: bf16_weights}, efficient_attention: {}, chunked_loss: {}}"
    return [
        Case(
            "resume/deterministic", functools.partial(_check_resume, plain, ", deterministic: true", True), seconds=150
        ),
        Case("resume/as it comes", functools.partial(_check_resume, plain, "", False), seconds=150),
    ]


def _check_resume(techniques: str, more: str, exact: bool, where: Where) -> dict[str, Any]:
    """A run that has lost everything after step 4 and goes on, against one that was never broken off."""
    from safetensors.torch import load_file

    name = "deterministic" if exact else "plain"
    recipe = _write_recipe(where, name, techniques, more)
    whole, again = Path(where.folder) / f"{name}-whole", Path(where.folder) / f"{name}-again"
    _run_preheat(where, "train", recipe, "--out", whole.name)
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step-8")
    (again / "metrics.jsonl").unlink()
    _run_preheat(where, "train", recipe, "--out", again.name, "--resume")
    states = [
        {
            name: value
            for file in (run / "checkpoints" / "step-8").glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        for run in (whole, again)
    ]
    names = sorted(states[0].keys() & states[1].keys())
    import torch

    differ = [name for name in names if not torch.equal(states[0][name], states[1][name])]
    figures = {
        "tensors": len(names),
        "that differ": len(differ),
        "largest difference": max(
            (_relative_error(states[1][n].float(), states[0][n].float()) for n in differ), default=0.0
        ),
    }
    if states[0].keys() != states[1].keys() or not names:
        raise Wrong("the checkpoints hold other tensors", figures)
    if differ and (exact or where.kind == "cpu"):
        raise Wrong(f"{differ[0]} is not the same bit for bit", figures)
    return _check_bounds(figures, {"largest difference": 0.05})


SHORT: dict[str, tuple[tuple[str, ...], int, int, str]] = {
    # Logits of 64 MiB, most of what such a run allocates.
    "forward": (("gradients",), 64, 16384, "{}"),
    "backward": (("gradients",), 64, 16384, "{}"),
    # Adafactor's update of the embedding, 32 MiB at a time; AdamW's allocates nothing.
    "update": (("update",), 512, 16384, "{adafactor: {}}"),
    # Logits of 512 rows at a time, 128 MiB.
    "evaluation": (("evaluation",), 64, 65536, "{}"),
    # Weights and moments on the host, 96 MiB, and copies of 32 MiB while a file of one tensor is written.
    "saving": (("saving",), 512, 16384, "{}"),
}
"""Case -> the run's phases in which the error is to happen; its model's width and vocabulary; its techniques."""
OFTEN = ("stop.max_steps=4", "evaluate.every=2", "checkpoint.every=2")


def _list_out_of_memory() -> list[Case]:
    return [
        Case(f"out of memory/{phase}", functools.partial(_check_short_memory, phase), seconds=150) for phase in SHORT
    ]


def _check_short_memory(phase: str, where: Where) -> dict[str, Any]:
    """From a phase on a run gets little more memory than it has: it continues with less, or ends with one clear line."""
    phases, width, vocabulary, techniques = SHORT[phase]
    recipe = _write_recipe(where, f"short-{phase}", techniques, vocabulary=vocabulary, width=width)
    out = Path(where.folder) / f"short-{phase}"
    script = str(Path(__file__).with_name("short_of_memory.py"))
    command = tie_to_parent([sys.executable, script, recipe, out.name, phase, *OFTEN])
    done = subprocess.run(command, cwd=where.folder, capture_output=True, text=True, check=False)
    file = out / "events.jsonl"  # written with the first event
    events = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    errors = [event["phase"] for event in events if event["kind"] == "out_of_memory"]
    # The line of the limit names memory, too.
    said = (done.stderr.replace(LIMITED, "").strip() or "nothing").splitlines()[-1]
    figures: dict[str, Any] = {
        "exit code": done.returncode,
        "out of memory": len(errors),
        "in": ", ".join(dict.fromkeys(errors)),
        "fallbacks": sum(event["kind"] == "fallback" for event in events),
        "said": said[:200],
    }
    print(done.stderr, file=sys.stderr)
    if "Traceback" in done.stderr or done.returncode < 0:
        raise Wrong("a traceback, or it was killed", figures)
    if LIMITED not in done.stderr:
        raise Wrong("the limit was never set", figures)
    # The first error after the limit; later ones are those of the retries.
    if not errors or errors[0] not in phases:
        raise Wrong(f"no out-of-memory error happened in {phase}, so nothing was shown", figures)
    if done.returncode and "memory" not in figures["said"]:
        raise Wrong("it ended with another error", figures)
    return figures


# --- collectives of one rank --------------------------------------------------------------------------------------


def _list_collectives() -> list[Case]:
    return [
        Case("collectives/fully sharded", functools.partial(_check_one_rank, False), fresh=True, spoils=True),
        Case(
            "collectives/fully sharded, on the host", functools.partial(_check_one_rank, True), fresh=True, spoils=True
        ),
    ]


def _check_one_rank(offload: bool, where: Where) -> dict[str, Any]:
    """FSDP2 over a group of one: gradients of the plain model, and a checkpoint that reads back."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    from preheat.techniques.fsdp import shard_fully
    from tests.contract.by_hand import by_hand

    if offload and where.kind == "cpu":
        raise Skip("the weights of a CPU are on the host already")
    if where.kind == "cuda":
        torch.cuda.set_device(0)
    more: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if where.kind == "cuda" else {}
    dist.init_process_group(
        "nccl" if where.kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1, **more
    )
    model, tokens = by_hand()
    plain, _ = by_hand()
    plain.load_state_dict(model.state_dict())
    device = _find_device(where)
    plain.to(device)
    if not offload:
        model.to(device)
    shard_fully(model, model.model.layers, init_device_mesh(where.kind, (1,)), offload=offload)
    tokens = tokens.to(device)
    for each in (model, plain):
        each(tokens, labels=tokens, use_cache=False).loss.backward()
    names = [name for name, _ in plain.named_parameters()]
    slopes = dict(model.named_parameters())
    errors = [_relative_error(slopes[n].grad.full_tensor().to(device), p.grad) for n, p in plain.named_parameters()]
    folder = Path(where.folder) / f"one-rank-{offload}"
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder, no_dist=False)
    before = {n: slopes[n].full_tensor().detach().clone() for n in names}
    with torch.no_grad():
        for p in slopes.values():
            p.zero_()
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    after = {n: slopes[n].full_tensor() for n in names}
    figures = {
        "gradients": max(errors),
        "weights read back that differ": sum(not torch.equal(before[n], after[n]) for n in names),
    }
    dist.destroy_process_group()
    return _check_bounds(figures, {"gradients": 1e-5, "weights read back that differ": 0})


# --- generation, compression and exports of a run ----------------------------------------------------------------------------------------


def _list_generation() -> list[Case]:
    caches = {f"{cache} cache": f"cache={cache}" for cache in ("dynamic", "static", "int8")}
    ways = caches | {"compiled": "compile=true"}
    return [
        Case(f"generation/{name}", functools.partial(_check_generated, setting), seconds=150)
        for name, setting in ways.items()
    ]


def _write_text(where: Where, model: Path, *more: str) -> str:
    done = _run_preheat(where, "generate", str(model), "--prompt", "def ", "--tokens", "24", "--json", *more)
    output: str = json.dumps(json.loads(done.stdout), sort_keys=True)
    return output


def _read_generated(said: str) -> list[str]:
    """The texts of `generate --json`, wherever they stand in it."""
    texts: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            texts.extend(str(value[key]) for key in ("text", "completion") if key in value)
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    walk(json.loads(said))
    return texts


def _check_generated(setting: str, where: Where) -> dict[str, Any]:
    """The greedy text with a kind of cache or a compiled model, against the growing cache in the same precision."""
    run = _train_run(where)
    plain = _read_generated(_write_text(where, run))
    other = _read_generated(_write_text(where, run, "--set", f"sample.{setting}"))
    figures = {"characters": len(plain[0]), "alike": sum(a == b for a, b in zip(plain[0], other[0], strict=False))}
    # Eight bits may change the choice between two likely tokens, but not the first, before which the cache is empty.
    same = other[0][:1] == plain[0][:1] if setting == "cache=int8" else plain == other
    if not plain[0] or not same:
        raise Wrong("the text is another one", figures | {"text": other[0][:80]})
    return figures


def _list_written() -> list[Case]:
    methods = [
        Case(f"compressed/{method}", functools.partial(_check_compressed, method), seconds=200)
        for method in compressed.METHODS
    ]
    formats = [
        Case(f"exports/{to}", functools.partial(_check_exported, to), seconds=200)
        for to in ("hf", "gguf", "onnx", "aoti")
    ]
    return methods + formats


def _check_compressed(method: str, where: Where) -> dict[str, Any]:
    """Products and logits of compressed weights on the device, against the same weights in fp64."""
    return compressed.check(method, _train_run(where), where)


def _check_exported(to: str, where: Where) -> dict[str, Any]:
    """An export, which the command itself reads back and compares."""
    needed = {"onnx": "onnxruntime", "gguf": "gguf"}
    if to in needed and importlib.util.find_spec(needed[to]) is None:
        raise Skip(f"{needed[to]} is not installed")
    run = _train_run(where)
    done = _run_preheat(where, "export", str(run), "--to", to, "--out", f"export-{to}", "--json")
    figures = json.loads(done.stdout)
    return {key: value for key, value in figures.items() if isinstance(value, int | float | str)}
