#!/usr/bin/env bash
# Makes .verifiers, an environment with the verifiers library apart from .venv, whose versions it does not share: what
# the tests of verifiers' environments play in (docs/verifiers.md). Repeatable: does nothing when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${VENV:-.venv}/bin/python
FOLDER=.verifiers
STAMP=$FOLDER/.setup-stamp

say() { printf '\033[1mverifiers:\033[0m %s\n' "$*"; }

wanted=$({ cat requirements/verifiers.txt scripts/verifiers.sh; "$PYTHON" --version; } | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then exit 0; fi

started=$(date +%s)
say "installing $(grep -c == requirements/verifiers.txt) packages into $FOLDER (550 MB)"
rm -rf "$FOLDER"
"$PYTHON" -m venv "$FOLDER"
# pip warns once a package about every configured folder that does not exist
"$FOLDER/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile --no-deps \
  -r requirements/verifiers.txt 2> >(grep -v '^WARNING: Location' >&2)
echo "$wanted" > "$STAMP"
say "done in $(($(date +%s) - started)) s"
