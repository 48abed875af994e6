#!/usr/bin/env bash
# Installs the independent implementations of requirements/oracle.txt into .oracle, apart from .venv: without their
# dependencies, which would replace pinned packages. Repeatable: does nothing when the list has not changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${VENV:-.venv}/bin/python
FOLDER=.oracle
LIST=requirements/oracle.txt
STAMP=$FOLDER/.setup-stamp

say() { printf '\033[1moracle:\033[0m %s\n' "$*"; }

wanted=$({ cat "$LIST" scripts/oracle.sh; "$PYTHON" --version; } | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then exit 0; fi

started=$(date +%s)
say "installing $(grep -c == "$LIST") references into $FOLDER (65 MB)"
rm -rf "$FOLDER"
# pip warns once a package about every configured folder that does not exist
"$PYTHON" -m pip --disable-pip-version-check install --quiet --no-deps --target "$FOLDER" -r "$LIST" \
  2> >(grep -v '^WARNING: Location' >&2)
# torchrl's wheel brings top-level folders that have nothing to do with the library
rm -rf "$FOLDER"/{tests,scripts,benchmarks,sota-check,sota-implementations}
echo "$wanted" > "$STAMP"
say "done in $(($(date +%s) - started)) s"
