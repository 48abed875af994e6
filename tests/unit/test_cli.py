from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
from config_files import MINIMAL, RecordingPipeline, changed, write
from pydantic import ValidationError

from roll_like import cli, errors
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.cluster import WorkerDied
from roll_like.config.base import PipelineConfig
from roll_like.inference.interface import EngineDied
from roll_like.registry import ADVANTAGES

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "mlflow", "matplotlib")


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    return str(write(tmp_path / "minimal.yaml", MINIMAL))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from roll_like.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
    for command in ("run", "eval", "export", "schema", "plugins", "exit codes"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("cli.main(['run', '--config', {minimal!r}, '--print-config'])", HEAVY),
        ("import roll_like.run.folder", HEAVY),  # the first line of a run
        ("import roll_like.builtin.pipelines.rlvr.pipeline", ("aiohttp", "pandas", "gymnasium", *HEAVY[2:])),  # --check
    ],
)
def test_what_comes_before_a_run_imports_little(statement: str, unwanted: tuple[str, ...], minimal: str) -> None:
    code = (
        f"import sys; from roll_like import cli; {statement.format(minimal=minimal)}\n"
        f"print('UNWANTED', [name for name in {unwanted!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "UNWANTED []" in done.stdout


def test_a_check_runs_without_the_garbage_collector(
    minimal: str, recording_pipeline: type[RecordingPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, at_exit = [], []
    monkeypatch.setattr("atexit.register", at_exit.append)

    def look(_: PipelineConfig) -> None:
        seen.append(gc.isenabled())
        raise errors.ConfigError("looked")

    monkeypatch.setattr(recording_pipeline, "check", look)
    assert cli.main(["run", "--config", minimal, "--check"]) == 2
    assert (seen, gc.isenabled()) == ([False], True)
    assert gc.freeze in at_exit  # nor at the end of the process


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--steps", "5"], "steps=5"),
        (["--steps=5", "seed=3"], "steps=5"),
        (["seed=3", "--steps", "-5"], "steps=-5"),
        (["--training.optimizer.lr", "1e-5", "--learning-rate=1"], "training.optimizer.lr=1e-5 learning_rate=1"),
        (["--set", "steps=5"], "steps=5"),
        (["--name=a=b"], "name=a=b"),
        (["--fast"], None),
        (["--fast", "--check"], None),
    ],
)
def test_a_key_that_is_written_as_an_option(
    arguments: list[str], meant: str | None, minimal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--config", minimal, *arguments])
    assert caught.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.partition("; ")[2] == (f"keys are set without dashes: {meant}" if meant else "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ui", "--port", "99999"], "--port: expected a whole number from 1 to 65535, found '99999'"),
        (["serve", "x", "--port", "-1"], "--port: expected a whole number from 1 to 65535, found '-1'"),
        (["chat", "x", "--max-tokens", "0"], "--max-tokens: expected a whole number of 1 or more, found '0'"),
        (["chat", "x", "--temperature", "-1"], "--temperature: expected a number from 0 to 100, found '-1'"),
    ],
)
def test_numbers_of_options_have_bounds(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert expected in capsys.readouterr().err


def test_run_pipeline_is_the_run_command() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_pipeline.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "run [-h]" in done.stdout
    assert "--resume [RUN]" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "resume"),
    [
        (["steps=3", "seed=5"], None),
        (["--resume", "--", "steps=3", "seed=5"], ""),
        (["steps=3", "--resume", "earlier", "seed=5"], "earlier"),
        (["--resume", "steps=3", "seed=5"], ""),
        (["steps=3", "seed=5", "--resume"], ""),
        (["--debug", "steps=3", "--resume=earlier", "seed=5"], "earlier"),
    ],
)
def test_run_takes_overrides_anywhere(
    minimal: str,
    recording_pipeline: type[RecordingPipeline],
    arguments: list[str],
    resume: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(minimal).parent)
    earlier = Path("runs/earlier/config.yaml")
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    assert cli.main(["run", "--config", minimal, *arguments]) == 0
    [(command, config, resumed)] = recording_pipeline.calls
    assert (command, config.steps, config.seed, resumed) == ("launch", 3, 5, resume)


def test_eval_passes_the_model(
    minimal: str, recording_pipeline: type[RecordingPipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "--config", minimal, "--model", "some/dir", "seed=5"]) == 0
    [(command, config, model)] = recording_pipeline.calls
    assert (command, config.seed, model) == ("evaluate", 5, "some/dir")
    assert capsys.readouterr().out.splitlines()[-1] == '{"eval/avg": 0.5}'


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["walk"],
        ["run", "--config", "x.yaml", "--chekc"],
        ["run", "--config", "x.yaml", "steps=1", "--check", "word"],
        ["plugins", "a=b"],
        ["eval", "--config", "x.yaml"],
    ],
)
def test_wrong_command_lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "meant"), [(["own.yaml"], "own.yaml"), (["steps=1"], "FILE"), ([], "FILE")])
def test_a_file_without_its_option(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", *words, "--check"])
    assert f"a file is missing: write --config {meant}\n" in capsys.readouterr().err


def test_a_word_that_is_no_override_is_explained(
    minimal: str, recording_pipeline: type[RecordingPipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--config", minimal, "steps"]) == 2
    assert "error: cannot read the override 'steps'; expected key=value" in capsys.readouterr().err
    assert recording_pipeline.calls == []


def test_a_wrong_configuration_exits_2_without_traceback(
    tmp_path: Path, recording_pipeline: type[RecordingPipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "c.yaml", changed(rollout__temprature=1))
    assert cli.main(["run", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert "did you mean `rollout.temperature`?" in err
    assert "Traceback" not in err
    assert cli.main(["run", "--config", str(path), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert recording_pipeline.calls == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ResourceError("too few cores", fix="take fewer"), 1),
        (errors.DataError("a.jsonl:3: no field"), 1),
        (errors.ConfigError("no such key"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_of_a_run_become_exit_codes(
    minimal: str,
    recording_pipeline: type[RecordingPipeline],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(recording_pipeline, "launch", fail)
    assert cli.main(["run", "--config", minimal]) == code
    err = capsys.readouterr().err
    assert (f"error: {error}" if code != 130 else "interrupted") in err
    assert "Traceback" not in err


def test_errors_that_nobody_expected_keep_their_traceback(
    minimal: str, recording_pipeline: type[RecordingPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_pipeline, "launch", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "--config", minimal])


def test_schema_goes_to_a_file_or_to_the_terminal(
    tmp_path: Path, recording_pipeline: type[RecordingPipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["properties"]["pipeline"]["const"] == "rlvr"
    target = tmp_path / "new" / "rlvr.json"
    assert cli.main(["schema", "--pipeline", "rlvr", "-o", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == printed


def test_schema_of_an_unknown_pipeline(
    recording_pipeline: type[RecordingPipeline], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["schema", "--pipeline", "rlvrr"]) == 2
    assert "unknown pipeline 'rlvrr'; did you mean 'rlvr'" in capsys.readouterr().err


def test_plugins_are_listed_with_their_origin(
    recording_pipeline: type[RecordingPipeline],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["plugins"]) == 0
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["reward", "ifeval", "roll_like.builtin.rewards.ifeval.IFEval"] in lines
    assert ["pipeline", "rlvr", "roll_like.builtin.pipelines.rlvr.config.RLVRConfig"] in lines
    assert any(line[:3] == ["policy", "loss", "ppo"] for line in lines)


def test_a_broken_plugin_package_does_not_hide_the_others(
    recording_pipeline: type[RecordingPipeline],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ADVANTAGES, "_loaded", False)
    monkeypatch.setattr(ADVANTAGES, "_broken", None)
    monkeypatch.setattr(ADVANTAGES, "_builtins", ())

    class Broken:
        name, value = "mine", "broken_package.plugins"

        def load(self) -> None:
            raise ImportError("No module named 'broken_package'")

    monkeypatch.setattr("roll_like.registry.entry_points", lambda group: [Broken()])
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["plugins"]) == 1
    captured = capsys.readouterr()
    assert "'mine' of group 'roll_like.advantages' cannot be imported: No module named 'broken_package'" in captured.err
    assert "roll_like.builtin.rewards.ifeval.IFEval" in captured.out


def test_check_env_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-env", "roll_like/FrozenLake-v0", "size=3"]) == 0
    assert "0 errors" in capsys.readouterr().out
    assert cli.main(["check-env", "roll_like/FrozenLak-v0"]) == 1
    assert "roll_like/FrozenLake-v0" in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["env", "env_id", "policy", "seeds"])
def test_options_of_an_environment_are_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-env", "roll_like/FrozenLake-v0", f"{name}=3"]) == 1
    assert f"environment 'roll_like/FrozenLake-v0' has no option '{name}'; " in capsys.readouterr().err


@pytest.mark.parametrize("name", [".", "..", ".hidden", "a/b", ""])
def test_the_folder_of_a_run_is_one_below_the_folder_of_runs(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        RLVRConfig.from_values(changed(MINIMAL, name=name))


class BrokenEnv(gymnasium.Env[str, str]):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no such file")


def test_environments_that_cannot_be_made_get_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        gymnasium.registry, "broken/Env-v0", gymnasium.envs.registration.EnvSpec("broken/Env-v0", BrokenEnv)
    )
    assert cli.main(["check-env", "broken/Env-v0"]) != 0
    assert "environment 'broken/Env-v0' cannot be made: RuntimeError: no such file" in capsys.readouterr().err
    assert cli.main(["check-env", "roll_like/FrozenLake-v0", "size=["]) == 2
    assert "error: size: '[' is no YAML value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--restart", "0"], "--restart 0: expected how often the run may be started again, 1 or more"),
        (["--restart", "2", "--resume"], "--restart continues the latest run of this configuration by itself"),
        (["--restart", "2", "--resume", "earlier"], "leave --resume out"),
        (["--restart", "2", "--check"], "--check starts nothing, so there is nothing to restart"),
        (["--restart", "often"], "invalid int value: 'often'"),
    ],
)
def test_contradicting_flags_are_refused(
    minimal: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--config", minimal, *arguments])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def run_folder(directory: Path, status: str, total_steps: int) -> None:
    directory.mkdir(parents=True)
    (directory / "config.yaml").touch()
    (directory / "run.json").write_text(json.dumps({"total_steps": total_steps}))
    (directory / "events.jsonl").write_text(json.dumps({"kind": "end", "status": status}) + "\n")


@pytest.mark.parametrize(
    ("status", "total_steps", "expected"),
    [
        ("finished", 100, "is finished; nothing is left"),
        ("finished", 99, ""),
        ("failed", 100, ""),
        ("stopped", 100, ""),
    ],
)
def test_resume_auto_continues_what_is_not_finished(
    tmp_path: Path,
    recording_pipeline: type[RecordingPipeline],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    total_steps: int,
    expected: str,
) -> None:
    run_folder(tmp_path / "runs" / "mine", status, total_steps)
    file = write(tmp_path / "run.yaml", changed(name="mine", steps=100, output_dir=str(tmp_path / "runs")))
    launched: list[str | None] = []
    result = SimpleNamespace(stopped=False)
    monkeypatch.setattr(
        recording_pipeline, "launch", classmethod(lambda cls, config, resume: launched.append(resume) or result)
    )
    assert cli.main(["run", "--config", str(file), "--resume", "auto"]) == 0
    assert launched == ([] if expected else ["auto"])
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(("resume", "code"), [(["--resume", "auto"], 75), (["--resume"], 0), ([], 0)])
def test_a_run_that_a_signal_stopped_is_unfinished_to_a_scheduler(
    minimal: str,
    recording_pipeline: type[RecordingPipeline],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    resume: list[str],
    code: int,
) -> None:
    result = SimpleNamespace(stopped=True)
    monkeypatch.setattr(recording_pipeline, "launch", classmethod(lambda cls, config, resume: result))
    assert cli.main(["run", "--config", minimal, f"output_dir={tmp_path}", *resume]) == code


@pytest.mark.parametrize("option", [["--rest", "3"], ["--res", "auto"], ["--che"]])
def test_options_cannot_be_abbreviated(minimal: str, capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--config", minimal, *option])
    assert caught.value.code == 2
    assert f"unrecognised arguments: {option[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize(("resume", "code"), [(["--resume", "auto"], 75), ([], 0)])
def test_a_signal_before_a_run_has_started_is_one_to_stop(
    minimal: str,
    recording_pipeline: type[RecordingPipeline],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    resume: list[str],
    code: int,
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(
        recording_pipeline, "launch", classmethod(lambda cls, config, resume: signal.raise_signal(number))
    )
    assert cli.main(["run", "--config", minimal, f"output_dir={tmp_path}", *resume]) == code
    assert f"stopped by {number.name} before the run had started; the same command" in capsys.readouterr().err
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("error", "changes", "code"),
    [
        (WorkerDied("gone"), [], 75),
        (EngineDied("gone"), [], 75),
        (errors.WorkerError("a bug"), [], 1),
        (errors.CheckpointError("damaged"), [], 1),
        (errors.ResourceError("too few"), [], 1),
        (errors.ResourceError("too few"), ["resources.address=auto"], 75),
        (errors.ConfigError("wrong"), [], 2),
    ],
)
def test_an_exit_code_says_whether_to_try_again(
    minimal: str,
    recording_pipeline: type[RecordingPipeline],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    changes: list[str],
    code: int,
) -> None:
    def launch(cls: type, config: Any, resume: str) -> None:
        raise error

    monkeypatch.setattr(recording_pipeline, "launch", classmethod(launch))
    arguments = ["run", "--config", minimal, f"output_dir={tmp_path}", *changes, "--resume", "auto"]
    assert cli.main(arguments) == code


@pytest.mark.parametrize("option", [["--restart", "2"], ["--resume", "auto"]])
def test_restarts_need_a_run_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    monkeypatch.setattr(cli, "_load", lambda arguments: PipelineConfig(pipeline="mine"))
    assert cli.main(["run", "--config", "x.yaml", *option]) == errors.WRONG_CONFIG
    assert "is no RunConfig" in capsys.readouterr().err


def test_a_shell_that_completes_a_line_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def autocomplete(parser: Any) -> None:
        asked.append(parser.format_help())
        raise SystemExit(0)

    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setitem(sys.modules, "argcomplete", SimpleNamespace(autocomplete=autocomplete))
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert (end.value.code, len(asked)) == (0, 1)
    monkeypatch.setitem(sys.modules, "argcomplete", None)  # not installed
    with pytest.raises(SystemExit) as end:
        cli.main(["plugins"])
    assert end.value.code == 1
