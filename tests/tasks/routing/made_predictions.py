"""Made predictions.parquet: damage with a real signal, a predictor that sees it, and noise that it does not
see.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

MEANS = {"W2": 0.94, "W3": 0.18, "W4": 0.05, "W8": 0.001}


def made_predictions(
    instances=("W2", "W3", "W4"), per_class: int = 60, seed: int = 0, noise: float = 0.1
) -> pd.DataFrame:
    """Half fit, half holdout. Each request has a fragility, known from log_fwp; damage is the instance's mean
    times it.
    """
    rng = np.random.default_rng(seed)
    classes = {"code": 0.8, "maths": 1.0, "prose": 1.2}
    names = [name for name in classes for _ in range(per_class)]
    size = len(names)
    fragility = (
        np.exp(0.8 * rng.normal(size=size)) / np.exp(0.32) * np.array([classes[name] for name in names])
    )
    frame = pd.DataFrame({
        "id": [f"{name}/{row}" for row, name in enumerate(names)],
        "class": names,
        "split": ["fit", "holdout"] * (size // 2),
        "prompt_tokens": 100,
        "scored_tokens": 40,
        "log_ppl": np.log(fragility) + rng.normal(0, 0.6, size),
        "log_length": rng.normal(5, 0.3, size),
        "routing_frequency": rng.uniform(0.05, 0.1, size),
        "log_fwp": np.log(fragility),
        "outside": False,
    })  # fmt: skip
    fit = frame["split"] == "fit"
    for name in instances:
        frame[f"kl_{name}"] = MEANS[name] * fragility * rng.gamma(1 / noise, noise, size)
        frame[f"dnll_{name}"] = frame[f"kl_{name}"] + rng.normal(0, 0.02, size)
        frame[f"predicted_{name}"] = MEANS[name] * fragility
        means = frame[fit].groupby("class")[f"kl_{name}"].mean()
        frame[f"class_mean_{name}"] = frame["class"].map(means)
    return frame
