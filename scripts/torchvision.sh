#!/usr/bin/env bash
# Puts a torchvision that the CPU build of torch can import into .torchvision, apart from .venv: vLLM's code of
# vision-language models needs it (docs/vision.md). PyPI has builds for CUDA only; their Python code works everywhere.
# So the compiled operators, which are for boxes and masks, are taken out, and are declared without a kernel instead:
# torchvision registers gradients of them while it is imported. Repeatable: does nothing when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${VENV:-.venv}/bin/python
FOLDER=.torchvision
STAMP=$FOLDER/.setup-stamp
VERSION=0.28.0 # of torch 2.13

say() { printf '\033[1mtorchvision:\033[0m %s\n' "$*"; }

wanted=$({ cat scripts/torchvision.sh; "$PYTHON" --version; } | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then exit 0; fi

say "installing torchvision $VERSION into $FOLDER (14 MB)"
rm -rf "$FOLDER"
"$PYTHON" -m pip --disable-pip-version-check install --quiet --no-deps --target "$FOLDER" "torchvision==$VERSION" \
  2> >(grep -v '^WARNING: Location' >&2)
rm -r "$FOLDER"/torchvision/*.so "$FOLDER"/torchvision.libs
cat >> "$FOLDER/torchvision/extension.py" << 'PYTHON'

_DECLARED = torch.library.Library("torchvision", "DEF")
for _operator, _results in (
    ("nms", 1),
    ("qnms", 1),
    ("roi_align", 1),
    ("roi_pool", 2),
    ("ps_roi_align", 2),
    ("ps_roi_pool", 2),
    ("deform_conv2d", 1),
    ("_roi_align_backward", 1),
    ("_roi_pool_backward", 1),
    ("_ps_roi_align_backward", 1),
    ("_ps_roi_pool_backward", 1),
    ("_deform_conv2d_backward", 5),
):
    _DECLARED.define(f"{_operator}(Tensor input) -> ({', '.join(['Tensor'] * _results)})")
PYTHON
echo "$wanted" > "$STAMP"
