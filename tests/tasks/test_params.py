"""params.yaml is checked before any work, and errors name the key, what was got and the nearest known name."""

from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from tasks.params import ParamsError, check_params, load_params

ROOT = Path(__file__).parents[2]


@pytest.fixture
def values():
    return yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))


def test_the_default_is_valid():
    params = load_params(ROOT / "params.yaml")
    assert params.model_names == ["reference", "W2", "W3", "W4", *params.build_variants.variants]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("quantize_instances.bitz", [3], "unknown parameter 'quantize_instances.bitz'; did you mean 'bits'?"),
        ("solve_routin", {}, "did you mean 'solve_routing'?"),
        ("build_variants.variants.rq.replica", 1, "did you mean 'replicas'?"),
        ("quantize_instances.bits", [2, 5], "should be 2, 3, 4 or 8, got 5"),
        ("quantize_instances.bits", [2, 2], "bits has a width twice"),
        ("quantize_instances.group_size", "64", "got '64'"),
        ("runtime.threads", 0, "greater than 0, got 0"),
        ("runtime.engine", "threads", "should be 'processes', 'dask' or 'ray', got 'threads'"),
        ("runtime.address", "tcp://here:8786", "but engine 'processes' works on this machine alone"),
        ("quantize_instances.method", "awq", "should be 'hqq', 'rtn', 'clip_search' or 'gptq', got 'awq'"),
        ("quantize_instances.gptq.shrinkag", 1.0, "did you mean 'shrinkage'?"),
        (
            "calibrate_fwp.scorer",
            "W8",
            "'W8', which is not in the pool: one of ['reference', 'W2', 'W3', 'W4']",
        ),
        ("prepare_reference.smollm2_moe.top_k", 17, "top_k is 17, but there are only 16 experts"),
        ("prepare_reference.source", "path", "path.folder is empty"),
        ("prepare_requests.holdout_share", 1.0, "less than 1"),
    ],
)
def test_a_bad_value_is_named(values, path, value, message):
    *sections, key = path.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[key] = value
    with pytest.raises(ParamsError) as caught:
        check_params(values)
    assert message in str(caught.value)


def test_an_address_is_for_more_than_one_worker(values):
    values["runtime"] |= {"engine": "dask", "address": "tcp://here:8786"}
    with pytest.raises(ParamsError, match=r"with workers 1 nothing leaves this process"):
        check_params(values)
    values["runtime"]["workers"] = 2
    assert check_params(values).runtime.address == "tcp://here:8786"


def test_every_error_is_reported_at_once(values):
    values["runtime"]["threads"] = -1
    values["track_runs"]["experimet"] = "x"
    with pytest.raises(ParamsError) as caught:
        check_params(values)
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_section_is_named(values):
    del values["solve_routing"]
    with pytest.raises(ParamsError, match="'solve_routing' is missing"):
        check_params(values)


def test_a_missing_or_broken_file_is_said(tmp_path):
    with pytest.raises(ParamsError, match="run from the project's root"):
        load_params(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("a: [1,")
    with pytest.raises(ParamsError, match="not valid YAML"):
        load_params(tmp_path / "params.yaml")


def test_checking_changes_nothing(values):
    before = deepcopy(values)
    check_params(values)
    assert values == before
