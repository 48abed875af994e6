"""Where scripts/megatron.sh puts Megatron-Core, which few machines have."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / ".megatron"
INSTALLED = pytest.mark.skipif(not FOLDER.is_dir(), reason="scripts/megatron.sh has not installed Megatron-Core")
