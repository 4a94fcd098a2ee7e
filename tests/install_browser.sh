#!/usr/bin/env bash
# What reports and dashboards are looked at with: a browser, and npm for axe and Grafana's schema (by the lock in tests/npm).
#   tests/install_browser.sh     KVTRIAL_APT=no: install nothing
#
# Where they are missing they are installed from Debian's packages, if this user may. Where not, why not is kept in
# .kvtrial/no-browser, the tests that need them skip with it, and all others run.
set -uo pipefail
cd "$(dirname "$0")/.."
reason=.kvtrial/no-browser
mkdir -p .kvtrial
rm -f "$reason"

any_of() { # NAME...
    local name
    for name in "$@"; do command -v "$name" >/dev/null 2>&1 && return; done
    return 1
}

missing=()
any_of chromium chromium-browser google-chrome chrome || missing+=(chromium)
any_of npm && any_of node || missing+=(npm)
[ ${#missing[@]} -eq 0 ] && exit 0

give_up() { # WHY
    echo "$1; as root: apt-get install --no-install-recommends ${missing[*]}" | tee "$reason" >&2
    exit 0
}

[ "${KVTRIAL_APT:-}" != no ] || give_up "KVTRIAL_APT=no"
any_of apt-get || give_up "there is no apt-get here"
[ "$(id -u)" = 0 ] || give_up "this user is not root"
echo "Installing ${missing[*]} with apt-get, to look at reports with (KVTRIAL_APT=no leaves that out)"
export DEBIAN_FRONTEND=noninteractive
timeout 120 apt-get -qq update >.kvtrial/browser.log 2>&1
timeout 400 apt-get -qq install -y --no-install-recommends "${missing[@]}" >>.kvtrial/browser.log 2>&1 ||
    give_up "apt-get could not install ${missing[*]} ($(tail -n 1 .kvtrial/browser.log))"
