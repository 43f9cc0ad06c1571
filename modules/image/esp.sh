# spark-image-esp OUT SIZE VOLUME-ID: a FAT32 file system with the files that standard input names,
# one "TARGET<TAB>SOURCE" a line.
#
# systemd-repart copies a folder with `mcopy -s`, which takes files in the order in which the build
# machine's file system lists them (systemd before 261; nixpkgs issue 537940): the same files then
# give other bytes elsewhere. Here every folder and file is made by itself, in order of its name.
out=$1 size=$2 volume_id=$3
export LC_ALL=C TZ=UTC MTOOLS_SKIP_CHECK=1
# FAT has no time before 1980
: "${SOURCE_DATE_EPOCH:=315532800}"
export SOURCE_DATE_EPOCH

copy=$(mktemp --directory)
trap 'rm -rf -- "$copy"' EXIT

truncate --size=0 -- "$out"
truncate --size="$size" -- "$out"
mkfs.vfat --invariant -F 32 -n SPARK-ESP -i "$volume_id" "$out" > /dev/null

declare -A made
while IFS=$'\t' read -r target source; do
  folder=
  IFS=/ read -ra parts <<< "${target#/}"
  for part in "${parts[@]:0:${#parts[@]}-1}"; do
    folder+=/$part
    if [[ -z ${made[$folder]-} ]]; then
      mmd -i "$out" "::$folder"
      made[$folder]=1
    fi
  done
  cp --no-preserve=mode -- "$source" "$copy/file"
  touch --date="@$SOURCE_DATE_EPOCH" -- "$copy/file"
  mcopy -m -i "$out" "$copy/file" "::/${target#/}"
done < <(sort --unique)
