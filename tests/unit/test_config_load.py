from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Literal

import pytest
from config_files import MINIMAL, changed, write

from roll_like import LOSSES, Callback, LossInputs, PluginConfig, PolicyLoss, TokenLosses
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.config.load import dump_config, importing_plugins, load_config, notebook_plugins, register_sent
from roll_like.errors import ConfigError, PluginError
from roll_like.registry import CALLBACKS, REWARDS, TRAINING_BACKENDS
from roll_like.rewards.base import reward_class

pytestmark = pytest.mark.usefixtures("recording_pipeline")


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path / "base.yaml", MINIMAL)


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def load(path: Path, *overrides: str) -> RLVRConfig:
    config = load_config(path, overrides)
    assert isinstance(config, RLVRConfig)
    return config


def test_minimal_file_and_overrides_of_every_kind(minimal: Path) -> None:
    config = load(
        minimal,
        "steps=3",
        "training.optimizer.lr=1e-5",
        "data.sources.0.weight=2.5",
        "rollout.stop=[a, 'b c']",
        "seed=5\n...",
        "evaluation={sources: [{path: eval.jsonl}], every: 2}",
        "evaluation.before=false",
        "model.tokenizer=null",
        "resources.device_mapping.inference=1",
        "resources.device_mapping.training=0",
    )
    assert (config.steps, config.seed) == (3, 5)
    assert config.training.optimizer.lr == 1e-5
    assert config.data.sources[0].weight == 2.5
    assert config.rollout.stop == ("a", "b c")
    assert config.evaluation is not None
    assert (config.evaluation.every, config.evaluation.before) == (2, False)
    assert str(config.resources.device_mapping.inference) == "1"
    assert config.inference.type == "vllm"


def test_an_override_makes_a_section_that_is_not_written(minimal: Path) -> None:
    assert load(minimal, "checkpoint.keep=5").checkpoint.keep == 5


def test_the_later_override_wins(minimal: Path) -> None:
    assert load(minimal, "steps=3", "steps=4").steps == 4


def test_a_new_type_drops_the_settings_of_the_former_type(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", changed(inference={"type": "vllm", "kv_cache_gib": 3}))
    assert load(path, "inference.max_running=7", "inference.type=hf").inference.max_running == 7
    child = write(tmp_path / "child.yaml", "extends: c.yaml\ninference: {type: hf}\n")
    assert load(child).inference.type == "hf"
    same = write(tmp_path / "same.yaml", "extends: c.yaml\ninference: {type: vllm, replicas: 1}\n")
    engine = load(same).inference
    assert engine.type == "vllm"
    assert engine.kv_cache_gib == 3


def test_extends_is_relative_chained_and_merged(tmp_path: Path, minimal: Path) -> None:
    (tmp_path / "sub").mkdir()
    middle = "extends: ../base.yaml\nsteps: 20\nrollout: {temperature: 0.5}\n"
    write(tmp_path / "sub" / "middle.yaml", middle)
    extra = write(tmp_path / "extra.yaml", "seed: 7\n")
    top = write(
        tmp_path / "top.yaml", f"extends: [sub/middle.yaml, {extra.name}]\ndata: {{sources: [{{path: x.jsonl}}]}}"
    )
    config = load(top)
    assert (config.steps, config.seed) == (20, 7)
    assert (config.rollout.temperature, config.rollout.prompts_per_step) == (0.5, 8)
    assert config.data.sources[0].path == "x.jsonl"
    assert load(top, "data.sources[0].path=y.jsonl").data.sources[0].path == "y.jsonl"
    assert config.data.max_prompt_tokens == 64


def test_extends_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "extends: b.yaml\n")
    write(tmp_path / "b.yaml", "extends: a.yaml\n")
    message = refused(tmp_path / "a.yaml")
    assert "circle" in message
    assert "a.yaml → " in message
    assert "b.yaml → " in message


def test_extends_of_a_missing_file_names_both(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "extends: nowhere.yaml\n")
    message = refused(path)
    assert "nowhere.yaml" in message
    assert "a.yaml extends" in message


def test_extends_of_the_wrong_type(tmp_path: Path) -> None:
    assert "a.yaml:2" in refused(write(tmp_path / "a.yaml", "steps: 1\nextends: {a: b}\n"))


def test_interpolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_LIKE_TEST_NAME", "from-env")
    path = write(
        tmp_path / "c.yaml",
        changed(
            name="${oc.env:ROLL_LIKE_TEST_NAME}",
            rollout__max_in_flight="${rollout.samples_per_prompt}",
            data__sources=[{"path": "a.jsonl", "system_prompt": "cost \\${x}, ${steps}"}],
        ),
    )
    config = load(path, "rollout.samples_per_prompt=6")
    assert config.name == "from-env"
    assert config.rollout.max_in_flight == 6
    assert config.data.sources[0].system_prompt == "cost ${x}, 10"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${nope.key}", "Interpolation key 'nope.key' not found"),
        ("${oc.env:ROLL_LIKE_UNSET}", "Environment variable 'ROLL_LIKE_UNSET' not found"),
        ("???", "Missing mandatory value"),
        ("${steps", "no viable alternative"),
    ],
)
def test_interpolation_that_leads_nowhere(tmp_path: Path, text: str, expected: str) -> None:
    message = refused(write(tmp_path / "c.yaml", changed(name=text)))
    assert message.startswith("name cannot be resolved")
    assert expected in message


def test_interpolation_error_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "pipeline: rlvr\ndata:\n  sources:\n    - path: ${nope}\n")
    assert f"[{path}:4]" in refused(path)


def test_dump_round_trips(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.yaml",
        changed(
            data__sources=[{"path": "a.jsonl", "system_prompt": "write \\${x} – ümlaut: yes"}],
            rollout__stop=["\n", "\\${steps}", "null", "1"],
            algorithm={"kl": {"use": "loss"}, "advantage": "rloo"},
            reference={},
            training={"optimizer": {"lr": 1e-7}},
        ),
    )
    config = load(path)
    text = dump_config(config)
    assert load(write(tmp_path / "again.yaml", text)) == config
    assert "inference: 0-1" in text


def test_yaml_floats_without_a_dot_are_numbers(tmp_path: Path) -> None:
    text = Path(write(tmp_path / "c.yaml", MINIMAL)).read_text() + "training:\n  optimizer:\n    lr: 2e-5\n"
    assert load(write(tmp_path / "d.yaml", text)).training.optimizer.lr == 2e-5


def test_missing_file(tmp_path: Path) -> None:
    message = refused(tmp_path / "no.yaml")
    assert "no.yaml" in message
    assert "No such file" in message


def test_not_yaml_names_the_line(tmp_path: Path) -> None:
    message = refused(write(tmp_path / "c.yaml", "steps: 1\nmodel: [1, 2\ndata: x\n"))
    assert "c.yaml:2: not valid YAML: `[` is not closed" in message


def test_a_key_written_twice_is_refused(tmp_path: Path) -> None:
    message = refused(write(tmp_path / "c.yaml", "steps: 1\nsteps: 2\n"))
    assert "c.yaml:2" in message
    assert "duplicate key steps" in message


@pytest.mark.parametrize(("text", "found"), [("- a\n- b\n", "a list"), ("hello\n", "a single value")])
def test_not_a_mapping(tmp_path: Path, text: str, found: str) -> None:
    message = refused(write(tmp_path / "c.yaml", text))
    assert f"expected a mapping of sections, found {found}" in message


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00x")
    assert "not UTF-8" in refused(path)


def test_empty_file_says_which_pipelines_there_are(tmp_path: Path) -> None:
    message = refused(write(tmp_path / "c.yaml", ""))
    assert "pipeline: the key is missing, as all are: the file is empty" in message
    assert "known pipelines: agentic, distill, dpo, on_policy_distill, online_dpo, reward_model, rlvr, sft" in message


def test_unknown_pipeline(minimal: Path) -> None:
    with pytest.raises(PluginError, match="unknown pipeline 'rlv'; did you mean 'rlvr'"):
        load_config(minimal, ["pipeline=rlv"])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", "cannot read the override 'steps'; expected key=value"),
        ("=3", "expected key=value"),
        ("rollout.stop=[a", "is not valid YAML"),
        ("data.sources.4.path=x", "data.sources is a list of 1, numbered from 0"),
        ("data.sources.first.path=x", "data.sources is a list of 1"),
        ("data.sources.1=x", "data.sources is a list of 1"),
        ("steps.x=1", "reaches into steps, which is 10 and no section"),
    ],
)
def test_overrides_that_cannot_be_applied(minimal: Path, override: str, expected: str) -> None:
    assert expected in refused(minimal, override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.temprature=1", "rollout.temprature: unknown key; did you mean `rollout.temperature`?"),
        ("data.sources.0.paht=x", "data.sources.0.paht: unknown key; did you mean `data.sources.0.path`?"),
        ("lr=1e-5", "`lr` belongs to training.optimizer.lr"),
        ("training.temperature=1", "`temperature` belongs to rollout.temperature"),
        ("learning_rate=1", "here it is called `training.optimizer.lr`"),
        ("rollout.num_generations=1", "here it is called `rollout.samples_per_prompt`"),
        ("trainng.workers=2", "trainng: unknown key; did you mean `training`?"),
        ("inference.replica=2", "inference.replica: unknown key; did you mean `inference.replicas`?"),
        ("algorithm.loss={type: ppo, cliplow: 1}", "did you mean `algorithm.loss.clip_low`?"),
        ("rewards.use.0.wieght=2", "did you mean `rewards.use.0.weight`?"),
        ("model.qqq=1", "model.qqq: unknown key; known here: path, chat_template, dtype, tokenizer"),
        ("rewards.pools={a: {rewards: [ifeval], wrkers: 2}}", "did you mean `rewards.pools.a.workers`?"),
        (
            "rewards.pools={a: {rewards: [ifeval], x: 2}}",
            "rewards.pools.a.x: unknown key; known here: rewards, workers",
        ),
        ("domains={train: {rewards: [ifeval], difficulty: {of: mean, low: 0, hihg: 1}}}", "train.difficulty.high`?"),
        ("difficulty=1", "`difficulty` belongs to algorithm.mask.difficulty or domains.<name>.difficulty"),
    ],
)
def test_an_unknown_key_names_its_path_and_the_nearest(minimal: Path, override: str, expected: str) -> None:
    message = refused(minimal, override)
    assert expected in message
    assert f"[command line: {override}]" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=many", "steps: found 'many'; expected a whole number"),
        ("steps=0", "steps: found 0; expected a number greater than or equal to 1"),
        ("steps=true", "steps: found true; expected a whole number"),
        ("steps=2.5", "steps: found 2.5; expected a whole number"),
        ("training.optimizer.lr=small", "training.optimizer.lr: found 'small'; expected a number ["),
        ("data.shuffle=often", "data.shuffle: found 'often'; expected true or false ["),
        ("training.optimizer.lr=.inf", "expected a finite number"),
        ("training.optimizer.lr=.nan", "expected a finite number"),
        ("resources.device=gpu", "resources.device: found 'gpu'; expected 'cpu' or 'cuda'"),
        ("resources.device_mapping.training=3-1", "the device range '3-1' ends before it starts"),
        ("resources.device_mapping.training=a", 'expected a device range like "0-3" or "5", found \'a\''),
        ("model=x", "model: found 'x'; expected a section of `key: value` lines"),
        ("training.zero_stage=4", "training.zero_stage: found 4; expected 0, 1, 2 or 3"),
        ("inference={type: lmdeploy}", "unknown inference engine 'lmdeploy'; known: hf, sglang, vllm"),
        ("data.sources=[]", "data.sources: found []"),
        ("rewards.use=[{weight: 1}]", "expected a mapping with `type: <name of a reward>`"),
        ("rewards.use=[{type: ifevl}]", "unknown reward 'ifevl'; did you mean 'ifeval'?"),
        ("algorithm.advantage=grp", "unknown advantage estimator 'grp'; did you mean"),
        ("metrics.trackers=[mlfow]", "unknown metrics tracker 'mlfow'; did you mean 'mlflow'?"),
        ("name=a/b", "name: found 'a/b'"),
        ("model.path=null", "model.path: found nothing (null); expected text"),
    ],
)
def test_a_wrong_value_says_what_was_found_and_expected(minimal: Path, override: str, expected: str) -> None:
    assert expected in refused(minimal, override)


def test_missing_keys_say_what_they_mean(tmp_path: Path) -> None:
    message = refused(write(tmp_path / "c.yaml", changed(steps=None, model={})))
    assert "steps: missing, and there is no default (Steps to train)" in message
    assert "model.path: missing" in message


def test_every_problem_is_listed_with_its_file_and_line(tmp_path: Path, minimal: Path) -> None:
    child = write(
        tmp_path / "child.yaml",
        "extends: base.yaml\n"
        "rollout:\n"
        "  prompts_per_step: none\n"
        "data:\n"
        "  sources:\n"
        "    - path: a.jsonl\n"
        "    - wieght: 2\n",
    )
    lines = refused(child, "resources.nodes=0").splitlines()
    assert lines[0].startswith("3 problems in ")
    found = {line.split(". ", 1)[1].partition(":")[0]: line for line in lines[1:]}
    assert list(found) == [
        "data.sources.1.wieght",
        "rollout.prompts_per_step",
        "resources.nodes",
    ]
    assert f"[{child}:7]" in found["data.sources.1.wieght"]
    assert f"[{child}:3]" in found["rollout.prompts_per_step"]
    assert "[command line: resources.nodes=0]" in found["resources.nodes"]


def test_a_problem_in_the_extended_file_names_that_file(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", changed(rollout__temprature=1))
    child = write(tmp_path / "child.yaml", "extends: base.yaml\nsteps: 2\n")
    assert f"[{base}:" in refused(child)


# plugins


def test_import_registers_plugins_from_the_working_directory(
    tmp_path: Path, minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from roll_like import register_reward\n@register_reward('from_cwd')\ndef r(c):\n    return 1.0\n"
    write(tmp_path / "plugin_of_a_test.py", source)
    monkeypatch.chdir(tmp_path)
    try:
        config = load(minimal, "import=[plugin_of_a_test]", "rewards.use=[from_cwd]")
        assert config.rewards.use[0].type == "from_cwd"
        assert sys.path[-1] == str(tmp_path)
    finally:
        REWARDS._plugins.pop("from_cwd", None)
        sys.modules.pop("plugin_of_a_test", None)


@pytest.mark.parametrize("file", ["no_such_module.py", "./no_such_module.py"])
def test_import_of_a_file(minimal: Path, file: str) -> None:
    with pytest.raises(PluginError, match=r"expected the name of a module\n  fix: write import: \[no_such_module\]"):
        load_config(minimal, [f"import=[{file}]"])


def test_import_of_a_missing_module(minimal: Path) -> None:
    with pytest.raises(PluginError, match="names 'no_such_module', and there is no module 'no_such_module'"):
        load_config(minimal, ["import=[no_such_module]"])


def test_import_of_a_module_that_ends_the_process_or_says_much(
    tmp_path: Path, minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "exiting_plugin.py", "import sys\n\nsys.exit('no key')\n")
    write(tmp_path / "wordy_plugin.py", "raise OSError('line\\n' * 40)\n")
    write(tmp_path / "misspelt_plugin.py", "def f(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginError, match=r"SystemExit: no key \(.*exiting_plugin.py:3, `sys.exit"):
        load_config(minimal, ["import=[exiting_plugin]"])
    with pytest.raises(PluginError, match="… 33 lines are left out") as caught:
        load_config(minimal, ["import=[wordy_plugin]"])
    assert len(str(caught.value).splitlines()) <= 12
    with pytest.raises(PluginError, match=r"SyntaxError: invalid syntax \(misspelt_plugin.py, line 1\)\n"):
        load_config(minimal, ["import=[misspelt_plugin]"])


def test_import_of_a_module_that_raises(tmp_path: Path, minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "raising_plugin.py", "1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginError, match="fails while it is imported: ZeroDivisionError: division by zero"):
        load_config(minimal, ["import=[raising_plugin]"])


def test_import_of_the_wrong_type_is_a_problem_of_the_file(minimal: Path) -> None:
    assert "import: found 'plugin'" in refused(minimal, "import=plugin")


def test_built_ins_work_beside_a_folder_of_the_same_name(
    tmp_path: Path, minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "envs").mkdir()
    write(tmp_path / "envs" / "__init__.py", "raise RuntimeError('the wrong envs')")
    monkeypatch.chdir(tmp_path)
    assert load(minimal).rewards.use[0].type == "ifeval"


def test_overrides_that_the_shell_has_split(minimal: Path) -> None:
    lr = "training.optimizer.lr"
    for parts in (["steps=3", f"{lr}=", "1e-5"], [lr, "=1e-5"], [lr, "=", "1e-5", "steps=3"], [f"{lr} = 1e-5"]):
        assert f"without blanks around `=`\n  fix: write {lr}=1e-5" in refused(minimal, *parts), parts
    assert "fix: write for example steps=10" in refused(minimal, "steps")


def test_workers_import_what_a_program_registered(
    minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script imports a module with a reward itself: workers are other processes, and have to import it too."""
    (tmp_path / "rewards_of_a_script.py").write_text(
        "from roll_like import register_reward\n\n"
        "@register_reward('of_a_script')\ndef of_a_script(completion):\n    return 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("rewards_of_a_script")
    config = load(minimal, "rewards.use=[of_a_script, {type: format, tags: [think]}]")
    assert importing_plugins(config).import_ == ("rewards_of_a_script",)
    named = config.model_copy(update={"import_": ("json", "rewards_of_a_script")})
    assert importing_plugins(named) is named
    assert importing_plugins(load(minimal)).import_ == ()


@pytest.mark.parametrize("module", ["rewards", "envs.mine", "pipelines"])
def test_a_program_may_have_modules_called_as_the_folders_here(
    module: str, minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = reward_class(lambda completion: 0.0)
    mine.__module__ = module
    monkeypatch.setitem(REWARDS._plugins, "mine", mine)
    assert importing_plugins(load(minimal, "rewards.use=[mine]")).import_ == (module,)


def test_ranks_are_sent_nothing_of_a_notebook_that_they_do_not_use(
    minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watch(Callback):
        class Config(PluginConfig):
            type: Literal["watch"] = "watch"

        lock = threading.Lock()  # cannot be pickled

    mine = reward_class(lambda completion: 0.0)
    backend = type("Mine", (TRAINING_BACKENDS.get("fsdp2"),), {})
    Watch.__module__ = mine.__module__ = backend.__module__ = "__main__"
    monkeypatch.setitem(CALLBACKS._plugins, "watch", Watch)
    monkeypatch.setitem(REWARDS._plugins, "mine", mine)
    monkeypatch.setitem(TRAINING_BACKENDS._plugins, "of", backend)
    overrides = ("callbacks=[watch]", "rewards.use=[mine]")
    assert notebook_plugins(load(minimal, *overrides)) == ()
    sent = notebook_plugins(load(minimal, *overrides, "training.backend=of", "training.zero_stage=3"))
    assert sent == (("roll_like.training_backends", "of", backend),)


def test_plugins_of_a_notebook_are_sent_to_workers(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cell(PolicyLoss):
        class Config(PluginConfig):
            type: Literal["of_a_cell"] = "of_a_cell"

        def __call__(self, inputs: LossInputs) -> TokenLosses:
            return TokenLosses(-inputs.logprobs_N, {})

    Cell.__module__ = "__main__"
    monkeypatch.setitem(LOSSES._plugins, "of_a_cell", Cell)
    config = load(minimal, "algorithm.loss=of_a_cell")
    assert importing_plugins(config).import_ == ()
    sent = notebook_plugins(config)
    assert sent == (("roll_like.losses", "of_a_cell", Cell),)
    del LOSSES._plugins["of_a_cell"]  # as in another process
    register_sent(sent)
    assert LOSSES.get("of_a_cell") is Cell
    assert notebook_plugins(load(minimal)) == ()
