// Classes of Metal that only carry values, and what makes one.
#pragma once
#include <map>

#include "fake.h"

@interface FakeCounterSet : FakeObject <MTLCounterSet>
@end

namespace {

// What such a class keeps, by selector.
struct Values {
  std::map<std::string, int64_t> numbers;
  std::map<std::string, id> objects;
  ~Values() {
    for (auto& [key, object] : objects) [object release];
  }
  void set(const char* key, id object) {
    [object retain];
    [objects[key] release];
    objects[key] = object;
  }
};
inline Values& values(void*& state) { return fake::state<Values>(state); }

[[maybe_unused]] inline bool store(NSError** where, NSError* error) {
  if (where) *where = error;
  return false;
}

}  // namespace

#define VALUES values(fakeState)
#define NUMBER(type, getter, setter)          \
  -(type)getter {                             \
    return (type)VALUES.numbers[#getter];     \
  }                                           \
  -(void)setter : (type)value {               \
    VALUES.numbers[#getter] = (int64_t)value; \
  }
#define OBJECT(type, getter, setter) \
  -(type)getter {                    \
    return VALUES.objects[#getter];  \
  }                                  \
  -(void)setter : (type)value {      \
    VALUES.set(#getter, value);      \
  }
#define LIFE                          \
  FAKE_LIFE(Values)                   \
  -(id)copyWithZone : (NSZone*)zone { \
    (void)zone;                       \
    return [self retain];             \
  }
