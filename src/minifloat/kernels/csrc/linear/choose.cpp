// Which path computes a call: one visible decision per instruction set.
#include "path.h"

namespace MINIFLOAT_ISA {

extern const Path kFloatPath;

const Path& choose_path(const Weight&, int64_t, int32_t) { return kFloatPath; }

}  // namespace MINIFLOAT_ISA
