// Stands in for the toolkit's header: ../../nvtx.h keeps what was named.
#pragma once

extern "C" {
int nvtxRangePushA(const char* message);
int nvtxRangePop();
}
