#pragma once
#include <stdexcept>
#include <string>

namespace metalmm {

// One for each exception class of metalmm.errors, in that file's order.
enum class ErrorKind {
  device,
  shape,
  dtype,
  layout,
  unknown_variant,
  unsupported,
  compile,
  compiler_not_found,
  kernel,
  closed,
  argument,
  count
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
  ErrorKind kind;
};

}  // namespace metalmm
