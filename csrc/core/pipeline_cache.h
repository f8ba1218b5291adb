// A device's pipelines by variant and specialization: a look-up on the way of every call.
#pragma once
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "variant.h"

namespace metalmm {

class PipelineCache {
 public:
  using Slot = std::shared_ptr<Pipeline>;
  // Null on a miss. Valid until the cache changes.
  const Slot* find(const Variant& v, unsigned specialization) const {
    if (v.index >= rows_.size() || !rows_[v.index]) return nullptr;
    const auto& of_kind = (*rows_[v.index])[specialization / kOfAKind];
    return of_kind && (*of_kind)[specialization % kOfAKind] ? &(*of_kind)[specialization % kOfAKind] : nullptr;
  }
  void keep(const Variant& v, unsigned specialization, Slot pipeline) {
    if (rows_.size() <= v.index) rows_.resize(v.index + 1);
    if (!rows_[v.index]) rows_[v.index] = std::make_unique<Row>();
    auto& of_kind = (*rows_[v.index])[specialization / kOfAKind];
    if (!of_kind) of_kind = std::make_unique<std::array<Slot, kOfAKind>>();
    (*of_kind)[specialization % kOfAKind] = std::move(pipeline);
  }
  void forget(const Variant& v) {
    changes_++;
    if (v.index < rows_.size()) rows_[v.index].reset();
  }
  uint64_t changes() const { return changes_; }    // how often something was forgotten
  std::vector<std::shared_ptr<void>> take_all() {  // whoever lets go of them may have to wait
    changes_++;
    std::vector<std::shared_ptr<void>> all;
    for (auto& row : std::exchange(rows_, {}))
      if (row) all.push_back(std::move(row));
    return all;
  }

 private:
  using Row = std::array<std::unique_ptr<std::array<Slot, kOfAKind>>, kKinds>;
  uint64_t changes_ = 0;
  std::vector<std::unique_ptr<Row>> rows_;  // by the variant's index
};

}  // namespace metalmm
