#!/usr/bin/env bash
# Makes .tinker, an environment with tinker's client and its recipes apart from .venv, whose versions it does not share:
# what the tests of the training service call it with (docs/service.md). Repeatable: does nothing when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${VENV:-.venv}/bin/python
FOLDER=.tinker
LOCK=requirements/tinker.txt
STAMP=$FOLDER/.setup-stamp
TORCH_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '\033[1mtinker:\033[0m %s\n' "$*"; }

wanted=$({ cat "$LOCK" scripts/tinker.sh; "$PYTHON" --version; } | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then exit 0; fi

started=$(date +%s)
say "installing $(grep -c == "$LOCK") packages into $FOLDER (1.3 GB)"
rm -rf "$FOLDER"
"$PYTHON" -m venv "$FOLDER"
# pip warns once a package about every configured folder that does not exist
pip() {
  "$FOLDER/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile --no-deps "$@" \
    2> >(grep -v '^WARNING: Location' >&2)
}
torch=$(grep '^torch==' "$LOCK")
pip "$torch" 2> /dev/null || pip --index-url "$TORCH_INDEX" "$torch"
grep -v '^torch==' "$LOCK" > "$FOLDER/lock-rest.txt"
pip -r "$FOLDER/lock-rest.txt"
echo "$wanted" > "$STAMP"
say "done in $(($(date +%s) - started)) s"
