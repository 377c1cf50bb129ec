"""``patch``: a stock PyTorch model on pixfuse's ops, in place; ``unpatch`` takes it back.

A module is replaced by giving the very same object another class. So its name, parameters, buffers, mode, device, and
whoever refers to it stay as they are, and nothing is left to restore but the class.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from . import _functional
from ._blocks import BLOCKS, original_of
from ._shared import checks
from .group_norm import group_norm
from .upsample import interpolate


class PatchedGroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` on :func:`pixfuse.group_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``."""
        if input.dim() > 5:
            return super().forward(input)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class PatchedGroupNormSiLU(nn.GroupNorm):
    """``torch.nn.GroupNorm`` and the SiLU that follows it, in one pass."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` and apply SiLU."""
        if input.dim() > 5:
            return nn.functional.silu(super().forward(input))
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, act="silu")


class AbsorbedSiLU(nn.SiLU):
    """A SiLU that the module before it computes already."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` itself."""
        return input


class PatchedUpsample(nn.Upsample):
    """``torch.nn.Upsample`` on :func:`pixfuse.interpolate`."""

    def forward(self, input: Tensor) -> Tensor:
        """Resize ``input``."""
        return interpolate(
            input,
            self.size,
            self.scale_factor,
            self.mode,
            self.align_corners,
            recompute_scale_factor=self.recompute_scale_factor,
        )


_STOCK: dict[type[nn.Module], type[nn.Module]] = {
    PatchedGroupNorm: nn.GroupNorm,
    PatchedGroupNormSiLU: nn.GroupNorm,
    AbsorbedSiLU: nn.SiLU,
    PatchedUpsample: nn.Upsample,
}
_STRIDES = "_pixfuse_strides"


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

    1. Known blocks of diffusers (``ResnetBlock2D``, ``Upsample2D``, ``Downsample2D``, known by name) whose parts are
       the usual ones, and whose result on a small random image stays the same.
    2. ``torch.nn.GroupNorm`` followed by ``torch.nn.SiLU``, where the order in an ``nn.Sequential`` or a
       ``torch.fx`` graph of a forward without branches proves that nothing else sees what is between them. Followed by
       the function ``F.silu``: where such a graph is all of forward (``_functional.py``), which is then rewritten.
    3. Every other ``torch.nn.GroupNorm`` and ``torch.nn.Upsample``.

    State dict, parameters, modes, devices and dtypes stay, and so do optimizers and references to modules. Modules
    with hooks, shared, quantised, compiled and scripted modules, and subclasses, are left as they are.
    Under autocast a patched GroupNorm keeps the dtype of its input (PyTorch's gives float32 on GPUs).

    Args:
        model: the model; itself may be one of these modules.
        channels_last: bring 4-D and 5-D weights to channels_last (True) or contiguous (False) layout; what flows
            through the model follows them. None leaves them.

    Returns:
        a printable report: what was replaced, what was left, and why.

    Raises:
        TypeError: ``model`` is no module, or ``channels_last`` is neither None nor a bool.

    Example:
        >>> import torch, pixfuse
        >>> model = torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.SiLU(), torch.nn.Conv2d(4, 4, 1))
        >>> print(pixfuse.patch(model))
        pixfuse.patch: 2 modules of Sequential replaced
          0  GroupNorm with SiLU, fused
          1  SiLU, computed by 0
    """
    _check_model("patch", model)
    if channels_last is not None:
        checks.flag("patch", "channels_last", channels_last)
    report = Report(type(model).__name__)
    paths = _paths(model, report)
    _patch_blocks(paths, report)
    _patch_pairs(paths, report)
    _patch_functions(paths, report)
    for path, module in paths.items():
        if path in report.replaced or path in report.left:
            continue
        kind = _kind(module)
        if kind is None:
            continue
        reason = _obstacle(module, paths)
        if reason:
            report.left[path] = f"{kind}: {reason}"
        elif type(module) is nn.GroupNorm:
            module.__class__ = PatchedGroupNorm
            report.replaced[path] = "GroupNorm"
        elif type(module) is nn.Upsample:
            module.__class__ = PatchedUpsample
            report.replaced[path] = f"Upsample ({module.mode})"
    if channels_last is not None:
        _lay_out(model, channels_last)
        report.layout = "channels_last" if channels_last else "contiguous"
    return report


def unpatch(model: nn.Module) -> list[str]:
    """Undo :func:`patch`: the same objects with their own classes, and weights in their own layout, again.

    Args:
        model: a patched model, or a part or a copy of one.

    Returns:
        the names of the modules that were taken back; an empty list for a model that was not patched.

    Raises:
        TypeError: ``model`` is no module.

    Example:
        >>> import torch, pixfuse
        >>> model = torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.SiLU())
        >>> pixfuse.patch(model) and pixfuse.unpatch(model)
        ['0', '1']
    """
    _check_model("unpatch", model)
    restored = []
    for path, module in model.named_modules():
        stock = _STOCK.get(type(module)) or original_of(type(module))
        if stock is not None:
            module.__class__ = stock
            restored.append(path or "(the model)")
        strides = module.__dict__.pop(_STRIDES, None)
        if strides is not None:
            for name, tensor in _tensors(module):
                if name in strides and len(strides[name]) == tensor.dim():
                    _restride(tensor, strides[name])
    return restored


def _check_model(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        checks.refuse(op, "model", "be a torch.nn.Module", checks.words(type(model).__name__), TypeError)


# --- what is there --------------------------------------------------------------------------------------------


class _Paths(dict[str, nn.Module]):
    """The modules of a model by name, and the names of each."""

    def __init__(self) -> None:
        self.names: dict[int, list[str]] = {}


def _paths(model: nn.Module, report: Report) -> _Paths:
    """All modules but those inside scripted and compiled ones."""
    found = _Paths()

    def visit(module: nn.Module, path: str) -> None:
        names = found.names.setdefault(id(module), [])
        names.append(path)
        if len(names) > 1:
            for name, child in _children(module):
                visit(child, f"{path}.{name}" if path else name)
            return
        closed = _closed(module)
        if closed and any(_kind(m) for m in module.modules()):
            report.left[path or "(the model)"] = f"{type(module).__name__}: {closed}"
        if closed:
            return
        found[path or "(the model)"] = module
        for name, child in _children(module):
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return found


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children in order, a repeated one each time (named_children leaves repetitions out)."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _closed(module: nn.Module) -> str | None:
    """Why nothing inside a module may be touched."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted; patch before scripting"
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return "compiled; patch before compiling"
    return None


def _kind(module: nn.Module) -> str | None:
    """The name of what might be replaced."""
    if type(module) in _STOCK or original_of(type(module)) is not None:
        return None
    if type(module).__name__ in BLOCKS:
        return type(module).__name__
    original = getattr(module, "original_name", type(module).__name__)  # of scripted modules
    if isinstance(module, (nn.GroupNorm, nn.Upsample)) or original in ("GroupNorm", "Upsample", *BLOCKS):
        return str(original)
    return None


def _obstacle(module: nn.Module, paths: _Paths) -> str | None:
    """Why a module is left as it is, if it is."""
    names = paths.names[id(module)]
    if len(names) > 1:
        return f"shared by {' and '.join(names)}"
    if _hooked(module):
        return "it has hooks"
    if "forward" in vars(module):
        return "its forward was replaced"
    kind = type(module)
    if "quantized" in kind.__module__ or "quantizable" in kind.__module__:
        return "quantised"
    if kind not in (nn.GroupNorm, nn.Upsample, nn.SiLU) and kind.__name__ not in BLOCKS:
        return f"a class of its own ({kind.__module__}.{kind.__qualname__})"
    return None


def _hooked(module: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in names)


# --- blocks of diffusers --------------------------------------------------------------------------------------


def _patch_blocks(paths: _Paths, report: Report) -> None:
    """Patch known blocks, and take what they run by themselves then out of ``paths``."""
    for path, module in list(paths.items()):
        make = BLOCKS.get(type(module).__name__)
        if make is None:
            continue
        if original_of(type(module)) is None:
            reason = _obstacle(module, paths)
            inside = [m for m in module.modules() if m is not module]
            if reason is None and any(_hooked(m) or "forward" in vars(m) or _closed(m) for m in inside):
                reason = "something in it has hooks, another forward, or is compiled"
            if reason is None:
                reason, words = make(module)
            if reason is not None:
                report.left[path] = f"{type(module).__name__}: {reason}"
                continue
            report.replaced[path] = f"{type(module).__name__}: {words}"
        for part in module.children():
            if isinstance(part, (nn.GroupNorm, nn.SiLU)):
                for name in paths.names.get(id(part), []):
                    paths.pop(name, None)


# --- GroupNorm and SiLU ---------------------------------------------------------------------------------------


def _patch_pairs(paths: _Paths, report: Report) -> None:
    """Fuse every GroupNorm with the SiLU that is proven to follow it."""
    for path, parent in list(paths.items()):
        if original_of(type(parent)) is not None:
            continue
        prefix = "" if path == "(the model)" else f"{path}."
        owner, _, name = path.rpartition(".")
        apart = _taken_apart(paths.get(owner or "(the model)"), name)
        for norms, act in _followed(parent, report, path):
            act_path = prefix + act
            norm_paths = [prefix + n for n in norms]
            if any(p not in paths or p in report.replaced for p in (act_path, *norm_paths)):
                continue
            if apart:
                report.left[act_path] = f"SiLU: not fused: {apart} takes {name} apart"
                continue
            reasons = {p: _obstacle(paths[p], paths) for p in (act_path, *norm_paths)}
            wrong = {p: r for p, r in reasons.items() if r}
            if wrong:
                for p, reason in wrong.items():
                    report.left[p] = f"{type(paths[p]).__name__}: {reason}"
                if act_path not in wrong:
                    report.left[act_path] = f"SiLU: not fused, because of {' and '.join(wrong)}"
                continue
            for p in norm_paths:
                paths[p].__class__ = PatchedGroupNormSiLU
                report.replaced[p] = "GroupNorm with SiLU, fused"
            paths[act_path].__class__ = AbsorbedSiLU
            report.replaced[act_path] = f"SiLU, computed by {' and '.join(norm_paths)}"


def _followed(parent: nn.Module, report: Report, path: str) -> Iterator[tuple[list[str], str]]:
    """Names below ``parent``: GroupNorms, and the SiLU that follows each of them and nothing else."""
    if type(parent).forward is nn.Sequential.forward and "forward" not in vars(parent):
        for (first, norm), (second, act) in itertools.pairwise(_children(parent)):
            if isinstance(norm, nn.GroupNorm) and type(act) is nn.SiLU:
                yield [first], second
        return
    kinds = {type(m) for m in parent.children()}
    if not (nn.GroupNorm in kinds and nn.SiLU in kinds):
        return

    def leave(name: str, reason: str | None) -> None:
        report.left.setdefault(name if path == "(the model)" else f"{path}.{name}", f"SiLU: not fused: {reason}")

    reached = {"forward", "__init__"}
    graph, reason = _graph(parent, reached)
    if graph is None:
        for name, child in _children(parent):
            if type(child) is nn.SiLU:
                leave(name, reason)
        return
    elsewhere = {step.argval for step in _elsewhere(parent, reached)}
    calls: dict[str, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)

    def kind(node: Any) -> type | None:
        if not isinstance(node, torch.fx.Node) or node.op != "call_module":
            return None
        return type(parent.get_submodule(str(node.target)))

    for called, nodes in calls.items():
        if kind(nodes[0]) is not nn.SiLU:
            continue
        before = [n.args[0] if len(n.args) == 1 else None for n in nodes]
        if not all(kind(b) is nn.GroupNorm and len(b.users) == 1 for b in before):  # type: ignore[union-attr]
            continue
        norms = [str(b.target) for b in before]  # type: ignore[union-attr]
        if not all(all(c in before for c in calls[n]) for n in norms):
            continue
        if elsewhere & {n.partition(".")[0] for n in (*norms, called)}:
            leave(called, "a method besides forward uses it or the norm before it")
        else:
            yield list(dict.fromkeys(norms)), called


def _patch_functions(paths: _Paths, report: Report) -> None:
    """Fuse every GroupNorm with the call of ``F.silu`` that is proven to follow it."""
    for path, parent in list(paths.items()):
        if original_of(type(parent)) is not None or not _functional.calls_silu(parent):
            continue
        prefix = "" if path == "(the model)" else f"{path}."
        owner, _, name = path.rpartition(".")
        reached = {"forward", "__init__"}
        graph, reason = _graph(parent, reached)
        if graph is not None:
            norms = _functional.fusible(parent, graph)
            norms = [n for n in norms if prefix + n in paths and not _obstacle(paths[prefix + n], paths)]
            if not norms:
                continue
            reason = _functional.obstacle(parent, graph)
            apart = _taken_apart(paths.get(owner or "(the model)"), name)
            if apart:
                reason = f"{apart} takes {name} apart"
            elif {step.argval for step in _elsewhere(parent, reached)} & set(norms):
                reason = "a method besides forward uses the norm before it"
        if graph is None or reason:
            report.left[f"{prefix}F.silu"] = f"not fused: {reason}"
            continue
        _functional.rewrite(parent, norms, graph, _graph)
        report.replaced[path] = f"F.silu, computed by {' and '.join(norms)}"
        for n in norms:
            paths[prefix + n].__class__ = PatchedGroupNormSiLU
            report.replaced[prefix + n] = "GroupNorm with SiLU, fused"


def _elsewhere(parent: nn.Module, reached: set[str]) -> Iterator[dis.Instruction]:
    """The instructions of the methods that forward does not call."""
    for key, method in _methods(type(parent)):
        if key not in reached:
            yield from _steps(method.__code__)


class _Tracer(torch.fx.Tracer):
    """Traces the forward of one module and nothing below it."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _graph(parent: nn.Module, reached: set[str] | None = None) -> tuple[torch.fx.Graph | None, str | None]:
    """The graph of a module's own forward if that is the same for every call, or why there is none.

    The names of the methods that forward calls are added to ``reached``.
    """
    reached = {"forward", "__init__"} if reached is None else reached
    if "forward" in vars(parent) or _branches(type(parent), type(parent).forward, reached):
        return None, "forward branches, so its graph proves nothing"
    stand_in = parent.__new__(type(parent))  # forward may change what it is traced on
    stand_in.__dict__ = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(parent).items()}
    stand_in._buffers = {k: None if b is None else b.clone() for k, b in parent._buffers.items()}
    try:
        return _Tracer().trace(stand_in), None
    except Exception:  # whatever user code does with a proxy
        return None, "torch.fx cannot trace forward"


def _branches(owner: type, function: Callable[..., Any], seen: set[str]) -> bool:
    """Whether a method, or another one of ``owner`` that it calls, has more than one way through."""
    try:
        code = inspect.unwrap(function).__code__
    except AttributeError:
        return True
    if any("JUMP" in step.opname or step.opname == "FOR_ITER" for step in _steps(code)):
        return True
    for name in set(code.co_names) - seen:
        method = inspect.getattr_static(owner, name, None)
        if inspect.isfunction(method):
            seen.add(name)
            if _branches(owner, method, seen):
                return True
    return False


def _taken_apart(owner: nn.Module | None, name: str) -> str | None:
    """The class of ``owner`` if one of its methods does anything with its child ``name`` but call it."""
    if owner is None or not name.isidentifier():
        return None
    for key, method in _methods(type(owner)):
        for step in _steps(method.__code__) if key != "__init__" else ():
            # What is called directly is loaded as a method.
            if step.opname == "LOAD_ATTR" and step.argval == name and "NULL" not in step.argrepr:
                return type(owner).__name__
    return None


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    """The functions of a class and its bases up to ``nn.Module``, without decorators that name what they wrap."""
    for cls in itertools.takewhile(lambda c: c is not nn.Module, owner.__mro__):
        for key, value in vars(cls).items():
            if inspect.isfunction(value):
                yield key, inspect.unwrap(value)


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions of a function and of those defined in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _steps(constant)


# --- layout ---------------------------------------------------------------------------------------------------


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _lay_out(model: nn.Module, channels_last: bool) -> None:
    """Bring 4-D and 5-D weights to a layout, and keep the strides that they had at first."""
    before = model.__dict__.setdefault(_STRIDES, {})
    for name, tensor in _tensors(model):
        if tensor.dim() not in (4, 5) or type(tensor.data) is not Tensor or tensor.layout != torch.strided:
            continue
        form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        changed = tensor.data.contiguous(memory_format=form if channels_last else torch.contiguous_format)
        if changed.stride() != tensor.stride():
            before.setdefault(name, tensor.stride())
            tensor.data = changed


def _restride(tensor: Tensor, stride: tuple[int, ...]) -> None:
    if tensor.stride() != stride:
        again = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor.data = again.copy_(tensor.data)
