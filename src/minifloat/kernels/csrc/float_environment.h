// Arithmetic as IEEE 754 has it, whatever the calling thread has set. Not for the files that are compiled per instruction
// set: it includes a standard header (vec.h says why they may not).
#pragma once

#include <cfenv>

namespace minifloat {

// While it lives: no flush to zero, rounding to nearest. The caller's settings come back after it.
class DefaultFloatEnvironment {
  public:
    DefaultFloatEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

  private:
    std::fenv_t saved_;
};

}  // namespace minifloat
