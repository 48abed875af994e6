#!/usr/bin/env bash
# Installs the oldest torch and transformers that the project runs with into .older, beside .venv, whose other packages
# serve both: export PYTHONPATH=.older. vLLM is built for one torch and does not load there. Repeatable.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${VENV:-.venv}/bin/python
FOLDER=.older
TORCH=torch==2.11.0
TRANSFORMERS=transformers==5.17.0
TRITON=triton==3.6.0   # as torch wants it: kernels run in its interpreter
HUB=huggingface-hub==1.33.0   # of which that wants the first major version
TORCH_INDEX=https://download.pytorch.org/whl/cpu
STAMP=$FOLDER/.setup-stamp

say() { printf '\033[1molder:\033[0m %s\n' "$*"; }
# pip warns once a package about every configured folder that does not exist
pip() {
  "$PYTHON" -m pip --disable-pip-version-check install --quiet --no-compile --target "$FOLDER" "$@" \
    2> >(grep -v '^WARNING: \(Location\|Target\)' >&2)
}

wanted=$({ cat scripts/older.sh; "$PYTHON" --version; } | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then exit 0; fi

started=$(date +%s)
say "installing $TORCH and $TRANSFORMERS into $FOLDER"
rm -rf "$FOLDER"
# elsewhere than at PyTorch there are builds with CUDA only (3 GB), whose libraries are loaded without a GPU too
pip --no-deps --retries 0 --timeout 15 --index-url "$TORCH_INDEX" "$TORCH" 2> /dev/null || pip "$TORCH"
pip --no-deps --upgrade "$TRANSFORMERS" "$HUB" "$TRITON"
# of torch's dependencies only what .venv has not: of NumPy and others there are pinned versions
"$PYTHON" - "$FOLDER" << 'EOF'
import importlib.metadata as metadata, re, shutil, sys
from pathlib import Path

folder = Path(sys.argv[1])
own = {re.sub(r"[-_.]+", "-", each.name).lower() for each in metadata.distributions()} - {"torch", "transformers", "huggingface-hub"}
for each in list(metadata.distributions(path=[str(folder)])):
    if re.sub(r"[-_.]+", "-", each.name).lower() in own:
        for name in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "bin")}:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
EOF
echo "$wanted" > "$STAMP"
say "done in $(($(date +%s) - started)) s"
