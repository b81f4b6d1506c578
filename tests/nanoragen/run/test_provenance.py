"""run.json: complete, kept over a resume, and never in the way of a run."""

import json
import subprocess
import warnings

import pytest

import nanoragen
from nanoragen.run import provenance
from nanoragen.run.provenance import RunRecord


def read(folder):
    return json.loads((folder / "run.json").read_text())


def test_what_the_report_reads_is_there_and_a_resume_adds_to_it(tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 5.0, 100.0, 100.0, 102.5, 7.0, 8.0])
    monkeypatch.setattr(provenance.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(provenance.time, "strftime", lambda form: "2026-01-01T00:00:00+0000")
    record = RunRecord(tmp_path)
    first = read(tmp_path)
    assert first["started"] == "2026-01-01T00:00:00+0000" and first["duration"] == 1.0
    assert {"nanoragen", "python", "torch", "transformers"} <= first["versions"].keys()
    assert first["versions"]["nanoragen"] == nanoragen.__version__
    record.write()
    assert read(tmp_path)["duration"] == 5.0
    monkeypatch.setattr(provenance.time, "strftime", lambda form: "later")
    RunRecord(tmp_path, resumed=True).write()  # another process goes on
    assert read(tmp_path)["duration"] == 7.5 and read(tmp_path)["started"] == "2026-01-01T00:00:00+0000"
    RunRecord(tmp_path)  # a new run, where one ended before its first step
    assert read(tmp_path)["duration"] == 1.0 and read(tmp_path)["started"] == "later"


def test_the_commit_is_the_checkouts_and_absent_where_there_is_none(tmp_path, monkeypatch):
    git = lambda *args: subprocess.check_output(["git", "-C", str(tmp_path), *args], text=True).strip()
    (tmp_path / "nanoragen").mkdir()
    (tmp_path / "nanoragen/__init__.py").write_text("")
    monkeypatch.setattr(nanoragen, "__file__", str(tmp_path / "nanoragen/__init__.py"))
    RunRecord(tmp_path)
    assert provenance.commit() == "" and "commit" not in read(tmp_path)
    git("init", "-q")
    git("add", "nanoragen")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")
    assert provenance.commit() == git("rev-parse", "HEAD")
    (tmp_path / "nanoragen/__init__.py").write_text("changed")
    assert provenance.commit() == git("rev-parse", "HEAD") + "-dirty"


@pytest.mark.parametrize("text", ["", "[]", '{"started": 3, "duration": "long"}', "{", "[" * 100_000])
def test_a_damaged_record_is_written_anew(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    RunRecord(tmp_path, resumed=True)
    assert isinstance(read(tmp_path)["started"], str) and read(tmp_path)["duration"] < 60


def test_a_disk_error_costs_the_record_alone(tmp_path):
    (tmp_path / "run.json").mkdir()
    with pytest.warns(UserWarning, match="run.json cannot be written"):
        RunRecord(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]  # nothing beside it
    (tmp_path / "run.json").rmdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RunRecord(tmp_path)
