# Installs the build into a fresh prefix, builds examples/ against it with find_package, and runs them.
#   cmake -DSOURCE=… -DBUILD=… -DWORK=… -DCXX=… -P install_test.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "${command}\nended with ${status}:\n${output}")
  endif()
  message(STATUS "${output}")
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
# The package may not look back into the source or build tree.
file(GLOB_RECURSE package ${WORK}/prefix/lib/cmake/cistron/*.cmake)
foreach(file IN LISTS package)
  file(READ ${file} text)
  string(FIND "${text}" "${SOURCE}" found)
  if(NOT found EQUAL -1)
    message(FATAL_ERROR "${file} names the source tree ${SOURCE}")
  endif()
endforeach()
# Copied, so that no header of the source tree can be found by accident.
file(COPY ${SOURCE}/examples DESTINATION ${WORK})
run(${CMAKE_COMMAND} -G Ninja -S ${WORK}/examples -B ${WORK}/build -DCMAKE_PREFIX_PATH=${WORK}/prefix
    -DCMAKE_CXX_COMPILER=${CXX})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/grouped_swiglu)
run(${WORK}/build/grouped_mlp_mxfp8)
run(${WORK}/build/train_tiny)
run(${WORK}/prefix/bin/cistron --version)
# The preset and its data are those of the installation, from any working directory.
file(MAKE_DIRECTORY ${WORK}/elsewhere)
execute_process(COMMAND ${WORK}/prefix/bin/cistron train --config-name L0_sanity --print-config
                WORKING_DIRECTORY ${WORK}/elsewhere RESULT_VARIABLE status OUTPUT_VARIABLE config
                ERROR_VARIABLE errors)
if(NOT status EQUAL 0 OR NOT config MATCHES "${WORK}/prefix/share/cistron/data/ecoli_k12_mg1655.fna.gz")
  message(FATAL_ERROR "the installed preset does not find its data:\n${config}${errors}")
endif()
