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
  # nvcc takes up to 2 GiB a file: as many at once as leave every one 4 GiB, whatever -j says.
  cmake_host_system_information(RESULT memory_mib QUERY TOTAL_PHYSICAL_MEMORY)
  math(EXPR cuda_jobs "${memory_mib} / 4096")
  if(cuda_jobs LESS 1)
    set(cuda_jobs 1)
  endif()
  set(CISTRON_CUDA_JOBS ${cuda_jobs} CACHE STRING "CUDA files that Ninja compiles at once")
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS cuda=${CISTRON_CUDA_JOBS})
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

  # Headers of cudnn-frontend and cuDNN, where scripts/setup_cuda.sh leaves them. cuDNN is loaded at run time, never linked.
  find_path(CISTRON_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${PROJECT_SOURCE_DIR}/build/cudnn/include)
  find_path(CISTRON_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${PROJECT_SOURCE_DIR}/build/cudnn/nvidia/cudnn/include)
  if(CISTRON_CUDNN_FRONTEND_INCLUDE AND CISTRON_CUDNN_INCLUDE)
    message(STATUS "cuDNN: cudnn-frontend in ${CISTRON_CUDNN_FRONTEND_INCLUDE}, cuDNN in ${CISTRON_CUDNN_INCLUDE}")
  else()
    message(STATUS "cuDNN: left out, scripts/setup_cuda.sh takes the headers of cudnn-frontend")
  endif()

  # NCCL's header, for ranks with a GPU each (cistron/comm/nccl). The library is loaded at run time, never linked.
  option(CISTRON_NCCL "Build the NCCL transport where NCCL's header is found" ON)
  if(CISTRON_NCCL)
    find_path(CISTRON_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS}
              ${PROJECT_SOURCE_DIR}/build/nccl/nvidia/nccl/include)
  else()
    unset(CISTRON_NCCL_INCLUDE CACHE)
  endif()
  if(CISTRON_NCCL_INCLUDE)
    message(STATUS "NCCL: header in ${CISTRON_NCCL_INCLUDE}")
  else()
    message(STATUS "NCCL: left out, scripts/setup_cuda.sh takes its header; several ranks train on CPUs alone")
  endif()
endif()

# cistron_cudnn_sources(TARGET SOURCES … STUB …): sources that include cudnn-frontend, or what stands in for them.
function(cistron_cudnn_sources target)
  cmake_parse_arguments(ARG "" "" "SOURCES;STUB" ${ARGN})
  list(TRANSFORM ARG_SOURCES PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  list(TRANSFORM ARG_STUB PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  if(NOT CISTRON_CUDNN_FRONTEND_INCLUDE OR NOT CISTRON_CUDNN_INCLUDE)
    target_sources(${target} PRIVATE ${ARG_STUB})
    return()
  endif()
  target_sources(${target} PRIVATE ${ARG_SOURCES})
  # Plans are made once and cuDNN does the work: what matters is that 30,000 lines of headers compile in 16 s, not 35.
  set_source_files_properties(${ARG_SOURCES} TARGET_DIRECTORY ${target} PROPERTIES
    COMPILE_OPTIONS "-O0;-isystem;${CISTRON_CUDNN_FRONTEND_INCLUDE};-isystem;${CISTRON_CUDNN_INCLUDE}")
endfunction()
