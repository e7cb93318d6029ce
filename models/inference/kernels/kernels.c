// One level of the kernel library: compiled with -DLEVEL=0 to 5, see common.h.
#include "common.h"
#include "amx.c"
#include "elementwise.c"
#include "gemm.c"
#include "gemv.c"
#include "attention.c"
#include "model.c"
