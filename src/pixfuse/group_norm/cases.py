"""The calls that the tests check and the benches time."""

from __future__ import annotations

from .._shared.testing import Case


def _case(
    shape: tuple[int, ...],
    groups: int,
    act: str | None = None,
    affine: str = "wb",
    eps: float = 1e-5,
    thorough: bool = False,
) -> Case:
    inputs = {"x": shape}
    if "w" in affine:
        inputs["weight"] = shape[1:2]
    if "b" in affine:
        inputs["bias"] = shape[1:2]
    size = "x".join(map(str, shape[2:])) or "flat"
    name = f"n{shape[0]}-c{shape[1]}-{size}-g{groups}{f'-{act}' if act else ''}{f'-{affine}' if affine else ''}"
    return Case(name, inputs, {"num_groups": groups, "eps": eps, "act": act}, thorough=thorough)


CASES = [
    _case((2, 6, 5, 7), 3),
    _case((2, 6, 5, 7), 2, "silu", thorough=True),
    _case((2, 4, 3, 3), 4, "silu", "w"),
    _case((2, 4, 3, 3), 1, "silu", "b"),
    _case((3, 4, 5), 2, None, "b", 1e-3),
    _case((3, 8), 2, "silu", ""),
    _case((3, 8), 8, None, thorough=True),
    _case((2, 6, 2, 3, 5), 3, "silu"),
    _case((2, 3, 9, 4), 3, None, "w"),
]

# For benches: [N, C, H, W] and groups. On a CPU all outputs stay under 16 MiB; the tiny one shows a call's overhead.
BENCH = [
    ((4, 128, 32, 32), 32),
    ((1, 128, 128, 128), 32),
    ((2, 320, 64, 64), 32),
    ((2, 512, 16, 16), 32),
    ((1, 8, 8, 8), 4),
]
BENCH_GPU = [
    ((8, 128, 512, 512), 32),
    ((8, 512, 64, 64), 32),
    ((2, 320, 64, 64), 32),
    ((1, 512, 128, 128), 32),
]
