#!/usr/bin/env bash
# Builds the documentation site into build/site. Its packages are those of requirements/docs.txt, in an environment of
# their own, apart from .venv: the package is read, not imported. Arguments go to mkdocs in place of `build --strict`:
#   bash scripts/site.sh serve
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${SITE_VENV:-.venv-docs}
LOCK=requirements/docs.txt
STAMP=$VENV/.setup-stamp

say() { printf '\033[1msite:\033[0m %s\n' "$*"; }
fail() { printf 'site: %s\n' "$*" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "Python 3.11 or newer is needed; found $("$PYTHON" --version). Set PYTHON=python3.11, for example."

wanted=$({ cat "$LOCK"; "$PYTHON" --version; } | sha256sum | cut -d' ' -f1)
if ! { [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; }; then
  say "installing $(grep -c == "$LOCK") packages into $VENV (90 MB)"
  rm -rf "$VENV"
  "$PYTHON" -m venv "$VENV"
  # pip warns once a package about every configured folder that does not exist
  "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps -r "$LOCK" \
    2> >(grep -v '^WARNING: Location' >&2)
  echo "$wanted" > "$STAMP"
fi

export NO_MKDOCS_2_WARNING=1
[ $# -gt 0 ] || set -- build --strict  # not --quiet: it also hides the warnings that strict counts
"$VENV/bin/mkdocs" "$1" --config-file docs/site/mkdocs.yml "${@:2}"
[ "$1" != build ] || say "open build/site/index.html"
