// Time, for the profile of a step. Apart from the files that are compiled per instruction set: it needs a standard
// header (vec.h says why they may not).
#pragma once

#include <stdint.h>

namespace minifloat {

int64_t nanoseconds();

}  // namespace minifloat
