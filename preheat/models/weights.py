"""WeightSource: where the values of a build's parameters come from, read once, module by module."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from preheat.errors import RecipeError
from preheat.model_folder import fault, finite, listed, open_tensors, read_object, weight_files
from preheat.models import moe
from preheat.models.checkpoint_names import Names, Stored
from preheat.models.hf import whole

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Packed", "WeightSource", "materialize", "mean_rows"]

_log = logging.getLogger("preheat.weights")  # the command line shows it; a program decides by itself


class Packed(Protocol):
    """A module whose `weight` stands packed in other tensors."""

    def written(self) -> AbstractContextManager[Tensor]:
        """The full weight, to be written within; packed on leaving."""


def materialize(
    module: nn.Module, device: Any, *, home: Any = None, placed: Callable[[Tensor], None] | None = None
) -> None:
    """Replaces parameters and buffers on meta by empty ones on `device`, in place. Shared parameters stay shared.

    Args:
        home: where parameters go instead.
        placed: is given each parameter as soon as it is there.
    """
    import torch
    from torch import nn

    made: dict[int, Tensor] = {}
    for child in module.modules():
        stores: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for store in stores:
            for name, old in store.items():
                if old is None or old.device.type != "meta":
                    continue
                if id(old) not in made:
                    is_parameter = isinstance(old, nn.Parameter)
                    new = torch.empty_like(old, device=(home or device) if is_parameter else device)
                    made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
                    if is_parameter and placed is not None:
                        placed(made[id(old)])
                store[name] = made[id(old)]


def mean_rows(value: Tensor, rows: int, first: int, last: int) -> Tensor:
    """An embedding or head with `rows` rows, where those from `first` up to (not with) `last`, and those beyond its own, are the mean of those before.

    Source: https://nlp.stanford.edu/~johnhew/vocab-expansion.html: a row drawn small can outweigh all others in the softmax; the
    mean cannot.

    Example:
        >>> import torch
        >>> mean_rows(torch.tensor([[1.0], [3.0]]), 3, 2, 3).flatten().tolist()
        [1.0, 3.0, 2.0]
    """
    import torch

    mean = value[:first].float().mean(dim=0).to(value.dtype)
    grown = torch.cat([value, mean.expand(max(rows - value.shape[0], 0), -1)])
    grown[first:last] = mean
    return grown


def _share(value: Tensor, like: Any) -> Tensor:
    """What this device keeps of a value that every device has, where the parameter `like` is spread over devices."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()


@contextmanager
def _whole(modules: Iterable[nn.Module], held: dict[int, Any], drawn_too: bool = False) -> Iterator[None]:
    """Within, the modules' own parameters that are spread over devices are whole plain tensors; on leaving, each device keeps its share.

    So every device draws what one device alone would draw. What is not drawn within keeps its value.

    Args:
        held: the parameters that this device has, by id: of the others, which are those of a pipeline's other stages, it keeps nothing.
        drawn_too: also those that transformers is told to leave alone, and with the values that they have: an adapter may begin from its base's.
    """
    import torch
    from torch.distributed.tensor import DTensor

    spread: list[tuple[nn.Module, str, Any]] = [
        (module, name, p)
        for module in modules
        for name, p in module.named_parameters(recurse=False)
        if (isinstance(p, DTensor) or id(p) not in held)
        and p.is_floating_point()
        and (drawn_too or not getattr(p, "_is_hf_initialized", False))
    ]
    device = next(iter(held.values())).device
    for module, name, p in spread:
        begun = drawn_too and isinstance(p, DTensor)
        value = p.full_tensor().clone() if begun else torch.full(p.shape, float("nan"), dtype=p.dtype, device=device)  # type: ignore[attr-defined]
        module._parameters[name] = torch.nn.Parameter(value, requires_grad=p.requires_grad)
    yield
    for module, name, p in spread:
        found: Any = module._parameters[name]
        module._parameters[name] = p
        if id(p) in held and (drawn_too or not bool(found.detach().flatten()[0].isnan())):
            p.to_local().copy_(_share(found.detach(), p))


def _plain(name: str) -> str:
    """A parameter's name without what an adapter put around it."""
    return name.replace(".base_layer.", ".")


def _near(module: nn.Module) -> list[nn.Module]:
    """A module and those whose parameters its initialisation may draw too."""
    children = list(module.children())
    return [module, *children, *(m for child in children for name, m in child.named_children() if name == "base_layer")]


class WeightSource:
    """Values for parameters: from safetensors in a folder, or freshly drawn as transformers draws them.

    Techniques add to it before MATERIALIZE: `map` changes values as they are read (pool, split, quantize), `fresh` draws
    what no checkpoint holds (adapters), `pack` takes values in another form (4 bits). Values are drawn in fp32 and then cast, so that precision does not change them.

    Which files are read, and what their tensors are called in the model, is as transformers has it. What it drops with a warning is in
    `notes`, and logged.

    Args:
        folder: a Hugging Face folder with model.safetensors or its index, or None for new weights.
        knob: what the user calls the folder: begins every message.

    Raises:
        RecipeError: the folder has no safetensors, misses a parameter, or holds values that are not finite.
    """

    def __init__(self, folder: Path | None = None, *, knob: str = "model.path"):
        self.folder, self.knob = folder, knob
        self.notes: list[str] = []
        """What the folder has that the model does not read, in words."""
        self._maps: list[tuple[re.Pattern[str], Callable[[str, Tensor], Tensor]]] = []
        self._composed: list[tuple[re.Pattern[str], Callable[[str], Tensor]]] = []
        self._fresh: list[tuple[re.Pattern[str], Sequence[str], Callable[[nn.Module], None]]] = []
        self._packed: dict[int, Packed] = {}  # by the module's id
        self._left: list[re.Pattern[str]] = []
        self._files: dict[str, Path] = {}
        self._names: Names | None = None
        if folder is not None:
            self._index(folder)

    def _index(self, folder: Path) -> None:
        settings = folder / "config.json"
        stated = read_object(settings, self.knob).get("transformers_weights") if settings.is_file() else None
        found = weight_files(folder, self.knob, stated=stated)
        self.notes = found.notes
        twice = []
        for file in found.files:
            with open_tensors(file, self.knob) as opened:
                for key in opened.keys():  # noqa: SIM118
                    twice += [key] if key in self._files else []
                    self._files[key] = file
        if twice:
            self.notes.append(f"{folder}: {listed(twice)} in two files; the last is read, as by transformers")

    def map(self, pattern: str, change: Callable[[str, Tensor], Tensor]) -> None:
        """Passes each value whose parameter name matches through `change(name, value)`."""
        self._maps.append((re.compile(pattern), change))

    def compose(self, pattern: str, make: Callable[[str], Tensor]) -> None:
        """Parameters whose name matches are not in the checkpoint under that name: `make(name)` puts each together of what is."""
        self._composed.append((re.compile(pattern), make))

    def fresh(self, pattern: str, modules: Sequence[str], draw: Callable[[nn.Module], None]) -> None:
        """Parameters whose name matches are in no checkpoint: `draw(module)` gives them values, for each named module."""
        self._fresh.append((re.compile(pattern), modules, draw))

    def leave(self, pattern: str) -> None:
        """Tensors whose name matches may stay unread without a word: the recipe leaves them out."""
        self._left.append(re.compile(pattern))

    def pack(self, modules: Sequence[Any], pattern: str) -> None:
        """The weights of these modules are in the checkpoint; the parameters that match are what they are packed into, module by module."""
        self._packed |= {id(module): module for module in modules}
        self.fresh(pattern, (), lambda module: None)

    def fingerprint(self) -> str:
        """Changes when the weights' files change: names, sizes and the headers' and last bytes of each."""
        if self.folder is None:
            return "new"
        digest = hashlib.sha256()
        for file in sorted(set(self._files.values())):
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as opened:
                for start in range(0, size, max(size // 64, 1)):
                    opened.seek(start)
                    digest.update(opened.read(4096))
        return digest.hexdigest()[:16]

    def fill(self, model: Any, *, seed: int) -> None:
        """Gives every parameter and buffer of a materialized model its value, in place."""
        import torch

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._poison(model)
            if self.folder is None:
                self._draw(model)
            else:
                self._read(model)
            torch.manual_seed(seed + 1)  # apart from the base model's draws: an adapter does not change them
            everything, held = whole(model), {id(p): p for p in model.parameters()}
            for _, modules, draw in self._fresh:
                for name in modules:
                    with _whole(everything.get_submodule(name).modules(), held, drawn_too=True):
                        draw(everything.get_submodule(name))
            self._uncovered(model)

    def beside(self, model: Any, *, drawn: bool, on_cpu: bool, at_home: bool = False) -> int:
        """Bytes of the model's device that `fill` takes at most beside the model, of which only shapes are looked at.

        Drawn are a module and its children at once: in fp32 where they are kept in less, and whole where devices share them out. Read is one
        value at a time, which is on the device only where that is the CPU, or where devices share it out.

        Args:
            drawn: no checkpoint has them.
            on_cpu: the device is the CPU, whatever shapes are given on.
            at_home: the parameters lie on the host, where values are drawn; one that devices share out goes through the device.
        """
        from torch.distributed.tensor import DTensor

        def drawing(p: Any) -> int:
            whole_too = p.nbytes if isinstance(p, DTensor) else 0  # of a DTensor the size of all shares together
            return whole_too + (p.numel() * 4 if p.is_floating_point() and p.element_size() == 2 else 0)

        if drawn and not at_home:
            return max(
                sum(drawing(p) for m in _near(module) for p in m.parameters(recurse=False))
                for module in model.modules()
            )
        largest: Any = max(model.parameters(), key=lambda p: p.numel())
        if isinstance(largest, DTensor):
            return largest.nbytes
        return largest.nbytes if on_cpu else 0

    def _is_fresh(self, name: str) -> bool:
        return any(pattern.search(name) for pattern, _, _ in self._fresh)

    def _draw(self, model: Any) -> None:
        """transformers' own initialisation, children first as there, in fp32 and then cast.

        A module may draw its children's parameters anew, as GPT-2's blocks do with the projections back to the residual stream, which
        an adapter has moved into a `base_layer` of the child. Of a pipeline's stage the whole model is drawn, and what other stages
        have is let go of, so that each draws what one device would.
        """
        import torch

        held = {id(p): p for p in model.parameters()}
        model = whole(model)
        owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        for name, p in model.named_parameters():  # transformers skips what is marked, and draws nothing for it
            p._is_hf_initialized = self._is_fresh(name)

        def visit(module: nn.Module) -> None:
            for child in module.children():
                visit(child)
            with _whole(_near(module), held):
                draw(module)
            for p in module.parameters(recurse=False):
                if owners[id(p)] > 1:  # a shared parameter is drawn once
                    p._is_hf_initialized = True  # type: ignore[attr-defined]

        def draw(module: nn.Module) -> None:
            own = [p for m in _near(module) for p in m.parameters(recurse=False)]
            kept = {id(p): (p, p.data) for p in own if p.dtype in (torch.bfloat16, torch.float16)}
            for p, low in kept.values():
                p.data = low.float()
            packed = self._packed.get(id(module))
            with packed.written() if packed else nullcontext():
                model._init_weights(module)
            for p, low in kept.values():
                low.copy_(p.data)
                p.data = low

        visit(model)

    def _read(self, model: Any) -> None:
        from torch.distributed.tensor import DTensor

        everything = whole(model)
        self._names = names = Names(everything, self._files, self._places(model))
        seen: set[int] = set()
        missing = []

        def read(name: str, target: Tensor) -> None:
            plain = _plain(name)
            if make := next((make for pattern, make in self._composed if pattern.search(plain)), None):
                value, where = make(plain), "the folder"
            else:
                stored = names.find(plain)
                if stored is None:
                    missing.append(plain)
                    return
                value, where = self._value(plain, stored), self._files[stored.keys[0]].name
            for pattern, change in self._maps:
                if pattern.search(plain):
                    value = change(plain, value)
            if value.shape != target.shape:
                raise RecipeError(
                    f"{self.knob}: {self.folder}: {plain} is {tuple(value.shape)} in {where} but {tuple(target.shape)} by config.json; the folder's files do not belong together"
                )
            if isinstance(target, DTensor):
                target.to_local().copy_(_share(value.to(target.device, target.dtype), target))
            else:
                target.copy_(value)

        for name, parameter in model.named_parameters():
            if id(parameter) in seen or self._is_fresh(name):
                continue
            seen.add(id(parameter))
            read(name, parameter)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        for name, module in model.named_modules():
            if packed := self._packed.get(id(module)):
                with packed.written() as weight:
                    read(f"{name}.weight", weight)
        for module in model.modules():  # what no checkpoint holds: rotary tables and other buffers
            if id(module) not in self._packed and any(True for _ in module.buffers(recurse=False)):
                model._init_weights(module)
        needed, held = moe.biases(model), model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():  # the buffers that one does
            if name in needed or (name in held and names.find(_plain(name)) is not None and not self._is_fresh(name)):
                read(name, buffer)
        if missing:
            raise RecipeError(
                f"{self.knob}: {self.folder} lacks {listed(missing)} ({len(missing):,} of the model's parameters); is it a checkpoint of {type(model).__name__}?"
            )
        self._compare_tied(names)
        self._tell_left(everything, names)

    def _places(self, model: Any) -> set[str]:
        """Names that a value may be read for: all of the whole model's parameters and buffers, under each name that they share."""
        found = set()
        for part in (model, whole(model)):
            found |= {
                _plain(name) for name, _ in part.named_parameters(remove_duplicate=False) if not self._is_fresh(name)
            }
            found |= {_plain(name) for name in part.state_dict(keep_vars=True) if not self._is_fresh(name)}
            found |= {f"{_plain(name)}.weight" for name, module in part.named_modules() if id(module) in self._packed}
            for pair in getattr(part, "all_tied_weights_keys", {}).items():
                found |= set(pair)
        return found

    def _value(self, name: str, stored: Stored) -> Tensor:
        """The value of a parameter, put together of the tensors that the files hold of it."""
        assert self._names is not None
        try:
            return self._names.value(name, stored, self._tensor)
        except (ValueError, RuntimeError, LookupError, TypeError) as error:
            if isinstance(error, RecipeError):
                raise
            raise RecipeError(
                f"{self.knob}: {self.folder}: {name} cannot be put together of {listed(stored.keys)} ({fault(error, 160)}); is a file missing?"
            ) from None

    def _compare_tied(self, names: Names) -> None:
        """Refuses a folder that holds other values of two matrices that the model ties: where `models.untie` does not untie them."""
        import torch

        for name, other in names.tied():
            if not torch.equal(self._value(name, names.need(name)), self._value(other, names.need(other))):
                raise RecipeError(
                    f"{self.knob}: {self.folder} holds other values of {name} than of {other}, which the model's configuration ties; "
                    "set tie_word_embeddings to false in its config.json, or take one of the two out of the file"
                )

    def _tell_left(self, model: Any, names: Names) -> None:
        """Notes the tensors that nothing reads, but for those that transformers knows to be left over."""
        unread = names.unread(model).items()
        left = [key for key, name in unread if not any(pattern.search(name) for pattern in self._left)]
        if left:
            self.notes.append(
                f"{self.folder}: {listed(left)} not used ({len(left):,} tensors): {type(model).__name__} by config.json has no such parameters"
            )
        for words in self.notes:
            _log.warning("%s: %s", self.knob, words)

    def read(self, name: str) -> Tensor:
        """A parameter's value as it stands in the files, for a `map` that needs another one's too.

        Raises:
            RecipeError: the files have none of that name.
        """
        assert self._names is not None, "values are read while the model is filled, or after"
        stored = self._names.find(name)
        if stored is None:
            raise RecipeError(f"{self.knob}: {self.folder} has no {name}")
        return self._value(name, stored)

    def _tensor(self, key: str) -> Tensor:
        file = self._files[key]
        with open_tensors(file, self.knob) as opened:
            return finite(opened.get_tensor(key), key, file, self.knob)

    def _poison(self, model: Any) -> None:
        """Marks every buffer, so that one that nobody fills is found and not trained with as it lies in memory."""
        import torch

        for _, buffer in model.named_buffers():
            if buffer.dtype != torch.bool:  # which has no value to spare
                buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)

    def _uncovered(self, model: Any) -> None:
        import torch

        for name, buffer in model.named_buffers():
            if buffer.dtype == torch.bool:
                continue
            left = buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min
            if bool(left.any()):
                raise RecipeError(
                    f"model: transformers gives the buffer {name} {tuple(buffer.shape)} no value; preheat cannot train this model"
                )
