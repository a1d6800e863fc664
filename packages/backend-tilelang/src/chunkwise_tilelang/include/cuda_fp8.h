// Stands before the CUDA toolkit's cuda_fp8.h and adds what TileLang's templates want of it: __nv_fp8_e8m0 and the
// conversions from and to it, which CUDA has from 12.8 on. TileLang asks the compiler's version, so a compiler of 12.8
// or newer that meets headers of 12.6 or 12.7 (a conda toolkit beside pip's runtime headers), or templates that name
// e8m0 under an older compiler, fail on every kernel for sm_89 and newer, also on those without any fp8.
//
// The conversions are declared and not defined: a kernel that really uses e8m0 then fails when it is linked, instead of
// computing something wrong. From 12.8 on nothing here has an effect.
#pragma once

#include_next <cuda_fp8.h>

// The headers' version decides, not the compiler's. nvcc has it from the runtime's headers, which it always reads. NVRTC
// reads none of those; there it is told by cuda_fp4.h, which came with the same release.
#if defined(__CUDACC_RTC__)
#if !__has_include(<cuda_fp4.h>)
#define CHUNKWISE_DECLARE_E8M0
#endif
#elif defined(CUDART_VERSION) && CUDART_VERSION < 12080
#define CHUNKWISE_DECLARE_E8M0
#endif

#if defined(CHUNKWISE_DECLARE_E8M0)

#include <cuda_bf16.h>

struct __nv_fp8_e8m0 {
  __nv_fp8_storage_t __x;
};
struct alignas(2) __nv_fp8x2_e8m0 {
  __nv_fp8x2_storage_t __x;
};
struct alignas(4) __nv_fp8x4_e8m0 {
  __nv_fp8x4_storage_t __x;
};

extern __device__ __nv_bfloat16_raw __nv_cvt_e8m0_to_bf16raw(__nv_fp8_storage_t);
extern __device__ __nv_bfloat162_raw __nv_cvt_e8m0x2_to_bf162raw(__nv_fp8x2_storage_t);
extern __device__ __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_e8m0(__nv_bfloat16_raw, __nv_saturation_t,
                                                                  enum cudaRoundMode);
extern __device__ __nv_fp8x2_storage_t __nv_cvt_bfloat162raw_to_e8m0x2(__nv_bfloat162_raw, __nv_saturation_t,
                                                                       enum cudaRoundMode);
extern __device__ __nv_fp8_storage_t __nv_cvt_float_to_e8m0(float, __nv_saturation_t, enum cudaRoundMode);
extern __device__ __nv_fp8x2_storage_t __nv_cvt_float2_to_e8m0x2(float2, __nv_saturation_t, enum cudaRoundMode);
extern __device__ __nv_fp8_storage_t __nv_cvt_double_to_e8m0(double, __nv_saturation_t, enum cudaRoundMode);
extern __device__ __nv_fp8x2_storage_t __nv_cvt_double2_to_e8m0x2(double2, __nv_saturation_t, enum cudaRoundMode);

#endif
