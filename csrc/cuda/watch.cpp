#include "watch.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <sstream>

#include "../core/error.h"

namespace metalmm::cuda {
namespace {

constexpr uint32_t kThreadgroup = 4, kLineBits = 20;  // python/metalmm/ptx.py

static_assert(offsetof(Watch, end) == 2048 && offsetof(Watch, count) == 4096 && offsetof(Watch, access) == 4104 &&
                  offsetof(Watch, at) == 4112 && offsetof(Watch, group) == 4120 && offsetof(Watch, thread) == 4132 &&
                  offsetof(Watch, hidden) == 4136,
              "as python/metalmm/ptx.py has it");

const uint8_t* pointer(Address address) { return reinterpret_cast<const uint8_t*>(address); }

}  // namespace

Watched::Watched(Home& home, Module module) {
  const Driver& cu = driver();
  size_t size = 0;
  auto find = [&](Address* address, const std::string& name) {
    home.check(cu.module_global(address, &size, module, name.c_str()), "looking for a variable of a kernel in debug mode");
  };
  find(&watch_, "metalmm_watch");
  if (size != sizeof(Watch)) throw Error(ErrorKind::device, "a kernel in debug mode was built for another version of metalmm");
  auto read = [&](const std::string& name) {
    Address address = 0;
    find(&address, name);
    std::string bytes(size, 0);
    home.check(cu.copy_out(bytes.data(), address, size, nullptr), "reading a variable of a kernel in debug mode");
    home.check(cu.stream_synchronize(nullptr), "reading a variable of a kernel in debug mode");
    return bytes;
  };
  std::istringstream lines(read("metalmm_files").c_str());
  for (std::string line; std::getline(lines, line);) files_.push_back(line);
  std::string own = read("metalmm_own");
  for (size_t i = 0; i + 16 <= own.size() && own_.size() < kMaxSpans / 2; i += 16) {
    uint64_t words[2];
    std::memcpy(words, own.data() + i, sizeof(words));
    own_.push_back({0, pointer(words[0]), pointer(words[0]) + words[1]});
  }
}

void Watched::allow(Home& home, const std::vector<Bound>& bound, uint32_t hidden, Stream stream) {
  Watch watch{};
  watch.hidden = hidden;
  auto add = [&](const Bound& b) {
    watch.begin[watch.count] = reinterpret_cast<Address>(b.begin);
    watch.end[watch.count++] = reinterpret_cast<Address>(b.end);
  };
  for (const Bound& b : bound) add(b);
  for (const Bound& b : own_) add(b);
  home.check(driver().copy_in(watch_, &watch, sizeof(watch), stream), "saying what a kernel may touch");
  home.check(driver().stream_synchronize(stream), "saying what a kernel may touch");
}

std::string Watched::refused(Home& home, const std::vector<Bound>& bound, const LaunchHead& head, Stream stream) const {
  Watch watch;
  home.check(driver().copy_out(&watch, watch_, sizeof(watch), stream), "asking what a kernel touched");
  home.check(driver().stream_synchronize(stream), "asking what a kernel touched");
  if (!watch.refused) return {};
  uint32_t size = watch.access & 255, kind = watch.access >> 8, file = watch.site >> kLineBits;
  bool threadgroup = kind & kThreadgroup, aligned = watch.at % size == 0;
  std::string where = threadgroup ? "in threadgroup memory" : place_of(pointer(watch.at), bound.data(), bound.size());
  auto access = static_cast<abi::Access>(kind % kThreadgroup);
  std::string at = file < files_.size() ? files_[file] + ":" + std::to_string(watch.site % (1u << kLineBits)) : "";
  std::string text = !aligned ? text_of_misalignment(at, size) : text_of_refusal(access, size) + (at.empty() ? "" : " at " + at);
  auto number = [](uint32_t x, uint32_t origin) { return std::to_string(x + origin); };
  text += ", by thread " + std::to_string(watch.thread) + " of threadgroup (" + number(watch.group.x, head.origin.x) + ", " +
          number(watch.group.y, head.origin.y) + ", " + number(watch.group.z, head.origin.z) + ")";
  if (!where.empty()) text += ", " + where;
  if (watch.refused > 1) text += "; " + std::to_string(watch.refused - 1) + " more accesses were refused";
  return text;
}

}  // namespace metalmm::cuda
