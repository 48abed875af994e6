from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest
from config_files import MINIMAL, changed
from documented_keys import documented_keys
from loose_modules import SCRIPTS, load_module
from pydantic import Field

from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.online_dpo.config import OnlineDPOConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting
from roll_like.config.keys import all_keys, meaning_of, section_at
from roll_like.config.other_names import other_names, translated
from roll_like.config.schema import json_schema, write_json
from roll_like.config.teachers import TeacherConfig
from roll_like.registry import PIPELINES, Registry

ROOT = Path(__file__).resolve().parents[2]

markdown = load_module(SCRIPTS / "config_tables.py").markdown


class Node(ConfigModel):
    size: int = Field(default=1, description="Its size.")
    child: Node | None = Field(default=None, description="What is below.")


class TreeConfig(PluginConfig):
    root: Node = Field(default_factory=Node, description="Where it begins.")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema(RLVRConfig)


def errors(schema: dict[str, Any], values: dict[str, Any]) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(values)]


def test_it_is_a_valid_schema(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(write_json(schema)) == schema


@pytest.mark.parametrize(
    "values",
    [
        MINIMAL,
        changed(inference={"replicas": 2}),
        changed(inference={"type": "hf"}),
        changed(algorithm={"advantage": "grpo"}),
        changed(algorithm={"advantage": {"type": "somebody_elses", "anything": 1}}),
        changed(extends="other.yaml"),
        changed(extends=["a.yaml", "b.yaml"]),
        changed(resources__device_mapping={"training": 0, "inference": "1-2"}),
        RLVRConfig.model_validate(MINIMAL).model_dump(mode="json", by_alias=True),
    ],
)
def test_what_is_right_passes(schema: dict[str, Any], values: dict[str, Any]) -> None:
    assert errors(schema, values) == []


@pytest.mark.parametrize(
    "values",
    [
        changed(steps=None),
        changed(step=3),
        changed(steps="many"),
        changed(rollout__temprature=1),
        changed(inference={"type": "hf", "kv_cache_gib": 1}),
        changed(algorithm={"loss": {"type": "ppo", "cliplow": 1}}),
        changed(rewards={"use": [{"type": "ifeval", "wieght": 2}]}),
        changed(resources__device_mapping__training="a-b"),
        changed(resources__device="gpu"),
    ],
)
def test_what_is_wrong_fails(schema: dict[str, Any], values: dict[str, Any]) -> None:
    assert errors(schema, values)


def fields(section: type[ConfigModel], path: str = "") -> Iterator[tuple[str, Any]]:
    for key in all_keys(section, MINIMAL):
        parent = section_at(key[:-1], section, MINIMAL)
        assert parent is not None, key
        known = {info.alias or name: info for name, info in parent.model_fields.items()}
        yield ".".join(map(str, key)), known[str(key[-1])]


def test_every_field_has_a_description() -> None:
    found = dict(fields(RLVRConfig))
    assert len(found) > 100
    # a plugin may narrow its `type`, whose description is written for it
    assert [key for key, info in found.items() if not meaning_of(info) and not key.endswith(".type")] == []


def test_sections_below_names_of_choice_are_known() -> None:
    assert section_at(("teachers", "any"), OnPolicyDistillConfig, {}) is TeacherConfig
    assert ("teachers", "<name>", "devices") in all_keys(OnPolicyDistillConfig)
    assert ("teachers", "any", "devices") in all_keys(OnPolicyDistillConfig, {"teachers": {"any": {}}})


def test_names_from_other_tools_point_to_keys_that_exist() -> None:
    known = {".".join(map(str, key)) for name in PIPELINES.names() for key in all_keys(PIPELINES.get(name))}
    # keys of a loss or a reward are there once its type is chosen, and until then the section is named
    assert [key for key in other_names().names if translated(key, known) is None] == []
    documented = {key for keys in documented_keys().values() for key in keys}
    names = {name.replace(".0", "") for names in other_names().names.values() for name in names}
    assert names <= documented
    of_rlvr = {".".join(map(str, key)) for key in all_keys(RLVRConfig, MINIMAL)}
    ends = {key.rpartition(".")[2] for key in of_rlvr}
    assert not ends & set(other_names().names), "a key of ours needs no translation"


def test_nested_sections_of_a_plugin_are_part_of_the_schema() -> None:
    plugins: Registry[Any] = Registry("toy", group="roll_like.no_such_group")

    class Inner(ConfigModel):
        size: int = Field(default=1, description="Its size.")

    class Config(PluginConfig):
        inner: Inner = Field(default_factory=Inner, description="What is inside.")

    plugins.register("one")(type("One", (), {"Config": Config}))

    class Whole(ConfigModel):
        part: Annotated[PluginConfig, PluginSetting(plugins)] = Field(description="A part.")

    schema = json_schema(Whole)
    assert errors(schema, {"part": {"type": "one", "inner": {"size": 2}}}) == []
    assert errors(schema, {"part": {"type": "one", "inner": {"sise": 2}}})
    assert "### `part.inner`" in list(markdown(schema))


def test_a_plugin_section_that_holds_itself_ends() -> None:
    plugins: Registry[Any] = Registry("toy", group="roll_like.no_such_group")
    plugins.register("tree")(type("Tree", (), {"Config": TreeConfig}))

    class Whole(ConfigModel):
        part: Annotated[PluginConfig, PluginSetting(plugins)] = Field(description="A part.")

    schema = json_schema(Whole)
    assert errors(schema, {"part": {"type": "tree", "root": {"size": 1, "child": {"size": 2}}}}) == []
    assert errors(schema, {"part": {"type": "tree", "root": {"sise": 1}}})


def test_the_page_has_a_table_for_every_section(schema: dict[str, Any]) -> None:
    page = list(markdown(schema))
    assert "| `rollout.prompts_per_step` | integer ≥ 1 | required | Groups that one step trains on. |" in page
    assert "| `training.optimizer.lr` | number > 0 and < 1 | `1e-06` | Peak learning rate; below 1. |" in page
    assert "| `resources.device_mapping.training` | device range | required | Devices of the training engine. |" in page
    assert "| `eps` | number > 0 | `1e-08` | Adam's denominator term. |" in page
    headings = [line for line in page if line.startswith("### ")]
    assert "### `inference` with `type: hf`" in headings
    assert "### `data.sources`, each item" in headings
    assert "### `rewards.use`, each item with `type: math`" in headings
    assert len(headings) == len(set(headings))


def test_sections_of_another_page_are_only_named(schema: dict[str, Any]) -> None:
    whole = list(markdown(json_schema(OnlineDPOConfig)))
    page = list(markdown(json_schema(OnlineDPOConfig), schema, "other.md"))
    heading = "### `rewards.use`, each item with `type: math`"
    assert heading in whole
    assert heading not in page
    (named,) = [line for line in page if "are those of [other.md](other.md)." in line]
    assert "`training`" in named
    assert "`rewards`" in named
    assert "`rollout`" not in named  # it has other keys
    assert "### `rollout`" in page


def test_a_page_begins_with_the_keys_that_most_files_have(schema: dict[str, Any]) -> None:
    page = list(markdown(schema))
    common = page[: page.index("## Advanced keys")]
    listed = [line.split("`")[1] for line in common if line.startswith("| `")]
    assert len(listed) <= 60
    assert {"pipeline", "steps", "model.path", "data.sources.path", "rewards.use", "inference.replicas"} <= set(listed)
    assert all(f"`{key}` |" not in line for key in ("training.optimizer.eps", "guards") for line in common)


def test_a_section_that_has_the_keys_of_another_names_them(schema: dict[str, Any]) -> None:
    page = list(markdown(schema))
    critic = page[page.index("### `critic`") :]
    as_training = next(line for line in critic if line.startswith("As in `training`: "))
    assert "`sequence_parallel`" in as_training
    assert "### `critic.lora`" not in page


def test_committed_files_are_up_to_date() -> None:
    # in a process of its own: other tests register plugins in this one
    script = ROOT / "scripts" / "make_config_docs.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
