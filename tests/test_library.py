"""The shared foundation: registration, backend, layouts, peak memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import pixfuse
from pixfuse._shared import layout, library


def test_every_op_has_every_rule() -> None:
    """A rule that is left out is an error at import, not in a user's compile."""
    with pytest.raises(TypeError, match=r"missing .* required keyword-only argument"):
        library.define_op("incomplete(Tensor x) -> Tensor", reference=torch.clone, fake=torch.empty_like)
    assert len(library.OPS) >= 5
    for name, op in library.OPS.items():
        assert op.overload._schema.name == f"pixfuse::{name}"
        for argument in op.overload._schema.arguments:
            assert "str" not in str(argument.type), f"{name}: strings leak in torch's stable ABI"


def test_every_op_has_a_cpu_kernel() -> None:
    """An op without one would be slow without anyone noticing. A CPU's ``modulated_conv2d`` takes no ``modulation``."""
    if not library._KERNELS.exists():
        pytest.skip("this install was built without the CPU kernels")
    reference = [name for name in library.OPS if library.backend(name, torch.zeros(1)) != "cpu"]
    assert reference == ["modulation", "modulation_backward"]


def test_backend_says_which_and_why() -> None:
    found = pixfuse.backend("bias_act", torch.zeros(2, 3))
    assert found == "cpu"
    assert "_kernels.so" in found.reason
    assert pixfuse.backend(pixfuse.bias_act, torch.zeros(2, 3)) == found
    other = pixfuse.backend("group_norm", torch.zeros(2, 3, device="meta"))
    assert other == "reference"
    assert "meta" in other.reason
    assert pixfuse.backend(pixfuse.conv2d_resample, torch.zeros(2, 3)) == "cpu"
    with pytest.raises(TypeError, match="backend: x must have a dtype that bias_act takes, got complex64"):
        pixfuse.backend("bias_act", torch.zeros(2, 3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="backend: x must be a tensor, got int"):
        pixfuse.backend("bias_act", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"backend: op must be one of .*bias_act.*, got 'conv'"):
        pixfuse.backend("conv", torch.zeros(1))


def test_by_definition_takes_the_reference_and_ends() -> None:
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    with library.by_definition():
        plain = pixfuse.bias_act(x, act="swish")
    ours = pixfuse.bias_act(x, act="swish")
    assert "bias_act" not in str(plain.grad_fn)
    assert "bias_actBackward" in str(ours.grad_fn)


def test_modes_tracer_and_profiler_see_every_operator() -> None:
    x = torch.randn(2, 4, 5, 5)

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        pixfuse.bias_act(x, act="swish")
    assert "pixfuse.bias_act.default" in Seen.names
    with torch.profiler.profile() as profile:
        pixfuse.bias_act(x, act="swish")
    assert "pixfuse::bias_act" in {event.name for event in profile.events()}
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: pixfuse.bias_act(x, act="swish"))(x).graph
    assert torch.ops.pixfuse.bias_act.default in {node.target for node in graph.nodes}


LAYOUTS: list[tuple[str, Callable[[], Tensor], bool]] = [
    ("contiguous", lambda: torch.randn(2, 5, 7, 9), False),
    ("channels_last", lambda: torch.randn(2, 5, 7, 9).to(memory_format=torch.channels_last), True),
    ("batch of one, sliced", lambda: torch.randn(2, 6, 20, 20).to(memory_format=torch.channels_last)[1:2], True),
    ("unsqueezed", lambda: torch.randn(2, 6, 20, 20).to(memory_format=torch.channels_last)[0].unsqueeze(0), True),
    ("channel slice", lambda: torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last)[:, 1:4], True),
    ("crop", lambda: torch.randn(2, 6, 9, 9).to(memory_format=torch.channels_last)[..., 1:5, 2:8], True),
    ("one channel", lambda: torch.randn(2, 1, 7, 9), False),
    ("one channel, labelled", lambda: torch.randn(2, 1, 7, 9).to(memory_format=torch.channels_last), True),
    ("one pixel", lambda: torch.randn(2, 5, 1, 1), False),
    ("one pixel, labelled", lambda: torch.randn(2, 5, 1, 1).to(memory_format=torch.channels_last), True),
    ("one of all", lambda: torch.randn(1, 1, 1, 1), False),
    ("3-D channels innermost", lambda: torch.randn(2, 9, 5).transpose(1, 2), True),
    ("5-D channels_last", lambda: torch.randn(2, 5, 3, 4, 6).to(memory_format=torch.channels_last_3d), True),
    ("height and width swapped", lambda: torch.randn(2, 5, 9, 7).transpose(2, 3), False),
    ("expanded over channels", lambda: torch.randn(2, 1, 7, 9).expand(2, 5, 7, 9), False),
    ("expanded over pixels", lambda: torch.randn(2, 5, 1, 1).expand(2, 5, 7, 9), False),
    ("matrix", lambda: torch.randn(3, 5), False),
]


@pytest.mark.parametrize(("make", "channels_last"), [c[1:] for c in LAYOUTS], ids=[c[0] for c in LAYOUTS])
def test_layout_of(make: Callable[[], Tensor], channels_last: bool) -> None:
    """Field cases 8 and 9. The C++ rule is the same: bias_act's result shows it."""
    x = make()
    assert layout.is_channels_last(x) == channels_last
    dense = layout.to_layout(x, channels_last)
    assert torch.equal(dense, x)
    assert layout.empty(x, x.shape, channels_last).stride() == layout.dense_strides(x.shape, channels_last)
    y = pixfuse.bias_act(x, act="relu")
    assert y.stride() == layout.dense_strides(x.shape, channels_last)


def _peak(call: Callable[[], Any]) -> float:
    """MiB of resident memory that ``call`` needed at its peak, its results included."""

    def status(field: str) -> int:
        with open("/proc/self/status") as lines:
            return int(next(line for line in lines if line.startswith(field)).split()[1])

    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # the high-water mark starts again
    before = status("VmRSS")
    kept = call()
    peak = status("VmHWM")
    del kept
    return (peak - before) / 1024


F = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "bias_act": lambda x: pixfuse.bias_act(x, torch.zeros(16), act="lrelu", clamp=1),
    "group_norm": lambda x: pixfuse.group_norm(x, 4, torch.ones(16), torch.zeros(16), act="silu"),
    "upfirdn2d-up": lambda x: pixfuse.upfirdn2d(x[..., ::2, :].contiguous(), F, up=(1, 2), padding=1),
    "upfirdn2d-down": lambda x: pixfuse.upfirdn2d(x, F, down=2, padding=1),
    "upfirdn2d": lambda x: pixfuse.upfirdn2d(x, F.outer(F), padding=[2, 1, 2, 1]),
    "upsample_nearest": lambda x: pixfuse.upsample_nearest(x, 1, gain=2),
    "interpolate": lambda x: pixfuse.interpolate(x, scale_factor=1.1, mode="bilinear"),
    "filtered_lrelu": lambda x: pixfuse.filtered_lrelu(x, F, F, up=2, down=2, padding=3),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", list(MEMORY))
def test_peak_memory(name: str, channels_last: bool) -> None:
    """Field case 32: the result, the gradient and 1 MiB a thread; no padded or im2col copy, no copy of x."""
    if pixfuse.backend("bias_act", torch.zeros(1)) != "cpu":
        pytest.skip("the reference makes copies")
    call, threads = MEMORY[name], torch.get_num_threads()
    x = torch.randn(2, 16, 512, 512)
    x = (x.to(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
    crop = 16.0 if name == "upfirdn2d-up" else 0.0  # the test's own contiguous copy
    allowed = crop + threads + 4  # and what the allocator rounds up to
    y = call(x)
    dy = torch.ones_like(y)
    torch.autograd.grad(y, x, dy)  # libraries and threads are there
    needed = _peak(lambda: call(x.detach()))
    size = y.numel() * 4 / 2**20
    assert needed <= size + allowed, f"forward needed {needed:.1f} MiB for a result of {size:.1f} MiB"
    y = call(x)
    needed = _peak(lambda: torch.autograd.grad(y, x, dy))
    size = x.numel() * 4 / 2**20
    assert needed <= size + allowed, f"backward needed {needed:.1f} MiB for a gradient of {size:.1f} MiB"


def test_a_machine_where_triton_does_not_work(caplog: pytest.LogCaptureFixture) -> None:
    """Field case 3: the reference, one log line, and backend gives the reason. Here: no driver, or no Triton."""
    if torch.cuda.is_available():
        pytest.skip("Triton may work here")
    library._why_no_triton.cache_clear()
    device = torch.device("cuda", 0)
    with caplog.at_level("WARNING", "pixfuse"):
        for name in ("bias_act", "group_norm"):
            kernel, reason = library.gpu_kernel(library.OPS[name].room, name, torch.float32, device)
            assert kernel is None
            assert "Triton" in reason
    assert len(caplog.records) == 1
    assert "slow reference" in caplog.records[0].getMessage()
