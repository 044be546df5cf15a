"""An encoder-decoder's pass over a sequence cut in two, laid on the sequence's places."""

import pytest
import torch

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.moe.halves import check_splits, cut, start_token
from tasks.moe.prefill import head_logits, next_token_nll, prefill
from tasks.moe.registry import moe_layers
from tests.seeded_models import VOCABULARY, seeded_checkpoint

LENGTHS = [40, 9, 61, 2, 23]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(seeded_checkpoint(tmp_path_factory.mktemp("switch"), "switch_transformers"))


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def plain_logits(model, sequence, split):
    """[n - split, V] of the tokens split..n-1, by the model's own forward on one sequence."""
    decoder_ids = [model.config.decoder_start_token_id, *sequence[split:-1]]
    with torch.no_grad():
        out = model(input_ids=torch.tensor([sequence[:split]]), decoder_input_ids=torch.tensor([decoder_ids]))
    return out.logits[0]


def test_a_batch_cut_by_hand():
    """Sequences 10 11 12 13 14 (encoder: 2) and 20 21 22 (encoder: 1), start token 7.

    The decoder reads 7 12 13 to predict 12 13 14, from the places 1 2 3, and 7 21 to predict 21 22, from 0 1."""
    ids = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 0, 0]])
    halves = cut(ids, [5, 3], [2, 1], start=7)
    assert halves.encoder_ids.tolist() == [[10, 11], [20, 0]]
    assert halves.encoder_mask.tolist() == [[True, True], [True, False]]
    assert halves.decoder_ids.tolist() == [[7, 12, 13], [7, 21, 0]]
    assert halves.decoder_mask.tolist() == [[True, True, True], [True, True, False]]
    assert halves.at_encoder.int().tolist() == [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert halves.at_decoder.int().tolist() == [[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]


def test_a_batch_gives_what_each_sequence_gives_alone(model, sequences):
    """Padding is masked in encoder, decoder and between them: without any of the masks this fails."""
    splits = [20, 3, 7, 1, 22]
    (batch,) = prefill(model, sequences, 10_000, "together", splits=splits)
    for at, row in enumerate(batch.rows):
        split, length = splits[row], LENGTHS[row]
        assert batch.predicted[at].nonzero()[:, 0].tolist() == list(range(split, length))
        ours = head_logits(model, batch.hidden[at, split - 1 : length - 1])
        torch.testing.assert_close(ours, plain_logits(model, sequences[row], split), rtol=1e-4, atol=1e-5)
        rest = torch.ones(batch.hidden.shape[1], dtype=torch.bool)
        rest[split - 1 : length - 1] = False
        assert batch.hidden[at, rest].abs().max() == 0


def test_logits_alone_are_the_models_own_exactly(model, sequences):
    (batch,) = prefill(model, sequences[:1], 10_000, "alone")
    assert torch.equal(head_logits(model, batch.hidden[0, 19:-1]), plain_logits(model, sequences[0], 20))
    assert plain_logits(model, sequences[0], 20).std() > 0.1


def test_losses_count_the_second_half_alone(model, sequences):
    (batch,) = prefill(model, [sequences[0]], 10_000, "alone")
    made = batch.predicted[:, 1:]
    losses = next_token_nll(model, batch.hidden[:, :-1][made], batch.ids[:, 1:][made])
    own = torch.nn.functional.cross_entropy(
        plain_logits(model, sequences[0], 20), torch.tensor(sequences[0][20:]), reduction="none"
    )
    assert torch.equal(losses, own)


def test_routing_lies_where_its_tokens_are(model, sequences):
    splits = [20, 3, 7, 1, 22]
    (batch,) = prefill(model, sequences, 10_000, "together", record=True, splits=splits)
    layers = moe_layers(model)
    assert [layer.name.split(".")[0] for layer in layers] == ["encoder", "encoder", "decoder"]
    for at, row in enumerate(batch.rows):
        split, length = splits[row], LENGTHS[row]
        places = {"encoder": range(split), "decoder": range(split - 1, length - 1)}
        for layer, routing, visited in zip(layers, batch.routing, batch.visited, strict=True):
            expected = torch.zeros(batch.ids.shape[1], dtype=torch.bool)
            expected[list(places[layer.name.split(".")[0]])] = True
            assert torch.equal(visited[at], expected)
            assert not routing.routed[at][~expected].any()
            assert routing.weight[at][~expected].abs().max() == 0
            assert (routing.gate_prob[at][expected] >= 1 / 8).all()  # of 8 experts the best
    (alone,) = prefill(model, [sequences[2]], 10_000, "alone", record=True, splits=[7])
    place = batch.rows.index(2)
    for one, many in zip(alone.routing, batch.routing, strict=True):
        assert torch.equal(one.index[0], many.index[place, : LENGTHS[2]])
        assert torch.equal(one.routed[0], many.routed[place, : LENGTHS[2]])


def test_capacity_counts_within_a_sequence_and_in_order(model, sequences):
    """Of the tokens that choose an expert of a layer, the first 6 of their sequence reach it."""
    (batch,) = prefill(model, sequences, 10_000, "together", record=True)
    dropped = 0
    for routing, visited in zip(batch.routing, batch.visited, strict=True):
        for at in range(len(sequences)):
            chosen = routing.index[at, :, 0][visited[at]]
            routed = routing.routed[at, :, 0][visited[at]]
            for expert in range(8):
                own = routed[chosen == expert]
                assert own.tolist() == [True] * min(len(own), 6) + [False] * max(len(own) - 6, 0)
                dropped += int((~own).sum())
            assert (routing.weight[at, :, 0][visited[at]] > 0).equal(routed)
    routed, lost = batch.picks()
    assert lost.sum() == dropped > 0
    encoder = sum(length // 2 for length in LENGTHS)
    assert (routed + lost).tolist() == [encoder, encoder, sum(LENGTHS) - encoder]


def test_the_start_token_is_the_configured_one_or_padding(model):
    config, generation = model.config, model.generation_config
    assert start_token(model) == 1
    kept = (config.decoder_start_token_id, config.pad_token_id)
    kept_generation = (generation.decoder_start_token_id, generation.pad_token_id)
    try:
        config.decoder_start_token_id, config.pad_token_id = None, 0
        assert start_token(model) == 0
        config.pad_token_id = None
        generation.decoder_start_token_id = generation.pad_token_id = None
        with pytest.raises(InputError, match="neither decoder_start_token_id nor pad_token_id"):
            start_token(model)
    finally:
        config.decoder_start_token_id, config.pad_token_id = kept
        generation.decoder_start_token_id, generation.pad_token_id = kept_generation


def test_a_sequence_without_two_halves_is_an_error(model):
    with pytest.raises(InputError, match="sequence 1 has 1 tokens, 0 of them for the encoder"):
        next(prefill(model, [[3, 4], [5]], 10, "calibration tokens"))
    with pytest.raises(InputError, match="sequence 0 has 2 tokens, 2 of them for the encoder"):
        check_splits([2], [2], "requests")
