from __future__ import annotations

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.testing.utilities import prefect_test_harness
from toy_dag import dvc, read_params

from flows import pipeline


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
    assert first.is_completed() and first.message == "6 stages ran, 0 unchanged"
    assert {name for name, _ in stages.values()} == {"Completed"}
    lock = (toy / "dvc.lock").read_text()

    second, stages = run()
    assert second.message == "0 stages ran, 6 unchanged"
    assert {name for name, _ in stages.values()} == {"Cached"}
    assert (toy / "dvc.lock").read_text() == lock

    (toy / "dvc.lock").unlink()
    assert dvc("repro").returncode == 0
    assert (toy / "dvc.lock").read_text() == lock


def test_overrides_are_applied_before_the_graph_is_read(toy):
    state, stages = run(overrides={"quantize_instances.bits": [2, 4], "prepare_requests.count": 9})
    assert state.is_completed()
    assert set(stages) == {"add", "double@2", "double@4", "total", "lone"}
    assert (toy / "total.txt").read_text() == "60\n"  # (9 + 1) (2 + 4)
    assert read_params()["prepare_requests"]["count"] == 9


def test_a_wrong_override_fails_before_any_stage(toy):
    state, stages = run(overrides={"quantize_instances.bitz": [2, 4]})
    assert state.is_failed() and "did you mean 'quantize_instances.bits'" in state.message
    assert stages == {} and not (toy / "dvc.lock").exists()


def test_a_failed_stage_stops_what_needs_it_and_nothing_else(toy):
    (toy / "double.py").write_text("import sys; print('no'); sys.exit(sys.argv[1] == '3')")
    (toy / "dvc.yaml").write_text((toy / "dvc.yaml").read_text().replace("cmd: python double.py ${item}",
        "cmd: python double.py ${item} && touch artifacts/double_${item}.txt"))  # fmt: skip
    state, stages = run()
    assert state.is_failed()
    assert state.message == "failed: double@3; not started because of it: 1"
    assert stages["double@3"][0] == "Failed" and "> python double.py 3" in stages["double@3"][1]
    assert "Traceback" not in stages["double@3"][1]
    assert {name: stage for name, (stage, _) in stages.items() if name != "double@3"} == {
        "add": "Completed", "double@2": "Completed", "double@4": "Completed", "lone": "Completed", "total": "NotReady",
    }  # fmt: skip


def test_without_a_server_a_temporary_one_is_announced(monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "server_answers", lambda: False)
    with pipeline.with_server():
        pass
    assert "starting a temporary one" in capsys.readouterr().out
