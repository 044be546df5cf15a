"""A sequence through an encoder-decoder in one pass: T5's prefix language model (Raffel et al., arXiv
1910.10683, section 3.2.1).

Of n tokens the encoder reads the first `split`; the decoder gets the start token and the tokens split..n-2, and
predicts the tokens split..n-1. Everything is then laid on the sequence's own places, as a decoder-only model has
it: the encoder's token i at place i, the decoder's position j at place split - 1 + j, from where it predicts the
next token. At place split - 1 both are: the encoder read the token there, the decoder the start token; they pass
different MoE layers. The last token is predicted and never read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tasks.contracts import InputError
from tasks.moe.record import LayerRouting
from tasks.moe.registry import MoELayer


@dataclass(frozen=True)
class Halves:
    """A batch cut for encoder and decoder; Se and Sd are the longest of each, padding stands at the end."""

    at_encoder: torch.Tensor  # [B, S] bool, the places that the encoder reads
    at_decoder: torch.Tensor  # [B, S] bool, the places of the decoder's positions
    encoder_ids: torch.Tensor  # [B, Se]
    encoder_mask: torch.Tensor  # [B, Se] bool
    decoder_ids: torch.Tensor  # [B, Sd]
    decoder_mask: torch.Tensor  # [B, Sd] bool


def cut(ids: torch.Tensor, lengths: Sequence[int], splits: Sequence[int], start: int) -> Halves:
    """Cut a right-padded batch of token ids [B, S] into what encoder and decoder get; `start` opens the
    decoder's half."""
    length, split = torch.tensor(lengths)[:, None], torch.tensor(splits)[:, None]
    place = torch.arange(ids.shape[1])
    encoder_mask = torch.arange(int(split.max())) < split
    position = torch.arange(int((length - split).max()))
    decoder_mask = position < length - split
    columns = (split - 1 + position).clamp(max=ids.shape[1] - 1)
    decoder_ids = ids.gather(1, columns) * decoder_mask
    decoder_ids[:, 0] = start
    return Halves(
        at_encoder=place < split,
        at_decoder=(place >= split - 1) & (place < length - 1),
        encoder_ids=ids[:, : encoder_mask.shape[1]] * encoder_mask,
        encoder_mask=encoder_mask,
        decoder_ids=decoder_ids,
        decoder_mask=decoder_mask,
    )


def run(model: Any, halves: Halves) -> torch.Tensor:
    """The decoder's final hidden states [B, S, H] on the sequences' places; zeros where it has no position.

    Padding is masked in the encoder's attention, the decoder's and the attention across.
    """
    encoded = model.get_encoder()(
        input_ids=halves.encoder_ids, attention_mask=halves.encoder_mask.long()
    ).last_hidden_state
    decoded = model.get_decoder()(
        input_ids=halves.decoder_ids,
        attention_mask=halves.decoder_mask.long(),
        encoder_hidden_states=encoded,
        encoder_attention_mask=halves.encoder_mask.long(),
        use_cache=False,
    ).last_hidden_state
    return _placed(decoded, halves.decoder_mask, halves.at_decoder)


def placed_routing(routing: LayerRouting, layer: MoELayer, halves: Halves) -> LayerRouting:
    """A layer's routing as recorded, arrays [B * Se, k] or [B * Sd, k], on the sequences' places [B, S, k];
    `routed` is False, everything else 0, where the layer was not passed."""
    mask, at = halves.encoder_mask, halves.at_encoder
    if in_decoder(layer):
        mask, at = halves.decoder_mask, halves.at_decoder
    own = routing.reshaped(*mask.shape)
    return LayerRouting(*(_placed(getattr(own, name), mask, at) for name in own.__dataclass_fields__))


def placed_sums(sums: Mapping[bool, torch.Tensor], halves: Halves) -> torch.Tensor:
    """Sums over the layers of each stack (`PickSums.pop`), [B * Se, n] and [B * Sd, n], added up on the
    sequences' places [B, S, n]."""
    stacks = {
        False: (halves.encoder_mask, halves.at_encoder),
        True: (halves.decoder_mask, halves.at_decoder),
    }
    placed = [_placed(own.view(*stacks[at][0].shape, -1), *stacks[at]) for at, own in sums.items()]
    return torch.stack(placed).sum(dim=0)


def visited(layer: MoELayer, halves: Halves) -> torch.Tensor:
    """[B, S] bool: the places that pass the MoE layer."""
    return halves.at_decoder if in_decoder(layer) else halves.at_encoder


def in_decoder(layer: MoELayer) -> bool:
    return layer.name.startswith("decoder.")


def start_token(model: Any) -> int:
    """The token that opens a decoder's half: the configuration's start token, else padding as in T5."""
    for config in (model.config, model.generation_config):
        for name in ("decoder_start_token_id", "pad_token_id"):
            token = getattr(config, name, None)
            if isinstance(token, int):
                return token
    raise InputError(
        "config.json has neither decoder_start_token_id nor pad_token_id: expected the token that opens the "
        "decoder's input"
    )


def check_splits(lengths: Sequence[int], splits: Sequence[int] | None, label: str) -> list[int]:
    """The tokens that the encoder reads of each sequence, by default half; InputError where a half is empty."""
    own = [length // 2 for length in lengths] if splits is None else [int(split) for split in splits]
    for row, (length, split) in enumerate(zip(lengths, own, strict=True)):
        if not 0 < split < length:
            raise InputError(
                f"{label}: sequence {row} has {length} tokens, {split} of them for the encoder: an "
                "encoder-decoder needs at least one token in each half"
            )
    return own


def _placed(values: torch.Tensor, mask: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """[B, S', ...] real where `mask` [B, S'] -> [B, S, ...], in the places `at` [B, S], zeros elsewhere."""
    grid = values.new_zeros(*at.shape, *values.shape[2:])
    grid[at] = values[mask]
    return grid
