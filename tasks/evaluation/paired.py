"""Two models on the same questions or texts: the difference, its error, and what could have been seen at
all.
"""

from __future__ import annotations

from math import comb

import numpy as np

LEVEL = 0.05  # of significance, two-sided


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided exact p-value of McNemar's test (McNemar 1947, exact form).

    Of the questions that exactly one model answers right, `gained` are this model's and `lost` the
    reference's; if the models were equal, each would fall on either side with probability 1/2.
    """
    discordant = gained + lost
    tail = sum(comb(discordant, number) for number in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**discordant)


def smallest_visible_difference(questions: int, discordant: int) -> float | None:
    """The smallest difference of accuracies that the exact test would call significant at LEVEL.

    It takes the number of discordant questions as it was found, or the fewest with which the test can be
    significant at all, 6. None when there are fewer questions than that.
    """
    discordant = max(discordant, 6)
    if questions < discordant:
        return None
    lost = next(
        lost for lost in range(discordant // 2, -1, -1) if mcnemar_exact(discordant - lost, lost) <= LEVEL
    )
    return (discordant - 2 * lost) / questions


def compare_accuracy(correct: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Difference of accuracies on the same questions; both [n] bool.

    `difference_stderr` is that of the mean of the paired differences, sqrt(b + c - (b - c)²/n) / n with b
    gained and c lost questions. `smallest_visible_difference` is absent where no difference could be
    significant.
    """
    gained, lost = int((correct & ~reference).sum()), int((~correct & reference).sum())
    questions = len(correct)
    visible = smallest_visible_difference(questions, gained + lost)
    return {
        "difference": (gained - lost) / questions,
        "difference_stderr": float(np.sqrt(gained + lost - (gained - lost) ** 2 / questions)) / questions,
        "p_value": mcnemar_exact(gained, lost),
        **({} if visible is None else {"smallest_visible_difference": visible}),
    }


def compare_mean(values: np.ndarray, reference: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Difference of weighted means over the same clusters, such as texts with their tokens; all [n].

    `values` and `reference` are sums over a cluster, `weights` its size. The standard error is that of a
    ratio of sums over independent clusters; absent with one cluster.
    """
    paired = values - reference
    difference = float(paired.sum() / weights.sum())
    clusters = len(paired)
    if clusters < 2:
        return {"difference": difference}
    rest = paired - difference * weights
    stderr = float(np.sqrt(clusters / (clusters - 1) * (rest**2).sum()) / weights.sum())
    return {"difference": difference, "difference_stderr": stderr}


def accuracy(correct: np.ndarray) -> dict[str, float]:
    """Accuracy and the standard error of its mean, sqrt(p (1 - p) / (n - 1)), as lm-eval reports it."""
    questions, share = len(correct), float(correct.mean())
    stderr = {} if questions < 2 else {"stderr": float(np.sqrt(share * (1 - share) / (questions - 1)))}
    return {"accuracy": share, "n": questions, **stderr}
