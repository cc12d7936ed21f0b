// Sets the floating-point environment of IEEE 754, whatever the calling thread has set.
#pragma once

#include <cfenv>

namespace minifloat {

// While an object exists: no flush to zero, rounding to nearest. Its destructor restores the caller's settings.
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
