// Products of this instruction set (linear/linear.cpp), which a step calls without going through the C interface.
#pragma once

#include "../../native/api.h"

namespace MINIFLOAT_ISA {

int32_t linear(const minifloat_linear_args& args);
int32_t moe(const minifloat_moe_args& args);

}  // namespace MINIFLOAT_ISA
