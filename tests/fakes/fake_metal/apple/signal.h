// What csrc/cpu takes of Darwin's <signal.h> and Linux's does not have: the machine's state of an interrupted thread.
#pragma once
#define ucontext_t linux_ucontext_t
#include_next <signal.h>
#undef ucontext_t

struct darwin_thread_state {
  unsigned long long __x[29], __fp, __lr, __sp, __pc;
};
struct darwin_mcontext {
  darwin_thread_state __ss;
};
struct ucontext_t {
  darwin_mcontext* uc_mcontext;
};
#define __darwin_arm_thread_state64_get_sp(state) ((state).__sp)
#define __darwin_arm_thread_state64_set_sp(state, to) ((state).__sp = (unsigned long long)(to))
#define __darwin_arm_thread_state64_set_fp(state, to) ((state).__fp = (unsigned long long)(to))
