# Adds the fake Metal to _core, and compiles the Metal device's own files against it.
set(FAKE ${CMAKE_CURRENT_LIST_DIR})
set(FAKE_INCLUDE ${CMAKE_CURRENT_BINARY_DIR}/fake_metal)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${FAKE}/make_headers.py ${FAKE}/metal_api.json)
execute_process(COMMAND ${Python_EXECUTABLE} ${FAKE}/make_headers.py ${FAKE}/metal_api.json ${FAKE_INCLUDE} COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
# GNUstep asks for it under -fblocks; nothing here makes a block.
file(GENERATE OUTPUT ${FAKE_INCLUDE}/objc/blocks_runtime.h CONTENT "\n")
execute_process(COMMAND gnustep-config --variable=GNUSTEP_SYSTEM_HEADERS OUTPUT_VARIABLE GNUSTEP_HEADERS OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND gcc -print-file-name=include OUTPUT_VARIABLE GCC_HEADERS OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)

set(FAKE_SOURCES ${FAKE}/fake_core.mm ${FAKE}/fake_device.mm ${FAKE}/fake_descriptors.mm ${FAKE}/fake_commands.mm ${FAKE}/fake_execution.mm ${FAKE}/fake_mps.mm ${FAKE}/misuse.mm)
set(OBJC_OPTIONS -xobjective-c++ -fobjc-runtime=gcc -fblocks -fexceptions -D_NATIVE_OBJC_EXCEPTIONS -fconstant-string-class=NSConstantString -include ${FAKE}/darwin.h
  -isystem ${GNUSTEP_HEADERS} -idirafter ${GCC_HEADERS} -I${FAKE_INCLUDE} -Wall -Wextra -Werror -Werror=objc-method-access)
if(CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64)
  list(APPEND OBJC_OPTIONS -mf16c)  # __fp16 without a run-time library
endif()
set_source_files_properties(${METAL_SOURCES} PROPERTIES COMPILE_OPTIONS "${OBJC_OPTIONS}")
# The fake implements of each protocol what the library calls; anything else raises when it is called.
set_source_files_properties(${FAKE_SOURCES} PROPERTIES LANGUAGE CXX SKIP_PRECOMPILE_HEADERS ON
  COMPILE_OPTIONS "${OBJC_OPTIONS};-Wno-protocol;-Wno-objc-property-implementation;-Wno-incomplete-implementation;-Wno-deprecated-implementations")
target_sources(_core PRIVATE ${FAKE_SOURCES} ${FAKE}/personality.cpp ${FAKE}/../toy_device/toy_device.cpp)  # tests/devices/metal/test_new_device.py
target_link_libraries(_core PRIVATE gnustep-base objc)
