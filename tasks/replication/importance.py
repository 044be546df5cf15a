"""Importance of experts from weights and input norms (Wanda, arXiv 2306.11695; per expert, 2602.19938)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch


def wanda(
    matrices: Mapping[str, torch.Tensor], squares: Mapping[str, np.ndarray], load: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean of |W_ij| · ||X_j||_2 over all weights of all matrices of each expert of one layer.

    X holds the inputs routed to the expert (for down_proj the gated activations), so ||X_j||_2 grows with
    the square root of the load. The second form puts the root mean square over the expert's own tokens in
    its place: only that one says whether heavily used experts also matter more per token.

    Args:
        matrices: name -> [E, out, in].
        squares: name -> [E, in] float64, sum over the expert's tokens of the squared input channel.
        load: [E] tokens.

    Returns:
        importance [E] and importance_rms [E], float64, >= 0; 0 for an expert without tokens.
    """
    weights = 0
    total = np.zeros(len(load))
    for name, matrix in matrices.items():
        column = matrix.detach().abs().sum(dim=1, dtype=torch.float64).cpu().numpy()  # [E, in]
        total += (column * np.sqrt(squares[name])).sum(axis=-1)
        weights += matrix[0].numel()
    importance = total / weights
    per_token = np.divide(
        importance, np.sqrt(load), out=np.zeros_like(importance), where=np.asarray(load) > 0
    )
    return importance, per_token
