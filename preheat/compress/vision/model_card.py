"""Model card of one step of an image classifier's pipeline: method, source, images and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preheat.compress.front_matter import front_matter
from preheat.run_dir import write_user_file

__all__ = ["write"]

_USES = {
    ".onnx": (
        'import onnxruntime\nsession = onnxruntime.InferenceSession("model.onnx")\nscores, = session.run(None, '
        '{"pixel_values": pixels.numpy()})'
    ),
    ".pte": (
        "from executorch.runtime import Runtime\nforward = "
        'Runtime.get().load_program("model.pte").load_method("forward")\nscores, = forward.execute((pixels,))  # '
        "one image"
    ),
    "": (
        "from transformers import AutoModelForImageClassification\nscores = "
        'AutoModelForImageClassification.from_pretrained(".")(pixels).logits'
    ),
}
_IMAGE = (
    'from transformers import AutoImageProcessor\npixels = AutoImageProcessor.from_pretrained(".", '
    'backend="pil")(image, return_tensors="pt")["pixel_values"]\n'
)


def write(folder: Path, summary: Mapping[str, Any], number: int) -> None:
    """Writes `folder`/README.md for the step with this index in the summary returned by `pipeline.run_chain`."""
    from preheat import __version__

    steps = summary["variants"][: number + 1]
    # Exports do not change the model, so earlier exports are not among the steps that led to this one.
    steps = [s for s in steps[:-1] if "logits" not in s] + [steps[-1]]
    suffix = next((file.suffix for file in folder.glob("model.*") if file.suffix in _USES), "")
    done = "\n".join(f"{n}. {step['method']}: {step['what']}." for n, step in enumerate(steps, 1))
    rows = "\n".join(
        _row(name, figures)
        for name, figures in (("before", summary["before"]), *((s["method"], s["after"]) for s in steps))
    )
    comparison = ""
    if (difference := steps[-1].get("logits")) is not None:
        comparison = (
            f"\nAgainst the model that it was made from, over {difference['images']} calibration images: "
            f"scores differ by at most {difference['largest']:.3g} "
            f"(largest {difference['scale']:.3g}), by {difference['mean']:.3g} in the mean; the first class "
            f"is the same at {difference['agreement']:.1%}.\n"
        )
    library = {".onnx": "onnx", ".pte": "executorch"}.get(suffix, "transformers")
    front = front_matter(
        summary["source"],
        library=library,
        pipeline="image-classification",
        relation="quantized" if suffix else "finetune",
    )
    text = f"""{front.yaml}

# {Path(summary["source"]).resolve().name}: {steps[-1]["method"]}

From the image classifier `{Path(summary["source"]).resolve().name}`:

{done}

Images: {summary["data"]}.

| | accuracy | loss | parameters | bytes | as before | ms an image |
|---|---|---|---|---|---|---|
{rows}

Accuracy, loss (nats an image) and the share with the same first class as before are of the held-out images; times \
are medians of turns taken
alternately, one image at a time, on the machine that wrote this: models in eager PyTorch, files in their own runtime.
{comparison}
Use:

```
{_IMAGE}{_USES[suffix]}
```

Written by preheat {__version__}. {front.left_out}
"""
    write_user_file(folder / "README.md", text, fix="free some room")


def _row(name: str, figures: Mapping[str, Any]) -> str:
    same = f"{figures['agreement']:.1%}" if "agreement" in figures else ""
    return (
        f"| {name} | {figures['accuracy']:.1%} | {figures['loss']:.4f} | {figures['parameters']:,} | "
        f"{figures['bytes']:,} | {same} | {figures['milliseconds']:.2f} |"
    )
