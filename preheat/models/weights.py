"""WeightSource: the source of a build's parameter values, read once, module by module."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from preheat.errors import RecipeError
from preheat.model_folder import (
    DEQUANTIZED,
    FAULTS,
    PACKED,
    check_finite,
    describe_fault,
    find_weight_files,
    format_names,
    open_tensors,
    quantization_of,
    read_object,
)
from preheat.models import moe
from preheat.models.checkpoint_names import Names, Stored
from preheat.models.hf import full_model
from preheat.models.quantized_folders import LAYER_KEYS, LAYER_MARKS, choose_layers, find_unknown_layer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.models.quantized_folders import Folder, Format, PackedLayer

__all__ = ["Packed", "WeightSource", "materialize", "resize_rows"]

T = TypeVar("T")
# Dtypes of scales by safetensors' names; powers of two in 8 bits are held as fp32.
_SCALE_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F8_E8M0": "float32"}

_log = logging.getLogger("preheat.weights")  # shown by the command line; other programs configure it themselves


class Packed(Protocol):
    """A module whose weights are packed in other tensors."""

    @property
    def weight_names(self) -> tuple[str, ...]: ...

    def written(self, name: str) -> AbstractContextManager[Tensor]:
        """Context manager with a full weight to write to; packs it on exit."""


def materialize(
    module: nn.Module,
    device: torch.device | str,
    *,
    home: torch.device | None = None,
    placed: Callable[[Tensor], None] | None = None,
) -> None:
    """Replaces parameters and buffers on meta by empty ones on `device`, in place. Shared parameters stay shared.

    Args:
        home: another device for the parameters.
        placed: called with each new parameter.
    """
    import torch
    from torch import nn

    replacements: dict[int, Tensor] = {}
    for child in module.modules():
        stores: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for store in stores:
            for name, old in store.items():
                if old is None or old.device.type != "meta":
                    continue
                # By identity: a parameter under several names, such as a tied head, gets one replacement.
                if id(old) not in replacements:
                    is_parameter = isinstance(old, nn.Parameter)
                    new = torch.empty_like(old, device=(home or device) if is_parameter else device)
                    replacements[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
                    if is_parameter and placed is not None:
                        placed(replacements[id(old)])
                store[name] = replacements[id(old)]


def resize_rows(value: Tensor, rows: int, first: int, last: int) -> Tensor:
    """An embedding, head or bias with `rows` rows: new ones, and `first` to `last` (exclusive), are the others' mean.

    Source: https://nlp.stanford.edu/~johnhew/vocab-expansion.html: a row with a small random value can outweigh all
    others in the softmax; the mean cannot.

    Example:
        >>> import torch
        >>> resize_rows(torch.tensor([[1.0], [3.0]]), 3, 2, 3).flatten().tolist()
        [1.0, 3.0, 2.0]
    """
    import torch

    mean = value[:first].float().mean(dim=0).to(value.dtype)
    grown = torch.cat([value, mean.expand(max(rows - value.shape[0], 0), *value.shape[1:])])
    grown[first:last] = mean
    return grown


def _local_shard(value: Tensor, like: DTensor) -> Tensor:
    """This device's shard of a value that every device has, sharded as the parameter `like`."""
    from torch.distributed.tensor import distribute_tensor

    # No source rank: every device has the full value, so none needs to send it.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()


@contextmanager
def _gather_parameters(
    modules: Iterable[nn.Module], own: dict[int, nn.Parameter], drawn_too: bool = False
) -> Iterator[None]:
    """Context manager in which sharded parameters are full plain tensors; on exit, each device keeps its shard.

    So every device draws the values that a single device would. Parameters that are not drawn inside keep their values.

    Args:
        own: this device's parameters by id; others, of other pipeline stages, are discarded.
        drawn_too: include parameters that transformers must not initialize, with their current values: an adapter may
            be initialized from its base's.
    """
    import torch
    from torch.distributed.tensor import DTensor

    # Sharded parameters, and those of other pipeline stages, which are on meta here.
    spread: list[tuple[nn.Module, str, Any]] = [
        (module, name, p)
        for module in modules
        for name, p in module.named_parameters(recurse=False)
        if (isinstance(p, DTensor) or id(p) not in own)
        and p.is_floating_point()
        and (drawn_too or not getattr(p, "_is_hf_initialized", False))
    ]
    device = next(iter(own.values())).device
    for module, name, p in spread:
        # NaN marks parameters that the initialization does not draw: after the yield these keep their values.
        begun = drawn_too and isinstance(p, DTensor)
        value = (
            p.full_tensor().clone()  # type: ignore[attr-defined]
            if begun
            else torch.full(p.shape, float("nan"), dtype=p.dtype, device=device)
        )
        module._parameters[name] = torch.nn.Parameter(value, requires_grad=p.requires_grad)
    yield
    for module, name, p in spread:
        drawn: Any = module._parameters[name]
        module._parameters[name] = p
        if id(p) in own and (drawn_too or not bool(drawn.detach().flatten()[0].isnan())):
            # The shard is copied into the old parameter, to which optimizers and tied modules refer.
            p.to_local().copy_(_local_shard(drawn.detach(), p))


def _strip_wrappers(name: str) -> str:
    """A parameter's name without the wrappers of adapters."""
    return name.replace(".base_layer.", ".")


def _find_init_modules(module: nn.Module) -> list[nn.Module]:
    """A module and those whose parameters its initialization may draw too."""
    # An adapter moves a child's parameters one level down, into its `base_layer`.
    children = list(module.children())
    return [module, *children, *(m for child in children for name, m in child.named_children() if name == "base_layer")]


class WeightSource:
    """Values for parameters: from safetensors in a folder, or initialized as transformers does.

    Techniques register rules before MATERIALIZE: `map` changes values as they are read (pool, split, quantize), `fresh`
    initializes parameters that no checkpoint has (adapters), `pack` stores values in another form (4 bits). Values are
    drawn in fp32 and then cast, so that the precision does not change them.

    The files to read, and the names of their tensors in the model, follow transformers. What it drops with a warning is
    in `notes`, and logged.

    Args:
        folder: a Hugging Face folder with model.safetensors or its index, or None for new weights.
        knob: the user's name for the folder: begins every message.
        required: False: the folder may hold a config.json alone, which is enough for a plan.

    Raises:
        RecipeError: the folder has no safetensors, lacks a parameter, or has values that are not finite.
    """

    def __init__(self, folder: Path | None = None, *, knob: str = "model.path", required: bool = True):
        self.folder, self.knob = folder, knob
        self.notes: list[str] = []
        """Messages about tensors of the folder that the model does not read."""
        self._maps: list[tuple[re.Pattern[str], Callable[[str, Tensor], Tensor]]] = []
        self._composed: list[tuple[re.Pattern[str], Callable[[str], Tensor]]] = []
        self._fresh: list[tuple[re.Pattern[str], Sequence[str], Callable[[nn.Module], None]]] = []
        self._packed: dict[int, Packed] = {}  # by the id of the module
        self._left: list[re.Pattern[str]] = []
        self._files: dict[str, Path] = {}
        self._names: Names | None = None
        self._has_parts = False  # text and vision, of which a text model reads its own
        self._formats: dict[int, Format] = {}  # of the layers that stay quantized, by the id of the module
        self._layer_keys: dict[str, str] = {}  # of all quantized layers: name of a tensor in the model -> key
        self.quantization: dict[str, Any] = {}
        """The folder's `quantization_config`."""
        self._quantized: dict[str, Any] = {}  # how the files' weights are quantized, if they are read dequantized
        if folder is not None and (required or any(folder.glob("*.safetensors"))):
            self._index_files(folder)

    def _index_files(self, folder: Path) -> None:
        settings = folder / "config.json"
        values = read_object(settings, self.knob) if settings.is_file() else {}
        self._has_parts = isinstance(values.get("text_config"), dict)
        weights = find_weight_files(folder, self.knob, stated=values.get("transformers_weights"))
        self.notes = weights.notes
        stored = self.quantization = quantization_of(values)
        if stored.get("quant_method") in DEQUANTIZED:
            self._quantized = stored
        twice = []
        for file in weights.files:
            with open_tensors(file, self.knob) as opened:
                for key in opened.keys():  # noqa: SIM118
                    twice += [key] if key in self._files else []
                    self._files[key] = file
        if twice:
            self.notes.append(f"{folder}: {format_names(twice)} in two files; the last is read, as by transformers")

    def map(self, pattern: str, change: Callable[[str, Tensor], Tensor]) -> None:
        """Passes each value whose parameter name matches through `change(name, value)`."""
        self._maps.append((re.compile(pattern), change))

    def compose(self, pattern: str, make: Callable[[str], Tensor]) -> None:
        """Registers `make(name)`, which assembles matching parameters that the checkpoint has in another form."""
        self._composed.append((re.compile(pattern), make))

    def fresh(self, pattern: str, modules: Sequence[str], draw: Callable[[nn.Module], None]) -> None:
        """Registers `draw(module)` for each named module: it initializes parameters that no checkpoint has."""
        self._fresh.append((re.compile(pattern), modules, draw))

    def leave(self, pattern: str) -> None:
        """Allows tensors whose name matches to stay unread without a note: the recipe leaves them out."""
        self._left.append(re.compile(pattern))

    def pack(self, modules: Sequence[Packed], pattern: str) -> None:
        """Registers modules whose weights are in the checkpoint and get packed into the matching parameters."""
        self._packed |= {id(module): module for module in modules}
        self.fresh(pattern, (), lambda module: None)

    def find_layers(self, model: PreTrainedModel, folder: Folder) -> dict[str, Format]:
        """Returns the quantized linear layers, and layers' quantized experts, of a model on meta, by their names.

        Raises:
            RecipeError: the files have quantized tensors for which the model has no linear layer (stacked experts), or
                none at all.
        """
        from torch import nn

        names = None
        if self._files:
            experts = {id(module) for module in moe.experts_of(model)}
            modules = model.named_modules()
            chosen = [name for name, module in modules if type(module) is nn.Linear or id(module) in experts]
            places = {f"{name}.{key}" for name in chosen for key in LAYER_KEYS}
            # Without rules that dequantize: these join the tensors of a layer.
            names = self._find_names(model, quantized={}, places=places)
        try:
            layers = choose_layers(model, folder, None if names is None else lambda name: names.find(name) is not None)
        except ValueError as error:
            raise self._refuse_layer(str(error), model) from None
        if names is None:
            return layers
        for name in (f"{name}.{key}" for name in layers for key in LAYER_KEYS):
            if (stored := names.find(name)) is not None:
                (self._layer_keys[name],) = stored.keys
        dtypes = self._read_headers(lambda tensor: _SCALE_DTYPES.get(tensor.get_dtype()))
        for name, layer in layers.items():
            key = next(key for part in layer.scale_keys if (key := self._layer_keys.get(f"{name}.{part}")))
            if dtype := dtypes[key]:
                layers[name] = layer.with_scales_in(dtype)
        # FP8 layers besides these (stacked experts) are dequantized by transformers' rules.
        if folder.method != "fp8" and (odd := find_unknown_layer(model, names.named(), layers)) is not None:
            raise self._refuse_layer(f"{odd} is quantized", model)
        # By all files, since a dry run builds a few layers only, which the folder may have left out. FP8 without scales
        # is left to the reader of plain weights, whose tensors have the same names.
        if folder.method != "fp8" and not any(key.endswith(LAYER_MARKS) for key in self._files):
            raise RecipeError(
                f"{self.knob}: {self.folder}: its config.json says that it is stored in {folder.method}, and its files "
                "hold plain weights; delete quantization_config from it, or restore the model's own files"
            )
        self.leave(folder.ignored)
        return layers

    def _refuse_layer(self, problem: str, model: PreTrainedModel) -> RecipeError:
        return RecipeError(
            f"{self.knob}: {self.folder}: {problem}, and {type(model).__name__} has no linear layer there (preheat "
            "reads quantized linear layers, but experts in one matrix only in MXFP4); name the original model"
        )

    @property
    def packed_method(self) -> str:
        """The `quant_method` of the folder if layers stay packed as it has them; "": none do."""
        return str(self.quantization["quant_method"]) if self._formats else ""

    def keep_packed(self, layers: Iterable[tuple[PackedLayer, Format]]) -> None:
        """Registers layers whose tensors are read as they are stored."""
        self._formats |= {id(module): stored for module, stored in layers}
        self.fresh(r"\.(?:packed|nf4|mxfp4)_", (), lambda module: None)

    def dequantize(self, layers: Mapping[str, Format], shapes: Mapping[str, tuple[int, int]]) -> None:
        """Registers layers whose weights are dequantized to fp32 when they are read."""

        def make(name: str) -> Tensor:
            layer = name.removesuffix(".weight")
            return self._read_layer(layer, shapes[layer], layers[layer], layers[layer].dequantize)

        if layers:
            self.compose(rf"^(?:{'|'.join(map(re.escape, layers))})\.weight$", make)

    def _read_layer(
        self, name: str, shape: Any, stored: Format, convert: Callable[[Callable[[str], Tensor | None], Any], T]
    ) -> T:
        """Returns what `convert` makes of the tensors of a quantized layer, in the format `stored`."""

        def read(part: str) -> Tensor | None:
            key = self._layer_keys.get(f"{name}.{part}")
            return None if key is None else self._read_tensor(key, raw=part == stored.raw_key)

        try:
            return convert(read, shape)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, RecipeError):
                raise
            raise self._describe_misfit(name, error) from None

    def _describe_misfit(self, name: str, error: Exception) -> RecipeError:
        return RecipeError(
            f"{self.knob}: {self.folder}: {name}: {describe_fault(error, 160)}; its files do not fit the "
            "quantization_config of its config.json: restore the model's own"
        )

    def fingerprint(self) -> str:
        """A hash that changes with the weights' files: names, sizes, and samples of the content of each."""
        if self.folder is None:
            return "new"
        # Samples, because hashing every byte of a large model would take minutes at each start.
        digest = hashlib.sha256()
        for file in sorted(set(self._files.values())):
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as opened:
                for start in range(0, size, max(size // 64, 1)):
                    opened.seek(start)
                    digest.update(opened.read(4096))
        return digest.hexdigest()[:16]

    def fill(self, model: PreTrainedModel, *, seed: int) -> None:
        """Gives every parameter and buffer of a materialized model its value, in place.

        Values are read from the folder; without one, transformers' initialization draws them. Parameters registered
        by `fresh` are drawn in both cases.

        Args:
            seed: of the draws.

        Raises:
            RecipeError: the folder lacks parameters, has them in another shape, or cannot be read.
        """
        import torch

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # Buffers begin as a sentinel and parameters are checked by name, so
            # nothing can stay uninitialized unnoticed.
            self._poison(model)
            if self.folder is None:
                self._draw(model)
            else:
                self._read(model)
            torch.manual_seed(seed + 1)  # so that an adapter does not change the base model's draws
            # Adapters are drawn for all stages of a pipeline, so that every device consumes the same random numbers.
            everything, own = full_model(model), {id(p): p for p in model.parameters()}
            for _, modules, draw in self._fresh:
                for name in modules:
                    with _gather_parameters(everything.get_submodule(name).modules(), own, drawn_too=True):
                        draw(everything.get_submodule(name))
            self._check_coverage(model)

    def beside(self, model: PreTrainedModel, *, drawn: bool, on_cpu: bool, at_home: bool = False) -> int:
        """Peak bytes that `fill` takes on the model's device in addition to the model, computed from shapes.

        Initialization holds a module and its children at once: in fp32 if their dtype is smaller, and unsharded if
        devices shard them. Reading holds one value at a time, on the device only if it is the CPU, or if devices shard
        the value.

        Args:
            drawn: no checkpoint has the values.
            on_cpu: the device is the CPU, whatever device the shapes are on.
            at_home: parameters are in host memory, where values are drawn; sharded ones go through the device.
        """
        from torch.distributed.tensor import DTensor

        def drawing(p: Tensor) -> int:
            whole_too = p.nbytes if isinstance(p, DTensor) else 0  # of all shards
            return whole_too + (p.numel() * 4 if p.is_floating_point() and p.element_size() == 2 else 0)

        # The largest group of parameters that `_draw` holds in fp32 at a time: a module with its children.
        if drawn and not at_home:
            return max(
                sum(drawing(p) for m in _find_init_modules(module) for p in m.parameters(recurse=False))
                for module in model.modules()
            )
        largest = max(model.parameters(), key=lambda p: p.numel())
        if isinstance(largest, DTensor):
            return largest.nbytes
        return largest.nbytes if on_cpu else 0

    def _is_fresh(self, name: str) -> bool:
        return any(pattern.search(name) for pattern, _, _ in self._fresh)

    def _draw(self, model: PreTrainedModel) -> None:
        """transformers' own initialization, children first as there, in fp32 and then cast.

        A module may reinitialize its children's parameters, as GPT-2's blocks do with the projections to the residual
        stream, which an adapter moves into a `base_layer` of the child. For a pipeline stage the full model is
        initialized, and other stages' values are discarded, so that each stage draws the values that a single device
        would.
        """
        import torch

        own_parameters = {id(p): p for p in model.parameters()}
        model = full_model(model)
        owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        for name, p in model.named_parameters():  # transformers skips marked parameters and draws no numbers for them
            p._is_hf_initialized = self._is_fresh(name)

        def visit(module: nn.Module) -> None:
            for child in module.children():
                visit(child)
            # Children come first, since a parent may reinitialize their parameters.
            with _gather_parameters(_find_init_modules(module), own_parameters):
                draw(module)
            for p in module.parameters(recurse=False):
                if owners[id(p)] > 1:  # a shared parameter is drawn once
                    p._is_hf_initialized = True  # type: ignore[attr-defined]

        def draw(module: nn.Module) -> None:
            own = [p for m in _find_init_modules(module) for p in m.parameters(recurse=False)]
            # The parameter objects stay, and only their data is fp32 for the time of the draw.
            low_precision = {id(p): (p, p.data) for p in own if p.dtype in (torch.bfloat16, torch.float16)}
            for p, low in low_precision.values():
                p.data = low.float()
            with ExitStack() as open_weights:
                if packed := self._packed.get(id(module)):
                    for weight in packed.weight_names:
                        open_weights.enter_context(packed.written(weight))
                model._init_weights(module)
            for p, low in low_precision.values():
                low.copy_(p.data)
                p.data = low

        visit(model)

    def _read(self, model: PreTrainedModel) -> None:
        everything = full_model(model)
        self._names = names = self._find_names(model)
        kind = self.quantization.get("quant_method")
        if kind in (*PACKED, *DEQUANTIZED) and not self._formats:
            self.notes.append(f"{self.folder}: stored in {kind}; its weights are dequantized when read")
        missing: list[str] = []

        def read(name: str, target: Tensor) -> None:
            if not self._read_one(names, _strip_wrappers(name), target):
                missing.append(_strip_wrappers(name))

        for name, parameter in model.named_parameters():
            if self._is_fresh(name):
                continue
            read(name, parameter)
            # Marked, so that `_init_weights`, called for buffers below, leaves the value that was read.
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        # Packed weights are assembled in full precision and quantized when the context exits.
        for name, module in model.named_modules():
            if packed := self._packed.get(id(module)):
                for weight in packed.weight_names:
                    with packed.written(weight) as full:
                        read(f"{name}.{weight}", full)
        for name, module in model.named_modules():
            if stored_format := self._formats.get(id(module)):
                self._fill_layer(_strip_wrappers(f"{name}.")[:-1], module, stored_format)  # type: ignore[arg-type]
        names.mark_read(self._layer_keys.values())
        for owner, module in _find_initializers(model, model):  # buffers that no checkpoint has, such as rotary tables
            if id(module) not in self._packed and id(module) not in self._formats:
                with _remove_placeholders(module):
                    owner._init_weights(module)
        # After the initializers, so that the checkpoint's buffers win over computed ones.
        needed, state = moe.biases(model), model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():  # buffers that a checkpoint has
            if name in needed or (
                name in state and names.find(_strip_wrappers(name)) is not None and not self._is_fresh(name)
            ):
                read(name, buffer)
        if missing:
            raise self._describe_missing(missing, model)
        # Only once everything is read is it known which tensors of the files were left over.
        self._compare_tied(names)
        self._tell_left(everything, names)

    def _fill_layer(self, name: str, layer: PackedLayer, stored: Format) -> None:
        tensors = self._read_layer(name, layer.full_shape, stored, stored.convert)
        try:
            layer.fill_(tensors)
        except ValueError as error:
            raise self._describe_misfit(name, error) from None

    def _find_names(
        self,
        model: PreTrainedModel,
        *,
        quantized: Mapping[str, Any] | None = None,
        places: Iterable[str] = (),
    ) -> Names:
        """The names of the files' tensors in a model.

        Args:
            quantized: as for `Names`; None: of this folder.
            places: names besides those of parameters and buffers.
        """
        everything = full_model(model)
        # A text model can be read from the files of a model with several parts, whose names differ.
        whole = self._has_parts and everything.config.get_text_config() is everything.config
        try:
            return Names(
                everything,
                self._files,
                {*self._readable_names(model), *places},
                of_whole=whole,
                quantized=self._quantized if quantized is None else quantized,
            )
        except FAULTS as error:
            if not self._quantized:
                raise
            raise RecipeError(
                f"{self.knob}: {self.folder}: config.json: quantization_config: {describe_fault(error, 160)}; "
                "restore the "
                "model's own"
            ) from None

    def _describe_missing(self, missing: Sequence[str], model: PreTrainedModel) -> RecipeError:
        return RecipeError(
            f"{self.knob}: {self.folder} lacks {format_names(missing)} ({len(missing):,} of the model's parameters); "
            f"is it a checkpoint of {type(model).__name__}?"
        )

    def require_model(self, model: PreTrainedModel, layers: str, *, cut: bool, headless: bool) -> None:
        """Compares the folder with its model on the meta device, by the headers of the files: no value is read.

        Args:
            layers: name of the module that holds the model's layers.
            cut: the recipe leaves layers out.
            headless: the recipe replaces the head, so the folder need not have one.

        Raises:
            RecipeError: the folder lacks parameters, has them in another shape, or has more layers than the model.
        """
        import torch

        names, shapes = self._find_names(model), self._read_headers(lambda tensor: tensor.get_shape())
        head = getattr(model.get_output_embeddings(), "weight", None)
        missing: list[str] = []
        for name, p in [*model.named_parameters(), *moe.biases(model).items()]:
            if self._is_fresh(name) or any(pattern.search(name) for pattern, _ in self._composed):
                continue
            if (stored := names.find(name)) is None:
                missing += [] if headless and p is head else [name]
                continue
            try:
                value = names.value(name, stored, lambda key: torch.empty(shapes[key], device="meta"))
            except (ValueError, RuntimeError, LookupError, TypeError, AttributeError):
                continue  # some conversions need values: they are compared when they are read
            if value.shape != p.shape and not (headless and p is head):
                raise self._describe_misshapen(name, value, p, stored)
        if missing:
            raise self._describe_missing(missing, model)
        if cut:
            return
        config: PretrainedConfig = model.config.get_text_config()
        count = config.num_hidden_layers
        pattern = re.compile(rf"^{re.escape(layers)}\.(\d+)\.")
        numbers = [int(match[1]) for name in names.unread(model).values() if (match := pattern.match(name))]
        # Layers that predict further tokens follow the model's own, and are left out as by transformers.
        if numbers and max(numbers) >= count + (getattr(config, "num_nextn_predict_layers", None) or 0):
            raise RecipeError(
                f"{self.knob}: {self.folder} holds {max(numbers) + 1} layers, but its config.json has "
                f"num_hidden_layers {count}; restore the model's own (model.config.num_hidden_layers: {count} in the "
                "recipe trains the first ones on purpose)"
            )

    def has_partial_blocks(self) -> bool:
        """True if an FP8 matrix of the folder ends within a block, which transformers cannot dequantize."""
        shapes = self._read_headers(lambda part: tuple(part.get_shape()))
        return any(
            size % blocks
            for key, scales in shapes.items()
            if key.endswith("_scale_inv") and len(scales) == 2
            for size, blocks in zip(shapes.get(key.removesuffix("_scale_inv"), ()), scales, strict=False)
        )

    def _read_headers(self, of: Callable[[Any], T]) -> dict[str, T]:
        """Returns `of` the description of each tensor of the files: no value is read."""
        values = dict[str, T]()
        for file in dict.fromkeys(self._files.values()):
            with open_tensors(file, self.knob) as opened:
                values |= {key: of(opened.get_slice(key)) for key in opened.keys()}  # noqa: SIM118
        return values

    def _describe_misshapen(self, name: str, value: Tensor, target: Tensor, stored: Stored | None) -> RecipeError:
        where = self._files[stored.keys[0]].name if stored is not None else "the folder"
        return RecipeError(
            f"{self.knob}: {self.folder}: {name} is {tuple(value.shape)} in {where} but "
            f"{tuple(target.shape)} by config.json; the folder's files do not belong together"
        )

    def _read_one(self, names: Names, plain: str, target: Tensor) -> bool:
        """Copies a value from the folder into a tensor, or its local shard; returns False if the folder lacks it."""
        from torch import nn
        from torch.distributed.tensor import DTensor

        # A technique assembles this parameter from other tensors (experts from a dense block).
        stored: Stored | None = None
        if make := next((make for pattern, make in self._composed if pattern.search(plain)), None):
            value = make(plain)
        else:
            stored = names.find(plain)
            if stored is None:
                return False
            # A buffer of one number may bound activations (Gemma 4's tower), and be infinite.
            limit = target.ndim == 0 and not isinstance(target, nn.Parameter)
            value = self._read_value(plain, stored, limit=limit)
        # Maps may change the shape (pooled heads, added tokens), so the comparison of shapes follows them.
        for pattern, change in self._maps:
            if pattern.search(plain):
                value = change(plain, value)
        if value.shape != target.shape:
            raise self._describe_misshapen(plain, value, target, stored)
        if isinstance(target, DTensor):
            target.to_local().copy_(_local_shard(value.to(target.device, target.dtype), target))
        else:
            target.copy_(value)
        return True

    def _readable_names(self, model: PreTrainedModel) -> set[str]:
        """Names that a value may be read for: all parameters and buffers of the full model, under all shared names."""
        places = set()
        for part in (model, full_model(model)):
            places |= {
                _strip_wrappers(name)
                for name, _ in part.named_parameters(remove_duplicate=False)
                if not self._is_fresh(name)
            }
            # `state_dict` adds the buffers that are saved.
            places |= {_strip_wrappers(name) for name in part.state_dict(keep_vars=True) if not self._is_fresh(name)}
            places |= {
                f"{_strip_wrappers(name)}.{weight}"
                for name, module in part.named_modules()
                if (packed := self._packed.get(id(module)))
                for weight in packed.weight_names
            }
            for pair in getattr(part, "all_tied_weights_keys", {}).items():
                places |= set(pair)
        return places

    def _read_value(self, name: str, stored: Stored, *, limit: bool = False) -> Tensor:
        """The value of a parameter, assembled from the tensors of the files."""
        assert self._names is not None
        try:
            return self._names.value(name, stored, functools.partial(self._read_tensor, limit=limit))
        except (ValueError, RuntimeError, LookupError, TypeError) as error:
            if isinstance(error, RecipeError):
                raise
            raise RecipeError(
                f"{self.knob}: {self.folder}: {name} cannot be assembled from {format_names(stored.keys)} "
                f"({describe_fault(error, 160)}); is a file missing?"
            ) from None

    def _compare_tied(self, names: Names) -> None:
        """Rejects a folder with different values of two tied matrices, if `models.untie` has not untied them."""
        import torch

        for name, other in names.tied():
            # Reading only one of two tied matrices would silently discard the other's values.
            if not torch.equal(self._read_value(name, names.need(name)), self._read_value(other, names.need(other))):
                raise RecipeError(
                    f"{self.knob}: {self.folder} holds other values of {name} than of {other}, which the model's "
                    "configuration ties; set tie_word_embeddings to false in its config.json, or remove one of the "
                    "two from the file"
                )

    def _tell_left(self, model: PreTrainedModel, names: Names) -> None:
        """Notes the tensors that nothing reads, except those that transformers knows to be unused."""
        unread = names.unread(model).items()
        left = [key for key, name in unread if not any(pattern.search(name) for pattern in self._left)]
        if left:
            self.notes.append(
                f"{self.folder}: {format_names(left)} not used ({len(left):,} tensors): {type(model).__name__} by "
                "config.json has no such parameters"
            )
        for message in self.notes:
            _log.warning("%s: %s", self.knob, message)

    def read(self, name: str) -> Tensor:
        """A parameter's value in the files, for a `map` that needs another parameter's value.

        Raises:
            RecipeError: the files have no such parameter.
        """
        assert self._names is not None, "values are read while the model is filled, or after"
        stored = self._names.find(name)
        if stored is None:
            raise RecipeError(f"{self.knob}: {self.folder} has no {name}")
        return self._read_value(name, stored)

    def _read_tensor(self, key: str, *, limit: bool = False, raw: bool = False) -> Tensor:
        """Returns a tensor of the files.

        Args:
            raw: it holds bytes, of whatever dtype it is.
        """
        file = self._files[key]
        with open_tensors(file, self.knob) as opened:
            if raw:
                return opened.get_tensor(key)
            return check_finite(opened.get_tensor(key), key, file, self.knob, limit=limit)

    def _poison(self, model: PreTrainedModel) -> None:
        """Fills buffers with a sentinel, so that uninitialized ones are detected instead of trained with."""
        import torch

        for _, buffer in model.named_buffers():
            if buffer.dtype != torch.bool:  # has no value for a sentinel
                buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)

    def _check_coverage(self, model: PreTrainedModel) -> None:
        import torch

        for name, buffer in model.named_buffers():
            if buffer.dtype == torch.bool:
                continue
            left = buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min
            if bool(left.any()):
                raise RecipeError(
                    f"model: transformers gives the buffer {name} {tuple(buffer.shape)} no value; preheat cannot "
                    "train this model"
                )


@contextmanager
def _remove_placeholders(module: nn.Module) -> Iterator[None]:
    """Context manager in which a pipeline stage's list has its own layers only: Falcon-H1 initializes by this list."""
    from torch import nn

    from preheat.models.conversions.modules import Passthrough

    lists = {key: child for key, child in module._modules.items() if isinstance(child, nn.ModuleList)}
    module._modules |= {
        key: nn.ModuleList(m for m in child if not isinstance(m, Passthrough)) for key, child in lists.items()
    }
    try:
        yield
    finally:
        module._modules |= lists


def _find_initializers(owner: Any, module: Any) -> Iterator[tuple[Any, Any]]:
    """The modules that have buffers, or are models and may set those of their modules, each with the model around it.

    A composite model's parts have rules of their own, so that each module is initialized by the innermost model.
    """
    from transformers import PreTrainedModel

    model = isinstance(module, PreTrainedModel)
    # The innermost PreTrainedModel around a module knows its initialization.
    owner = module if model else owner
    for child in module.children():
        yield from _find_initializers(owner, child)
    if model or any(True for _ in module.buffers(recurse=False)):
        yield owner, module
