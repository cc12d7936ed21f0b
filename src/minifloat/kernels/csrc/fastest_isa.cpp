// Prints the name of the instruction set that is the fastest on this processor: a build for this machine alone asks it.
#include "processor.h"

#include <stdio.h>
#include <string.h>

int main() {
    struct Isa {
        const char* name;
        bool (*supported)();
    };
#define MINIFLOAT_ROW(isa) {#isa, minifloat::has_##isa},
    const Isa isas[] = {MINIFLOAT_FOR_EACH_ISA(MINIFLOAT_ROW)};
    minifloat::init_processor();
    for (const Isa& isa : isas) {
        if (!isa.supported() || (strcmp(isa.name, "avx512_bf16") == 0 && minifloat::prefers_float32())) continue;
        return puts(isa.name) < 0;
    }
    return 1;
}
