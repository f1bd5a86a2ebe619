"""What `penstock status` says of a run."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from rich.console import Console

from console.config.run_folder import RunFolder
from console.inspect.find_run import Target
from console.inspect.status import Picture, as_document, render
from penstock.v1 import broker_pb2


def picture_of(run: broker_pb2.GetRunResponse) -> Picture:
    return Picture(
        target=Target(run_id="r", broker="b:1", folder=None, trainer=None),
        now_s=0.0,
        run=run,
        problem="",
        problem_for_s=0.0,
        processes=(),
    )


def lines_of(picture: Picture) -> list[str]:
    with StringIO() as out:
        Console(file=out, width=200).print(render(picture))
        return [line.strip() for line in out.getvalue().splitlines()]


def test_a_broker_that_falls_behind_is_named_with_what_it_asks_for() -> None:
    line = "the broker is busy: generators send tokens every 0.7 s, in larger chunks"
    busy = picture_of(broker_pb2.GetRunResponse(run_id="r", flush_interval=Duration(nanos=675_000_000)))
    assert line in lines_of(busy)
    assert as_document(busy)["flush_interval_s"] == 0.675
    line = "the broker is busy: generators send heartbeats every 4.5 s, and report free slots later"
    busy = picture_of(broker_pb2.GetRunResponse(run_id="r", heartbeat_interval=Duration(seconds=9)))
    assert line in lines_of(busy)
    assert as_document(busy)["heartbeat_interval_s"] == 4.5
    calm = picture_of(broker_pb2.GetRunResponse(run_id="r"))
    assert not any("busy" in shown for shown in lines_of(calm))
    assert as_document(calm)["flush_interval_s"] is as_document(calm)["heartbeat_interval_s"] is None


def test_where_metrics_are_served_is_shown_with_the_file_that_tells_prometheus(tmp_path: Path) -> None:
    served = {"broker": "127.0.0.1:1", "trainer": "h:2"}
    run = replace(picture_of(broker_pb2.GetRunResponse(run_id="r")), metrics=served)
    here = replace(run, target=Target(run_id="r", broker="b:1", folder=RunFolder(tmp_path / "r")))
    file = tmp_path / "r.prometheus.json"
    assert f"metrics for Prometheus ({file}): broker 127.0.0.1:1, trainer h:2" in " ".join(lines_of(here))
    assert as_document(here)["metrics"] == served
    assert not any("metrics" in line for line in lines_of(replace(here, metrics={})))


def test_a_generator_that_drained_and_is_gone_is_not_shown() -> None:
    def view(name: str, *, has_left: bool) -> broker_pb2.GeneratorView:
        hello, beat = broker_pb2.GeneratorHello(generator_id=name), broker_pb2.GeneratorBeat(is_draining=True)
        return broker_pb2.GeneratorView(hello=hello, beat=beat, has_left=has_left)

    gone = view("gone", has_left=True)
    both = picture_of(broker_pb2.GetRunResponse(run_id="r", generators=[gone, view("going", has_left=False)]))
    assert [line.split()[:2] for line in lines_of(both) if "(drains)" in line] == [["going", "(drains)"]]
    assert len(as_document(both)["generators"]) == 1
    assert "generators: none connected" in lines_of(picture_of(broker_pb2.GetRunResponse(generators=[gone])))
