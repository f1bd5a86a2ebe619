"""What StartRun names is below the trainer's roots, or is refused by name: whatever it is, nothing else is touched."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.clock import SystemClock
from penstock.errors import InvalidFieldError
from penstock.v1 import trainer_pb2
from services.trainer.folders.allowed_roots import Roots
from services.trainer.publishing.publisher import WeightPublisher
from services.trainer.publishing.version_store import WeightStore
from services.trainer.service import read_spec

pytestmark = pytest.mark.slow

STRINGS_PER_EXAMPLE = 25
_SOURCE = "data.train.0."
FIELDS = ("run_id", "run.dir", "model.path", "data.train", "data.eval")


class Place:
    """A root with a model and data, and beside it what must be left alone; links lead from the one to the other."""

    def __init__(self, base: Path) -> None:
        self.root, self.outside = base / "root", base / "outside"
        for folder in (self.root, self.outside):
            for part in ("model", "runs", "runs/old"):
                (folder / part).mkdir(parents=True)
            (folder / "model" / "config.json").write_text("{}")
            (folder / "rows.jsonl").write_text("{}\n")
        (self.root / "link").symlink_to(self.outside)
        (self.root / "up").symlink_to("..")
        (self.root / "rows-link.jsonl").symlink_to(self.outside / "rows.jsonl")
        (self.root / "runs" / "linked").symlink_to(self.outside / "runs")
        (self.root / "circle").symlink_to("circle")
        (self.root / "runs" / "leaking").mkdir()
        (self.root / "runs" / "leaking" / "weights").symlink_to(self.outside)
        self.roots = Roots([self.root])

    def request(self, field: str = "", text: str = "") -> trainer_pb2.StartRunRequest:
        values: dict[str, object] = {
            "run_id": "r",
            "run.dir": str(self.root / "runs"),
            "model.path": str(self.root / "model"),
            "data.train": str(self.root / "rows.jsonl"),
            "data.eval": None,
        }
        if field.startswith(_SOURCE):
            key = field.removeprefix(_SOURCE)
            values["data.train"] = [{"name": "a", "path": str(self.root / "rows.jsonl"), key: text}]
        elif field:
            values[field] = text
        document: dict[str, dict[str, object]] = {"run": {}, "model": {}, "data": {}}
        for name, value in values.items():
            if name != "run_id":
                section, _, key = name.partition(".")
                document[section][key] = value
        return trainer_pb2.StartRunRequest(run_id=str(values["run_id"]), config_json=json.dumps(document), resume=True)

    def start(self, field: str = "", text: str = "") -> Path:
        """What StartRun does with paths; the run's folder."""
        spec = read_spec(self.request(field, text), self.roots)
        self.roots.make_run_dir(spec.run_dir)
        return spec.run_dir

    def try_to_start(self, field: str, text: str) -> Path | None:
        """As `start`; None where it is refused, in one line."""
        try:
            return self.start(field, text)
        except InvalidFieldError as error:
            if "\n" in str(error):
                raise
            return None

    def seen_outside(self) -> list[tuple[str, int]]:
        """Everything outside the root, with its times of change."""
        return sorted((str(path), path.stat().st_mtime_ns) for path in self.outside.rglob("*"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place").resolve())


class Watch:
    """Notes the paths that this thread opens, lists, makes or deletes; an audit hook cannot be taken away again."""

    EVENTS = frozenset(("open", "os.scandir", "os.listdir", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"))

    def __init__(self) -> None:
        self._paths: list[str] | None = None
        self._thread = 0
        sys.addaudithook(self._note)

    @contextmanager
    def noting(self) -> Iterator[list[str]]:
        paths: list[str] = []
        self._thread, self._paths = threading.get_ident(), paths
        try:
            yield paths
        finally:
            self._paths = None

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        paths = self._paths
        if paths is not None and event in self.EVENTS and threading.get_ident() == self._thread:
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike):
                paths.append(os.fsdecode(path))


WATCH = Watch()

KNOWN = ("link", "up", "circle", "runs", "linked", "old", "leaking", "weights", "model", "config.json", "rows.jsonl")
DOTS = ("..", ".", "", "...", "~", "%2e%2e", "..\\..", "proc", "self", "0")
ODD = ("\0", "a\0b", "\ud800", "x" * 300, "\u202e", "\n", "rows-link.jsonl", "outside", "root", "new", "etc", "passwd")
PARTS = st.one_of(st.sampled_from((*KNOWN, *DOTS, *ODD)), st.text(max_size=20))


@st.composite
def hostile_strings(draw: st.DrawFn) -> str:
    """Anything, most of it shaped like a path."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(st.text(max_size=80))
    start = draw(
        st.sampled_from(["", "/", "//", "{root}/", "{root}/../", "{outside}/", "{root}/link/", "~/", "file:///"])
    )
    return start + draw(st.sampled_from(["/", "//", "/./"])).join(draw(st.lists(PARTS, min_size=1, max_size=6)))


@pytest.mark.slow
@pytest.mark.parametrize("num_strings", [2_500, pytest.param(10_000, marks=pytest.mark.grid)])
def test_nothing_outside_the_roots_is_read_made_or_deleted(place: Place, num_strings: int) -> None:
    @settings(max_examples=num_strings // STRINGS_PER_EXAMPLE)
    @example([("run.dir", "{root}/../new/../root/model//..\\..")])
    @given(
        st.lists(
            st.tuples(st.sampled_from(FIELDS), hostile_strings()),
            min_size=STRINGS_PER_EXAMPLE,
            max_size=STRINGS_PER_EXAMPLE,
        )
    )
    def check(cases: list[tuple[str, str]]) -> None:
        assert_stays_inside(place, cases)

    check()


def assert_stays_inside(place: Place, cases: list[tuple[str, str]]) -> None:
    before = place.seen_outside()
    for field, pattern in cases:
        text = pattern.replace("{root}", str(place.root)).replace("{outside}", str(place.outside))
        if field == "run_id":
            # A protobuf string holds no half of a surrogate pair.
            text = text.encode("utf-8", "replace").decode()
        with WATCH.noting() as paths:
            run_dir = place.try_to_start(field, text)
        touched = [path for path in paths if not Path(path).resolve().is_relative_to(place.root)]
        assert not touched, f"{field} {text!r}: {touched}"
        if run_dir is not None:
            assert run_dir.resolve().is_relative_to(place.root), f"{field} {text!r}: {run_dir}"
    assert place.seen_outside() == before


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("run.dir", "{outside}/runs"),
        ("run.dir", "{root}/../outside/runs"),
        ("run.dir", "{root}/link/runs"),
        ("run.dir", "{root}/runs/linked"),
        ("run.dir", "{root}/circle"),
        ("run.dir", "/proc/self/cwd"),
        ("run.dir", "{root}/runs\0"),
        ("model.path", "{outside}/model"),
        ("model.path", "{root}/link/model"),
        ("data.train", "{outside}/rows.jsonl"),
        ("data.train", "{root}/rows-link.jsonl"),
        ("data.eval", "{root}/up/outside/rows.jsonl"),
        ("data.eval", "/etc/passwd"),
        ("data.train.0.path", "{root}/rows-link.jsonl"),
        ("data.train.0.eval", "/etc/passwd"),
    ],
)
def test_what_is_outside_is_refused_by_field_value_root_and_setting(place: Place, field: str, text: str) -> None:
    text = text.replace("{root}", str(place.root)).replace("{outside}", str(place.outside))
    with pytest.raises(InvalidFieldError) as caught:
        place.start(field, text)
    said = str(caught.value)
    assert said.startswith(f"{field}: "), said
    if "\0" not in text and "circle" not in text:
        assert all(part in said for part in (text, str(place.root), "allowed_roots")), said


def test_what_is_below_a_root_is_taken_also_over_links_and_dots_that_stay_there(place: Place) -> None:
    (place.root / "inner").symlink_to(place.root / "runs", target_is_directory=True)
    for text in ("runs", "runs/new/../other", "inner"):
        assert place.start("run.dir", str(place.root / text)).is_dir()
    assert place.start("data.eval", str(place.root / "model/../rows.jsonl"))


def test_a_root_may_be_a_file_and_a_relative_one_is_below_the_folder_of_the_start(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.root)
    roots = Roots([Path("runs"), Path("rows.jsonl")])
    monkeypatch.chdir(tmp_path)
    roots.require("data.train", place.root / "rows.jsonl")
    roots.require("run.dir", place.root / "runs" / "r")
    for elsewhere in (place.root / "rows.jsonl2", place.root / "runs2", place.root, tmp_path):
        with pytest.raises(InvalidFieldError):
            roots.require("run.dir", elsewhere)


def test_a_run_folder_that_holds_a_link_to_outside_is_refused(place: Place) -> None:
    with pytest.raises(InvalidFieldError, match="weights"):
        place.start("run_id", "leaking")


@pytest.mark.parametrize("run_id", [".", "..", "...", "." * 64, "", "a/b", "x" * 65, "a\n", "\u0661"])
def test_a_run_id_is_one_plain_name(place: Place, run_id: str) -> None:
    with pytest.raises(InvalidFieldError, match=r"^run_id: "):
        place.start("run_id", run_id)


def test_a_configuration_of_a_million_brackets_is_no_json(place: Place) -> None:
    request = trainer_pb2.StartRunRequest(run_id="r", config_json="[" * 1_000_000)
    with pytest.raises(InvalidFieldError, match="config_json: not valid JSON"):
        read_spec(request, place.roots)


def test_a_publisher_empties_its_own_folder_and_not_where_a_link_in_its_place_leads(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("years of work")
    directory = tmp_path / "weights"
    directory.symlink_to(elsewhere)

    WeightPublisher(
        store=WeightStore(), run_id="r", directory=directory, base_url="http://127.0.0.1:1", clock=SystemClock()
    ).open()

    assert not directory.is_symlink()
    assert list(directory.iterdir()) == []
    assert [path.name for path in elsewhere.iterdir()] == ["thesis.tex"]


def test_a_root_that_is_a_link_is_followed(place: Place) -> None:
    """A run whose folder, or its checkpoints, somebody put on a larger disk."""
    leaking = place.root / "runs" / "leaking"
    Roots([place.root, leaking / "weights"]).make_run_dir(leaking)
