#pragma once
#include "../metalmm_macros.h"
