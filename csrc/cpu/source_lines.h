// Which line of the .metal file code of a debug module is of.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../msl/runtime/abi.h"

namespace metalmm::cpu {

// Code that returns to pc[0], and its callers: the next one, and the last two that are of the module. Null: there are fewer.
struct Code {
  std::array<const void*, 4> pc;
  bool operator==(const Code& o) const { return pc == o.pc; }
  bool operator<(const Code& o) const { return pc < o.pc; }
};
struct HashOfCode {
  size_t operator()(const Code& code) const {
    uintptr_t hash = 0;
    for (const void* pc : code.pc) hash = (hash ^ reinterpret_cast<uintptr_t>(pc)) * 0x9e3779b97f4a7c15u;
    return hash >> 32;
  }
};
// Stands in a message for its line, until somebody has the time to look: a program is asked.
std::string marked(Code code);
std::string marked(const abi::Site& site);  // whose file stands in the message without its folder
// places: gets file:line of each, with the folder.
std::string with_lines(const std::string& message, std::vector<std::string>* places = nullptr);

}  // namespace metalmm::cpu
