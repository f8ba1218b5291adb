// clang gives Objective-C++ for GCC's runtime that runtime's unwinder, which ends the process on C++ exceptions. There is no
// @catch in this code, so C++'s own does; this symbol shadows libobjc's inside the extension.
#include <unwind.h>

extern "C" _Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class, _Unwind_Exception*, _Unwind_Context*);
extern "C" __attribute__((visibility("hidden"))) _Unwind_Reason_Code __gnu_objc_personality_v0(int version, _Unwind_Action actions,
                                                                                               _Unwind_Exception_Class kind,
                                                                                               _Unwind_Exception* exception,
                                                                                               _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, kind, exception, context);
}
