#include "variant.h"

#include <algorithm>
#include <cstdio>

namespace metalmm {

const char* const kLayoutNames[kLayouts] = {"nn", "tn", "nt", "tt"};

namespace {

std::string number_text(float x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", static_cast<double>(x));
  return text;
}

}  // namespace

std::string MatmulSpec::text() const {
  std::string others;
  for (unsigned i = 1; i < parts(); i++) others += "+" + std::to_string(part_n(i));
  std::string s = "m=" + std::to_string(m) + " n=" + std::to_string(n) + others + " k=" + std::to_string(k) +
                  " batch=" + std::to_string(batch) + " " + layout();
  if (a_type != kFloat16) s += " " + a_type.name();
  if (!b_storage.is_dense()) s += " " + b_storage.name();
  if (bias) s += " bias";
  if (swiglu) s += " swiglu";
  if (alpha != 1.0f) s += " alpha=" + number_text(alpha);
  if (c) s += " beta=" + number_text(beta);
  if (row_invariant) s += " row_invariant";
  return s;
}

const char* MatmulSpec::layout() const { return kLayoutNames[layout_index()]; }

uint64_t MatmulSpec::least_bytes() const {
  auto product = [](uint64_t x, uint64_t y) { return x * y; };
  uint64_t columns = 0;
  for (unsigned i = 0; i < parts(); i++) columns += part_n(i);
  uint64_t of_a_type = product(m, k) * batch + product(m, swiglu ? n : columns) * batch * (c ? 2 : 1) + (bias ? columns : 0);
  return of_a_type * a_type.size + b_bytes();
}

uint64_t MatmulSpec::b_bytes() const {
  uint64_t bytes = 0;
  for (unsigned i = 0; i < parts(); i++) {
    uint64_t columns = part_n(i);
    if (b_storage.is_dense())
      bytes += columns * k * a_type.size * (parts() == 1 ? batch : 1);
    else  // all of a batch multiply the same weights
      bytes +=
          b_storage.value_bytes(columns, k) + b_storage.groups(k) * columns * b_storage.scales_each() * b_storage.scale_type(a_type).size;
    if (b_storage.has_biases()) bytes += b_storage.bias_groups(k) * columns * b_storage.biases_each() * b_storage.bias_type(a_type).size;
  }
  return bytes;
}

std::string Variant::missing(const Device& device) const {
  for (const std::string& lack : device.lacking())
    if (std::find(needs.begin(), needs.end(), lack) != needs.end()) return lack;
  return {};
}

bool Form::supports(const MatmulSpec& s) const {
  auto within = [](uint32_t value, const Range& r) { return value >= r.least && value <= r.most; };
  unsigned type = operand_type(s.a_type);
  if (type == kOperandTypeCount || !without[type].empty()) return false;
  for (unsigned i = 1; i < s.parts(); i++)
    if (!within(s.part_n(i), n)) return false;
  if (s.row_invariant && !rows_alike(s)) return false;
  return within(s.m, m_of(s)) && within(s.n, n) && within(s.k, k) && within(s.batch, batch) && (layouts >> s.layout_index() & 1) &&
         (bias || !s.bias) && (c || !s.c) && (alpha || s.alpha == 1.0f) &&
         (n_values.empty() || std::find(n_values.begin(), n_values.end(), s.n) != n_values.end());
}

const Form* Variant::form(const MatmulSpec& s) const {
  for (const Form& f : forms)
    if (f.takes(s)) return &f;
  return nullptr;
}

bool Variant::supports(const MatmulSpec& s) const {
  const Form* f = form(s);
  return f && f->supports(s);
}

unsigned MatmulSpec::specialization() const {
  return layout_index() | operand_type(a_type) << kTypeShift | (b_storage.index() * kEnds + end()) << kKindShift;
}

std::string Variant::lacks(const MatmulSpec& s) const {
  if (const Form* f = form(s)) return f->lacks(s);
  unsigned storages = 0, ends = 0;  // the ends: with that storage
  for (const Form& f : forms) {
    storages |= f.storages;
    if (f.storages >> s.b_storage.index() & 1) ends |= f.ends;
  }
  std::string list;
  auto add = [&list](const std::string& name) { list += (list.empty() ? "" : ", ") + name; };
  for (unsigned i = 0; !ends && i < kStorages; i++)
    if (storages >> i & 1) add(Storage::name_of(i));
  if (!ends) return "b is " + s.b_storage.name() + "; it takes " + list;
  for (unsigned i = 0; i < kEnds; i++)
    if (ends >> i & 1) add(kEndNames[i]);
  if (s.swiglu) return "it has no swiglu of " + s.b_storage.name() + " weights";
  return "there are " + std::to_string(s.parts()) + " matrices B" + (s.b_storage.is_dense() ? "" : " of " + s.b_storage.name()) +
         "; it takes " + list;
}

std::string Form::lacks(const MatmulSpec& s) const {
  unsigned type = operand_type(s.a_type);
  if (type == kOperandTypeCount) return "no kernel takes " + s.a_type.name();
  if (!without[type].empty()) return "it does not take " + s.a_type.name() + ": " + without[type];
  auto range = [](const char* name, uint32_t value, const Range& r) -> std::string {
    if (value >= r.least && value <= r.most) return {};
    std::string limit = r.least == r.most
                            ? std::to_string(r.least)
                            : "in " + std::to_string(r.least) + " to " + (r.most == UINT32_MAX ? "any" : std::to_string(r.most));
    return std::string(name) + "=" + std::to_string(value) + " is not " + limit;
  };
  if (s.row_invariant && !rows_alike(s)) return "a row's bits may depend on m or on its place, and row_invariant is True";
  for (auto& text : {range(s.row_invariant ? "with row_invariant m" : "m", s.m, m_of(s)), range("n", s.n, n),
                     range("n", s.parts() > 1 ? s.part_n(1) : s.n, n), range("n", s.parts() > 2 ? s.part_n(2) : s.n, n), range("k", s.k, k),
                     range("batch", s.batch, batch)})
    if (!text.empty()) return text;
  if (!n_values.empty() && std::find(n_values.begin(), n_values.end(), s.n) == n_values.end()) {
    std::string list;
    for (uint32_t v : n_values) list += (list.empty() ? "" : ", ") + std::to_string(v);
    return "n=" + std::to_string(s.n) + " is not one of " + list;
  }
  if (!(layouts >> s.layout_index() & 1)) {
    std::string list;
    for (unsigned i = 0; i < kLayouts; i++)
      if (layouts >> i & 1) list += (list.empty() ? "" : ", ") + std::string(kLayoutNames[i]);
    bool turned = layouts >> (s.layout_index() ^ 2u) & 1;  // b's is the second letter
    return std::string("layout ") + s.layout() + " is not one of " + list +
           (turned ? std::string(" (") + kLayoutNames[s.layout_index() ^ 2u] + ": transpose_b=" + (s.transpose_b ? "False" : "True") + ")"
                   : "");
  }
  if (s.bias && !bias) return "it takes no bias";
  if (s.c && !c) return "it adds no beta*c";
  if (s.alpha != 1.0f && !alpha) return "it takes no alpha";
  return {};
}

void Registry::add(Variant v) {
  auto it = by_id_.find(v.id);
  if (it != by_id_.end()) {
    v.index = it->second->index;
    *it->second = std::move(v);
    return;
  }
  v.index = static_cast<uint32_t>(variants_.size());
  variants_.push_back(std::move(v));
  by_id_[variants_.back().id] = &variants_.back();
}

void Registry::remove(const std::string& id) {
  auto it = by_id_.find(id);
  if (it == by_id_.end()) return;
  it->second->enabled = false;  // its place stays, for prepared calls
  by_id_.erase(it);
}

const Variant* Registry::find(const std::string& id) const {
  auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : it->second;
}

std::string Registry::alternatives(const MatmulSpec& spec, const Device& device) const {
  std::string list;
  int count = 0;
  for (const Variant& v : variants_)
    if (v.enabled && v.runs_on(device) && v.supports(spec) && count++ < 5) list += (list.empty() ? "" : ", ") + v.id;
  if (list.empty()) return "; no variant supports " + spec.text();
  return "; supported by " + list + (count > 5 ? " and " + std::to_string(count - 5) + " more" : "");
}

}  // namespace metalmm
