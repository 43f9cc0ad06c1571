# usage: spark-engram-format FSTYPE DEVICE
# Makes a file system on a device that holds nothing at all; leaves every other device alone.
# A device that already has exactly this file system is fine: then there is nothing to do.

fstype=${1:?usage: spark-engram-format FSTYPE DEVICE}
device=${2:?usage: spark-engram-format FSTYPE DEVICE}
edge=$((16 * 1024 * 1024)) # bytes looked at on each end

refuse() {
  echo "spark-engram-format: $device $1; nothing was changed." >&2
  echo "Use another device, or empty this one yourself (wipefs --all, blkdiscard) if it may go." >&2
  exit 1
}

device=$(readlink -e -- "$device") || { echo "spark-engram-format: $2 does not exist" >&2; exit 1; }

# 0: something was recognised, 2: nothing; anything else is a failure and no reason to write
status=0
found=$(blkid --probe --output value --match-tag TYPE -- "$device") || status=$?
case $status in
  0)
    if [ "$found" = "$fstype" ]; then
      echo "spark-engram-format: $device already has $fstype"
      exit 0
    fi
    refuse "holds ${found:-a partition table or another signature}"
    ;;
  2) ;;
  *) refuse "could not be examined (blkid: status $status; more than one signature looks like this)" ;;
esac

signatures=$(wipefs --no-act --parsable -- "$device") || refuse "could not be examined (wipefs)"
[ -z "$signatures" ] || refuse "holds signatures: $signatures"

if [ -b "$device" ]; then
  [ "$(lsblk --noheadings --raw --output NAME -- "$device" | wc -l)" -eq 1 ] ||
    refuse "has partitions or is part of another device"
  size=$(blockdev --getsize64 "$device")
else
  size=$(stat --format %s -- "$device")
fi

[ "$size" -ge $((2 * edge)) ] || refuse "is only $size bytes large"
zero() { cmp --silent --bytes="$edge" --ignore-initial="$1":0 -- "$device" /dev/zero; }
zero 0 || refuse "has data in its first $edge bytes"
zero $((size - edge)) || refuse "has data in its last $edge bytes"

# --- it is empty ---
echo "spark-engram-format: making $fstype on empty $device ($size bytes)"
case $fstype in
  # the default number of inodes takes 1.5 % of the disk for a dozen files
  ext4) mkfs.ext4 -q -L spark-engram -T largefile4 -m 0 -- "$device" ;;
  xfs) mkfs.xfs -q -L spark-engram -- "$device" ;;
  *) refuse "was to get $fstype, which is not supported" ;;
esac
