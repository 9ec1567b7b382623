// The toolkit's header of this name, as far as it is used. Values are the toolkit's.
#pragma once

enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
using cudaDataType = cudaDataType_t;
