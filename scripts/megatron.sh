#!/usr/bin/env bash
# Makes .megatron, a folder of packages beside .venv's for the training backend `megatron` (docs/backends.md). Megatron-Core
# declares Python 3.12, and what of it this project calls runs on 3.11. Repeatable: does nothing when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${VENV:-.venv}/bin/python
FOLDER=.megatron
STAMP=$FOLDER/.setup-stamp

wanted=$({ cat requirements/megatron.txt scripts/megatron.sh; "$PYTHON" --version; } | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then exit 0; fi

rm -rf "$FOLDER"
# pip warns once a package about every configured folder that does not exist
"$PYTHON" -m pip --disable-pip-version-check install --quiet --no-compile --no-deps --ignore-requires-python \
  --target "$FOLDER" -r requirements/megatron.txt 2> >(grep -v '^WARNING: Location' >&2)
echo "$wanted" > "$STAMP"
printf '\033[1mmegatron:\033[0m export PYTHONPATH=%s\n' "$PWD/$FOLDER"
