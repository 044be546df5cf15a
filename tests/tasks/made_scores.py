"""Artifacts of made requests with a planted law between FWP and damage, for calibrate_fwp to read."""

from pathlib import Path

import numpy as np
import pandas as pd

from tasks.calibrate_fwp import run
from tasks.contracts import ExpertStatistics, Fragility, PrefillRouting, TokenScores
from tasks.params import CalibrateFwp, load_params
from tasks.risk.fwp import log_fwp, prompt_tokens, token_strength

ROOT = Path(__file__).parents[2]
INSTANCES = ["W2", "W4"]
LAYERS, EXPERTS, PICKS = 2, 6, 2


def settings(**changes):
    own = load_params(ROOT / "params.yaml").calibrate_fwp.model_dump()
    small = {"bootstrap": 30, "splits": 2, "strength": "gate_prob", "predictor": "ridge"}
    return CalibrateFwp(**{**own, **small, **changes})


class World:
    """Artifacts of 120 made requests; W2 KL per response token: 0.5 + 0.2 log FWP + class level + noise."""

    def __init__(self, root, noise=0.02, requests=120, split=None, classes=("a", "b", "c")):
        self.root = root
        generator = np.random.default_rng(0)
        prompt, response = generator.integers(40, 80, requests), generator.integers(8, 20, requests)
        offset, starts = (np.concatenate([[0], np.cumsum(n)]) for n in (prompt + response - 1, prompt))
        kind = np.array(classes)[np.arange(requests) % len(classes)]
        if split is None:
            split = np.where(np.arange(requests) // len(classes) % 2 == 0, "fit", "holdout")
        ids = [f"r{row}" for row in range(requests)]
        self.frame = pd.DataFrame({"id": ids, "class": kind, "split": split})
        self.frame.to_parquet(root / "requests.parquet")

        shape = (starts[-1], LAYERS, PICKS)
        index = generator.integers(0, EXPERTS, shape).astype(np.uint16)
        gate_prob = generator.uniform(0.05, 0.9, shape).astype(np.float32)
        norms = generator.uniform(0.5, 1.5, (LAYERS, EXPERTS)).astype(np.float32)
        routing = PrefillRouting(starts, index, gate_prob, gate_prob, norms)
        difficulty = np.repeat(generator.uniform(1, 4, requests), prompt + response - 1)
        nll = (difficulty * generator.exponential(1, offset[-1])).astype(np.float32)
        reference = TokenScores(ids, offset, prompt, nll, None)
        tokens = prompt_tokens(reference, routing, "token")
        self.log_fwp = log_fwp(
            tokens.nll, token_strength(routing, "gate_prob")[tokens.position], tokens.offset
        )
        level = 0.5 + 0.2 * self.log_fwp + 0.3 * (kind == "b")
        per_token = np.repeat(level, prompt + response - 1)
        random = noise * generator.normal(size=offset[-1])
        self.damage = {"W2": per_token + random, "W4": 0.1 * per_token + random}
        self.reference, self.routing = reference, routing
        for name in ["reference", *INSTANCES]:
            self.write(name)
        load = generator.integers(10, 100, (LAYERS, EXPERTS)).astype(np.int64)
        self.load = load
        ExpertStatistics(np.arange(LAYERS), load, load * 1.0, load * 1.0).save(root / "experts.safetensors")
        self.phi = {
            Fragility.key(f"taylor_{kind}", name, first): generator.normal(0.1, 0.1, (LAYERS, EXPERTS))
            for kind in ("kl", "dnll")
            for name in INSTANCES
            for first in (True, False)
        }
        self.write_fragility(self.phi)

    def write_fragility(self, arrays):
        folder = self.root / "decomposition"
        folder.mkdir(exist_ok=True)
        Fragility({"router_row_norm": np.ones((LAYERS, EXPERTS)), **arrays}).save(folder)

    def write(self, name, rows=slice(None), scale=1.0):
        """Write the scores of `name`; the damage of request `rows` times `scale`."""
        folder = self.root / "scores" / name
        folder.mkdir(parents=True, exist_ok=True)
        own = self.reference
        nll, kl = own.nll, None
        if name != "reference":
            factor = np.ones(len(own.ids))
            factor[rows] = scale
            kl = (self.damage[name] * np.repeat(factor, np.diff(own.offset))).astype(np.float32)
            nll = own.nll.copy()
            for row in range(len(own.ids)):  # the prompt's losses, which are signals, stay
                part = own.scored(row, "response")
                nll[part] += kl[part]
        TokenScores(own.ids, own.offset, own.prompt_length, nll, kl).save(folder)
        self.routing.save(folder)

    def run(self, out="out", **changes):
        target = self.root / out
        metrics = run(
            self.root / "requests.parquet",
            self.root / "scores",
            self.root / "experts.safetensors",
            self.root / "decomposition",
            INSTANCES,
            settings(**changes),
            target / "fwp",
            target / "fwp.json",
        )
        return metrics, pd.read_parquet(target / "fwp/predictions.parquet")
