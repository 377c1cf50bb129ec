"""The battery that every public op passes, and the golden vectors.

The truth is the op *by definition*: its reference in float64, differentiated by PyTorch's own autograd, which knows
nothing of the rules under test. The tolerance is a rule: ``error <= 2 * error of the reference in that dtype + 2 ulp``
of the largest value; float64 itself may differ from the truth by the order of its sums only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .layout import is_channels_last
from .library import by_definition

DEVICE = os.environ.get("PIXFUSE_TEST_DEVICE", "cpu")  # where tests compute; ``make gpu`` says cuda
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call of a public op.

    Attributes:
        id: a readable name, for example ``n2-c3-17x23-up2``.
        inputs: the differentiable tensor arguments by name, as shapes; ``x`` comes first.
        params: the other arguments.
        fixed: tensors that are not differentiated and keep their dtype (filters), by name.
        thorough: whether the slow checks (opcheck, compile, export, torch.func) run on it too; a few cases suffice.
    """

    id: str
    inputs: Mapping[str, tuple[int, ...]]
    params: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Tensor] = field(default_factory=dict)
    thorough: bool = False

    def tensors(self, dtype: torch.dtype, channels_last: bool = False, device: str = DEVICE) -> dict[str, Tensor]:
        """Fresh random leaves of the inputs; the same numbers for every dtype that holds them, layout and device."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.id.encode()))
        made = {}
        for name, shape in self.inputs.items():
            # Short binary fractions are exact in every dtype and land on no kink.
            values = (torch.randn(shape, generator=generator, dtype=torch.float64) * 32).round() / 32 + 1 / 128
            value = values.to(device, dtype)
            if name == "x" and channels_last:
                value = as_channels_last(value)
            made[name] = value.requires_grad_()
        return made

    def run(self, function: Callable[..., Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
        """Call ``function`` on ``tensors``."""
        device = next(iter(tensors.values())).device
        return function(**tensors, **{k: f.to(device) for k, f in self.fixed.items()}, **self.params)


def as_channels_last(x: Tensor) -> Tensor:
    """A channels_last copy of any rank from 3; other ranks as they are."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x


def random_like(y: Tensor, seed: int = 1) -> Tensor:
    """Random numbers of the shape and dtype of ``y``, exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(y.shape, generator=generator, dtype=torch.float64) * 16).round() / 16
    return values.to(y.device, y.dtype)


def assert_within(got: Tensor, plain: Tensor, truth: Tensor, what: str, spread: float = 0.0) -> None:
    """``got`` is as near to the ``truth`` as the tolerance rule asks.

    Args:
        got: our result.
        plain: the reference's result in the same dtype.
        truth: the float64 result.
        what: the name for the message.
        spread: how large a sum of such terms would be if they were random, for sums that cancel.
    """
    assert got.shape == truth.shape, f"{what}: shape {list(got.shape)} is not {list(truth.shape)}"
    if truth.numel() == 0:
        return
    assert bool(torch.isfinite(got).all()) or not bool(torch.isfinite(truth).all()), f"{what}: not finite"
    scale = max(float(truth.abs().max()), spread)
    error, plain_error = (float((t.double() - truth).abs().max()) for t in (got, plain))
    ulp = torch.finfo(got.dtype).eps * scale
    allowed = 2 * plain_error + 2 * ulp if got.dtype != torch.float64 else 1e-12 * scale
    assert error <= allowed, f"{what}: error {error:.3g} exceeds {allowed:.3g} (reference: {plain_error:.3g})"
    if float(truth.abs().max()) > 0:
        assert float(got.abs().max()) > 0, f"{what}: all zero, but the truth is not"


# --- the battery: each check takes (function, case) ---------------------------------------------------------------

Check = Callable[[Callable[..., Tensor], Case], None]


def check_values_and_gradients(
    function: Callable[..., Tensor],
    case: Case,
    device: str = DEVICE,
    dtypes: Sequence[torch.dtype] = DTYPES,
    layouts: Sequence[bool] = (False, True),
) -> None:
    """Value, first and second gradient in every dtype and both layouts."""
    for dtype in dtypes:
        for channels_last in layouts:
            # The truth sees the same rounded inputs.
            made = case.tensors(dtype, channels_last, device)
            exact = {k: t.detach().double().requires_grad_() for k, t in made.items()}
            second = dtype in (torch.float64, torch.float32)
            with by_definition():
                truth = _orders(function, case, exact, second)
                plain = _orders(function, case, case.tensors(dtype, channels_last, device), second)
            got = _orders(function, case, made, second)
            for (what, value), (_, reference), (_, exactly) in zip(got, plain, truth, strict=True):
                label = f"{case.id} {dtype} {'channels_last' if channels_last else 'contiguous'} {what}"
                assert (value is None) == (exactly is None), f"{label}: {value} against {exactly}"
                if value is None or reference is None or exactly is None:
                    continue
                terms = made["x"].numel() / max(value.numel(), 1)
                spread = math.sqrt(terms) if terms > 1.5 and not what.startswith("y") else 0.0
                assert_within(value, reference, exactly, label, spread)
                if value.shape == made["x"].shape and value.dim() > 2 and what in ("y", "dx"):
                    same = is_channels_last(value) == is_channels_last(made["x"])
                    assert same or value.is_contiguous() or value.shape[1] == 1, f"{label}: layout lost"


def _orders(
    function: Callable[..., Tensor], case: Case, tensors: dict[str, Tensor], second: bool
) -> list[tuple[str, Tensor | None]]:
    """The value, the gradients and (``second``) the gradients of a random combination of the gradients."""
    y = case.run(function, tensors)
    found: list[tuple[str, Tensor | None]] = [("y", y.detach())]
    dy = random_like(y).requires_grad_()
    first = torch.autograd.grad(y, list(tensors.values()), dy, create_graph=True)
    found += [(f"d{name}", g.detach()) for name, g in zip(tensors, first, strict=True)]
    if second:
        total = sum(((random_like(g, 2 + i) * g).sum() for i, g in enumerate(first)), torch.zeros(()))
        if total.requires_grad:
            curvature = torch.autograd.grad(total, [dy, *tensors.values()], allow_unused=True)
            for name, g in zip(("dy", *tensors), curvature, strict=True):
                # None and zeros say the same.
                like = dy if name == "dy" else tensors[name]
                found.append((f"gg_{name}", torch.zeros_like(like) if g is None else g))
    return found


def check_forward_mode(function: Callable[..., Tensor], case: Case, device: str = DEVICE) -> None:
    """The value beside a tangent is the op's own to the last bit, and the tangent keeps the rule, in every dtype."""

    def jvp(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        values = tuple(t.detach() for t in tensors.values())
        tangents = tuple(random_like(v, 7 + i) for i, v in enumerate(values))
        found = torch.func.jvp(lambda *v: case.run(function, dict(zip(tensors, v, strict=True))), values, tangents)
        return found[0], found[1]

    for dtype, channels_last in zip(DTYPES, (False, True, False, True), strict=True):
        made = case.tensors(dtype, channels_last, device)
        with by_definition():
            truth = jvp({k: t.double() for k, t in made.items()})[1]
            plain = jvp(made)[1]
        value, tangent = jvp(made)
        label = f"{case.id} {dtype} tangent"
        with torch.no_grad():
            assert torch.equal(value, case.run(function, made)), f"{label}: another value"
        assert tangent.dtype == dtype, label
        assert_within(tangent, plain, truth, label)


def check_gradcheck(function: Callable[..., Tensor], case: Case) -> None:
    """First and second derivatives against finite differences."""
    made = case.tensors(torch.float64)

    def call(*values: Tensor) -> Tensor:
        return case.run(function, dict(zip(made, values, strict=True)))

    values = tuple(made.values())
    assert torch.autograd.gradcheck(call, values, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, values, fast_mode=True)


def check_masks(function: Callable[..., Tensor], case: Case) -> None:
    """For every choice of inputs that require a gradient exactly those get one, equal to the full set's."""
    names = list(case.inputs)
    everything = case.tensors(torch.float32)
    y = case.run(function, everything)
    dy = random_like(y)
    full = dict(zip(names, torch.autograd.grad(y, list(everything.values()), dy), strict=True))
    for mask in range(1, 2 ** len(names)):
        wanted = [name for i, name in enumerate(names) if mask >> i & 1]
        made = {k: t.detach().requires_grad_(k in wanted) for k, t in case.tensors(torch.float32).items()}
        case.run(function, made).backward(dy)
        for name, t in made.items():
            assert (t.grad is not None) == (name in wanted), f"{case.id}: gradient of {name} with {wanted}"
            if t.grad is not None:
                torch.testing.assert_close(t.grad, full[name])


def check_strides(function: Callable[..., Tensor], case: Case) -> None:
    """Sliced, stepped, flipped-copy, permuted, expanded and unsqueezed inputs and gradients of every kind."""
    made = {k: t.detach() for k, t in case.tensors(torch.float32).items()}
    x = made["x"]
    expected = case.run(function, made)
    variants = {"transposed": x.transpose(0, -1).contiguous().transpose(0, -1)}
    wide = x.new_full([2 * s + 1 for s in x.shape], float("nan"))
    inner = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    variants["stepped"] = inner.copy_(x)
    if x.dim() > 2:
        variants["channels_last"] = as_channels_last(x)
        padded = torch.cat([as_channels_last(x)] * 2, 1).movedim(1, -1).contiguous().movedim(-1, 1)
        variants["channel slice of channels_last"] = padded[:, : x.shape[1]]
        variants["batch slice"] = torch.cat([x, x])[x.shape[0] :]
    for name, value in variants.items():
        assert torch.equal(value, x)
        got = case.run(function, {**made, "x": value})
        torch.testing.assert_close(got, expected, msg=partial("{} {}: {}".format, case.id, name))
    if x.dim() > 2 and case.params.get("dim", 1) != 0:
        single = as_channels_last(x)[:1]
        again = as_channels_last(x)[0].unsqueeze(0)
        for value in (single, again):
            y = case.run(function, {**made, "x": value.requires_grad_()})
            assert y.movedim(1, -1).is_contiguous(), f"{case.id}: channels_last lost for a batch of one"
            torch.testing.assert_close(y, expected[:1])
            (dx,) = torch.autograd.grad(y, value, torch.ones_like(y))
            assert dx.movedim(1, -1).is_contiguous(), f"{case.id}: the gradient lost channels_last"
    dy = expected.new_ones(()).expand_as(expected)
    for gradient in (dy, as_channels_last(dy.contiguous())):
        tensors = {k: t.clone().requires_grad_() for k, t in made.items()}
        found = torch.autograd.grad(case.run(function, tensors), list(tensors.values()), gradient)
        tensors = {k: t.clone().requires_grad_() for k, t in made.items()}
        plain = torch.autograd.grad(case.run(function, tensors), list(tensors.values()), torch.ones_like(expected))
        for a, b in zip(found, plain, strict=True):
            torch.testing.assert_close(a, b)


def check_deterministic(function: Callable[..., Tensor], case: Case) -> None:
    """Bit-equal from run to run, for 1 to 3 threads and whatever batch a sample is in; no uninitialised memory."""

    def everything(tensors: dict[str, Tensor]) -> list[Tensor]:
        y = case.run(function, tensors)
        return [y, *torch.autograd.grad(y, list(tensors.values()), random_like(y))]

    for dtype in (torch.float32, torch.bfloat16):
        for channels_last in (False, True):
            first = everything(case.tensors(dtype, channels_last))
            threads = torch.get_num_threads()
            try:
                for count in (1, 2, 3):
                    torch.set_num_threads(count)
                    with _deterministic_mode():
                        again = everything(case.tensors(dtype, channels_last))
                    for a, b in zip(first, again, strict=True):
                        assert torch.equal(a, b), f"{case.id} {dtype}: differs with {count} threads"
            finally:
                torch.set_num_threads(threads)
            made = {k: t.detach() for k, t in case.tensors(dtype, channels_last).items()}
            whole = case.run(function, made)
            batch = made["x"].shape[0]
            if whole.dim() == 0 or whole.shape[0] != batch or case.params.get("dim", 1) == 0:
                continue
            for i in range(batch):
                alone = case.run(function, {**made, "x": made["x"][i : i + 1]})
                assert torch.equal(whole[i : i + 1], alone), f"{case.id} {dtype}: sample {i} depends on its batch"


@contextlib.contextmanager
def _deterministic_mode() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_opcheck(function: Callable[..., Tensor], case: Case) -> None:
    """``torch.library.opcheck`` of every operator that value and gradients call, dynamic shapes included."""
    seen: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "pixfuse":
                seen.setdefault(str(func), (func, args))
            return func(*args, **(kwargs or {}))

    made, fixed = case.tensors(torch.float32), {k: f.to(DEVICE) for k, f in case.fixed.items()}
    with Recorder():
        y = function(**made, **fixed, **case.params)
        first = torch.autograd.grad(y, list(made.values()), random_like(y), create_graph=True)
        total = sum((g.square().sum() for g in first), torch.zeros(()))
        if total.requires_grad:
            total.backward()
    assert seen, f"{case.id}: no pixfuse operator was called"
    constant = {f.data_ptr() for f in fixed.values()}
    for func, args in seen.values():
        fresh = tuple(
            a.detach().clone().requires_grad_(a.is_floating_point() and a.data_ptr() not in constant)
            if isinstance(a, Tensor)
            else a
            for a in args
        )
        torch.library.opcheck(func, fresh)


def check_compile(function: Callable[..., Tensor], case: Case) -> None:
    """Compiled with fullgraph equals eager bit for bit, forward and backward, and one graph serves other sizes."""
    torch._dynamo.reset()

    def call(tensors: dict[str, Tensor]) -> Tensor:
        return case.run(function, tensors)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for grow in (0, 1, 2):
        fixed = case.params.get("dim")
        shapes = {
            k: tuple(n + grow * (k == "x" and d >= 2 and d != fixed) for d, n in enumerate(s))
            for k, s in case.inputs.items()
        }
        if "size" in case.params and grow:
            break
        results = []
        for run in (call, compiled):
            made = Case(case.id, shapes).tensors(torch.float32)
            for d in range(2, made["x"].dim()):
                if d != case.params.get("dim"):  # the bias fixes that size
                    torch._dynamo.mark_dynamic(made["x"], d)
            with torch._dynamo.config.patch(error_on_recompile=grow > 0):
                y = run(made)
            results.append([y, *torch.autograd.grad(y, list(made.values()), random_like(y))])
        for eager, other in zip(*results, strict=True):
            assert torch.equal(eager, other), f"{case.id}: compiled differs from eager"
    torch._dynamo.reset()


def check_export(function: Callable[..., Tensor], case: Case) -> None:
    """``torch.export`` takes a module with the op and keeps its values."""

    class Module(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor]) -> Tensor:
            return case.run(function, tensors)

    made = {k: t.detach() for k, t in case.tensors(torch.float32).items()}
    program = torch.export.export(Module(), (made,))
    assert torch.equal(program.module()(made), case.run(function, made))


def check_func(function: Callable[..., Tensor], case: Case) -> None:
    """Vmap over every input and over nothing, torch.func grad, vjp, jacrev of a slice, jvp and forward-mode AD."""
    made = {k: t.detach() for k, t in case.tensors(torch.float64).items()}
    names = list(made)

    def call(*values: Tensor) -> Tensor:
        return case.run(function, dict(zip(names, values, strict=True)))

    values = tuple(made.values())
    for mapped in range(1, 2 ** len(names)):
        for dim in (0, -1):
            in_dims = tuple(dim if mapped >> i & 1 else None for i in range(len(names)))
            stacks = [
                torch.stack([v, 2 * v - 1, v.flip(0) if v.dim() else -v], d) if d is not None else v
                for v, d in zip(values, in_dims, strict=True)
            ]
            got = torch.vmap(call, in_dims)(*stacks)
            for i in range(3):
                single = call(*(s if d is None else s.select(d, i) for s, d in zip(stacks, in_dims, strict=True)))
                torch.testing.assert_close(got[i], single, msg=partial("{} vmap {}: {}".format, case.id, in_dims))

    dy = random_like(call(*values))
    every = tuple(range(len(names)))
    expected = _plain_gradients(call, values, dy)

    def loss(*v: Tensor) -> Tensor:
        return (call(*v) * dy).sum()

    for got_g, want in zip(torch.func.grad(loss, every)(*values), expected, strict=True):
        torch.testing.assert_close(got_g, want)
    stacked = tuple(torch.stack([v, 2 * v - 1]) for v in values)
    per_sample = torch.vmap(torch.func.grad(loss, every))(*stacked)
    for i in range(2):
        want_i = _plain_gradients(call, tuple(s[i] for s in stacked), dy)
        for got_g, want in zip(per_sample, want_i, strict=True):
            torch.testing.assert_close(got_g[i], want)
    none = tuple(v.new_zeros(0, *v.shape) for v in values)
    assert torch.vmap(call)(*none).shape == (0, *dy.shape), f"{case.id}: vmap of no problems"
    for got_g, v in zip(torch.vmap(torch.func.grad(loss, every))(*none), values, strict=True):
        assert got_g.shape == (0, *v.shape), f"{case.id}: vmap of no gradients"
    tangents = tuple(random_like(v, 7 + i) for i, v in enumerate(values))
    forward = torch.func.jvp(call, values, tangents)[1]
    both = sum((t * g).sum() for t, g in zip(tangents, expected, strict=True))
    torch.testing.assert_close((forward * dy).sum(), both)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(v, t) for v, t in zip(values, tangents, strict=True)]
        dual = torch.autograd.forward_ad.unpack_dual(call(*duals)).tangent
        assert dual is not None
        torch.testing.assert_close(dual, forward)
    curvature = torch.func.jvp(torch.func.grad(loss, every), values, tangents)[1]
    leaves = tuple(v.clone().requires_grad_() for v in values)
    gradients = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    moved = sum(((t * g).sum() for t, g in zip(tangents, gradients, strict=True)), torch.zeros(()))
    if moved.requires_grad:
        for got_c, want in zip(curvature, torch.autograd.grad(moved, leaves, allow_unused=True), strict=True):
            torch.testing.assert_close(got_c, torch.zeros_like(got_c) if want is None else want)
    else:
        assert not any(c.any() for c in curvature)


def _plain_gradients(call: Callable[..., Tensor], values: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    leaves = tuple(v.clone().requires_grad_() for v in values)
    return torch.autograd.grad(call(*leaves), leaves, dy)


def check_autocast(function: Callable[..., Tensor], case: Case) -> None:
    """Autocast changes nothing: x keeps its dtype, filters and parameters theirs."""
    made = {k: t.detach() for k, t in case.tensors(torch.float32).items()}
    expected = case.run(function, made)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = case.run(function, made)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def check_empty(function: Callable[..., Tensor], case: Case) -> None:
    """An empty batch gives an empty result, an empty gradient of x and zero gradients of the parameters."""
    if len(case.inputs["x"]) < 2 or case.params.get("dim", 1) == 0:
        return
    shapes = {k: (0, *s[1:]) if k == "x" else s for k, s in case.inputs.items()}
    made = Case(case.id, shapes, case.params, case.fixed).tensors(torch.float32)
    y = case.run(function, made)
    full = case.run(function, case.tensors(torch.float32))
    assert y.shape == (0, *full.shape[1:])
    y.sum().backward()
    for name, t in made.items():
        assert t.grad is not None
        assert t.grad.shape == t.shape
        assert not t.grad.any(), f"{case.id}: the gradient of {name} is not zero"


CHECKS: tuple[Check, ...] = (
    check_values_and_gradients,
    check_forward_mode,
    check_gradcheck,
    check_masks,
    check_strides,
    check_deterministic,
    check_autocast,
    check_empty,
)
THOROUGH_CHECKS: tuple[Check, ...] = (check_opcheck, check_compile, check_export, check_func)


def battery(cases: list[Case]) -> list[Any]:
    """The parameters ``("check", "case")`` of a room's battery test, with readable ids."""
    import pytest

    return [
        pytest.param(check, case, id=f"{check.__name__.removeprefix('check_')}-{case.id}")
        for case in cases
        for check in (*CHECKS, *(THOROUGH_CHECKS if case.thorough else ()))
    ]


# --- golden vectors ---------------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parents[3] / "tests" / "golden"


def golden_cases(op: str) -> list[dict[str, Any]]:
    """The golden cases of one op, as ``cases.json`` describes them."""
    cases = json.loads((GOLDEN / "cases.json").read_text())["cases"]
    return [c for c in cases if c["op"] == op]


def check_golden(
    function: Callable[..., Tensor], case: dict[str, Any], dtype: torch.dtype, channels_last: bool
) -> None:
    """One golden case: value, gradients and (float64, float32) second-order gradients."""
    import numpy as np

    name = str(dtype).removeprefix("torch.")
    with np.load(GOLDEN / case["file"]) as arrays:
        z = {k: torch.from_numpy(arrays[k]) for k in arrays.files if k.startswith(case["id"] + ".")}
    tensors: dict[str, Tensor] = {}
    for argument, key in case["inputs"].items():
        if argument in ("f", "fu", "fd"):
            tensors[argument] = z[key]
            continue
        value = z[key].to(dtype)
        value = as_channels_last(value) if argument == "x" and channels_last else value
        tensors[argument] = value.requires_grad_(argument in case["differentiable"])
    params = {k: tuple(v) if isinstance(v, list) else v for k, v in case["params"].items()}
    y = function(**tensors, **params)
    tol, scales = case["tol"][name], case.get("scales", {})
    assert y.dtype == dtype
    _assert_golden(y, z[case["output"]], tol, scales.get("y", 0.0), f"{case['id']} y")
    leaves = [tensors[k] for k in case["differentiable"]]
    if not leaves:
        return
    dy = z[case["upstream"]].to(dtype).requires_grad_()
    grads = torch.autograd.grad(y, leaves, dy, create_graph=True)
    kink = case["tol"].get(f"kink_{name}")
    for k, g in zip(case["differentiable"], grads, strict=True):
        _assert_golden(g, z[case["grads"][k]], kink or tol, scales.get(f"d{k}", 0.0), f"{case['id']} d{k}", bool(kink))
    second = case.get("second")
    if second and dtype in (torch.float64, torch.float32):
        total = torch.stack(
            [(z[second["v"][k]].to(dtype) * g).sum() for k, g in zip(case["differentiable"], grads, strict=True)]
        ).sum()
        inputs = {"dy": dy, **{k: tensors[k] for k in case["differentiable"]}}
        found = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
        for k, g2 in zip(inputs, found, strict=True):
            want = second["grads"].get(k)
            g2 = torch.zeros_like(inputs[k]) if g2 is None else g2
            truth = z[want] if want else torch.zeros(inputs[k].shape, dtype=torch.float64)
            _assert_golden(g2, truth, tol, scales.get(f"gg_{k}", 0.0), f"{case['id']} gg_{k}")


def _assert_golden(got: Tensor, truth: Tensor, tol: float, scale: float, what: str, by_norm: bool = False) -> None:
    assert got.shape == truth.shape, f"{what}: shape {list(got.shape)} is not {list(truth.shape)}"
    if truth.numel() == 0:
        return
    difference = got.detach().double() - truth
    if by_norm:
        error = float(difference.norm() / max(float(truth.norm()), scale * math.sqrt(truth.numel()), 1e-300))
    else:
        rms = float(truth.square().mean().sqrt())
        size = truth.abs() + max(rms, scale)
        error = float(torch.where(difference == 0, 0.0, difference.abs() / size).max())
    assert error <= tol, f"{what}: error {error:.3g} exceeds {tol}"


def golden(op: str) -> list[Any]:
    """The parameters ``("case", "dtype", "channels_last")`` of a room's golden test, with readable ids."""
    import pytest

    return [
        pytest.param(c, dtype, layout, id=f"{c['id']}-{name}-{'channels_last' if layout else 'contiguous'}")
        for c in golden_cases(op)
        for name in c["dtypes"]
        for dtype in [getattr(torch, name)]
        for layout in (False, True)
    ]
