#include "clock.h"

#include <chrono>

namespace minifloat {

int64_t nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace minifloat
