// Everything a lowered .metal file is compiled against.
#pragma once
#include "internals.h"
#include "kernel.h"
