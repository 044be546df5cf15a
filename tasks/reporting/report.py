"""The report: one HTML file that needs nothing else, its pictures beside it, and two CSVs for `dvc plots`."""

from __future__ import annotations

import base64
import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tasks.reporting import damage_sections, pictures, sections, tables
from tasks.reporting.tables import instance_names

if TYPE_CHECKING:
    import pandas as pd


def write_report(
    folder: Path,
    metrics: Mapping[str, Any],
    predictions: pd.DataFrame | None,
    params: Mapping[str, Any],
    pipeline_run: str,
    compare_url: str,
    terms: pd.DataFrame | None = None,
) -> None:
    """Write report.html, the PNGs and the CSVs into `folder`. What has no metrics yet is left out, in words.

    `predictions` is artifacts/fwp/predictions.parquet, `terms` artifacts/decomposition/terms.parquet, `params`
    the flat parameters {dotted key: value}.
    """
    drawn = draw(folder, metrics, predictions, terms)
    write_csvs(folder, metrics, predictions)
    inlined = {path.stem: base64.b64encode(path.read_bytes()).decode("ascii") for path in drawn}
    environment = Environment(
        loader=PackageLoader("tasks.reporting", "."), undefined=StrictUndefined, autoescape=True
    )
    environment.filters["cell"] = lambda value, column: tables.cell(column, value)
    environment.filters["columns"] = tables.filled_columns
    html = environment.get_template("report.html.j2").render(
        **sections.content(metrics),
        params=sections.pairs(params, "parameter"),
        pictures=inlined,
        pipeline_run=pipeline_run,
        compare_url=compare_url,
    )
    (folder / "report.html").write_text(html, encoding="utf-8")


def draw(
    folder: Path,
    metrics: Mapping[str, Any],
    predictions: pd.DataFrame | None,
    terms: pd.DataFrame | None = None,
) -> list[Path]:
    """Draw every picture that the metrics allow; returns their paths."""
    drawn: list[Path] = []
    names = instance_names(metrics)
    if names and all("holdout" in metrics.get("scores", {}).get(name, {}) for name in names):
        drawn.append(folder / "damage.png")
        pictures.damage_by_class(metrics, drawn[-1])
    if predictions is not None and "fwp" in metrics and names:
        drawn.append(folder / "fwp_damage.png")
        pictures.fwp_against_damage(predictions, metrics, drawn[-1])
    if terms is not None and metrics.get("decomposition", {}).get("supported"):
        drawn.append(folder / "terms.png")
        own: dict[str, Any] = {
            str(name): rows for name, rows in terms[terms["split"] == "holdout"].groupby("instance")
        }
        pictures.damage_terms({name: own[name] for name in damage_sections.in_order(own)}, drawn[-1])
    if metrics.get("routing", {}).get("policies"):
        drawn.append(folder / "policies.png")
        pictures.policies_against_budget(metrics, drawn[-1])
    if variants := metrics.get("variants"):
        drawn.append(folder / "load.png")
        pictures.load_per_expert(variants[min(variants)], drawn[-1])
    if variants or "experts" in metrics:
        drawn.append(folder / "lis.png")
        pictures.lis_per_layer(metrics, drawn[-1])
    return drawn


def write_csvs(folder: Path, metrics: Mapping[str, Any], predictions: pd.DataFrame | None) -> None:
    """lis.csv (layer, model, lis) and fwp_damage.csv (fwp, damage, instance; holdout) for `dvc plots`."""
    rows: list[tuple[Any, ...]] = []
    if "experts" in metrics:
        rows += [
            (layer, "reference", lis)
            for layer, lis in zip(metrics["experts"]["layers"], metrics["experts"]["lis"], strict=True)
        ]
    for name, variant in sorted(metrics.get("variants", {}).items()):
        rows += [
            (layer, name, lis) for layer, lis in zip(variant["layers"], variant["lis_logical"], strict=True)
        ]
    _write_csv(folder / "lis.csv", ("layer", "model", "lis"), rows)
    rows = []
    if predictions is not None and "fwp" in metrics:
        holdout = predictions[predictions["split"] == "holdout"]
        for name in instance_names(metrics):
            damage = holdout[f"{metrics['fwp']['damage']}_{name}"]
            rows += [(f"{x:.6g}", f"{y:.6g}", name) for x, y in zip(holdout["log_fwp"], damage, strict=True)]
    _write_csv(folder / "fwp_damage.csv", ("log_fwp", "damage", "instance"), rows)


def _write_csv(path: Path, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([header, *rows])
