#!/usr/bin/env bash
# Make Nix and the flake's inputs available to `pytest -m nix`, and write where they are to
# ~/.config/spark-appliance/nix-test.env.
#
#   setup-nix.sh [--root DIR] --nixpkgs TREE --poetry2nix TREE --dgx-spark TREE [--pythons DIR]
#
# TREE is a plain folder with the input's files (`git archive REV | tar -x`). Nix is used as it is
# when it is installed and new enough (2.18); else, as root on Debian, a Debian 13 root is made in
# DIR (default ~/.cache/spark-appliance/nixroot) and Nix runs in there. With --pythons (a folder with
# unpatched CPythons, 3.13.0/) that root also gets the tools for hosttools/. Safe to run again.
set -euo pipefail

root="" nixpkgs="" poetry2nix="" dgx_spark="" pythons=""
here=$(dirname "$(readlink -f "$0")")
while (($#)); do
  case $1 in
    --root) root=$2 ;;
    --nixpkgs) nixpkgs=$2 ;;
    --poetry2nix) poetry2nix=$2 ;;
    --dgx-spark) dgx_spark=$2 ;;
    --pythons) pythons=$2 ;;
    *) sed -n '2,11p' "$0" >&2; exit 2 ;;
  esac
  shift 2
done
for tree in "$nixpkgs/nixos" "$poetry2nix/default.nix" "$dgx_spark/modules/dgx-spark.nix"; do
  [[ -e $tree ]] || { echo "setup-nix: $tree does not exist; see the top of $0" >&2; exit 2; }
done

new_enough() { # COMMAND...
  local version
  version=$("$@" --version 2>/dev/null | grep -oE '[0-9]+\.[0-9]+' | head -n 1) || return 1
  [[ $(printf '%s\n' 2.18 "$version" | sort -V | head -n 1) == 2.18 ]]
}

command=(nix)
if [[ -n $root ]] || ! new_enough nix; then
  root=${root:-$HOME/.cache/spark-appliance/nixroot}
  [[ $(id -u) == 0 ]] || { echo "setup-nix: making a Debian root in $root needs root" >&2; exit 1; }
  if [[ ! -x $root/usr/bin/apt-get ]]; then
    command -v debootstrap >/dev/null || apt-get install -y -q debootstrap
    debootstrap --variant=minbase --include=ca-certificates trixie "$root"
  fi
  mounted() { mountpoint -q "${@: -1}" || mount "$@"; }
  mounted -t proc proc "$root/proc"
  mounted --bind /dev "$root/dev"
  if [[ ! -x $root/usr/bin/nix ]]; then
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    chroot "$root" sh -c 'apt-get update -q && DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -q --no-install-recommends nix-bin git'
  fi
  mkdir -p "$root/etc/nix"
  # one user and no builders' group; fsync of each .drv would make minutes of seconds
  [[ -e $root/etc/nix/nix.conf ]] && grep -q build-users-group "$root/etc/nix/nix.conf" ||
    printf '%s\n' 'build-users-group =' 'sandbox = false' 'substituters =' \
      'experimental-features = nix-command flakes' 'fsync-metadata = false' \
      'extra-platforms = aarch64-linux' 'max-jobs = 2' > "$root/etc/nix/nix.conf"
  command=(chroot "$root" nix)
fi

# A `path:` input is copied at every call, unless it is a store path with the name "source".
add() { # TREE
  local place=${root:-}/tmp/spark-setup-nix/source
  rm -rf "$place"
  mkdir -p "$(dirname "$place")"
  cp -a "$1" "$place"
  complete "$place"
  "${command[@]}" --extra-experimental-features nix-command store add-path --name source \
    "${place#"${root:-}"}"
  rm -rf "$place"
}

# A nixpkgs tree whose large generated files are missing has no Haskell packages: programs made
# of them become empty ones, which is enough to evaluate.
complete() { # TREE
  [[ -d $1/pkgs/by-name && ! -e $1/pkgs/development/haskell-modules/hackage-packages.nix ]] ||
    return 0
  local stub='{ writeShellScriptBin }: writeShellScriptBin "NAME" "exit 0" // { compiler.bootstrapAvailable = false; }'
  local name
  for name in pandoc nixfmt; do
    printf '%s\n' "${stub/NAME/$name}" > "$1/pkgs/by-name/${name:0:2}/$name/package.nix"
  done
}

host_tree() {
  local place=$root/tmp/spark-setup-nix/source
  rm -rf "$place.plain"
  cp -a "$nixpkgs" "$place.plain"
  complete "$place.plain"
  "$here/hosttools/make-tree" "$place.plain" "$place" >&2
  "${command[@]}" --extra-experimental-features nix-command store add-path --name source \
    "${place#"$root"}"
  rm -rf "$place" "$place.plain"
}

if [[ -n $pythons ]]; then
  [[ -n $root ]] || { echo "setup-nix: --pythons needs --root" >&2; exit 2; }
  chroot "$root" sh -c 'DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    binutils binutils-multiarch brotli bzip2 cmake cpio curl diffutils fakeroot file gawk g++ gcc git jq kmod \
    less liburing-dev libxml2-utils make ninja-build nfs-common openssl patch patchelf perl pkg-config \
    procps python3 python3-pyelftools python3-toml python3-yaml rsync shellcheck systemd udev unzip \
    util-linux xsltproc xxd xz-utils zip zstd' >&2
  mkdir -p "$root/opt/py"
  for version in "$pythons"/3.1[23].*; do
    [[ -e $root/opt/py/$(basename "$version") ]] || cp -a "$version" "$root/opt/py/"
  done
fi

config=$HOME/.config/spark-appliance/nix-test.env
mkdir -p "$(dirname "$config")"
{
  echo "# written by setup-nix.sh"
  echo "SPARK_NIX=${command[*]}"
  echo "SPARK_NIX_ROOT=${root:-/}"
  echo "SPARK_NIXPKGS=$(add "$nixpkgs")"
  echo "SPARK_POETRY2NIX=$(add "$poetry2nix")"
  echo "SPARK_DGX_SPARK=$(add "$dgx_spark")"
  [[ -z $pythons ]] || echo "SPARK_NIX_HOST_NIXPKGS=$(host_tree)"
} > "$config.part"
mv "$config.part" "$config"
cat "$config"
