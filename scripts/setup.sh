#!/usr/bin/env bash
# Makes .venv from the full lock in requirements/cpu.txt. Repeatable: does nothing when lock and project are unchanged.
# The lock is installed without dependency resolution: vLLM's CPU build asks for a torchvision that is linked
# against CUDA and would break the CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
LOCK=requirements/cpu.txt
TORCH_INDEX=https://download.pytorch.org/whl/cpu
STAMP=$VENV/.setup-stamp

say() { printf '\033[1msetup:\033[0m %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

wanted=$(cat "$LOCK" pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then exit 0; fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "Python 3.11 or newer is needed; found $("$PYTHON" --version). Set PYTHON=python3.11, for example."
command -v gcc > /dev/null || fail "gcc is needed (Debian, Ubuntu: apt-get install gcc)."
"$PYTHON" -c 'import venv, ensurepip' 2> /dev/null ||
  fail "the venv module is missing (Debian, Ubuntu: apt-get install python3-venv)."

# programs of models run in a sandbox of namespaces; without it the code reward refuses to work
if ! command -v bwrap > /dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    say "installing bubblewrap, the sandbox of the code reward"
    { apt-get install --quiet --yes bubblewrap || { apt-get update && apt-get install --quiet --yes bubblewrap; }; } \
      > /dev/null || say "bubblewrap could not be installed: the code reward will not run without it"
  else
    say "bubblewrap is missing, so the code reward will not run: sudo apt-get install bubblewrap"
  fi
fi

started=$(date +%s)
say "making $VENV with $("$PYTHON" --version)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# Python compiles what is imported when it is; all 30,000 files at once take pip a third of its time.
# pip warns once a package about every configured folder that does not exist.
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@" 2> >(grep -v '^WARNING: Location' >&2); }

torch=$(grep '^torch==' "$LOCK")
say "1/5 $torch (CPU build, 190 MB)"
pip install --quiet --no-compile --no-deps "$torch" 2> /dev/null ||
  pip install --quiet --no-compile --no-deps --index-url "$TORCH_INDEX" "$torch" ||
  fail "no CPU build of $torch in pip's indexes or at $TORCH_INDEX."

say "2/5 $(grep -c == "$LOCK") pinned packages (3 GB, a minute or two)"
grep -vE '^(torch|deepspeed)==' "$LOCK" > "$VENV/lock-rest.txt"
pip install --quiet --no-compile --no-deps -r "$VENV/lock-rest.txt"

say "3/5 deepspeed (from source, without compiling its operators)"
DS_BUILD_OPS=0 pip install --quiet --no-compile --no-deps --no-build-isolation "$(grep '^deepspeed==' "$LOCK")"

say "4/5 roll_like itself, editable"
pip install --quiet --no-compile --no-deps --no-build-isolation -e .

"$VENV/bin/python" - << 'EOF'
import sys
import torch
if torch.version.cuda:
    sys.exit(f"setup: torch {torch.__version__} is a CUDA build; remove .venv and try again")
EOF

# What the first run would wait for: dequantised weights in ~/.cache/roll_like, what vLLM keeps about a class of models
say "5/5 the quickstart's model (once a machine, half a minute)"
VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 "$VENV/bin/python" -c "
from vllm import ModelRegistry
ModelRegistry.models['LlamaForCausalLM'].inspect_model_cls()" > /dev/null 2>&1 &
"$VENV/bin/roll-like" run --config configs/rlvr_quickstart.yaml --check > /dev/null ||
  say "configs/rlvr_quickstart.yaml has problems on this machine; see the lines above"
wait || true

echo "$wanted" > "$STAMP"
say "done in $(($(date +%s) - started)) s"
