"""Putting the drop-ins under a peer's import path, and taking them away again."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import keyword
import logging
import pkgutil
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .._shared import checks
from ._peers import PEERS, contents

_log = logging.getLogger("pixfuse")
_IMPORT_PATH = "be None or an import path such as 'models.op'"


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


def install(name: str, path: str | None = None, *, rebind: bool = False) -> Installation:
    """Let imports of a peer's ops give pixfuse's, until :func:`uninstall`.

    1. Every later import of the peer's modules (:attr:`Installation.path` and below) gives the drop-in. The rest of
       the peer stays as it is: its packages are imported from where they are, and where there is none an empty
       package stands in.
    2. Modules of the peer that were imported before are replaced where imports find them.
    3. Other modules that still hold a module, function or class of the peer's are listed in the report (and logged),
       or changed with ``rebind``. Only names at the top of modules are found; what sits in closures, default
       arguments, subclasses and instances keeps the peer's code.

    Installing twice does nothing more, and one :func:`uninstall` takes it back; blocks of :func:`installed` count, in
    all threads together, and keep the drop-ins until the last of them has ended. What clients import in between stays
    pixfuse's afterwards.

    Args:
        name: ``"nvlabs"``, ``"rosinality"``, ``"basicsr"`` or ``"mmcv"``.
        path: another import path of the package of ops, for projects with a copy of their own, for example
            ``"models.stylegan2.op"``: of a package with at least one module (or name) of those that the peer's
            package has, or of none that is there, in packages that are there or not.
        rebind: also change the names in other modules that hold the peer's.

    Returns:
        a printable report.

    Raises:
        TypeError: ``name`` or ``path`` is no string.
        ValueError: there is no such peer, or ``path`` is no import path, or that of a module, of another package, of
            pixfuse or of what is installed.

    Example:
        >>> import pixfuse
        >>> print(pixfuse.compat.install("nvlabs"))
        pixfuse.compat: nvlabs is installed as torch_utils.ops
        >>> from torch_utils.ops import bias_act
        >>> pixfuse.compat.uninstall("nvlabs")
    """
    use = _enter(_check("install", name, path), rebind, lasting=True)
    return use.finder.done


def uninstall(name: str, path: str | None = None) -> None:
    """Undo :func:`install`: modules, attributes and import system are as before.

    Args:
        name: the peer.
        path: the path given to ``install``, if any.

    Raises:
        ValueError: ``install`` didn't install it (what a block of ``installed`` did ends with the block).
    """
    name, path = key = _check("uninstall", name, path)
    with _lock:
        use = _installed.get(key)
        if use is None or not use.lasting:
            now = ", ".join(f"{n} as {p}" for (n, p), u in _installed.items() if u.lasting) or "nothing is"
            got = checks.words(f"{name} as {path} (installed: {now})")
            checks.refuse("uninstall", "name", "be that of an installed peer", got)
        use.lasting = False
        _leave(key)


class installed(contextlib.ContextDecorator):
    """:func:`install` for the time of a ``with`` block, whose target is the report, or of a decorated function.

    Blocks may be nested and overlap in several threads; one object serves any number of them.

    Example:
        >>> import pixfuse
        >>> with pixfuse.compat.installed("rosinality"):
        ...     from op import upfirdn2d
    """

    def __init__(self, name: str, path: str | None = None, *, rebind: bool = False) -> None:
        self._key = _check("install", name, path)
        self._rebind = checks.flag("install", "rebind", rebind)
        self._entered = 0

    def __enter__(self) -> Installation:
        use = _enter(self._key, self._rebind, lasting=False)
        with _lock:
            self._entered += 1
        return use.finder.done

    def __exit__(self, *error: object) -> None:
        with _lock:
            if not self._entered:
                raise RuntimeError("installed: a block must be entered before it ends")
            self._entered -= 1
            _installed[self._key].blocks -= 1
            _leave(self._key)


@dataclass
class _Use:
    """What is installed, and for whom."""

    finder: _Finder
    lasting: bool = False  # by install
    blocks: int = 0  # of installed


_installed: dict[tuple[str, str], _Use] = {}
_lock = threading.RLock()  # nothing is imported under it, so it cannot cross the import system's own locks


def _enter(key: tuple[str, str], rebind: bool, lasting: bool) -> _Use:
    checks.flag("install", "rebind", rebind)
    if key not in _installed:
        _check_place(*key)
    finder = _Finder(Installation(*key), *contents(*key))
    with _lock:
        use = _installed.get(key)
        if use is None:
            _check_apart(*key)
            finder.begin()
            use = _installed[key] = _Use(finder)
        done = use.finder.done
        if rebind and not done.rebound:
            use.finder.rebind()
        elif done.held and finder is use.finder:
            _log.warning("%s", done)
        use.lasting |= lasting
        use.blocks += not lasting
        return use


def _leave(key: tuple[str, str]) -> None:
    use = _installed[key]
    if not use.lasting and not use.blocks:
        del _installed[key]
        use.finder.end({parent for other in _installed.values() for parent in other.finder.parents})


# --- which paths ----------------------------------------------------------------------------------------------


def _check(op: str, name: Any, path: Any) -> tuple[str, str]:
    """The peer and the import path to take."""
    checks.choice(op, "name", name, tuple(PEERS))
    if path is None:
        return name, PEERS[name].path
    if not isinstance(path, str):
        checks.refuse(op, "path", _IMPORT_PATH, path, TypeError)
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in path.split(".")):
        checks.refuse(op, "path", _IMPORT_PATH, path)
    return name, path


def _check_apart(name: str, path: str) -> None:
    """No other package of drop-ins is at the path, above or below it."""
    for other, taken in _installed:
        if f"{path}.".startswith(f"{taken}.") or f"{taken}.".startswith(f"{path}."):
            got = checks.words(f"{path}, but {other} is installed as {taken}")
            checks.refuse("install", "path", "be apart from what is installed", got)


def _check_place(name: str, path: str) -> None:
    """At the path there is nothing, or a package that may be the peer's: anything at the peer's own path."""
    if path.partition(".")[0] == "pixfuse":
        checks.refuse("install", "path", "lie outside of pixfuse", path)
    names = _names(path)
    wanted = PEERS[name].modules
    if names is not None and path != PEERS[name].path and names.isdisjoint(wanted):
        got = checks.words(f"{path}, which has none of {', '.join(wanted)}")
        checks.refuse("install", "path", f"be that of a copy of {name}'s ops, or be free", got)


def _names(path: str) -> set[str] | None:
    """The names in the package that imports of ``path`` find, if any. Imports nothing: a peer's may compile."""
    where: Iterable[str] | None = None
    found: Any = None
    for name in (*_above(path), path):
        module = sys.modules.get(name)
        found = _find(name, where) if module is None else module
        if found is None:
            return None
        where = found.submodule_search_locations if module is None else vars(module).get("__path__")
        if where is None:
            at = found.origin if module is None else vars(module).get("__file__")
            got = checks.words(f"{path}, but {name} is the module {at or 'of that name'}")
            checks.refuse("install", "path", "lead through packages", got, remedy="pass the path of the client's copy")
    names = {m.name for m in pkgutil.iter_modules(where)}
    if isinstance(found, ModuleType):
        return names | vars(found).keys()
    with contextlib.suppress(Exception):  # no source, say
        names.update(found.loader.get_code(path).co_names)
    return names


def _find(name: str, where: Iterable[str] | None) -> Any:
    """The spec of a module, below packages that need not be imported."""
    if where is None:
        return _find_real(name, None)
    importers = (pkgutil.get_importer(entry) for entry in where)
    return next((spec for i in importers if i is not None and (spec := i.find_spec(name, None)) is not None), None)


def _find_real(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
    """What the import system would find without the drop-ins."""
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if not isinstance(finder, _Finder) and find is not None:
            spec = find(name, path, target)
            if spec is not None:
                return spec
    return None


def _above(path: str) -> list[str]:
    """``["a", "a.b"]`` for ``"a.b.c"``."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


# --- what is changed, and changed back -----------------------------------------------------------------------


class _Finder:
    """Finds the package of ops, and stands in for packages above it that are not there."""

    def __init__(self, done: Installation, modules: dict[str, ModuleType], exports: dict[str, Any]) -> None:
        self.done = done
        self.modules = {f"{done.path}.{key}": module for key, module in modules.items()}
        self.exports = exports
        self.parents = _above(done.path)
        self.active = False
        self.before: dict[str, Any] = {}  # of sys.modules
        self.attributes: dict[str, tuple[ModuleType, dict[str, Any]]] = {}  # of the modules there and above
        self.old: dict[int, tuple[Any, Any]] = {}
        self.rebound: list[tuple[dict[str, Any], str, Any, Any]] = []

    def begin(self) -> None:
        """Take the path, in ``sys.modules`` too."""
        path = self.done.path
        self.before = self._taken()
        packages = {name: sys.modules.get(name) for name in (*self.parents, *self.before)}
        self.attributes = {name: (m, dict(vars(m))) for name, m in packages.items() if m is not None}
        for name, module in self.before.items():
            if module is None:  # imports of it are refused
                del sys.modules[name]
        package = sys.modules.get(path)
        if package is not None:
            self.old = self._theirs(package)
            self.done.replaced = [name for name in self.modules if name in sys.modules]
            self.fill(package)
            self._find_held()
        self.active = True
        sys.meta_path.insert(0, self)

    def end(self, needed: set[str]) -> None:
        """Leave everything as it was; stand-ins for ``needed`` packages stay."""
        self.active = False
        # A new list: another thread may be running through the old one.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        stand_ins = {p for p in self.parents if p not in needed and _Loader.made(sys.modules.get(p))}
        gone = (self._taken().keys() | stand_ins) - self.before.keys()
        for name in gone:
            del sys.modules[name]
        sys.modules.update(self.before)
        for name in gone | self.before.keys() | {self.done.path}:
            owner, _, attribute = name.rpartition(".")
            value = getattr(sys.modules.get(owner), "__dict__", {}).get(attribute)
            if isinstance(value, ModuleType) and value.__name__ == name:  # imports set it
                _restore(sys.modules[owner], attribute, self.attributes.get(owner, (None, {}))[1])
        functions = (getattr(module, name) for module in self.modules.values() for name in module.__all__)
        ours = {id(value) for value in (*self.modules.values(), *functions, *self.exports.values())}
        for package, attributes in self.attributes.values():
            held = [name for name, value in vars(package).items() if id(value) in ours]
            for name in (*held, "__doc__", "__loader__", "__spec__"):  # a reload changes these
                _restore(package, name, attributes)
        for names, name, theirs, ours in self.rebound:
            if names.get(name) is ours:
                names[name] = theirs

    def fill(self, package: ModuleType) -> None:
        """Set our modules and exports in an imported package."""
        for name, module in self.modules.items():
            sys.modules[name] = module
            setattr(package, name.rpartition(".")[2], module)
        for name, value in self.exports.items():
            setattr(package, name, value)

    def rebind(self) -> None:
        """Change the names in other modules that hold the peer's."""
        self.done.rebound = True
        self._find_held()

    def _taken(self) -> dict[str, Any]:
        """What ``sys.modules`` has at the path and below, and above it where that refuses imports."""
        below = f"{self.done.path}."
        return {
            name: module
            for name, module in list(sys.modules.items())
            if f"{name}.".startswith(below) or (module is None and name in self.parents)
        }

    def _theirs(self, package: ModuleType) -> dict[int, tuple[Any, Any]]:
        """What the peer has under the names that ours will take: by id, with ours."""
        found: dict[int, tuple[Any, Any]] = {}

        def note(theirs: Any, ours: Any) -> None:
            if callable(theirs) or isinstance(theirs, ModuleType):
                found.setdefault(id(theirs), (theirs, ours))

        for name, value in self.exports.items():
            note(vars(package).get(name), value)
        for name, module in self.modules.items():
            theirs = sys.modules.get(name)
            if theirs is None:
                continue
            note(theirs, module)
            for function in module.__all__:
                note(vars(theirs).get(function), getattr(module, function))
        return found

    def _find_held(self) -> None:
        """List, and change if wanted, the names in other modules that hold something of the peer's."""
        theirs = {id(value) for value, _ in self.old.values() if isinstance(value, ModuleType)}
        self.done.held.clear()
        for module_name, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", None)
            if not isinstance(module, ModuleType) or not isinstance(names, dict) or id(module) in theirs:
                continue
            for name, value in list(names.items()):
                pair = self.old.get(id(value))
                if pair is None or pair[0] is not value:
                    continue
                self.done.held.append(f"{module_name}.{name}")
                if self.done.rebound:
                    self.rebound.append((names, name, *pair))
                    setattr(module, name, pair[1])

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The import system asks here first."""
        if name in self.modules:
            return importlib.machinery.ModuleSpec(name, _Ready(self.modules[name]))
        if name != self.done.path and name not in self.parents:
            return None
        real: Any = _find_real(name, path, target)
        if real is not None and name in self.parents:
            return real
        if real is None or real.submodule_search_locations is None:
            return importlib.machinery.ModuleSpec(name, _Loader(self, None), is_package=True)
        real.loader = _Loader(self, real.loader)
        return real


def _restore(module: ModuleType, name: str, before: dict[str, Any]) -> None:
    """Give a module the attribute that it had."""
    if name in before:
        vars(module)[name] = before[name]
    else:
        vars(module).pop(name, None)


class _Ready(importlib.abc.Loader):
    """Gives a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self.module


class _Loader(importlib.abc.Loader):
    """Loads the peer's own package of ops around our modules, or an empty package in its place."""

    def __init__(self, finder: _Finder, real: Any) -> None:
        self.finder = finder
        self.real = real

    @staticmethod
    def made(module: Any) -> bool:
        """Whether a module is an empty package that stands in."""
        loader = getattr(module, "__loader__", None)
        return isinstance(loader, _Loader) and loader.real is None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        create = getattr(self.real, "create_module", None)
        return None if create is None else create(spec)

    def exec_module(self, module: ModuleType) -> None:
        finder, name = self.finder, module.__name__
        if self.real is not None and hasattr(self.real, "exec_module"):
            try:
                self.real.exec_module(module)
            except Exception as error:  # its compiled parts are missing, say
                _log.warning("pixfuse.compat: %s does not import, so only pixfuse's ops are there (%s)", name, error)
        with _lock:
            if not finder.active:
                raise ImportError(f"pixfuse.compat: {finder.done.name} was uninstalled during the import of {name}")
            if name == finder.done.path:
                finder.fill(module)
        if self.real is None:
            stands_in = "Stands in for a package that is not installed; made by pixfuse.compat."
            ops = f"The ops of {finder.done.name}, by pixfuse.compat."
            module.__doc__ = ops if name == finder.done.path else stands_in

    def __getattr__(self, name: str) -> Any:  # get_source, get_resource_reader and so on
        if name == "real" or self.real is None:
            raise AttributeError(name)
        return getattr(self.real, name)
