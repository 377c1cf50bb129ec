"""Launching Triton kernels: on the tensors' own device and stream, with little Python per call.

A room's op function looks up a :class:`Launch` by everything that decides it (``functools.lru_cache`` on shapes,
strides, dtype and scalars), allocates the result and calls the launch with the tensors. Kernels take their pointers
first, then run-time scalars, then constexprs. Grids are one-dimensional (at most 2^31 - 1 programs).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction, driver

from .layout import dense_strides, is_channels_last

ALIGNMENT = 16  # bytes; what Triton asks of a pointer before it loads and stores 16 bytes at once


class Launch:
    """One kernel with its grid and every argument but the tensors, whose dtypes (and absences) never change.

    The first call on a device goes through Triton's own launcher, which compiles; later ones go straight to the
    compiled kernel, without the hooks that Triton's profilers may set. A call with a tensor that is not 16-byte
    aligned always takes Triton's launcher.
    """

    __slots__ = ("_compiled", "arguments", "kernel", "options", "programs")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        scalars: Sequence[int | float],
        constants: Sequence[Any],
        num_warps: int = 4,
        num_stages: int = 2,
    ) -> None:
        """Fix a launch.

        Args:
            kernel: a ``triton.jit`` function ``(pointers..., scalars..., constexprs...)``.
            programs: the size of the grid; 0 launches nothing.
            scalars: the run-time scalars, in the kernel's order.
            constants: the constexprs, in the kernel's order.
            num_warps: warps per program.
            num_stages: depth of the software pipeline.
        """
        self.kernel = kernel
        self.programs = programs
        self.arguments = (*scalars, *constants)
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        self._compiled: dict[int, _Launcher] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on ``tensors`` (the first is not None); None stands for an absent pointer."""
        device = tensors[0].get_device()  # type: ignore[union-attr]
        compiled = self._compiled.get(device)
        if compiled is not None and device == _current_device():
            pointers = [None if t is None else t.data_ptr() for t in tensors]
            bits = 0
            for pointer in pointers:
                if pointer is not None:
                    bits |= pointer
            if bits % ALIGNMENT == 0:
                run, stream, fixed = compiled
                run(self.programs, 1, 1, stream(device), *fixed, *pointers, *self.arguments)
                return
        self._launch(device, tensors)

    def _launch(self, device: int, tensors: tuple[Tensor | None, ...]) -> None:
        if self.programs == 0:
            return
        if not isinstance(self.kernel, JITFunction):  # the interpreter
            self._by_triton(tensors)
            return
        if device != _current_device():
            with torch.get_device_module(tensors[0].device).device(device):  # type: ignore[union-attr]
                self(*tensors)
            return
        kernel = self._by_triton(tensors)
        aligned = all(t is None or t.data_ptr() % ALIGNMENT == 0 for t in tensors)
        if aligned and kernel is not None:
            self._compiled[device] = _launcher(kernel)

    def _by_triton(self, tensors: tuple[Tensor | None, ...]) -> Any:
        return self.kernel[(self.programs, 1, 1)](*tensors, *self.arguments, **self.options)


_Launcher = tuple[Callable[..., None], Callable[[int], int], tuple[Any, ...]]


def _launcher(kernel: Any) -> _Launcher:
    """What launches a compiled kernel, what gives a device's stream, and what is passed after grid and stream."""
    run, stream = kernel.run, driver.active.get_current_stream
    rest = (kernel.packed_metadata, None, None, None)  # no hooks
    known = triton.__version__.startswith("3.6.") and type(run).__name__ == "CudaLauncher"
    if known and run.global_scratch_size == 0 and run.profile_scratch_size == 0:
        # What its __call__ does for kernels that need no scratch memory, in half a microsecond less.
        return run.launch, stream, (kernel.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *rest)
    return run, stream, (kernel.function, *rest)


def planned(plan: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """An op from its plan: ``plan(*args)`` is the op as a function for all tensors like those of ``args``.

    That function takes all arguments too, and uses the tensors alone. It is kept for the next call (see ``calls``);
    if it has an attribute ``first``, that one is kept where the op's other results are not wanted.
    """

    @functools.wraps(plan)
    def op(*args: Any, **options: Any) -> Any:
        return plan(*args, **options)(*args)

    op.plan = plan  # type: ignore[attr-defined]
    return op


def dense(t: Tensor | None) -> Tensor | None:
    """A vector without gaps."""
    return None if t is None else t.contiguous()


def _ask_driver() -> int:
    return driver.active.get_current_device()


# PyTorch's own says the same in a third of the time.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _ask_driver)


class Form(NamedTuple):
    """What a launch asks about the memory of an image."""

    channels_last: bool
    dense: bool  # without gaps, in that layout
    strides: tuple[int, ...]  # of a dense tensor of its shape and layout


@functools.lru_cache(maxsize=4096)
def form(shape: tuple[int, ...], strides: tuple[int, ...]) -> Form:
    """The memory layout of a tensor, looked up: finding it out takes longer than a small kernel."""
    channels_last = is_channels_last(torch.empty_strided(shape, strides, device="meta"))
    dense = dense_strides(shape, channels_last)
    return Form(channels_last, dense == strides, dense)


def new(like: Tensor, shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A dense uninitialised tensor of ``shape`` in the given layout, as ``layout.empty`` but with looked-up strides."""
    strides = _strides(shape, channels_last)
    return torch.empty_strided(shape, strides, dtype=like.dtype if dtype is None else dtype, device=like.device)


_strides = functools.lru_cache(maxsize=4096)(dense_strides)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def _probe_kernel(x):
    tl.store(x, 1.0)


@functools.cache
def why_unusable(device: torch.device) -> str | None:
    """None if Triton can compile for ``device`` and run there, else the reason in one line.

    Triton needs a driver that it knows and, for the stub that calls it, a C compiler; a machine may lack either.
    """
    try:
        Launch(_probe_kernel, 1, (), (), num_warps=1)(torch.empty(1, device=device))
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"Triton does not work here ({type(error).__name__}: {lines[0] if lines else 'no message'})"
    return None
