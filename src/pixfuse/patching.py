"""``patch``: a stock PyTorch model on pixfuse's ops, in place; ``unpatch`` takes it back.

First all that is to change is found out, without running anything of the model; then modules get other classes
(``_layers.py`` says what those do and why a class). What is raised on the way undoes what was done.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import _rewrite
from ._layers import LAYERS, Patched, is_sequential, original_of, patched_class, pools_by_two, replaced, watched
from ._shared import checks

_BLOCKS = ("ResnetBlock2D", "Upsample2D", "Downsample2D")  # of diffusers
_ROOT, _STRIDES = "(the model)", "_pixfuse_strides"
_DDP = "DistributedDataParallel"
_LOCK = threading.RLock()


@dataclass
class Report:
    """What :func:`patch` did. ``print`` it.

    Attributes:
        model: the class of the model.
        replaced: what was replaced, by the name of the module, in words.
        left: what might have been replaced and was not, and why.
        layout: the layout that the weights were brought to, in words, if any.
    """

    model: str
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    layout: str | None = None

    def __str__(self) -> str:
        """The report."""
        number = len(self.replaced)
        lines = [f"pixfuse.patch: {number} module{'' if number == 1 else 's'} of {self.model} replaced"]
        if not self.replaced:
            lines = [f"pixfuse.patch: nothing to replace in {self.model}"]
        if self.layout:
            lines[0] += f", weights {self.layout}"
        width = max((len(name) for name in (*self.replaced, *self.left)), default=0)
        lines += [f"  {name:<{width}}  {words}" for name, words in self.replaced.items()]
        if self.left:
            lines.append("left as they are:")
            lines += [f"  {name:<{width}}  {words}" for name, words in self.left.items()]
        return "\n".join(lines)


def patch(model: nn.Module, *, channels_last: bool | None = None) -> Report:
    """Put a stock PyTorch model on pixfuse's ops, in place.

    1. Every ``torch.nn.GroupNorm`` and ``torch.nn.Upsample``. They compute what they did, whoever calls them.
    2. Code that calls SiLU on the result of a GroupNorm: it runs both in one pass. That is the forward of an
       ``nn.Sequential``, and every method whose source has ``silu(norm(x))``, or the two in statements one after the
       other; ``silu`` being ``F.silu`` or an attribute that is ``nn.SiLU``. Where one of the two has hooks when it
       runs, or is not what it was, they run one after the other.
    3. The blocks of diffusers that are known by name: ``ResnetBlock2D`` by 2., ``F.interpolate`` in ``Upsample2D``,
       average pooling in ``Downsample2D``. All else in them runs as it is.

    State dict, parameters, modes, devices and dtypes stay, and so do optimizers and references to modules. Layers with
    hooks, shared, quantised, compiled and scripted ones, subclasses, and what is not PyTorch's own any more are left as
    they are; so are classes whose code would see that ``type(self)`` is another. Nothing of the model is run. Under
    autocast a patched GroupNorm keeps the dtype of its input (PyTorch's gives float32 on GPUs).

    Args:
        model: the model; itself may be one of these modules.
        channels_last: bring 4-D and 5-D weights to channels_last (True) or contiguous (False) layout; what flows
            through the model follows them. None leaves them. Weights that share their memory keep theirs.

    Returns:
        a printable report: what was replaced, what was left, and why.

    Raises:
        TypeError: ``model`` is no module, or ``channels_last`` is neither None nor a bool.
        ValueError: ``channels_last`` is given for a model inside a living DistributedDataParallel, whose buckets of
            gradients keep the layout that weights had when it was made, or is True for one inside FSDP, which takes
            contiguous weights only.

    Example:
        >>> import torch, pixfuse
        >>> model = torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.SiLU(), torch.nn.Conv2d(4, 4, 1))
        >>> print(pixfuse.patch(model))
        pixfuse.patch: 2 modules of Sequential replaced
          (the model)  Sequential: 0 with SiLU in one pass
          0            GroupNorm
    """
    _check_model("patch", model)
    if channels_last is not None:
        checks.flag("patch", "channels_last", channels_last)
        _check_layout(model, channels_last)
    report = Report(type(model).__name__)
    with _LOCK, contextlib.ExitStack() as undo:
        for module, cls in _Plan(model, report).classes:
            _set_class(module, cls, undo)
        if channels_last is not None:
            _lay_out(model, channels_last, report, undo)
            report.layout = "channels_last" if channels_last else "contiguous"
        undo.pop_all()
    return report


def unpatch(model: nn.Module) -> list[str]:
    """Undo :func:`patch`: the same objects with their own classes, and weights in their own layout, again.

    Args:
        model: a patched model, or a part or a copy of one.

    Returns:
        the names of the modules that were taken back; an empty list for a model that was not patched.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: a patched module got a class on top since, as parametrizations and FSDP2 give it, or the weights
            are to change their layout inside DistributedDataParallel.

    Example:
        >>> import torch, pixfuse
        >>> model = torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.SiLU())
        >>> pixfuse.patch(model) and pixfuse.unpatch(model)
        ['(the model)', '0']
    """
    _check_model("unpatch", model)
    with _LOCK, contextlib.ExitStack() as undo:
        modules, uses = dict(_walk(model)), _uses(model)
        originals = {path: original_of(type(module)) for path, module in modules.items()}
        for path, module in modules.items():
            if isinstance(module, Patched) and originals[path] is None:
                got, remedy = checks.words(f"{type(module).__name__} at {path or _ROOT}"), "take it off first"
                checks.refuse("unpatch", "model", "have no class on top of a patched one", got, remedy=remedy)
        changing = []
        for module in modules.values():
            before = vars(module).get(_STRIDES, {})
            for name, tensor in _tensors(module) if before else ():
                shape, strides = before.get(name, (None, None))
                if shape == tensor.shape and _is_plain(tensor) and not _elsewhere(tensor, uses):
                    changing.append((tensor, strides))
        if changing and _holder(model) == _DDP:
            got, remedy = checks.words(type(model).__name__), "delete the wrapper first"
            checks.refuse("unpatch", "model", f"not change the layout of weights inside {_DDP}", got, remedy=remedy)
        for path, module in modules.items():
            if originals[path] is not None:
                _set_class(module, originals[path], undo)
        for tensor, strides in changing:
            undo.callback(_restride, tensor, tensor.stride())
            _restride(tensor, strides)
        for module in modules.values():
            vars(module).pop(_STRIDES, None)
        undo.pop_all()
    return [path or _ROOT for path, original in originals.items() if original is not None]


def _check_model(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        checks.refuse(op, "model", "be a torch.nn.Module", checks.words(type(model).__name__), TypeError)


def _check_layout(model: nn.Module, channels_last: bool) -> None:
    holder = _holder(model)
    if holder == _DDP:
        requirement = f"be None for a model inside {holder} (patch it before)"
        checks.refuse("patch", "channels_last", requirement, channels_last)
    if holder and channels_last:
        requirement = f"be None or False for a model inside {holder}, whose weights are contiguous"
        checks.refuse("patch", "channels_last", requirement, channels_last)


def _holder(model: nn.Module) -> str | None:
    """What shares a model's gradients or weights among processes, and so relies on their strides."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = {nn.parallel.DistributedDataParallel: _DDP}
    if fsdp:
        kinds |= dict.fromkeys((fsdp.FullyShardedDataParallel, fsdp.FSDPModule), "FSDP")
    mine = {id(module) for _, module in _walk(model)}

    def find() -> str | None:
        things = gc.get_objects()  # nothing leads from a module to what wraps it
        classes = set(map(type, things))
        found = {cls: name for kind, name in kinds.items() for cls in classes if issubclass(cls, kind)}
        for thing in things if found else ():
            if type(thing) in found and any(id(module) in mine for _, module in _walk(thing)):
                return found[type(thing)]
        return None

    if not find():
        return None
    gc.collect()  # it may be dead
    return find()


def _set_class(module: nn.Module, cls: Any, undo: contextlib.ExitStack) -> None:
    undo.callback(object.__setattr__, module, "__class__", type(module))
    object.__setattr__(module, "__class__", cls)


# --- what is there --------------------------------------------------------------------------------------------


def _walk(module: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a module by their first names, whatever ``named_modules`` says."""
    seen = set() if seen is None else seen
    if id(module) not in seen:
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from _walk(child, _join(path, name), seen)


class _Paths(dict[str, nn.Module]):
    """The modules of a model by their first name, but those inside scripted and compiled ones."""

    def __init__(self, model: nn.Module, report: Report) -> None:
        super().__init__()
        self.first: dict[int, str] = {}
        self.others: dict[str, list[str]] = {}  # more names of a module, by its first one
        self.visit(model, "", [], report)

    def visit(self, module: nn.Module, path: str, above: list[nn.Module], report: Report) -> None:
        if any(module is m for m in above):  # a cycle
            return
        if id(module) in self.first:
            self.others.setdefault(self.first[id(module)], []).append(path)
            return
        self.first[id(module)] = path
        closed = _closed(module)
        if closed and any(_is_known(m) for _, m in _walk(module)):
            report.left[path or _ROOT] = f"{type(module).__name__}: {closed}"
        if closed:
            return
        self[path] = module
        for name, child in module._modules.items():
            if child is not None:
                self.visit(child, _join(path, name), [*above, module], report)

    def names(self, path: str) -> list[str]:
        """All names of a module, also by those of the modules above it."""
        found = [path]
        for first, others in self.others.items():
            if f"{path}.".startswith(f"{first}."):
                found += [other + path[len(first) :] for other in others]
        return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _closed(module: nn.Module) -> str | None:
    """Why nothing inside a module may be touched."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted; patch before scripting"
    if "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None:
        return "compiled; patch before compiling"
    return None


def _is_known(module: nn.Module) -> bool:
    """Whether a module is one of those that patch is for, scripted ones too."""
    if isinstance(module, Patched):
        return False
    name = module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__
    return isinstance(module, (nn.GroupNorm, nn.Upsample)) or name in ("GroupNorm", "Upsample", *_BLOCKS)


def _obstacle(module: nn.Module) -> str | None:
    """Why a layer is left as it is, if it is."""
    kind = type(module)
    if "forward" in vars(module):
        return "its forward was replaced"
    closed = _closed(module)
    if closed:
        return closed
    if watched(module):
        return "it has hooks"
    if "quantized" in kind.__module__ or "quantizable" in kind.__module__:
        return "quantised"
    if kind not in (*LAYERS, nn.SiLU):
        return f"a class of its own ({kind.__module__}.{kind.__qualname__})"
    return replaced(kind)


# --- what is to be done ---------------------------------------------------------------------------------------


class _Plan:
    """The classes that modules are to have; the reasons go to the report. Changes nothing."""

    def __init__(self, model: nn.Module, report: Report) -> None:
        self.model, self.paths, self.report = model, _Paths(model, report), report
        self.chosen: dict[str, Any] = {}
        self.made: dict[Any, Any] = {}
        self.asking: dict[type, list[str]] = {}
        for path, module in self.paths.items():
            if isinstance(module, (nn.GroupNorm, nn.Upsample)):
                self.add_layer(path, module)
            elif type(module).__name__ == "Downsample2D":
                for name, child in module._modules.items():
                    if type(child) is nn.AvgPool2d and pools_by_two(child) and _join(path, name) in self.paths:
                        self.add_layer(_join(path, name), child)
        for path, module in self.paths.items():
            if isinstance(module, Patched) or path in self.chosen or isinstance(module, (nn.GroupNorm, nn.Upsample)):
                continue
            if is_sequential(type(module)):
                self.add_sequential(path, module)
            else:
                self.add_methods(path, module)
        self.classes = [(self.paths[path], cls) for path, cls in self.chosen.items()]
        order = {path or _ROOT: i for i, path in enumerate(self.paths)}
        report.replaced = dict(sorted(report.replaced.items(), key=lambda item: order[item[0]]))

    def choose(self, path: str, cls: Any, words: str) -> None:
        self.chosen[path] = cls
        self.report.replaced[path or _ROOT] = words

    def leave(self, path: str, module: nn.Module, words: str) -> None:
        self.report.left[path or _ROOT] = f"{type(module).__name__}: {words}"

    def shared(self, path: str) -> str | None:
        names = self.paths.names(path)
        return f"shared by {' and '.join(names)}" if len(names) > 1 else None

    def is_norm(self, module: Any) -> bool:
        """Whether a module is a GroupNorm of ours, or will be."""
        ours = isinstance(module, Patched) or self.paths.first.get(id(module)) in self.chosen
        return isinstance(module, nn.GroupNorm) and ours

    def add_layer(self, path: str, module: nn.Module) -> None:
        if isinstance(module, Patched):
            return
        reason = _obstacle(module)
        if not isinstance(module, nn.AvgPool2d):  # which old blocks have under two names
            reason = self.shared(path) or reason
        if reason:
            self.leave(path, module, reason)
        else:
            mode = f" ({module.mode})" if isinstance(module, nn.Upsample) else ""
            self.choose(path, patched_class(type(module)), f"{type(module).__name__}{mode}")

    def add_sequential(self, path: str, module: nn.Module) -> None:
        norms = []
        for (first, norm), (second, act) in itertools.pairwise(module._modules.items()):
            if self.is_norm(norm) and type(act) is nn.SiLU:
                reason = _obstacle(act)
                if reason:
                    self.leave(_join(path, second), act, f"not fused: {reason}")
                else:
                    norms.append(first)
        reason = self.changes(module) if norms else None
        if reason:
            self.leave(path, module, reason)
        elif norms:
            words = f"{type(module).__name__}: {', '.join(norms)} with SiLU in one pass"
            self.choose(path, patched_class(type(module)), words)

    def changes(self, module: nn.Module) -> str | None:
        """Why a module is to keep its class, if it is."""
        if "forward" in vars(module):
            return "its forward was replaced"
        kind = type(module)
        if kind not in self.asking:
            self.asking[kind] = _rewrite.asking(kind)
        names = " and ".join(self.asking[kind])
        return f"as before: {names} would see another type(self)" if names else None

    def add_methods(self, path: str, module: nn.Module) -> None:
        kind = type(module).__name__
        words = self.words(path, module)
        reason = self.shared(path) or (self.changes(module) if words or kind in _BLOCKS else None)
        if words and reason is None:
            self.choose(path, self.rewritten(module), f"{kind}: {words}")
        elif words:
            self.leave(path, module, str(reason))
        elif (
            kind in _BLOCKS
            and (path or _ROOT) not in self.report.left
            and not any(_join(path, name) in self.chosen for name in module._modules)
        ):
            self.leave(path, module, reason or "nothing in it to replace")

    def words(self, path: str, module: nn.Module) -> str:
        """What would change in the methods of a module."""
        mine = any(map(self.is_norm, module._modules.values()))
        inside = mine or any(self.is_norm(m) for _, m in _walk(module))
        resizing = type(module).__name__ in _rewrite.RESIZING and _interpolates(module)
        if not inside and not resizing:
            return ""
        for name, act in module._modules.items():
            if mine and type(act) is nn.SiLU and _obstacle(act):
                self.leave(_join(path, name), act, f"not fused: {_obstacle(act)}")
        cls = self.rewritten(module)
        found = cls._pixfuse_rewritten if cls else _rewrite.Rewritten({}, {}, False)
        norms = [name for name, way in found.norms.items() if inside and (way is None or self.leads(module, way))]
        if mine and isinstance(module, torch.fx.GraphModule):
            self.leave(path, module, "SiLU not fused; patch before tracing")
        unread = _rewrite.unreadable(type(module), _acts(module)) if mine or resizing else []
        if unread:
            self.leave(path, module, f"as before in {' and '.join(unread)}: decorated, or its source is not at hand")
        words = [f"{', '.join(norms)} with SiLU in one pass"] if norms else []
        return "; ".join(words + ["F.interpolate on pixfuse"] * (found.resizes and resizing))

    def leads(self, module: Any, way: list[str]) -> bool:
        """Whether attributes lead from a module to a GroupNorm of ours, or to what only the code knows."""
        for name in way:
            module = vars(module).get(name) or vars(module).get("_modules", {}).get(name)
            if not isinstance(module, nn.Module):
                return module is None
        return self.is_norm(module)

    def rewritten(self, module: nn.Module) -> Any:
        """The class of a module with its methods rewritten, or None."""
        key = (type(module), _acts(module))
        if key not in self.made:
            self.made[key] = patched_class(*key)
        return self.made[key]


def _acts(module: nn.Module) -> tuple[str, ...]:
    """The attributes of a module that are SiLU without hooks."""
    mine = [name for name, child in module._modules.items() if type(child) is nn.SiLU and not _obstacle(child)]
    return tuple(sorted(mine + [name for name, f in vars(module).items() if f is _rewrite.OWN["silu"]]))


def _interpolates(block: Any) -> bool:
    """Whether an Upsample2D comes to ``F.interpolate``."""
    return not getattr(block, "use_conv_transpose", False) and getattr(block, "interpolate", True)


# --- layout ---------------------------------------------------------------------------------------------------


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model, each once."""
    seen = set()
    for path, module in _walk(model):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield _join(path, name), tensor


def _memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _uses(model: nn.Module) -> Counter[Any]:
    """How many tensors of a model have the same memory."""
    others = [t for _, m in _walk(model) for t in vars(m).values() if isinstance(t, Tensor)]
    each = {id(t): t for t in (*others, *(t for _, t in _tensors(model))) if _is_plain(t)}
    return Counter(map(_memory, each.values()))


def _elsewhere(tensor: Tensor, uses: Counter[Any]) -> bool:
    """Whether the memory of a tensor, or a part of it, is that of others too, or one value has many places."""
    shared = tensor.device.type == "cpu" and tensor.is_shared()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return shared or not whole or uses[_memory(tensor)] > 1


def _is_plain(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and type(tensor.data) is Tensor and tensor.layout == torch.strided


def _lay_out(model: nn.Module, channels_last: bool, report: Report, undo: contextlib.ExitStack) -> None:
    """Bring 4-D and 5-D weights to a layout, and keep the strides that they had at first."""
    before = dict(vars(model).get(_STRIDES, {}))
    uses = _uses(model)
    for name, tensor in _tensors(model):
        if is_lazy(tensor):
            report.left[name] = "not there yet; call the model once, then patch it"
            continue
        if tensor.dim() not in (4, 5) or not _is_plain(tensor):
            continue
        form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        changed = tensor.data.contiguous(memory_format=form if channels_last else torch.contiguous_format)
        if changed.stride() == tensor.stride():
            continue
        if _elsewhere(tensor, uses):
            report.left[name] = "keeps its layout: its memory is shared"
            continue
        before.setdefault(name, (tensor.shape, tensor.stride()))
        undo.callback(_restride, tensor, tensor.stride())
        tensor.data = changed
    if before:
        vars(model)[_STRIDES] = before


def _restride(tensor: Tensor, stride: tuple[int, ...]) -> None:
    if tensor.stride() != stride:
        again = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor.data = again.copy_(tensor.data)
