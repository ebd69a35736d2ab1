// Runs the C++ that tools/ptx.py makes from PTX, on top of cuda_shim.h. Registers are bits in unsigned integers. It is
// stricter than a GPU. These faults end the launch with an error that names the instruction:
//   an address that is unaligned, outside the block's shared memory, or not in a tensor passed to the launch;
//   lanes that meet at different shuffles or barriers, or never arrive;
//   ld.global.nc from a tensor that the kernel also writes;
//   a race for a word of shared memory. By the rules of PTX another lane's access is complete after bar.sync, or within
//   a warp after bar.warp.sync; a shuffle orders nothing.

#pragma once
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace ptx {

// an instruction: its line in the PTX, and the source line
struct At { int line, source; };

// Macros of builtins: g++ compiles them much faster than calls, and there are thousands.
#define AS_FLOAT(bits) __builtin_bit_cast(float, (uint32_t)(bits))
#define AS_BITS(v) __builtin_bit_cast(uint32_t, (float)(v))
inline int32_t wide(int16_t v) { return v; }
inline uint32_t wide(uint16_t v) { return v; }
inline int64_t wide(int32_t v) { return v; }
inline uint64_t wide(uint32_t v) { return v; }
template <class T> T shift_left(T v, uint32_t n) { return n < 8 * sizeof(T) ? v << n : 0; }
template <class T> T shift_right(T v, uint32_t n) { return n < 8 * sizeof(T) ? v >> n : v < 0 ? -1 : 0; }
inline float flush(float v) { return fpclassify(v) == FP_SUBNORMAL ? copysignf(0.0f, v) : v; }
// PTX's only NaN
inline float nan_or(float a, float b, float v) { return a != a || b != b ? AS_FLOAT(0x7fffffff) : v; }
// -0 is less than +0
inline float lesser(float a, float b) { return a < b || (a == b && signbit(a)) ? a : b; }
inline float greater(float a, float b) { return a > b || (a == b && signbit(b)) ? a : b; }

// Lanes must meet at the same instruction.
struct Meeting {
    At first{};
    void come(unsigned arrived, At at) {
        if (arrived == 0) first = at;
        else if (first.line != at.line)
            shim_trap("lane %u comes to line %d of the PTX (source line %d), others to line %d (%d)", threadIdx.x,
                      at.line, at.source,
                      first.line, first.source);
    }
};

struct Moment {                                        // barriers passed by the block, and by the warp
    unsigned block, warp;
    bool operator==(const Moment &other) const { return block == other.block && warp == other.warp; }
};
struct Word {                                          // of shared memory: its last accesses
    int writer = -1;
    Moment written;
    struct { Moment when; uint32_t lanes = 0; } read[THREADS / 32];
};

// The cost of an instruction's accesses, if `counting`. The n-th accesses of a warp's lanes count as one joint access.
struct Cost {
    int line, source, shared, writes, bytes;           // bytes: per lane
    // joint accesses; the 32-byte sectors or wavefronts that they take, and the fewest possible for so many lanes
    int64_t accesses, units, least;
    // A wavefront serves 128 bytes of different banks: 8 lanes at 16 bytes each, 16 at 8, 32 at 4.
    void add(const std::map<unsigned, uint64_t> &lanes) {
        std::set<uint64_t> sectors, phases;
        std::map<unsigned, std::map<unsigned, std::set<uint64_t>>> words;                 // by phase and bank
        for (auto [lane, address] : lanes)
            for (int i = 0; i < bytes; i++) {
                const unsigned phase = lane / (bytes > 4 ? 128 / bytes : 32);
                sectors.insert((address + i) / 32);
                phases.insert(phase);
                words[phase][(address + i) / 4 % 32].insert((address + i) / 4);
            }
        size_t wavefronts = 0;
        for (auto &[phase, banks] : words) {
            size_t most = 0;
            for (auto &[bank, different] : banks) most = std::max(most, different.size());
            wavefronts += most;
        }
        accesses++;
        units += shared ? wavefronts : sectors.size();
        least += shared ? phases.size() : (lanes.size() * bytes + 31) / 32;
    }
};
inline bool counting;
inline std::map<int, Cost> costs;

struct Block {
    std::map<std::pair<int, unsigned>, unsigned> times;                                   // instruction, thread
    // (instruction, warp, time): the lanes' addresses
    std::map<std::tuple<int, unsigned, unsigned>, std::map<unsigned, uint64_t>> together;
    void count(At at, uint64_t address, int bytes, bool in_shared, bool writes) {
        const int key = 2 * at.line + in_shared;       // a copy counts as both kinds
        costs.try_emplace(key, Cost{at.line, at.source, in_shared, writes, bytes, 0, 0, 0});
        together[{key, threadIdx.x / 32, times[{key, threadIdx.x}]++}][threadIdx.x % 32] = address;
    }
    ~Block() { for (auto &[key, lanes] : together) costs[std::get<0>(key)].add(lanes); }
    Meeting at_barrier;
    struct Warp { ShimBarrier barrier{32}; Meeting at_barrier, at_shuffle; } warps[THREADS / 32];
    std::vector<Word> words = std::vector<Word>(shim_block->shared.size() - 4);     // ShimBlock rounds up by four
};
inline std::unique_ptr<Block> block;
inline Block::Warp &warp() { return block->warps[threadIdx.x / 32]; }
inline void begin() { if (threadIdx.x == 0) block = std::make_unique<Block>(); }       // fibers start in order

inline void touch(At at, Word &word, bool writes) {
    const unsigned me = threadIdx.x, my_warp = me / 32;
    const Moment now = {shim_block->barrier.round, warp().barrier.round};
    auto unordered = [&](unsigned its_warp, Moment then) {
        return then.block == now.block && (its_warp != my_warp || then == now);
    };
    if (word.writer >= 0 && word.writer != (int)me && unordered(word.writer / 32, word.written))
        shim_trap("race: thread %u at line %d of the PTX (source line %d) %s what thread %d wrote since the last barrier", me, at.line,
                  at.source, writes ? "overwrites" : "reads", word.writer);
    for (unsigned w = 0; writes && w < THREADS / 32; w++)
        if (word.read[w].lanes & ~(w == my_warp ? 1u << me % 32 : 0) && unordered(w, word.read[w].when))
            shim_trap("race: thread %u at line %d of the PTX (source line %d) overwrites what warp %u read since the last barrier", me,
                      at.line, at.source, w);
    auto &read = word.read[my_warp];
    if (writes) { word.writer = (int)me; word.written = now; }
    else read = {now, (read.when == now ? read.lanes : 0) | 1u << me % 32};
}

// the address of dynamic shared memory: the system's kilobyte comes before it
constexpr uint32_t SHARED = 1024;
template <class T, int N> T *shared(At at, uint32_t address, bool writes) {
    // races are checked per word
    const uint32_t bytes = N * sizeof(T), from = address - SHARED, words = (bytes + 3) / 4;
    if (address % bytes || from / 4 + words > block->words.size())
        shim_trap("line %d of the PTX (source line %d): %u bytes at byte %d of %zu of shared memory", at.line, at.source,
                  bytes, (int)from,
                  block->words.size() * 4);
    if (counting) block->count(at, address, bytes, true, writes);
    for (uint32_t i = 0; i < words; i++) touch(at, block->words[from / 4 + i], writes);
    return (T *)((char *)shim_block->shared.data() + from);
}

struct Tensor { uint64_t from, size, cached, written; };               // cached: read by ld.global.nc
inline std::vector<Tensor> tensors;
enum Way { LOAD, LOAD_CACHED, STORE };
template <class T, int N> T *global(At at, uint64_t address, Way way) {
    const uint64_t bytes = N * sizeof(T);
    auto has = [&](const Tensor &t) { return address - t.from < t.size && address - t.from + bytes <= t.size; };
    const auto tensor = std::find_if(tensors.begin(), tensors.end(), has);
    if (address % bytes || tensor == tensors.end())
        shim_trap("line %d of the PTX (source line %d): %d bytes at address %#llx, which is %s", at.line, at.source,
                  (int)bytes,
                  (unsigned long long)address, address % bytes ? "not aligned" : "in no tensor");
    (way == STORE ? tensor->written : tensor->cached) |= way != LOAD;
    if (tensor->written && tensor->cached)
        shim_trap("line %d of the PTX (source line %d): the kernel writes a tensor that ld.global.nc reads", at.line,
                  at.source);
    if (counting) block->count(at, address, (int)bytes, false, way == STORE);
    return (T *)address;
}

// An asynchronous copy may write at any time until it is awaited, so races are checked at both ends.
template <int BYTES> void copy_async(At at, uint32_t to, uint64_t from) {
    const void *source = global<uint32_t, BYTES / 4>(at, from, LOAD);
    copy_begin<BYTES>(shared<uint32_t, BYTES / 4>(at, to, true), source);
}
template <int LEFT> void copies_wait(At at) {
    const auto &groups = shim_block->copies[threadIdx.x].groups;
    for (size_t n = 0; n + LEFT < groups.size(); n++)
        for (auto &one : groups[n])
            for (int i = 0; i < one.bytes; i += 4)
                touch(at, block->words[((char *)one.to - (char *)shim_block->shared.data() + i) / 4], true);
    copy_wait<LEFT>();
}

template <class T, int N> const T *param(At at, uint64_t address, const void *args, size_t size) {
    const uint64_t from = address - (uint64_t)args;
    if (address % (N * sizeof(T)) || from > size - N * sizeof(T))
        shim_trap("line %d of the PTX (source line %d): byte %lld of %zu of the arguments", at.line, at.source,
                  (long long)from, size);
    return (const T *)address;
}

inline void block_barrier(At at) {
    block->at_barrier.come(shim_block->barrier.arrived, at);
    __syncthreads();
}
inline void warp_barrier(At at, uint32_t members) {
    if (members != ~0u) shim_trap("line %d of the PTX: a barrier for only part of a warp", at.line);
    warp().at_barrier.come(warp().barrier.arrived, at);
    warp().barrier.wait();
}
inline uint32_t shuffle_xor(At at, uint32_t v, uint32_t mask, uint32_t clamp, uint32_t members) {
    if (members != ~0u || clamp != 31 || mask > 31)
        shim_trap("line %d of the PTX: a shuffle in only part of a warp", at.line);
    warp().at_shuffle.come(shim_block->warps[threadIdx.x / 32]->barrier.arrived, at);
    return AS_BITS(__shfl_xor_sync(members, AS_FLOAT(v), (int)mask));
}

}

extern "C" {
// tensors of the next launch
void ptx_tensors(const ptx::Tensor *all, int count) { ptx::tensors.assign(all, all + count); }
// costs since counting was turned on
int ptx_costs(ptx::Cost *to, int room) {
    ptx::block.reset();
    int n = 0;
    for (auto &[line, cost] : ptx::costs) if (n < room) to[n++] = cost;
    ptx::costs.clear();
    return n;
}
void ptx_count(int on) { ptx::counting = on; ptx::costs.clear(); }
}
