"""Record what this project calls of SGLang: tests/data/sglang_signatures.json, read from the sources of its wheel.

    .venv/bin/python scripts/sglang_signatures.py              # the version that pyproject.toml pins, fetched with pip
    .venv/bin/python scripts/sglang_signatures.py FILE.whl

SGLang's packages need NVIDIA GPUs, so tests on a CPU cannot import it. They check every call against this record, and
the stand-in of tests/sglang_stand_in takes its classes and the signatures of its methods from it.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll_like.inference.sglang.arguments import TESTED, server_args_fields

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "data" / "sglang_signatures.json"
IO = "srt/managers/io_struct.py"
MANAGER = "srt/managers/tokenizer_manager.py"
CONTROL = "srt/managers/tokenizer_control_mixin.py"
#: Fields of these classes, in order, with those of their bases in the same file.
CLASSES = {
    IO: (
        "GenerateReqInput",
        "PauseGenerationReqInput",
        "ContinueGenerationReqInput",
        "BeginWeightUpdateReqInput",
        "EndWeightUpdateReqInput",
        "UpdateWeightsFromTensorReqInput",
        "UpdateWeightsFromDistributedReqInput",
        "InitWeightsUpdateGroupReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
        "UpdateWeightVersionReqInput",
        "FlushCacheReqOutput",
    ),
    "srt/sampling/sampling_params.py": ("SamplingParams",),
}
#: Methods of a class, or functions (class "").
FUNCTIONS = {
    (MANAGER, "TokenizerManager"): ("generate_request", "abort_request", "pause_generation", "continue_generation"),
    (CONTROL, "TokenizerControlMixin"): (
        "begin_weight_update",
        "end_weight_update",
        "update_weights_from_tensor",
        "update_weights_from_distributed",
        "init_weights_update_group",
        "release_memory_occupation",
        "resume_memory_occupation",
        "flush_cache",
        "update_weight_version",
        "get_internal_state",
    ),
    ("srt/entrypoints/engine.py", "Engine"): ("__init__", "shutdown", "get_all_child_pids"),
    ("srt/utils/common.py", "MultiprocessingSerializer"): ("serialize", "deserialize"),
    ("srt/utils/common.py", ""): ("init_custom_process_group",),
}


def record(package: Path) -> dict[str, Any]:
    """Return the record of an unpacked SGLang package.

    Args:
        package: The folder `sglang`.
    """
    trees = {name: ast.parse((package / name).read_text(encoding="utf-8")) for name in _files()}
    found: dict[str, Any] = {"version": TESTED, "classes": {}, "functions": {}}
    for file, names in CLASSES.items():
        of_file = _classes(trees[file])
        found["classes"] |= {name: dict(_fields(of_file, name)) for name in names}
    for (file, owner), names in FUNCTIONS.items():
        body = _classes(trees[file])[owner].body if owner else trees[file].body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        found["functions"] |= {f"{owner}.{name}".lstrip("."): _signature(functions[name]) for name in names}
    found["server_args"] = sorted(server_args_fields(package))
    (unpickler,) = [
        node.value
        for node in _classes(trees["srt/utils/common.py"])["SafeUnpickler"].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ALLOWED_GLOBALS"
    ]
    found["picklable"] = sorted(".".join(pair) for pair in ast.literal_eval(unpickler))
    return found


def _files() -> set[str]:
    return {*CLASSES, *(file for file, _ in FUNCTIONS)}


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(classes: dict[str, ast.ClassDef], name: str) -> Iterator[tuple[str, str | None]]:
    """Yield each field of a class with its default as source, None where there is none."""
    for base in classes[name].bases:
        if ast.unparse(base) in classes:
            yield from _fields(classes, ast.unparse(base))
    for statement in classes[name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = None if statement.value is None else ast.unparse(statement.value)
            yield statement.target.id, default


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Any]:
    """Return a function's parameters as source, without annotations, and whether it is a coroutine."""
    arguments = function.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    return {"parameters": ast.unparse(arguments), "asynchronous": isinstance(function, ast.AsyncFunctionDef)}


def unpack(folder: Path, wheel: Path | None = None) -> Path:
    """Unpack what is read of a wheel, which pip fetches if none is given; return the package's folder."""
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--only-binary=:all:"]
        target = ["--python-version=3.11", "--platform=manylinux_2_34_x86_64", f"--dest={folder}", f"sglang=={TESTED}"]
        subprocess.run([*command, *target], check=True)
        (wheel,) = folder.glob("sglang-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = tuple(f"sglang/{name}" for name in (*_files(), "srt/arg_groups/fields/"))
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
    return folder / "sglang"


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="?", type=Path, help="default: fetched with pip")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = record(unpack(Path(folder), options.wheel))
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
