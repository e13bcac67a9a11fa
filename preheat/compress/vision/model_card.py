"""The model card of a step over an image classifier: what was done, from what, on what images, measured how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preheat.compress.front_matter import front_matter
from preheat.run_dir import write_asked

__all__ = ["write"]

_USES = {
    ".onnx": 'import onnxruntime\nsession = onnxruntime.InferenceSession("model.onnx")\nscores, = session.run(None, {"pixel_values": pixels.numpy()})',
    ".pte": 'from executorch.runtime import Runtime\nforward = Runtime.get().load_program("model.pte").load_method("forward")\nscores, = forward.execute((pixels,))  # one image',
    "": 'from transformers import AutoModelForImageClassification\nscores = AutoModelForImageClassification.from_pretrained(".")(pixels).logits',
}
_IMAGE = 'from transformers import AutoImageProcessor\npixels = AutoImageProcessor.from_pretrained(".", backend="pil")(image, return_tensors="pt")["pixel_values"]\n'


def write(folder: Path, whole: Mapping[str, Any], number: int) -> None:
    """Writes `folder`/README.md for the step of this number in what `pipeline.run_chain` returns."""
    from preheat import __version__

    steps = whole["variants"][: number + 1]
    # An export leaves the model as it is: the steps that led to another are those that changed it.
    steps = [s for s in steps[:-1] if "logits" not in s] + [steps[-1]]
    suffix = next((file.suffix for file in folder.glob("model.*") if file.suffix in _USES), "")
    done = "\n".join(f"{n}. {step['method']}: {step['what']}." for n, step in enumerate(steps, 1))
    rows = "\n".join(
        _row(name, told) for name, told in (("before", whole["before"]), *((s["method"], s["after"]) for s in steps))
    )
    compared = ""
    if (apart := steps[-1].get("logits")) is not None:
        compared = (
            f"\nAgainst the model that it was made from, over {apart['images']} calibration images: scores differ by at most {apart['largest']:.3g} "
            f"(largest {apart['scale']:.3g}), by {apart['mean']:.3g} in the mean; the first class is the same at {apart['agreement']:.1%}.\n"
        )
    library = {".onnx": "onnx", ".pte": "executorch"}.get(suffix, "transformers")
    front = front_matter(
        whole["source"],
        library=library,
        pipeline="image-classification",
        relation="quantized" if suffix else "finetune",
    )
    text = f"""{front.yaml}

# {Path(whole["source"]).resolve().name}: {steps[-1]["method"]}

From the image classifier `{Path(whole["source"]).resolve().name}`:

{done}

Images: {whole["data"]}.

| | accuracy | loss | parameters | bytes | as before | ms an image |
|---|---|---|---|---|---|---|
{rows}

Accuracy, loss (nats an image) and the share with the same first class as before are of the held-out images; times are medians of turns taken
alternately, one image at a time, on the machine that wrote this: models in eager PyTorch, files in their own runtime.
{compared}
Use:

```
{_IMAGE}{_USES[suffix]}
```

Written by preheat {__version__}. {front.left_out}
"""
    write_asked(folder / "README.md", text, fix="free some room")


def _row(name: str, told: Mapping[str, Any]) -> str:
    same = f"{told['agreement']:.1%}" if "agreement" in told else ""
    return f"| {name} | {told['accuracy']:.1%} | {told['loss']:.4f} | {told['parameters']:,} | {told['bytes']:,} | {same} | {told['milliseconds']:.2f} |"
