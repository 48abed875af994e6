#!/usr/bin/env bash
# Makes .NAME out of requirements/NAME.txt, apart from .venv, whose versions it does not share: what some tests call.
#   oracle     independent implementations, without their dependencies; a folder for PYTHONPATH
#   newest     the newest versions of what .venv has, as far as they work with its vLLM; a folder for PYTHONPATH
#   verifiers  what plays verifiers' environments (docs/verifiers.md); a virtual environment, as is
#   tinker     tinker's client and its recipes (docs/service.md)
#   evaluators lm-evaluation-harness and inspect (examples/other_evaluators)
#   clients    frameworks for agents and, where npm is installed, coding agents (docs/agents.md)
# Repeatable: does nothing when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

NAME=$1
PYTHON=${VENV:-.venv}/bin/python
FOLDER=.$NAME
LOCK=requirements/$NAME.txt
STAMP=$FOLDER/.setup-stamp
TORCH_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '\033[1m%s:\033[0m %s\n' "$NAME" "$*"; }

wanted=$({ cat "$LOCK" scripts/environment.sh; "$PYTHON" --version; [ "$NAME" != clients ] || npm --version || :; } 2> /dev/null |
  sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then exit 0; fi

started=$(date +%s)
say "installing $(grep -c == "$LOCK") packages into $FOLDER"
rm -rf "$FOLDER"
into=()
if [ "$NAME" = oracle ] || [ "$NAME" = newest ]; then
  into=(--target "$FOLDER")
else
  "$PYTHON" -m venv "$FOLDER"
  PYTHON=$FOLDER/bin/python
fi
# pip warns once a package about every configured folder that does not exist
pip() {
  "$PYTHON" -m pip --disable-pip-version-check install --quiet --no-compile --no-deps "${into[@]}" "$@" \
    2> >(grep -v '^WARNING: \(Location\|Target\)' >&2)
}
rest=$LOCK
if torch=$(grep '^torch==' "$LOCK"); then
  # where pip is not configured for the CPU build, it comes from PyTorch's own index
  pip "$torch" 2> /dev/null || pip --index-url "$TORCH_INDEX" "$torch"
  rest=$FOLDER/lock-rest.txt
  grep -v '^torch==' "$LOCK" > "$rest"
fi
pip -r "$rest"
# torchrl's wheel brings top-level folders that have nothing to do with the library
if [ "$NAME" = oracle ]; then rm -rf "$FOLDER"/{tests,scripts,benchmarks,sota-check,sota-implementations}; fi
if [ "$NAME" = clients ] && command -v npm > /dev/null; then
  # two of them fetch their programs in scripts that npm leaves out unless it is told of them
  echo '{}' > "$FOLDER/package.json"
  npm install --prefix "$FOLDER" --loglevel=error --no-audit --no-fund --ignore-scripts=false \
    @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10
fi
echo "$wanted" > "$STAMP"
say "done in $(($(date +%s) - started)) s"
