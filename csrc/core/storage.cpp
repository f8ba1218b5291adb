#include "storage.h"

namespace metalmm {

const char* const kFormatNames[kFormats] = {"dense", "q8_0", "q4_0", "affine8", "affine4", "q5_k", "q4_k",
                                            "q8_k",  "q6_k", "q2_k", "nvfp4",   "fp4",     "fp8"};

namespace {

uint32_t usual_group(const Storage& s) { return s.is_dense() ? 0 : s.is_affine() ? 64 : 32; }

}  // namespace

std::string Storage::name() const {
  std::string text = kFormatNames[format];
  if (group != usual_group(*this)) text += ":" + std::to_string(group);
  return canonical ? text + ":canonical" : text;
}

std::string Storage::name_of(unsigned index) {
  Storage s{static_cast<Format>((index + 1) / 2), index && index % 2 == 0, 0};
  s.group = usual_group(s);
  return s.name();
}

std::optional<Storage> Storage::parse(const std::string& text) {
  for (unsigned i = 0; i < kFormats; i++)
    for (uint32_t group : {32u, 64u, 128u, 0u})
      for (bool canonical : {false, true}) {
        Storage s{static_cast<Format>(i), canonical, group};
        bool exists = s.is_dense() ? !group && !canonical : s.is_affine() ? group != 0 : group == 32;
        if (exists && s.name() == text) return s;
      }
  return std::nullopt;
}

}  // namespace metalmm
