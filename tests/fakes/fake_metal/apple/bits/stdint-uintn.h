// As on Darwin, where uint64_t is no size_t: std::min of the two does not compile.
#pragma once
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
