/* The public header stands alone: this file is nothing else, compiled as strict C11. */
#include "colibri.h"
