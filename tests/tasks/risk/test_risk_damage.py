"""Damage of hand-made scores, reliability of made halves, the errors of scores that do not match."""

import numpy as np
import pandas as pd
import pytest

from tasks.contracts import InputError, TokenScores
from tasks.risk.damage import (
    ceiling,
    check_same_requests,
    damage_summary,
    half_means,
    request_means,
    scored_tokens,
    spearman_brown,
    split_half,
    token_damage,
)


def two_requests():
    """Request a: prompt of 4 tokens, response of 2 (predictions 0..4); b: prompt of 3, response of 3."""
    offset, length = np.array([0, 5, 10]), np.array([4, 3])
    reference = TokenScores(["a", "b"], offset, length, np.ones(10), None)
    nll = np.array([9, 1, 2, 3, 1, 9, 1, 4, 0, 2.0])
    return reference, TokenScores(["a", "b"], offset, length, nll, np.arange(10) / 10)


def test_damage_by_hand():
    # a: the response is predicted by 3 and 4: ((3 - 1) + (1 - 1)) / 2 = 1, KL (0.3 + 0.4) / 2 = 0.35
    # b: by 7, 8, 9 (prompt of 3: split = 5 + 2): (3 - 1 + 1) / 3 = 1, KL (0.7 + 0.8 + 0.9) / 3 = 0.8
    # Prompts without the prediction from position 0: a by 1, 2: (0 + 1) / 2; b by 6: 0.
    reference, instance = two_requests()
    dnll, kl = token_damage(reference, instance, "dnll"), token_damage(reference, instance, "kl")
    assert request_means(dnll, instance, "response") == pytest.approx([1, 1])
    assert request_means(kl, instance, "response") == pytest.approx([0.35, 0.8])
    assert request_means(dnll, instance, "prompt") == pytest.approx([0.5, 0])
    assert scored_tokens(instance, "response").tolist() == [2, 3]
    assert scored_tokens(instance, "prompt").tolist() == [2, 1]
    # halves of b's response: tokens 0 and 2 against token 1: (3 + 1) / 2 = 2 and -1
    assert half_means(dnll, instance, "response").tolist() == [[2, 0], [2, -1]]
    assert np.isnan(half_means(dnll, instance, "prompt")[1]).all()


def test_summary_by_hand():
    reference, instance = two_requests()
    frame = pd.DataFrame({"id": ["a", "b"], "class": ["x", "y"], "split": ["fit", "holdout"]})
    metrics = damage_summary(instance, reference, frame)
    assert metrics["all"]["kl_mean"] == pytest.approx((0.35 + 0.8) / 2)
    assert metrics["fit"]["classes"]["x"] == {"dnll_mean": 1, "kl_mean": pytest.approx(0.35), "requests": 1}
    assert metrics["holdout"]["kl_mean"] == pytest.approx(0.8)
    assert metrics["reliability"] == {}  # two requests have no correlation worth the name


def test_the_reference_has_no_damage():
    reference, _ = two_requests()
    assert not token_damage(reference, reference, "dnll").any()
    with pytest.raises(ValueError, match="no kl"):
        token_damage(reference, reference, "kl")
    with pytest.raises(ValueError, match="'mse'"):
        token_damage(reference, reference, "mse")


def test_split_half_finds_the_share_of_signal():
    # A half is signal + noise of equal variance: rho = 1/2, so the whole has rho* = 2 * 0.5 / 1.5 = 2/3.
    generator = np.random.default_rng(0)
    signal = generator.normal(size=(20_000, 1))
    halves = signal + generator.normal(size=(20_000, 2))
    rho = split_half(halves)
    assert rho == pytest.approx(0.5, abs=0.02)
    assert spearman_brown(0.5) == pytest.approx(2 / 3)
    # the whole against the signal, the best predictor there is, reaches sqrt(rho*) and not more
    best = np.corrcoef(signal[:, 0], halves.mean(axis=1))[0, 1]
    assert best == pytest.approx(np.sqrt(spearman_brown(rho)), abs=0.02)


def test_ceiling_within_classes_is_lower_where_only_classes_differ():
    generator = np.random.default_rng(1)
    classes = np.repeat(["x", "y"], 400)
    halves = np.where(classes == "x", 0.0, 3.0)[:, None] + generator.normal(size=(800, 2))
    found = ceiling(halves, classes)
    assert found["measurable"] and found["rho"] > 0.6
    assert abs(found["within"].get("rho", 0)) < 0.12


def test_noise_is_not_measurable():
    # Perfectly opposed halves: rho = -1.
    values = np.arange(5.0)
    found = ceiling(np.stack([values, -values], axis=1), np.array(["x"] * 5))
    assert found["measurable"] is False and found["rho"] == pytest.approx(-1)
    constant = ceiling(np.ones((5, 2)), np.array(["x"] * 5))
    assert constant["measurable"] is False and "rho" not in constant


def test_scores_that_do_not_match_are_named():
    reference, _ = two_requests()
    check_same_requests(["a", "b"], reference, "W3")
    with pytest.raises(InputError, match=r"W3.*request 'c' has no score"):
        check_same_requests(["a", "b", "c"], reference, "W3")
    with pytest.raises(InputError, match="score 'b' has no request"):
        check_same_requests(["a"], reference, "W3")
    with pytest.raises(InputError, match="order differs"):
        check_same_requests(["b", "a"], reference, "W3")
    other = TokenScores(["a", "b"], np.array([0, 4, 10]), np.array([4, 3]), np.ones(10), np.ones(10))
    with pytest.raises(InputError, match="other token sequences"):
        token_damage(reference, other, "dnll")
