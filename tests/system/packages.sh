#!/usr/bin/env bash
# What the system tests need beside Python: root, and programs that Debian packages. Installs those that are missing.
set -euo pipefail
if [ "$(id -u)" != 0 ]; then
  echo "make test-system needs root: its hosts are network namespaces. Nothing was run." >&2
  exit 1
fi
declare -A package=([/usr/sbin/sshd]=openssh-server [ssh]=openssh-client [rsync]=rsync [ip]=iproute2 [nsenter]=util-linux
  [curl]=curl [ps]=procps)
missing=()
for program in "${!package[@]}"; do
  command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
if [ ${#missing[@]} = 0 ] && command -v redis-server >/dev/null; then exit 0; fi
if [ ${#missing[@]} != 0 ] && ! command -v apt-get >/dev/null; then
  echo "make test-system needs ${missing[*]} (Debian's names) and there is no apt-get: install them." >&2
  exit 1
fi
command -v apt-get >/dev/null || exit 0
apt-get update -qq
install() {
  echo "installing $*"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
[ ${#missing[@]} = 0 ] || install "${missing[@]}"
# One test's external storage for Ray's head; it is left out where there is none.
command -v redis-server >/dev/null || install redis-server || echo "no redis-server: a test is left out"
