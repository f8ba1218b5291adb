// As much of Foundation as type-checking csrc/metal for macOS takes; facts of the public API, nothing behind them.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef unsigned long NSUInteger;
typedef long NSInteger;
typedef bool BOOL;  // as on arm64
typedef struct _NSZone NSZone;
typedef double NSTimeInterval;
typedef double CFTimeInterval;
typedef struct __IOSurface *IOSurfaceRef;
typedef int kern_return_t;
typedef unsigned int task_id_token_t;
typedef struct {
  NSUInteger location, length;
} NSRange;
#define YES __objc_yes
#define NO __objc_no
#define nil nullptr
#define NS_ENUM(type, name) enum name : type name; enum name : type
#define NS_OPTIONS(type, name) type name; enum : type  // in C++ a plain integer
static inline NSRange NSMakeRange(NSUInteger location, NSUInteger length) { return (NSRange){location, length}; }

@class NSString, NSCoder, NSError, NSURL, NSBundle, NSDate, NSNumber, NSObject;
typedef NSString *NSErrorUserInfoKey;
typedef NSString *NSErrorDomain;
typedef NSObject *dispatch_data_t;
typedef NSObject *dispatch_queue_t;

@protocol NSObject
- (instancetype)retain;
- (oneway void)release;
- (instancetype)autorelease;
- (BOOL)respondsToSelector:(SEL)selector;
+ (BOOL)instancesRespondToSelector:(SEL)selector;
@end
@protocol NSCopying
@end
@protocol NSCoding
@end
@protocol NSSecureCoding <NSCoding>
@end
typedef struct {
  unsigned long state;
  id *itemsPtr;
  unsigned long *mutationsPtr;
  unsigned long extra[5];
} NSFastEnumerationState;
@protocol NSFastEnumeration
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState *)state objects:(id [])buffer count:(NSUInteger)count;
@end

__attribute__((objc_root_class)) @interface NSObject <NSObject>
+ (instancetype)alloc;
- (instancetype)init;
@end
@interface NSAutoreleasePool : NSObject
- (void)drain;
@end
@interface NSString : NSObject <NSCopying>
+ (instancetype)stringWithUTF8String:(const char *)text;
- (const char *)UTF8String;
- (BOOL)isEqualToString:(NSString *)other;
@end
@interface NSArray<Item> : NSObject <NSFastEnumeration>
+ (instancetype)arrayWithObject:(Item)object;
+ (instancetype)arrayWithObjects:(const Item [])objects count:(NSUInteger)count;
- (NSUInteger)count;
- (Item)objectAtIndex:(NSUInteger)index;
@end
@interface NSDictionary<Key, Value> : NSObject <NSFastEnumeration>
- (NSUInteger)count;
- (Value)objectForKey:(Key)key;
@end
@interface NSError : NSObject
- (NSString *)localizedDescription;
- (NSInteger)code;
@end
@interface NSURL : NSObject
+ (NSURL *)fileURLWithPath:(NSString *)path;
@end
@interface NSData : NSObject
- (const void *)bytes;
- (NSUInteger)length;
@end
@interface NSProcessInfo : NSObject
+ (NSProcessInfo *)processInfo;
- (BOOL)isLowPowerModeEnabled;
- (NSString *)operatingSystemVersionString;
@end
