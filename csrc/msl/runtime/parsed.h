// What a compiler keeps of msl.h once it is parsed (python/metalmm/modules.py): with the vectors that most kernels have made of their
// templates, which is a tenth of a kernel's compilation.
#include "msl.h"

namespace metalmm::msl {
template <class... T> struct Made {
  static_assert((sizeof(vec<T, 2>) + ... + 0) > 0 && (sizeof(vec<T, 3>) + ... + 0) > 0 && (sizeof(vec<T, 4>) + ... + 0) > 0);
};
template struct Made<half, float, unsigned>;
}  // namespace metalmm::msl
