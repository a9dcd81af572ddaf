# cmake --install, and find_package(cistron) for those who link the primitives into another trainer.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
if(NOT MPI_CXX_FOUND)
  set(MPI_CXX_FOUND FALSE)  # never an empty condition in the installed file
endif()
# Archives in an order, and everything that they need, come from the exported targets.
get_property(modules GLOBAL PROPERTY CISTRON_MODULES)
install(TARGETS ${modules} EXPORT cistron-targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT cistron-targets NAMESPACE cistron:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/cistron)
configure_package_config_file(cmake/cistron-config.cmake.in cistron-config.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/cistron)
write_basic_package_version_file(cistron-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/FindOneDNN.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/cistron-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/cistron-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/cistron)
install(DIRECTORY configs/ DESTINATION ${CMAKE_INSTALL_DATADIR}/cistron/configs)
# What the presets train on, where their relative paths find it: one folder above them.
install(DIRECTORY data/ DESTINATION ${CMAKE_INSTALL_DATADIR}/cistron/data)
