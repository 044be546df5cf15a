"""One instance after another beside one reference: its damage decomposed, its experts' fragility estimated and
the estimates judged by exact swaps, its super experts swapped alone.

What only the reference takes part in is computed once.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from tasks.contracts import Fragility, InputError
from tasks.moe.frozen import SwappableModel
from tasks.moe.registry import moe_layers
from tasks.params import DecomposeDamage
from tasks.risk.decomposition import decompose, swap_terms, term_figures
from tasks.risk.fragility import (
    EstimateSums,
    Gradients,
    agreement,
    estimate_sums,
    reference_gradients,
    router_row_norm,
    swap_fragility,
)
from tasks.risk.holdout import stratified_draws
from tasks.risk.scoring import Requests
from tasks.risk.super_experts import candidates, swapped_alone
from tasks.risk.swaps import SwapLosses

DRAWS = 1000  # bootstrap redraws of the holdout requests, for the intervals of the terms' means
# Whether position 0, the attention sink's, counts: the name in the figures -> the argument `first`.
BOTH_WAYS = {"with_first": True, "without_first": False}


class Audit:
    """The reference's passes, made once, and what every instance adds to them."""

    def __init__(
        self,
        reference: PreTrainedModel,
        requests: Requests,
        calibration: Requests,
        params: DecomposeDamage,
        damage: str,
        scored: Literal["response", "prompt"],
        batch_tokens: int,
    ) -> None:
        self._reference, self._requests, self._calibration = reference, requests, calibration
        self._params, self._damage, self._batch_tokens = params, damage, batch_tokens
        self._scored: Literal["response", "prompt"] = scored
        self._layers = [layer.layer for layer in moe_layers(reference)]  # of the decoder
        self._swapped = spread(len(self._layers), params.swap_layers)  # places among the MoE layers
        self._judged = fitting([len(own) for own in calibration.sequences], params.swap_tokens)
        self._losses: SwapLosses | None = None  # of the requests
        self._experts: SwapLosses | None = None  # of the judged calibration sequences
        self.arrays = {"router_row_norm": router_row_norm(reference)}
        self.terms: list[pd.DataFrame] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self._untouched: dict[str, int] = {}

    @cached_property
    def _gradients(self) -> Gradients:
        params = self._params
        return reference_gradients(self._reference, self._calibration, params.probes, params.seed)

    def add(self, name: str, instance: PreTrainedModel) -> None:
        """Decompose one instance, estimate its experts' fragility, and judge the estimates.

        Raises InputError, before any pass, for an instance of another reference.
        """
        try:
            SwappableModel(self._reference, instance)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        passes = self._gradients.passes
        rest = [own for row, own in enumerate(passes) if row not in self._judged]
        judged = estimate_sums([passes[row] for row in self._judged], self._reference, instance)
        sums = judged + estimate_sums(rest, self._reference, instance)
        for first in (True, False):
            self.arrays |= {
                Fragility.key(estimator, name, first): phi
                for estimator, phi in estimates(sums, first).items()
            }
        self._untouched = {
            kind: int((weight == 0).sum()) for kind, weight in zip(BOTH_WAYS, sums.weight, strict=True)
        }
        terms, paid = self._decomposed(name, instance)
        experts = self._of_experts(instance)
        swap = swap_fragility(experts, self._swapped, self._damage)
        compared = {
            estimator: {
                kind: self._agreement(swap.phi, estimates(judged, first)[estimator], estimator)
                for kind, first in BOTH_WAYS.items()
            }
            | {"all_tokens": self._agreement(swap.phi, whole, estimator)}
            for estimator, whole in estimates(sums).items()
        }
        norm = self._agreement(swap.phi, self.arrays["router_row_norm"], "router_row_norm")
        found, alone = self._super_experts(name, instance, experts, sums)
        self.figures[name] = {
            "terms": terms,
            "agreement": {**compared, "router_row_norm": norm},
            "super_experts": found,
            "total_on_calibration": alone["total"],
            "cost": {
                "decomposition": paid,
                "experts": experts.forward_tokens + alone["spared_tokens"],
            },
        }

    def _decomposed(self, name: str, instance: PreTrainedModel) -> tuple[dict[str, Any], float]:
        """The figures of the terms on the holdout requests, and the tokens paid; adds to `terms`."""
        params = self._params
        if self._losses is None:
            self._losses = SwapLosses(
                self._reference, instance, self._requests, self._batch_tokens, params.level, self._scored
            )
        else:
            self._losses = self._losses.of(instance)
        losses, frame = self._losses, self._requests.frame
        swaps = swap_terms(losses.loss(self._damage), len(losses.blocks), params.pairs, params.seed)
        fit = (frame["split"] == "fit").to_numpy()
        made = decompose(swaps, losses.affinity(), fit)
        table = made.frame().assign(instance=name, id=frame["id"].to_numpy(), split=frame["split"].to_numpy())
        self.terms.append(table)
        rows = np.flatnonzero(~fit)
        # Few requests a class: redraws inside classes would hardly differ.
        draws = stratified_draws(np.zeros(len(rows)), DRAWS, params.seed)
        return term_figures(made, rows, draws), losses.forward_tokens

    def _of_experts(self, instance: PreTrainedModel) -> SwapLosses:
        if self._experts is None:
            whole, rows = self._calibration, self._judged
            sequences = [whole.sequences[row] for row in rows]
            requests = Requests(whole.frame.iloc[rows], sequences, whole.prompt_length[rows])
            self._experts = SwapLosses(self._reference, instance, requests, self._batch_tokens, "expert")
        else:
            self._experts = self._experts.of(instance)
        return self._experts

    def _agreement(self, swap: np.ndarray, estimate: np.ndarray, estimator: str) -> dict[str, object]:
        own = self._swapped
        return agreement(
            swap[own], estimate[own], estimator == f"taylor_{self._damage}", [self._layers[at] for at in own]
        )

    def _super_experts(
        self, name: str, instance: PreTrainedModel, experts: SwapLosses, sums: EstimateSums
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The most fragile experts, by estimated damage and by output error in turn, each swapped alone."""
        chosen = candidates(
            [sums.nats(self._damage), sums.output_error()],
            self._params.super_experts,
        )
        spared = experts.of(instance, spare_first=True)
        alone = swapped_alone(experts, spared, chosen)
        width = sums.weight.shape[2]
        listed = []
        for block, own in zip(chosen, alone["experts"], strict=True):
            layer, expert = divmod(block, width)
            phi = {
                estimator: {
                    kind: float(
                        np.nan_to_num(self.arrays[Fragility.key(estimator, name, first)][layer, expert])
                    )
                    for kind, first in BOTH_WAYS.items()
                }
                for estimator in estimates(sums)
            }
            norm = float(self.arrays["router_row_norm"][layer, expert])
            place = {"layer": self._layers[layer], "expert": expert}
            listed.append({**place, "phi": phi, "router_row_norm": norm, **own})
        listed.sort(key=lambda own: (-own["single"][self._damage], own["layer"], own["expert"]))
        return listed, {**alone, "spared_tokens": spared.forward_tokens}

    def counts(self) -> dict[str, Any]:
        """What decomposition.json and the metrics share."""
        split, params = self._requests.frame["split"].to_numpy(), self._params
        return {
            "level": params.level,
            "damage": self._damage,
            "scored": self._scored,
            "requests": {
                "fit": int(np.count_nonzero(split == "fit")),
                "holdout": int(np.count_nonzero(split == "holdout")),
                "tokens": sum(map(len, self._requests.sequences)),
            },
            "calibration": {
                "sequences": len(self._calibration.sequences),
                "tokens": sum(map(len, self._calibration.sequences)),
                "swap_sequences": len(self._judged),
                "swap_tokens": sum(len(self._calibration.sequences[row]) for row in self._judged),
                "swap_layers": [self._layers[at] for at in self._swapped],
            },
            "experts_without_tokens": self._untouched,
            "unrouted_blocks": {name: own["terms"]["unrouted_blocks"] for name, own in self.figures.items()},
        }

    def cost(self) -> dict[str, Any]:
        """Tokens through the whole model: paid by this stage, and what each estimator takes for all experts
        of one instance on the calibration tokens (swap: on the judged ones)."""
        assert self._experts is not None
        gradients = self._gradients.cost
        swap = sum(self._experts.run_tokens(block) for block in range(len(self._experts.blocks)))
        swap += self._experts.run_tokens(None)
        paid = sum(sum(own["cost"].values()) for own in self.figures.values())
        return {
            "forward_tokens": paid + gradients.forward_tokens,
            "backward_tokens": gradients.backward_tokens,
            "estimators": {
                "swap": {"forward_tokens": swap, "backward_tokens": 0},
                "taylor": {
                    "forward_tokens": gradients.forward_tokens,
                    "backward_tokens": gradients.backward_tokens,
                },
                "output_error": {"forward_tokens": gradients.forward_tokens, "backward_tokens": 0},
                "router_row_norm": {"forward_tokens": 0, "backward_tokens": 0},
            },
        }


def estimates(sums: EstimateSums, first: bool = True) -> dict[str, np.ndarray]:
    """Estimator -> phi [L, E], NaN without a token."""
    return {
        "taylor_kl": sums.taylor("kl", first),
        "taylor_dnll": sums.taylor("dnll", first),
        "output_error": sums.output_error(first),
    }


def fitting(lengths: list[int], most: int) -> list[int]:
    """The first sequence, and of the others in their order those that still fit into `most` tokens."""
    taken, total = [0], lengths[0]
    for row, length in enumerate(lengths[1:], start=1):
        if total + length <= most:
            taken.append(row)
            total += length
    return taken


def spread(layers: int, count: int) -> list[int]:
    """`count` of the places 0..layers-1, evenly over the depth; all where there are no more."""
    count = min(count, layers)
    return [int((2 * at + 1) * layers / (2 * count)) for at in range(count)]
