"""Container images of this machine's own programs, so that tests need no registry."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

#: An image with `sh`, `bash`, core utilities and Python, and with a volume.
IMAGE = "localhost/roll-like-test:1"
PROGRAMS = {"sh", "cat", "chown", "env", "head", "kill", "mkdir", "mv", "rm", "setsid", "sleep", "true", "python3"}
PROGRAMS |= {"awk", "bash", "cp", "grep", "gzip", "ps", "tar", "touch"}
#: The same with uv and with what it asks a package index by.
UV_IMAGE = "localhost/roll-like-uv-test:1"
#: The same with git and pytest.
GIT_IMAGE = "localhost/roll-like-git-test:1"
PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
#: The image with which verifiers cuts a container's network, where there is one of this name already.
NETWORK_IMAGE = "localhost/verifiers-network:1"
NETWORK_PROGRAMS = {"sh", "awk", "ip", "iptables"}
#: What a root file system has to have, beside programs: `proc` and the others are mounted on.
FOLDERS = ("tmp", "root", "app", "etc", "dev", "proc", "sys", "run", "home", "var", "var/tmp")


def import_machine_image(engine: str) -> None:
    """Give an engine the image; `import` of a tar file takes no base."""
    _import(engine, IMAGE, python_files() | _with_libraries(_found(PROGRAMS)), "VOLUME /kept")


def import_uv_image(engine: str, uv: Path) -> None:
    """Give an engine the image in which harnesses of verifiers install themselves."""
    programs = {*_found(PROGRAMS | {"id", "mktemp", "uname"}), str(uv)}
    files = python_files() | _with_libraries(programs) | {CERTIFICATES}
    _import(
        engine, UV_IMAGE, files, f"ENV PATH=/usr/bin:{uv.parent}", f"ENV SSL_CERT_FILE={CERTIFICATES}", "ENV HOME=/root"
    )


def import_git_image(engine: str, environment: Path) -> None:
    """Give an engine the image in which repositories are tested; pytest is that of a virtual environment."""
    (packages,) = environment.glob("lib/python3*/site-packages")
    found = [path for name in PYTEST for path in (packages / name).rglob("*.py")]
    found += [packages / "py.py", *packages.glob("pytest-*.dist-info/*"), *packages.glob("pluggy-*.dist-info/*")]
    tools = {"git", "sed", "xargs", "wc", "dirname", "timeout", "ln", "true"}
    files = python_files() | _with_libraries(_found(PROGRAMS | tools)) | {str(path) for path in found if path.is_file()}
    _import(engine, GIT_IMAGE, files, f"ENV PYTHONPATH={packages}")


def import_network_image(engine: str) -> None:
    """Give an engine the image that verifiers builds from a registry's where it is missing.

    Raises:
        FileNotFoundError: This machine has no `iptables`.
    """
    if shutil.which("iptables", path="/usr/sbin") is None:
        raise FileNotFoundError("this machine has no iptables, which the image of verifiers' networks needs")
    extensions = map(str, Path("/usr/lib").glob("*/xtables/*.so"))
    _import(engine, NETWORK_IMAGE, _with_libraries([*_found(NETWORK_PROGRAMS), *extensions]))


def write_machine_folder(folder: Path) -> None:
    """Write the image as a folder, as Apptainer takes it."""
    with tarfile.open(fileobj=io.BytesIO(_archive(python_files() | _with_libraries(_found(PROGRAMS))))) as archive:
        archive.extractall(folder, filter="fully_trusted")
    for name in ("passwd", "group", "resolv.conf", "hosts", "localtime"):
        (folder / "etc" / name).touch()


def _import(engine: str, image: str, files: Iterable[str], *instructions: str) -> None:
    stated = [f"--change={each}" for each in instructions]
    subprocess.run([engine, "import", *stated, "-", image], input=_archive(files), check=True, capture_output=True)


def _archive(files: Iterable[str]) -> bytes:
    """Return a root file system with these files of this machine, as a tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(files):
            archive.add(os.path.realpath(path), arcname=path.lstrip("/"), recursive=False)
        for link in ("bin", "sbin"):
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{link}"
            archive.addfile(entry)
        for folder in FOLDERS:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            archive.addfile(entry)
    return buffer.getvalue()


def _found(programs: Iterable[str]) -> list[str]:
    return [path for name in programs if (path := shutil.which(name, path="/usr/bin:/usr/sbin")) is not None]


def python_files() -> set[str]:
    """Python, its standard library, and what its modules load."""
    python = os.path.realpath("/usr/bin/python3")
    library = Path("/usr/lib", Path(python).name)
    files = [str(path) for path in library.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    loaded = _with_libraries([python, *(path for path in files if path.endswith(".so"))])
    return loaded | {path for path in files if "/test/" not in path and "/idlelib/" not in path}


def _with_libraries(paths: Iterable[str]) -> set[str]:
    """Return programs and the libraries that they load."""
    found = set()
    for path in paths:
        found.add(path)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        found.update(re.findall(r"(/\S+) \(0x", listed))
    return found
