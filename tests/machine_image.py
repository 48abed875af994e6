"""A container image of this machine's own `sh`, core utilities and Python: tests need no registry."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

IMAGE = "localhost/roll-like-test:1"
PROGRAMS = {"sh", "cat", "chown", "env", "head", "kill", "mkdir", "mv", "rm", "setsid", "sleep", "true", "python3"}
PROGRAMS |= {"awk", "grep", "ps", "tar", "touch"}


def import_machine_image(engine: str) -> None:
    """Give an engine the image; `import` of a tar file takes no base."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(_files()):
            archive.add(os.path.realpath(path), arcname=path.lstrip("/"), recursive=False)
        entry = tarfile.TarInfo("bin")
        entry.type, entry.linkname = tarfile.SYMTYPE, "usr/bin"
        archive.addfile(entry)
        for folder in ("tmp", "root", "app", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            archive.addfile(entry)
    subprocess.run([engine, "import", "-", IMAGE], input=buffer.getvalue(), check=True, capture_output=True)


def _files() -> set[str]:
    """Programs, the libraries that they load, and the standard library."""
    found = set()
    paths = [path for name in PROGRAMS if (path := shutil.which(name, path="/usr/bin")) is not None]
    python = os.path.realpath("/usr/bin/python3")
    library = Path("/usr/lib", Path(python).name)
    files = [str(path) for path in library.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    modules = [path for path in files if path.endswith(".so")]
    for path in [*paths, python, *modules]:
        found.add(path)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        found.update(re.findall(r"(/\S+) \(0x", listed))
    return found | {path for path in files if "/test/" not in path and "/idlelib/" not in path}
