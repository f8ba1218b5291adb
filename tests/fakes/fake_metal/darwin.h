// What csrc/metal takes of Apple's Foundation and GNUstep's does not have; included first.
#pragma once
#import <Foundation/Foundation.h>

@interface NSProcessInfo (Darwin)
- (BOOL)isLowPowerModeEnabled;
@end
