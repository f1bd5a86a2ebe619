"""Users' mistakes with files and values: one line that says what to do, and status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.console import ROOT, document, penstock_in_process, write_document

PROBLEM = str(ROOT / "examples" / "two_sites.yaml")
LONG = "a" * 300
MISTAKES = [
    (("run", "nested.yaml"), "nested.yaml: not valid YAML: nested too deeply"),
    (("run", "date.yaml"), "date.yaml: not valid YAML: month must be in 1..12; quote what is text"),
    (("run", "digits.yaml"), "digits.yaml: not valid YAML: Exceeds the limit"),
    (("run", "binary.yaml"), "binary.yaml: cannot be read: 'utf-8' codec"),
    (("run", "."), ".: cannot be read: Is a directory; name a file"),
    (("run", "config.yaml", "run.id=2026-13-01"), "override 'run.id=2026-13-01': not valid YAML: month"),
    (("run", "config.yaml", f"data.train={LONG}"), "cannot be read: File name too long; give a JSONL or parquet file"),
    (("run", "config.yaml", f"model.path={LONG}"), "no such directory"),
    *((words, "File name too long; name a run folder") for words in (("report", LONG), ("logs", LONG), ("stop", LONG))),
    *(((word, LONG), "not a run folder") for word in ("status", "audit")),
    (("view", LONG), "no such folder; name a run's folder"),
    (("plan", PROBLEM, "--picture", "none/plan.svg"), "--picture: none/plan.svg: no file of an existing folder"),
    (("plan", PROBLEM, "--picture", "."), "--picture: .: no file of an existing folder"),
    (("simulate", PROBLEM, "--picture", "none/run.svg"), "--picture: none/run.svg: no file of an existing folder"),
    (
        ("plan", PROBLEM, "--budget-s", "0.1", "--deploy", "config.yaml/out"),
        "--deploy: config.yaml/out: Not a directory; name a folder that can be made",
    ),
    (("merge", "none", "--out", "merged"), "CHECKPOINT: none: no such folder"),
    (("merge", ".", "--out", "config.yaml"), "--out: config.yaml: exists already; name a new folder"),
    (("rescore", "empty.jsonl", "--reward", "exact_match", "--out", "new.jsonl"), "empty.jsonl: holds no samples"),
    (("openai", "key", "--run", "", "--session", "s"), "--run '': is no run's id"),
    (("quickstart", "--dir", "config.yaml", "--prepare-only"), "config.yaml: Not a directory; name a folder"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    write_document(made, document(made))
    (made / "nested.yaml").write_text("[" * 3000)
    (made / "date.yaml").write_text("run: {id: 2026-13-01}\n")
    (made / "digits.yaml").write_text(f"run: {{num_steps: {'9' * 5000}}}\n")
    (made / "binary.yaml").write_bytes(bytes(range(256)))
    (made / "empty.jsonl").touch()
    return made


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_a_mistake_is_told_in_one_line_with_its_fix(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    monkeypatch.setenv("PENSTOCK_OPENAI_SECRET", "secret" * 10)
    result = penstock_in_process(*words, cwd=folder)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("penstock: ")
    assert told in line
    assert "[Errno" not in line
    assert not (folder / "new.jsonl").exists()
