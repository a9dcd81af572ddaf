# The CUDA backend, built by -DCISTRON_CUDA=ON (preset `cuda`). Without it every entry point is a stub that says so.
option(CISTRON_CUDA "Build the CUDA backend" OFF)
# Hopper needs the architecture-specific target `90a`, for wgmma and setmaxnreg.
set(CISTRON_CUDA_ARCHITECTURES "90a" CACHE STRING "Compute capabilities, e.g. \"80;90a;100a\"")
if(CISTRON_CUDA)
  # CMake 3.25 does not know the flag for C++20 of nvcc 13.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  if(CISTRON_CCACHE)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CISTRON_CCACHE})
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  add_library(cistron_cuda_flags INTERFACE)
  foreach(arch ${CISTRON_CUDA_ARCHITECTURES})
    target_compile_options(cistron_cuda_flags INTERFACE
      "$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_${arch},code=sm_${arch}>")
  endforeach()
  # Products and sums are fused only where the source says so, as on the CPU. ptxas' C7510 (wgmma serialised) is an
  # error. fmt 9 leaves constexpr off under nvcc unless told.
  target_compile_options(cistron_cuda_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;-DFMT_USE_CONSTEXPR=1;--expt-relaxed-constexpr;-Xptxas=--warning-as-error;-DNDEBUG>)
endif()
