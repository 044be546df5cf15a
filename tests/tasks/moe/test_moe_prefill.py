import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts import InputError
from tasks.moe import prefill as prefill_module
from tasks.moe.checkpoint import load_model
from tasks.moe.prefill import head_logits, next_token_nll, plan_batches, prefill
from tests.seeded_models import seeded_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return load_model(seeded_checkpoint(tmp_path_factory.mktemp("prefill") / "model", "qwen2_moe"))


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 350, (length,), generator=generator).tolist() for length in (5, 17, 1, 9, 17, 3)]


def test_batches_by_hand() -> None:
    # sorted by length: rows 1 (5), 3 (5), 0 (3), 2 (1); budget 12: 2 x 5 = 10 fits, 3 x 5 does not; then 2 x
    # 3 = 6
    assert plan_batches([3, 5, 1, 5], 12) == [[1, 3], [0, 2]]
    assert plan_batches([3, 5, 1, 5], 1) == [[1], [3], [0], [2]]  # one too long is a batch of its own


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan_batches(lengths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget


def by_row(batches) -> dict[int, list[torch.Tensor]]:
    """Real tokens of each row: hidden, then per layer index, weight and gate_prob."""
    found = {}
    for batch in batches:
        for place, row in enumerate(batch.rows):
            real = batch.mask[place]
            arrays = [batch.hidden[place][real]]
            for layer in batch.routing:
                arrays += [layer.index[place][real], layer.weight[place][real], layer.gate_prob[place][real]]
            found[row] = arrays
    return found


def test_neither_padding_nor_neighbours_change_a_token(model, sequences: list[list[int]]) -> None:
    alone = by_row(prefill(model, sequences, 1, "alone", record=True))
    together = by_row(prefill(model, sequences, 10_000, "together", record=True))
    assert sorted(alone) == sorted(together) == list(range(len(sequences)))
    for row, sequence in enumerate(sequences):
        assert len(alone[row][0]) == len(sequence)
        for one, other in zip(alone[row], together[row], strict=True):
            if one.dtype == torch.int64:
                assert torch.equal(one, other)
            else:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_batches_carry_their_tokens(model, sequences: list[list[int]]) -> None:
    for batch in prefill(model, sequences, 40, "tokens"):
        assert batch.routing is None
        assert batch.hidden.shape == (*batch.ids.shape, 64)
        for place, row in enumerate(batch.rows):
            assert batch.ids[place][batch.mask[place]].tolist() == sequences[row]
            assert batch.mask[place].tolist() == [i < len(sequences[row]) for i in range(batch.mask.shape[1])]


def test_prefill_equals_the_models_own_forward(model, sequences: list[list[int]]) -> None:
    (batch,) = prefill(model, [sequences[1]], 100, "one")
    with torch.inference_mode():
        logits = model(torch.tensor([sequences[1]])).logits[0]
    torch.testing.assert_close(head_logits(model, batch.hidden[0]), logits)


def test_prefill_is_bit_for_bit_repeatable(model, sequences: list[list[int]]) -> None:
    first, again = (by_row(prefill(model, sequences, 40, "run", record=True)) for _ in range(2))
    assert all(torch.equal(a, b) for row in first for a, b in zip(first[row], again[row], strict=True))


def test_losses_in_chunks(model, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(11, 64, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(11)
    expected = -torch.log_softmax(head_logits(model, hidden).double(), -1)[torch.arange(11), targets]
    torch.testing.assert_close(
        next_token_nll(model, hidden, targets).double(), expected, rtol=1e-5, atol=1e-5
    )
    monkeypatch.setattr(prefill_module, "HEAD_CHUNK_VALUES", 4 * model.config.vocab_size)  # 4, 4 and 3 tokens
    torch.testing.assert_close(
        next_token_nll(model, hidden, targets).double(), expected, rtol=1e-5, atol=1e-5
    )
    assert next_token_nll(model, hidden[:0], targets[:0]).shape == (0,)


def test_an_empty_sequence(model) -> None:
    with pytest.raises(InputError, match="prompts: sequence 1 is empty"):
        next(prefill(model, [[1], []], 10, "prompts"))
