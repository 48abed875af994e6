"""The benchmarks start and say what they take; what they share measures what it should."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
import threading
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium
import pytest
import torch
from matplotlib.figure import Figure
from tests_support import policy_sample
from transformers import AutoModelForCausalLM

from roll_like.config.load import dump_config
from roll_like.config.run import RunConfig
from roll_like.types import TrainingSample

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "def main(" in path.read_text())
#: What scripts import from the folder.
MODULES = ("common", "mfu", "simulated", "slow_tools", "trainers", "virtual_loop")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Imports a file of `benchmarks/`, and forgets it afterwards: their names are common ones."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def import_fresh(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    yield import_fresh
    for name in [name for name in sys.modules if name.split(".")[0] in {*SCRIPTS, *MODULES}]:
        sys.modules.pop(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_says_what_it_measures_and_how_it_is_run(load, name: str) -> None:
    script = load(name)
    arguments = script.parser()
    assert f"python benchmarks/{name}.py" in script.__doc__
    assert script.__doc__.splitlines()[0] in arguments.format_help()
    arguments.parse_args([])
    with pytest.raises(SystemExit):
        arguments.parse_args(["--no-such-option"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_smoke_takes_smaller_sizes_of_options_that_exist(load, name: str) -> None:
    arguments = load(name).parser()
    usual = vars(arguments.parse_args([]))
    smoke = vars(arguments.parse_args(["--smoke"]))
    assert usual.keys() == smoke.keys()
    changed = {key for key in usual if usual[key] != smoke[key]}
    assert changed == {"smoke", *arguments.smoke}
    for key in arguments.smoke:
        fewer, all_of_them = smoke[key], usual[key]
        assert len(fewer) < len(all_of_them) if isinstance(fewer, list) else fewer < all_of_them, key


def test_an_option_goes_before_what_smoke_takes(load) -> None:
    assert load("algorithms").parser().parse_args(["--samples", "48", "--smoke"]).samples == 48


def test_every_benchmark_is_on_the_page_of_figures() -> None:
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text()
    assert set(SCRIPTS) <= set(re.findall(r"benchmarks/(\w+)\.py", page))


def test_the_table_of_seeds_names_the_k_of_pass_at_k(load, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = load("seeds")
    evaluations = [{"step": step, "eval/avg": 0.25, "eval/pass@4": passed} for step, passed in ((0, 0.5), (8, 0.75))]
    means = seeds.table("toy", [seeds.Run("1", [{"step": 8}], evaluations, 60.0)])
    assert means == {"toy before": 0.25, "toy after": 0.25}
    header, _, row, *_ = capsys.readouterr().out.strip().splitlines()[2:]
    assert header == "| seed | before | after | pass@4 before → after | steps | seconds |"
    assert row == "| 1 | 0.25 | 0.25 | 0.50 → 0.75 | 1 | 60 |"


@pytest.mark.parametrize(("values", "limits"), [((0, 1), (-0.02, 1.02)), ((-0.5, 0.5), None), ((0, 3), None)])
def test_a_panel_has_the_limits_of_shares_if_its_figures_may_be_shares(
    load, values: tuple[float, ...], limits: tuple[float, float] | None
) -> None:
    axis = Figure().subplots()
    axis.plot(values)
    load("seeds").style(axis, "toy")
    low, high = axis.get_ylim()
    assert (low, high) == limits if limits else (low < min(values) and high > max(values))


def test_schedules_are_compared_with_sync_and_drawn(
    load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    learning = load("async_learning")

    def run(seed: str, rewards: list[float], afterwards: float) -> object:
        steps = [{"step": step, "rollout/reward/mean": reward} for step, reward in enumerate(rewards, start=1)]
        return sys.modules["seeds"].Run(
            seed, steps, [{"step": 0, "eval/avg": 0}, {"step": 5, "eval/avg": afterwards}], 1.0
        )

    groups = {
        "any_sync": [run("0", [0.0, 0.1, 0.2, 0.5, 0.6], 0.6), run("1", [0.0, 0.1, 0.2, 0.7, 0.8], 0.8)],
        "any_async_2_1": [run("0", [0.1, 0.1, 0.1, 0.3, 0.4], 0.5), run("1", [0.1, 0.1, 0.1, 0.3, 0.5], 0.5)],
    }
    assert learning.compare(groups, "any") == pytest.approx({"any_sync": 0.0, "any_async_2_1": -0.2})
    # the last two of five steps; spreads of sqrt(0.02) and sqrt((0.02 + 0) / 2)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| sync", "| async"))]
    assert rows == ["| sync | 0.700 | +0.000 | 0.141 | 0.650 |", "| async_2_1 | 0.500 | -0.200 | 0.100 | 0.375 |"]
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    learning.draw(groups, ["any"], tmp_path / "curves.png")
    (panel,) = drawn[0].axes
    assert panel.get_title() == "any: rollout/reward/mean"
    assert [list(line.get_ydata()) for line in panel.get_lines()] == [
        pytest.approx([0.0, 0.1, 0.2, 0.6, 0.7]),
        pytest.approx([0.1, 0.1, 0.1, 0.3, 0.45]),
    ]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == [
        "sync: 0.70 ± 0.14 in the evaluation afterwards",
        "async_2_1: 0.50 ± 0.00 in the evaluation afterwards",
    ]


def test_kept_runs_are_of_the_same_configuration(load, tmp_path: Path) -> None:
    learning = load("async_learning")

    def wanted(*keys: str, schedule: str = "sync", steps: int = 1) -> RunConfig:
        found: RunConfig = learning.configured("rlvr_quickstart", schedule, 0, tmp_path, keys=keys, steps=steps)
        return found

    for schedule in ("sync", "control"):  # no file may hold the configuration of `control`
        folder = tmp_path / learning.run_name("rlvr_quickstart", schedule, 0)
        learning.refuse_other_configuration(folder, wanted(schedule=schedule))  # there is none yet
        folder.mkdir()
        dated = {"dtype": "float32", "date": date(2026, 1, 2)}  # measured, and written, on another machine and day
        begun = wanted("output_dir=/elsewhere", schedule=schedule)
        begun = begun.model_copy(update={"model": begun.model.model_copy(update=dated)})
        (folder / "config.yaml").write_text(dump_config(begun))
        learning.refuse_other_configuration(folder, wanted(schedule=schedule))
        with pytest.raises(SystemExit) as refused:
            learning.refuse_other_configuration(folder, wanted("rollout.temperature=0.7", schedule=schedule, steps=2))
        assert str(refused.value) == (
            f"{folder} holds a run of another configuration (steps 1, not 2; rollout.temperature 0.8, not 0.7): remove "
            "it, or give --folder another place"
        )


def test_calls_of_both_sides_take_equally_long(load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>'
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "What is 1 + 1?", "answer": "2"}))

    def waits(longest: float) -> list[float]:
        """Those of two episodes of each of two seeds, two calls each, in a process that has just begun."""
        slow_tools = load("slow_tools")
        seconds: list[float] = []
        monkeypatch.setattr(slow_tools.time, "sleep", seconds.append)
        path = str(tmp_path / "tasks.jsonl")
        env = slow_tools.SlowTools(path, median_seconds=0.3, sigma=1.5, longest_seconds=longest)
        for seed in (4, 4, 5, 5):
            env.reset(seed=seed)
            for action in (call, call, "<answer>2</answer>"):
                env.step(action)
        env.close()
        del gymnasium.registry["benchmarks/SlowTools-v0"]
        return seconds

    sync = waits(20.0)
    assert len(set(sync)) == 8
    assert waits(20.0) == sync
    assert waits(0.2) == [min(0.2, seconds) for seconds in sync]


def test_steps_an_hour_are_those_between_the_ends_of_steps(load, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts = load("async_rollouts")
    names = {**dict.fromkeys(rollouts.SHOWN, 0.0), "staleness/max": 2.0}
    steps = [{"time": time, **names} for time in (100.0, 112.0, 120.0)]
    assert rollouts.step_seconds(steps) == 10.0
    rollouts.table({"sync": [steps], "async": [steps]})
    assert capsys.readouterr().out.splitlines()[-1].startswith("| async | 360 | 10.0 |")


def test_sides_take_turns_and_the_median_counts(load, capsys: pytest.CaptureFixture[str]) -> None:
    common = load("common")
    order: list[str] = []
    times = {"a": iter([9.0, 1.0, 5.0, 2.0]), "b": iter([9.0, 4.0, 4.0, 8.0])}

    def side(name: str):
        def work() -> float:
            order.append(name)
            return next(times[name])

        return work

    medians = common.interleaved({"a": side("a"), "b": side("b")}, repetitions=3)
    assert medians == {"a": 2.0, "b": 4.0}
    assert "".join(order) == "abababab"
    assert capsys.readouterr().out.count("not counted") == 2


def test_fewer_than_three_repetitions_are_refused(load) -> None:
    arguments = argparse.ArgumentParser()
    load("common").add_common_arguments(arguments)
    assert arguments.parse_args(["--repetitions", "3"]).repetitions == 3
    with pytest.raises(SystemExit):
        arguments.parse_args(["--repetitions", "2"])


def test_the_last_line_is_one_json_object(load, capsys: pytest.CaptureFixture[str]) -> None:
    load("common").finish(argparse.Namespace(smoke=False), {"benchmark": "x", "ratio": 1.23456789})
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["benchmark"], figures["ratio"], figures["smoke"]) == ("x", 1.2346, False)
    assert figures["cores"] > 0


def test_both_sides_have_our_environment_unless_told_otherwise(load) -> None:
    common = load("common")
    assert common.environment_of(3, plain=True)["OMP_NUM_THREADS"] == "3"
    assert "GLIBC_TUNABLES" not in common.environment_of(3, plain=True)
    ours = common.environment_of(3, plain=False)
    assert (ours["OMP_NUM_THREADS"], "GLIBC_TUNABLES" in ours) == ("3", True)


PEER = """
import os, sys
sys.path.insert(0, {folder!r})
from common import serve

def answer(message):
    if message.get("die"):
        sys.exit(7)
    return [message["number"] * 2, sys.argv[4], os.environ["MINE"]]

serve(int(sys.argv[2]), int(sys.argv[3]), answer)
"""


def test_a_peer_answers_until_it_is_closed_and_says_when_it_dies(load, tmp_path: Path) -> None:
    common = load("common")
    script = tmp_path / "doubles.py"
    script.write_text(PEER.format(folder=str(FOLDER)))
    with common.Peer(script, ["argument"], {"MINE": "yes"}) as peer:
        assert peer.call(number=4) == [8, "argument", "yes"]
        assert peer.call(number=5)[0] == 10
    with (
        pytest.raises(RuntimeError, match="doubles ended with exit code 7"),
        common.Peer(script, ["argument"], {"MINE": "yes"}) as peer,
    ):
        peer.call(die=True)


def test_the_bare_loop_keeps_to_its_token_budget(load) -> None:
    samples = [policy_sample(prompt=prompt, response=4) for prompt in (30, 20, 9, 8, 2, 1)]
    batches = load("trainers.bare").cut(samples, 64)
    assert [len(batch) for batch in batches] == [1, 2, 3]
    assert [sample for batch in batches for sample in batch] == samples


def training_work(load, *arguments: str) -> tuple[ModuleType, argparse.Namespace, object]:
    options = load("training").parser().parse_args([*arguments, "--steps", "1"])
    return load("trainers.bare"), options, load("trainers.batches").work_of(options)


@pytest.mark.parametrize(("task", "rows"), [("sft", 4), ("dpo", 8)])
def test_the_bare_loop_learns_what_the_engine_learns(load, tiny_model: Path, task: str, rows: int) -> None:
    """Its first step's loss and gradient norm: SFT's mean over learned tokens, DPO's ln 2 against itself."""
    data = {"sft": "samples_per_step", "dpo": "pairs_per_step"}[task]
    overrides = [f"model.path={tiny_model}", "model.dtype=float32", f"data.{data}=4", "--threads", "1"]
    bare, _, work = training_work(load, "--task", task, *overrides)
    (batch,) = work.batches
    assert (len(batch), work.tokens) == (rows, sum(len(sample.token_ids) for sample in batch))
    loop = bare.bare_loop(task, work)
    losses = [sum(float(loop.loss(part).detach()) for part in loop.steps[0])]
    assert loop.turn() > 0
    losses.append(sum(float(loop.loss(part).detach()) for part in loop.steps[0]))
    expected = math.log(2)
    if task == "sft":
        trained = sum(int(sample.loss_mask.sum()) for sample in batch)
        expected = -sum(plain_logprob(tiny_model, sample) for sample in batch) / trained
    assert losses[0] == pytest.approx(expected, rel=1e-4)
    assert losses[1] < losses[0]


def plain_logprob(model_path: Path, sample: TrainingSample) -> float:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.from_numpy(sample.token_ids).long()
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return float(logprobs[torch.from_numpy(sample.loss_mask[1:])].sum())


def test_samples_of_a_step_go_to_the_peer_longest_first_and_pairs_stay_together(load) -> None:
    lengths = (3, 9, 5, 4, 12, 2)
    samples = [policy_sample(prompt=1, response=length) for length in lengths]
    by_length = load("trainers.trl_side").by_length
    assert [len(sample.token_ids) - 1 for sample in by_length(samples, 1)] == [12, 9, 5, 4, 3, 2]
    assert [len(sample.token_ids) - 1 for sample in by_length(samples, 2)] == [12, 2, 3, 9, 5, 4]


def test_a_peer_takes_a_turn_of_several_steps_and_says_how_long_it_took(load) -> None:
    turns = load("trainers.trl_side").Turns()
    callback = turns.callback(2)
    taken: list[int] = []

    def trainer() -> None:
        for step in range(4):
            callback.on_step_begin(None, SimpleNamespace(global_step=step), None)
            taken.append(step)
            callback.on_step_end(None, SimpleNamespace(global_step=step + 1), None)

    beside = threading.Thread(target=trainer, daemon=True)
    beside.start()
    assert taken == []
    assert turns.take() >= 0
    assert taken == [0, 1]
    assert turns.take() >= 0
    beside.join(timeout=60)
    assert taken == [0, 1, 2, 3]
