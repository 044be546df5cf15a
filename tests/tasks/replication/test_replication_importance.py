import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.replication.importance import wanda


def test_importance_of_a_hand_worked_expert():
    # expert 0, one matrix [[1, -2], [3, 0]], two tokens with inputs (3, 1) and (4, 0): column norms 5 and 1,
    # |W| ||X|| = [[5, 2], [15, 0]], mean 22 / 4 = 5.5; per-token RMS norms are those over sqrt(2).
    # Expert 1 saw no token: 0
    matrix = torch.tensor([[[1.0, -2.0], [3.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])
    importance, rms = wanda(
        {"up_proj": matrix}, {"up_proj": np.array([[25.0, 1.0], [0.0, 0.0]])}, np.array([2, 0])
    )
    assert importance.tolist() == [5.5, 0.0]
    assert rms.tolist() == pytest.approx([5.5 / np.sqrt(2), 0.0])


def test_matrices_of_different_sizes_weigh_by_their_weights():
    # up: one row of two weights, |W| ||X|| = [1, 3]; down: one weight, 8: mean of the three is 4
    matrices = {"up_proj": torch.tensor([[[1.0, 1.0]]]), "down_proj": torch.tensor([[[2.0]]])}
    importance, _ = wanda(
        matrices, {"up_proj": np.array([[1.0, 9.0]]), "down_proj": np.array([[16.0]])}, np.array([1])
    )
    assert importance.tolist() == [4.0]


@given(st.integers(1, 50), st.integers(0, 2**31))
def test_seeing_the_same_tokens_n_times_scales_importance_by_root_n_and_leaves_the_rms_form(times, seed):
    random = np.random.default_rng(seed)
    matrix = torch.from_numpy(random.normal(size=(3, 4, 5)))
    squares = random.uniform(0.1, 1, size=(3, 5))
    once = wanda({"w": matrix}, {"w": squares}, np.array([1, 2, 3]))
    often = wanda({"w": matrix}, {"w": squares * times}, np.array([1, 2, 3]) * times)
    np.testing.assert_allclose(often[0], once[0] * np.sqrt(times))
    np.testing.assert_allclose(often[1], once[1])
