// Ownership of Objective-C objects without ARC, so that clang compiles the same files on Linux.
#pragma once
#import <Foundation/Foundation.h>

#include <string>
#include <utility>

namespace metalmm::metal {

template <class T>
class Handle {
 public:
  Handle() = default;
  static Handle adopt(T object) {  // of a method whose name begins with new, alloc, copy or init
    Handle h;
    h.object_ = object;
    return h;
  }
  static Handle share(T object) { return adopt([object retain]); }
  Handle(const Handle& other) : object_([other.object_ retain]) {}
  Handle(Handle&& other) noexcept : object_(std::exchange(other.object_, nil)) {}
  Handle& operator=(Handle other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Handle() { [object_ release]; }
  T get() const { return object_; }
  explicit operator bool() const { return object_ != nil; }

 private:
  T object_ = nil;
};

// Unlike @autoreleasepool it is drained when a C++ exception passes, too. Of the run time itself: no object is made.
extern "C" void* objc_autoreleasePoolPush(void);
extern "C" void objc_autoreleasePoolPop(void* pool);
class AutoreleasePool {
 public:
  AutoreleasePool() : pool_(objc_autoreleasePoolPush()) {}
  ~AutoreleasePool() { objc_autoreleasePoolPop(pool_); }
  AutoreleasePool(const AutoreleasePool&) = delete;

 private:
  void* pool_;
};

inline NSString* ns_string(const std::string& text) { return [NSString stringWithUTF8String:text.c_str()]; }
inline std::string text_of(NSString* text) { return text ? [text UTF8String] : ""; }
inline std::string text_of(NSError* error) { return error ? text_of([error localizedDescription]) : "no reason given"; }

}  // namespace metalmm::metal
