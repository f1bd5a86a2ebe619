"""The command line: quick, explained, and clear about mistakes."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from console.cli import app, main
from console.config.config import RunConfig, to_yaml
from console.run.run_commands import run_command
from console.serve.serve import ServiceKind, load_service_config
from penstock.config import ConfigError
from tests.helpers.console import ROOT, environment

HEAVY = ("torch", "vllm", "transformers", "grpc", "pydantic", "redis", "rich")


def names(group: typer.Typer, *prefix: str) -> list[tuple[str, ...]]:
    """Every command that is shown, as the words that call it."""
    shown = [command for command in group.registered_commands if not command.hidden]
    found = [(*prefix, command.name or getattr(command.callback, "__name__", "")) for command in shown]
    for sub in (each.typer_instance for each in group.registered_groups if each.typer_instance):
        word = sub.info.name
        found += names(sub, *prefix, *([word] if isinstance(word, str) else []))
    return found


@pytest.mark.parametrize("name", names(app), ids=" ".join)
def test_every_command_shows_an_example_of_itself(name: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*name, "--help"])
    assert result.exit_code == 0
    assert f"\n    penstock {' '.join(name)}" in result.output, result.output


def test_help_answers_at_once_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['penstock', '--help']\n"
        "from console.cli import main\n"
        "try: main()\n"
        f"except SystemExit: print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    before_s = _children_cpu_s()
    result = subprocess.run(
        (sys.executable, "-c", code), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    took_s = _children_cpu_s() - before_s
    assert result.stdout.splitlines()[-1] == "[]"
    # Half a second of CPU is what it takes alone; the limit leaves room for tests that run beside it.
    assert took_s < 2.0


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run",), "name a configuration file"),
        (("run", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("run", "--resume", "."), "not a run folder"),
        (("serve", "brokr"), "must be one of broker, generator, reward, trainer, scheduler"),
        (("serve", "broker", "redis_ulr=x"), "did you mean 'redis_url'?"),
        (("serve", "reward"), "run_id: required"),
        (("serve", "broker", "--log-level", "loud"), "must be one of debug, info, warning, error"),
        (("reward", "check", "nowhere"), "must be host:port"),
        (("reward", "serve", "no_such:f"), "no module 'no_such'"),
        (("status",), "holds no runs"),
        (("audit", "nothing"), "not a run folder"),
        (("logs", "."), "not a run folder"),
        (("report", "."), "not a run folder"),
        (("quickstart", "run.num_stps=3"), "did you mean 'num_steps'?"),
    ],
)
def test_a_mistake_is_reported_in_one_line_with_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("penstock: ") for line in lines)
    assert [line for line in lines if words in line] == lines[-1:]


def test_a_run_whose_folder_was_moved_is_not_begun_again_where_it_was(tmp_path: Path) -> None:
    elsewhere = "127.0.0.1:1"
    begun = RunConfig.model_validate(
        {
            "run": {"id": "r1", "dir": tmp_path / "runs"},
            "model": {"path": tmp_path},
            "data": {"train": tmp_path / "train.jsonl"},
            "endpoints": {"broker": elsewhere, "trainer": elsewhere},
        }
    )
    (moved := tmp_path / "moved").mkdir()
    (moved / "config.yaml").write_text(to_yaml(begun), encoding="utf-8")

    with pytest.raises(ConfigError, match=r"run\.dir: .*/runs/r1 does not exist; a run is resumed where it was begun"):
        run_command([], dry_run=False, resume=moved)
    assert not (tmp_path / "runs").exists()


def test_listen_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broker.yaml"
    path.write_text("listen: 127.0.0.1:1\nredis_url: redis://r:1/0\n")
    config = load_service_config(ServiceKind.BROKER, path, ["metrics_port=9100"], listen="127.0.0.1:2")
    assert (config.listen, config.redis_url, config.metrics_port) == ("127.0.0.1:2", "redis://r:1/0", 9100)
    with pytest.raises(ConfigError, match=r"broker\.yaml: metrics_port"):
        load_service_config(ServiceKind.BROKER, path, ["metrics_port=0"], listen=None)


def test_the_quick_starts_file_is_where_the_command_looks_for_it() -> None:
    from console.run.quick import CONFIG_FILE

    assert ROOT / "examples" / "quickstart.yaml" == CONFIG_FILE
    assert CONFIG_FILE.is_file()
