// Time, for the profile of a step. Files that are compiled per instruction set include only this declaration: the
// definition needs a standard header, which they must not include (see vec.h).
#pragma once

#include <stdint.h>

namespace minifloat {

int64_t nanoseconds();

}  // namespace minifloat
