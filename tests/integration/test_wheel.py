"""The source distribution gives a wheel of one package and nothing else, which works beside a user's own folders."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from roll_like.registry import REGISTRIES

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("runs", "build", "dist", "mlruns", "__pycache__", "*.egg-info", ".*")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

pytestmark = pytest.mark.integration


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [str(part) for part in command],
        check=False,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution, and a wheel built from it.

    It is built from a copy with links, as a checkout has them; leftovers of earlier builds cannot get in.
    """
    copy = tmp_path_factory.mktemp("source") / "copy"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", copy / "out", cwd=copy)
    assert built.returncode == 0, built.stdout + built.stderr
    return copy / "out"


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (file,) = distributions.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def sources(distributions: Path) -> set[str]:
    """The files of the source distribution."""
    (file,) = distributions.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members), "links that other systems may not unpack"
    return {member.name.partition("/")[2] for member in members if member.isfile()}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment: this wheel, and the dependencies of the one that runs the tests."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    done = run(
        *(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"),
        *("install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel),
        cwd=place,
    )
    assert done.returncode == 0, done.stderr
    (site_packages,) = (place / "lib").glob("python*/site-packages")
    # files named *.pth count in site-packages alone, so the editable install of the tests' environment stays out
    (site_packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = run(python, "-c", "import roll_like; print(roll_like.__file__)", cwd=place)
    assert Path(where.stdout.strip()).is_relative_to(site_packages), where.stdout + where.stderr
    return place / "bin"


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A working directory with packages that are called like ours."""
    for package in ("envs", "rewards", "pipelines"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "envs" / "mine.py").write_text('print("the environments of the user")\n')
    return tmp_path


def test_it_holds_one_package_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"roll_like"}
    assert len(top) == 2
    sources = {
        f"{'' if package == 'roll_like' else 'roll_like/builtin/'}{file.relative_to(ROOT)}"
        for package in ("roll_like", "pipelines", "envs", "rewards")
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert {"roll_like/py.typed", "roll_like/__init__.pyi", "roll_like/builtin/rewards/math.py"} <= sources
    assert any(name.startswith("roll_like/starters/templates/") for name in sources)
    assert any(name.startswith("roll_like/viewer/templates/") for name in sources)


def test_the_source_distribution_has_what_a_wheel_is_built_from(wheel: Path, sources: set[str]) -> None:
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("roll_like/")}
    assert packaged <= sources
    made = {"PKG-INFO", "setup.cfg"}
    written = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
    assert {name for name in sources - packaged if not name.startswith("roll_like.egg-info/")} == made | written


def test_its_metadata_names_licence_command_and_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    texts = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
    metadata = email.message_from_string(archive.read(texts["METADATA"]).decode())
    assert metadata["Name"] == "roll-like"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert "LICENSE" in texts
    assert "roll-like = roll_like.cli:main" in archive.read(texts["entry_points.txt"]).decode()


def test_the_command_says_its_version_in_a_folder_of_another_project(installed: Path, users_folder: Path) -> None:
    done = run(installed / "roll-like", "--version", cwd=users_folder)
    assert done.stdout == f"roll-like {PROJECT['version']}\n", done.stderr


def test_help_works_beside_packages_of_the_same_names(installed: Path, users_folder: Path) -> None:
    done = run(installed / "roll-like", "--help", cwd=users_folder)
    assert done.returncode == 0, done.stderr
    assert "plugins" in done.stdout


def test_the_built_ins_are_there_beside_packages_of_the_same_names(installed: Path, users_folder: Path) -> None:
    done = run(installed / "roll-like", "plugins", cwd=users_folder)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in done.stdout.splitlines() if "│" in line]
    found: dict[str, set[str]] = {}
    for kind, name, _ in rows:
        found.setdefault(kind, set()).add(name)
    # the environment of the tests has the repository installed; other tests of this process register plugins too
    assert found == {
        registry.kind: {name for name in registry.names() if registry.origin(name).startswith("roll_like.")}
        for registry in REGISTRIES
    }
    assert found["reward"] == set(PROJECT["entry-points"]["roll_like.rewards"])
    assert {"grpo", "rloo"} <= found["advantage estimator"]
    assert {"mlflow", "prometheus", "swanlab", "tensorboard", "trackio", "wandb"} == found["metrics tracker"]


def test_a_users_package_of_such_a_name_is_theirs(installed: Path, users_folder: Path) -> None:
    config = users_folder / "config.yaml"
    config.write_text("pipeline: rlvr\nimport: [envs.mine]\n")
    done = run(installed / "roll-like", "run", "--config", config, "--check", cwd=users_folder)
    assert "the environments of the user" in done.stdout
    assert done.returncode == 2  # the file lacks a model
    assert "model: missing" in done.stderr
