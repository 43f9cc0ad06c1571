# Make a CUDA_HOME tree out of the CUDA wheels: cuda-home.sh OUT DRIVER_LIBRARIES SITE_PACKAGES...
# The wheels lack what compilers look for: lib64, names without a version, and the driver's stub.
# Files stay links: nvcc finds its neighbours by the path it was called by.
set -euo pipefail
out=${1:?OUT} driver=${2:?DRIVER_LIBRARIES}
shift 2
mkdir -p "$out"
for site in "$@"; do
  cp -rs --no-preserve=mode "$site/nvidia/cu13/." "$out/"
done
ln -s lib "$out/lib64"
for library in "$out"/lib/lib*.so.*; do
  name=${library##*/}
  plain=$out/lib/${name%%.so.*}.so
  [ -e "$plain" ] || ln -s "$name" "$plain"
done
mkdir "$out/lib/stubs"
ln -s "$driver/libcuda.so.1" "$out/lib/stubs/libcuda.so"
