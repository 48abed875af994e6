"""What the documentation says is so: links lead somewhere, commands parse, code runs, quoted messages exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from config_files import RecordingPipeline
from documented_keys import documented_keys

from roll_like import Completion, RunResult, cli, errors
from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.rlvr.pipeline import RLVRPipeline
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.config.keys import all_keys
from roll_like.config.load import load_config
from roll_like.registry import ADVANTAGES, INFERENCE_ENGINES, LOSSES, PIPELINES, REWARDS
from roll_like.types import StopReason

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
CODE = [
    file for folder in ("roll_like", "pipelines", "rewards", "envs") for file in sorted((ROOT / folder).rglob("*.py"))
]
CONFIGS = (RLVRConfig, AgenticConfig, SFTConfig, DPOConfig, DistillConfig, OnPolicyDistillConfig, RewardModelRunConfig)
SECTIONS = [
    name for config in CONFIGS for name, field in config.model_fields.items() if "Config" in str(field.annotation)
]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """The page's fenced blocks of a language; `""` is none."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [text for named, text in fences if named == language]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def commands(page: Path) -> Iterator[list[str]]:
    """Every command line of ours, in blocks of shell code and in code spans, as words."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += [span for span in re.findall(r"`([^`\n]+)`", prose(page)) if span.startswith(("roll-like ", "make "))]
    for line in lines:
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            if words and Path(words[0]).name in {"roll-like", "make", "python", "python3", "pytest"}:
                yield [Path(words[0]).name, *words[1:]]


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers is gone after the test."""
    for registry in (REWARDS, ADVANTAGES, LOSSES, INFERENCE_ENGINES, PIPELINES):
        registry.names()
        monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{target}: no such file"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), flags=re.M)
            assert anchor in map(slug, headings), f"{target}: no such heading"


@each_page
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for program, *arguments in commands(page):
        if program == "make":
            assert {word for word in arguments if not word.startswith("-")} <= targets, arguments
        if program in {"python", "python3"} and arguments[0].endswith(".py"):
            assert (ROOT / arguments[0]).is_file(), arguments
        if program == "pytest":
            assert all((ROOT / word).exists() for word in arguments if not word.startswith("-")), arguments
        if program == "roll-like":
            assert_parses(arguments, page)


def assert_parses(arguments: list[str], page: Path) -> None:
    line = (
        " ".join(arguments)
        .replace("[key=value …]", "a=b")
        .replace("[RUN]", "")
        .replace("[REPO]", "")
        .replace("KIND", "rlvr")
    )
    words = line.split()
    if len(words) == 1:  # a command that is only named
        assert re.search(rf"^    {words[0]}(?:  |$)", cli.build_parser().format_help(), flags=re.M)
        return
    parsed, further = cli.build_parser().parse_known_args(words)
    assert all("=" in word for word in further), further
    config = getattr(parsed, "config", None)
    if config is not None and config.name != "FILE":
        shown = any(block.startswith(f"# {config.name}, ") for block in blocks(page, "yaml"))
        written = (ROOT / "roll_like" / "starters" / "templates").glob(f"*/{config.name}")  # by `roll-like init`
        assert shown or (ROOT / config).is_file() or any(written), config


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "coming_from"], ids=lambda page: page.stem)
def test_configuration_keys_exist(page: Path) -> None:
    """Those of coming_from.md, beside those of other libraries: test_docs_coming_from.py."""
    paths = [path for config in CONFIGS for path in all_keys(config)]
    paths += [path for name in REWARDS.names() for path in all_keys(REWARDS.get(name).Config, None, ("rewards", "use"))]
    known = {".".join(part for part in path if isinstance(part, str)) for path in paths}
    known |= frozenset().union(*documented_keys().values())
    pattern = rf"`((?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_]+)*)(?::[^`]*|=[^`]*)?`"
    for key in re.findall(pattern, prose(page)):
        if not key.endswith((".jsonl", ".py", ".md")):
            assert key.removesuffix(".type") in known, f"{page.name} names the key {key}"


def test_make_help_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert phony is not None
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^  make ([a-z-]+) +\S", done.stdout, flags=re.M)) == set(phony[1].split())


def test_the_readme_shows_what_there_is_before_where_it_is() -> None:
    lines = (ROOT / "README.md").read_text().split("\n")
    assert lines.index("## Where things are") <= 120


def test_the_readme_lists_every_command_of_the_program() -> None:
    rows = re.findall(r"^\| (`roll-like .*?) \| ", (ROOT / "README.md").read_text(), flags=re.M)
    listed = {name for row in rows for name in re.findall(r"`roll-like ([a-z-]+)", row)}
    help_text = cli.build_parser().format_help()
    assert listed == set(re.findall(r"^    ([a-z-]+)(?:  |$)", help_text, flags=re.M))


def test_the_readme_maps_every_folder() -> None:
    (block,) = (block for block in blocks(ROOT / "README.md", "") if "run_pipeline.py" in block)
    top = [line.split("  ")[0].strip() for line in block.splitlines() if not line.startswith(" ")]
    inner = [line.strip().split("  ")[0] for line in block.splitlines() if line.startswith("  ")]
    named = [*top, *(f"roll_like/{name}" for line in inner for name in line.split())]
    assert [name for name in named if not (ROOT / name).exists()] == []
    made = {"runs", "build", "dist", "mlruns", "wandb", "vision_quickstart"}
    folders = {
        f"{path.name}/"
        for path in ROOT.iterdir()
        if path.is_dir() and path.name not in made and not re.search(r"^\.|^__|egg-info$|_data$", path.name)
    }
    assert folders <= set(top)
    ours = [path for path in (ROOT / "roll_like").iterdir() if path.name[0] not in "._" and path.suffix != ".typed"]
    wanted = {f"roll_like/{path.name}" + "/" * path.is_dir() for path in ours}
    assert wanted <= set(named)


@pytest.mark.usefixtures("own_registries", "recording_pipeline")
def test_the_readmes_reward_works_and_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (reward,) = (block for block in blocks(ROOT / "README.md", "python") if "register_reward" in block)
    assert len(reward.splitlines()) <= 10
    (tmp_path / "my_rewards.py").write_text(reward)
    monkeypatch.syspath_prepend(tmp_path)
    (command,) = (words for words in commands(ROOT / "README.md") if "import=[my_rewards]" in words)
    config = load_config(ROOT / command[3], command[4:])
    assert config.import_ == ("my_rewards",)
    (setting,) = config.rewards.use
    reward_class = REWARDS.get(setting.type)
    short, long = completion("A cat is a small animal."), completion("word " * 26)
    assert reward_class(setting).score([short, long]) == [1.0, 0.0]


def completion(text: str, **metadata: Any) -> Completion:
    return Completion(
        text=text, messages=(), answer=None, metadata=metadata, stop_reason=StopReason.STOP, response_tokens=8
    )


def test_the_readmes_python_builds_a_run_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    class Recorder(RecordingPipeline):
        @classmethod
        def launch(cls, config: RLVRConfig, resume: str | None = None) -> Any:
            super().launch(config, resume)
            figures = SimpleNamespace(figures={"reward_first": 0.5, "reward_last": 0.75})
            return RunResult(
                name="run",
                directory=Path("runs/run"),
                summary=figures,
                metrics=[{"rollout/reward/mean": 0.625}],
                evaluations=[],
                stopped=False,
            )

    monkeypatch.setattr(RLVRConfig, "pipeline_class", lambda self: Recorder)
    (snippet,) = (block for block in blocks(ROOT / "README.md", "python") if "RLVRConfig(" in block)
    RecordingPipeline.calls.clear()
    exec(snippet, {})
    [(command, config, resumed)] = RecordingPipeline.calls
    RecordingPipeline.calls.clear()
    assert (command, resumed) == ("launch", None)
    assert [finding for finding in RLVRPipeline.check(config).findings if finding.level != "note"] == []
    printed = capsys.readouterr().out
    assert printed.startswith("RunResult(run: 1 step, reward 0.5 → 0.75; runs/run) step\n1    0.625\n")


@pytest.mark.usefixtures("own_registries")
def test_the_plugins_of_the_contributing_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for number, block in enumerate(blocks(ROOT / "docs" / "contributing.md", "python")):
        (tmp_path / f"contributed_{number}.py").write_text(block)
        importlib.import_module(f"contributed_{number}")
    estimator = ADVANTAGES.get("best_of_group")
    of_group = estimator(estimator.Config()).of_group
    assert of_group(np.array([1.0, 0.0, 1.0])).tolist() == [1.0, 0.0, 1.0]
    assert of_group(np.array([1.0, 1.0])).tolist() == [0.0, 0.0]
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = SimpleNamespace(advantages_N=torch.tensor([2.0, -1.0]), logprobs_N=logprobs)
    loss = LOSSES.get("reinforce")
    assert loss(loss.Config())(inputs).losses_N.tolist() == [2.0, -2.0]
    (tmp_path / "hello.yaml").write_text("pipeline: hello\ngreeting: good day\n")
    assert cli.main(["run", "--config", str(tmp_path / "hello.yaml")]) == 0
    assert capsys.readouterr().out == "good day\n"
    assert cli.main(["run", "--config", str(tmp_path / "hello.yaml"), "--check"]) == 2
    assert "'hello' has no check of its own" in capsys.readouterr().err
    assert INFERENCE_ENGINES.get("parrot").Config(repeats=2).repeats == 2  # driven in test_inference_plugins.py


def test_the_architecture_page_shows_the_pipelines_own_loop() -> None:
    (shown,) = blocks(ROOT / "docs" / "architecture.md", "python")
    assert textwrap.indent(shown, " " * 8) in (ROOT / "roll_like" / "policy_gradient" / "pipeline.py").read_text(
        encoding="utf-8"
    )


def test_the_architecture_page_lists_the_layers() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Layers")[2].split("\n\n")[1]
    contract = re.search(r'type = "layers"\n.*?\nlayers = \[(.*?)\]', (ROOT / "pyproject.toml").read_text(), flags=re.S)
    assert contract is not None
    wanted = [sorted(re.findall(r"\w+", line.replace("roll_like.", ""))) for line in contract[1].strip().splitlines()]
    assert [sorted(re.findall(r"\w+", line.replace("roll_like.", ""))) for line in text.splitlines()] == wanted


def messages() -> list[str]:
    """Every text in the code, `…` for what is filled in."""
    found = [(ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")]
    for file in CODE:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_what_could_go_wrong_on_gpus_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    table = page.partition("## What could go wrong")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| what would")]
    assert len(rows) > 20
    for row in rows:
        _, _, prevented, tests, _ = row.split("|")
        assert re.search(r"(unit|integration)/test_\w+\.py", tests), row
        for folder, text in (("roll_like", prevented), ("tests", tests)):
            for file in re.findall(r"`([\w/]+\.py)`", text):
                assert (ROOT / folder / file).is_file(), file


def test_quoted_messages_are_the_codes_own() -> None:
    texts = messages()
    rows = re.findall(r"^\| (.+?) \| ", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), flags=re.M)
    quotes = [span for row in rows for span in re.findall(r"``\s(.+?)\s``|`([^`]+)`", row)]
    assert len(quotes) > 50
    for quote in (double or single for double, single in quotes):
        for part in filter(None, (part.strip(" ,;:'") for part in quote.split("…"))):
            assert any(part in text for text in texts), f"no message says {part!r}"


def test_every_error_that_is_raised_is_explained() -> None:
    raised = set(re.findall(r"raise (\w+Error)\(", "\n".join(file.read_text(encoding="utf-8") for file in CODE)))
    ours = {
        name
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.RollLikeError) and value is not errors.RollLikeError
    }
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), flags=re.M)
    explained = {word for heading in headings for word in re.findall(r"\w+Error", heading)}
    assert explained >= raised & ours
    assert explained <= ours


def test_the_example_rewards_judge_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from examples.custom_reward.my_rewards import UsesWord, UsesWordConfig, brief

    assert brief(completion("Rain falls out of clouds.")) == 1.0
    assert brief(completion("Rain.")) == 0.0
    uses_word = UsesWord(UsesWordConfig(copies=0.25))
    group = [completion(text, word="cloud") for text in ("A cloud.", "Clouds rain.", "a  CLOUD.", "It is wet.")]
    assert [result.value for result in uses_word.score(group)] == [1.0, 1.0, 0.25, 0.0]
    assert [result.details["copied"] for result in uses_word.score(group)] == [0.0, 0.0, 1.0, 0.0]
