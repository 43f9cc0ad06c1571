# spark-image-root DEFINITION: make the root partition of a systemd-repart definition depend on
# nothing but the content of the files that it copies.
#
# - Its size is computed from the files. `Minimize=guess` would take it from the blocks that a trial
#   file system occupies on the build machine, which a compressing file system makes fewer.
# - Files with several names are copied first. A store with auto-optimise-store, or one that built a
#   package itself, has hard links where others have two files, and repart copies them as links.
# - So are files whose last access is before SOURCE_DATE_EPOCH: later times are cut to it, earlier
#   ones (a store that came out of an archive) would stay.
definition=$1
export LC_ALL=C
mapfile -t lines < <(sed --quiet 's/^CopyFiles=//p' "$definition")
if ((${#lines[@]} == 0)); then
  echo "$definition: copies no files" >&2
  exit 1
fi
sources=("${lines[@]%%:*}")

: "${SOURCE_DATE_EPOCH:=315532800}"
if [[ -n $(find "${sources[@]}" \( -type f -links +1 -o ! -newerat "@$SOURCE_DATE_EPOCH" \) \
  -print -quit) ]]; then
  plain=$PWD/plain
  echo "hard links or old times: copying everything to $plain first"
  sed --in-place '/^CopyFiles=/d' "$definition"
  for line in "${lines[@]}"; do
    source=${line%%:*}
    mkdir --parents -- "$plain${source%/*}"
    cp --recursive --preserve=mode --reflink=auto -- "$source" "$plain$source"
    echo "CopyFiles=$plain$line" >> "$definition"
  done
  sources=("${sources[@]/#/$plain}")
  # the store's time of change; the last access is now
  find "${sources[@]}" -exec touch --no-dereference -m --date=@1 {} +
fi

# Blocks of 4 KiB for contents, folders and long links; an inode has 256 bytes, and ext4 makes one
# for each 16 KiB of the partition. A tenth and 128 MiB more for the journal and ext4's own tables;
# the root grows on the first boot anyway.
blocks=0 inodes=0 names=0
while read -r kind size name; do
  inodes=$((inodes + 1))
  names=$((names + ${#name} + 16))
  case $kind in
    f) blocks=$((blocks + (size + 4095) / 4096)) ;;
    l) blocks=$((blocks + (size + 4036) / 4096)) ;;
    d) blocks=$((blocks + 1)) ;;
  esac
done < <(find "${sources[@]}" -printf '%y %s %f\n')
size=$(((blocks * 4096 + inodes * 256 + names * 2) * 11 / 10 + 134217728))
least=$((inodes * 16384 * 11 / 10))
if ((size < least)); then size=$least; fi
size=$(((size + 1048575) / 1048576 * 1048576))
echo "root partition: $size bytes"
printf 'SizeMinBytes=%s\nSizeMaxBytes=%s\n' "$size" "$size" >> "$definition"
