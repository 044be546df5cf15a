from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tasks.contracts import InputError
from tasks.moe.checkpoint import load_model
from tasks.params import HubModel
from tasks.sources.hub_model import build
from tests.seeded_models import seeded_checkpoint
from tests.tasks.sources.hub_server import LoopbackHub, serve

ROOT = Path(__file__).parents[3]
ID = "maker/little-moe"


def params(revision: str = "main", id: str = ID, trust_remote_code: bool = False) -> HubModel:
    return HubModel(id=id, revision=revision, trust_remote_code=trust_remote_code)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Revision -> folder: `main` and `v2` differ in their weights, both of several shards."""
    folder = tmp_path_factory.mktemp("hub")
    made: dict[str, Path] = {}
    for seed, revision in enumerate(("main", "v2")):
        made[revision] = seeded_checkpoint(folder / revision, seed=seed, num_hidden_layers=2)
        model = load_model(made[revision])
        (made[revision] / "model.safetensors").unlink()
        model.save_pretrained(made[revision], max_shard_size="150KB")
        (made[revision] / "README.md").write_text("not needed\n")
    return made


@pytest.fixture
def hub(checkpoints: dict[str, Path]) -> Iterator[LoopbackHub]:
    with serve(LoopbackHub(ID, dict(checkpoints))) as served:
        yield served


def fetch(hub: LoopbackHub, tmp_path: Path, **options: object) -> Path:
    folder = tmp_path / "reference"
    folder.mkdir(exist_ok=True)
    facts = build(folder, params(**options), endpoint=hub.endpoint, cache=tmp_path / "cache")  # pyright: ignore
    assert facts["commit"] == hub.commit(facts["revision"])
    return folder


@pytest.mark.parametrize("revision", ["main", "v2"])
def test_the_revision_asked_for_arrives_shard_by_shard(
    hub: LoopbackHub, checkpoints: dict[str, Path], tmp_path: Path, revision: str
) -> None:
    folder = fetch(hub, tmp_path, revision=revision)
    shards = sorted(path.name for path in checkpoints[revision].glob("*.safetensors"))
    assert len(shards) > 1
    for name in [*shards, "model.safetensors.index.json", "config.json", "tokenizer.json"]:
        assert (folder / name).read_bytes() == (checkpoints[revision] / name).read_bytes()
    assert {line.split("/")[0] for line in hub.served} == {revision}
    assert not any(line.endswith("README.md") for line in hub.served)
    assert load_model(folder).config.num_experts == 8


def test_what_is_there_is_not_fetched_again_and_serves_without_network(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with serve(LoopbackHub(ID, dict(checkpoints))) as hub:
        fetch(hub, tmp_path)
        first = len(hub.served)
        fetch_again = tmp_path / "again"
        fetch_again.mkdir()
        build(fetch_again, params(), endpoint=hub.endpoint, cache=tmp_path / "cache")
        assert first > 3 and len(hub.served) == first
    offline = tmp_path / "offline"
    offline.mkdir()
    build(offline, params(), endpoint=hub.endpoint, cache=tmp_path / "cache")
    assert load_model(offline).config.num_experts == 8
    with pytest.raises(InputError, match=r"cannot fetch .*source 'path'"):
        build(tmp_path, params(revision="v2"), endpoint=hub.endpoint, cache=tmp_path / "cache")


def altered(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_missing_shard_is_named_before_any_shard_is_fetched(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    broken = altered(checkpoints["main"], tmp_path / "broken")
    missing = sorted(broken.glob("*.safetensors"))[1]
    missing.unlink()
    with serve(LoopbackHub(ID, {"main": broken})) as hub, pytest.raises(InputError, match=missing.name):
        fetch(hub, tmp_path)
    assert not any(line.endswith(".safetensors") for line in hub.served)


def test_remote_code_is_refused_unless_a_parameter_allows_it(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    foreign = altered(checkpoints["main"], tmp_path / "foreign")
    config = json.loads((foreign / "config.json").read_text())
    config |= {"model_type": "own_moe", "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnMoe"}}
    (foreign / "config.json").write_text(json.dumps(config))
    (foreign / "modeling_own.py").write_text("raise SystemExit('this must not run')\n")
    with serve(LoopbackHub(ID, {"main": foreign})) as hub:
        with pytest.raises(InputError, match=r"own_moe.*trust_remote_code"):
            fetch(hub, tmp_path)
        assert not any(line.endswith((".py", ".safetensors")) for line in hub.served)
        folder = fetch(hub, tmp_path, trust_remote_code=True)
    assert (folder / "modeling_own.py").is_file()


def test_pickled_weights_are_refused_unseen(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    pickled = altered(checkpoints["main"], tmp_path / "pickled")
    for path in pickled.glob("*.safetensors*"):
        path.unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with (
        serve(LoopbackHub(ID, {"main": pickled})) as hub,
        pytest.raises(InputError, match=r"pytorch_model\.bin.*save_pretrained"),
    ):
        fetch(hub, tmp_path)
    assert not any(line.endswith(".bin") for line in hub.served)


def test_unknown_names_are_told_apart(hub: LoopbackHub, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such repository"):
        fetch(hub, tmp_path, id="maker/other")
    with pytest.raises(InputError, match="no such revision"):
        fetch(hub, tmp_path, revision="v9")
    with pytest.raises(InputError, match=r"hub\.id"):
        fetch(hub, tmp_path, id="not an id")


def test_an_unreachable_hub_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"cannot fetch {ID} at revision main"):
        build(tmp_path, params(), endpoint="http://127.0.0.1:9", cache=tmp_path / "cache")


def test_the_step_from_end_to_end(hub: LoopbackHub, tmp_path: Path) -> None:
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["prepare_reference"] |= {"source": "hub", "hub": params(revision="v2").model_dump()}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "tasks.prepare_reference"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics" / "reference.json").read_text())
    assert metrics["commit"] == hub.commit("v2") and metrics["id"] == ID
    assert metrics["expert_parameters"] == 2 * 8 * 3 * 64 * 32
    assert load_model(tmp_path / "artifacts" / "reference").config.num_experts == 8
