"""What a checkpoint really holds, matrix by matrix, against what its model needs: quantized or not, bytes, NaNs, keys.

Headers say nearly everything; scales and floating tensors are read once, 16 MiB at a time, to find NaNs and to
compare with a reference. A checkpoint of any size is audited in little memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasks.console import track
from tasks.contracts import InputError, ReplicationPlan, read_json
from tasks.moe.checkpoint import PHYSICAL_FILE, PLAN_FILE, skeleton
from tasks.moe.headers import INDEX, SINGLE, StoredTensor, merge_headers, read_header, read_headers
from tasks.moe.skeleton_keys import (
    EMBEDDING,
    EXPERT,
    LINEAR,
    OTHER,
    ROUTER,
    compare_keys,
    kind_by_name,
    layer_of,
    model_keys,
    variant_keys,
)
from tasks.moe.stored_formats import UNKNOWN, Files, Storage, gptq_zero_codes, group_parts, storage
from tasks.quant.formats import MANIFEST_FILE

Expect = Literal["experts", "all"]
UNTOUCHED = (ROUTER, EMBEDDING, OTHER)  # what no quantizer should change


@dataclass(frozen=True)
class Finding:
    """One matrix, stack of matrices or other tensor of the checkpoint."""

    name: str
    kind: str
    layer: str
    shape: tuple[int, ...] | None  # [out, in] or [E, out, in], as the model says; None where it does not
    storage: Storage
    wanted: bool  # should be quantized
    protected: bool  # an expert that the checkpoint declares by name to keep as it was
    not_finite: int  # NaN and infinite values among its scales or floating values
    fault: str  # what is wrong with how it is stored; empty: nothing
    same: bool | None  # bitwise as in the reference; None: not compared

    @property
    def stays(self) -> bool:
        """Must be as it was."""
        return self.kind in UNTOUCHED or self.protected

    @property
    def matrices(self) -> int:
        return self.shape[0] if self.shape and len(self.shape) == 3 else 1


@dataclass
class Audit:
    """The result of an audit; every list is empty in a clean checkpoint."""

    folder: str
    model_type: str
    declared: str  # what the checkpoint's configuration or manifest says of its quantization
    findings: list[Finding]
    missing: list[str]
    unexpected: list[str]
    notes: list[str] = field(default_factory=list)  # what could not be checked, and what is worth knowing

    @property
    def unquantized(self) -> list[Finding]:
        return [found for found in self.findings if found.wanted and not found.storage.quantized]

    def where(self, condition: str) -> list[Finding]:
        return {
            "faulty": [found for found in self.findings if found.fault],
            "not finite": [found for found in self.findings if found.not_finite],
            "touched": [found for found in self.findings if found.stays and _touched(found)],
        }[condition]

    def problems(self) -> list[str]:
        """One line per kind of problem, gravest first."""
        lines = []
        unquantized = [found for found in self.unquantized if found.storage.format != UNKNOWN]
        wanted = [found for found in self.findings if found.wanted]
        if unquantized:
            bits = " or ".join(sorted({str(found.storage.bits) for found in unquantized}))
            lines.append(
                f"{_count(unquantized)} of {_count(wanted)} matrices that should be quantized are in {bits} bits: "
                f"{_some(unquantized)}"
            )
        for condition, text in (
            ("faulty", "are not stored as they should be"),
            ("not finite", "hold NaN or infinity"),
            ("touched", "that must stay as they were were changed"),
        ):
            found = self.where(condition)
            if found:
                lines.append(f"{len(found)} tensors {text}: {_some(found)}")
        for names, text in ((self.missing, "missing"), (self.unexpected, "unexpected")):
            if names:
                lines.append(
                    f"{len(names)} keys are {text}: {', '.join(names[:2])}{', ...' if names[2:] else ''}"
                )
        return lines

    @property
    def verdict(self) -> str:
        quantized = [found for found in self.findings if found.wanted and found.storage.quantized]
        if self.problems():
            return f"NOT AS IT SHOULD BE: {self.problems()[0]}"
        if not quantized:
            return "clean, but nothing was expected to be quantized: the model has no routed experts"
        bits = ", ".join(str(width) for width in sorted({found.storage.bits or 0 for found in quantized}))
        kept = _count(found for found in self.findings if found.protected)
        more = f"; {kept} more are protected, as declared" if kept else ""
        return f"clean: all {_count(quantized)} matrices that should be quantized are, at {bits} bits{more}"

    @property
    def exit_status(self) -> int:
        return 1 if self.problems() else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "declared": self.declared,
            "verdict": self.verdict,
            "exit_status": self.exit_status,
            "problems": self.problems(),
            "notes": self.notes,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "tensors": [_finding_json(found) for found in self.findings],
        }


def _count(findings: Iterable[Finding]) -> int:
    return sum(found.matrices for found in findings)


def _some(findings: list[Finding]) -> str:
    first = findings[0]
    detail = f" ({first.fault})" if first.fault else ""
    return f"{first.name}{detail}{f' and {len(findings) - 1} more' if findings[1:] else ''}"


def _touched(found: Finding) -> bool:
    return found.same is False or (found.storage.quantized and not found.protected)


def _finding_json(found: Finding) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": found.name,
        "kind": found.kind,
        "quantized": found.storage.quantized,
        "format": found.storage.format,
        "should_be_quantized": found.wanted,
        "matrices": found.matrices,
        "values": found.storage.values,
        "stored_bytes": found.storage.stored_bytes,
        "expected_bytes": found.storage.expected_bytes,
        "not_finite": found.not_finite,
    }
    optional = {
        "layer": found.layer or None,
        "shape": found.shape,
        "bits": found.storage.bits,
        "group_size": found.storage.group_size,
        "protected": found.protected or None,
        "fault": found.fault or None,
        "same_as_reference": found.same,
    }
    return values | {key: value for key, value in optional.items() if value is not None}


# --- reading ------------------------------------------------------------------------------------------------------


def audit(folder: Path, reference: Path | None = None, expect: Expect = "experts") -> Audit:
    """Audit the checkpoint, instance or variant in `folder`.

    Raises InputError when it cannot be read: no safetensors, a truncated or missing file, a variant without
    its `reference`.
    """
    headers, declared = _open(folder)
    plan = ReplicationPlan.load_from(folder / PLAN_FILE) if (folder / PLAN_FILE).is_file() else None
    notes: list[str] = []
    if plan and reference is None:
        raise InputError(f"{folder} is a variant: give the folder of its reference with --reference")
    try:
        model = skeleton(reference if plan and reference else folder)
        keys = variant_keys(model, plan.layers) if plan else model_keys(model)
        model_type = str(model.config.model_type)
    except InputError as error:
        if plan:
            raise
        keys, model_type = None, declared.model_type
        notes.append(f"keys not checked, kinds told by names alone: {error}")
    groups = group_parts(headers)
    missing, unexpected, known = ([], [], {}) if keys is None else compare_keys(keys, groups)
    items = [(base, *known[base]) for base in groups if base in known]
    if keys is None:
        items = [(base, kind_by_name(base, _dimensions(parts)), None) for base, parts in groups.items()]
    inspector = _Inspector(
        Files(folder),
        declared,
        keys.bits if keys else {},
        (EXPERT, *LINEAR) if expect == "all" else (EXPERT,),
        None if plan or reference is None else read_headers(reference),
        reference,
    )
    findings = [
        inspector.inspect(base, kind, shape, groups[base])
        for base, kind, shape in track(sorted(items, key=lambda item: item[0]), "auditing", len(items))
    ]
    if not any(found.kind == EXPERT and found.storage.quantized for found in findings):
        # Who passes over all experts protects none, whatever its list of what it ignored says.
        findings = [
            replace(found, protected=False, wanted=found.kind in inspector.wanted) for found in findings
        ]
    compared = sum(found.same is not None for found in findings)
    if inspector.original is not None:
        notes.append(f"{compared} floating tensors compared with the reference, bit by bit")
    return Audit(folder.name, model_type, declared.words, findings, missing, unexpected, notes)


@dataclass(frozen=True)
class Declared:
    """What a checkpoint's configuration or manifest says of its quantization."""

    words: str
    model_type: str = "unknown"
    bits: int | None = None  # one for all matrices
    layout: str | None = None  # of GPTQ: "gptq" or "gptq_v2"
    symmetric: bool | None = None
    kept: frozenset[str] = frozenset()  # modules that are named one by one as not quantized


def _open(folder: Path) -> tuple[dict[str, StoredTensor], Declared]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder: expected the folder of a checkpoint")
    if (folder / PLAN_FILE).is_file():
        return read_header(folder / PHYSICAL_FILE), Declared("a replicate-and-quantize variant")
    if (
        not (folder / INDEX).is_file()
        and not (folder / SINGLE).is_file()
        and any(folder.glob("*.safetensors"))
    ):
        headers = merge_headers(
            sorted(folder.glob("*.safetensors"))
        )  # an instance, or a tool's own file name
    else:
        headers = read_headers(folder)
    config = _read_object(folder / "config.json")
    model_type = str(config.get("model_type", "unknown"))
    quantization = config.get("quantization_config") or {}
    for name in ("quantize_config.json", "quant_config.json"):  # what AutoGPTQ and AutoAWQ wrote beside it
        if not quantization and (folder / name).is_file():
            quantization = {"quant_method": name.split("_")[0], **_read_object(folder / name)}
    if (folder / MANIFEST_FILE).is_file():
        manifest = _read_object(folder / MANIFEST_FILE)
        kind = "symmetric" if manifest.get("symmetric") else "asymmetric"
        words = f"expertpool instance, {manifest.get('method')}, {kind}, {manifest.get('bits')} bits"
        protected = manifest.get("protected") or []
        if protected:
            words += f", {len(protected)} experts protected"
        kept = frozenset(name for own in protected for name in own["matrices"])
        return headers, Declared(words, model_type, manifest.get("bits"), kept=kept)
    if not quantization:
        return headers, Declared("no quantization declared", model_type)
    bits = quantization.get("bits") or quantization.get("w_bit")
    groups = list((quantization.get("config_groups") or {}).values())
    if groups:
        widths = {(group.get("weights") or {}).get("num_bits") for group in groups}
        bits = widths.pop() if len(widths) == 1 else None
    if quantization.get("dynamic"):
        bits = None  # differs from module to module
    layout = quantization.get("format") or quantization.get("checkpoint_format")
    words = [quantization.get("quant_method"), layout, f"{bits} bits" if bits else None]
    said = ", ".join(dict.fromkeys(str(word) for word in words if word))
    ignored = [name for name in quantization.get("ignore") or () if isinstance(name, str)]
    kept = frozenset(name for name in ignored if not name.startswith("re:"))
    return headers, Declared(said, model_type, bits, layout, quantization.get("sym"), kept)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path) if path.is_file() else {}
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    return values if isinstance(values, dict) else {}


def _dimensions(parts: Mapping[str, StoredTensor]) -> int:
    return 2 if len(parts) > 1 else len(next(iter(parts.values())).shape)


@dataclass(frozen=True)
class _Inspector:
    files: Files
    declared: Declared
    bits: Mapping[str, int]  # base -> bits, where they are planned one by one
    wanted: tuple[str, ...]  # kinds that should be quantized
    original: Mapping[str, StoredTensor] | None  # the reference's
    reference: Path | None

    def inspect(
        self, base: str, kind: str, shape: tuple[int, ...] | None, parts: Mapping[str, StoredTensor]
    ) -> Finding:
        bits = self.bits.get(base, self.declared.bits)
        stored = storage(parts, shape, bits, self.files)
        fault = (
            "" if kind == OTHER and stored.format == UNKNOWN else stored.fault
        )  # such as a buffer of integers
        if not fault and stored.format == "gptq":
            fault = self._zero_points(parts, stored.bits or 0)
        if not fault and stored.quantized and bits and stored.bits != bits:
            fault = f"{stored.bits} bits where {bits} are declared"
        protected = kind == EXPERT and base in self.declared.kept
        if not fault and protected and stored.quantized:
            fault = "quantized, but declared to be protected"
        not_finite = sum(self.files.not_finite(tensor) for tensor in parts.values())
        if "_scales" in parts and parts["_scales"].dtype == "U8":  # powers of two; 255 is their NaN
            not_finite += sum(int((piece == 0xFF).sum()) for piece in self.files.pieces(parts["_scales"]))
        same = None
        if not stored.quantized and (kind != EXPERT or protected):
            same = self._same(base, parts)
        wanted = kind in self.wanted and not protected
        return Finding(base, kind, layer_of(base), shape, stored, wanted, protected, not_finite, fault, same)

    def _same(self, base: str, parts: Mapping[str, StoredTensor]) -> bool | None:
        part, tensor = next(iter(parts.items()))
        original = (self.original or {}).get(f"{base}.{part}" if part else base)
        if original is None or self.reference is None or len(parts) > 1:
            return None
        if (tensor.dtype, tensor.shape) != (original.dtype, original.shape):
            return False
        pairs = zip(self.files.pieces(tensor), Files(self.reference).pieces(original), strict=True)
        return all(np.array_equal(own, its) for own, its in pairs)

    def _zero_points(self, parts: Mapping[str, StoredTensor], bits: int) -> str:
        """GPTQ's v1 stores zero points less one, v2 as they are; a loader goes by what config.json says.

        Only a symmetric grid, whose zero point is known, tells which of the two the tensors are.
        """
        said = self.declared.layout
        if self.declared.symmetric is not True or said not in ("gptq", "gptq_v2"):
            return ""
        middle = 2 ** (bits - 1)
        wrong, other = (middle - 1, "gptq") if said == "gptq_v2" else (middle, "gptq_v2")
        if not (gptq_zero_codes(parts, bits, self.files) == wrong).all():
            return ""
        return (
            f"zero points of format {other}: config.json says {said}, and whoever loads them by it shifts every "
            "weight by one step"
        )
