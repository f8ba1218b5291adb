// What csrc/python takes of Darwin's <pthread.h> and Linux's does not have.
#pragma once
#include_next <pthread.h>
extern "C" int pthread_main_np(void);
