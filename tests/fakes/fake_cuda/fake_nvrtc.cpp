// An NVRTC that compiles for the CPU: what it gives for machine code is a shared object with the CPU device's runtime, which
// fake_kernels.cpp runs. $METALMM_FAKE_NVRTC is the C++ compiler with its flags, $METALMM_FAKE_PARSED the flags that name the runtime's
// headers as that compiler keeps them once parsed.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// nvrtcResult
enum Result { kSuccess, kOutOfMemory, kCreation, kInvalidInput, kInvalidProgram, kInvalidOption, kCompilation };

struct Program {
  std::string text, name, log, code;
  bool compiled = false;
};

std::mutex& mutex = *new std::mutex;
std::set<Program*>& programs = *new std::set<Program*>;

bool is_live(Program* p) {
  std::lock_guard lock(mutex);
  return programs.count(p) > 0;
}

// Of a loop's look at whether it shall end; see csrc/msl/runtime/cuda/kernel.h.
const char* const kStops = R"(
extern "C" __attribute__((visibility("default"))) volatile unsigned metalmm_stop;
volatile unsigned metalmm_stop = 0;
namespace metalmm { namespace msl {
static inline __attribute__((unused)) bool goes_on() { return !metalmm_stop; }
} }
)";

// Of a kernel in debug mode: csrc/msl/runtime/cuda/kernel.h, and what python/metalmm/ptx.py adds.
const char* const kWatched = R"(
#include "cuda/arguments.h"
extern "C" __attribute__((visibility("default"))) metalmm::cuda::Watch metalmm_watch;
metalmm::cuda::Watch metalmm_watch = {};
extern "C" __attribute__((visibility("default"))) char metalmm_files[];
char metalmm_files[] = "of_the_fake.metal";
extern "C" __attribute__((visibility("default"))) unsigned long metalmm_own[];
unsigned long metalmm_own[] = {0};
)";

// Which arguments are references to what may travel in a launch's block, and behind them the cluster: abi::KernelInfo does not say.
const char* const kNumbers = R"(
namespace metalmm_fake {
template <class P> struct metalmm_fake_number { static constexpr unsigned char metalmm_fake_value = 0; };
template <class T> struct metalmm_fake_number<const T&> { static constexpr unsigned char metalmm_fake_value = sizeof(T) > 1024 ? 0 : alignof(T) > 16 ? alignof(T) : 16; };
template <class P, class = void> struct metalmm_fake_shares { static constexpr unsigned char metalmm_fake_value = 1; };
template <class T> struct metalmm_fake_shares<T&, decltype(void(T::METALMM_CLUSTER))> { static constexpr unsigned char metalmm_fake_value = T::METALMM_CLUSTER; };
template <class F> struct metalmm_fake_all;
template <class... P> struct metalmm_fake_all<void (*)(P...)> {
  static constexpr unsigned char metalmm_fake_list[] = {metalmm_fake_number<P>::metalmm_fake_value...,
      ((metalmm_fake_shares<P>::metalmm_fake_value - 1) + ... + 1)};
};
}
extern "C" __attribute__((visibility("default"))) const unsigned char* const metalmm_fake_numbers;
const unsigned char* const metalmm_fake_numbers = metalmm_fake::metalmm_fake_all<metalmm_function_type>::metalmm_fake_list;
)";

std::string quoted(const std::string& s) {
  std::string out = "'";
  for (char c : s) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// Empty, or what NVRTC (or a rule of this project) has against them.
std::string check(const std::vector<std::string>& options) {
  bool arch = false, standard = false, device = false, folder = false;
  for (const std::string& o : options) {
    if (o.rfind("-arch=sm_", 0) == 0 && o.size() >= 11 && o.find_first_not_of("0123456789", 9) >= o.size() - (o.back() == 'a')) {
      arch = true;
    } else if (o == "-std=c++17") {
      standard = true;
    } else if (o == "-default-device") {
      device = true;
    } else if (o.rfind("-I", 0) == 0) {
      struct stat s;
      if (stat(o.c_str() + 2, &s) || !S_ISDIR(s.st_mode)) return "no such folder: " + o;
      folder = true;
    } else if (!(o.rfind("-D", 0) == 0 && o.size() > 2) && o != "--device-int128" && o != "-lineinfo") {
      return "nvrtc: error: unrecognized option " + o;
    }
  }
  return arch && standard && device && folder ? "" : "one of -arch=sm_NN, -std=c++17, -default-device, -I is missing";
}

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

Result compile(Program& p, const std::vector<std::string>& options, const std::string& folder) {
  std::string said, defines;
  bool stops = false, watched = false;
  for (const std::string& o : options) {
    said += " " + o;
    stops |= o == "-DMETALMM_STOPS", watched |= o == "-DMETALMM_WATCHED";
    if (o.rfind("-I", 0) == 0) defines += " " + quoted(o);  // what -D says is of the GPU's runtime
  }
  std::string source = folder + "/kernel.cpp", code = folder + "/kernel.so", log = folder + "/log";
  std::string given =
      "\nextern \"C\" __attribute__((visibility(\"default\"))) const char metalmm_fake_options[];\n"
      "const char metalmm_fake_options[] = R\"fake(" +
      said + " )fake\";\n";
  std::ofstream(source) << (stops ? kStops : "") << (watched ? kWatched : "") << p.text << kNumbers << given;
  const char* compiler = std::getenv("METALMM_FAKE_NVRTC");
  if (!compiler) return p.log = "METALMM_FAKE_NVRTC is not set: tests/fakes/on_fake_cuda.py does it", kCompilation;
  const char* parsed = p.text.rfind("#include", 0) == 0 ? std::getenv("METALMM_FAKE_PARSED") : nullptr;  // else it asks for more of them
  std::string command = std::string(compiler) + (parsed ? std::string(" ") + parsed : "") + defines + " -o " + quoted(code) + " " +
                        quoted(source) + " >" + quoted(log) + " 2>&1";
  int status = std::system(command.c_str());
  p.log = read(log);
  if (status) return kCompilation;
  p.code = read(code);
  return p.code.empty() ? kCompilation : kSuccess;
}

}  // namespace

FAKE_EXPORT int nvrtcVersion(int* major, int* minor) {
  *major = 12, *minor = 8;
  return kSuccess;
}

FAKE_EXPORT const char* nvrtcGetErrorString(int r) {
  const char* texts[] = {"NVRTC_SUCCESS",
                         "NVRTC_ERROR_OUT_OF_MEMORY",
                         "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
                         "NVRTC_ERROR_INVALID_INPUT",
                         "NVRTC_ERROR_INVALID_PROGRAM",
                         "NVRTC_ERROR_INVALID_OPTION",
                         "NVRTC_ERROR_COMPILATION"};
  return r >= 0 && r <= kCompilation ? texts[r] : "NVRTC_ERROR unknown";
}

FAKE_EXPORT int nvrtcCreateProgram(Program** out, const char* text, const char* name, int headers, const char* const*, const char* const*) {
  if (!out || !text || headers) return kInvalidInput;
  *out = new Program{text, name ? name : "default_program", {}, {}};
  std::lock_guard lock(mutex);
  programs.insert(*out);
  return kSuccess;
}

FAKE_EXPORT int nvrtcDestroyProgram(Program** p) {
  if (!p || !is_live(*p)) return kInvalidProgram;
  {
    std::lock_guard lock(mutex);
    programs.erase(*p);
  }
  delete *p;
  *p = nullptr;
  return kSuccess;
}

FAKE_EXPORT int nvrtcCompileProgram(Program* p, int count, const char* const* options) {
  if (!is_live(p)) return kInvalidProgram;
  std::vector<std::string> given(options, options + count);
  if (p->log = check(given); !p->log.empty()) return kInvalidOption;
  const char* tmp = std::getenv("TMPDIR");
  std::string folder = std::string(tmp && *tmp ? tmp : "/tmp") + "/fake-nvrtc-XXXXXX";
  if (!mkdtemp(folder.data())) return kOutOfMemory;
  Result r = compile(*p, given, folder);
  for (const char* name : {"/kernel.cpp", "/kernel.so", "/log"}) unlink((folder + name).c_str());
  rmdir(folder.c_str());
  p->compiled = r == kSuccess;
  return r;
}

FAKE_EXPORT int nvrtcGetProgramLogSize(Program* p, size_t* size) {
  if (!is_live(p)) return kInvalidProgram;
  *size = p->log.size() + 1;
  return kSuccess;
}
FAKE_EXPORT int nvrtcGetProgramLog(Program* p, char* out) {
  if (!is_live(p)) return kInvalidProgram;
  std::memcpy(out, p->log.c_str(), p->log.size() + 1);
  return kSuccess;
}
FAKE_EXPORT int nvrtcGetCUBINSize(Program* p, size_t* size) {
  if (!is_live(p) || !p->compiled) return kInvalidProgram;
  *size = p->code.size();
  return kSuccess;
}
FAKE_EXPORT int nvrtcGetCUBIN(Program* p, char* out) {
  if (!is_live(p) || !p->compiled) return kInvalidProgram;
  std::memcpy(out, p->code.data(), p->code.size());
  return kSuccess;
}
FAKE_EXPORT int nvrtcGetPTXSize(Program* p, size_t* size) { return nvrtcGetCUBINSize(p, size); }
FAKE_EXPORT int nvrtcGetPTX(Program* p, char* out) { return nvrtcGetCUBIN(p, out); }

// Programs that nobody destroyed.
FAKE_EXPORT int fake_nvrtc_live() {
  std::lock_guard lock(mutex);
  return static_cast<int>(programs.size());
}
