"""The picture of the damage's terms: its points, its means, and the same bytes for the same input."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection

from tasks.reporting import pictures
from tasks.risk.decomposition import TERMS


def terms(error=0.0):
    values = np.random.default_rng(0).normal(size=(6, len(TERMS)))
    frame = pd.DataFrame(values, columns=list(TERMS))
    return frame.assign(total=values.sum(axis=1), additive=0.0, sampling_error=error)


def test_same_terms_same_bytes(tmp_path):
    for name in ("a.png", "b.png"):
        pictures.damage_terms({"W2": terms(), "W4": terms()}, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_every_term_shows_its_requests_and_its_mean_and_sampled_ones_are_hollow(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path: seen.append(figure))
    pictures.damage_terms({"W3": terms(error=0.1)}, tmp_path / "x.png")
    axes = seen[0].axes[0]
    clouds = [own for own in axes.collections if isinstance(own, PathCollection)]
    assert len(clouds) == len(TERMS) + 1
    shown = np.asarray(clouds[1 + TERMS.index("interaction")].get_offsets())[:, 0]
    assert shown == pytest.approx(terms()["interaction"].to_numpy())
    means = [bar.lines[0].get_xdata()[0] for bar in axes.containers]
    assert means == pytest.approx(terms()[["total", *TERMS]].mean().tolist())
    faces = [bar.lines[0].get_markerfacecolor() for bar in axes.containers]
    hollow = [name for name, face in zip(["total", *TERMS], faces, strict=True) if face == "white"]
    assert hollow == ["interaction", "higher_order"]
