// One level of the kernel library: compiled with -DLEVEL=0 to 5, see common.h.
#include "common.h"
#include "amx.c"
#include "elementwise.c"
#include "gemm.c"
#include "gemv.c"
#include "attention.c"
#include "model.c"

// Whether this process may run the level. AMX needs the kernel's permission for its tiles; the caller knows the CPU.
int prepare(void) {
#if LEVEL == AMX && !defined(EMULATE_AMX)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
#else
    return 1;
#endif
}
