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
[ ${#missing[@]} = 0 ] && exit 0
if ! command -v apt-get >/dev/null; then
  echo "make test-system needs ${missing[*]} (Debian's names) and there is no apt-get: install them." >&2
  exit 1
fi
echo "installing ${missing[*]}"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
