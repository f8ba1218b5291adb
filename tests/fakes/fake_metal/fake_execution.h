// How committed command buffers run, one after another, on whichever thread comes by.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>

#include "fake.h"

namespace fake {

extern std::mutex& queue_mutex;  // held for moments
extern std::condition_variable& changed;
extern std::deque<FakeCommandBuffer*>& pending;
extern size_t in_hand;

double now();  // seconds
MTLSize groups_of(MTLSize threads, MTLSize threadgroup);
void set_in_flight(FakeCommandBuffer* commands, bool is);
bool run_next();
void wake_gpu();
void run_log(FakeCommandBuffer* commands);  // all that was encoded
std::vector<Command>* take_log();
void give_log(std::vector<Command>* log);

}  // namespace fake
