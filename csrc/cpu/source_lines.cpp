#include "source_lines.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace metalmm::cpu {

namespace {

// The innermost call that is not of the runtime's headers; empty: nobody knows.
std::string line_of(uintptr_t pc) {
  Dl_info module{};
  if (!pc || !dladdr(reinterpret_cast<void*>(pc), &module) || !module.dli_fname) return {};
  char offset[32];
  std::snprintf(offset, sizeof(offset), "0x%jx", static_cast<uintmax_t>(pc - 1 - reinterpret_cast<uintptr_t>(module.dli_fbase)));
  std::string file = module.dli_fname;
  if (file.find('\'') != std::string::npos) return {};
  std::unique_ptr<FILE, int (*)(FILE*)> lines(popen(("addr2line -i -e '" + file + "' " + offset + " 2>/dev/null").c_str(), "r"), &pclose);
  char line[4096];
  while (lines && std::fgets(line, sizeof(line), lines.get())) {
    std::string found = line;
    found.erase(found.find_last_not_of("\n") + 1);
    found = found.substr(0, found.find(" (discriminator"));
    if (size_t name = found.rfind("/<"); name != std::string::npos) found = found.substr(name + 1);  // of no file: <source>
    if (found.find("/.new-") != std::string::npos) continue;                                         // of the text that was made of it
    if (found.find("msl/runtime/") == std::string::npos && found.find("??") == std::string::npos &&
        found.find_last_not_of("0123456789") + 1 < found.size() && found.substr(found.find_last_of(':')) != ":0")
      return found;
  }
  return {};
}

constexpr char kMark = 1, kSite = 2;

}  // namespace

std::string marked(Code code) {
  char text[32];
  std::string all(1, kMark);
  for (const void* pc : code.pc) {
    std::snprintf(text, sizeof(text), "%jx ", static_cast<uintmax_t>(reinterpret_cast<uintptr_t>(pc)));
    all += text;
  }
  return all + kMark;
}

std::string marked(const abi::Site& site) { return kSite + std::string(site.file) + ":" + std::to_string(site.line) + kSite; }

std::string with_lines(const std::string& message, std::vector<std::string>* places) {
  std::string text;
  for (size_t at = 0; at < message.size();) {
    size_t begin = message.find_first_of({kMark, kSite}, at),
           end = begin == std::string::npos ? begin : message.find(message[begin], begin + 1);
    text += message.substr(at, begin - at);
    if (end == std::string::npos) break;
    std::string line;
    if (message[begin] == kSite) {
      line = message.substr(begin + 1, end - begin - 1);
      text += line.substr(line.rfind('/') + 1);
    } else {
      char* next = const_cast<char*>(message.c_str()) + begin + 1;
      for (int i = 0; i < 4 && line.empty(); i++) line = line_of(std::strtoull(next, &next, 16));
      if (!line.empty()) text += " (" + line + ")";
    }
    if (places && !line.empty()) places->push_back(line);
    at = end + 1;
  }
  return text;
}

}  // namespace metalmm::cpu
