"""Putting the drop-ins under a peer's import path, and taking them away again."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .._shared import checks
from ._peers import PEERS, contents

_log = logging.getLogger("pixfuse")
_MISSING: Any = object()


@dataclass
class Installation:
    """What :func:`install` did. ``print`` it.

    Attributes:
        name: the peer.
        path: the import path that the drop-ins have taken.
        replaced: modules of the peer that were imported already and are replaced.
        held: places in other modules that hold a module, function or class of the peer's from before, as
            ``"module.name"``; with ``rebind`` they hold the drop-in, else they still call the peer's.
        rebound: whether those places were changed.
    """

    name: str
    path: str
    replaced: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    rebound: bool = False
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        """The report."""
        lines = [f"pixfuse.compat: {self.name} is installed as {self.path}"]
        if self.replaced:
            lines.append(f"  replaced, imported before: {', '.join(self.replaced)}")
        if self.held and self.rebound:
            lines.append(f"  changed in other modules: {', '.join(self.held)}")
        elif self.held:
            lines.append(f"  still the peer's own, held from before: {', '.join(self.held)}")
            lines.append("  (install before importing the client, or pass rebind=True)")
        return "\n".join(lines)

    # Every change goes through these two and leaves its undoing.

    def _set_module(self, name: str, module: ModuleType) -> None:
        before = sys.modules.get(name, _MISSING)
        self._undo.append(lambda: _put(sys.modules, name, before))
        sys.modules[name] = module

    def _set_attribute(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _MISSING)
        self._undo.append(lambda: _put(vars(owner), name, before))
        setattr(owner, name, value)


def _put(where: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        where.pop(name, None)
    else:
        where[name] = value


_installed: dict[tuple[str, str], tuple[Installation, _Finder]] = {}


def install(name: str, path: str | None = None, *, rebind: bool = False) -> Installation:
    """Let imports of a peer's ops give pixfuse's, until :func:`uninstall`.

    1. Every later import of the peer's modules (:attr:`Installation.path` and below) gives the drop-in. The rest of
       the peer stays as it is: its packages are imported from where they are, and where there is none an empty
       package stands in.
    2. Modules of the peer that were imported before are replaced where imports find them.
    3. Other modules that still hold a module, function or class of the peer's are listed in the report (and logged),
       or changed with ``rebind``. Only names at the top of modules are found; what sits in closures, default
       arguments, subclasses and instances keeps the peer's code.

    Installing twice does nothing more. What clients import in between stays pixfuse's after :func:`uninstall`.

    Args:
        name: ``"nvlabs"``, ``"rosinality"``, ``"basicsr"`` or ``"mmcv"``.
        path: another import path of the package of ops, for projects with a copy of their own, for example
            ``"models.stylegan2.op"``.
        rebind: also change the names in other modules that hold the peer's.

    Returns:
        a printable report.

    Raises:
        TypeError: ``name`` or ``path`` is no string.
        ValueError: there is no such peer, or ``path`` is no import path or that of something else.

    Example:
        >>> import pixfuse
        >>> print(pixfuse.compat.install("nvlabs"))
        pixfuse.compat: nvlabs is installed as torch_utils.ops
        >>> from torch_utils.ops import bias_act
        >>> pixfuse.compat.uninstall("nvlabs")
    """
    path = _check("install", name, path)
    checks.flag("install", "rebind", rebind)
    if (name, path) in _installed:
        return _installed[name, path][0]
    for other, taken in _installed:
        if taken == path:
            checks.refuse("install", "path", "be free", checks.words(f"{path}, where {other} is installed"))
    _check_root("install", path)

    done = Installation(name, path, rebound=rebind)
    modules, exports = contents(name, path)
    finder = _Finder(done, modules, exports)
    package = sys.modules.get(path)
    if package is not None:
        old = _theirs(path, package, modules, exports)
        done.replaced = [f"{path}.{key}" for key in modules if f"{path}.{key}" in sys.modules]
        finder.fill(package)
        _find_held(done, old)
    sys.meta_path.insert(0, finder)
    _installed[name, path] = done, finder
    if done.held and not rebind:
        _log.warning("%s", done)
    return done


def uninstall(name: str, path: str | None = None) -> None:
    """Undo :func:`install`: modules, attributes and import system are as before.

    Args:
        name: the peer.
        path: the path given to ``install``, if any.

    Raises:
        ValueError: it is not installed.
    """
    path = _check("uninstall", name, path)
    if (name, path) not in _installed:
        now = ", ".join(f"{n} as {p}" for n, p in _installed) or "nothing is"
        got = checks.words(f"{name} as {path} (installed: {now})")
        checks.refuse("uninstall", "name", "be that of an installed peer", got)
    done, finder = _installed.pop((name, path))
    with contextlib.suppress(ValueError):
        sys.meta_path.remove(finder)
    while done._undo:
        done._undo.pop()()


@contextlib.contextmanager
def installed(name: str, path: str | None = None, *, rebind: bool = False) -> Iterator[Installation]:
    """:func:`install` for the time of a ``with`` block; inside another one for the same peer it changes nothing.

    Example:
        >>> import pixfuse
        >>> with pixfuse.compat.installed("rosinality"):
        ...     from op import upfirdn2d
    """
    outer = (name, path or PEERS[name].path) in _installed if name in PEERS else False
    done = install(name, path, rebind=rebind)
    try:
        yield done
    finally:
        if not outer:
            uninstall(name, path)


def _check(op: str, name: Any, path: Any) -> str:
    """The import path to take."""
    checks.choice(op, "name", name, tuple(PEERS))
    if path is None:
        return PEERS[name].path
    if not isinstance(path, str):
        checks.refuse(op, "path", "be None or an import path such as 'models.op'", path, TypeError)
    if not all(part.isidentifier() for part in path.split(".")):
        checks.refuse(op, "path", "be None or an import path such as 'models.op'", path)
    return path


def _check_root(op: str, path: str) -> None:
    """What is importable under the first name of ``path`` is a package, or nothing is."""
    root = path.partition(".")[0]
    module = sys.modules.get(root)
    spec = getattr(module, "__spec__", None) if module else importlib.util.find_spec(root)
    package = hasattr(module, "__path__") if module else spec is None or spec.submodule_search_locations is not None
    if not package:
        where = getattr(module, "__file__", None) or getattr(spec, "origin", None)
        got = checks.words(f"{path}, but {root} is the module {where}")
        checks.refuse(op, "path", "lead through packages", got, remedy="pass the path of the client's copy")


def _theirs(
    path: str, package: ModuleType, modules: dict[str, ModuleType], exports: dict[str, Any]
) -> dict[int, tuple[Any, Any]]:
    """What the peer has under the names that ours will take: by id, with ours."""
    found: dict[int, tuple[Any, Any]] = {}

    def note(theirs: Any, ours: Any) -> None:
        if callable(theirs) or isinstance(theirs, ModuleType):
            found.setdefault(id(theirs), (theirs, ours))

    for key, value in exports.items():
        note(vars(package).get(key), value)
    for key, module in modules.items():
        theirs = sys.modules.get(f"{path}.{key}")
        if theirs is None:
            continue
        note(theirs, module)
        for name in module.__all__:
            note(vars(theirs).get(name), getattr(module, name))
    return found


def _find_held(done: Installation, old: dict[int, tuple[Any, Any]]) -> None:
    """List, and change if wanted, the names in other modules that hold something of ``old``."""
    theirs = {id(value) for value, _ in old.values() if isinstance(value, ModuleType)}
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if not isinstance(module, ModuleType) or not isinstance(names, dict) or id(module) in theirs:
            continue
        for name, value in list(names.items()):
            pair = old.get(id(value))
            if pair is None or pair[0] is not value:
                continue
            done.held.append(f"{module_name}.{name}")
            if done.rebound:
                done._set_attribute(module, name, pair[1])


class _Finder:
    """Finds the package of ops, and stands in for packages above it that are not there."""

    def __init__(self, done: Installation, modules: dict[str, ModuleType], exports: dict[str, Any]) -> None:
        self.done = done
        self.modules = modules
        self.exports = exports
        parts = done.path.split(".")
        self.parents = {".".join(parts[:i]) for i in range(1, len(parts))}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The import system asks here first."""
        if name != self.done.path and name not in self.parents:
            return None
        real = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if not isinstance(finder, _Finder) and find is not None:
                real = find(name, path, target)
                if real is not None:
                    break
        if real is not None and name in self.parents:
            return real
        if real is None or real.submodule_search_locations is None:
            return importlib.machinery.ModuleSpec(name, _Loader(self, None), is_package=True)
        real.loader = _Loader(self, real.loader)
        return real

    def fill(self, package: ModuleType) -> None:
        """Set our modules and exports in an imported package."""
        path = self.done.path
        for key, module in self.modules.items():
            self.done._set_module(f"{path}.{key}", module)
            self.done._set_attribute(package, key, module)
        for key, value in self.exports.items():
            self.done._set_attribute(package, key, value)

    def forget(self, name: str) -> None:
        """Let the undoing remove a package that was not imported before."""
        owner, _, attribute = name.rpartition(".")

        def undo() -> None:
            sys.modules.pop(name, None)
            if owner in sys.modules:
                vars(sys.modules[owner]).pop(attribute, None)

        self.done._undo.append(undo)


class _Loader(importlib.abc.Loader):
    """Loads the peer's own package of ops around our modules, or an empty package in its place."""

    def __init__(self, finder: _Finder, real: Any) -> None:
        self.finder = finder
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        create = getattr(self.real, "create_module", None)
        return None if create is None else create(spec)

    def exec_module(self, module: ModuleType) -> None:
        finder, name = self.finder, module.__name__
        finder.forget(name)
        if name != finder.done.path:
            module.__doc__ = "Stands in for a package that is not installed; made by pixfuse.compat."
            return
        # Ours come first: the peer's __init__ imports from its modules.
        for key, ours in finder.modules.items():
            finder.done._set_module(f"{name}.{key}", ours)
        if self.real is not None and hasattr(self.real, "exec_module"):
            try:
                self.real.exec_module(module)
            except Exception as error:  # its compiled parts are missing, say
                _log.warning("pixfuse.compat: %s does not import, so only pixfuse's ops are there (%s)", name, error)
        finder.fill(module)
        if not module.__doc__:
            module.__doc__ = f"The ops of {finder.done.name}, by pixfuse.compat."

    def __getattr__(self, name: str) -> Any:  # get_source, get_resource_reader and so on
        if name == "real" or self.real is None:
            raise AttributeError(name)
        return getattr(self.real, name)
