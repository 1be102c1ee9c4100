#!/bin/sh
# Prints the path of a Chromium for the browser tests, installing one if there is none.
set -eu
find_one() {
    for name in "${RESINSPECT_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
        if [ -n "$name" ] && command -v "$name"; then return 0; fi
    done
    return 1
}
find_one && exit 0
if command -v apt-get >/dev/null; then
    root=""
    [ "$(id -u)" = 0 ] || root=sudo
    { $root apt-get update && $root apt-get install -y --no-install-recommends chromium; } >&2
else
    echo "no Chromium found: install one, or name it in RESINSPECT_CHROMIUM" >&2
fi
find_one
