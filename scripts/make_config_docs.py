"""Write the JSON Schemas and reference pages of the configuration classes.

python scripts/make_config_docs.py           write them
python scripts/make_config_docs.py --check   fail when a committed file is not up to date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from roll_like.config.agentic import AgenticConfig
from roll_like.config.dpo import DPOConfig
from roll_like.config.rlvr import RLVRConfig
from roll_like.config.schema import json_schema, markdown, write_json
from roll_like.config.sft import SFTConfig

ROOT = Path(__file__).resolve().parent.parent

INTRODUCTION = """\
# Configuration

Every key of a `pipeline: rlvr` file, generated from the configuration classes by `scripts/make_config_docs.py`.
The same as JSON Schema: [schema/rlvr.json](schema/rlvr.json). Editors with a YAML language server complete and check
keys in files whose first line is

```yaml
# yaml-language-server: $schema=../docs/schema/rlvr.json
```

- Check a file without starting anything: `roll-like run --config FILE --check`.
- Change keys on the command line: `roll-like run --config FILE steps=5 data.sources.0.weight=2 reference={}`. Values
  are YAML; items of lists are numbered from 0; setting another `type` drops the settings of the former type.
- Start from another file: `extends: other.yaml`, relative to the file that says so. Sections are merged key by key,
  lists are replaced.
- Refer to another key: `${rollout.samples_per_prompt}`; to an environment variable: `${oc.env:NAME}`. A plain `${` is
  written `\\${`.
- Relative paths of data and models are relative to the working directory.
- Batch sizes are in samples: `prompts_per_step × samples_per_prompt` samples a step, in `updates_per_step` optimizer
  steps of equal size. Micro-batches follow from token budgets.
- A span such as `0-3` names devices, counted through all nodes. Equal spans are colocated (the roles take turns),
  disjoint spans are disaggregated (they run side by side); spans that overlap only in part are refused. A span is
  divided evenly among the role's workers.
- A plugin (reward, advantage, loss, tracker) is written `{type: name, …}`, or only `name` for its defaults.
"""


AGENTIC = """\
# Configuration of agentic runs

Every key of a `pipeline: agentic` file, generated as [configuration.md](configuration.md) is, which also says how files
extend each other, how keys are changed on the command line, and what a span is. JSON Schema:
[schema/agentic.json](schema/agentic.json). What environments and episodes are: [environments.md](environments.md).
"""


SFT = """\
# Configuration of supervised runs

Every key of a `pipeline: sft` file, generated as [configuration.md](configuration.md) is, which also says how files
extend each other, how keys are changed on the command line, and what a span is. JSON Schema:
[schema/sft.json](schema/sft.json). What becomes of rows: [supervised.md](supervised.md).
"""


DPO = """\
# Configuration of preference runs

Every key of a `pipeline: dpo` file, generated as [configuration.md](configuration.md) is, which also says how files
extend each other, how keys are changed on the command line, and what a span is. JSON Schema:
[schema/dpo.json](schema/dpo.json). What is learned from pairs: [preferences.md](preferences.md).
"""


def files() -> dict[Path, str]:
    """Return each generated file's text."""
    rlvr, agentic, sft, dpo = map(json_schema, (RLVRConfig, AgenticConfig, SFTConfig, DPOConfig))
    docs = ROOT / "docs"
    return {
        docs / "schema/rlvr.json": write_json(rlvr),
        docs / "schema/agentic.json": write_json(agentic),
        docs / "schema/sft.json": write_json(sft),
        docs / "schema/dpo.json": write_json(dpo),
        docs / "configuration.md": _page(INTRODUCTION, markdown(rlvr)),
        docs / "configuration_agentic.md": _page(AGENTIC, markdown(agentic, rlvr, "configuration.md")),
        docs / "configuration_dpo.md": _page(DPO, markdown(dpo, rlvr, "configuration.md")),
        docs / "configuration_sft.md": _page(SFT, markdown(sft, rlvr, "configuration.md")),
    }


def _page(introduction: str, lines: Iterable[str]) -> str:
    return "\n".join([introduction, *lines]).rstrip("\n") + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only compare, exit code 1 when a file differs")
    arguments = parser.parse_args(argv)
    stale = [path for path, text in files().items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is not up to date' if arguments.check else 'written'}")
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path], encoding="utf-8")
    if stale and arguments.check:
        print("fix: python scripts/make_config_docs.py", file=sys.stderr)
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
