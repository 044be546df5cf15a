"""Calibration inputs of every MoE layer, one layer's weights in memory at a time.

The base model's own forward runs once per decoder layer: every other layer passes its input through, and the
hidden states that the layers before it made are put in at that one. So masks, rotary embeddings and what else
depends on a layer's place are the model's own. Between layers only the hidden states are kept: 4 · H bytes a
calibration token, padding included.

Batches run side by side on one thread each, sums are made in the batches' order: results do not depend on the
number of threads. An encoder-decoder runs whole instead, and its hidden states may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tasks.console import track
from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.moe.hessians import HessianSums
from tasks.moe.partial import PartialModel
from tasks.moe.prefill import plan_batches, prefill
from tasks.moe.registry import MoELayer, moe_layers
from tasks.moe.tensors import read_config
from tasks.moe.tokens import TokenWatch
from tasks.quant.hessian import Hessians
from tasks.quant.threads import side_by_side

Inputs = Literal["reference", "quantized"]
INPUTS: tuple[Inputs, ...] = ("reference", "quantized")


@dataclass(frozen=True)
class Routed:
    """The real tokens of one batch where they enter a layer's experts."""

    hidden: torch.Tensor  # [n, H]
    index: torch.Tensor  # [n, k]; a pick outside of 0..E-1 reaches no expert
    weight: torch.Tensor  # [n, k] routing weights
    first: torch.Tensor  # [n] bool, True at position 0 of a sequence, or of an encoder-decoder's half


class LayerStep:
    """One MoE layer with its weights, valid until the walk goes on or is closed."""

    def __init__(self, layer: MoELayer, routed: Callable[[], Iterator[Routed]], inputs: Inputs) -> None:
        self.layer = layer
        self._routed: Callable[[], Iterator[Routed]] | None = routed
        self._sums: HessianSums | None = None
        self._replaces = inputs == "quantized"

    def routed(self) -> Iterator[Routed]:
        """Run the calibration tokens up to the layer's experts, batch by batch; what the experts make of them is not
        computed. Not after `replace` or `leave`."""
        if self._routed is None:
            raise RuntimeError(f"layer {self.layer.layer} was left or replaced: its inputs are gone")
        return self._routed()

    def hessians(self) -> dict[str, Hessians]:
        """ "hidden" [E, H, H] of gate_proj and up_proj, "inner" [E, width, width] of down_proj, tokens [E] of both.

        The first call runs the calibration tokens through the layer, with the reference's experts: so ask
        before `replace`.
        """
        if self._sums is None:
            if self._routed is None:
                raise RuntimeError(f"layer {self.layer.layer} was left or replaced: its Hessians are gone")
            self._sums = sums_of(self.layer, self._routed())
        return self._sums.hessians()

    def matrices(self) -> dict[str, torch.Tensor]:
        """name -> [E, out, in] float32."""
        return self.layer.matrices()

    def replace(self, matrices: Mapping[str, torch.Tensor]) -> None:
        """Have later layers see what this one makes with other matrices [E, out, in]; nothing changes in a walk
        over the reference's inputs.

        Raises InputError for a matrix that the layer has not, and for another shape.
        """
        views = self.layer.matrices()
        for name, matrix in matrices.items():
            if name not in views or views[name].shape != matrix.shape:
                known = {own: list(view.shape) for own, view in views.items()}
                raise InputError(
                    f"layer {self.layer.layer}: '{name}' {list(matrix.shape)}: expected one of {known}"
                )
            if self._replaces:
                self._routed = None
                views[name].copy_(matrix)

    def leave(self) -> None:
        """Let go of the Hessians, a layer's largest part beside its weights."""
        self._routed = self._sums = None


def sums_of(layer: MoELayer, batches: Iterable[Routed]) -> HessianSums:
    """The Hessians of a layer's experts over these tokens."""
    sums = HessianSums(layer.experts)
    for batch in batches:
        sums.add(batch.hidden, batch.index)
    return sums


def walk_layers(
    folder: str | Path, sequences: Sequence[Sequence[int]], batch_tokens: int, inputs: Inputs, label: str
) -> Iterator[LayerStep]:
    """Go through the reference in `folder` and stop at every MoE layer, in depth order.

    Args:
        folder: a reference checkpoint. Its weights are read from the shards as they are needed, as float32; an
            encoder-decoder is held in memory whole.
        sequences: calibration token ids, one list each.
        batch_tokens: tokens of one forward pass, padding included.
        inputs: what the inputs of a layer are: "reference", the reference's own; "quantized", those that the
            layers before it make with the matrices that were given to `LayerStep.replace`.
        label: what the progress calls it.

    At most one decoder layer (before the first, the embedding) holds weights, and one layer's Hessians are kept.
    Costs two forward passes over the sequences, and the products x x^T. Raises InputError for an unknown
    `inputs`, no sequences, an empty one, and as `PartialModel` does.
    """
    if inputs not in INPUTS:
        raise InputError(f"{label}: inputs is '{inputs}', expected one of {list(INPUTS)}")
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or 0 in lengths:
        what = f"sequence {lengths.index(0)} is empty" if lengths else "there are no calibration sequences"
        raise InputError(f"{label}: {what}; expected at least one token id in each")
    if read_config(Path(folder)).is_encoder_decoder:
        return _walk_whole(folder, sequences, batch_tokens, inputs, label)
    return _walk_parts(folder, sequences, batch_tokens, inputs, label)


def _walk_parts(
    folder: str | Path, sequences: Sequence[Sequence[int]], batch_tokens: int, inputs: Inputs, label: str
) -> Iterator[LayerStep]:
    stream = HiddenStream(folder, sequences, batch_tokens)
    last = max(layer.layer for layer in moe_layers(stream.partial.model))
    for number in track(range(last + 1), label, last + 1):
        with stream.layer(number) as layer:
            if layer is not None:
                step = LayerStep(layer, partial(stream.routed, number, layer), inputs)
                yield step
                step.leave()
            if number < last:
                stream.advance(number)


def _walk_whole(
    folder: str | Path, sequences: Sequence[Sequence[int]], batch_tokens: int, inputs: Inputs, label: str
) -> Iterator[LayerStep]:
    """One pass of the whole model per MoE layer."""
    model = load_model(folder)
    watch = TokenWatch(model)

    def routed(layer: MoELayer) -> Iterator[Routed]:
        taken: list[Routed] = []

        def take(hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            tokens = watch.of(len(hidden))
            first = torch.from_numpy(tokens.position == 0)
            taken.append(Routed(*(part[tokens.real] for part in (hidden, index, weight, first))))
            return torch.zeros_like(hidden)  # only deeper layers see it, and nobody looks at those

        layer.experts.install(take)
        try:
            for _ in prefill(model, sequences, batch_tokens, f"{label}: {layer.name}"):
                yield taken.pop()
        finally:
            layer.experts.install(None)

    for layer in moe_layers(model):
        step = LayerStep(layer, partial(routed, layer), inputs)
        yield step
        step.leave()


@dataclass
class _Pass:
    """One batch on its way through one layer."""

    real: torch.Tensor  # [B * S] bool
    first: torch.Tensor  # [B * S] bool
    hidden: torch.Tensor | None  # [B, S, H] to put in; None: what the embedding makes
    out: torch.Tensor | None = None  # [B, S, H] after the layer
    routed: Routed | None = None


_PASS: ContextVar[_Pass] = ContextVar("batch on its way through a layer")


class HiddenStream:
    """The hidden states of all batches before a decoder layer, and the one layer that moves them on."""

    def __init__(self, folder: str | Path, sequences: Sequence[Sequence[int]], batch_tokens: int) -> None:
        """Runs the embedding."""
        self.partial = PartialModel(folder)
        self._decoder: Any = self.partial.model.base_model
        self._prefix = f"{self.partial.model.base_model_prefix}."
        lengths = [len(sequence) for sequence in sequences]
        self.batches = plan_batches(lengths, batch_tokens)
        self._ids, self._real, self._first = [], [], []
        for rows in self.batches:
            ids = torch.zeros(len(rows), lengths[rows[0]], dtype=torch.int64)
            real = torch.zeros(ids.shape, dtype=torch.bool)
            for place, row in enumerate(rows):
                ids[place, : lengths[row]] = torch.as_tensor(sequences[row], dtype=torch.int64)
                real[place, : lengths[row]] = True
            self._ids.append(ids)
            self._real.append(real.view(-1))
            self._first.append((torch.arange(ids.shape[1]) == 0).repeat(len(rows)))
        for layer in self._decoder.layers:
            layer.forward = _pass_through
        self.hidden: list[torch.Tensor | None] = [None] * len(self.batches)  # [B, S, H] each
        self._embed()

    def _embed(self) -> None:
        """Run what stands before the layers, then put stand-ins for everything beside them."""
        decoder, layers = self._decoder, f"{self._prefix}layers."
        self.partial.load(self._prefix, without=layers)
        self.advance(0)  # the first layer passes through as well: what comes out is what it would get
        embedding = decoder.get_input_embeddings()
        for name, child in decoder.named_children():
            if name != "layers" and any(True for _ in child.parameters()):
                self.partial.free(child)
                child.forward = _pass_through
        embedding.forward = lambda ids: torch.zeros(1, 1, 1).expand(*ids.shape, embedding.embedding_dim)

    @contextmanager
    def layer(self, number: int) -> Iterator[MoELayer | None]:
        """Decoder layer `number` holds its weights and runs inside; yields it if it is a MoE layer."""
        module = self._decoder.layers[number]
        self.partial.load(f"{self._prefix}layers.{number}.")
        del module.forward
        try:
            yield self.partial.load_experts(number)
        finally:
            module.forward = _pass_through
            self.partial.free(module)

    def measure(self, number: int, layer: MoELayer) -> HessianSums:
        """Hessians of the layer's experts at these hidden states."""
        return sums_of(layer, self.routed(number, layer))

    def routed(self, number: int, layer: MoELayer) -> Iterator[Routed]:
        """Every batch where it enters the layer's experts; their outputs are not computed."""

        def take(hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            batch = _PASS.get()
            batch.routed = Routed(*(part[batch.real] for part in (hidden, index, weight, batch.first)))
            return torch.zeros_like(hidden)

        layer.experts.install(take)
        try:
            for batch in self._passes(number):
                if batch.routed is None:
                    raise RuntimeError(f"layer {number} ran without entering its experts")
                yield batch.routed
        finally:
            layer.experts.install(None)

    def advance(self, number: int) -> None:
        """Move every batch's hidden states through decoder layer `number`."""
        for place, batch in enumerate(self._passes(number)):
            self.hidden[place] = batch.out

    def _passes(self, number: int) -> Iterator[_Pass]:
        """Run the batches, as many side by side as there are threads, and yield them in order."""
        module: nn.Module = self._decoder.layers[number]
        handles = [
            module.register_forward_pre_hook(_put_in, with_kwargs=True),
            module.register_forward_hook(_take_out),
        ]

        def run(place: int) -> _Pass:
            batch = _Pass(self._real[place], self._first[place], self.hidden[place])
            token = _PASS.set(batch)
            try:
                with torch.inference_mode():
                    self._decoder(input_ids=self._ids[place], use_cache=False)
            finally:
                _PASS.reset(token)
            return batch

        try:
            step = torch.get_num_threads()
            for start in range(0, len(self.batches), step):
                yield from side_by_side(run, range(start, min(start + step, len(self.batches))))
        finally:
            for handle in handles:
                handle.remove()


def _pass_through(hidden_states: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
    return hidden_states


def _put_in(_module: nn.Module, args: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    hidden = _PASS.get().hidden
    if hidden is None:
        return None
    if args:
        return (hidden, *args[1:]), options
    return args, {**options, "hidden_states": hidden}


def _take_out(module: nn.Module, _args: tuple, output: Any) -> None:
    if not isinstance(output, torch.Tensor):
        raise RuntimeError(f"{type(module).__name__} returns {type(output).__name__}, expected hidden states")
    _PASS.get().out = output
