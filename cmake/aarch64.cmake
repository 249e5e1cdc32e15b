# Cross-building for aarch64 Linux, tests run by qemu-user. Debian: gcc-aarch64-linux-gnu qemu-user-static
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CROSSCOMPILING_EMULATOR "qemu-aarch64-static;-L;/usr/aarch64-linux-gnu")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# The golden test runs on each of these processors, which must choose these kernels.
set(COLIBRI_EMULATED_CPUS cortex-a57=scalar cortex-a76=neon max=i8mm)
