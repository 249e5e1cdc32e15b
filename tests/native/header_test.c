/* The public header stands alone: this file is compiled as strict C11, and as C++ by the test of the build. */
#include "colibri.h"
