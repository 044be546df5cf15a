"""Fixtures and marks of the whole suite."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: workers side by side, each on one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
# What the trained tiny checkpoint depends on: when one of these changes, it is trained anew.
TINY_SOURCES = (
    "tasks/prepare_reference.py",
    "tasks/sources/tiny.py",
    "tasks/sources/synthetic.py",
    "requirements.lock",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that parallel workers end together; skip what reads an absent ../shared."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if (SHARED / "data").is_dir():
        return
    absent = pytest.mark.skip(reason=f"no data folder beside the project: {SHARED.name}/data")
    for item in items:
        if item.get_closest_marker("shared"):
            item.add_marker(absent)


@pytest.fixture(scope="session")
def tiny_cache(request: pytest.FixtureRequest) -> Path:
    """The trained tiny reference as kept between sessions; not to be written to: use `tiny_reference`."""
    import torch

    from tasks.params import load_params
    from tasks.prepare_reference import run

    digest = hashlib.sha256()
    for name in TINY_SOURCES:
        digest.update((ROOT / name).read_bytes())
    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("tiny_reference")) / digest.hexdigest()[:16]
    with FileLock(f"{folder.parent}.lock"):  # one of the parallel workers trains, the others wait
        if not (folder / "reference.json").is_file():
            for stale in folder.parent.iterdir():
                shutil.rmtree(stale, ignore_errors=True)
            section = load_params(ROOT / "params.yaml").prepare_reference
            params = section.model_copy(update={"source": "tiny"})
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # equal results on any machine
            try:
                run(params, folder, folder.parent / f"{folder.name}.json")
            finally:
                torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="session")
def tiny_reference(tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for this session of the trained tiny checkpoint: Qwen3-MoE, 2 layers of 8 experts, top-2."""
    folder = tmp_path_factory.mktemp("tiny") / "reference"
    shutil.copytree(tiny_cache, folder)
    return folder
