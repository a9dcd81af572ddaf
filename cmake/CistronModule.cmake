# cistron_module(NAME SOURCES … HEADERS … [PUBLIC deps…] [PRIVATE deps…])
#   one static library `cistron_<name>` (slashes become underscores), alias `cistron::<name>`.
# cistron_cuda_sources(TARGET SOURCES … STUB …): sources of the CUDA backend, or what stands in for them.
# cistron_test(NAME SOURCES … DEPS … [LABELS …] [TIMEOUT s] [SLOW])
#   one GoogleTest program, registered as one ctest entry of that name. The label `threads` marks tests that
#   ThreadSanitizer runs; they must not run oneDNN on several threads.

# What ThreadSanitizer builds (scripts/sanitize.sh).
add_custom_target(threaded_tests)
# What scripts/build_cuda.sh builds: tests with the label `cuda`, which run on a GPU where there is one.
add_custom_target(cuda_tests)
# What scripts/fuzz.sh builds.
add_custom_target(fuzzers)

function(cistron_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;HEADERS;PUBLIC;PRIVATE" ${ARGN})
  string(REPLACE "/" "_" target "cistron_${name}")
  add_library(${target} STATIC ${ARG_SOURCES})
  string(REPLACE "/" "_" alias "${name}")
  add_library(cistron::${alias} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${alias})
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}
                                  FILES ${ARG_HEADERS})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                                              $<INSTALL_INTERFACE:include>)
  target_link_libraries(${target} PUBLIC ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE}
                                  $<BUILD_INTERFACE:cistron_flags>)
  target_compile_features(${target} PUBLIC cxx_std_20)  # users of the installed package need it too
  set_property(GLOBAL APPEND PROPERTY CISTRON_MODULES ${target})
endfunction()

# CUDA files compile as the target's other files do, but in Ninja's pool of them (CistronCuda.cmake): pools belong to
# targets, so the files have one of their own.
function(cistron_kernels target)
  set(objects ${target}_kernels)
  if(NOT TARGET ${objects})
    add_library(${objects} OBJECT)
    set_target_properties(${objects} PROPERTIES JOB_POOL_COMPILE cuda)
    target_link_libraries(${objects} PRIVATE $<TARGET_PROPERTY:${target},LINK_LIBRARIES> cistron_cuda_flags)
    target_compile_definitions(${objects} PRIVATE $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>)
    target_include_directories(${objects} PRIVATE ${PROJECT_SOURCE_DIR})
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
  endif()
  target_sources(${objects} PRIVATE ${ARGN})
endfunction()

function(cistron_cuda_sources target)
  cmake_parse_arguments(ARG "" "" "SOURCES;STUB" ${ARGN})
  if(CISTRON_CUDA)
    list(TRANSFORM ARG_SOURCES PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
    set(kernels ${ARG_SOURCES})
    list(FILTER kernels INCLUDE REGEX "[.]cu$")
    list(FILTER ARG_SOURCES EXCLUDE REGEX "[.]cu$")
    target_sources(${target} PRIVATE ${ARG_SOURCES})
    target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:cistron_cuda_flags> CUDA::cudart_static)
    if(kernels)
      cistron_kernels(${target} ${kernels})
    endif()
  else()
    list(TRANSFORM ARG_STUB PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
    target_sources(${target} PRIVATE ${ARG_STUB})
  endif()
endfunction()

function(cistron_test name)
  if(NOT CISTRON_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "SLOW" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} cistron_flags cistron_test_main GTest::gmock)
  target_compile_definitions(${name} PRIVATE CISTRON_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                                             CISTRON_BINARY_DIR="${PROJECT_BINARY_DIR}")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  # Idle OpenMP threads yield: tests share two cores.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
                       ENVIRONMENT "OMP_WAIT_POLICY=passive;ASAN_OPTIONS=allocator_may_return_null=1")
  if(ARG_SLOW)
    set_tests_properties(${name} PROPERTIES COST 100)  # starts first, or it runs alone in the end
  endif()
  if("cuda" IN_LIST ARG_LABELS)
    add_dependencies(cuda_tests ${name})
  endif()
  if("threads" IN_LIST ARG_LABELS)
    add_dependencies(threaded_tests ${name})
  endif()
endfunction()

# cistron_ranks(TEST PROGRAM SOURCES … DEPS …): a program that TEST starts on several ranks. TEST knows mpirun as
# CISTRON_MPIRUN and the program by its name in capitals: CISTRON_NCCL_RANK_TEST for nccl_rank_test.
function(cistron_ranks test program)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${program} ${ARG_SOURCES})
  target_link_libraries(${program} PRIVATE ${ARG_DEPS} cistron_flags GTest::gtest)
  set_target_properties(${program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_dependencies(${test} ${program})
  string(TOUPPER ${program} name)
  target_compile_definitions(${test} PRIVATE CISTRON_MPIRUN="${MPIEXEC_EXECUTABLE}"
                                             CISTRON_${name}="$<TARGET_FILE:${program}>")
endfunction()

# cistron_fuzzer(NAME SOURCE DEPS…): a libFuzzer program, built only with CISTRON_BUILD_FUZZERS.
function(cistron_fuzzer name source)
  if(NOT CISTRON_BUILD_FUZZERS)
    return()
  endif()
  add_executable(${name} ${source})
  target_link_libraries(${name} PRIVATE ${ARGN} cistron_flags)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fuzz)
  add_dependencies(fuzzers ${name})
endfunction()
