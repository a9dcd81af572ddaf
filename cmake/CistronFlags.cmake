# Compiler flags of the whole project.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
# Line tables are enough for stack traces and keep the link fast.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")

add_library(cistron_flags INTERFACE)
target_compile_options(cistron_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wno-unused-parameter>)
# g++ 12 warns about its own std::string (GCC bug 105651).
target_compile_options(cistron_flags INTERFACE
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>)
# Numbers must not depend on which instructions the compiler finds: a product and a sum are fused
# only where the source says so.
target_compile_options(cistron_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

# A program loads only the libraries that it uses: a test of data/ links ops/ and yet not oneDNN.
add_link_options(-Wl,--as-needed)

set(CISTRON_SANITIZE "" CACHE STRING "Comma-separated sanitizers, e.g. address,undefined")
if(CISTRON_SANITIZE)
  # Instrumented code compiles in two thirds of the time of -O2 and runs fast enough.
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1")
  add_compile_options(-fsanitize=${CISTRON_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${CISTRON_SANITIZE})
endif()
if(CISTRON_BUILD_FUZZERS)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

find_program(CISTRON_CCACHE ccache)
if(CISTRON_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CISTRON_CCACHE})
endif()
