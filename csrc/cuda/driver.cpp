#include "driver.h"

#include <dlfcn.h>

#include <cstdlib>

#include "../core/error.h"

namespace metalmm::cuda {
namespace {

Driver load() {
  Driver d;
  const char* chosen = std::getenv("METALMM_LIBCUDA");
  const char* path = chosen && *chosen ? chosen : "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    d.missing = std::string(path) + " cannot be loaded (" + dlerror() + "); it comes with NVIDIA's driver";
    return d;
  }
#define METALMM_FIND(name, symbol, parameters)                          \
  d.name = reinterpret_cast<decltype(d.name)>(dlsym(library, #symbol)); \
  if (!d.name && d.missing.empty()) d.missing = std::string(path) + " has no " #symbol "; metalmm needs a driver of CUDA 12 or newer";
  METALMM_CUDA_FUNCTIONS(METALMM_FIND)
#undef METALMM_FIND
  if (!d.missing.empty()) return d;
  if (Result r = d.init(0)) d.missing = "NVIDIA's driver does not start: " + d.text(r);
  return d;
}

}  // namespace

std::string Driver::text(Result r) const {
  const char *name = nullptr, *words = nullptr;
  if (error_name) error_name(r, &name);
  if (error_string) error_string(r, &words);
  return std::string(name ? name : ("error " + std::to_string(r)).c_str()) + (words ? std::string(", ") + words : "");
}

void Driver::check(Result r, const char* what) const {
  if (r) throw Error(ErrorKind::device, std::string("cuda: ") + what + ": " + text(r));
}

const Driver& driver() {
  static const Driver* d = new Driver(load());
  return *d;
}

std::vector<std::string> gpu_names() {
  const Driver& cu = driver();
  int count = 0;
  if (!cu.missing.empty() || cu.device_count(&count)) return {};
  std::vector<std::string> names;
  for (int i = 0; i < count; i++) {
    DeviceNumber gpu = 0;
    char name[256] = {};
    if (!cu.device_get(&gpu, i) && !cu.device_name(name, sizeof(name), gpu)) names.push_back(name);
  }
  return names;
}

}  // namespace metalmm::cuda
