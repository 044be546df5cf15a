from __future__ import annotations

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.testing.utilities import prefect_test_harness

from flows import pipeline
from tests.flows.toy_dag import DOUBLE, dvc, read_params


@pytest.fixture(scope="session", autouse=True)
def server():
    """One temporary server, with a database of its own, for all flow runs of the tests."""
    with prefect_test_harness(server_startup_timeout=180):
        yield


def run(**parameters):
    """Run the flow; returns its final state and {stage: (state name, message)}."""
    state = pipeline.pipeline(return_state=True, **parameters)
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(
            flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [state.state_details.flow_run_id]}})
        )
    return state, {run.name: (run.state_name, run.state.message) for run in runs}


def test_the_flow_runs_what_dvc_would_and_gives_the_same_lock(toy):
    first, stages = run()
    assert first.is_completed() and first.message == "5 stages ran, 0 unchanged"
    assert {name for name, _ in stages.values()} == {"Completed"}
    lock = (toy / "dvc.lock").read_text()

    second, stages = run()
    assert second.message == "0 stages ran, 5 unchanged"
    assert {name for name, _ in stages.values()} == {"Cached"}
    assert (toy / "dvc.lock").read_text() == lock

    (toy / "dvc.lock").unlink()
    assert dvc("repro").returncode == 0
    assert (toy / "dvc.lock").read_text() == lock


def test_overrides_are_applied_before_the_graph_is_read(toy):
    state, stages = run(overrides={"quantize_instances.bits": [4], "prepare_requests.count": 9})
    assert state.is_completed()
    assert set(stages) == {"add", "double@4", "total", "lone"}
    assert (toy / "total.txt").read_text() == "40\n"  # (9 + 1) 4
    assert read_params()["prepare_requests"]["count"] == 9


def test_a_wrong_override_fails_before_any_stage(toy):
    state, stages = run(overrides={"quantize_instances.bitz": [2, 4]})
    assert state.is_failed() and "did you mean 'quantize_instances.bits'" in state.message
    assert stages == {} and not (toy / "dvc.lock").exists()


def test_a_failed_stage_stops_what_needs_it_and_nothing_else(toy):
    (toy / "double.py").write_text(DOUBLE + "if sys.argv[1] == '2': sys.exit('no')\n")
    state, stages = run()
    assert state.is_failed() and state.message == "failed: double@2; not started because of it: 1"
    assert {name: stage for name, (stage, _) in stages.items()} == {
        "add": "Completed", "double@2": "Failed", "double@4": "Completed", "total": "NotReady",
        "lone": "Completed",
    }  # fmt: skip
    message = stages["double@2"][1]
    assert "> python double.py 2\nno\n" in message and "Traceback" not in message


def test_without_a_server_a_temporary_one_is_announced(monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "server_answers", lambda: False)
    with pipeline.with_server():
        pass
    assert "starting a temporary one" in capsys.readouterr().out
