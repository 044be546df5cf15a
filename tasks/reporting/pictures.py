"""The report's pictures: metrics and predictions in, PNG out. Same input, same bytes.

Colours are Okabe and Ito's, told apart by colour-blind readers; every series has its own marker as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from tasks.reporting.tables import instance_names, overall_budget, words

if TYPE_CHECKING:
    import pandas as pd

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#e3e3e3", "axes.axisbelow": True, "legend.frameon": False,
}  # fmt: skip
WIDTHS = {"W2": ("#D55E00", "v"), "W3": ("#0072B2", "o"), "W4": ("#009E73", "s"), "W8": ("#CC79A7", "D")}
BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#8a8a8a", "#222222"
DAMAGE_LABEL = {"dnll": "ΔNLL (nats per token)", "kl": "KL to the reference (nats per token)"}


def damage_by_class(metrics: Mapping[str, Any], path: Path) -> None:
    """Mean holdout damage of every class under every instance: KL on a log axis, ΔNLL on a linear one."""
    names = instance_names(metrics)
    holdout = {name: metrics["scores"][name]["holdout"] for name in names}
    classes = sorted({label for scores in holdout.values() for label in scores["classes"]}, reverse=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 1.5 + 0.36 * (len(classes) + 1)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, kind in zip(panels, ("kl", "dnll"), strict=True):
            for name in names:
                colour, marker = WIDTHS.get(name, (INK, "P"))
                values = [
                    holdout[name]["classes"].get(label, {}).get(f"{kind}_mean", np.nan) for label in classes
                ]
                values.append(holdout[name][f"{kind}_mean"])
                axes.plot(values, range(len(values)), marker, color=colour, markersize=7, label=name)
            axes.set_xlabel("mean " + DAMAGE_LABEL[kind])
            axes.axhline(len(classes) - 0.5, color=GREY, linewidth=0.8)
            axes.set_yticks(range(len(classes) + 1), [*(words(label) for label in classes), "all classes"])
        _log_axis(panels[0])
        panels[1].axvline(0, color=INK, linewidth=0.8)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(names))
        _save(figure, path)


def fwp_against_damage(frame: pd.DataFrame, metrics: Mapping[str, Any], path: Path) -> None:
    """One panel per instance: FWP of the prompt against the true damage, holdout before fit requests."""
    names = instance_names(metrics)
    kind = metrics["fwp"]["damage"]
    holdout = (frame["split"] == "holdout").to_numpy()
    fwp = np.exp(frame["log_fwp"].to_numpy(dtype=float))
    with rc_context(STYLE):
        figure = Figure(figsize=(3.3 * max(len(names), 2), 3.7), layout="constrained")
        panels = figure.subplots(1, len(names), sharex=True, squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            damage = frame[f"{kind}_{name}"].to_numpy(dtype=float)
            colour, marker = WIDTHS.get(name, (INK, "P"))
            axes.scatter(fwp[~holdout], damage[~holdout], s=16, marker=marker, color="#c4c4c4", label="fit")
            axes.scatter(fwp[holdout], damage[holdout], s=24, marker=marker, facecolor=colour,
                         edgecolor="white", linewidth=0.4, label="holdout")  # fmt: skip
            axes.set_xscale("log")
            _few_ticks(axes, fwp)
            order = frame.loc[holdout, ["log_fwp", f"{kind}_{name}"]].corr(method="spearman").iloc[0, 1]
            note = f", holdout Spearman {order:.2f}" if np.isfinite(order) else ""
            axes.set_title(f"{name}{note}", fontsize=11)
            axes.set_xlabel("FWP of the prompt")
        panels[0].set_ylabel(DAMAGE_LABEL[kind])
        panels[0].legend(loc="upper left", handletextpad=0.2)
        _save(figure, path)


def policies_against_budget(metrics: Mapping[str, Any], path: Path) -> None:
    """Multiplier of every policy against its realised mean damage; those near the budget enlarged."""
    routing = metrics["routing"]
    damage = f"{routing['damage']}_mean"
    points = {
        words(name): (policy[damage], policy["multiplier"], policy["budget_kept"])
        for name, policy in routing["policies"].items()
        if "multiplier" in policy and damage in policy
    }
    tau = overall_budget(routing)
    edge = 2 * tau if tau else max(point[0] for point in points.values())
    near = {name: point for name, point in points.items() if point[0] <= edge}
    with rc_context(STYLE):
        figure = Figure(figsize=(10.5, max(4.2, 0.3 * len(near) + 1.2)), layout="constrained")
        panels = figure.subplots(1, 2, width_ratios=[3, 4])
        for axes, shown in zip(panels, (points, near), strict=True):
            for x, y, kept in shown.values():
                axes.plot(x, y, "o" if kept else "X", markersize=8, color=BLUE if kept else ORANGE,
                          markeredgecolor="white")  # fmt: skip
            if tau is not None:
                axes.axvline(tau, color=INK, linestyle="--", linewidth=1)
            axes.set_xlabel(f"realised mean {DAMAGE_LABEL[routing['damage']]}")
            axes.margins(0.08)
        panels[0].set_ylabel("multiplier (mean of 4 / bits)" if routing["reward"] == "bits" else "multiplier")
        panels[0].set_title("all policies, holdout", fontsize=11)
        panels[1].set_title(
            "near the budget" + (f" of {tau:.3f} (dashed)" if tau is not None else ""), fontsize=11
        )
        panels[0].plot([], [], "o", color=BLUE, label="budget kept")
        panels[0].plot([], [], "X", color=ORANGE, label="budget broken")
        panels[0].legend(loc="lower right")
        _labels_at_points(panels[0], {name: point[:2] for name, point in points.items() if name not in near})
        _labels_in_a_column(panels[1], {name: point[:2] for name, point in near.items()})
        _save(figure, path)


def load_per_expert(variant: Mapping[str, Any], path: Path) -> None:
    """Tokens of every expert over the layer's even share; replicas stand right of the white line."""
    before, after = (np.asarray(variant[key], dtype=float) for key in ("load_before", "load_after"))
    experts = before.shape[1]
    shares = [load / np.maximum(load.sum(1, keepdims=True), 1) * experts for load in (before, after)]
    top = max(float(share.max()) for share in shares)
    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(9.5, min(2.0 + 0.2 * len(before), 9)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True, width_ratios=[experts, after.shape[1]])
        images = [
            axes.imshow(share, aspect="auto", cmap="cividis", vmin=0, vmax=top, interpolation="nearest")
            for axes, share in zip(panels, shares, strict=True)
        ]
        for axes, share, title in zip(panels, shares, ("before", "after replication"), strict=True):
            axes.set_title(f"{title}: busiest {share.max():.2f} x the even share", fontsize=11)
            axes.set_xlabel("physical expert" if share is shares[1] else "expert")
        panels[1].axvline(experts - 0.5, color="white", linewidth=2)
        panels[0].set_ylabel("decoder layer")
        step = -(-len(before) // 16)
        rows = range(0, len(before), step)
        panels[0].set_yticks(list(rows), [str(variant["layers"][row]) for row in rows])
        figure.colorbar(
            images[0], ax=list(panels), label="tokens / even share of the layer", fraction=0.05, pad=0.02
        )
        _save(figure, path)


def lis_per_layer(metrics: Mapping[str, Any], path: Path) -> None:
    """LIS of every layer: the reference, and each variant by logical and by physical experts."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        axes = figure.subplots()
        colours = [BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
        for row, (name, variant) in enumerate(sorted(metrics.get("variants", {}).items())):
            if row == 0:
                axes.plot(variant["layers"], variant["lis_before"], "o-", color=INK, label="before")
            colour = colours[row % len(colours)]
            axes.plot(
                variant["layers"], variant["lis_logical"], "s-", color=colour, label=f"{name}: after, m·max/Σ"
            )
            axes.plot(variant["layers"], variant["lis_physical"], "^:", color=colour, markersize=5,
                      label=f"{name}: after, (m+r)·max/Σ")  # fmt: skip
        if not metrics.get("variants"):
            axes.plot(
                metrics["experts"]["layers"], metrics["experts"]["lis"], "o-", color=INK, label="reference"
            )
        axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
        axes.annotate("even load", (1, 1), xycoords=("axes fraction", "data"), xytext=(-2, 3),
                      textcoords="offset points", ha="right", fontsize=9, color="#555555")  # fmt: skip
        axes.set_xlabel("decoder layer")
        axes.set_ylabel("LIS (load of the busiest expert\nover the mean)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside upper center", ncols=3)
        _save(figure, path)


def damage_terms(terms: Mapping[str, pd.DataFrame], path: Path) -> None:
    """One panel per instance: the terms that add up to its damage, means with what they differ by.

    `terms`: instance -> one row a holdout request with "total" and the terms in nats per token, and
    "sampling_error" (`tasks/risk/decomposition.py`). Points are requests, the diamond their mean with its
    standard error twice; where pairs of blocks were sampled, the rest is drawn hollow.
    """
    names = {
        "total": "total damage", "bias": "bias", "separable": "separable", "separability": "not separable",
        "interaction": "interaction of pairs", "higher_order": "higher order", "route_change": "route change",
    }  # fmt: skip
    with rc_context(STYLE):
        figure = Figure(figsize=(3.6 * max(len(terms), 2), 3.8), layout="constrained")
        panels = figure.subplots(1, len(terms), sharey=True, squeeze=False)[0]
        for axes, (instance, frame) in zip(panels, terms.items(), strict=True):
            colour, _ = WIDTHS.get(instance, (INK, "P"))
            sampled = bool((frame["sampling_error"] > 0).any())
            for place, name in enumerate(names):
                values = frame[name].to_numpy(dtype=float)
                lift = np.linspace(-0.22, 0.22, len(values)) if len(values) > 1 else np.zeros(1)
                axes.scatter(values, place + lift, s=9, color="#c4c4c4", linewidth=0)
                error = 2 * values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
                hollow = sampled and name in ("interaction", "higher_order")
                axes.errorbar(values.mean(), place, xerr=error, fmt="D", color=colour, markersize=7,
                              markerfacecolor="white" if hollow else colour, capsize=3)  # fmt: skip
            axes.axvline(0, color=INK, linewidth=0.8)
            axes.axhline(0.5, color=GREY, linewidth=0.8)
            axes.set_title(f"{instance}, {len(frame)} holdout requests", fontsize=11)
            axes.set_xlabel("nats per token" + (", hollow: sampled pairs" if sampled else ""))
            axes.xaxis.set_major_locator(MaxNLocator(5))
        panels[0].set_yticks(range(len(names)), list(names.values()))
        panels[0].invert_yaxis()
        _save(figure, path)


def _labels_at_points(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Labels left of their points, pushed apart upwards and downwards where points are near each other."""
    low, high = axes.get_ylim()
    order = sorted(points, key=lambda name: (points[name][1], name))
    places = spread([(points[name][1] - low) / (high - low) for name in order], gap=0.06)
    for name, place in zip(order, places, strict=True):
        axes.annotate(name, (points[name][0], low + place * (high - low)), xytext=(-8, 0),
                      textcoords="offset points", ha="right", va="center", fontsize=9,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    axes.set_ylim(low, high)


def _labels_in_a_column(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """One label per point, in a column right of the axes in the points' order: none hides another."""
    order = sorted(points, key=lambda name: (points[name][1], points[name][0], name))
    low, high = axes.get_ylim()
    wanted = [(points[name][1] - low) / (high - low) for name in order]
    places = spread(wanted, gap=min(0.075, 1 / max(len(order), 1)))
    for name, place in zip(order, places, strict=True):
        axes.annotate(
            name, points[name], xytext=(1.06, place), textcoords="axes fraction", va="center", fontsize=9,
            annotation_clip=False, arrowprops={"arrowstyle": "-", "color": "#b5b5b5", "linewidth": 0.7,
                                               "relpos": (0, 0.5), "shrinkB": 4},
        )  # fmt: skip
    axes.set_ylim(low, high)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending places in [0, 1], at least `gap` apart, near the ascending `wanted`."""
    places = list(wanted)
    for row in range(len(places)):  # upwards: make room
        places[row] = max(places[row], places[row - 1] + gap if row else 0.0)
    top = 1.0
    for row in reversed(range(len(places))):  # downwards: back into the axes
        places[row] = min(places[row], top)
        top = places[row] - gap
    return places


def _log_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _few_ticks(axes: Axes, values: np.ndarray) -> None:
    """Four round ticks on a log axis, whatever the range."""
    low, high = np.log10(values.min()), np.log10(values.max())
    ticks = sorted({float(f"{10**place:.1g}") for place in np.linspace(low, high, 5)})
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, format="png", metadata={"Software": None})
