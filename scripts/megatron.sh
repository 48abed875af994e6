#!/usr/bin/env bash
# Makes .megatron, a folder of packages beside .venv's for the training backend `megatron` (docs/backends.md). Megatron-Core
# declares Python 3.12, and what of it this project calls runs on 3.11. `megatron.sh megatron_bridge` makes
# .megatron_bridge, which only a test needs. Repeatable: does nothing when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${VENV:-.venv}/bin/python
NAME=${1:-megatron}
FOLDER=.$NAME
STAMP=$FOLDER/.setup-stamp

wanted=$({ cat "requirements/$NAME.txt" scripts/megatron.sh; "$PYTHON" --version; } | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then exit 0; fi

rm -rf "$FOLDER"
# pip warns once a package about every configured folder that does not exist
"$PYTHON" -m pip --disable-pip-version-check install --quiet --no-compile --no-deps --ignore-requires-python \
  --target "$FOLDER" -r "requirements/$NAME.txt" 2> >(grep -v '^WARNING: Location' >&2)
echo "$wanted" > "$STAMP"
printf '\033[1m%s:\033[0m export PYTHONPATH=%s\n' "$NAME" "$PWD/$FOLDER"
