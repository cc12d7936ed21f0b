// Time, for the profile of a step.
#pragma once

#include <stdint.h>

namespace minifloat {

int64_t nanoseconds();

}  // namespace minifloat
