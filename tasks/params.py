"""The schema of params.yaml: one frozen model per section, so that a mistyped key or value fails before any work.

The stages read their own section through `load_params`; nothing else reads the file.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Bits = Literal[2, 3, 4, 8]
ItemName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class ParamsError(ValueError):
    """A parameter is unknown, missing or out of range; the message says which and what is expected."""


class Section(BaseModel):
    """A section is immutable and refuses keys that nothing reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Runtime(Section):
    """How a stage runs on this machine or over a cluster; no result depends on workers, engine and address."""

    threads: PositiveInt
    batch_tokens: PositiveInt
    workers: PositiveInt
    engine: Literal["processes", "dask", "ray"]
    address: str | None

    @model_validator(mode="after")
    def _address_is_used(self) -> Runtime:
        if self.address is not None and self.engine == "processes":
            raise ValueError(
                f"address is '{self.address}', but engine 'processes' works on this machine alone: "
                "set engine to dask or ray, or address to null"
            )
        if self.address is not None and self.workers == 1:
            raise ValueError(
                f"address is '{self.address}', but with workers 1 nothing leaves this process: "
                "set workers to the number of the cluster's workers"
            )
        return self


class SmolLM2MoE(Section):
    upcycling_tokens: PositiveInt
    check_tokens: PositiveInt
    moe_layers: Literal["odd", "all"]
    shared_neurons: Annotated[int, Field(ge=0)]
    experts: Annotated[int, Field(ge=2)]
    top_k: PositiveInt
    router_temperature: Annotated[float, Field(gt=0)]
    ridge: Annotated[float, Field(gt=0)]
    seed: int

    @model_validator(mode="after")
    def _top_k_fits(self) -> SmolLM2MoE:
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, but there are only {self.experts} experts")
        return self


class Tiny(Section):
    steps: PositiveInt
    seed: int


class HubModel(Section):
    id: str
    revision: str
    trust_remote_code: bool


class LocalModel(Section):
    folder: str | None
    trust_remote_code: bool


class PrepareReference(Section):
    source: Literal["smollm2-moe", "tiny", "hub", "path"]
    smollm2_moe: SmolLM2MoE
    tiny: Tiny
    hub: HubModel
    path: LocalModel

    @model_validator(mode="after")
    def _path_given(self) -> PrepareReference:
        if self.source == "path" and not self.path.folder:
            raise ValueError("source is 'path', but path.folder is empty: give the checkpoint's folder")
        return self


class JsonlSource(Section):
    file: str


class HubSource(Section):
    id: str | None
    revision: str
    split: str
    columns: dict[Literal["id", "class", "prompt", "response"], str]


class PrepareRequests(Section):
    source: Literal["packaged", "synthetic", "jsonl", "hub"]
    count: PositiveInt
    mean_tokens: PositiveInt
    prompt_tokens: PositiveInt
    responses: Literal["given", "sampled"]
    response_tokens: PositiveInt
    long_prompt_tokens: PositiveInt
    long_share: Annotated[float, Field(ge=0, le=1)]
    min_class_size: PositiveInt
    holdout_share: Share
    calibration_tokens: PositiveInt
    perplexity_tokens: PositiveInt
    questions: PositiveInt
    question_tokens: PositiveInt
    question_mean_tokens: PositiveInt
    bos: bool
    chat_template: bool
    seed: int
    jsonl: JsonlSource
    hub: HubSource


class GptqCalibration(Section):
    """Read by method gptq alone, which calibrates on the tokens of artifacts/requests."""

    inputs: Literal["reference", "quantized"]
    shrinkage: Annotated[float, Field(ge=0)]
    damping: Annotated[float, Field(gt=0)]
    max_fallback_share: Annotated[float, Field(ge=0, le=1)]


class QuantizeInstances(Section):
    bits: Annotated[list[Bits], Field(min_length=1)]
    method: Literal["hqq", "rtn", "clip_search", "gptq"]
    group_size: Annotated[int, Field(ge=0)]
    symmetric: bool
    protect: Annotated[int, Field(ge=0)]
    gptq: GptqCalibration

    @model_validator(mode="after")
    def _bits_once(self) -> QuantizeInstances:
        if len(set(self.bits)) != len(self.bits):
            raise ValueError(f"bits has a width twice: {self.bits}")
        return self

    @property
    def names(self) -> list[str]:
        """Instance names, `W2` and so on, in the order of `bits`."""
        return [f"W{bits}" for bits in self.bits]


class MeasureExperts(Section):
    capacity_quantile: Share
    lis_batch_size: PositiveInt


class Variant(Section):
    replicas: Annotated[int, Field(ge=0)]
    replica_bits: Bits
    least_important_bits: Bits
    group_size: Annotated[int, Field(ge=0)]
    dispatch: Literal["round_robin", "random"]
    seed: int


class BuildVariants(Section):
    variants: dict[ItemName, Variant]


class ScoreRequests(Section):
    compute_dtype: Literal["float32", "bfloat16"]


class DecomposeDamage(Section):
    level: Literal["layer", "expert"]
    compute_dtype: Literal["float32", "float64"]
    fit_requests: PositiveInt
    holdout_requests: PositiveInt
    pairs: Annotated[int, Field(ge=2)]
    fragility_tokens: PositiveInt
    probes: PositiveInt
    swap_layers: PositiveInt
    swap_tokens: PositiveInt
    super_experts: PositiveInt
    seed: int


class CalibrateFwp(Section):
    scorer: str
    damage: Literal["kl", "dnll"]
    scored: Literal["response", "prompt"]
    strengths: Annotated[list[Literal["gate_prob", "router_row_norm", "measured"]], Field(min_length=1)]
    align: Literal["token", "predictor"]
    strength: Literal["gate_prob", "router_row_norm", "measured"]
    position_0: bool
    predictor: Literal[
        "auto",
        "class_mean",
        "shrunk_mean",
        "isotonic",
        "ridge_length",
        "ridge_ppl",
        "ridge_fwp",
        "ridge",
        "boosted",
    ]
    min_tokens: PositiveInt
    folds: Annotated[int, Field(ge=2)]
    bootstrap: PositiveInt
    splits: Annotated[int, Field(ge=2)]
    seed: int

    @model_validator(mode="after")
    def _strength_listed(self) -> CalibrateFwp:
        if self.strength not in self.strengths:
            raise ValueError(f"strength '{self.strength}' is not one of strengths {self.strengths}")
        return self


class SolveRouting(Section):
    budget: Literal["relative", "paper", "absolute"]
    budget_value: float
    budget_scope: Literal["overall", "class"]
    reward: Literal["bits", "published_endpoint"]
    delta: Annotated[float, Field(gt=0, lt=1)]
    replicates: PositiveInt
    folds: Annotated[int, Field(ge=2)]
    seed: int


class MeasureThroughput(Section):
    prefill_tokens: PositiveInt
    decode_tokens: PositiveInt
    repeats: PositiveInt


class EvaluateBenchmarks(Section):
    tasks: Annotated[list[str], Field(min_length=1)]
    data_dir: str | None
    limit: dict[str, PositiveInt]
    batch_size: PositiveInt
    seed: int


class TrackRuns(Section):
    experiment: str


class Params(Section):
    """params.yaml as a whole; the attribute names are the section names."""

    runtime: Runtime
    prepare_reference: PrepareReference
    prepare_requests: PrepareRequests
    quantize_instances: QuantizeInstances
    measure_experts: MeasureExperts
    build_variants: BuildVariants
    score_requests: ScoreRequests
    decompose_damage: DecomposeDamage
    calibrate_fwp: CalibrateFwp
    solve_routing: SolveRouting
    measure_throughput: MeasureThroughput
    evaluate_benchmarks: EvaluateBenchmarks
    track_runs: TrackRuns

    @model_validator(mode="after")
    def _scorer_in_pool(self) -> Params:
        known = ["reference", *self.quantize_instances.names]
        if self.calibrate_fwp.scorer not in known:
            raise ValueError(
                f"calibrate_fwp.scorer is '{self.calibrate_fwp.scorer}', which is not in the pool: one of {known}"
            )
        return self

    @property
    def model_names(self) -> list[str]:
        """Every model of a run: the reference, the instances, the variants."""
        return ["reference", *self.quantize_instances.names, *self.build_variants.variants]


def load_params(path: str | Path = "params.yaml") -> Params:
    """Read and check params.yaml.

    Raises ParamsError naming the file, the key, what was got and what is expected; an unknown key is answered
    with the nearest known one.
    """
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParamsError(f"{path}: no such file; run from the project's root") from None
    except yaml.YAMLError as error:
        raise ParamsError(f"{path}: not valid YAML: {error}") from None
    return check_params(values, str(path))


def check_params(values: Any, origin: str = "params") -> Params:
    """Validate a nested dict of parameters; raises ParamsError as `load_params` does."""
    if not isinstance(values, dict):
        raise ParamsError(f"{origin}: expected sections, got {type(values).__name__}")
    try:
        return Params.model_validate(values)
    except ValidationError as error:
        lines = [f"{origin}: {_explain(item)}" for item in error.errors()]
        raise ParamsError("\n".join(lines)) from None


def _explain(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _keys_beside(item["loc"])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known here: {', '.join(known)}"
        return f"unknown parameter '{where}'{hint}"
    if item["type"] == "missing":
        return f"parameter '{where}' is missing"
    message = item["msg"].removeprefix("Value error, ")
    got = "" if isinstance(item["input"], dict) else f", got {item['input']!r}"
    return f"'{where}': {message}{got}" if where else message


def _keys_beside(loc: tuple[Any, ...]) -> list[str]:
    """The known keys of the section that holds `loc`."""
    model: Any = Params
    for part in loc[:-1]:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        # build_variants.variants.<name> is the only section keyed by free names
        model = Variant if field is None else field.annotation
    return sorted(getattr(model, "model_fields", {}))
