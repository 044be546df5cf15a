"""README's tables between markers."""

from __future__ import annotations

from tasks.reporting import readme

TEXT = "a\n<!-- results:x -->\nold\n<!-- /results:x -->\nb\n<!-- results:y -->\n<!-- /results:y -->\nc\n"


def test_only_what_stands_between_the_markers_changes():
    text, missing = readme.with_tables(TEXT, {"x": "| new \\1 |", "z": "| none |"})
    assert text == TEXT.replace("old", "| new \\1 |")
    assert missing == ["z"]
    assert readme.between("x", text) == "| new \\1 |"
    assert readme.between("y", text) == ""
    assert readme.between("z", text) is None


def test_writing_twice_writes_once(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(TEXT)
    path.chmod(0o644)
    readme.write_tables(path, {"x": "| 1 |"})
    first = path.stat()
    readme.write_tables(path, {"x": "| 1 |"})
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (first.st_mtime_ns, first.st_ino)
    assert first.st_mode & 0o777 == 0o644


def test_no_readme_is_reported(tmp_path):
    assert readme.write_tables(tmp_path / "README.md", {"x": ""}) == ["x"]
