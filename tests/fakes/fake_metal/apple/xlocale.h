// What libc++ takes of Darwin's <xlocale.h>.
#pragma once
#include <ctype.h>
#include <locale.h>
#undef isdigit_l
#undef isxdigit_l
extern "C" {
int sscanf_l(const char*, locale_t, const char*, ...);
int snprintf_l(char*, size_t, locale_t, const char*, ...);
int asprintf_l(char**, locale_t, const char*, ...);
lconv* localeconv_l(locale_t);
}
