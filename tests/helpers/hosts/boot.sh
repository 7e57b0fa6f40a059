#!/bin/bash
# Runs as the first process of a host, in namespaces of its own for network, mounts, processes and names.
# $1: the host's directory, $2: its name, further arguments: paths under /tmp that it shares with this machine.
set -euo pipefail
directory=$1 name=$2
shift 2
hostname "$name"
kept=0
for path in "$@"; do
  mkdir -p "$directory/kept/$kept"
  mount --rbind "$path" "$directory/kept/$kept"
  kept=$((kept + 1))
done
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs -o size=2g,mode=1777 tmpfs /tmp
kept=0
for path in "$@"; do
  mkdir -p "$path"
  mount --rbind "$directory/kept/$kept" "$path"
  kept=$((kept + 1))
done
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mount --bind "$directory/passwd" /etc/passwd
mount --bind "$directory/../hosts" /etc/hosts
exec /usr/sbin/sshd -D -e -f "$directory/../sshd_config"
