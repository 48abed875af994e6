"""What the Grafana dashboard of `examples/` asks Prometheus for."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: A metric with the menu's choice of runs; what stands around it are functions and operators.
_METRIC = re.compile(r'([a-zA-Z_:][\w:]*)\{run=~"\$run"\}')
_AROUND = re.compile(r"(rate\(|\[\$__rate_interval\]\)| / )*")


def asked_names() -> dict[str, set[str]]:
    """Return the names of its metrics by where they come from: `roll_like`, `vllm` or `ray`."""
    dashboard = json.loads((ROOT / "examples" / "grafana" / "dashboard.json").read_text())
    names: dict[str, set[str]] = {"roll_like": set(), "vllm": set(), "ray": set()}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            found = _METRIC.findall(expression)
            assert found, expression
            assert _AROUND.fullmatch(_METRIC.sub("", expression)), expression
            for name in found:
                names[next(kind for kind in names if name.startswith(kind))].add(name)
    return names
