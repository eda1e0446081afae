#!/usr/bin/env bash
# Installs what ci/build left under target/dist, and a module file that points there.
set -euo pipefail

if (($# < 1 || $# > 2)) || [[ $1 == -* ]]; then
    cat >&2 <<'USAGE'
usage: packaging/install.sh PREFIX [MODULE_FOLDER]

PREFIX gets lib/libnccl-net-vccl.so, bin/vccl and share/doc/vccl. MODULE_FOLDER (a folder of MODULEPATH;
PREFIX/modulefiles by default) gets vccl/VERSION. DESTDIR is put in front of both, for packages.
USAGE
    exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
prefix=$1
modules=${2:-$prefix/modulefiles}
dest=${DESTDIR:-}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -1)
dist=$root/target/dist
[[ $prefix == /* && $modules == /* ]] || { echo "PREFIX and MODULE_FOLDER must be absolute" >&2 && exit 2; }
[[ -f $dist/lib/libnccl-net-vccl.so ]] || { echo "nothing built: run ci/build first" >&2 && exit 1; }

# A running job may have the old files mapped: install replaces them by new inodes.
install -D -m 755 "$dist/lib/libnccl-net-vccl.so" "$dest$prefix/lib/libnccl-net-vccl.so"
install -D -m 755 "$dist/bin/vccl" "$dest$prefix/bin/vccl"
install -D -m 644 -t "$dest$prefix/share/doc/vccl" "$root/README.md" "$root/LICENSE" "$root"/docs/*.md
mkdir -p "$dest$modules/vccl"
sed "s|^set root .*|set root $prefix|" "$root/modulefiles/vccl" >"$dest$modules/vccl/$version"
chmod 644 "$dest$modules/vccl/$version"
echo "installed vccl $version: $dest$prefix, module $dest$modules/vccl/$version"
