// The shared library is the static core, whole; this file only gives it a translation unit.
#include "spark_engram.h"
