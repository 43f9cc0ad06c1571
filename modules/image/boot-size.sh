# spark-boot-size LIMIT FILE...: fail when what the firmware loads has more than LIMIT bytes.
limit=$1
shift
total=0
for file in "$@"; do
  size=$(stat --dereference --format=%s -- "$file")
  total=$((total + size))
  echo "$size bytes: $file"
done
if ((total > limit)); then
  echo "kernel and initrd have $total bytes, more than $limit (services.spark.image.maxBootBytes):" >&2
  echo "a DGX Spark's firmware hangs when it loads about 209 MB. Take modules and firmware out of" >&2
  echo "the initrd: boot.initrd.availableKernelModules, boot.initrd.kernelModules, boot.initrd.systemd.storePaths." >&2
  exit 1
fi
