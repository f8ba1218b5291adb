// Which dispatches of a concurrent encoder must wait for earlier ones.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace metalmm {

struct Span {
  uintptr_t begin, end;
};

// A set of addresses as sorted, disjoint spans.
class SpanSet {
 public:
  bool overlaps(Span s) const {
    if (is_past_all(s)) return false;
    auto it = first_ending_after(s.begin);
    return it != spans_.end() && it->begin < s.end;
  }
  void insert(Span s) {
    if (is_past_all(s)) return spans_.push_back(s);  // as buffers mostly come
    auto first = first_ending_after(s.begin), last = first;
    for (; last != spans_.end() && last->begin < s.end; ++last) {
      s.begin = std::min(s.begin, last->begin);
      s.end = std::max(s.end, last->end);
    }
    if (first == last) {
      spans_.insert(first, s);
    } else {
      *spans_.erase(first, last - 1) = s;
    }
  }
  void clear() { spans_.clear(); }
  size_t size() const { return spans_.size(); }

 private:
  bool is_past_all(Span s) const { return spans_.empty() || spans_.back().end <= s.begin; }
  std::vector<Span>::const_iterator first_ending_after(uintptr_t begin) const {
    return std::partition_point(spans_.begin(), spans_.end(), [&](const Span& x) { return x.end <= begin; });
  }
  std::vector<Span>::iterator first_ending_after(uintptr_t begin) {
    return std::partition_point(spans_.begin(), spans_.end(), [&](const Span& x) { return x.end <= begin; });
  }
  std::vector<Span> spans_;
};

// What the dispatches since the last barrier read and write, by memory and not by buffer: two may share it.
class Hazards {
 public:
  void read(Span s) {
    for (uint32_t i = 0; i < read_count_; i++)
      if (reads_now_[i].begin == s.begin && reads_now_[i].end == s.end) return;  // of operands that are not there
    reads_now_[read_count_++] = s;
  }
  void write(Span s) { writes_now_[write_count_++] = s; }

  // Whether the dispatch just described must not run beside those before it; if so, a barrier is taken to stand here.
  bool next() {
    bool needed = false;
    for (uint32_t i = 0; i < write_count_ && !needed; i++) needed = written_.overlaps(writes_now_[i]) || read_.overlaps(writes_now_[i]);
    for (uint32_t i = 0; i < read_count_ && !needed; i++) needed = written_.overlaps(reads_now_[i]);
    if (needed) clear();
    for (uint32_t i = 0; i < write_count_; i++) written_.insert(writes_now_[i]);
    for (uint32_t i = 0; i < read_count_; i++) read_.insert(reads_now_[i]);
    read_count_ = write_count_ = 0;
    return needed;
  }
  void clear() {
    read_.clear();
    written_.clear();
  }

 private:
  static constexpr uint32_t kMaxSpans = 31;  // buffers of a dispatch
  Span reads_now_[kMaxSpans], writes_now_[kMaxSpans];
  uint32_t read_count_ = 0, write_count_ = 0;
  SpanSet read_, written_;
};

}  // namespace metalmm
