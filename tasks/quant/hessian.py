"""What calibration knows about the inputs of a stack of expert matrices: tokens and Hessians per expert.

The Hessian of a linear layer's squared output error is the mean of x x^T over the inputs x that reach it. An
expert that few tokens reach has a poor one, so it is shrunk to its layer's pooled Hessian:

    H = a · H_own + (1 − a) · H_pool,   a = tokens / (tokens + shrinkage · in)

as in linear shrinkage of covariance matrices (Ledoit and Wolf, "A well-conditioned estimator for
large-dimensional covariance matrices", 2004), with a weight that follows the number of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from tasks.contracts import InputError


@dataclass(frozen=True)
class Hessians:
    """Sums over the tokens of each of E experts. Raises InputError for shapes that do not fit together, sums
    that are not finite, and a stack that no token has reached."""

    tokens: torch.Tensor  # [E] int64, tokens that reached each expert
    total: torch.Tensor  # [E, in, in] float32, sum of x x^T over an expert's tokens
    pool: torch.Tensor | None = None  # [in, in] float32, of the whole layer where this is a part of it

    def __post_init__(self) -> None:
        experts, width = len(self.tokens), self.total.shape[-1]
        if self.tokens.ndim != 1 or self.total.shape != (experts, width, width):
            raise InputError(
                f"Hessians of shape {list(self.total.shape)} do not fit {list(self.tokens.shape)} token counts: "
                "expected [E, in, in] and [E]"
            )

    @property
    def width(self) -> int:
        """Input channels."""
        return self.total.shape[-1]

    @cached_property
    def _pool(self) -> torch.Tensor:
        if self.pool is not None:
            return self.pool
        tokens = int(self.tokens.sum())
        if tokens == 0:
            raise InputError("no calibration token reached any expert: expected at least one")
        pool = self.total[0].clone()
        for expert in range(1, len(self.total)):  # in order: the same sum on any number of threads
            pool += self.total[expert]
        pool /= tokens
        if not torch.isfinite(pool).all():
            raise InputError(
                "the calibration inputs hold NaN or infinite values: expected finite activations"
            )
        return pool

    def pooled(self) -> torch.Tensor:
        """[in, in] mean of x x^T over the tokens of all of the layer's experts."""
        return self._pool

    def part(self, experts: slice) -> Hessians:
        """Some of the experts, shrunk to the whole layer's pool still."""
        return Hessians(self.tokens[experts], self.total[experts], self._pool)

    def own_share(self, shrinkage: float) -> torch.Tensor:
        """[E] float64 a: the share of an expert's own Hessian, 0 without tokens."""
        tokens = self.tokens.double()
        return tokens / (tokens + shrinkage * self.width).clamp_min(torch.finfo(torch.float64).tiny)

    def shrunk(self, experts: slice, shrinkage: float) -> torch.Tensor:
        """[e, in, in] float32 Hessians of some experts, each shrunk to the pool (a new tensor).

        `shrinkage` is the pool's weight in tokens per input channel; at 0 only experts without tokens use
        the pool.
        """
        share = self.own_share(shrinkage)[experts]
        # a · total / tokens + (1 − a) · pool
        own = (share / self.tokens[experts].clamp_min(1)).float().view(-1, 1, 1)
        return (self.total[experts] * own).add_(self._pool * (1 - share).float().view(-1, 1, 1))
