"""The losses of StyleGAN2: non-saturating logistic, R1 and path length. Each scalar is to call ``backward`` on.

G gives ``(pictures, ws)`` and D gives logits; both may be wrapped in ``DistributedDataParallel``. That waits for the
gradient of every parameter, so a regulariser also adds what it does not depend on, times 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

G = Callable[..., tuple[Tensor, Tensor]]
D = Callable[[Tensor], Tensor]


def generator_loss(g: G, d: D, z: Tensor, mixing: float = 0.9) -> Tensor:
    """Pictures that D takes for real ones."""
    return F.softplus(-d(g(z, mixing)[0])).mean()


def discriminator_losses(g: G, d: D, z: Tensor, real: Tensor, mixing: float = 0.9) -> Iterator[Tensor]:
    """Generated pictures below, then real ones above: two losses, so that one graph at a time takes memory."""
    with torch.no_grad():
        fake, _ = g(z, mixing)
    yield F.softplus(d(fake)).mean()
    yield F.softplus(-d(real)).mean()


def r1_penalty(d: D, real: Tensor, gamma: float) -> Tensor:
    """Mean squared length of D's gradient at real pictures, times ``gamma / 2``."""
    real = real.detach().requires_grad_()
    logits = d(real)
    (slope,) = torch.autograd.grad(logits.sum(), [real], create_graph=True)
    return slope.square().sum((1, 2, 3)).mean() * (gamma / 2) + 0 * logits.sum()


def path_length_penalty(g: G, z: Tensor, mean: Tensor, mixing: float = 0.9, decay: float = 0.01) -> Tensor:
    """Squared distance between the length of a step in the picture per step in ``w``, and its running mean.

    ``mean`` is a scalar tensor and is updated, with the lengths of all processes where there are several.
    """
    pictures, ws = g(z, mixing)
    noise = torch.randn(pictures.shape, device=pictures.device) / math.sqrt(pictures.shape[2] * pictures.shape[3])
    (slope,) = torch.autograd.grad((pictures * noise).sum(), [ws], create_graph=True)
    lengths = slope.square().sum(2).mean(1).sqrt()
    now = lengths.detach().mean()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(now)
        now /= dist.get_world_size()
    mean.lerp_(now, decay)
    return (lengths - mean).square().mean() + 0 * pictures.sum()
